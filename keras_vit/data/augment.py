"""Varies training images at random, each draw a pure function of its seed.

Stateless TensorFlow ops only: a seed gives the same image at any parallelism, after any restart.
"""

import dataclasses
import math

import tensorflow as tf

# Aspect of a random crop, as in Inception's training (arXiv 1409.4842, Section 6).
CROP_ASPECT = (3 / 4, 4 / 3)
TINY = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How far a training image may be changed; the defaults change nothing.

    Example:
        >>> Augmentation(rotation=10, shift=0.1).is_affine
        True

    Attributes:
        rotation: largest angle, in degrees, to either side.
        shift: largest shift in each direction, as a fraction of the side.
        zoom: largest change of size, as a fraction, smaller or larger.
        crop: smallest area of a random crop, as a fraction; 1 keeps the whole image.
        flip: whether half of the images are mirrored left to right.
        erase: side of a square that half of the images lose, as a fraction of their sides (cutout,
            arXiv 1708.04552).
    """

    rotation: float = 0.0
    shift: float = 0.0
    zoom: float = 0.0
    crop: float = 1.0
    flip: bool = False
    erase: float = 0.0

    def __post_init__(self) -> None:
        limits = {
            "rotation": (0, 180),
            "shift": (0, 1),
            "zoom": (0, 0.9),
            "crop": (0.01, 1),
            "erase": (0, 1),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"{name} must lie between {low} and {high}. "
                    f"Received: {name}={getattr(self, name)!r}."
                )

    @property
    def is_affine(self) -> bool:
        """Whether pixels move in any other way than by a crop."""
        return bool(self.rotation or self.shift or self.zoom or self.flip)


def crop_boxes(count: int, *, augmentation: Augmentation, seed: tf.Tensor) -> tf.Tensor:
    """Draws random crops.

    Example:
        >>> crop_boxes(1, augmentation=Augmentation(), seed=(1, 2)).numpy().tolist()
        [[0.0, 0.0, 1.0, 1.0]]

    Args:
        count: how many.
        augmentation: its `crop` is the smallest area.
        seed: two integers.

    Returns:
        Top, left, bottom and right of each crop as fractions of the image, shape (count, 4).
    """
    if augmentation.crop == 1:
        return tf.tile([[0.0, 0.0, 1.0, 1.0]], (count, 1))
    draws = tf.random.stateless_uniform((4, count), seed)
    area = augmentation.crop + draws[0] * (1 - augmentation.crop)
    low, high = map(math.log, CROP_ASPECT)
    aspect = tf.exp(low + draws[1] * (high - low))
    height = tf.minimum(tf.sqrt(area / aspect), 1.0)
    width = tf.minimum(tf.sqrt(area * aspect), 1.0)
    top, left = draws[2] * (1 - height), draws[3] * (1 - width)
    return tf.stack([top, left, top + height, left + width], axis=1)


def transform_batch(images: tf.Tensor, *, augmentation: Augmentation, seed: tf.Tensor) -> tf.Tensor:
    """Rotates, shifts, zooms and mirrors each image by its own random amount.

    Pixels that nothing covers are black.

    Example:
        >>> import tensorflow as tf
        >>> images = tf.ones((2, 8, 8, 3))
        >>> transform_batch(images, augmentation=Augmentation(flip=True), seed=(1, 2)).shape
        TensorShape([2, 8, 8, 3])

    Args:
        images: pixels, float32 of shape (batch, height, width, 3).
        augmentation: how far.
        seed: two integers.

    Returns:
        The images, of the same shape.
    """
    if not augmentation.is_affine:
        return images
    batch, height, width = tf.shape(images)[0], tf.shape(images)[1], tf.shape(images)[2]
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=_random_transforms(batch, height, width, augmentation=augmentation, seed=seed),
        output_shape=tf.stack([height, width]),
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
        fill_value=0.0,
    )
    return tf.ensure_shape(moved, images.shape)


def mix_batch(
    images: tf.Tensor, targets: tf.Tensor, *, alpha: float, seed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Blends each image and its target with those of another of the batch (arXiv 1710.09412).

    Example:
        >>> import tensorflow as tf
        >>> images, targets = mix_batch(tf.ones((2, 8, 8, 3)), tf.eye(2), alpha=0.2, seed=(1, 2))
        >>> float(tf.reduce_sum(targets))
        2.0

    Args:
        images: pixels, float32 of shape (batch, height, width, 3).
        targets: probabilities of the classes, float32 of shape (batch, classes).
        alpha: the share that an image keeps is drawn from Beta(alpha, alpha), or one minus that if
            it is less than half; 0 blends nothing.
        seed: two integers.

    Returns:
        Images and targets of the same shapes.
    """
    if not alpha:
        return images, targets
    count = tf.shape(images)[0]
    keys = tf.random.experimental.stateless_split(tf.convert_to_tensor(seed), 2)
    draws = tf.random.stateless_gamma((2, count), keys[0], alpha=alpha)
    draws = tf.maximum(draws, TINY)  # both may be too small for a float
    share = tf.reduce_max(draws, axis=0) / tf.reduce_sum(draws, axis=0)
    others = tf.random.experimental.stateless_shuffle(tf.range(count), seed=keys[1])
    kept = share[:, None, None, None]
    images = images * kept + tf.gather(images, others) * (1 - kept)
    kept = share[:, None]
    return images, targets * kept + tf.gather(targets, others) * (1 - kept)


