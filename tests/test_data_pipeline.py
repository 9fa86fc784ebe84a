"""Tests of keras_vit.data.pipeline."""

from pathlib import Path
from typing import Any

import image_files
import numpy as np
import pytest

from keras_vit.data import (
    Augmentation,
    Split,
    evaluation_batches,
    load_folder,
    read_images,
    train_batches,
)
from keras_vit.data.pipeline import steps_per_epoch

EVERYTHING = Augmentation(rotation=10, shift=0.1, zoom=0.1, crop=0.5, flip=True, erase=0.3)


def numbered(count: int = 10) -> Split:
    """Images that show their own number."""
    numbers = np.arange(count, dtype=np.uint8)
    return Split(
        images=np.tile(numbers[:, None, None, None], (1, 4, 4, 3)),
        targets=numbers.astype(np.int32),
    )


def batches(split: Split, **fields: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    options = {
        "image_size": (4, 4),
        "batch_size": 3,
        "epochs": 2,
        "seed": 7,
        "augmentation": Augmentation(),
        **fields,
    }
    made = train_batches(split, **options)
    return [(images.numpy(), targets.numpy()) for images, targets in made]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(a, b)
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.fixture
def files(tmp_path: Path) -> Split:
    """Twenty image files of every format."""
    data = load_folder(image_files.write_classes(tmp_path))
    return Split(
        images=np.concatenate([data.train.images, data.test.images, data.validation.images]),
        targets=np.concatenate([data.train.targets, data.test.targets, data.validation.targets]),
    )


def test_an_epoch_shows_each_image_at_most_once_in_an_order_of_its_own() -> None:
    """Three full batches of ten images: nine different ones, another order in the next epoch."""
    found = batches(numbered())
    first = np.concatenate([targets for _, targets in found[:3]])
    second = np.concatenate([targets for _, targets in found[3:]])

    assert len(found) == 6
    assert len(set(first.tolist())) == len(set(second.tolist())) == 9
    assert first.tolist() != sorted(first.tolist())
    assert first.tolist() != second.tolist()


def test_images_keep_their_targets() -> None:
    """After all the shuffling, an image still shows its target."""
    for images, targets in batches(numbered()):
        assert images[:, 0, 0, 0].tolist() == targets.tolist()


def test_a_split_smaller_than_a_batch_is_one_batch() -> None:
    """Two images and a batch of 64 train on both in each step."""
    assert steps_per_epoch(numbered(2), batch_size=64) == 1
    assert [sorted(targets) for _, targets in batches(numbered(2), batch_size=64)] == [[0, 1]] * 2


@pytest.mark.parametrize("kind", ["pixels", "files"])
def test_a_run_can_start_at_any_step_with_the_same_bits(kind: str, files: Split) -> None:
    """Starting at step k gives exactly what is left of the whole run, augmented."""
    split = numbered() if kind == "pixels" else files
    whole = batches(split, augmentation=EVERYTHING)

    for start in (1, 3, len(whole) - 1):
        assert same(batches(split, augmentation=EVERYTHING, start_step=start), whole[start:])


@pytest.mark.parametrize("kind", ["pixels", "files"])
def test_the_seed_decides_everything(kind: str, files: Split) -> None:
    """One seed gives one run, at any parallelism; another gives another."""
    split = numbered() if kind == "pixels" else files

    assert same(batches(split, augmentation=EVERYTHING), batches(split, augmentation=EVERYTHING))
    assert not same(
        batches(split, augmentation=EVERYTHING), batches(split, augmentation=EVERYTHING, seed=8)
    )


def test_steps_are_varied_differently() -> None:
    """The same image is not moved by the same amount in each epoch."""
    one = Split(images=numbered(200).images[-1:], targets=np.zeros(1, np.int32))
    found = batches(one, batch_size=1, epochs=4, augmentation=Augmentation(shift=0.3))

    assert len({images.tobytes() for images, _ in found}) == 4


def test_evaluation_keeps_order_and_every_image(files: Split) -> None:
    """Batches in order, the last one short; files decode to what `read_images` gives."""
    images = [x.numpy() for x, _ in evaluation_batches(files, image_size=(9, 7), batch_size=8)]

    assert [len(batch) for batch in images] == [8, 8, 4]
    assert np.array_equal(np.concatenate(images), read_images(files.images, size=(9, 7)))


def test_training_without_variation_sees_what_evaluation_sees(files: Split) -> None:
    """Training and evaluation share one path from bytes to pixels."""
    expected = read_images(files.images, size=(9, 7))
    for images, targets in batches(files, image_size=(9, 7), batch_size=20, epochs=1):
        order = [int(np.abs(expected - image).sum(axis=(1, 2, 3)).argmin()) for image in images]
        assert sorted(order) == list(range(20))
        assert np.array_equal(images, expected[order])
        assert np.array_equal(targets, files.targets[order])


def test_comparing_runs_can_fail() -> None:
    """`same` sees one changed pixel, and a missing batch."""
    left, right = batches(numbered()), batches(numbered())
    right[2][0][0, 0, 0, 0] += 1

    assert not same(left, right)
    assert not same(left, left[:-1])
