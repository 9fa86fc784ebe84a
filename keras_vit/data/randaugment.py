"""RandAugment: its operations on images, and how they are chosen.

Shapes: an image is (height, width, 3), uint8 in every operation; random numbers (layers, DRAWS).
"""

import functools
import math
from collections.abc import Callable

import tensorflow as tf

from keras_vit.data import augment

GREY = 128

# Pillow's weights of red, green and blue, in 65536ths (ITU-R 601-2): exact in float32.
_LUMA = (19595.0, 38470.0, 7471.0)
DRAWS = 4  # random numbers for each operation: which one, its direction, its place

# At magnitude 10; the lengths are fractions of an image of 224 pixels.
_DEGREES, _SHEAR, _SHIFT, _CUT = 30.0, 0.3, 100 / 224, 40 / 224
_BITS, _THRESHOLD, _ADDITION = 4, 256, 110
Operation = Callable[[tf.Tensor, float, tf.Tensor], tf.Tensor]


def autocontrast(image: tf.Tensor) -> tf.Tensor:
    """Stretches each channel to 0..255."""
    # Rows first: reducing beside an axis of three is slow.
    low = tf.reduce_min(tf.reduce_min(image, axis=0), axis=0)
    high = tf.reduce_max(tf.reduce_max(image, axis=0), axis=0)
    flat = tf.cast(low == high, tf.uint8)  # stays as it is
    low, high = low * (1 - flat), tf.maximum(high, 255 * flat)
    # As rows of width * 3, because broadcasting over an axis of three is slow, too.
    width = tf.shape(image)[1]
    rows = tf.reshape(image, (-1, width * 3)) - tf.tile(low, (width,))
    span = tf.tile(tf.cast(high - low, tf.float32), (width,))
    stretched = tf.cast(rows, tf.float32) * 255 / span
    return tf.reshape(tf.cast(stretched, tf.uint8), tf.shape(image))


