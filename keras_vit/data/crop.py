"""Chooses the part of an image that is seen: the whole, a random crop, or its middle.

A part is four integers, top, left, height and width in pixels, because a JPEG decoder can skip what
lies outside of it.
"""

import math

import tensorflow as tf

# Aspect of a random crop, as in Inception's training (arXiv 1409.4842, Section 6).
ASPECT = (3 / 4, 4 / 3)
DRAWS = 4  # random numbers for each image


def inception_part(shape: tf.Tensor, *, smallest_area: float, draws: tf.Tensor) -> tf.Tensor:
    """Returns a random part with a random area and aspect.

    A part that would be higher or wider than the image is cut to it.

    Example:
        >>> import tensorflow as tf
        >>> draws = [0.0, 0.5, 0.0, 0.99]  # as small as may be, at the top, to the right
        >>> inception_part((60, 80), smallest_area=0.25, draws=draws).numpy().tolist()
        [0, 40, 30, 40]

    Args:
        shape: (height, width) of the image, int32.
        smallest_area: as a fraction of the image.
        draws: four numbers, uniform in [0, 1): area, aspect, place from the top and from the left.

    Returns:
        (top, left, height, width) in pixels, int32 of shape (4,).
    """
    sides = tf.cast(shape, tf.float32)
    area = smallest_area + draws[0] * (1 - smallest_area)
    low, high = map(math.log, ASPECT)
    aspect = tf.exp(low + draws[1] * (high - low))
    wanted = tf.stack([tf.sqrt(area / aspect), tf.sqrt(area * aspect)]) * sides
    return _placed(shape, wanted, place=draws[2:])


def small_part(
    shape: tf.Tensor, *, size: tuple[int, int], ratio: float, place: tf.Tensor
) -> tf.Tensor:
    """Returns the part that is cut out of an image whose short side is resized first.

    Resizing so that `ratio * size` fits in, and cutting `size` out of that, shows the same as
    cutting first and resizing only the part.

    Example:
        >>> import tensorflow as tf
        >>> small_part((60, 80), size=(30, 30), ratio=1.0, place=[0.5, 0.5]).numpy().tolist()
        [0, 10, 60, 60]

    Args:
        shape: (height, width) of the image, int32.
        size: (height, width) in pixels of what the model sees.
        ratio: how much larger the short side is made, 448 / 384 in the original's transfers.
        place: from the top and from the left, 0 to 1; a half is the middle.

    Returns:
        (top, left, height, width) in pixels, int32 of shape (4,).
    """
    sides = tf.cast(shape, tf.float32)
    wanted = tf.constant(size, tf.float32)
    return _placed(shape, wanted * tf.reduce_min(sides / wanted) / ratio, place=place)


def _placed(shape: tf.Tensor, wanted: tf.Tensor, *, place: tf.Tensor) -> tf.Tensor:
    """Rounds a part to pixels, and puts it where all of it lies in the image."""
    part = tf.clip_by_value(tf.cast(tf.round(wanted), tf.int32), 1, shape)
    free = tf.cast(shape - part, tf.float32)
    start = tf.minimum(tf.cast(place * (free + 1), tf.int32), shape - part)
    return tf.concat([start, part], axis=0)
