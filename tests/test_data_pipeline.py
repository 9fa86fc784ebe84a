"""Tests of keras_vit.data.pipeline."""

import dataclasses
import functools
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_files
import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import (
    Augmentation,
    Split,
    Stream,
    Views,
    augment,
    evaluation_batches,
    from_dataset,
    images,
    load_folder,
    pipeline,
    read_images,
    train_batches,
)
from keras_vit.data.images import Damage
from keras_vit.data.pipeline import steps_per_epoch
from keras_vit.data.source import RecordSplit

EVERYTHING = Augmentation(
    rotation=10,
    shift=0.1,
    zoom=0.1,
    crop=0.5,
    flip=True,
    erase=0.3,
)
VARIED = dataclasses.replace(EVERYTHING, randaugment_layers=2)  # takes seconds to trace


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
    pairs = train_batches(split, **options)
    return [(images.numpy(), targets.numpy()) for images, targets in pairs]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(a, b)
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def files_in(folder: Path) -> Split:
    """Twenty image files of every format."""
    data = load_folder(image_files.write_classes(folder))
    return Split(
        images=np.concatenate([data.train.images, data.test.images, data.validation.images]),
        targets=np.concatenate([data.train.targets, data.test.targets, data.validation.targets]),
    )


@pytest.fixture
def files(tmp_path: Path) -> Split:
    return files_in(tmp_path)


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Split]:
    """Images that no test may change."""
    return {"pixels": numbered(), "files": files_in(tmp_path_factory.mktemp("files"))}


@pytest.fixture(scope="module")
def whole_run(splits: dict[str, Split]) -> Callable[..., list[Any]]:
    """Makes the batches of a whole run with one of these splits, once: each takes seconds."""

    @functools.cache
    def run(kind: str, augmentation: Augmentation, batch_size: int = 3) -> list[Any]:
        return batches(splits[kind], augmentation=augmentation, batch_size=batch_size)

    return run


def test_an_epoch_shows_each_image_at_most_once_in_an_order_of_its_own() -> None:
    """Three full batches of ten images: nine different ones, another order in the next epoch."""
    run = batches(numbered())
    first = np.concatenate([targets for _, targets in run[:3]])
    second = np.concatenate([targets for _, targets in run[3:]])

    assert len(run) == 6
    assert len(set(first.tolist())) == len(set(second.tolist())) == 9
    assert first.tolist() != sorted(first.tolist())
    assert first.tolist() != second.tolist()


def test_images_keep_their_targets() -> None:
    """After all the shuffling, an image still shows its target."""
    for batch, targets in batches(numbered()):
        assert batch[:, 0, 0, 0].tolist() == targets.tolist()


def test_a_split_smaller_than_a_batch_is_one_batch() -> None:
    """Two images and a batch of 64 train on both in each step."""
    assert steps_per_epoch(numbered(2), batch_size=64) == 1
    assert [sorted(targets) for _, targets in batches(numbered(2), batch_size=64)] == [[0, 1]] * 2


