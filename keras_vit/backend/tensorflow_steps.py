"""The parts of a training step that know no model: batches in parts, sums over replicas, checks."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

_UNEVEN = (
    "A training batch cannot be divided evenly among the replicas and the accumulated parts, so "
    "its gradient would be wrong; choose a batch size that can, and drop the incomplete last "
    "batch: dataset.batch(size, drop_remainder=True)."
)
# What TensorFlow says when two strategies gave their sums the same numbers.
_CONFUSED = ("Shape mismatch in the collective instance", "is joining a group with size")


def sum_over_replicas(gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients summed over all replicas; None stays None."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return list(gradients)
    # A sum, because the loss of each replica is divided by their number already.
    summed = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, _known(gradients)))
    return [None if gradient is None else next(summed) for gradient in gradients]


def replicas() -> int:
    """Returns how many replicas train together."""
    context = tf.distribute.get_replica_context()
    return 1 if context is None else int(context.num_replicas_in_sync)


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the norm of all gradients together, in float32; None counts nothing."""
    # The cast: under a policy such as "bfloat16" the gradients have several dtypes.
    return tf.linalg.global_norm([tf.cast(g, tf.float32) for g in gradients if g is not None])


def in_parts(
    function: Callable[..., tuple[tf.Tensor, Any, list[Any]]], batch: Any, *, count: int
) -> tuple[tf.Tensor, Any, list[Any]]:
    """Runs a pass over a batch in parts: mean loss, all predictions, mean gradients."""
    if count == 1:
        return function(*batch)
    parts = keras.tree.map_structure(lambda value: _cut(value, count), batch)
    loss, y_pred, gradients = function(*_part(parts, batch, 0))
    predictions = [
        tf.TensorArray(value.dtype, count, element_shape=value.shape).write(0, value)
        for value in keras.tree.flatten(y_pred)
    ]

    def body(index: tf.Tensor, loss: tf.Tensor, predictions: Any, known: Any) -> Any:
        more_loss, more, further = function(*_part(parts, batch, index))
        written = [
            array.write(index, value)
            for array, value in zip(predictions, keras.tree.flatten(more), strict=True)
        ]
        summed = [a + b for a, b in zip(known, _known(further), strict=True)]
        return index + 1, loss + more_loss, written, summed

    _, loss, predictions, sums = tf.while_loop(
        lambda index, *_: index < count,
        body,
        (tf.constant(1), loss, predictions, _known(gradients)),
    )
    whole = [tf.concat(tf.unstack(array.stack(), count), axis=0) for array in predictions]
    means = iter([gradient / count for gradient in sums])
    return (
        loss / count,
        keras.tree.pack_sequence_as(y_pred, whole),
        [None if gradient is None else next(means) for gradient in gradients],
    )


def _cut(value: tf.Tensor | None, count: int) -> tf.Tensor | None:
    """(B, ...) -> (count, B/count, ...)."""
    if value is None:
        return None
    return tf.reshape(value, tf.concat([[count, -1], tf.shape(value)[1:]], axis=0))


def _part(parts: Any, batch: Any, index: Any) -> Any:
    """Takes one part of what was cut, with the shape that is known of the whole."""
    return keras.tree.map_structure(
        lambda part, whole: (
            None if whole is None else tf.ensure_shape(part[index], [None, *whole.shape[1:]])
        ),
        parts,
        batch,
    )


def _known(gradients: Sequence[Any]) -> list[Any]:
    return [gradient for gradient in gradients if gradient is not None]


def check_parts(size: int | None, parts: int) -> None:
    """Raises a ValueError if a batch of known size cannot be cut; TensorFlow speaks of shapes."""
    if size is not None and size % parts:
        raise ValueError(_UNEVEN)


def batch_checks(size: tf.Tensor, replicas: int, parts: int) -> list[Any]:
    """Returns ops that fail unless all replicas have batches of one size that parts divide."""
    checks = []
    if parts > 1:
        checks.append(tf.debugging.assert_equal(size % parts, 0, message=_UNEVEN))
    if replicas > 1:
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, size)
        checks.append(tf.debugging.assert_equal(total, size * replicas, message=_UNEVEN))
    return [check for check in checks if check is not None]


def raise_clearly(error: tf.errors.OpError) -> None:
    """Raises a ValueError in place of an error that a user of strategies can do something about."""
    if _UNEVEN in str(error):
        raise ValueError(_UNEVEN) from None
    if any(mark in str(error) for mark in _CONFUSED):
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


def leave_sum_to_trainer(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer take gradients that are summed over replicas already.

    On the object, not in a subclass: any optimizer keeps its class, and is saved under its name.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    object.__setattr__(inner, "_all_reduce_sum_gradients", list)
