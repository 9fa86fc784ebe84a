"""The parts of a training step that know no model: batches in parts, precision, clear errors."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

# What TensorFlow says when two strategies gave their sums the same numbers.
_CONFUSED = ("Shape mismatch in the collective instance", "is joining a group with size")


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the norm of all gradients together, in float32; None counts nothing."""
    # The cast: under a policy such as "bfloat16" the gradients have several dtypes.
    return tf.linalg.global_norm([tf.cast(g, tf.float32) for g in gradients if g is not None])


def in_parts(
    function: Callable[..., tuple[tf.Tensor, Any, list[Any]]], batch: Any, *, count: int
) -> tuple[tf.Tensor, Any, list[Any]]:
    """Runs a pass over a batch in parts: the sum of the losses, all predictions, summed gradients.

    The parts have equally many images, but for the first, which takes what is left over.
    """
    if count == 1:
        return function(*batch)
    size = tf.shape(next(v for v in keras.tree.flatten(batch) if v is not None))[0]
    length = size // count
    first = size - length * (count - 1)
    loss, y_pred, gradients = function(*_rows(batch, 0, first))
    arrays = [
        tf.TensorArray(value.dtype, count - 1, element_shape=[None, *value.shape[1:]])
        for value in keras.tree.flatten(y_pred)
    ]

    def body(index: tf.Tensor, loss: tf.Tensor, arrays: Any, known: Any) -> Any:
        more_loss, more, further = function(*_rows(batch, first + index * length, length))
        written = [
            array.write(index, value)
            for array, value in zip(arrays, keras.tree.flatten(more), strict=True)
        ]
        summed = [a + b for a, b in zip(known, _known(further), strict=True)]
        return index + 1, loss + more_loss, written, summed

    _, loss, arrays, sums = tf.while_loop(
        lambda index, *_: index < count - 1, body, (tf.constant(0), loss, arrays, _known(gradients))
    )
    whole = [
        tf.concat([value, *tf.unstack(array.stack(), count - 1)], axis=0)
        for value, array in zip(keras.tree.flatten(y_pred), arrays, strict=True)
    ]
    total = iter(sums)
    return (
        loss,
        keras.tree.pack_sequence_as(y_pred, whole),
        [None if gradient is None else next(total) for gradient in gradients],
    )


def _rows(batch: Any, start: Any, count: Any) -> Any:
    """Takes some rows of each tensor, of a number that XLA knows before it runs."""

    def take(value: tf.Tensor | None) -> tf.Tensor | None:
        if value is None:
            return None
        begin = tf.concat([[start], tf.zeros(value.shape.rank - 1, tf.int32)], axis=0)
        rows = tf.slice(value, begin, tf.concat([[count], tf.shape(value)[1:]], axis=0))
        return tf.ensure_shape(rows, [None, *value.shape[1:]])

    return keras.tree.map_structure(take, batch)


def _known(gradients: Sequence[Any]) -> list[Any]:
    return [gradient for gradient in gradients if gradient is not None]


def raise_clearly(error: tf.errors.OpError, strategy: tf.distribute.Strategy) -> None:
    """Raises a ValueError in place of an error that a user of strategies can do something about."""
    # In one process nothing but the failure of another replica cancels a step.
    is_alone = isinstance(strategy, tf.distribute.MirroredStrategy)
    is_cancelled = isinstance(error, tf.errors.CancelledError) and is_alone
    if is_cancelled or any(mark in str(error) for mark in _CONFUSED):
        raise ValueError(
            "The sums over replicas do not fit together. Either another MirroredStrategy of this "
            "process has trained another model, and TensorFlow takes the sums of both for one: "
            "restart the process, and make one strategy for all its models. Or workers of a "
            "cluster train different models: start all of them with the same arguments."
        ) from error


def with_loss_scale(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Wraps an optimizer for gradients in float16, once."""
    # Keras looks at the model's own policy alone, not at its layers'.
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)


def reducible(logs: dict[str, Any]) -> dict[str, Any]:
    """Gives scalars the axis that Keras reduces over when there are several workers."""
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return logs
    return {name: tf.reshape(value, [1]) for name, value in logs.items()}


def wants_xla(request: bool | str) -> bool:
    """Returns whether XLA compiles: what was asked, or on GPUs for "auto"."""
    if request != "auto":
        return bool(request)
    is_tpu = isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
    return bool(tf.config.list_physical_devices("GPU")) and not is_tpu
