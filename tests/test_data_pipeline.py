"""Tests of keras_vit.data.pipeline, of its views, and of damaged images in it."""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import image_files
import numpy as np
import processes
import pytest
import tensorflow as tf
from trainings import batches

from keras_vit.data import Augmentation, Resizing, Split, Views, pipeline, source
from keras_vit.data.datasets import from_dataset
from keras_vit.data.folder import load_folder
from keras_vit.data.images import read_images, resize_image
from keras_vit.data.pipeline import evaluation_batches, train_batches

EVERYTHING = Augmentation(rotation=10, shift=0.1, zoom=0.1, crop=0.5, flip=True, erase=0.3)
VARIED = dataclasses.replace(EVERYTHING, randaugment_layers=2)  # takes seconds to trace
# Pixels without a crop are resized as whole images; VARIED takes seconds to trace.
RUNS = {
    "pixels": EVERYTHING,
    "resized pixels": Augmentation(rotation=10, flip=True, erase=0.5),
    "files": VARIED,
    "records": EVERYTHING,
}
# Which places of a batch hold a sound image, and which of them stands at each place afterwards.
DAMAGED = [
    ([True, False, True, True], [0, 2, 2, 3]),
    ([False, False, True, True], [2, 2, 2, 3]),
    ([True, True, True, False], [0, 1, 2, 0]),
    ([False, True, False, False], [1, 1, 1, 1]),
]
SMALL = Resizing((9, 7))
IMAGE = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
OLD_ITERATORS = """
import time, numpy as np
from keras_vit.data import Augmentation, Resizing, Split, train_batches

split = Split(images=np.zeros((8, 4, 4, 3), np.uint8), targets=np.zeros(8, np.int32))
options = {"resizing": Resizing((4, 4)), "batch_size": 2, "epochs": 1000, "seed": 0}
batches = train_batches(split, **options, augmentation=Augmentation())
iterators = [iter(batches) for _ in range(20)]
for iterator in iterators:
    next(iterator)
time.sleep(30)
start = time.perf_counter()
del iterator, iterators
print(time.perf_counter() - start)
"""


def numbered(count: int = 10) -> Split:
    """Images that show their own number."""
    numbers = np.arange(count, dtype=np.uint8)
    return Split(
        images=np.tile(numbers[:, None, None, None], (1, 4, 4, 3)), targets=numbers.astype(np.int32)
    )


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(a, b)
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.fixture
def files(tmp_path: Path) -> Split:
    """Twenty image files of every format, one of them a photo that lies on its side."""
    image_files.write_classes(tmp_path)
    (tmp_path / "plain" / "000.jpg").write_bytes(image_files.photo(6))
    data = load_folder(tmp_path)
    return Split(
        images=np.concatenate([data.train.images, data.test.images, data.validation.images]),
        targets=np.concatenate([data.train.targets, data.test.targets, data.validation.targets]),
    )


def recorded(files: Split) -> source.RecordSplit:
    """The same files, as records that are read by number."""
    contents = [Path(path).read_bytes() for path in files.images]
    return source.RecordSplit(list(zip(contents, files.targets.tolist(), strict=True)))


def test_an_epoch_shows_each_image_at_most_once_in_an_order_of_its_own() -> None:
    """Three full batches of ten images: nine different ones, in another order in the next epoch.

    Two images and a batch of 64 train on both in each step.
    """
    run = batches(numbered())
    first = np.concatenate([targets for _, targets in run[:3]])
    second = np.concatenate([targets for _, targets in run[3:]])

    assert len(run) == 6
    assert len(set(first.tolist())) == len(set(second.tolist())) == 9
    assert pipeline.steps_per_epoch(numbered(2), batch_size=64) == 1
    assert [sorted(targets) for _, targets in batches(numbered(2), batch_size=64)] == [[0, 1]] * 2
    assert first.tolist() != sorted(first.tolist())
    assert first.tolist() != second.tolist()
    for batch, targets in run:  # an image still shows its target
        assert batch[:, 0, 0, 0].tolist() == targets.tolist()


