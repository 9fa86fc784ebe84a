"""Losses of parts of a batch, each counted by its share, so that their sum is the whole batch's.

Keras takes the mean over the images of each replica and then over the replicas. That is another
number as soon as replicas have batches of different sizes, sample weights of different sums
(`mean_with_sample_weight`) or other numbers of ignored classes (`ignore_class`). Here each term of
the loss is counted by what it is divided by, its denominator, over that of the whole batch.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_vit.backend.tensorflow_sums import keras_replicas, sum_over_replicas

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
        y_pred = keras.tree.map_structure(lambda _: tf.zeros(()), compiled._y_pred_build_structure)
        with keras.StatelessScope():  # Keras' loss updates metrics of its terms
            _with_terms(compiled, _Measured, denominators)(y, y_pred, weight)
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
    loss = _with_terms(compiled, _Counted, [])(y, y_pred, weight)
    return None if loss is None else loss * keras_replicas()


def _with_terms(compiled: Any, kind: Any, seen: list[tf.Tensor]) -> Any:
    """Returns a copy of a `CompileLoss` whose functions are wrapped."""
    changed = object.__new__(type(compiled))  # Keras' objects refuse `copy.copy`
    wrapped = [
        entry._replace(loss=kind(entry.loss, place, seen))
        for place, entry in enumerate(compiled._flat_losses)
    ]
    vars(changed).update({**vars(compiled), "_flat_losses": wrapped})
    return changed


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
    seen: list[tf.Tensor]

    def __call__(self, y_true: Any, y_pred: Any, weight: Any) -> Any:
        part = _part.get()
        if getattr(y_pred, "_keras_mask", None) is not None:
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
