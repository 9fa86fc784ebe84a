"""Parts of a training step, apart from any model: shares of a loss, batches in parts, precision."""

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


class Totals(NamedTuple):
    """The denominators of a loss over all replicas and parts of a batch.

    Attributes:
        images: images in the batch, a float32 scalar.
        terms: the denominator of each term of the compiled loss, float32 of shape (terms,).
    """

    images: tf.Tensor
    terms: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a batch that a loss is computed of.

    Attributes:
        totals: of the batch.
        images: images in the part, a float32 scalar.
        is_weighted: whether `compute_loss` multiplies the loss by `share`.
    """

    totals: Totals
    images: tf.Tensor
    is_weighted: bool = False

    @property
    def share(self) -> tf.Tensor:
        """The fraction of the batch's images that are in the part."""
        return self.images / self.totals.images


_part: contextvars.ContextVar[Part | None] = contextvars.ContextVar("part", default=None)


def count_images(x: Any) -> tf.Tensor:
    """Returns the number of images in a batch, float32."""
    return tf.cast(_batch_size(x), tf.float32)


def batch_totals(compiled: Any, x: Any, y: Any, weight: Any) -> Totals:
    """Returns the totals of the batch of which this replica has (x, y, weight).

    Args:
        compiled: Keras' `CompileLoss`; None, or not built, for no terms.
        x: inputs.
        y: targets.
        weight: sample weights, or None.
    """
    denominators = [count_images(x)]
    if compiled is not None and compiled.built:
        # No denominator depends on the values of the predictions.
        structure = private.prediction_structure(compiled)
        y_pred = keras.tree.map_structure(lambda _: tf.zeros(()), structure)
        with keras.StatelessScope():  # Keras' loss updates metrics of its terms
            wrap = functools.partial(_DenominatorTerm, denominators=denominators)
            private.with_terms(compiled, wrap)(y, y_pred, weight)
    (totals,) = sum_over_replicas([tf.stack(denominators)])
    return Totals(images=totals[0], terms=totals[1:])


@contextlib.contextmanager
def part_of(totals: Totals | None, x: Any, *, is_weighted: bool = False) -> Iterator[Part | None]:
    """A scope in which losses are of the part `x` of a batch; of the whole batch without totals."""
    part = None if totals is None else Part(totals, count_images(x), is_weighted)
    token = _part.set(part)
    try:
        yield part
    finally:
        _part.reset(token)


def current_part() -> Part | None:
    """Returns the part of a batch that losses are of in this scope; None for a whole batch."""
    return _part.get()