@pytest.mark.full
@pytest.mark.parametrize("kind", RUNS)
def test_batches_are_a_function_of_seed_and_step(
    kind: str, files: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any step, on each of three workers, at any parallelism: the same bits of one run."""
    split = {"files": files, "records": recorded(files)}.get(kind, numbered(20))
    run: Any = functools.partial(batches, split, batch_size=6, augmentation=RUNS[kind])
    whole = run()
    tf.random.set_seed(3)

    assert len(whole) == 6
    assert same(run(start_step=3), whole[3:])
    parts = [run(start_step=1, shard=(index, 3)) for index in range(3)]
    together = [
        tuple(np.concatenate(arrays) for arrays in zip(*step, strict=True))
        for step in zip(*parts, strict=True)
    ]
    assert same(together, whole[1:])
    assert len(parts[0][0][1]) == 2
    monkeypatch.setattr(pipeline, "_PARALLEL", 1)
    monkeypatch.setattr(pipeline, "_BATCHES", 1)
    assert same(run(), whole)
    assert not same(run(seed=8), whole)
    assert not same(run(augmentation=Augmentation()), whole)


def test_steps_are_varied_differently() -> None:
    """The same image is not moved by the same amount in each epoch."""
    one = Split(images=numbered(200).images[-1:], targets=np.zeros(1, np.int32))
    run = batches(one, batch_size=1, epochs=4, augmentation=Augmentation(shift=0.3))

    assert len({images.tobytes() for images, _ in run}) == 4


def test_evaluation_keeps_order_and_every_image(files: Split) -> None:
    """Batches in order, the last one short; files decode to what `read_images` gives."""
    images = [x.numpy() for x, _ in evaluation_batches(files, resizing=SMALL, batch_size=8)]

    assert [len(batch) for batch in images] == [8, 8, 4]
    assert np.array_equal(np.concatenate(images), read_images(list(files.images), SMALL))


@pytest.mark.full
def test_workers_evaluate_each_image_once(files: Split) -> None:
    """Three workers and twenty images: every third one each, all of them together."""
    for split in (files, numbered(20)):
        for worker, count in enumerate((7, 7, 6)):
            made = evaluation_batches(split, resizing=SMALL, batch_size=4, shard=(worker, 3))
            part = np.concatenate([targets for _, targets in made])
            assert len(part) == count
            assert np.array_equal(part, split.targets[worker::3])


def test_training_without_variation_sees_what_evaluation_sees(files: Split) -> None:
    """Training and evaluation share one path from bytes to pixels."""
    expected = read_images(list(files.images), SMALL)
    for batch, targets in batches(files, resizing=SMALL, batch_size=20, epochs=1):
        order = [int(np.abs(expected - image).sum(axis=(1, 2, 3)).argmin()) for image in batch]
        assert sorted(order) == list(range(20))
        assert np.array_equal(batch, expected[order])
        assert np.array_equal(targets, files.targets[order])


@pytest.mark.full
def test_a_worker_decodes_no_more_than_its_own(files: Split) -> None:
    """What is another worker's may be gone: it is not read."""
    options = {"batch_size": 20, "epochs": 1}
    whole = batches(files, **options)[0]
    pixels = read_images(list(files.images), Resizing((4, 4)))
    for image in whole[0][:10]:
        Path(files.images[np.abs(pixels - image).sum(axis=(1, 2, 3)).argmin()]).unlink()

    second = batches(files, **options, shard=(1, 2))

    assert np.array_equal(second[0][1], whole[1][10:])
    assert files.damage.names == ()


def test_workers_that_cannot_be_are_an_error() -> None:
    """The index counts from zero; three images, the batch or all there are, are no two parts."""
    for shard in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=r"the index from 0\. Received: shard="):
            batches(numbered(), shard=shard)
    for split, size in ((numbered(), 3), (numbered(3), 64)):
        with pytest.raises(ValueError, match="2 workers cannot share batches of 3"):
            batches(split, batch_size=size, shard=(0, 2))


def test_a_crop_is_a_part_of_the_image_resized() -> None:
    """The part that the step's draws choose, resized as the whole would be."""
    for augmentation in (Augmentation(crop=0.3), Augmentation(resize_small=1.5)):
        cropped, targets = batches(numbered(), augmentation=augmentation, resizing=SMALL)[0]
        assert cropped.shape == (3, 9, 7, 3)
        assert (cropped == targets[:, None, None, None]).all()


def pngs(count: int, *damaged: int, **options: bool) -> Split:
    """Files that show their own number, or nothing."""
    pixels = [np.full((4, 4, 3), number, np.uint8) for number in range(count)]
    contents = [tf.io.encode_png(each).numpy() for each in pixels]
    for number in damaged:
        contents[number] = b"no image"
    return Split(
        images=np.array(contents, object),
        targets=np.arange(count, dtype=np.int32),
        names=np.array([f"image {number}" for number in range(count)]),
        damage=source.Damage(**options),
    )


@pytest.mark.parametrize(
    "augmentation", [Augmentation(), pytest.param(EVERYTHING, marks=pytest.mark.full)]
)
def test_the_next_sound_image_stands_in(
    augmentation: Augmentation, caplog: pytest.LogCaptureFixture
) -> None:
    """With its class; after the last comes the first. The damaged are named, once each.

    With all variations the other images have the bits that they have without the damage.
    """
    options: dict[str, Any] = {"batch_size": 4, "epochs": 1, "augmentation": augmentation}
    whole = batches(pngs(16) if augmentation == EVERYTHING else numbered(16), **options)
    damaged = {
        int(order[place])
        for (_, order), (sound, _) in zip(whole, DAMAGED, strict=True)
        for place in range(4)
        if not sound[place]
    }
    split = pngs(16, *damaged)
    with caplog.at_level(logging.WARNING):
        mended = batches(split, **options)

    for (x, order), (y, targets), (sound, after) in zip(whole, mended, DAMAGED, strict=True):
        assert targets.tolist() == order[after].tolist()
        assert np.array_equal(y[sound], x[sound])
        if augmentation == Augmentation():
            assert (y == targets[:, None, None, None]).all()
    assert split.damage.names == tuple(sorted(f"image {number}" for number in damaged))
    assert len(caplog.records) == len(damaged) == 7


