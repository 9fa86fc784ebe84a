"""The forms that TensorFlow's graph optimizer turns into single oneDNN kernels, and gradients.

A gradient that needs an intermediate prevents the fusing, so each form has its own.
"""

import contextlib
import contextvars
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit.backend import plain, private

# The constants of each graph, by name: a tensor would keep its graph from ever being freed.
_constants: weakref.WeakKeyDictionary[tf.Graph, dict[Any, str]] = weakref.WeakKeyDictionary()


def constant(value: Any, dtype: Any, *, beside: Any) -> Any:
    """Returns a tensor with the value: the same wherever a graph asks for it on a device.

    Args:
        value: a number, or a list or tuple of numbers.
        dtype: of the tensor.
        beside: a tensor of the device.
    """
    if tf.executing_eagerly():
        return tf.constant(value, dtype)
    graph = tf.compat.v1.get_default_graph()
    names = _constants.setdefault(graph, {})
    key = (str(value), dtype, beside.device)
    if key not in names:
        with tf.control_dependencies(None):
            names[key] = tf.constant(value, dtype).name
    return graph.get_tensor_by_name(names[key])


def reshape(x: Any, shape: tuple[Any, ...]) -> Any:
    """Reshapes x; sides are integers, -1 for an open one, or tensors."""
    if any(isinstance(side, tf.Tensor) for side in shape):
        return tf.reshape(x, shape)
    return tf.raw_ops.Reshape(tensor=x, shape=constant(shape, tf.int32, beside=x))


def as_rows(x: Any) -> Any:
    """Returns x (..., D) as rows (R, D): what it was reshaped from, if that is them."""
    width = x.shape[-1]
    if tf.is_symbolic_tensor(x) and x.op.type == "Reshape":
        source = x.op.inputs[0]
        if source.shape.rank == 2 and source.shape[-1] == width:
            return source
    return reshape(x, (-1, width))


def count(rows: Any) -> Any:
    """Returns the number of rows (R, D), (1,)."""
    if rows.shape[0] is not None:
        return constant([rows.shape[0]], tf.int32, beside=rows)
    begin, end = (constant([place], tf.int32, beside=rows) for place in (0, 1))
    shape = tf.raw_ops.Shape(input=rows)
    return tf.raw_ops.StridedSlice(input=shape, begin=begin, end=end, strides=end)


def swap_middle(x: Any) -> Any:
    """Transposes (B, N, H, K) to (B, H, N, K), or back."""
    return tf.raw_ops.Transpose(x=x, perm=constant((0, 2, 1, 3), tf.int32, beside=x))


Form = Callable[[Any, Any, Any], Any]
_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715  # arXiv 1606.08415, Section 2
_QUICK = 1.702  # likewise


def gelu(x: Any) -> Any:
    """Returns exact GELU, which fuses as `tf.nn.gelu` does: that has an Erfc, ONNX has none."""
    return 0.5 * x * (1 + tf.math.erf(_SQRT_HALF * x))


def gelu_tanh(x: Any) -> Any:
    """Returns GELU with a tanh in it."""
    return tf.nn.gelu(x, approximate=True)


def quick_gelu(x: Any) -> Any:
    """Returns x * sigmoid(1.702 x), OpenAI's approximation of GELU."""
    return x * tf.sigmoid(_QUICK * x)


GELUS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu}


def _gelu_slope(x: Any) -> Any:
    density = tf.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + tf.math.erf(_SQRT_HALF * x)) + x * density


def _gelu_tanh_slope(x: Any) -> Any:
    tanh = tf.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x * x * x))
    inner = _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBIC * x * x)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner


def _quick_gelu_slope(x: Any) -> Any:
    sigmoid = tf.sigmoid(_QUICK * x)
    return sigmoid * (1 + _QUICK * x * (1 - sigmoid))


_SLOPES = {
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "quick_gelu": _quick_gelu_slope,
}


