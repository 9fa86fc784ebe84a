"""Tests of keras_vit.data.randaugment."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps

from keras_vit.data import randaugment

GREY = (randaugment.GREY,) * 3


def picture(low: int = 20, high: int = 230) -> np.ndarray:
    """Soft blotches with some noise."""
    generator = np.random.default_rng(0)
    soft = tf.image.resize(generator.integers(0, 256, (5, 6, 3)), (40, 50), method="bicubic")
    noisy = soft.numpy() + generator.normal(0, 8, (40, 50, 3))
    return np.asarray(np.clip(noisy, low, high), np.uint8)


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
        (name, (f,), lambda x, kind=kind, f=f: kind(x).enhance(f), 0, 0)
        for f in (0.1, 0.7, 1.0, 1.9)
        for name, kind in (
            ("color", ImageEnhance.Color),
            ("contrast", ImageEnhance.Contrast),
            ("brightness", ImageEnhance.Brightness),
            ("sharpness", ImageEnhance.Sharpness),
        )
    ],
    *[
        (
            "rotate",
            (np.float32(np.radians(a)),),
            lambda x, a=a: x.rotate(a, fillcolor=GREY),
            255,
            0.01,
        )
        for a in (-30, 20)
    ],
    ("shear_x", (0.29,), affine(1, 0.29, -0.145, 0, 1, 0), 0, 0),
    ("shear_y", (-0.29,), affine(1, 0, 0, -0.29, 1, 0.145), 0, 0),
    *[("translate_x", (p,), affine(1, 0, p, 0, 1, 0), 0, 0) for p in (-7, 9, 60)],
    *[("translate_y", (p,), affine(1, 0, 0, 0, 1, p), 0, 0) for p in (-7, 9, 60)],
]


@pytest.mark.parametrize(
    ("name", "arguments", "reference", "largest", "fraction"),
    CASES,
    ids=[f"{name}{arguments}" for name, arguments, *_ in CASES],
)
def test_operations_are_pillow_s(
    name: str,
    arguments: tuple[float, ...],
    reference: Callable[[Image.Image], Any],
    largest: int,
    fraction: float,
) -> None:
    """Where Pillow has the operation, its pixels are ours."""
    image = picture()
    actual = getattr(randaugment, name)(tf.constant(image), *arguments).numpy()
    expected = np.asarray(reference(Image.fromarray(image)))

    difference = np.abs(actual.astype(int) - expected)
    assert actual.dtype == np.uint8
    assert difference.max() <= largest
    assert (difference > 0).mean() <= fraction


def test_comparing_with_pillow_can_fail() -> None:
    """Each case but the identities changes the picture that it is tried on."""
    same = {
        f"{name}{arguments}"
        for name, arguments, reference, *_ in CASES
        if np.array_equal(reference(Image.fromarray(picture())), picture())
    }
    assert same == {
        "posterize(8,)",
        "solarize(256,)",
        *(f"{name}(1.0,)" for name in ("color", "contrast", "brightness", "sharpness")),
    }


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_one_colour_stays_what_it_is(name: str) -> None:
    """An image without contrast has none to stretch."""
    flat = tf.fill((6, 7, 3), tf.constant(77, tf.uint8))
    assert np.array_equal(getattr(randaugment, name)(flat), flat)


@pytest.mark.parametrize("addition", [0, 55, 110, 330])
def test_solarize_add_adds_to_the_dark_alone(addition: int) -> None:
    """Values below 128 grow, up to 255; the others stay."""
    values = np.arange(256)
    actual = randaugment.solarize_add(
        tf.constant(np.repeat(values[:, None, None], 3, -1), tf.uint8), addition
    ).numpy()
    expected = np.where(values < 128, np.minimum(values + addition, 255), values)
    assert np.array_equal(actual, np.repeat(expected[:, None, None], 3, -1))


@pytest.mark.parametrize(
    ("place", "rows", "columns"),
    [((0.5, 0.5), (17, 23), (22, 28)), ((0.0, 0.99), (0, 3), (46, 50))],
)
def test_cutout_greys_one_square_cut_at_the_border(
    place: tuple[float, float], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """A square of six pixels around the place, and nothing else."""
    image = picture()
    expected = image.copy()
    expected[slice(*rows), slice(*columns)] = randaugment.GREY
    actual = randaugment.cutout(tf.constant(image), 3, place=tf.constant(place))
    assert np.array_equal(actual, expected)
