"""Tests of keras_vit.data.source."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import Split, source

PIXELS = np.arange(5 * 48, dtype=np.uint8).reshape(5, 4, 4, 3)
TARGETS = np.array([0, 1, 0, 1, 2], np.int32)
# Images that no split can hold.
WRONG = {
    "floats": np.zeros((2, 4, 4, 3), np.float32),
    "grey": np.zeros((2, 4, 4, 1), np.uint8),
    "one image": np.zeros((4, 4, 3), np.uint8),
    "numbers": np.zeros(2, np.int32),
    "a list": ["a.png", "b.png"],
}
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


def encoded() -> np.ndarray:
    array = np.empty(len(PIXELS), object)
    array[:] = [tf.io.encode_png(image).numpy() for image in PIXELS]
    return array


@pytest.fixture(params=["pixels", "encoded", "files", "records"])
def split(request: pytest.FixtureRequest, tmp_path: Path) -> Split:
    """The same five images in each kind of split."""
    held = encoded()
    if request.param == "records":
        return source.RecordSplit(list(zip(held, TARGETS, strict=True)), prefix="image ")
    if request.param == "pixels":
        held = PIXELS
    if request.param == "files":
        for place, contents in enumerate(held):
            (tmp_path / f"{place}.png").write_bytes(contents)
        held = np.array([str(tmp_path / f"{place}.png") for place in range(len(held))], object)
    made = Split(images=held, targets=TARGETS)
    assert (made.in_memory, made.in_files) == (request.param == "pixels", request.param == "files")
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
    with pytest.raises(dataclasses.FrozenInstanceError):
        anything.damage = None
    assert not equal(split.take([1]), split.take([2]))
    with pytest.raises(IndexError):
        split.take([5])


def test_records_are_not_read_before_they_are_needed() -> None:
    """`repr`, `len` and a part of them read none of these, which cannot be read."""

    class Unread:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> Any:
            raise RuntimeError("read")

    unread = source.RecordSplit(Unread())

    assert "prefix='record '" in repr(unread)
    assert (len(unread), len(unread.take([0, 2]))) == (3, 2)
    with pytest.raises(tf.errors.UnknownError, match="read"):
        unread.targets.tolist()


def test_what_does_not_fit_is_refused() -> None:
    """Images of no kind, other counts, and a split that is none."""
    for wrong in WRONG.values():
        with pytest.raises(ValueError, match="The images of a split are pixels"):
            Split(images=wrong, targets=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="5 images and 4 targets"):
        Split(images=PIXELS, targets=TARGETS[:4])
    five = Split(images=PIXELS, targets=TARGETS)
    data = source.ImageData(source="x", labels=(), train=five, validation=five, test=five)
    with pytest.raises(ValueError, match="no split 'val'; the splits are train, validation, test"):
        data.split("val")


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
