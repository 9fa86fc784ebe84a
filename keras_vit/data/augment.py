"""Varies training images at random, each draw a pure function of its seed.

Stateless TensorFlow ops only: a seed gives the same image at any parallelism, after any restart.
"""

import dataclasses
import math

import tensorflow as tf

from keras_vit.data import draws


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
        resize_small: a random crop of another kind: the short side is resized to this many times
            what is then cut out at random (448 / 384 in the original's transfers); 0 does not.
        randaugment_layers: RandAugment's operations on each image, one after the other.
        randaugment_magnitude: how strong they are, 0 to 30, see `keras_vit.data.randaugment`.
        flip: whether half of the images are mirrored left to right.
        erase: probability that an image loses a random rectangle (arXiv 1708.04896).
    """

    rotation: float = 0.0
    shift: float = 0.0
    zoom: float = 0.0
    crop: float = 1.0
    resize_small: float = 0.0
    randaugment_layers: int = 0
    randaugment_magnitude: float = 10.0
    flip: bool = False
    erase: float = 0.0

    def __post_init__(self) -> None:
        limits = {
            "rotation": (0, 180),
            "shift": (0, 1),
            "zoom": (0, 0.9),
            "crop": (0.01, 1),
            "resize_small": (0, 10),
            "randaugment_layers": (0, 16),
            "randaugment_magnitude": (0, 30),
            "erase": (0, 1),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"{name} must lie between {low} and {high}. "
                    f"Received: {name}={getattr(self, name)!r}."
                )
        if 0 < self.resize_small < 1 or (self.resize_small and self.crop < 1):
            raise ValueError(
                "resize_small must be 0, or at least 1 and then without crop; choose one of the "
                f"two. Received: resize_small={self.resize_small!r}, crop={self.crop!r}."
            )

    @property
    def is_cropped(self) -> bool:
        """Whether a part of the image is seen at random."""
        return self.crop < 1 or bool(self.resize_small)

    @property
    def is_affine(self) -> bool:
        """Whether images are rotated, shifted or zoomed."""
        return bool(self.rotation or self.shift or self.zoom)


def transform_batch(
    images: tf.Tensor,
    *,
    augmentation: Augmentation,
    seed: tf.Tensor,
    shard: tuple[int, int] = draws.WHOLE,
) -> tf.Tensor:
    """Mirrors, rotates, shifts and zooms each image by its own random amount.

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
        shard: (index of this worker, number of workers), see `keras_vit.data.train_batches`.

    Returns:
        The images, of the same shape.
    """
    if not (augmentation.is_affine or augmentation.flip):
        return images
    batch, height, width = tf.shape(images)[0], tf.shape(images)[1], tf.shape(images)[2]
    drawn = draws.uniform(5, batch, seed=seed, shard=shard, low=-1.0)
    if augmentation.flip:
        mirrored = (drawn[4] < 0)[:, None, None, None]
        images = tf.where(mirrored, tf.reverse(images, [2]), images)
    if not augmentation.is_affine:
        return images
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=_transforms(height, width, augmentation=augmentation, drawn=drawn),
        output_shape=tf.stack([height, width]),
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
        fill_value=0.0,
    )
    return tf.ensure_shape(moved, images.shape)


def _transforms(
    height: tf.Tensor, width: tf.Tensor, *, augmentation: Augmentation, drawn: tf.Tensor
) -> tf.Tensor:
    """Rows of eight numbers that take an output pixel (x, y) to the input pixel it shows."""
    angle = drawn[0] * math.radians(augmentation.rotation)
    scale = tf.exp(drawn[1] * math.log(1 + augmentation.zoom))
    height, width = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
    center_x, center_y = (width - 1) / 2, (height - 1) / 2
    a, b = scale * tf.cos(angle), scale * tf.sin(angle)
    shift_x, shift_y = drawn[2] * augmentation.shift * width, drawn[3] * augmentation.shift * height
    # Turn about the centre, then shift.
    to_x = center_x - (a * center_x - b * center_y) + shift_x
    to_y = center_y - (b * center_x + a * center_y) + shift_y
    zeros = tf.zeros_like(scale)
    return tf.stack([a, -b, to_x, b, a, to_y, zeros, zeros], axis=1)
