"""Draws random numbers that depend on a seed alone: the same at any parallelism and on any worker.

Numbers are drawn for a whole batch; a worker that makes a part of it takes its part of them.
"""

import tensorflow as tf

WHOLE = (0, 1)  # (index, count) of the only worker


def key(seed: int, use: int, step: tf.Tensor) -> tf.Tensor:
    """Returns the two integers that decide one use of randomness in one step."""
    return tf.random.experimental.stateless_fold_in(tf.constant((seed, use), tf.int64), step)


def uniform(
    numbers: int,
    count: tf.Tensor,
    *,
    seed: tf.Tensor,
    shard: tuple[int, int] = WHOLE,
    low: float = 0.0,
) -> tf.Tensor:
    """Draws numbers between `low` and 1 for each image.

    Example:
        >>> import numpy as np
        >>> whole = uniform(3, 4, seed=(1, 2))
        >>> second = uniform(3, 2, seed=(1, 2), shard=(1, 2))
        >>> bool(np.array_equal(whole[:, 2:], second))
        True

    Args:
        numbers: how many for each image.
        count: images that this worker makes.
        seed: two integers.
        shard: (index of this worker, number of workers).
        low: the smallest number.

    Returns:
        Shape (numbers, count).
    """
    drawn = tf.random.stateless_uniform((numbers, count * shard[1]), seed, minval=low)
    return drawn[:, count * shard[0] : count * (shard[0] + 1)]


def keys(count: tf.Tensor, *, seed: tf.Tensor, shard: tuple[int, int] = WHOLE) -> tf.Tensor:
    """Draws a seed of its own for each image, int32 of shape (count, 2)."""
    drawn = tf.random.stateless_uniform(
        (count * shard[1], 2), seed, minval=None, maxval=None, dtype=tf.int32
    )
    return drawn[count * shard[0] : count * (shard[0] + 1)]