def equalize(image: tf.Tensor) -> tf.Tensor:
    """Makes the values of each channel about equally frequent."""
    # The channels have one table after the other. As rows of width * 3, see `autocontrast`.
    width = tf.shape(image)[1]
    values = tf.reshape(tf.cast(image, tf.int32), (-1, width * 3))
    places = values + tf.tile(tf.constant((0, 256, 512)), (width,))
    counts = tf.reshape(tf.math.bincount(tf.reshape(places, (-1,)), minlength=768), (3, 256))
    largest = tf.reduce_max(tf.where(counts > 0, tf.range(256), 0), axis=1)
    # As Pillow's ImageOps.equalize: whole numbers, without the pixels of the largest value.
    step = (tf.reduce_sum(counts, axis=1) - tf.gather(counts, largest, batch_dims=1)) // 255
    step = step[:, None]
    below = tf.cumsum(counts, axis=1, exclusive=True)
    table = tf.minimum((below + step // 2) // tf.maximum(step, 1), 255)
    table = tf.where(step > 0, table, tf.range(256))
    equal = tf.gather(tf.cast(tf.reshape(table, (-1,)), tf.uint8), places)
    return tf.reshape(equal, tf.shape(image))


def invert(image: tf.Tensor) -> tf.Tensor:
    """Swaps dark and bright."""
    return 255 - image


def posterize(image: tf.Tensor, bits: int) -> tf.Tensor:
    """Keeps the highest bits of each value."""
    return tf.bitwise.bitwise_and(image, tf.constant(256 - 2 ** (8 - bits), tf.uint8))


def solarize(image: tf.Tensor, threshold: int) -> tf.Tensor:
    """Inverts the values from a threshold on."""
    if threshold > 255:
        return image
    bright = tf.cast(image >= tf.constant(threshold, tf.uint8), tf.uint8)
    return tf.bitwise.bitwise_xor(image, 255 * bright)


def solarize_add(image: tf.Tensor, addition: int) -> tf.Tensor:
    """Adds to the values below 128."""
    # uint8 wraps around above 255: no more is added than there is room for.
    room = tf.minimum(tf.constant(min(addition, 255), tf.uint8), 255 - image)
    return image + tf.cast(image < 128, tf.uint8) * room


def color(image: tf.Tensor, factor: float) -> tf.Tensor:
    """Blends with the grey image: 0 is grey, 1 the image, 2 more colourful."""
    return _blend(_grey(image), image, factor)


def contrast(image: tf.Tensor, factor: float) -> tf.Tensor:
    """Blends with the mean grey value; 1 is the image."""
    # The code that RandAugment comes from takes the number of pixels / 256 for the mean.
    mean = tf.reduce_mean(_grey(image))
    # Pillow's mean is int(mean + 0.5).
    return _blend(tf.floor(mean + 0.5), image, factor)


def brightness(image: tf.Tensor, factor: float) -> tf.Tensor:
    """Blends with black; 1 is the image."""
    return _blend(0, image, factor)


def sharpness(image: tf.Tensor, factor: float) -> tf.Tensor:
    """Blends with a smoothed image; 1 is the image. The outermost pixels stay."""
    # Pillow's ImageFilter.SMOOTH: the 3 by 3 pixels around, the middle one five times.
    values = tf.cast(image, tf.float32)
    middle = values[1:-1, 1:-1]
    three = values[:-2] + values[1:-1] + values[2:]
    smooth = (three[:, :-2] + three[:, 1:-1] + three[:, 2:] + 4 * middle) / 13
    blended = _blend(tf.floor(smooth + 0.5), image[1:-1, 1:-1], factor)
    rows = tf.concat([image[1:-1, :1], blended, image[1:-1, -1:]], axis=1)
    return tf.concat([image[:1], rows, image[-1:]], axis=0)


def rotate(image: tf.Tensor, radians: tf.Tensor) -> tf.Tensor:
    """Turns about the middle, counter-clockwise."""
    # About (side - 1) / 2, the middle of the first and the last pixel's centre.
    sine, cosine = tf.sin(radians), tf.cos(radians)
    bottom, right = (tf.cast(side - 1, tf.float32) for side in tf.unstack(tf.shape(image)[:2]))
    to_x = (right - (cosine * right - sine * bottom)) / 2
    to_y = (bottom - (sine * right + cosine * bottom)) / 2
    return _transform(image, [cosine, -sine, to_x, sine, cosine, to_y])


def shear_x(image: tf.Tensor, amount: tf.Tensor) -> tf.Tensor:
    """Moves each row to the left, by `amount` times its distance from the top."""
    return _transform(image, [1, amount, 0, 0, 1, 0])


def shear_y(image: tf.Tensor, amount: tf.Tensor) -> tf.Tensor:
    """Moves each column up, by `amount` times its distance from the left."""
    return _transform(image, [1, 0, 0, amount, 1, 0])


def translate_x(image: tf.Tensor, pixels: tf.Tensor) -> tf.Tensor:
    """Moves to the left, by whole pixels."""
    return tf.transpose(translate_y(tf.transpose(image, (1, 0, 2)), pixels), (1, 0, 2))


def translate_y(image: tf.Tensor, pixels: tf.Tensor) -> tf.Tensor:
    """Moves up, by whole pixels."""
    height = tf.shape(image)[0]
    shift = tf.clip_by_value(tf.cast(tf.round(pixels), tf.int32), -height, height)
    above, below = tf.maximum(-shift, 0), tf.maximum(shift, 0)
    padded = tf.pad(image, [[above, below], [0, 0], [0, 0]], constant_values=GREY)
    return padded[below : below + height]


def cutout(image: tf.Tensor, half: int, *, place: tf.Tensor) -> tf.Tensor:
    """Makes a square grey, of `2 * half` pixels a side, cut at the border.

    Args:
        image: the image.
        half: half of the side.
        place: of its middle, from the top and from the left, 0 to 1.
    """
    sides = tf.shape(image)[:2]
    middle = tf.cast(place * tf.cast(sides, tf.float32), tf.int32)[:, None]
    mask = augment.inside(middle - half, middle + half, shape=sides, channels=3)[0]
    visible = tf.where(mask, tf.constant(GREY, tf.uint8), tf.reshape(image, tf.shape(mask)))
    return tf.reshape(visible, tf.shape(image))


def distort(image: tf.Tensor, *, magnitude: float, uniform: tf.Tensor) -> tf.Tensor:
    """Applies as many random operations as there are numbers for, one after the other.

    Only the chosen operation is executed. Magnitude 0 still changes the image: colours fade to a
    tenth, and solarization inverts. The result has whole numbers, in float32.

    Args:
        image: pixels 0..255, float32 of shape (height, width, 3).
        magnitude: how strong the operations are, 0 to 30.
        uniform: random numbers in [0, 1), `DRAWS` for each operation.
    """
    uniform = tf.reshape(tf.convert_to_tensor(uniform), (-1, DRAWS))
    if not uniform.shape[0]:
        return image

    def apply_one(layer: tf.Tensor, varied: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        numbers = uniform[layer]
        branches = [
            functools.partial(operation, varied, magnitude / 10, numbers)
            for operation in OPERATIONS.values()
        ]
        index = tf.cast(numbers[0] * len(OPERATIONS), tf.int32)
        return layer + 1, tf.ensure_shape(tf.switch_case(index, branches), varied.shape)

    # A loop, because each copy of the sixteen operations makes the graph larger and slower to make.
    start = (0, tf.cast(tf.round(image), tf.uint8))
    _, varied = tf.while_loop(lambda layer, _: layer < uniform.shape[0], apply_one, start)
    return tf.cast(varied, tf.float32)


def _either(amount: tf.Tensor | float, uniform: tf.Tensor) -> tf.Tensor:
    return tf.where(uniform[1] < 0.5, amount, -amount)


def _factor(level: float) -> float:
    # AutoAugment's range of 0.1 to 1.9; a factor of 1 would change nothing.
    return 0.1 + 1.8 * level


def _shift(image: tf.Tensor, level: float, uniform: tf.Tensor) -> tf.Tensor:
    return _either(level * _SHIFT * _side(image), uniform)


OPERATIONS: dict[str, Operation] = {
    "autocontrast": lambda image, level, uniform: autocontrast(image),
    "equalize": lambda image, level, uniform: equalize(image),
    "invert": lambda image, level, uniform: invert(image),
    "rotate": lambda image, level, uniform: rotate(
        image, _either(math.radians(level * _DEGREES), uniform)
    ),
    # No bit at all is more than the original can take away: it keeps one.
    "posterize": lambda image, level, uniform: posterize(image, min(max(int(level * _BITS), 1), 8)),
    "solarize": lambda image, level, uniform: solarize(image, int(level * _THRESHOLD)),
    "color": lambda image, level, uniform: color(image, _factor(level)),
    "contrast": lambda image, level, uniform: contrast(image, _factor(level)),
    "brightness": lambda image, level, uniform: brightness(image, _factor(level)),
    "sharpness": lambda image, level, uniform: sharpness(image, _factor(level)),
    "shear_x": lambda image, level, uniform: shear_x(image, _either(level * _SHEAR, uniform)),
    "shear_y": lambda image, level, uniform: shear_y(image, _either(level * _SHEAR, uniform)),
    "translate_x": lambda image, level, uniform: translate_x(image, _shift(image, level, uniform)),
    "translate_y": lambda image, level, uniform: translate_y(image, _shift(image, level, uniform)),
    "cutout": lambda image, level, uniform: cutout(
        image, tf.cast(level * _CUT * _side(image), tf.int32), place=uniform[2:]
    ),
    "solarize_add": lambda image, level, uniform: solarize_add(image, int(level * _ADDITION)),
}


def _grey(image: tf.Tensor) -> tf.Tensor:
    weights = tf.constant([[weight] * 3 for weight in _LUMA])
    pixels = tf.reshape(tf.cast(image, tf.float32), (-1, 3))
    # Pillow's (19595 r + 38470 g + 7471 b + 0x8000) >> 16.
    grey = tf.floor(tf.matmul(pixels, weights) / 0x10000 + 0.5)
    return tf.reshape(grey, tf.shape(image))


def _blend(other: tf.Tensor, image: tf.Tensor, factor: float) -> tf.Tensor:
    """From `other` at 0 to the image at 1 and beyond, cut off as Pillow does."""
    other = tf.cast(other, tf.float32)
    mixed = other + factor * (tf.cast(image, tf.float32) - other)
    return tf.cast(tf.clip_by_value(mixed, 0.0, 255.0), tf.uint8)


def _transform(image: tf.Tensor, affine: list[tf.Tensor | float]) -> tf.Tensor:
    """Takes each output pixel (x, y) from the input pixel nearest to `affine` of it."""
    rows = tf.stack([tf.cast(number, tf.float32) for number in [*affine, 0, 0]])
    transformed = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=rows[None],
        output_shape=tf.shape(image)[:2],
        interpolation="NEAREST",
        fill_mode="CONSTANT",
        fill_value=float(GREY),
    )
    return transformed[0]


def _side(image: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_min(tf.shape(image)[:2]), tf.float32)
