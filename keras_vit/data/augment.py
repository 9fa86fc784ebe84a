"""Varies training images at random, each draw a pure function of its seed.

Shapes: images (batch, height, width, channels), random numbers (numbers, count) for count images.
"""

import dataclasses
import math
from typing import Literal

import tensorflow as tf

from keras_vit.limits import check_fields

WHOLE = (0, 1)  # (index, count) of the only worker
# Width over height of a random crop: the default of `tf.image.sample_distorted_bounding_box`, for
# the originals pass none (vit_jax/input_pipeline.py; big_vision, pp/ops_image.py).
ASPECT = (0.75, 1.33)
# Of erased rectangles: area as a fraction of the image, and aspect, from Section 4.2 of the paper.
ERASED_AREA = (0.02, 0.4)
ERASED_ASPECT = (0.3, 1 / 0.3)
Mixing = Literal["image", "batch"]
TINY = 1e-30


def draw_key(seed: int, use: int, step: tf.Tensor) -> tf.Tensor:
    """Returns the two integers that decide one use of randomness in one step."""
    return tf.random.experimental.stateless_fold_in(tf.constant((seed, use), tf.int64), step)


def draw_uniform(
    numbers: int,
    count: tf.Tensor,
    *,
    seed: tf.Tensor,
    shard: tuple[int, int] = WHOLE,
    low: float = 0.0,
) -> tf.Tensor:
    """Draws numbers from `low` to 1 for each of so many images, (numbers, count), by a seed."""
    # All workers' numbers are drawn: those of an image do not depend on the number of workers.
    uniform = tf.random.stateless_uniform((numbers, count * shard[1]), seed, minval=low)
    return uniform[:, count * shard[0] : count * (shard[0] + 1)]


def draw_keys(count: tf.Tensor, *, seed: tf.Tensor, shard: tuple[int, int] = WHOLE) -> tf.Tensor:
    """Draws a seed of its own for each image, int32 of shape (count, 2)."""
    keys = tf.random.stateless_uniform(
        (count * shard[1], 2), seed, minval=None, maxval=None, dtype=tf.int32
    )
    return keys[count * shard[0] : count * (shard[0] + 1)]


def inside(starts: tf.Tensor, ends: tf.Tensor, *, shape: tf.Tensor, channels: int = 1) -> tf.Tensor:
    """Returns whether each value of an image lies in the image's rectangle.

    That is of rows and columns from `starts`, (2, batch), to before `ends`. The result is
    (batch, height, width * channels): over an axis of three, TensorFlow's operations are slow.
    """
    starts, ends = tf.convert_to_tensor(starts), tf.convert_to_tensor(ends)
    rows, columns = (
        (tf.range(shape[axis]) >= starts[axis, :, None])
        & (tf.range(shape[axis]) < ends[axis, :, None])
        for axis in (0, 1)
    )
    return rows[:, :, None] & tf.repeat(columns, channels, axis=1)[:, None, :]


