"""Operations in the graph forms that TensorFlow fuses into oneDNN kernels, with their gradients.

An intermediate result that a gradient uses prevents the fusion, so each form has its own gradient.

Shapes: B images, N tokens, R = B * N rows, D hidden_dim, M units of a dense layer, H heads, K = D /
H; in images (B, H, W, C) H and W pixels, C channels.
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

# What takes the place of `plain`'s.
__all__ = ["ACTIVATIONS", "ALIGNMENT", "dense", "empty", "from_numpy_without_copy",
           "fuses_scale", "is_concrete", "layer_norm", "replica_id", "self_attention",
           "softmax", "space_to_depth", "values_of"]  # fmt: skip

Form = Callable[[Any, Any, Any], Any]

# Bytes; Eigen's largest vectors (EIGEN_MAX_ALIGN_BYTES).
ALIGNMENT = 64

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715  # arXiv 1606.08415, Section 2
_QUICK = 1.702  # likewise

_portable = contextvars.ContextVar("portable", default=False)
# The constants of each graph, by name: a reference to a tensor would keep its graph alive.
_constants: weakref.WeakKeyDictionary[tf.Graph, dict[Any, str]] = weakref.WeakKeyDictionary()


def constant(value: Any, dtype: Any, *, beside: Any) -> Any:
    """Returns a constant tensor, one for each graph and device.

    Args:
        value: a number, or a list or tuple of numbers.
        dtype: of the tensor.
        beside: a tensor on the device.
    """
    if tf.executing_eagerly():
        return tf.constant(value, dtype)
    graph = tf.compat.v1.get_default_graph()
    names = _constants.setdefault(graph, {})
    key = (str(value), dtype, beside.device)
    if key not in names:
        # What the first caller must wait for does not concern later users of the constant.
        with tf.control_dependencies(None):
            names[key] = tf.constant(value, dtype).name
    return graph.get_tensor_by_name(names[key])


def reshape(x: Any, shape: tuple[Any, ...]) -> Any:
    """Reshapes x; sides are integers, tensors, or -1 for one that follows."""
    if any(isinstance(side, tf.Tensor) for side in shape):
        return tf.reshape(x, shape)
    return tf.raw_ops.Reshape(tensor=x, shape=constant(shape, tf.int32, beside=x))


def as_rows(x: Any) -> Any:
    """Returns x (..., D) as rows (R, D), without a second Reshape if x is one of such rows."""
    width = x.shape[-1]
    if tf.is_symbolic_tensor(x) and x.op.type == "Reshape":
        source = x.op.inputs[0]
        if source.shape.rank == 2 and source.shape[-1] == width:
            return source
    return reshape(x, (-1, width))


def row_count(rows: Any) -> Any:
    """Returns the number of rows (R, D), as a vector (1,)."""
    if rows.shape[0] is not None:
        return constant([rows.shape[0]], tf.int32, beside=rows)
    begin, end = (constant([index], tf.int32, beside=rows) for index in (0, 1))
    shape = tf.raw_ops.Shape(input=rows)
    return tf.raw_ops.StridedSlice(input=shape, begin=begin, end=end, strides=end)


def swap_middle(x: Any) -> Any:
    """Transposes (B, N, H, K) to (B, H, N, K), or back."""
    return tf.raw_ops.Transpose(x=x, perm=constant((0, 2, 1, 3), tf.int32, beside=x))


def gelu(x: Any) -> Any:
    """Returns exact GELU; it fuses like `tf.nn.gelu`, whose Erfc ONNX does not have."""
    return 0.5 * x * (1 + tf.math.erf(_SQRT_HALF * x))


def gelu_tanh(x: Any) -> Any:
    """Returns the tanh approximation of GELU."""
    return tf.nn.gelu(x, approximate=True)


def quick_gelu(x: Any) -> Any:
    """Returns x * sigmoid(1.702 x), OpenAI's approximation of GELU."""
    return x * tf.sigmoid(_QUICK * x)


GELUS: dict[str | None, Callable[[Any], Any]] = {
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "quick_gelu": quick_gelu,
}
ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda x: x,
    **GELUS,
    "tanh": tf.math.tanh,
}


def _gelu_derivative(x: Any) -> Any:
    # GELU is x P(x), P the normal distribution function, p its density: the slope is P + x p.
    density = tf.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + tf.math.erf(_SQRT_HALF * x)) + x * density


def _gelu_tanh_derivative(x: Any) -> Any:
    # The product rule on x (1 + tanh u) / 2; the slope of tanh is 1 - tanh^2, `inner` that of u.
    tanh = tf.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x * x * x))
    inner = _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBIC * x * x)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner


def _quick_gelu_derivative(x: Any) -> Any:
    # The slope of s = sigmoid(1.702 x) is 1.702 s (1 - s), so that of x s is s + 1.702 x s (1 - s).
    sigmoid = tf.sigmoid(_QUICK * x)
    return sigmoid * (1 + _QUICK * x * (1 - sigmoid))


_GELU_DERIVATIVES = {
    "gelu": _gelu_derivative,
    "gelu_tanh": _gelu_tanh_derivative,
    "quick_gelu": _quick_gelu_derivative,
}


@functools.cache
def dense_gelu(activation: str) -> Form:
    """Returns a function of rows (R, D), kernel (D, M) and bias (M,): GELU(rows kernel + bias).

    In float32, where a gradient may be asked for, the hidden layer (R, M) is stored. In 16 bits,
    which matrix units compute fast, the backward pass recomputes it: that takes less time than a
    GELU that is not fused, and stores two tensors (R, M) less.
    """

    def forward(rows: Any, kernel: Any, bias: Any) -> Any:
        hidden = _linear(rows, kernel, bias)
        is_stored = rows.dtype == tf.float32 and private.is_taped()

        def backward(dy: Any) -> tuple[Any, Any, Any]:
            # The slope of GELU needs its input, which is stored, or computed again from the rows.
            x = hidden if is_stored else _linear(rows, _barrier(kernel, after=dy), bias)
            dx = _gelu_gradient(x, dy, activation)
            return (
                tf.matmul(dx, kernel, transpose_b=True),
                tf.matmul(rows, dx, transpose_a=True),
                tf.raw_ops.BiasAddGrad(out_backprop=dx),
            )

        if is_stored:
            # A stored input is an output of its product, which then does not fuse with GELU: one
            # XLA loop takes the place of GELU's separate operations.
            return _gelu(hidden, activation), backward
        return GELUS[activation](hidden), backward

    form: Form = tf.custom_gradient(forward)
    return form


@functools.cache
def layer_norm_form(epsilon: float) -> Form:
    """Returns a function of rows (R, D), gamma (D,) and beta (D,): their layer normalisation."""

    @tf.function(jit_compile=True, autograph=False)
    def gradients(x: Any, gamma: Any, dy: Any) -> tuple[Any, Any, Any]:
        dtype = x.dtype
        # In 16 bits the sums over a row would lose most of their digits.
        x, gamma, dy = (tf.cast(value, tf.float32) for value in (x, gamma, dy))
        width = x.shape[-1]
        # Computed again: rows whose statistics the backward pass reads do not become _MklLayerNorm.
        centred = x - _row_sums(x) / width
        variance = _row_sums(centred * centred) / width
        scale = tf.math.rsqrt(variance + epsilon)
        normalized, dnormalized = centred * scale, dy * gamma
        # A row that is shifted, or scaled, has the same result: dx has no component along either.
        mean = _row_sums(dnormalized) / width
        projection = _row_sums(dnormalized * normalized) / width
        dx = scale * (dnormalized - mean - normalized * projection)
        dgamma, dbeta = tf.reduce_sum(dy * normalized, axis=0), tf.reduce_sum(dy, axis=0)
        return tuple(tf.cast(value, dtype) for value in (dx, dgamma, dbeta))

    def forward(rows: Any, gamma: Any, beta: Any) -> Any:
        def backward(dy: Any) -> Any:
            return gradients(rows, gamma, dy)

        return _normalize(rows, epsilon) * gamma + beta, backward

    form: Form = tf.custom_gradient(forward)
    return form


@tf.custom_gradient
def attend(query: Any, key: Any, value: Any) -> Any:
    """Returns softmax(query key^T) value, (B, N, H, K), for (B, H, N, K) each.

    The weights (B, H, N, N) are stored for the gradient if they are no larger than a hidden layer
    of the MLP (B, N, 4HK), which is stored too. For more tokens the backward pass recomputes them,
    which costs 3 % of a step.
    """
    weights = _attention_weights(query, key)
    y = swap_middle(tf.matmul(weights, value))
    tokens, size = key.shape[2:]
    is_stored = tokens is not None and tokens <= 4 * size

    def backward(dy: Any) -> tuple[Any, Any, Any]:
        p = weights if is_stored else _attention_weights(query, _barrier(key, after=dy))
        dheads = swap_middle(dy)
        dp = tf.matmul(dheads, value, transpose_b=True)
        # A row's sum(p * dp) equals sum(y * dy), of smaller tensors (arXiv 2205.14135, B.2).
        dlogits = _softmax_gradient(p, dp, _row_products(y, dy))
        return (
            # Of the query as it comes, scaled: TensorFlow itself derives the scaling, outside.
            tf.matmul(dlogits, key),
            tf.matmul(dlogits, query, transpose_a=True),
            tf.matmul(p, dheads, transpose_a=True),
        )

    return y, backward