@functools.cache
def dense_gelu(activation: str) -> Form:
    """Returns GELU of rows (R, D) times a kernel (D, M) plus a bias (M,).

    Where a gradient may be asked for in float32, the product (R, M) is kept. In 16 bits, which
    matrix units compute fast, it is computed anew for the gradient: that takes less time than a
    GELU that is not fused, and keeps two tensors (R, M) less.
    """

    def forward(rows: Any, kernel: Any, bias: Any) -> Any:
        hidden = _product(rows, kernel, bias)
        keeps = rows.dtype == tf.float32 and private.is_taped()

        def backward(above: Any) -> tuple[Any, Any, Any]:
            kept = hidden if keeps else _product(rows, _again(kernel, after=above), bias)
            inner = _gelu_change(activation)(kept, above)
            return (
                tf.matmul(inner, kernel, transpose_b=True),
                tf.matmul(rows, inner, transpose_a=True),
                tf.raw_ops.BiasAddGrad(out_backprop=inner),
            )

        if keeps:
            return _gelu(activation)(hidden), backward
        return GELUS[activation](hidden), backward

    fused: Form = tf.custom_gradient(forward)
    return fused


@functools.cache
def layer_norm_form(epsilon: float) -> Form:
    """Returns the normalisation of rows (R, D) with gamma and beta (D,)."""

    @tf.function(jit_compile=True, autograph=False)
    def change(rows: Any, gamma: Any, above: Any) -> tuple[Any, Any, Any]:
        dtype = rows.dtype
        rows, gamma, above = (tf.cast(x, tf.float32) for x in (rows, gamma, above))
        width = rows.shape[-1]
        centred = rows - _sums(rows) / width
        variance = _sums(centred * centred) / width
        scale = tf.math.rsqrt(variance + epsilon)
        normal, inner = centred * scale, above * gamma
        mean = _sums(inner) / width
        along = _sums(inner * normal) / width
        changes = (
            scale * (inner - mean - normal * along),
            tf.reduce_sum(above * normal, axis=0),
            tf.reduce_sum(above, axis=0),
        )
        return tuple(tf.cast(x, dtype) for x in changes)

    def forward(rows: Any, gamma: Any, beta: Any) -> Any:
        def backward(above: Any) -> Any:
            return change(rows, gamma, above)

        return _normalize(rows, epsilon) * gamma + beta, backward

    fused: Form = tf.custom_gradient(forward)
    return fused


@tf.custom_gradient
def attend(query: Any, key: Any, value: Any) -> Any:
    """Returns softmax(query key^T) value, (B, N, H, K), for (B, H, N, K) each.

    The weights (B, H, N, N) are kept for the gradient where they are no larger than a hidden layer
    of the MLP, which is kept too: (B, N, 4HK). Of more tokens they are computed anew, which costs
    3 % of a step.
    """
    weights = _weigh(query, key)
    taken = swap_middle(tf.matmul(weights, value))
    tokens, size = key.shape[2:]
    keeps = tokens is not None and tokens <= 4 * size

    def backward(above: Any) -> tuple[Any, Any, Any]:
        kept = weights if keeps else _weigh(query, _again(key, after=above))
        heads = swap_middle(above)
        change = _softmax_change(
            kept, tf.matmul(heads, value, transpose_b=True), _row_sums(taken, above)
        )
        return (
            tf.matmul(change, key),
            tf.matmul(change, query, transpose_a=True),
            tf.matmul(kept, heads, transpose_a=True),
        )

    return taken, backward


# Bytes; Eigen's largest vectors (EIGEN_MAX_ALIGN_BYTES).
ALIGNMENT = 64
ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda x: x,
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "quick_gelu": quick_gelu,
    "tanh": tf.math.tanh,
}

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
    normalize = layer_norm_form(epsilon)
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
        x = attend(query, key, value)  # (B, N, H, K)
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


def _weigh(query: Any, key: Any) -> Any:
    return tf.nn.softmax(tf.matmul(query, key, transpose_b=True))


