"""Graphs of few operations: each takes half a millisecond to make, before anything is computed.

A constant is in a graph once, and what has just been reshaped from rows is not reshaped back.
"""

from typing import Any

import tensorflow as tf

_CACHE = "_keras_vit_constants"


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
    # They live as long as their graph, which a mapping of graphs would never let go of.
    constants = getattr(graph, _CACHE, {})
    setattr(graph, _CACHE, constants)
    key = (str(value), dtype, beside.device)
    if key not in constants:
        with tf.control_dependencies(None):
            constants[key] = tf.constant(value, dtype)
    return constants[key]


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