@pytest.mark.parametrize("kind", ["pixels", "files"])
@pytest.mark.full
def test_a_run_can_start_at_any_step_with_the_same_bits(
    kind: str, splits: dict[str, Split], whole_run: Callable[..., list[Any]]
) -> None:
    """In an epoch and between two: exactly what is left of the whole run, augmented."""
    whole = whole_run(kind, EVERYTHING)

    for start in (1, len(whole) // 2):
        part = batches(splits[kind], augmentation=EVERYTHING, start_step=start)
        assert same(part, whole[start:])


@pytest.mark.parametrize("kind", ["pixels", "files"])
@pytest.mark.full
def test_the_seed_decides_everything(
    kind: str, splits: dict[str, Split], whole_run: Callable[..., list[Any]]
) -> None:
    """One seed gives one run, at any parallelism; another gives another."""
    whole = whole_run(kind, EVERYTHING)

    assert same(batches(splits[kind], augmentation=EVERYTHING), whole)
    assert not same(batches(splits[kind], augmentation=EVERYTHING, seed=8), whole)


def test_steps_are_varied_differently() -> None:
    """The same image is not moved by the same amount in each epoch."""
    one = Split(images=numbered(200).images[-1:], targets=np.zeros(1, np.int32))
    run = batches(one, batch_size=1, epochs=4, augmentation=Augmentation(shift=0.3))

    assert len({images.tobytes() for images, _ in run}) == 4


def test_evaluation_keeps_order_and_every_image(files: Split) -> None:
    """Batches in order, the last one short; files decode to what `read_images` gives."""
    images = [x.numpy() for x, _ in evaluation_batches(files, image_size=(9, 7), batch_size=8)]

    assert [len(batch) for batch in images] == [8, 8, 4]
    assert np.array_equal(np.concatenate(images), read_images(list(files.images), size=(9, 7)))


@pytest.mark.full
@pytest.mark.parametrize("where", ["files", "memory"])
def test_workers_evaluate_each_image_once(files: Split, where: str) -> None:
    """Three workers and twenty images: every third one each, all of them together."""
    split = files if where == "files" else numbered(20)
    parts = [
        np.concatenate(
            [
                targets
                for _, targets in evaluation_batches(
                    split, image_size=(8, 8), batch_size=4, shard=(worker, 3)
                )
            ]
        )
        for worker in range(3)
    ]

    assert [len(part) for part in parts] == [7, 7, 6]
    for worker, part in enumerate(parts):
        np.testing.assert_array_equal(part, split.targets[worker::3])


def test_training_without_variation_sees_what_evaluation_sees(files: Split) -> None:
    """Training and evaluation share one path from bytes to pixels."""
    expected = read_images(list(files.images), size=(9, 7))
    for batch, targets in batches(files, image_size=(9, 7), batch_size=20, epochs=1):
        order = [int(np.abs(expected - image).sum(axis=(1, 2, 3)).argmin()) for image in batch]
        assert sorted(order) == list(range(20))
        assert np.array_equal(batch, expected[order])
        assert np.array_equal(targets, files.targets[order])


@pytest.mark.full
def test_parallelism_changes_nothing(
    splits: dict[str, Split],
    whole_run: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One image at a time gives the bits that as many as possible give."""
    whole = whole_run("files", VARIED, batch_size=6)
    monkeypatch.setattr(pipeline, "_PARALLEL", 1)
    monkeypatch.setattr(pipeline, "_BATCHES", 1)

    assert same(batches(splits["files"], batch_size=6, augmentation=VARIED), whole)
    assert not same(whole_run("files", EVERYTHING, batch_size=6), whole)


@pytest.mark.full
def test_randaugment_starts_at_any_step_on_any_worker_with_the_same_bits(
    splits: dict[str, Split], whole_run: Callable[..., list[Any]]
) -> None:
    """The second half of each batch from the second step on is what the whole run has there."""
    whole = whole_run("files", VARIED, batch_size=6)
    part = batches(splits["files"], batch_size=6, augmentation=VARIED, start_step=1, shard=(1, 2))

    assert same(part, [(batch[3:], targets[3:]) for batch, targets in whole[1:]])


@pytest.mark.parametrize("kind", ["pixels", "resized pixels", "files"])
@pytest.mark.full
def test_the_workers_batches_together_are_the_batch_of_one(
    kind: str, splits: dict[str, Split], whole_run: Callable[..., list[Any]]
) -> None:
    """Three workers make a third of each batch, to the bit, from any step on."""
    source = "files" if kind == "files" else "pixels"
    augmentation = EVERYTHING
    if kind == "resized pixels":
        augmentation = Augmentation(rotation=10, flip=True, erase=0.5)
    options: dict[str, Any] = {"batch_size": 6, "augmentation": augmentation, "start_step": 1}
    parts = [batches(splits[source], **options, shard=(index, 3)) for index in range(3)]
    together = [
        tuple(np.concatenate(arrays) for arrays in zip(*step, strict=True))
        for step in zip(*parts, strict=True)
    ]

    assert same(together, whole_run(source, augmentation, batch_size=6)[1:])
    assert len(parts[0][0][1]) == 2


@pytest.mark.full
def test_a_worker_decodes_no_more_than_its_own(files: Split) -> None:
    """What is another worker's may be gone: it is not read."""
    options = {"batch_size": 20, "epochs": 1}
    whole = batches(files, **options)[0]
    for path in paths_of(whole[0], files)[:10]:
        Path(path).unlink()

    second = batches(files, **options, shard=(1, 2))

    assert np.array_equal(second[0][1], whole[1][10:])
    assert files.damage.names == ()


def paths_of(batch: np.ndarray, files: Split) -> list[str]:
    """The path of each image of a batch that nothing varies."""
    expected = read_images(list(files.images), size=(4, 4))
    places = [int(np.abs(expected - image).sum(axis=(1, 2, 3)).argmin()) for image in batch]
    return [str(files.images[place]) for place in places]


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_worker_that_cannot_be_is_an_error(shard: tuple[int, int]) -> None:
    """The index counts from zero."""
    with pytest.raises(ValueError, match=r"the index from 0\. Received: shard="):
        batches(numbered(), shard=shard)


def test_a_batch_that_workers_cannot_share_is_an_error() -> None:
    """Three images do not divide by two, whether they are the batch or all there are."""
    for split, size in ((numbered(), 3), (numbered(3), 64)):
        with pytest.raises(ValueError, match="2 workers cannot share batches of 3"):
            batches(split, batch_size=size, shard=(0, 2))


@pytest.mark.parametrize("kind", ["pixels", pytest.param("files", marks=pytest.mark.full)])
def test_a_crop_is_a_part_of_the_image_resized(kind: str, files: Split) -> None:
    """The part that the step's draws choose, resized as the whole would be."""
    split = numbered() if kind == "pixels" else files
    cases: tuple[dict[str, Any], ...] = ({"crop": 0.3}, {"resize_small": 1.5})
    for fields in cases:
        for image, target in zip(
            *batches(split, augmentation=Augmentation(**fields), image_size=(9, 7))[0], strict=True
        ):
            assert image.shape == (9, 7, 3)
            if kind == "pixels":
                assert (image == target).all()


def test_evaluation_can_cut_out_the_middle(files: Split) -> None:
    """The short side is resized, and the middle is what is seen."""
    crops, _ = next(
        iter(evaluation_batches(files, image_size=(12, 12), batch_size=20, resize_small=1.25))
    )
    for path, image in zip(files.images, crops.numpy(), strict=True):
        pixels = images.read_image(path)
        top, left, height, width = augment.small_part(
            pixels.shape[:2], size=(12, 12), ratio=1.25, place=(0.5, 0.5)
        ).numpy()
        assert height == width == round(min(pixels.shape[:2]) / 1.25)
        assert abs(2 * top + height - pixels.shape[0]) <= 1
        assert abs(2 * left + width - pixels.shape[1]) <= 1
        part = pixels[top : top + height, left : left + width]
        expected = images.resize_image(part, size=(12, 12)).numpy()
        assert np.abs(image - expected)[1:-1, 1:-1].max() <= 5  # JPEG's colours at the edges


@pytest.mark.full
def test_a_damaged_image_is_replaced_and_named(
    files: Split, caplog: pytest.LogCaptureFixture
) -> None:
    """The next sound image of the batch stands in with its target, and the others stay."""
    options = {"batch_size": 20, "epochs": 2, "augmentation": EVERYTHING}
    whole = batches(files, **options)
    first = paths_of(batches(files, batch_size=20, epochs=1)[0][0], files)
    image_files.damage(Path(first[4]))
    Path(first[5]).unlink()
    with caplog.at_level(logging.WARNING):
        mended = batches(files, **options)

    assert files.damage.names == tuple(sorted(first[4:6]))
    assert len(caplog.records) == 2
    assert len(mended) == len(whole) == 2
    (images_mended, targets_mended), (images_whole, targets_whole) = mended[0], whole[0]
    assert np.array_equal(targets_mended[4:6], targets_whole[[6, 6]])
    others = [place for place in range(20) if place not in (4, 5)]
    assert np.array_equal(images_mended[others], images_whole[others])
    assert same(batches(files, **options), mended)


@pytest.mark.full
@pytest.mark.parametrize("strict", [True, False])
def test_damage_can_be_an_error(files: Split, strict: bool) -> None:
    """Strictness ends at the first damaged image, and a batch of nothing else always does."""
    damaged = files.images[:1] if strict else files.images
    for path in damaged:
        image_files.damage(Path(path))
    split = Split(images=files.images, targets=files.targets, damage=Damage(strict=strict))

    with pytest.raises(tf.errors.InvalidArgumentError, match="cannot be decoded"):
        batches(split, batch_size=20, epochs=1)


OLD_ITERATORS = """
import time, numpy as np
from keras_vit.data import Augmentation, Split, train_batches

split = Split(images=np.zeros((8, 4, 4, 3), np.uint8), targets=np.zeros(8, np.int32))
options = {"image_size": (4, 4), "batch_size": 2, "epochs": 1000, "seed": 0}
batches = train_batches(split, **options, augmentation=Augmentation())
iterators = [iter(batches) for _ in range(20)]
for iterator in iterators:
    next(iterator)
time.sleep(30)
start = time.perf_counter()
del iterator, iterators
print(time.perf_counter() - start)
"""


def test_no_iterator_starts_the_thread_that_its_end_may_wait_for(
    files: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's tuning is off in all datasets that are made of splits, and where one is read."""
    contents = [Path(path).read_bytes() for path in files.images]
    rows = (contents, files.targets, [str(place) for place in range(20)])
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    splits = {
        "pixels": numbered(),
        "encoded": Split(images=np.array(contents, object), targets=files.targets),
        "files": files,
        "records": RecordSplit(list(zip(contents, files.targets.tolist(), strict=True))),
        "stream": Stream(dataset, count=20),
    }
    options: dict[str, Any] = {"image_size": (4, 4), "batch_size": 2}
    train: Any = functools.partial(train_batches, **options, epochs=1, seed=0)
    made: dict[tuple[str, Any], tf.data.Dataset] = {
        ("pixels", "views"): evaluation_batches(numbered(), **options, views=Views()),
        ("pixels", "cropped"): train(numbered(), augmentation=Augmentation(crop=0.5)),
    }
    for kind, split in splits.items():
        made[kind, "items"] = split.items()
        made[kind, "evaluation"] = evaluation_batches(split, **options)
        made[kind, "training"] = train(split, augmentation=Augmentation())
    iterate, count = tf.data.Dataset.__iter__, len(made)

    def noted(read: tf.data.Dataset) -> Any:
        made["read", len(made)] = read
        return iterate(read)

    monkeypatch.setattr(tf.data.Dataset, "__iter__", noted)
    for split in splits.values():
        split.take([0]).pixels(0)
        assert len(split.targets) == len(split)
    for memory in (0, 2**30):
        assert from_dataset(dataset, dataset, labels="abc", test=dataset, memory=memory).train

    tuned = [name for name, each in made.items() if each.options().autotune.enabled is not False]
    assert tuned == []
    assert len(made) > count + 2 * len(splits)


@pytest.mark.full
def test_old_iterators_die_at_once() -> None:
    """Twenty of them, half a minute old: 0.02 seconds; 52 with TensorFlow's tuning.

    In a process of its own: `conftest` switches the tuning of all iterators off.
    """
    command = [sys.executable, "-c", OLD_ITERATORS]
    process = subprocess.run(command, capture_output=True, text=True, check=True)

    assert float(process.stdout) < 1


def test_comparing_runs_can_fail() -> None:
    """`same` sees one changed pixel, and a missing batch."""
    left, right = batches(numbered()), batches(numbered())
    right[2][0][0, 0, 0, 0] += 1

    assert not same(left, right)
    assert not same(left, left[:-1])
