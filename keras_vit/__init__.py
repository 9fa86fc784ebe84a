"""Vision Transformers in Keras: models, published weights, training, export."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from keras_vit import environment
from keras_vit.version import __version__ as __version__

environment.enable_onednn()
if TYPE_CHECKING or not environment.is_command():
    with environment.without_collection():
        from keras_vit.names import *  # noqa: F403
        from keras_vit.names import __all__ as __all__

# They come when they are asked for: each brings TensorFlow's data sets, or matplotlib.
_LATER = ("data", "evaluation", "explain", "training")


def __getattr__(name: str) -> Any:
    if name in _LATER or (environment.is_command() and _is_module(name)):
        return importlib.import_module(f"{__name__}.{name}")
    if name in __dir__():
        return getattr(importlib.import_module(f"{__name__}.names"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    names = importlib.import_module(f"{__name__}.names").__all__
    return sorted([*names, *_LATER])


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(f"{__name__}.{name}") is not None