def inception_part(shape: tf.Tensor, *, smallest_area: float, seed: tf.Tensor) -> tf.Tensor:
    """Returns a random part, (top, left, height, width), as the originals draw area and aspect.

    It is TensorFlow's `sample_distorted_bounding_box` with the originals' arguments: a part that
    does not fit is drawn again, and after 100 attempts the whole image is used.
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
    """Returns the part, (top, left, height, width), cut out of an image resized by its short side.

    Resizing so that `ratio * size` fits in, and cutting `size` out of that, shows the same as
    cutting first and resizing only the part.

    Args:
        shape: (height, width) of the image, int32.
        size: (height, width) in pixels of what the model sees.
        ratio: how much larger the short side is made, 448 / 384 in the original's transfers.
        place: from the top and from the left, 0 to 1; a half is the middle.
    """
    sides = tf.cast(shape, tf.float32)
    seen = tf.constant(size, tf.float32)
    seen = seen * tf.reduce_min(sides / seen) / ratio
    part = tf.clip_by_value(tf.cast(tf.round(seen), tf.int32), 1, shape)
    free = tf.cast(shape - part, tf.float32)
    start = tf.minimum(tf.cast(place * (free + 1), tf.int32), shape - part)
    return tf.concat([start, part], axis=0)


def erase_rectangles(
    images: tf.Tensor, *, probability: float, seed: tf.Tensor, shard: tuple[int, int] = WHOLE
) -> tf.Tensor:
    """Puts noise in place of a rectangle of some images, 0..255, each at its own place.

    Each erased pixel takes a random value 0..255, which is the paper's best. A rectangle that would
    be higher or wider than the image is cut to it; the paper draws another one.
    """
    if not probability:
        return images
    shape = tf.shape(images)
    uniform = draw_uniform(5, shape[0], seed=seed, shard=shard)
    area = ERASED_AREA[0] + uniform[0] * (ERASED_AREA[1] - ERASED_AREA[0])
    # Geometric: a rectangle is as often upright as lying.
    aspect = tf.exp(
        math.log(ERASED_ASPECT[0]) + uniform[1] * math.log(ERASED_ASPECT[1] / ERASED_ASPECT[0])
    )
    sides = tf.minimum(tf.stack([tf.sqrt(area * aspect), tf.sqrt(area / aspect)]), 1.0)
    size = tf.cast(shape[1:3, None], tf.float32)  # of the image; height and width are rows
    lengths = tf.maximum(tf.cast(tf.round(sides * size), tf.int32), 1)
    free = tf.cast(shape[1:3, None] - lengths + 1, tf.float32)
    starts = tf.cast(uniform[2:4] * free, tf.int32)
    mask = inside(starts, starts + lengths, shape=shape[1:3], channels=images.shape[-1])
    mask &= (uniform[4] < probability)[:, None, None]
    noise = tf.reshape(_noise(images, seed=seed, shard=shard), tf.shape(mask))
    erased = tf.where(mask, noise, tf.reshape(images, tf.shape(mask)))
    return tf.ensure_shape(tf.reshape(erased, shape), images.shape)


def mix_batch(
    images: tf.Tensor,
    targets: tf.Tensor,
    *,
    alpha: float,
    seed: tf.Tensor,
    cutmix: float = 0.0,
    per: Mixing = "image",
    shard: tuple[int, int] = WHOLE,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mixes each image and its target with those of another of the batch.

    MixUp blends the two images. CutMix pastes a rectangle of the other one, at the place where it
    was, cut at the border; the target's share is the area that is left. With both, each image, or
    each batch, gets one or the other, with equal chances.

    Example:
        >>> import tensorflow as tf
        >>> images, targets = mix_batch(tf.ones((2, 8, 8, 3)), tf.eye(2), alpha=0.2, seed=(1, 2))
        >>> float(tf.reduce_sum(targets))
        2.0

    Args:
        images: pixels, float32 of shape (batch, height, width, 3).
        targets: probabilities of the classes, float32 of shape (batch, classes).
        alpha: MixUp's: the share that an image keeps is drawn from Beta(alpha, alpha), or one minus
            that if it is less than half; 0 blends nothing.
        seed: two integers.
        cutmix: CutMix's alpha: the share that an image keeps, before the rectangle is cut at the
            border, is drawn from Beta(cutmix, cutmix); 0 pastes nothing.
        per: "image" draws a share, a rectangle and a partner for each image; "batch" draws one
            share, or rectangle, for all, and mixes each image with the one before it, as big_vision
            does. DeiT's (timm's "batch" mode) is the same on a shuffled batch: there images are
            mixed in pairs, and a share of b for the one is a share of 1 - b for the other.
        shard: (index of this worker, number of workers), see `keras_vit.data.train_batches`. An
            image is mixed with one that the same worker has.

    Returns:
        Images and targets of the same shapes.

    Source: of "batch", google-research/big_vision, big_vision/utils.py, get_mixup.
    """
    if not alpha and not cutmix:
        return images, targets
    count = tf.shape(images)[0]
    keys = tf.random.experimental.stateless_split(tf.convert_to_tensor(seed), 2)
    size = tf.shape(images)[1:3]
    drawn = count
    if per == "batch":  # one draw, the same on every worker
        partners = tf.roll(tf.range(count), shift=1, axis=0)
        drawn, shard = 1, WHOLE
    else:
        # Another permutation on each worker; the shares are those of its part of the whole batch.
        order = tf.random.experimental.stateless_fold_in(keys[1], shard[0]) if shard[0] else keys[1]
        partners = tf.random.experimental.stateless_shuffle(tf.range(count), seed=order)
    weights, share = _weights(size, drawn, alpha=alpha, cutmix=cutmix, seed=keys[0], shard=shard)
    images = images * weights + tf.gather(images, partners) * (1 - weights)
    share = share[:, None]
    return images, targets * share + tf.gather(targets, partners) * (1 - share)


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
        check_fields(
            self,
            {
                "rotation": (0, 180),
                "shift": (0, 1),
                "zoom": (0, 0.9),
                "crop": (0.01, 1),
                "resize_small": (0, 10),
                "randaugment_layers": (0, 16),
                "randaugment_magnitude": (0, 30),
                "erase": (0, 1),
            },
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


def draw_transforms(
    count: tf.Tensor, *, seed: tf.Tensor, shard: tuple[int, int] = WHOLE
) -> tf.Tensor:
    """Draws what `transform_batch` does to each image: five numbers from -1 to 1, (5, count)."""
    return draw_uniform(5, count, seed=seed, shard=shard, low=-1.0)


def mirror(image: tf.Tensor, *, uniform: tf.Tensor) -> tf.Tensor:
    """Mirrors an image left to right where the last of its `draw_transforms` is negative."""
    # One image at a time: a choice between a batch and its mirror costs ten times as much.
    return tf.raw_ops.Reverse(tensor=image, dims=tf.stack([False, uniform < 0, False]))


def transform_batch(
    images: tf.Tensor,
    *,
    augmentation: Augmentation,
    seed: tf.Tensor,
    shard: tuple[int, int] = WHOLE,
) -> tf.Tensor:
    """Mirrors, rotates, shifts and zooms each image by its own random amount.

    Images are float32 (batch, height, width, 3). Pixels that nothing covers are black.
    """
    if not (augmentation.is_affine or augmentation.flip):
        return images
    batch, height, width = tf.shape(images)[0], tf.shape(images)[1], tf.shape(images)[2]
    uniform = draw_transforms(batch, seed=seed, shard=shard)
    if augmentation.flip:
        images = tf.map_fn(
            lambda each: mirror(each[0], uniform=each[1]),
            (images, uniform[-1]),
            fn_output_signature=tf.TensorSpec(images.shape[1:], images.dtype),
        )
    if not augmentation.is_affine:
        return images
    transformed = tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=_transforms(height, width, augmentation=augmentation, uniform=uniform),
        output_shape=tf.stack([height, width]),
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
        fill_value=0.0,
    )
    return tf.ensure_shape(transformed, images.shape)


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

    noise_seed = tf.random.experimental.stateless_fold_in(tf.convert_to_tensor(seed), 1)
    keys = draw_keys(shape[0], seed=noise_seed, shard=shard)
    noise = tf.map_fn(draw, keys, fn_output_signature=tf.uint8)
    return tf.cast(tf.ensure_shape(noise, images.shape), images.dtype)


