"""The forms that TensorFlow's graph optimizer turns into single oneDNN kernels."""

from typing import Any

import numpy as np
import tensorflow as tf

# Bytes; Eigen's largest vectors (EIGEN_MAX_ALIGN_BYTES).
ALIGNMENT = 64

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


def adopt(array: np.ndarray) -> Any:
    """Returns a tensor with the array's values that may keep its memory; the array must not change.

    TensorFlow copies a NumPy array twice; through DLPack it takes the memory over, where that is
    aligned as its kernels need it.
    """
    usable = array.flags.c_contiguous and array.flags.writeable and array.size
    if usable and array.dtype == np.float32 and array.ctypes.data % ALIGNMENT == 0:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


def uninitialized(shape: Any, dtype: Any = None) -> Any:
    """Returns an array whose values nobody will read; a Keras initializer.

    Its memory is never touched, so it costs neither the time nor the pages of zeros.
    """
    return tf.raw_ops.Empty(shape=shape, dtype=dtype or tf.float32, init=False)


def replica_id() -> Any:
    """Returns which replica of a strategy this computation is: 0 to replicas - 1, 0 without one."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return 0
    return context.replica_id_in_sync_group