def test_what_cannot_be_replaced_is_an_error() -> None:
    """Nothing to stand in, or strictness: the names are in the message."""
    for split in (pngs(2, 0, strict=True), pngs(2, 0, 1)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"image 0.* cannot be decoded"):
            batches(split, batch_size=2)
        assert split.damage.names == ()


def test_the_advice_does_not_end_a_training() -> None:
    """An image that is gone while a training runs is put back: without it nothing resumes."""
    broken = Split(images=np.array([b"no image"], object), targets=np.array([0]))
    advices: tuple[tuple[dict[str, Any], str], ...] = (
        ({"trained": numbered(1)}, r"put them back .* \(--overwrite\)"),
        ({}, "repair or remove them"),
    )
    made = evaluation_batches(broken, resizing=SMALL, batch_size=1)
    for options, advice in advices:
        with (
            pytest.raises(ValueError, match=rf"1 of 1 images cannot be decoded, .*; {advice}\.$"),
            pipeline.naming_damaged(broken, **options),
        ):
            next(iter(made))


def test_views_are_crops_and_mirrors() -> None:
    """The whole first; each crop is that part of the image; the second half is mirrored."""
    views = Views(flip=True, scales=(0.5,), shifted=0.8)
    stack = np.asarray(views.stack(IMAGE, Resizing((10, 10))))
    parts = [IMAGE, IMAGE[5:15, 8:23]]
    parts += [IMAGE[top : top + 16, left : left + 24] for top in (0, 4) for left in (0, 6)]
    expected = [np.asarray(resize_image(part, Resizing((10, 10)))) for part in parts]

    assert stack.shape == (12, 10, 10, 3)
    np.testing.assert_array_equal(stack[:6], expected)
    np.testing.assert_array_equal(stack[6:], stack[:6, :, ::-1])
    assert Views(flip=False, scales=(0.5,), shifted=0.8).count == 6
    tiny = Views(scales=(0.1,)).stack(IMAGE[:1, :2], Resizing((4, 4)))
    assert np.isfinite(np.asarray(tiny)).all()  # no part is empty
    for scales, shifted in (((1.0,), 0.5), ((0.5,), 0.0), ((-1.0,), None)):
        with pytest.raises(ValueError, match="above 0 and below 1"):
            Views(scales=scales, shifted=shifted)


@pytest.mark.parametrize(
    "resizing", [Resizing((8, 12), False), Resizing((8, 12), True, "bicubic", 0.9, "center")]
)
def test_batches_hold_the_views_of_each_image_together(resizing: Resizing) -> None:
    """In a pipeline they are, to the bit, what they are alone."""
    images = np.stack([IMAGE, IMAGE[::-1], IMAGE // 2])
    split = Split(images=images, targets=np.array([0, 1, 2], np.int32))
    views = Views(flip=True)
    made = list(evaluation_batches(split, resizing=resizing, batch_size=2, views=views))
    assert [len(targets) for _, targets in made] == [2, 1]
    actual = np.concatenate([np.asarray(pixels) for pixels, _ in made])
    expected = [views.stack(image, resizing) for image in images]
    np.testing.assert_array_equal(actual, np.concatenate(expected))


def test_no_iterator_starts_the_thread_that_its_end_may_wait_for(
    files: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's tuning is off in all datasets that are made of splits, and where one is read."""
    contents = [Path(path).read_bytes() for path in files.images]
    splits = {
        "pixels": numbered(),
        "encoded": Split(images=np.array(contents, object), targets=files.targets),
        "files": files,
        "records": recorded(files),
    }
    options: dict[str, Any] = {"resizing": Resizing((4, 4)), "batch_size": 2}
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
    pairs: Any = tf.data.Dataset.from_tensor_slices((contents, files.targets))
    for given in (pairs, recorded(files).source):
        assert from_dataset(given, given, labels="abc", test=given).train
    few = pairs.take(1)
    assert from_dataset(recorded(files).source, few, labels="abc", test=few, memory=2**14).train

    tuned = [name for name, each in made.items() if each.options().autotune.enabled is not False]
    assert tuned == []
    assert len(made) > count + 2 * len(splits)


@pytest.mark.full
def test_old_iterators_die_at_once() -> None:
    """Twenty of them, half a minute old: 0.02 seconds; 52 with TensorFlow's tuning.

    In a process of its own: `conftest` switches the tuning of all iterators off.
    """
    assert float(processes.python("-c", OLD_ITERATORS).stdout) < 1


def test_comparing_runs_can_fail() -> None:
    """`same` sees one changed pixel, and a missing batch."""
    left, right = batches(numbered()), batches(numbered())
    right[2][0][0, 0, 0, 0] += 1

    assert not same(left, right)
    assert not same(left, left[:-1])
