"""Tests of keras_vit.data.source."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import Split, Stream, datasets, source

PIXELS = np.arange(5 * 48, dtype=np.uint8).reshape(5, 4, 4, 3)
TARGETS = np.array([0, 1, 0, 1, 2], np.int32)


def encoded() -> np.ndarray:
    array = np.empty(len(PIXELS), object)
    array[:] = [tf.io.encode_png(image).numpy() for image in PIXELS]
    return array


def stream() -> Stream:
    names = [f"image {place}" for place in range(len(PIXELS))]
    records = tf.data.Dataset.from_tensor_slices((list(encoded()), TARGETS, names))
    return Stream(records, count=len(PIXELS))


@pytest.fixture(params=["PixelSplit", "EncodedSplit", "FileSplit", "RecordSplit", "Stream"])
def split(request: pytest.FixtureRequest, tmp_path: Path) -> Split:
    """The same five images in each kind of split."""
    if request.param == "Stream":
        return stream()
    held = encoded()
    if request.param == "RecordSplit":
        return source.RecordSplit(list(zip(held, TARGETS, strict=True)), prefix="image ")
    if request.param == "PixelSplit":
        held = PIXELS
    if request.param == "FileSplit":
        for place, contents in enumerate(held):
            (tmp_path / f"{place}.png").write_bytes(contents)
        held = np.array([str(tmp_path / f"{place}.png") for place in range(len(held))], object)
    made = Split(images=held, targets=TARGETS)
    assert type(made).__name__ == request.param
    return made


def shown(split: Split) -> list[tuple[np.ndarray, int]]:
    loader = split.loader()
    return [
        (np.asarray(loader.pixels(item, None)), int(loader.target(item))) for item in split.items()
    ]


def equal(left: Split, right: Split) -> bool:
    pairs = list(zip(shown(left), shown(right), strict=True))
    return all(np.array_equal(a, b) and x == y for (a, x), (b, y) in pairs)


def test_every_kind_shows_the_same_images(split: Split) -> None:
    """Pixels and classes, in order; the third by its place; a part of it; each with a name."""
    assert isinstance(split, Split)
    assert len(split) == 5
    assert split.targets.tolist() == TARGETS.tolist()
    for (image, target), expected, wanted in zip(shown(split), PIXELS, TARGETS, strict=True):
        assert np.array_equal(image, expected)
        assert target == wanted
    assert np.array_equal(split.pixels(2), PIXELS[2])
    item = next(iter(split.items()))
    part = split.loader().pixels(item, lambda shape: tf.constant([1, 2, 3, 2]))
    assert np.array_equal(part, PIXELS[0, 1:4, 2:4])
    assert split.name(item[-1].numpy()).endswith(("image 0", "0.png"))
    assert split.name(3).endswith(("image 3", "3.png"))


def test_every_kind_can_be_taken_from_replaced_copied_and_pickled(split: Split) -> None:
    """In any order, places twice and from the end; the names of the damaged come along."""
    split.damage.add("7.png")
    anything: Any = split

    assert equal(
        split.take([4, 1, 1, -5]), Split(images=PIXELS[[4, 1, 1, 0]], targets=[2, 1, 1, 0])
    )
    for copied in (
        pickle.loads(pickle.dumps(split)),
        copy.deepcopy(split),
        dataclasses.replace(anything),
    ):
        assert type(copied) is type(split)
        assert equal(copied, split)
        assert copied.damage.names == ("7.png",)
    assert not equal(split.take([1]), split.take([2]))
    with pytest.raises(IndexError):
        split.take([5])


class Numbered:
    """Records that are their own numbers, and which of them were read."""

    places = 20

    def __init__(self, count: int) -> None:
        self.count, self.was_read = count, tf.Variable(tf.zeros(count, tf.bool))

    def read(self, start: Any, stop: Any) -> tf.data.Dataset:
        def note(number: tf.Tensor) -> tuple[tf.Tensor, ...]:
            self.was_read.scatter_update(tf.IndexedSlices(True, number))
            return b"", tf.cast(number, tf.int32), tf.as_string(number)

        return tf.data.Dataset.range(start, stop).map(note)

    def order(self) -> np.ndarray:
        return np.arange(self.count)


def rows(split: Split, *, first_step: int = 0, part: slice = slice(0, 16)) -> list[list[int]]:
    """The classes in the batches of two epochs, which are the numbers of the records."""
    passes = source.Passes(
        key=lambda epoch: tf.stack([tf.constant(7, tf.int64), epoch]),
        batch_size=16,
        first_step=first_step,
        epochs=2,
        rows=part,
    )
    return [item[1].numpy().tolist() for item in split.shuffled_batches(passes)]


@pytest.mark.full
@pytest.mark.parametrize("is_placed", [True, False])
def test_workers_and_resumed_trainings_see_the_same_rows_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, is_placed: bool
) -> None:
    """For any number of workers, from any step of any epoch; each image once in an epoch."""
    monkeypatch.setattr(datasets, "BUFFER", 64)
    records = Numbered(403)
    held = records if is_placed else None
    split = Stream(records.read(0, 403), count=403, records=held)
    whole = rows(split)

    assert [split.lanes(size) for size in (7, 8, 16, 32)] == [
        1,
        *((8, 16, 16) if is_placed else (1, 1, 1)),
    ]
    assert len(whole) == 50
    for epoch in (whole[:25], whole[25:]):
        assert len({number for row in epoch for number in row}) == 400
    assert whole[:25] != whole[25:]
    for part in (slice(0, 8), slice(12, 16), slice(5, 6)):
        assert rows(split, part=part) == [row[part] for row in whole]
    for step in (1, 13, 24, 25, 49):
        assert rows(split, first_step=step) == whole[step:]


def test_a_worker_reads_its_part_of_a_stream_and_a_resumed_training_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last of four workers reads the last quarter; the last step, the ends of the lanes."""
    monkeypatch.setattr(datasets, "BUFFER", 64)
    records = Numbered(1600)
    split = Stream(records.read(0, 1600), count=1600, records=records)
    records.was_read.assign(tf.zeros(1600, tf.bool))

    rows(split, part=slice(12, 16))

    assert np.flatnonzero(records.was_read).tolist() == list(range(1200, 1600))
    records.was_read.assign(tf.zeros(1600, tf.bool))
    rows(split, first_step=199)
    read = np.flatnonzero(records.was_read)
    assert set(read // 100) == set(range(16))
    assert (read % 100).min() >= 96  # the last row of a lane is in its last block, of 4 at most


def test_a_stream_says_what_it_is_without_being_read() -> None:
    """`repr` reads nothing: this dataset would fail. One that calls Python is not pickled."""

    def fail(place: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.control_dependencies([tf.debugging.Assert(place < 0, ["read"])]):
            return tf.constant(b""), tf.constant(1), tf.constant(b"")

    unread = Stream(tf.data.Dataset.range(3).map(fail), count=3)

    assert "count=3" in repr(unread)
    assert len(dataclasses.replace(unread, count=2)) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        unread.count = 4  # type: ignore[misc]
    with pytest.raises(tf.errors.InvalidArgumentError):
        unread.targets.tolist()
    spec = (tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int32), tf.TensorSpec((), tf.string))
    python = tf.data.Dataset.from_generator(lambda: iter([(b"", 0, b"")]), output_signature=spec)
    with pytest.raises(TypeError, match="calls Python, or keeps state, cannot be pickled"):
        pickle.dumps(Stream(python, count=1))


# Images that no split can hold.
WRONG = {
    "floats": np.zeros((2, 4, 4, 3), np.float32),
    "grey": np.zeros((2, 4, 4, 1), np.uint8),
    "one image": np.zeros((4, 4, 3), np.uint8),
    "numbers": np.zeros(2, np.int32),
    "a list": ["a.png", "b.png"],
}


def test_what_does_not_fit_is_refused() -> None:
    """Images of no kind, other counts, another kind's images, and a split that is none."""
    for wrong in WRONG.values():
        with pytest.raises(ValueError, match="The images of a split are pixels"):
            Split(images=wrong, targets=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="5 images and 4 targets"):
        Split(images=PIXELS, targets=TARGETS[:4])
    with pytest.raises(ValueError, match="A FileSplit cannot hold these images, a PixelSplit can"):
        source.FileSplit(images=PIXELS, targets=TARGETS)
    five = Split(images=PIXELS, targets=TARGETS)
    data = source.ImageData(source="x", labels=(), train=five, validation=five, test=five)
    with pytest.raises(ValueError, match="no split 'val'; the splits are train, validation, test"):
        data.split("val")


# Images in a class, fractions -> (train, validation, test).
TENTHS: dict[str, Any] = {"validation": 0.1, "test": 0.1}
SHARES: list[tuple[int, dict[str, Any], tuple[int, ...]]] = [
    (1, TENTHS, (1, 0, 0)),
    (2, TENTHS, (1, 1, 0)),
    (3, TENTHS, (1, 1, 1)),
    (10, TENTHS, (8, 1, 1)),
    (100, TENTHS, (80, 10, 10)),
    (10, {"validation": 0, "test": 0}, (10, 0, 0)),
    (2, {"validation": 0.1, "test": 0}, (1, 1, 0)),
]


def assigned(names: list[str], *, classes: int = 1, **fractions: float) -> dict[str, set[str]]:
    """The names of each split."""
    splits = source.assign_splits(names, np.arange(len(names)) % classes, **fractions)
    assert sorted(place for each in splits.values() for place in each) == [*range(len(names))]
    return {name: {names[place] for place in splits[name]} for name in source.SPLITS}


def test_each_class_is_divided_in_proportion() -> None:
    """Classes of one, two, three and many images get the shares that the docstring promises."""
    names = [f"{index}.png" for index in range(101)]
    for count, fractions, expected in SHARES:
        splits = assigned(names[:count], **fractions)
        assert tuple(map(len, splits.values())) == expected, (count, fractions)
    assigned(names[:57], classes=4, validation=0.15, test=0.15)  # a partition, which it asserts


def test_splits_depend_on_names_and_not_on_their_order() -> None:
    """Another order of the files changes nothing, another file moves few; this is no sorting."""
    names = [f"{index}.png" for index in range(101)]
    forwards = assigned(names[:40], validation=0.2, test=0.2)

    assert assigned(names[:40][::-1], validation=0.2, test=0.2) == forwards
    assert forwards["test"] not in (set(names[:8]), set(sorted(names[:40])[:8]))
    before, after = assigned(names[:100], **TENTHS), assigned(names, **TENTHS)
    assert len(before["test"] & after["test"]) >= 9
