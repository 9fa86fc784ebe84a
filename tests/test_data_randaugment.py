"""Tests of keras_vit.data.randaugment."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import augment, randaugment

NAMES = list(randaugment.OPERATIONS)
# What magnitude 10 means, on an image of 224 pixels: the argument of the original's code.
AT_TEN = [
    ("rotate", lambda image: randaugment.rotate(image, math.radians(-30))),
    ("posterize", lambda image: randaugment.posterize(image, 4)),
    ("solarize", lambda image: image),
    ("solarize_add", lambda image: randaugment.solarize_add(image, 110)),
    ("color", lambda image: randaugment.color(image, 1.9)),
    ("contrast", lambda image: randaugment.contrast(image, 1.9)),
    ("brightness", lambda image: randaugment.brightness(image, 1.9)),
    ("sharpness", lambda image: randaugment.sharpness(image, 1.9)),
    ("shear_x", lambda image: randaugment.shear_x(image, -0.3)),
    ("shear_y", lambda image: randaugment.shear_y(image, -0.3)),
    ("translate_x", lambda image: randaugment.translate_x(image, -100)),
    ("translate_y", lambda image: randaugment.translate_y(image, -100)),
    ("cutout", lambda image: randaugment.cutout(image, 40, place=tf.constant([0.3, 0.6]))),
]


def picture(side: int = 224) -> tf.Tensor:
    return tf.constant(np.random.default_rng(1).integers(0, 256, (side, side, 3)), tf.float32)


def drawn(name: str) -> list[float]:
    """Draws that choose an operation, the negative side and a place."""
    return [(NAMES.index(name) + 0.5) / len(NAMES), 0.9, 0.3, 0.6]


@pytest.mark.parametrize(("name", "expected"), AT_TEN, ids=[name for name, _ in AT_TEN])
def test_magnitude_ten_is_what_it_is_in_the_original(
    name: str, expected: Callable[[Any], Any]
) -> None:
    """Each operation gets the strength that the paper's code gives it."""
    actual = randaugment.distort(picture(), magnitude=10, uniform=drawn(name))
    image = tf.cast(picture(), tf.uint8)
    assert np.array_equal(actual, tf.cast(expected(image), tf.float32))


def test_each_operation_comes_as_often_as_any_other() -> None:
    """Uniform draws choose uniformly among the sixteen, and both sides."""
    image, rest = picture(20), drawn("invert")[1:]
    known = np.array(
        [randaugment.distort(image, magnitude=7, uniform=drawn(name)).numpy() for name in NAMES]
    )
    numbers = augment.draw_uniform(1, 1600, seed=(1, 2))[0]

    def vary(number: tf.Tensor) -> tf.Tensor:
        return randaugment.distort(image, magnitude=7, uniform=tf.stack([number, *rest]))

    actual = tf.data.Dataset.from_tensor_slices(numbers).map(vary).batch(1600).get_single_element()
    counts = [int((actual.numpy() == each).all(axis=(1, 2, 3)).sum()) for each in known]

    assert len(NAMES) == len(np.unique(known, axis=0)) == 16
    assert sum(counts) == 1600
    assert min(counts) > 65
    assert max(counts) < 140


def test_operations_follow_each_other() -> None:
    """Two layers are the one operation after the other, and none is the image untouched."""
    both = randaugment.distort(
        picture(32), magnitude=7, uniform=[*drawn("translate_x"), *drawn("equalize")]
    )
    first = randaugment.distort(picture(32), magnitude=7, uniform=drawn("translate_x"))
    second = randaugment.distort(first, magnitude=7, uniform=drawn("equalize"))

    assert np.array_equal(both, second)
    assert not np.array_equal(both, first)
    fractions = picture(8) / 3
    assert np.array_equal(
        randaugment.distort(fractions, magnitude=7, uniform=tf.zeros((0,))), fractions
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [0, 30])
def test_every_magnitude_gives_pixels(name: str, magnitude: int) -> None:
    """The ends of the range give images of the same shape, values 0..255."""
    actual = randaugment.distort(picture(9), magnitude=magnitude, uniform=drawn(name)).numpy()
    assert actual.shape == (9, 9, 3)
    assert 0 <= actual.min() <= actual.max() <= 255
