"""Steps of optimizers as one kernel for each variable, where Keras takes four passes or twelve.

For float32 alone, as TensorFlow's kernels want all of their arrays in one type. What they compute
is held to Keras' own by tests/test_optimizers.py.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def momentum_step(
    variable: Any, memory: keras.Variable, gradient: Any, *, rate: Any, momentum: float
) -> bool:
    """Makes m = g + momentum * m and w = w - rate * m, if one kernel can, and returns whether.

    Args:
        variable: w, as a strategy gives it to an optimizer: this replica's.
        memory: m.
        gradient: g.
        rate: learning rate.
        momentum: share of the old m in the new.
    """
    if not _is_plain(variable, [memory], gradient):
        return False
    tf.raw_ops.ResourceApplyMomentum(
        var=variable.handle,
        accum=memory.value.handle,
        lr=tf.cast(rate, tf.float32),
        grad=gradient,
        momentum=momentum,
    )
    return True


def adam_step(
    variable: Any,
    memories: Sequence[keras.Variable],
    gradient: Any,
    *,
    rate: Any,
    betas: tuple[float, float],
    epsilon: float,
    step: Any,
) -> bool:
    """Makes a step of Adam, if one kernel can, and returns whether.

    Args:
        variable: what is trained, as a strategy gives it to an optimizer: this replica's.
        memories: averages of the gradient and of its square.
        gradient: of the variable.
        rate: learning rate.
        betas: share of the old average in the new, of each.
        epsilon: added to the root of the second.
        step: which step this is, from 1.
    """
    if not _is_plain(variable, memories, gradient):
        return False
    powers = [tf.pow(tf.constant(beta, tf.float32), tf.cast(step, tf.float32)) for beta in betas]
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=memories[0].value.handle,
        v=memories[1].value.handle,
        beta1_power=powers[0],
        beta2_power=powers[1],
        lr=tf.cast(rate, tf.float32),
        beta1=betas[0],
        beta2=betas[1],
        epsilon=epsilon,
        grad=gradient,
    )
    return True


def _is_plain(variable: Any, memories: Sequence[keras.Variable], gradient: Any) -> bool:
    """Whether all is dense float32; an embedding's gradient, for one, has only some rows."""
    arrays = [variable, gradient, *memories]
    return isinstance(gradient, tf.Tensor) and {
        keras.backend.standardize_dtype(array.dtype) for array in arrays
    } == {"float32"}
