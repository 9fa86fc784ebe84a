"""Random numbers of layers: masks whose seed a checkpoint saves, and weights drawn for nothing.

Shapes: (B, ...), B images or other samples.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import keras

from keras_vit import backend

# Odd, so that its multiples modulo 2**32 are all different (Knuth's multiplicative hash).
_STRIDE = 0x9E3779B1
_overwritten = contextvars.ContextVar("overwritten", default=False)


@contextlib.contextmanager
def skip_initialization() -> Iterator[None]:
    """Inside this scope `initializer` leaves memory as it is: every weight must be assigned."""
    token = _overwritten.set(True)
    try:
        yield
    finally:
        _overwritten.reset(token)


def initializer(usual: Any) -> Any:
    """Returns the usual Keras initializer, or one that does nothing if weights are loaded later."""
    return backend.empty if _overwritten.get() else usual


class ReplicaSeedGenerator(keras.random.SeedGenerator):
    """A seed generator whose seeds differ between the replicas of a `tf.distribute` strategy.

    Its state is the same on all of them; Keras' own generator therefore drops the same units for
    every replica's images.
    """

    def next(self, ordered: bool = True) -> Any:
        return _shift_seed(super().next(ordered), backend.replica_id())


class RandomLayer(keras.layers.Layer):
    """A layer that draws masks in training.

    A recomputed layer (gradient checkpointing) must drop the same units again. So a seed can be
    drawn first, by `next_seed`, and given to `call`.

    Args:
        is_random: whether it draws at all; if not, it has no state.
        seed: integer seed of the masks; None for a random one.
    """

    def __init__(self, *, is_random: bool, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_random = is_random
        if is_random:
            self.seed_generator = ReplicaSeedGenerator(seed)

    def next_seed(self, training: bool | None) -> Any:
        """Draws the seed of one call, two integers; None if nothing is drawn in this call."""
        return self.seed_generator.next() if training and self.is_random else None

    def seed_of_call(self, seed: Any, training: bool | None) -> Any:
        """Returns the seed that `call` was given, or a new one."""
        return self.next_seed(training) if seed is None else seed


class _GivenSeed(keras.random.SeedGenerator):
    """Lets `keras.random` draw with a seed that is a tensor."""

    def __init__(self, seed: Any) -> None:
        self._seed = seed
        self._initial_seed = seed  # PyTorch's dropout draws without a seed where this is None

    def next(self, ordered: bool = True) -> Any:
        return self._seed


def split_seed(seed: Any, count: int) -> list[Any]:
    """Makes `count` seeds of one; None stays None."""
    # Replicas shift the same number by their index, which is below 2^16: no two seeds are equal.
    return [None if seed is None else _shift_seed(seed, index << 16) for index in range(count)]


def dropout(x: Any, rate: float, *, seed: Any) -> Any:
    """Drops a fraction of the values and scales the rest by 1 / (1 - rate); nothing without seed.

    Args:
        x: any shape.
        rate: fraction, in [0, 1).
        seed: two integers, or None.
    """
    return x if seed is None or not rate else keras.random.dropout(x, rate, seed=_GivenSeed(seed))


def drop_samples(x: Any, rate: Any, *, seed: Any) -> Any:
    """Drops a fraction of the samples whole and scales the rest by 1 / (1 - rate).

    Args:
        x: (B, ...).
        rate: fraction, in [0, 1); a number, or a scalar tensor.
        seed: two integers, or None, which drops nothing.
    """
    is_known = isinstance(rate, float | int)
    if seed is None or (is_known and not rate):
        return x
    shape = (keras.ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
    mask = keras.random.uniform(shape, seed=_GivenSeed(seed)) >= rate
    kept = 1 - rate if is_known else keras.ops.cast(1 - rate, x.dtype)
    return x * keras.ops.cast(mask, x.dtype) / kept


def draw_places(batch: Any, count: int, *, of: int, seed: Any) -> Any:
    """Draws `count` of the places 0 to `of` - 1 for each sample, (batch, count), in rising order.

    Args:
        batch: the number of samples.
        count: how many places, all different.
        of: the number of places to draw from.
        seed: two integers.
    """
    # The order of random scores is a random permutation, different for each sample.
    scores = keras.random.uniform((batch, of), seed=_GivenSeed(seed), dtype="float32")
    return keras.ops.sort(keras.ops.argsort(scores, axis=1)[:, :count], axis=1)


def _shift_seed(seed: Any, by: Any) -> Any:
    if isinstance(by, int):
        by = by * _STRIDE % 2**32
        return seed if not by else seed + keras.ops.convert_to_tensor([by, 0], dtype=seed.dtype)
    shift = keras.ops.cast(by, seed.dtype) * _STRIDE % 2**32
    return seed + keras.ops.stack([shift, keras.ops.zeros_like(shift)])
