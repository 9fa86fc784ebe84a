"""Gradients for the forms that fuse: a gradient that needs an intermediate prevents the fusing.

Each form runs fused where no gradient is asked for. With one, what is element-wise is a loop that
XLA compiles, which takes no part in the matrix products: those are oneDNN's.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import record

from keras_vit.backend.tensorflow_graph import constant, count, reshape, swap_middle

Form = Callable[[Any, Any, Any], Any]

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715  # arXiv 1606.08415, Section 2


def gelu(x: Any) -> Any:
    """Returns exact GELU, which fuses as `tf.nn.gelu` does: that has an Erfc, ONNX has none."""
    return 0.5 * x * (1 + tf.math.erf(_SQRT_HALF * x))


def gelu_tanh(x: Any) -> Any:
    """Returns GELU with a tanh in it."""
    return tf.nn.gelu(x, approximate=True)


GELUS = {"gelu": gelu, "gelu_tanh": gelu_tanh}


def _gelu_slope(x: Any) -> Any:
    density = tf.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + tf.math.erf(_SQRT_HALF * x)) + x * density


def _gelu_tanh_slope(x: Any) -> Any:
    tanh = tf.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x * x * x))
    inner = _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBIC * x * x)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner


_SLOPES = {"gelu": _gelu_slope, "gelu_tanh": _gelu_tanh_slope}


@functools.cache
def dense_gelu(activation: str) -> Form:
    """Returns GELU of rows (R, D) times a kernel (D, M) plus a bias (M,).

    Where a gradient may be asked for in float32, the product (R, M) is kept. In 16 bits, which
    matrix units compute fast, it is computed anew for the gradient: that takes less time than a
    GELU that is not fused, and keeps two tensors (R, M) less.
    """

    def forward(rows: Any, kernel: Any, bias: Any) -> Any:
        hidden = _product(rows, kernel, bias)
        keeps = rows.dtype == tf.float32 and record.could_possibly_record()

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
def layer_norm(epsilon: float) -> Form:
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
