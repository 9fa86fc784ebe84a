"""Tests of keras_vit.data.randaugment."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps
from PIL import ImageEnhance as E

from keras_vit.data import augment, randaugment

GREY = (randaugment.GREY,) * 3
ANY = (255, 0.01)  # any difference, of few values
NAMES = list(randaugment.OPERATIONS)
# What magnitude 10 means, on an image of 224 pixels: the argument of the original's code.
AT_TEN: list[tuple[str, Callable[[tf.Tensor], tf.Tensor]]] = [
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


def blotches() -> np.ndarray:
    """Soft blotches with some noise."""
    generator = np.random.default_rng(0)
    soft = tf.image.resize(generator.integers(0, 256, (5, 6, 3)), (40, 50), method="bicubic")
    noisy = soft.numpy() + generator.normal(0, 8, (40, 50, 3))
    return np.asarray(np.clip(noisy, 20, 230), np.uint8)


def affine(*numbers: float) -> object:
    return lambda image: image.transform(
        image.size, Image.Transform.AFFINE, numbers, fillcolor=GREY
    )


# Ours, Pillow's, how much values may differ, and the fraction of values that may differ at all.
# Pillow counts pixels from their corners: a shear moves them by half of it more.
CASES: list[tuple[Any, ...]] = [
    ("autocontrast", (), ImageOps.autocontrast, 1, 0.01),
    ("equalize", (), ImageOps.equalize, 0, 0),
    ("invert", (), ImageOps.invert, 0, 0),
    *[("posterize", (b,), lambda x, b=b: ImageOps.posterize(x, b), 0, 0) for b in (1, 4, 8)],
    *[("solarize", (t,), lambda x, t=t: ImageOps.solarize(x, t), 0, 0) for t in (0, 100, 256)],
    *[
        (kind.__name__.lower(), (f,), lambda x, kind=kind, f=f: kind(x).enhance(f), 0, 0)
        for f in (0.1, 0.7, 1.0, 1.9)
        for kind in (E.Color, E.Contrast, E.Brightness, E.Sharpness)
    ],
    *[
        ("rotate", (np.float32(np.radians(a)),), lambda x, a=a: x.rotate(a, fillcolor=GREY), *ANY)
        for a in (-30, 20)
    ],
    ("shear_x", (0.29,), affine(1, 0.29, -0.145, 0, 1, 0), 0, 0),
    ("shear_y", (-0.29,), affine(1, 0, 0, -0.29, 1, 0.145), 0, 0),
    *[("translate_x", (p,), affine(1, 0, p, 0, 1, 0), 0, 0) for p in (-7, 9, 60)],
    *[("translate_y", (p,), affine(1, 0, 0, 0, 1, p), 0, 0) for p in (-7, 9, 60)],
]


def test_operations_are_pillow_s() -> None:
    """Where Pillow has the operation, its pixels are ours; each case but the identities changes."""
    image = blotches()
    wrong, same = [], set()
    for name, arguments, reference, largest, fraction in CASES:
        actual = getattr(randaugment, name)(tf.constant(image), *arguments).numpy()
        expected = np.asarray(reference(Image.fromarray(image)))
        difference = np.abs(actual.astype(int) - expected)
        if actual.dtype != np.uint8 or difference.max() > largest:
            wrong.append((name, arguments, difference.max()))
        if (difference > 0).mean() > fraction:
            wrong.append((name, arguments, (difference > 0).mean()))
        if np.array_equal(expected, image):
            same.add(f"{name}{arguments}")

    assert wrong == []
    assert same == {
        "posterize(8,)",
        "solarize(256,)",
        *(f"{name}(1.0,)" for name in ("color", "contrast", "brightness", "sharpness")),
    }


def test_solarize_add_adds_to_the_dark_alone() -> None:
    """Values below 128 grow, up to 255; an image without contrast has none to stretch.

    Cutout greys a square of six pixels around the place, cut at the border, and nothing else.
    """
    flat = tf.fill((6, 7, 3), tf.constant(77, tf.uint8))
    for operation in (randaugment.autocontrast, randaugment.equalize):
        assert np.array_equal(operation(flat), flat)
    values = np.arange(256)
    image = tf.constant(np.repeat(values[:, None, None], 3, -1), tf.uint8)
    for addition in (0, 55, 110, 330):
        expected = np.where(values < 128, np.minimum(values + addition, 255), values)
        actual = randaugment.solarize_add(image, addition).numpy()
        assert np.array_equal(actual, np.repeat(expected[:, None, None], 3, -1))
    for place, rows, columns in (((0.5, 0.5), (17, 23), (22, 28)), ((0.0, 0.99), (0, 3), (46, 50))):
        expected = blotches()
        expected[slice(*rows), slice(*columns)] = randaugment.GREY
        actual = randaugment.cutout(tf.constant(blotches()), 3, place=tf.constant(place))
        assert np.array_equal(actual, expected)


def picture(side: int = 224) -> tf.Tensor:
    return tf.constant(np.random.default_rng(1).integers(0, 256, (side, side, 3)), tf.float32)


def drawn(name: str) -> list[float]:
    """Draws that choose an operation, the negative side and a place."""
    return [(NAMES.index(name) + 0.5) / len(NAMES), 0.9, 0.3, 0.6]


def test_magnitude_ten_is_what_it_is_in_the_original() -> None:
    """Each operation gets the strength that the paper's code gives it."""
    image = tf.cast(picture(), tf.uint8)
    wrong = [
        name
        for name, expected in AT_TEN
        if not np.array_equal(
            randaugment.distort(picture(), magnitude=10, uniform=drawn(name)),
            tf.cast(expected(image), tf.float32),
        )
    ]
    assert wrong == []


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


def test_every_magnitude_gives_pixels() -> None:
    """The ends of the range give images of the same shape, values 0..255."""
    for name in NAMES:
        for magnitude in (0, 30):
            actual = randaugment.distort(picture(9), magnitude=magnitude, uniform=drawn(name))
            assert actual.shape == (9, 9, 3), name
            assert 0 <= actual.numpy().min() <= actual.numpy().max() <= 255, name
