"""The forms that TensorFlow's graph optimizer turns into single oneDNN kernels."""

from typing import Any

import tensorflow as tf

ACTIVATIONS = {
    None: lambda x: x,
    "gelu_tanh": lambda x: tf.nn.gelu(x, approximate=True),
    "gelu": lambda x: tf.nn.gelu(x, approximate=False),
    "tanh": tf.math.tanh,
}


def dense(rows: Any, kernel: Any, bias: Any, activation: str | None = None) -> Any:
    """Multiplies rows (R, D) by a kernel (D, M), adds the bias (M,) and applies the activation.

    MatMul, BiasAdd and GELU become one kernel only for rank 2, and only when the bias is a BiasAdd.
    """
    return ACTIVATIONS[activation](tf.nn.bias_add(tf.matmul(rows, kernel), bias))


def space_to_depth(images: Any, block: int) -> Any:
    """Cuts images (B, H, W, C) into blocks (B, H/block, W/block, block * block * C)."""
    return images if block == 1 else tf.nn.space_to_depth(images, block)
