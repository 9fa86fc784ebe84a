"""Tests of keras_vit.data.augment."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import Augmentation, augment

SEED = (3, 5)


def picture(batch: int = 64, height: int = 9, width: int = 11) -> np.ndarray:
    """Images with one bright pixel off the middle."""
    images = np.zeros((batch, height, width, 3), np.float32)
    images[:, 2, 3] = 200
    return images


def moved(images: np.ndarray, **fields: Any) -> np.ndarray:
    augmentation = Augmentation(**fields)
    return np.asarray(augment.transform_batch(images, augmentation=augmentation, seed=SEED))


def test_the_same_seed_gives_the_same_images() -> None:
    """Draws are a function of the seed alone, and another seed gives others."""
    augmentation = Augmentation(rotation=20, shift=0.2, zoom=0.2, flip=True)
    first = augment.transform_batch(picture(), augmentation=augmentation, seed=SEED)
    again = augment.transform_batch(picture(), augmentation=augmentation, seed=SEED)
    other = augment.transform_batch(picture(), augmentation=augmentation, seed=(3, 6))

    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_nothing_is_moved_by_default() -> None:
    """The simplest augmentation is none."""
    assert np.array_equal(moved(picture()), picture())


def test_flipping_mirrors_about_half_of_the_images_exactly() -> None:
    """Each image is either itself or its mirror image, to the bit, and both occur."""
    images = picture(batch=200)
    actual = moved(images, flip=True)
    same = (actual == images).all(axis=(1, 2, 3))
    mirrored = (actual == images[:, :, ::-1]).all(axis=(1, 2, 3))

    assert (same | mirrored).all()
    assert 60 < mirrored.sum() < 140


def center_of_mass(images: np.ndarray) -> np.ndarray:
    weights = images[..., 0] / images[..., 0].sum(axis=(1, 2), keepdims=True)
    rows, columns = np.indices(weights.shape[1:])
    return np.stack([(weights * rows).sum((1, 2)), (weights * columns).sum((1, 2))], axis=1)


def test_shifts_stay_within_their_limit() -> None:
    """A shift of 0.1 moves what is seen by up to a tenth of the side, to all sides."""
    images = np.zeros((300, 21, 21, 3), np.float32)
    images[:, 10, 10] = 200

    distances = center_of_mass(moved(images, shift=0.1)) - 10

    assert np.abs(distances).max() <= 2.1 + 1e-4
    assert (distances.max(axis=0) > 1.5).all()
    assert (distances.min(axis=0) < -1.5).all()


def test_rotations_turn_about_the_middle_within_their_limit() -> None:
    """The middle pixel stays, a pixel on the edge turns by up to the angle, both ways."""
    images = np.zeros((300, 21, 21, 3), np.float32)
    images[:, 10, 18] = 200  # eight pixels to the right of the middle

    offsets = center_of_mass(moved(images, rotation=30)) - 10
    angles = np.degrees(np.arctan2(offsets[:, 0], offsets[:, 1]))

    assert np.abs(angles).max() <= 31
    assert angles.max() > 25
    assert angles.min() < -25
    assert np.hypot(*offsets.T) == pytest.approx(np.full(300, 8.0), abs=0.3)


def test_zoom_changes_the_distance_from_the_middle_within_its_limit() -> None:
    """A zoom of 0.25 brings a point from 8 pixels to between 8 / 1.25 and 8 * 1.25."""
    images = np.zeros((300, 41, 41, 3), np.float32)
    images[:, 20, 28] = 200

    distances = center_of_mass(moved(images, zoom=0.25))[:, 1] - 20

    assert distances.min() >= 8 / 1.25 - 0.3
    assert distances.max() <= 8 * 1.25 + 0.3
    assert distances.min() < 7
    assert distances.max() > 9.3


@pytest.mark.parametrize(
    "fields",
    [
        {"rotation": 181},
        {"shift": -0.1},
        {"zoom": 1},
        {"crop": 0},
        {"crop": 1.5},
        {"erase": 2},
        {"randaugment_layers": -1},
        {"randaugment_magnitude": 31},
        {"resize_small": 11},
    ],
)
def test_impossible_strengths_are_errors(fields: dict[str, Any]) -> None:
    """A strength out of range is named with its limits."""
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must lie between"):
        Augmentation(**fields)


@pytest.mark.parametrize("fields", [{"resize_small": 0.9}, {"resize_small": 1.1, "crop": 0.5}])
def test_two_kinds_of_crops_exclude_each_other(fields: dict[str, Any]) -> None:
    """A short side smaller than the crop, or both crops, are errors that say what is allowed."""
    with pytest.raises(ValueError, match="at least 1 and then without crop"):
        Augmentation(**fields)


def test_workers_transform_their_part_of_the_batch_as_one_does() -> None:
    """Two halves, transformed by two workers, are the whole to the bit."""
    augmentation = Augmentation(rotation=20, shift=0.2, zoom=0.2, flip=True)
    whole = augment.transform_batch(picture(), augmentation=augmentation, seed=SEED)
    halves = [
        augment.transform_batch(
            picture()[:32], augmentation=augmentation, seed=SEED, shard=(index, 2)
        )
        for index in (0, 1)
    ]
    assert np.array_equal(np.concatenate(halves), whole)


def test_a_graph_transforms_as_eager_code_does() -> None:
    """tf.data sees the same images."""
    augmentation = Augmentation(rotation=20, shift=0.2, zoom=0.2, flip=True)

    @tf.function
    def graph(images: tf.Tensor) -> tf.Tensor:
        return augment.transform_batch(images, augmentation=augmentation, seed=SEED)

    eager = augment.transform_batch(picture(), augmentation=augmentation, seed=SEED)
    assert np.allclose(graph(picture()), eager, atol=1e-3)
