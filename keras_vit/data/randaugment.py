"""RandAugment (arXiv 1909.13719): a few random operations on each image, all of one magnitude.

The operations and what a magnitude means to them are those of the code that the published weights
were trained with (google-research/big_vision, big_vision/pp/autoaugment.py), with the contrast put
right, and lengths in proportion to the image instead of for 224 pixels alone.
"""

import functools
import math
from collections.abc import Callable

import tensorflow as tf

from keras_vit.data import operations

DRAWS = 4  # random numbers for each operation: which one, its direction, its place

# At magnitude 10; the lengths are fractions of an image of 224 pixels.
_DEGREES, _SHEAR, _SHIFT, _CUT = 30.0, 0.3, 100 / 224, 40 / 224
_BITS, _THRESHOLD, _ADDITION = 4, 256, 110

Operation = Callable[[tf.Tensor, float, tf.Tensor], tf.Tensor]


def distort(image: tf.Tensor, *, magnitude: float, drawn: tf.Tensor) -> tf.Tensor:
    """Applies as many random operations as there are numbers for, one after the other.

    Only the operation that is drawn is executed. At magnitude 0 this is not nothing: colours fade
    to a tenth, and solarization inverts.

    Example:
        >>> import tensorflow as tf
        >>> image = tf.fill((8, 8, 3), 200.0)
        >>> drawn = [2.5 / 16, 0.0, 0.0, 0.0]  # the third operation inverts
        >>> float(distort(image, magnitude=10, drawn=drawn)[0, 0, 0])
        55.0

    Args:
        image: pixels 0..255, float32 of shape (height, width, 3).
        magnitude: how strong the operations are, 0 to 30.
        drawn: numbers in [0, 1), `DRAWS` for each operation.

    Returns:
        The image, whole numbers in float32 if there are operations.
    """
    drawn = tf.reshape(tf.convert_to_tensor(drawn), (-1, DRAWS))
    if not drawn.shape[0]:
        return image
    # A loop, because each copy of the sixteen operations makes the graph larger and slower to make.
    _, varied = tf.while_loop(
        lambda layer, varied: layer < drawn.shape[0],
        lambda layer, varied: (layer + 1, _one(varied, level=magnitude / 10, drawn=drawn[layer])),
        (0, tf.cast(tf.round(image), tf.uint8)),
    )
    return tf.cast(varied, tf.float32)


def _one(image: tf.Tensor, *, level: float, drawn: tf.Tensor) -> tf.Tensor:
    chosen = tf.cast(drawn[0] * len(OPERATIONS), tf.int32)
    branches = [functools.partial(apply, image, level, drawn) for apply in OPERATIONS.values()]
    return tf.ensure_shape(tf.switch_case(chosen, branches), image.shape)


def _either(amount: tf.Tensor | float, drawn: tf.Tensor) -> tf.Tensor:
    """The amount to the one side or the other."""
    return tf.where(drawn[1] < 0.5, amount, -amount)


def _factor(level: float) -> float:
    return 0.1 + 1.8 * level


def _posterize(image: tf.Tensor, level: float, drawn: tf.Tensor) -> tf.Tensor:
    # No bit at all is more than the original can take away: it keeps one.
    return operations.posterize(image, min(max(int(level * _BITS), 1), 8))


def _cutout(image: tf.Tensor, level: float, drawn: tf.Tensor) -> tf.Tensor:
    half = tf.cast(level * _CUT * _side(image), tf.int32)
    return operations.cutout(image, half, place=drawn[2:])


def _rotate(image: tf.Tensor, level: float, drawn: tf.Tensor) -> tf.Tensor:
    return operations.rotate(image, _either(math.radians(level * _DEGREES), drawn))


def _shift(image: tf.Tensor, level: float, drawn: tf.Tensor) -> tf.Tensor:
    return _either(level * _SHIFT * _side(image), drawn)


def _side(image: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_min(tf.shape(image)[:2]), tf.float32)


OPERATIONS: dict[str, Operation] = {
    "autocontrast": lambda image, level, drawn: operations.autocontrast(image),
    "equalize": lambda image, level, drawn: operations.equalize(image),
    "invert": lambda image, level, drawn: operations.invert(image),
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": lambda image, level, drawn: operations.solarize(image, int(level * _THRESHOLD)),
    "color": lambda image, level, drawn: operations.color(image, _factor(level)),
    "contrast": lambda image, level, drawn: operations.contrast(image, _factor(level)),
    "brightness": lambda image, level, drawn: operations.brightness(image, _factor(level)),
    "sharpness": lambda image, level, drawn: operations.sharpness(image, _factor(level)),
    "shear_x": lambda image, level, drawn: operations.shear_x(
        image, _either(level * _SHEAR, drawn)
    ),
    "shear_y": lambda image, level, drawn: operations.shear_y(
        image, _either(level * _SHEAR, drawn)
    ),
    "translate_x": lambda image, level, drawn: operations.translate_x(
        image, _shift(image, level, drawn)
    ),
    "translate_y": lambda image, level, drawn: operations.translate_y(
        image, _shift(image, level, drawn)
    ),
    "cutout": _cutout,
    "solarize_add": lambda image, level, drawn: operations.solarize_add(
        image, int(level * _ADDITION)
    ),
}