@contextlib.contextmanager
def portable_forms() -> Iterator[None]:
    """A scope in which graphs have no form that only TensorFlow runs; for converters."""
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


def dense(
    x: Any, kernel: Any, bias: Any, activation: str | None = None, *, residual: Any = None
) -> Any:
    """Returns activation(x kernel + bias) + residual, (..., M), for x (..., D), kernel (D, M).

    MatMul, BiasAdd and GELU fuse only for rank 2, and only if the bias is a BiasAdd; so do MatMul,
    BiasAdd and AddN, which adds the residual. AddV2 fuses only if its shapes are known to be equal,
    which they are not with an unknown batch.
    """
    kernel, bias = tf.convert_to_tensor(kernel), tf.convert_to_tensor(bias)
    if activation in GELUS:
        rows = dense_gelu(activation)(as_rows(x), kernel, bias)
    else:
        rows = ACTIVATIONS[activation](_linear(as_rows(x), kernel, bias))
    if residual is not None:
        rows = tf.add_n([as_rows(residual), rows])
    return reshape(rows, (-1, *_shape(x)[1:-1], kernel.shape[-1]))


def fuses_scale(x: Any) -> bool:
    """Whether to scale the kernel of a product of x (B, N, D), and not its result, takes less time.

    The kernel is read and written once for it, the result three and two times, because the product
    cannot add the residual then. That needs a known number of rows.
    """
    *outer, width = x.shape
    return None not in outer and 5 * math.prod(outer) > 2 * width


def layer_norm(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Normalises x (..., D) over the last axis, in float32, then applies gamma and beta (D,)."""
    if not _may_fuse():
        return plain.layer_norm(x, gamma, beta, epsilon=epsilon)
    gamma, beta = tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta)
    normalize = layer_norm_form(epsilon)
    return reshape(normalize(as_rows(x), gamma, beta), (-1, *_shape(x)[1:]))


def softmax(x: Any) -> Any:
    """Returns the softmax of x over the last axis, in its dtype; oneDNN sums in float32."""
    return tf.nn.softmax(x) if _may_fuse() else plain.softmax(x)


def self_attention(qkv: Any, num_heads: int, *, bias: Any = None) -> Any:
    """Returns multi-head attention (B, N, D) of queries, keys and values (B, N, 3D).

    Args:
        qkv: queries, keys and values, each by heads.
        num_heads: heads H.
        bias: added to the logits, (H, N, N), or None. With one the weights are stored.
    """
    _, tokens, width = _shape(qkv)
    size = width // 3 // num_heads
    # One transposition for all three, of rank 4: not every TFLite delegate has higher ranks.
    x = swap_middle(reshape(as_rows(qkv), (-1, tokens, 3 * num_heads, size)))
    query, key, value = tf.split(x, 3, axis=1)  # (B, H, N, K) each
    # On the queries (B, H, N, K), since the logits (B, H, N, N) are N / K times as large.
    query = query * constant(size**-0.5, query.dtype, beside=query)
    if bias is None and _may_fuse():
        x = attend(query, key, value)  # (B, N, H, K)
    else:
        logits = tf.matmul(query, key, transpose_b=True)  # (B, H, N, N)
        x = swap_middle(tf.matmul(softmax(logits if bias is None else logits + bias), value))
    return reshape(x, (-1, tokens, width // 3))


def space_to_depth(images: Any, block: int) -> Any:
    """Rearranges images (B, H, W, C) into blocks (B, H/block, W/block, block * block * C)."""
    return images if block == 1 else tf.nn.space_to_depth(images, block)


def from_numpy_without_copy(array: np.ndarray) -> Any:
    """Returns a tensor that may share the array's memory; the array must not change afterwards.

    TensorFlow copies a NumPy array twice. Through DLPack it shares the memory, if its alignment is
    that of TensorFlow's kernels.
    """
    is_plain = array.flags.c_contiguous and array.flags.writeable and array.size
    if is_plain and array.dtype == np.float32 and array.ctypes.data % ALIGNMENT == 0:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


def values_of(variable: Any) -> np.ndarray:
    """Returns the present values; in the computer's memory they are not copied."""
    value = tf.convert_to_tensor(variable.value)
    try:
        return np.asarray(memoryview(value)).view(value.dtype.as_numpy_dtype)
    except (TypeError, ValueError, RuntimeError):  # on a GPU, or of a dtype without such a view
        return np.asarray(value.numpy())


def empty(shape: Any, dtype: Any = None) -> Any:
    """Returns an array with any values; a Keras initializer for what is overwritten.

    It does not touch its memory, so it costs neither time nor pages.
    """
    return tf.raw_ops.Empty(shape=shape, dtype=dtype or tf.float32, init=False)


def is_concrete(x: Any) -> bool:
    """Whether x has values now, and is not traced."""
    return not (isinstance(x, keras.KerasTensor) or tf.is_symbolic_tensor(x))


def replica_id() -> Any:
    """Returns the index of this replica in its strategy; 0 without a strategy."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return 0
    return context.replica_id_in_sync_group


def _attention_weights(query: Any, key: Any) -> Any:
    return tf.nn.softmax(tf.matmul(query, key, transpose_b=True))


@tf.function(jit_compile=True, autograph=False)
def _softmax_gradient(p: Any, dp: Any, products: Any) -> Any:
    """Returns dp's gradient through a softmax p, (B, H, N, N); products (B, N, H, 1)."""
    products = tf.transpose(products, (0, 2, 1, 3))
    dx = tf.cast(p, tf.float32) * (tf.cast(dp, tf.float32) - products)
    return tf.cast(dx, dp.dtype)


@tf.function(jit_compile=True, autograph=False)
def _row_products(x: Any, y: Any) -> Any:
    return _row_sums(tf.cast(x, tf.float32) * tf.cast(y, tf.float32))


def _row_sums(x: Any) -> Any:
    """Returns the sums over the last axis (..., 1)."""
    width = x.shape[-1]
    # A product with ones uses vector instructions; XLA's own sum adds one number at a time.
    sums = tf.matmul(tf.reshape(x, (-1, width)), tf.ones((width, 1), x.dtype))
    return tf.reshape(sums, (*keras.ops.shape(x)[:-1], 1))


def _linear(rows: Any, kernel: Any, bias: Any) -> Any:
    return tf.nn.bias_add(tf.matmul(rows, kernel), bias)


def _barrier(value: Any, *, after: Any) -> Any:
    # From the value itself the graph optimizer would merge the recomputation with the first
    # computation, whose result would stay in memory until then.
    with tf.control_dependencies([after]):
        return tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape)