def times_share(loss: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns loss * share, or 0 for no images, whose loss is NaN."""
    return tf.where(share > 0, loss * tf.cast(share, loss.dtype), 0.0)


def part_loss(compiled: Any, y: Any, y_pred: Any, weight: Any) -> Any:
    """Returns the compiled loss of this part, divided by the share of its images.

    Multiplied by that share and summed over all parts and replicas, it is the loss of the batch.
    """
    loss = private.with_terms(compiled, _PartTerm)(y, y_pred, weight)
    return None if loss is None else loss * keras_replicas()


@dataclasses.dataclass
class _DenominatorTerm:
    """Stands for a term of the loss, and appends its denominator to a list."""

    loss: Any
    index: int
    denominators: list[tf.Tensor]

    def __call__(self, y_true: Any, y_pred: Any, weight: Any) -> tf.Tensor:
        self.denominators.append(_denominator(self.loss, y_true, weight))
        return tf.zeros(())


@dataclasses.dataclass
class _PartTerm:
    """Computes a term of `part_loss`, divided by the number of replicas."""

    loss: Any
    index: int

    def __call__(self, y_true: Any, y_pred: Any, weight: Any) -> Any:
        part = _part.get()
        if private.mask_of(y_pred) is not None:
            raise ValueError(
                "The predictions have a Keras mask, which does not work with several replicas or "
                "accumulated parts; use one device and accumulate=1, or sample weights in place of "
                "the mask."
            )
        value = self.loss(y_true, y_pred, weight)
        if part is None or getattr(self.loss, "reduction", None) not in _MEANS:
            factor = 1.0 if part is None else part.totals.images / tf.maximum(part.images, 1.0)
            return value * tf.cast(factor / keras_replicas(), value.dtype)
        own, totals = _denominator(self.loss, y_true, weight), part.totals
        factor = tf.math.divide_no_nan(own * totals.images, totals.terms[self.index] * part.images)
        if not self.loss.call(y_true, y_pred).shape.rank:  # Keras does not divide a scalar
            factor = factor / keras_replicas()
        return value * tf.cast(factor, value.dtype)


# TensorFlow's errors when two strategies gave their sums the same numbers.
_COLLISIONS = ("Shape mismatch in the collective instance", "is joining a group with size")


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the norm of all gradients together, in float32, without those that are None."""
    # The cast: under a policy such as "bfloat16" the gradients have several dtypes.
    return tf.linalg.global_norm([tf.cast(g, tf.float32) for g in _without_none(gradients)])


def in_parts(
    function: Callable[..., tuple[tf.Tensor, Any, list[Any]]], batch: Any, *, count: int
) -> tuple[tf.Tensor, Any, list[Any]]:
    """Runs a pass over a batch in parts: returns summed loss, all predictions, summed gradients.

    The parts have equally many images, except the first, which also has the remainder.
    """
    if count == 1:
        return function(*batch)
    size = _batch_size(batch)
    length = size // count
    first = size - length * (count - 1)
    loss, y_pred, gradients = function(*_slice(batch, 0, first))
    arrays = [
        tf.TensorArray(value.dtype, count - 1, element_shape=[None, *value.shape[1:]])
        for value in keras.tree.flatten(y_pred)
    ]

    def body(index: tf.Tensor, loss: tf.Tensor, arrays: Any, sums: Any) -> Any:
        part = function(*_slice(batch, first + index * length, length))
        arrays = [
            array.write(index, value)
            for array, value in zip(arrays, keras.tree.flatten(part[1]), strict=True)
        ]
        sums = [a + b for a, b in zip(sums, _without_none(part[2]), strict=True)]
        return index + 1, loss + part[0], arrays, sums

    start = (tf.constant(0), loss, arrays, _without_none(gradients))
    _, loss, arrays, sums = tf.while_loop(lambda index, *_: index < count - 1, body, start)
    predictions = [
        tf.concat([value, *tf.unstack(array.stack(), count - 1)], axis=0)
        for value, array in zip(keras.tree.flatten(y_pred), arrays, strict=True)
    ]
    remaining = iter(sums)
    return (
        loss,
        keras.tree.pack_sequence_as(y_pred, predictions),
        [None if gradient is None else next(remaining) for gradient in gradients],
    )


def raise_clearly(error: tf.errors.OpError, strategy: tf.distribute.Strategy) -> None:
    """Raises a ValueError in place of an error that the user of a strategy can correct."""
    # In one process only the failure of another replica cancels a step.
    is_one_process = isinstance(strategy, tf.distribute.MirroredStrategy)
    is_cancelled = isinstance(error, tf.errors.CancelledError) and is_one_process
    if is_cancelled or any(text in str(error) for text in _COLLISIONS):
        raise ValueError(
            "The sums over replicas do not fit together. Either another MirroredStrategy of this "
            "process has trained another model, and TensorFlow takes the sums of both for one: "
            "restart the process, and make one strategy for all its models. Or workers of a "
            "cluster train different models: start all of them with the same arguments."
        ) from error


def reducible(logs: dict[str, Any]) -> dict[str, Any]:
    """Adds to scalars the axis that Keras reduces over with several workers."""
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return logs
    return {name: tf.reshape(value, [1]) for name, value in logs.items()}


def wants_xla(request: bool | str) -> bool:
    """Whether XLA compiles; for "auto", on GPUs."""
    if request != "auto":
        return bool(request)
    is_tpu = isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy)
    return bool(tf.config.list_physical_devices("GPU")) and not is_tpu


def _denominator(loss: Any, y_true: Any, weight: Any) -> tf.Tensor:
    """Returns the denominator of a term in Keras, up to a factor that all replicas and parts share.

    Source: keras/src/losses/loss.py, reduce_weighted_values.
    """
    first = keras.tree.flatten(y_true)[0]
    ignored = getattr(loss, "ignore_class", None)
    is_weighted = getattr(loss, "reduction", None) == "mean_with_sample_weight"
    weights = tf.cast(weight, tf.float32) if is_weighted and weight is not None else None
    if ignored is not None:
        valid = tf.cast(tf.not_equal(first, tf.cast(ignored, first.dtype)), tf.float32)
        if weights is not None:
            missing = max(valid.shape.rank - weights.shape.rank, 0)
            valid = valid * weights[(..., *[tf.newaxis] * missing)]
        return tf.reduce_sum(valid)
    return tf.cast(tf.shape(first)[0], tf.float32) if weights is None else tf.reduce_sum(weights)


def _batch_size(batch: Any) -> tf.Tensor:
    return tf.shape(_without_none(keras.tree.flatten(batch))[0])[0]


def _slice(batch: Any, start: Any, count: Any) -> Any:
    """Returns `count` rows of each tensor, a number that XLA knows before it runs."""

    def slice_rows(value: tf.Tensor | None) -> tf.Tensor | None:
        if value is None:
            return None
        begin = tf.concat([[start], tf.zeros(value.shape.rank - 1, tf.int32)], axis=0)
        rows = tf.slice(value, begin, tf.concat([[count], tf.shape(value)[1:]], axis=0))
        return tf.ensure_shape(rows, [None, *value.shape[1:]])

    return keras.tree.map_structure(slice_rows, batch)


def _without_none(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]