@tf.function(jit_compile=True, autograph=False)
def _softmax_change(weights: Any, above: Any, along: Any) -> Any:
    """Returns the gradient of a softmax (B, H, N, N) as one loop, in float32.

    Args:
        weights: what the softmax returned.
        above: the gradient of the weights.
        along: (B, N, H, 1), the sum of their product over each row. It is also that of what the
            weights have taken and its gradient, which are smaller (arXiv 2205.14135, Appendix B.2).
    """
    along = tf.transpose(along, (0, 2, 1, 3))
    change = tf.cast(weights, tf.float32) * (tf.cast(above, tf.float32) - along)
    return tf.cast(change, above.dtype)


@tf.function(jit_compile=True, autograph=False)
def _row_sums(x: Any, y: Any) -> Any:
    """Returns the sums of x * y over the last axis, which is kept, in float32."""
    return _sums(tf.cast(x, tf.float32) * tf.cast(y, tf.float32))


def _sums(x: Any) -> Any:
    """Returns the sums over the last axis, which is kept: for XLA, which adds one by one.

    A product with ones uses whole vectors.
    """
    width = x.shape[-1]
    sums = tf.matmul(tf.reshape(x, (-1, width)), tf.ones((width, 1), x.dtype))
    return tf.reshape(sums, (*keras.ops.shape(x)[:-1], 1))


def _product(rows: Any, kernel: Any, bias: Any) -> Any:
    return tf.nn.bias_add(tf.matmul(rows, kernel), bias)


def _again(value: Any, *, after: Any) -> Any:
    """Returns the value for what shall be computed a second time, not before `after` is there.

    Of the value itself it would be the same product, which the optimizer computes once, and keeps.
    """
    with tf.control_dependencies([after]):
        return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)


@functools.cache
def _gelu(activation: str) -> Callable[[Any], Any]:
    """Returns GELU as one loop."""

    @tf.function(jit_compile=True, autograph=False)
    def loop(x: Any) -> Any:
        return GELUS[activation](x)

    compiled: Callable[[Any], Any] = loop
    return compiled


@functools.cache
def _gelu_change(activation: str) -> Callable[[Any, Any], Any]:
    """Returns the gradient of GELU as one loop, in float32."""

    @tf.function(jit_compile=True, autograph=False)
    def change(x: Any, above: Any) -> Any:
        slope = _SLOPES[activation](tf.cast(x, tf.float32))
        return tf.cast(slope * tf.cast(above, tf.float32), above.dtype)

    loop: Callable[[Any, Any], Any] = change
    return loop


def _normalize(rows: Any, epsilon: float) -> Any:
    """Normalises rows (R, D) in the form that becomes _MklLayerNorm: a batch norm of R channels."""
    # As constants the two Fills would be folded, and the form lost: the default hides the size.
    size = tf.raw_ops.PlaceholderWithDefault(input=count(rows), shape=(1,))
    values: tuple[Any, ...] = ([], 0.0, 1.0)
    nothing, zero, one = (constant(value, tf.float32, beside=rows) for value in values)
    normal, *_ = tf.raw_ops.FusedBatchNormV3(
        x=reshape(rows, (1, -1, rows.shape[-1], 1)),
        scale=tf.raw_ops.Fill(dims=size, value=one),
        offset=tf.raw_ops.Fill(dims=size, value=zero),
        mean=nothing,
        variance=nothing,
        epsilon=epsilon,
        data_format="NCHW",
        is_training=True,
    )
    return reshape(normal, (-1, rows.shape[-1]))


def _shape(x: Any) -> tuple[Any, ...]:
    """Returns the shape of x, of which only the batch, that is not read, may be None.

    `keras.ops.shape` would add five operations to the graph for it, each time.
    """
    shape = tuple(x.shape)
    return keras.ops.shape(x) if None in shape[1:] else shape


def _dense(rows: Any, kernel: Any, bias: Any, activation: str | None) -> Any:
    if activation in GELUS:
        return dense_gelu(activation)(rows, kernel, bias)
    return ACTIVATIONS[activation](tf.nn.bias_add(tf.matmul(rows, kernel), bias))


def _may_fuse() -> bool:
    if tf.executing_eagerly() or not _has_cpu_alone():
        return False
    return not (_portable.get() or private.is_traced_for_onnx())


@functools.cache
def _has_cpu_alone() -> bool:
    return all(device.device_type == "CPU" for device in tf.config.list_physical_devices())
