"""The weights of a network by path, with what an exporter folds into them."""

from collections.abc import Mapping

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.layers.resnet import STANDARDIZATION_EPSILON

Arrays = Mapping[str, np.ndarray]


def folded_arrays(network: keras.Model, config: ViTConfig) -> dict[str, np.ndarray]:
    """Returns every weight by its path, float32, with constant work done once.

    The scale of attention 1/sqrt(K) goes into the query's kernel and bias, the standardisation of
    the stem's convolutions into their kernels, the class token into its position.
    """
    arrays = {
        weight.path: np.asarray(keras.ops.convert_to_numpy(weight), np.float32)
        for weight in network.weights
    }
    scale = np.float32((config.hidden_dim // config.num_heads) ** -0.5)
    for path, value in arrays.items():
        layer, _, name = path.rpartition("/")
        if layer.endswith("attention/qkv"):
            arrays[path] = np.concatenate(
                [value[..., : config.hidden_dim] * scale, value[..., config.hidden_dim :]], axis=-1
            )
        elif layer == "pooling/query":
            arrays[path] = value * scale
        elif layer.startswith("stem/") and name == "kernel":
            arrays[path] = _standardized(value)
    return arrays


def same_padding(size: int, *, kernel: int, stride: int) -> tuple[int, int]:
    """Returns the cells that "same" padding adds before and after one side of an image.

    Example:
        >>> same_padding(224, kernel=7, stride=2)
        (2, 3)
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def _standardized(kernel: np.ndarray) -> np.ndarray:
    wide = kernel.astype(np.float64)
    centred = wide - wide.mean(axis=(0, 1, 2))
    folded = centred / (wide.std(axis=(0, 1, 2)) + STANDARDIZATION_EPSILON)
    return np.asarray(folded, np.float32)
