"""The parts of a training step that know no model: losses by share, batches in parts, precision."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_vit.backend import private
from keras_vit.backend.tensorflow_updates import keras_replicas, sum_over_replicas

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class Whole(NamedTuple):
    """What the terms of a loss are divided by, over all replicas and parts.

    Attributes:
        size: images in the whole batch, a float32 scalar.
        terms: the denominator of each term of the compiled loss, float32 of shape (terms,).
    """

    size: tf.Tensor
    terms: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a batch that a loss is computed of.

    Attributes:
        whole: the batch.
        size: images of the part, a float32 scalar.
        is_counted: whether the loss is given as its share of the whole, not relative to it.
    """

    whole: Whole
    size: tf.Tensor
    is_counted: bool = False

    @property
    def share(self) -> tf.Tensor:
        """What the images of the part are of those of the whole."""
        return self.size / self.whole.size


_part: contextvars.ContextVar[Part | None] = contextvars.ContextVar("part", default=None)


def count_images(x: Any) -> tf.Tensor:
    """Returns how many images a batch has, float32."""
    first = next(value for value in keras.tree.flatten(x) if value is not None)
    return tf.cast(tf.shape(first)[0], tf.float32)


def measure_whole(compiled: Any, x: Any, y: Any, weight: Any) -> Whole:
    """Returns the denominators of the whole batch, of which this replica has (x, y, weight).

    Args:
        compiled: Keras' `CompileLoss`; None, or not built, if no loss of it is asked for.
        x: inputs.
        y: targets.
        weight: sample weights, or None.
    """
    size = count_images(x)
    denominators = [size]
    if compiled is not None and compiled.built:
        # Structure alone: which predictions these are, no denominator depends on.
        structure = private.prediction_structure(compiled)
        y_pred = keras.tree.map_structure(lambda _: tf.zeros(()), structure)
        with keras.StatelessScope():  # Keras' loss updates metrics of its terms
            wrap = functools.partial(_Measured, seen=denominators)
            private.with_terms(compiled, wrap)(y, y_pred, weight)
    (summed,) = sum_over_replicas([tf.stack(denominators)])
    return Whole(size=summed[0], terms=summed[1:])


@contextlib.contextmanager
def part_of(whole: Whole | None, x: Any, *, is_counted: bool = False) -> Iterator[Part | None]:
    """Inside this scope losses are of the part `x` of a batch; None for no parts."""
    part = None if whole is None else Part(whole, count_images(x), is_counted)
    token = _part.set(part)
    try:
        yield part
    finally:
        _part.reset(token)


def current_part() -> Part | None:
    """Returns the part of a batch that a loss is asked of, None for a whole batch."""
    return _part.get()


def counted(loss: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns the share of a loss; nothing of one over no images, which is no number."""
    return tf.where(share > 0, loss * tf.cast(share, loss.dtype), 0.0)


def shared_loss(compiled: Any, y: Any, y_pred: Any, weight: Any) -> Any:
    """Returns the compiled loss of this part, relative to the share of its images.

    Times that share, and summed over all parts and replicas, it is the loss of the whole batch.
    """
    loss = private.with_terms(compiled, _Counted)(y, y_pred, weight)
    return None if loss is None else loss * keras_replicas()


@dataclasses.dataclass
class _Measured:
    """Notes the denominator of a term, and computes nothing."""

    loss: Any
    place: int
    seen: list[tf.Tensor]

    def __call__(self, y_true: Any, y_pred: Any, weight: Any) -> tf.Tensor:
        self.seen.append(_denominator(self.loss, y_true, weight))
        return tf.zeros(())


@dataclasses.dataclass
class _Counted:
    """Computes a term of a part, relative to the share of its images, over the replicas."""

    loss: Any
    place: int

    def __call__(self, y_true: Any, y_pred: Any, weight: Any) -> Any:
        part = _part.get()
        if private.mask_of(y_pred) is not None:
            raise ValueError(
                "The predictions carry a mask of Keras', by which several replicas or accumulated "
                "parts cannot be weighed; use one device and accumulate=1, or sample weights in "
                "place of the mask."
            )
        value = self.loss(y_true, y_pred, weight)
        if part is None or getattr(self.loss, "reduction", None) not in _MEANS:
            relative = 1.0 if part is None else part.whole.size / tf.maximum(part.size, 1.0)
            return value * tf.cast(relative / keras_replicas(), value.dtype)
        own, whole = _denominator(self.loss, y_true, weight), part.whole
        relative = tf.math.divide_no_nan(own * whole.size, whole.terms[self.place] * part.size)
        if not self.loss.call(y_true, y_pred).shape.rank:  # a function that took the mean itself
            relative = relative / keras_replicas()  # which Keras therefore leaves alone
        return value * tf.cast(relative, value.dtype)


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


def _denominator(loss: Any, y_true: Any, weight: Any) -> tf.Tensor:
    """Returns what Keras divides the sum of a term by, up to a factor that is the same everywhere.

    Source: keras/src/losses/loss.py, reduce_weighted_values.
    """
    first = keras.tree.flatten(y_true)[0]
    ignored = getattr(loss, "ignore_class", None)
    is_weighed = getattr(loss, "reduction", None) == "mean_with_sample_weight"
    weights = tf.cast(weight, tf.float32) if is_weighed and weight is not None else None
    if ignored is not None:
        valid = tf.cast(tf.not_equal(first, tf.cast(ignored, first.dtype)), tf.float32)
        return tf.reduce_sum(valid if weights is None else valid * _spread(weights, valid))
    return tf.cast(tf.shape(first)[0], tf.float32) if weights is None else tf.reduce_sum(weights)


def _spread(weights: tf.Tensor, over: tf.Tensor) -> tf.Tensor:
    """Gives weights (B, ...) axes of one until they have as many as what they weigh."""
    missing = max(over.shape.rank - weights.shape.rank, 0)
    return weights[(..., *[tf.newaxis] * missing)]


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