def erase_squares(images: tf.Tensor, *, augmentation: Augmentation, seed: tf.Tensor) -> tf.Tensor:
    """Makes a square of half of the images black, each at its own place.

    Example:
        >>> import tensorflow as tf
        >>> erased = erase_squares(
        ...     tf.ones((1000, 8, 8, 1)), augmentation=Augmentation(erase=0.5), seed=(1, 2))
        >>> sorted(set(tf.reduce_sum(erased, axis=(1, 2, 3)).numpy().tolist()))
        [48.0, 64.0]

    Args:
        images: pixels, float32 of shape (batch, height, width, channels).
        augmentation: its `erase` is the side of the square.
        seed: two integers.

    Returns:
        The images, of the same shape.
    """
    if not augmentation.erase:
        return images
    batch, height, width = tf.shape(images)[0], tf.shape(images)[1], tf.shape(images)[2]
    draws = tf.random.stateless_uniform((3, batch), seed)
    kept_rows = _outside(draws[0], height, fraction=augmentation.erase)
    kept_columns = _outside(draws[1], width, fraction=augmentation.erase)
    kept = kept_rows[:, :, None] | kept_columns[:, None, :] | (draws[2] < 0.5)[:, None, None]
    return images * tf.cast(kept, images.dtype)[..., None]


def _outside(draws: tf.Tensor, side: tf.Tensor, *, fraction: float) -> tf.Tensor:
    """Whether each pixel of a side lies outside a random stretch of it, shape (batch, side)."""
    length = tf.cast(tf.round(tf.cast(side, tf.float32) * fraction), tf.int32)
    start = tf.cast(draws * tf.cast(side - length + 1, tf.float32), tf.int32)[:, None]
    place = tf.range(side)[None]
    return (place < start) | (place >= start + length)


def _random_transforms(
    batch: tf.Tensor,
    height: tf.Tensor,
    width: tf.Tensor,
    *,
    augmentation: Augmentation,
    seed: tf.Tensor,
) -> tf.Tensor:
    """Rows of eight numbers that take an output pixel (x, y) to the input pixel it shows."""
    draws = tf.random.stateless_uniform((5, batch), seed, minval=-1.0)
    angle = draws[0] * math.radians(augmentation.rotation)
    scale = tf.exp(draws[1] * math.log(1 + augmentation.zoom))
    mirror = tf.where(draws[4] < 0, -1.0, 1.0) if augmentation.flip else tf.ones(batch)
    height, width = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
    center_x, center_y = (width - 1) / 2, (height - 1) / 2
    a, b = scale * tf.cos(angle), scale * tf.sin(angle)
    shift_x, shift_y = draws[2] * augmentation.shift * width, draws[3] * augmentation.shift * height
    # Turn about the centre, mirror the columns, then shift.
    to_x = center_x - mirror * (a * center_x - b * center_y) + shift_x
    to_y = center_y - (b * center_x + a * center_y) + shift_y
    zeros = tf.zeros(batch)
    return tf.stack([mirror * a, -mirror * b, to_x, b, a, to_y, zeros, zeros], axis=1)
