"""Tests of keras_vit.data.augment."""

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


def moved(images: np.ndarray, **fields: object) -> np.ndarray:
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
    found = moved(images, flip=True)
    same = (found == images).all(axis=(1, 2, 3))
    mirrored = (found == images[:, :, ::-1]).all(axis=(1, 2, 3))

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


def test_crops_have_the_area_and_aspect_asked_for() -> None:
    """Boxes lie in the image, cover at least the smallest area, and vary."""
    augmentation = Augmentation(crop=0.3)
    boxes = augment.crop_boxes(1000, augmentation=augmentation, seed=SEED).numpy()
    height, width = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]

    assert boxes.min() >= 0
    assert boxes.max() <= 1 + 1e-6
    # A crop that would be higher or wider than the image is cut: by up to the aspect's limit.
    assert (height * width).min() >= 0.3 - 1e-6
    assert (height * width).max() > 0.9
    assert (width / height).min() >= 3 / 4 - 1e-4
    assert (width / height).max() <= 4 / 3 + 1e-4
    assert boxes[:, 0].std() > 0.05


def test_erasing_blackens_one_square_of_half_of_the_images() -> None:
    """Squares of the asked size lie everywhere, edges included; the other pixels stay."""
    images = np.full((1000, 10, 20, 3), 200, np.float32)
    found = np.asarray(
        augment.erase_squares(images, augmentation=Augmentation(erase=0.3), seed=SEED)
    )
    black = (found == 0).all(axis=3)
    hit = black.any(axis=(1, 2))

    assert 400 < hit.sum() < 600
    assert set(black[hit].sum(axis=(1, 2))) == {3 * 6}
    assert set(black[hit].any(axis=2).sum(axis=1)) == {3}
    assert black.any(axis=0).all()
    assert set(np.unique(found)) == {0, 200}


@pytest.mark.parametrize(
    "fields",
    [{"rotation": 181}, {"shift": -0.1}, {"zoom": 1}, {"crop": 0}, {"crop": 1.5}, {"erase": 2}],
)
def test_impossible_strengths_are_errors(fields: dict[str, float]) -> None:
    """A strength out of range is named with its limits."""
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must lie between"):
        Augmentation(**fields)


def test_a_graph_transforms_as_eager_code_does() -> None:
    """tf.data sees the same images."""
    augmentation = Augmentation(rotation=20, shift=0.2, zoom=0.2, flip=True)

    @tf.function
    def graph(images: tf.Tensor) -> tf.Tensor:
        return augment.transform_batch(images, augmentation=augmentation, seed=SEED)

    eager = augment.transform_batch(picture(), augmentation=augmentation, seed=SEED)
    assert np.allclose(graph(picture()), eager, atol=1e-3)


def mixed(
    alpha: float, *, count: int = 400, seed: tuple[int, int] = SEED
) -> tuple[np.ndarray, ...]:
    """Blends images that are their own number everywhere, and targets that name it."""
    images = np.broadcast_to(
        np.arange(count, dtype=np.float32)[:, None, None, None], (count, 2, 2, 3)
    )
    images, targets = augment.mix_batch(
        tf.constant(images), tf.eye(count), alpha=alpha, seed=tf.constant(seed, tf.int64)
    )
    return np.asarray(images), np.asarray(targets)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0])
def test_mixup_blends_an_image_and_its_target_alike(alpha: float) -> None:
    """Targets stay probabilities, say what is in the image, and the image itself weighs most."""
    images, targets = mixed(alpha)
    numbers = np.arange(len(images))
    assert np.allclose(targets.sum(axis=1), 1, atol=1e-5)
    assert ((targets > 0).sum(axis=1) <= 2).all()
    assert (targets[numbers, numbers] >= 0.5 - 1e-6).all()
    assert np.allclose(images[:, 0, 0, 0], targets @ numbers, atol=0.05)
    assert (images == images[:, :1, :1, :1]).all()


def test_mixup_follows_beta() -> None:
    """The share that is kept has the mean of max(b, 1 - b), b from Beta(1, 1): three quarters."""
    _, targets = mixed(1.0, count=2000)
    kept = targets.max(axis=1)
    assert abs(kept[kept < 1].mean() - 0.75) < 0.02


def test_mixup_is_a_function_of_its_seed() -> None:
    """The same seed blends the same, another differently, and alpha 0 not at all."""
    assert np.array_equal(mixed(0.2)[0], mixed(0.2)[0])
    assert not np.array_equal(mixed(0.2)[0], mixed(0.2, seed=(3, 6))[0])
    assert np.array_equal(mixed(0.0)[1], np.eye(400))