def _weights(
    size: tf.Tensor,
    count: tf.Tensor,
    *,
    alpha: float,
    cutmix: float,
    seed: tf.Tensor,
    shard: tuple[int, int],
) -> tuple[tf.Tensor, tf.Tensor]:
    """How much is kept of each pixel, (count, height or 1, width or 1, 1), and of each target."""
    shares = tf.ones(count)
    if alpha:
        gammas = _gammas(count, alpha=alpha, seed=seed, shard=shard)
        shares = tf.reduce_max(gammas, axis=0) / tf.reduce_sum(gammas, axis=0)
    if not cutmix:
        return shares[:, None, None, None], shares
    keys = tf.random.experimental.stateless_split(seed, 2)
    uniform = draw_uniform(3, count, seed=keys[0], shard=shard)
    gammas = _gammas(count, alpha=cutmix, seed=keys[1], shard=shard)
    share = gammas[0] / tf.reduce_sum(gammas, axis=0)
    # Rectangles of the area 1 - share around a centre, cut at the border.
    sides = tf.cast(size[:, None], tf.float32)
    lengths = tf.cast(tf.sqrt(1 - share) * sides, tf.int32)
    first = tf.cast(uniform[:2] * sides, tf.int32) - lengths // 2
    ends = tf.minimum(first + lengths, size[:, None])
    rectangles = inside(tf.maximum(first, 0), ends, shape=size)[..., None]
    outside = 1 - tf.cast(rectangles, tf.float32)
    is_cut = (uniform[2] < 0.5) if alpha else tf.ones(count, tf.bool)
    pixels = tf.where(is_cut[:, None, None, None], outside, shares[:, None, None, None])
    # Measured on the pixels, since the rectangle may have been cut at the border.
    return pixels, tf.where(is_cut, tf.reduce_mean(outside, axis=(1, 2, 3)), shares)


def _gammas(
    count: tf.Tensor, *, alpha: float, seed: tf.Tensor, shard: tuple[int, int]
) -> tf.Tensor:
    """Two numbers for each image, whose share in their sum is Beta(alpha, alpha)."""
    # G1 / (G1 + G2) of two gamma draws is a beta draw, of which TensorFlow has none without state.
    gammas = tf.random.stateless_gamma((2, count * shard[1]), seed, alpha=alpha)
    gammas = gammas[:, count * shard[0] : count * (shard[0] + 1)]
    return tf.maximum(gammas, TINY)  # both may be too small for a float


def _transforms(
    height: tf.Tensor, width: tf.Tensor, *, augmentation: Augmentation, uniform: tf.Tensor
) -> tf.Tensor:
    """Rows of eight numbers that take an output pixel (x, y) to the input pixel it shows."""
    angle = uniform[0] * math.radians(augmentation.rotation)
    # Geometric: an image is as often enlarged by a factor as reduced by it.
    scale = tf.exp(uniform[1] * math.log(1 + augmentation.zoom))
    height, width = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
    center_x, center_y = (width - 1) / 2, (height - 1) / 2
    a, b = scale * tf.cos(angle), scale * tf.sin(angle)
    shift_x = uniform[2] * augmentation.shift * width
    shift_y = uniform[3] * augmentation.shift * height
    # Turn about the centre, then shift.
    to_x = center_x - (a * center_x - b * center_y) + shift_x
    to_y = center_y - (b * center_x + a * center_y) + shift_y
    zeros = tf.zeros_like(scale)
    return tf.stack([a, -b, to_x, b, a, to_y, zeros, zeros], axis=1)
