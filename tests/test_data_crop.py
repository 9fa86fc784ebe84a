"""Tests of keras_vit.data.augment."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import augment

COUNT = 3000
# Two samples of COUNT from one distribution lie further apart once in ten thousand times
# (Kolmogorov and Smirnov: sqrt(log(2 / 1e-4) / COUNT)).
BOUND = 0.058
# Shapes of images, from photographs to strips in which hardly a part of the aspect fits.
SHAPES = [(375, 500), (500, 375), (64, 64), (90, 800), (800, 90), (7, 5)]
AREAS = [0.05, 0.3]


def sampled(draw: Callable[[tf.Tensor], tf.Tensor]) -> np.ndarray:
    """COUNT parts, (top, left, height, width); `draw` takes a number of its own each time."""
    parts = tf.data.Dataset.range(COUNT).map(draw).batch(COUNT)
    return next(parts.as_numpy_iterator())


def ours(shape: tuple[int, int], area: float) -> np.ndarray:
    return sampled(
        lambda number: augment.inception_part(
            shape, smallest_area=area, seed=tf.random.experimental.stateless_fold_in((1, 2), number)
        )
    )


def originals(shape: tuple[int, int], area: float) -> np.ndarray:
    """What vit_jax/input_pipeline.py calls, with its arguments."""

    def draw(number: tf.Tensor) -> tf.Tensor:
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            (*shape, 3),
            tf.zeros((0, 0, 4)),
            seed=1,
            area_range=(area, 1.0),
            min_object_covered=0,
            use_image_if_no_bounding_boxes=True,
        )
        return tf.concat([begin[:2], size[:2]], axis=0)

    return sampled(draw)


def relative_to_the_image(shape: tuple[int, int], area: float) -> np.ndarray:
    """A crop that is not the original's: its aspect is a ratio to the image's."""
    drawn = np.random.default_rng(0).uniform(size=(COUNT, 4))
    covered = area + drawn[:, 0] * (1 - area)
    aspect = np.exp(np.log(3 / 4) + drawn[:, 1] * np.log(16 / 9))
    sides = np.stack([np.sqrt(covered / aspect), np.sqrt(covered * aspect)], axis=1) * shape
    size = np.clip(np.round(sides), 1, shape)
    return np.concatenate([drawn[:, 2:] * (np.array(shape) - size), size], axis=1)


def distance(left: np.ndarray, right: np.ndarray) -> float:
    """The largest distance of two distributions, over area, aspect and both places of a part."""

    def one(a: np.ndarray, b: np.ndarray) -> float:
        places = np.union1d(a, b)
        shares = [np.searchsorted(np.sort(x), places, side="right") / len(x) for x in (a, b)]
        return float(np.abs(shares[0] - shares[1]).max())

    def measures(parts: np.ndarray) -> list[np.ndarray]:
        top, left, height, width = parts.T
        return [height * width, width / height, top, left]

    return max(one(a, b) for a, b in zip(measures(left), measures(right), strict=True))


@pytest.mark.parametrize("area", AREAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_inception_parts_are_drawn_as_the_originals_are(
    shape: tuple[int, int], area: float
) -> None:
    """Area, aspect and place have the distribution of TensorFlow's op, whatever the shape."""
    parts = ours(shape, area)

    assert (parts[:, :2] >= 0).all()
    assert (parts[:, 2:] >= 1).all()
    assert (parts[:, :2] + parts[:, 2:] <= shape).all()
    assert distance(parts, originals(shape, area)) < BOUND


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_another_crop_is_told_apart(shape: tuple[int, int]) -> None:
    """An aspect relative to the image is found out, and so is another smallest area."""
    assert distance(relative_to_the_image(shape, 0.05), originals(shape, 0.05)) > 3 * BOUND
    assert distance(ours(shape, 0.15), originals(shape, 0.05)) > BOUND


def test_a_part_is_a_function_of_its_seed() -> None:
    """The same seed, eagerly and in a graph, gives the same part; another gives another."""
    graph = tf.function(lambda seed: augment.inception_part((60, 80), smallest_area=0.1, seed=seed))
    parts = [augment.inception_part((60, 80), smallest_area=0.1, seed=(1, n)) for n in range(20)]

    assert all(np.array_equal(graph((1, n)), part) for n, part in enumerate(parts))
    assert len({part.numpy().tobytes() for part in parts}) == 20


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 2)])
def test_no_image_is_too_small(shape: tuple[int, int]) -> None:
    """A part has at least one pixel, and never more than the image."""
    for number, place in enumerate(np.random.default_rng(0).uniform(size=(30, 2))):
        for part in (
            augment.inception_part(shape, smallest_area=0.01, seed=(0, number)).numpy(),
            augment.small_part(
                shape, size=(5, 4), ratio=3.0, place=place.astype(np.float32)
            ).numpy(),
        ):
            assert (part[2:] >= 1).all()
            assert (part[:2] >= 0).all()
            assert (part[:2] + part[2:] <= shape).all()


@pytest.mark.parametrize("shape", [(120, 180), (200, 90), (96, 64)])
@pytest.mark.parametrize("place", [(0.0, 0.0), (0.5, 0.5), (0.999, 0.999)])
def test_cutting_first_shows_what_resizing_first_shows(
    shape: tuple[int, int], place: tuple[float, float]
) -> None:
    """The part, resized, is a cut of the image whose short side was resized, to a pixel's half."""
    size, ratio = (48, 32), 1.25
    rows, columns = np.indices(shape)
    image = np.stack([rows, columns], axis=-1).astype(np.float32)  # each pixel is its place

    top, left, height, width = augment.small_part(
        shape, size=size, ratio=ratio, place=place
    ).numpy()
    actual = tf.image.resize(image[top : top + height, left : left + width], size).numpy()

    factor = max(ratio * size[0] / shape[0], ratio * size[1] / shape[1])
    resized = np.round(np.array(shape) * factor).astype(int)
    whole = tf.image.resize(image, resized).numpy()
    free = resized - size
    y, x = (round(where * room) for where, room in zip(place, free, strict=True))
    expected = whole[y : y + size[0], x : x + size[1]]
    assert min(free / np.array(size)) == pytest.approx(0.25, abs=0.03)
    assert np.abs(actual - expected)[2:-2, 2:-2].max() < 1 / factor + 0.5
