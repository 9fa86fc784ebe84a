"""Chooses the part of an image that is seen: the whole, a random crop, or its middle.

A part is four integers, top, left, height and width in pixels, because a JPEG decoder can skip what
lies outside of it.
"""

import tensorflow as tf

# Width over height of a random crop: the default of `tf.image.sample_distorted_bounding_box`, for
# the originals pass none (vit_jax/input_pipeline.py; big_vision, pp/ops_image.py).
ASPECT = (0.75, 1.33)


def inception_part(shape: tf.Tensor, *, smallest_area: float, seed: tf.Tensor) -> tf.Tensor:
    """Returns a random part with a random area and aspect, as the originals draw it.

    It is TensorFlow's `sample_distorted_bounding_box` with the originals' arguments: a part that
    does not fit is drawn anew, and after 100 attempts the whole image is taken.

    Example:
        >>> import tensorflow as tf
        >>> top, left, height, width = inception_part(
        ...     (60, 80), smallest_area=0.25, seed=(1, 2)).numpy()
        >>> bool(height * width >= 0.24 * 60 * 80 and top + height <= 60 and left + width <= 80)
        True

    Args:
        shape: (height, width) of the image, int32.
        smallest_area: as a fraction of the image.
        seed: two integers; they alone decide.

    Returns:
        (top, left, height, width) in pixels, int32 of shape (4,).
    """
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.concat([shape, [3]], axis=0),
        tf.zeros((0, 0, 4)),
        seed=seed,
        min_object_covered=0.0,
        aspect_ratio_range=ASPECT,
        area_range=(smallest_area, 1.0),
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([begin[:2], size[:2]], axis=0)


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
