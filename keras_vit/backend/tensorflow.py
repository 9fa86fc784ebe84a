"""The forms that TensorFlow's graph optimizer turns into single oneDNN kernels.

They are what its remapper recognises (tensorflow/core/grappler/optimizers/remapper.cc); what they
become is held by tests/test_backend_kernels.py. Their gradients are in `tensorflow_gradients`.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit.backend import plain, tensorflow_gradients
from keras_vit.backend.tensorflow_graph import as_rows, constant, reshape, swap_middle

# Bytes; Eigen's largest vectors (EIGEN_MAX_ALIGN_BYTES).
ALIGNMENT = 64

ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda x: x,
    "gelu_tanh": tensorflow_gradients.gelu_tanh,
    "gelu": tensorflow_gradients.gelu,
    "tanh": tf.math.tanh,
}

# The module of Keras whose function converts by tf2onnx.
_ONNX_EXPORTER = "keras.src.export.onnx"

_portable = contextvars.ContextVar("portable", default=False)


@contextlib.contextmanager
def portable_forms() -> Iterator[None]:
    """Inside this scope graphs hold no form that only TensorFlow knows; for converters."""
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


def dense(
    x: Any, kernel: Any, bias: Any, activation: str | None = None, *, residual: Any = None
) -> Any:
    """Multiplies x (..., D) by a kernel (D, M), adds the bias (M,) and applies the activation.

    MatMul, BiasAdd and GELU become one kernel only for rank 2, and only when the bias is a BiasAdd;
    so do MatMul, BiasAdd and AddN, which sums a residual (..., M). An AddV2 would have to prove
    that it broadcasts nothing, which it cannot with an unknown batch.
    """
    kernel, bias = tf.convert_to_tensor(kernel), tf.convert_to_tensor(bias)
    rows = _dense(as_rows(x), kernel, bias, activation)
    if residual is not None:
        rows = tf.add_n([as_rows(residual), rows])
    return reshape(rows, (-1, *_shape(x)[1:-1], kernel.shape[-1]))


def layer_norm(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Normalises x (..., D) over the last axis, in float32, then applies gamma and beta (D,)."""
    if not _may_fuse():
        return plain.layer_norm(x, gamma, beta, epsilon=epsilon)
    gamma, beta = tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta)
    normalize = tensorflow_gradients.layer_norm(epsilon)
    return reshape(normalize(as_rows(x), gamma, beta), (-1, *_shape(x)[1:]))


def softmax(x: Any) -> Any:
    """Returns the softmax of x over the last axis, in its dtype; oneDNN sums in float32."""
    if not _may_fuse():
        return plain.softmax(x)
    return tf.nn.softmax(x)


def self_attention(qkv: Any, num_heads: int) -> Any:
    """Returns what tokens take from each other, (B, N, D), for (B, N, 3D) query, key and value."""
    _, tokens, width = _shape(qkv)
    size = width // 3 // num_heads
    # One transposition for all three, of rank 4: TFLite has none of more for every chip.
    x = swap_middle(reshape(as_rows(qkv), (-1, tokens, 3 * num_heads, size)))
    query, key, value = tf.split(x, 3, axis=1)  # (B, H, N, K) each
    query = query * constant(size**-0.5, query.dtype, beside=query)
    if _may_fuse():
        x = tensorflow_gradients.attend(query, key, value)  # (B, N, H, K)
    else:
        weights = plain.softmax(tf.matmul(query, key, transpose_b=True))  # (B, H, N, N)
        x = swap_middle(tf.matmul(weights, value))
    return reshape(x, (-1, tokens, width // 3))


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


def is_concrete(x: Any) -> bool:
    """Whether x has values now, and is no part of a graph that is being traced."""
    return not (isinstance(x, keras.KerasTensor) or tf.is_symbolic_tensor(x))


def replica_id() -> Any:
    """Returns which replica of a strategy this computation is: 0 to replicas - 1, 0 without one."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return 0
    return context.replica_id_in_sync_group


def _shape(x: Any) -> tuple[Any, ...]:
    """Returns the shape of x, of which only the batch, that is not read, may be None.

    `keras.ops.shape` would add five operations to the graph for it, each time.
    """
    shape = tuple(x.shape)
    return keras.ops.shape(x) if None in shape[1:] else shape


def _dense(rows: Any, kernel: Any, bias: Any, activation: str | None) -> Any:
    if activation in tensorflow_gradients.GELUS:
        return tensorflow_gradients.dense_gelu(activation)(rows, kernel, bias)
    return ACTIVATIONS[activation](tf.nn.bias_add(tf.matmul(rows, kernel), bias))


def _may_fuse() -> bool:
    if tf.executing_eagerly() or not _has_cpu_alone():
        return False
    return not (_portable.get() or _is_traced_for_onnx())


def _is_traced_for_onnx() -> bool:
    """Whether `keras.Model.export` traces this graph for tf2onnx, which it says nowhere.

    Any model may have our layers inside, so no method of ours would be called before.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == _ONNX_EXPORTER:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _has_cpu_alone() -> bool:
    return all(device.device_type == "CPU" for device in tf.config.list_physical_devices())
