"""The names of the package that need Keras; importing them registers its classes with Keras."""

import keras

from keras_vit import layers, losses, optimizers, weights
from keras_vit.adaptation import freeze, load_adapter, lora, merge_lora, save_adapter
from keras_vit.applications import (
    R26ViTB32,
    R26ViTS32,
    R50ViTB16,
    R50ViTL32,
    RViTTi16,
    ViTB8,
    ViTB16,
    ViTB32,
    ViTG14,
    ViTg14,
    ViTH14,
    ViTL16,
    ViTL32,
    ViTS16,
    ViTS32,
    ViTSo400m14,
    ViTTi16,
)
from keras_vit.backend import ExactTrainer
from keras_vit.config import ViTConfig
from keras_vit.exact import ExactModel
from keras_vit.model import VisionTransformer
from keras_vit.parallel import FullySharded, layout_map
from keras_vit.preprocessing import decode_predictions, preprocess_input
from keras_vit.variants import VARIANTS, parameter_count, variant
from keras_vit.weights import resize
from keras_vit.weights.building import load

__all__ = [
    "VARIANTS",
    "ExactModel",
    "ExactTrainer",
    "FullySharded",
    "R26ViTB32",
    "R26ViTS32",
    "R50ViTB16",
    "R50ViTL32",
    "RViTTi16",
    "ViTB8",
    "ViTB16",
    "ViTB32",
    "ViTConfig",
    "ViTG14",
    "ViTH14",
    "ViTL16",
    "ViTL32",
    "ViTS16",
    "ViTS32",
    "ViTSo400m14",
    "ViTTi16",
    "ViTg14",
    "VisionTransformer",
    "decode_predictions",
    "freeze",
    "layers",
    "layout_map",
    "load",
    "load_adapter",
    "lora",
    "losses",
    "merge_lora",
    "optimizers",
    "parameter_count",
    "preprocess_input",
    "resize",
    "save_adapter",
    "variant",
    "weights",
]

if keras.backend.backend() == "tensorflow":
    # TensorFlow alone can do this.
    from keras_vit.exporting import export

    __all__ += ["export"]
