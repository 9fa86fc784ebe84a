"""Vision Transformers in Keras: models, published weights, training, export."""

import importlib
from typing import TYPE_CHECKING, Any

from keras_vit import environment

__version__ = "0.1.0"

__all__ = ["VARIANTS", "ExactModel", "ExactTrainer", "FullySharded", "ViTConfig",
           "VisionTransformer", "decode_predictions", "freeze", "layers", "layout_map", "load",
           "load_adapter", "lora", "losses", "merge_lora", "optimizers", "parameter_count",
           "preprocess_input", "resize", "save_adapter", "variant", "weights"]  # fmt: skip

environment.enable_onednn()
# A saved model loads only where Keras knows its classes, so a program that imports the package gets
# them all. The command line imports what it needs: its help waits for no framework.
if TYPE_CHECKING or not environment.is_command():
    with environment.without_collection():
        import keras

        from keras_vit import applications, layers, losses, optimizers, weights
        from keras_vit.adaptation import freeze, load_adapter, lora, merge_lora, save_adapter
        from keras_vit.applications import *  # noqa: F403
        from keras_vit.backend import ExactTrainer
        from keras_vit.config import ViTConfig
        from keras_vit.model import ExactModel, VisionTransformer
        from keras_vit.parallel import FullySharded, layout_map
        from keras_vit.preprocessing import decode_predictions, preprocess_input
        from keras_vit.variants import VARIANTS, parameter_count, variant
        from keras_vit.weights import resize
        from keras_vit.weights.building import load
    __all__ += applications.__all__
    if keras.backend.backend() == "tensorflow":
        # TensorFlow alone can do this.
        from keras_vit.exporting import export

        __all__ += ["export"]

# They come when they are asked for: each brings TensorFlow's data sets, or matplotlib.
_LATER = ("data", "evaluation", "explain", "training")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_LATER])
