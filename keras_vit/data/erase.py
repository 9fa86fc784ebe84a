"""Erases a random rectangle of some images (arXiv 1708.04896)."""

import math

import tensorflow as tf

from keras_vit.data import draws
from keras_vit.data.rectangles import inside

# Area as a fraction of the image and aspect, from Section 4.2 of the paper.
AREA = (0.02, 0.4)
ASPECT = (0.3, 1 / 0.3)


def erase_rectangles(
    images: tf.Tensor,
    *,
    probability: float,
    seed: tf.Tensor,
    shard: tuple[int, int] = draws.WHOLE,
) -> tf.Tensor:
    """Puts noise in place of a rectangle of some images, each at its own place.

    Each erased pixel takes a random value 0..255, which is the paper's best. A rectangle that would
    be higher or wider than the image is cut to it; the paper draws another one.

    Example:
        >>> import tensorflow as tf
        >>> erased = erase_rectangles(tf.ones((8, 9, 9, 3)), probability=1.0, seed=(1, 2))
        >>> int(tf.reduce_sum(tf.cast(tf.reduce_any(erased != 1, axis=(1, 2, 3)), tf.int32)))
        8

    Args:
        images: pixels 0..255, float32 of shape (batch, height, width, 3).
        probability: that an image loses a rectangle.
        seed: two integers.
        shard: (index of this worker, number of workers), see `keras_vit.data.train_batches`.

    Returns:
        The images, of the same shape.
    """
    if not probability:
        return images
    shape = tf.shape(images)
    drawn = draws.uniform(5, shape[0], seed=seed, shard=shard)
    area = AREA[0] + drawn[0] * (AREA[1] - AREA[0])
    aspect = tf.exp(math.log(ASPECT[0]) + drawn[1] * math.log(ASPECT[1] / ASPECT[0]))
    sides = tf.minimum(tf.stack([tf.sqrt(area * aspect), tf.sqrt(area / aspect)]), 1.0)
    size = tf.cast(shape[1:3, None], tf.float32)  # of the image; height and width are rows
    lengths = tf.maximum(tf.cast(tf.round(sides * size), tf.int32), 1)
    free = tf.cast(shape[1:3, None] - lengths + 1, tf.float32)
    starts = tf.cast(drawn[2:4] * free, tf.int32)
    erased = inside(starts, starts + lengths, shape=shape[1:3])
    erased &= (drawn[4] < probability)[:, None, None, None]
    return tf.where(erased, _noise(images, seed=seed, shard=shard), images)


def _noise(images: tf.Tensor, *, seed: tf.Tensor, shard: tuple[int, int]) -> tf.Tensor:
    """Random values 0..255 of the shape of the images, those of an image from its own seed."""
    shape = tf.shape(images)
    quarter = -(-tf.reduce_prod(shape[1:]) // 4)

    def draw(key: tf.Tensor) -> tf.Tensor:
        # Four bytes of each integer: a fourth of the work.
        words = tf.random.stateless_uniform(
            quarter[None], key, minval=None, maxval=None, dtype=tf.int32
        )
        values = tf.reshape(tf.bitcast(words, tf.uint8), (-1,))[: tf.reduce_prod(shape[1:])]
        return tf.reshape(values, shape[1:])

    own = tf.random.experimental.stateless_fold_in(tf.convert_to_tensor(seed), 1)
    keys = draws.keys(shape[0], seed=own, shard=shard)
    noise = tf.map_fn(draw, keys, fn_output_signature=tf.uint8)
    return tf.cast(tf.ensure_shape(noise, images.shape), images.dtype)
