"""Published weights: finding, fetching, checking and loading checkpoint files, and writing them."""

import importlib
from typing import TYPE_CHECKING, Any

from keras_vit.weights.catalog import catalog, repositories, resolve

if TYPE_CHECKING:
    from keras_vit.weights.building import labels
    from keras_vit.weights.loading import load_weights, resize, save_npz
    from keras_vit.weights.positions import resample_positions

__all__ = ["catalog", "labels", "load_weights", "repositories", "resample_positions",
           "resize", "resolve", "save_npz"]  # fmt: skip

# The catalogues answer without Keras; these come when they are asked for.
_LATER = {
    "labels": "building",
    "load_weights": "loading",
    "resample_positions": "positions",
    "resize": "loading",
    "save_npz": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