@tf.function(jit_compile=True, autograph=False)
def _gelu(x: Any, activation: str) -> Any:
    return GELUS[activation](x)


@tf.function(jit_compile=True, autograph=False)
def _gelu_gradient(x: Any, dy: Any, activation: str) -> Any:
    derivative = _GELU_DERIVATIVES[activation](tf.cast(x, tf.float32))
    return tf.cast(derivative * tf.cast(dy, tf.float32), dy.dtype)


def _normalize(rows: Any, epsilon: float) -> Any:
    """Normalises rows (R, D) in the form that becomes _MklLayerNorm: a batch norm of R channels."""
    # The placeholder keeps the two Fills from being folded to constants, which would not fuse.
    size = tf.raw_ops.PlaceholderWithDefault(input=row_count(rows), shape=(1,))
    values: tuple[Any, ...] = ([], 0.0, 1.0)
    empty, zero, one = (constant(value, tf.float32, beside=rows) for value in values)
    # As one image of R channels in NCHW, whose statistics by channel are those of each row. Gamma
    # and beta are by column, so they are applied outside.
    normalized, *_ = tf.raw_ops.FusedBatchNormV3(
        x=reshape(rows, (1, -1, rows.shape[-1], 1)),
        scale=tf.raw_ops.Fill(dims=size, value=one),
        offset=tf.raw_ops.Fill(dims=size, value=zero),
        mean=empty,
        variance=empty,
        epsilon=epsilon,
        data_format="NCHW",
        is_training=True,
    )
    return reshape(normalized, (-1, rows.shape[-1]))


def _shape(x: Any) -> tuple[Any, ...]:
    # The batch, which is not used, may be None: `keras.ops.shape` would add five operations for it.
    shape = tuple(x.shape)
    return keras.ops.shape(x) if None in shape[1:] else shape


def _may_fuse() -> bool:
    # Only the graph optimizer fuses, and only for CPUs; converters do not know the fused forms.
    if tf.executing_eagerly() or not _has_cpu_alone():
        return False
    return not (_portable.get() or private.is_traced_for_onnx())


@functools.cache
def _has_cpu_alone() -> bool:
    return all(device.device_type == "CPU" for device in tf.config.list_physical_devices())
