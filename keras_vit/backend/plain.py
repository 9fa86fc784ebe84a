"""The forms in `keras.ops` alone, for any Keras backend."""

from typing import Any

import keras
import numpy as np

ALIGNMENT = 1  # bytes

ACTIVATIONS = {
    None: lambda x: x,
    "gelu_tanh": lambda x: keras.ops.gelu(x, approximate=True),
    "gelu": lambda x: keras.ops.gelu(x, approximate=False),
    "tanh": keras.ops.tanh,
}


def dense(rows: Any, kernel: Any, bias: Any, activation: str | None = None) -> Any:
    """Multiplies rows (R, D) by a kernel (D, M), adds the bias (M,) and applies the activation."""
    return ACTIVATIONS[activation](keras.ops.add(keras.ops.matmul(rows, kernel), bias))


def space_to_depth(images: Any, block: int) -> Any:
    """Cuts images (B, H, W, C) into blocks (B, H/block, W/block, block * block * C)."""
    _, height, width, channels = images.shape
    x = keras.ops.reshape(images, (-1, height // block, block, width // block, block, channels))
    x = keras.ops.transpose(x, (0, 1, 3, 2, 4, 5))
    return keras.ops.reshape(x, (-1, height // block, width // block, block * block * channels))


def adopt(array: np.ndarray) -> Any:
    """Returns the array's values in a form that a variable takes; the array must not change."""
    return array


def uninitialized(shape: Any, dtype: Any = None) -> Any:
    """Returns an array whose values nobody will read; a Keras initializer."""
    return keras.ops.zeros(shape, dtype)


def replica_id() -> Any:
    """Returns which replica this computation is: 0, since arrays are global here."""
    return 0


class ExactTrainer:
    """Adds nothing: Keras' own training step is right where arrays are global, as on JAX."""
