"""Tests of keras_vit.data.source."""

import numpy as np
import pytest

from keras_vit.data import Split, source

# Images in a class -> (train, validation, test) with fractions of a tenth each.
SHARES = [(1, (1, 0, 0)), (2, (1, 1, 0)), (3, (1, 1, 1)), (10, (8, 1, 1)), (100, (80, 10, 10))]


def split_counts(count: int, **fractions: float) -> tuple[int, ...]:
    names = [f"{index}.png" for index in range(count)]
    splits = source.assign_splits(names, [0] * count, **fractions)
    return tuple(len(splits[name]) for name in source.SPLITS)


@pytest.mark.parametrize(("count", "expected"), SHARES)
def test_each_class_is_divided_in_proportion(count: int, expected: tuple[int, ...]) -> None:
    """Classes of one, two, three and many images get the shares that the docstring promises."""
    assert split_counts(count, validation=0.1, test=0.1) == expected


def test_a_split_that_is_not_asked_for_is_empty() -> None:
    """Fractions of zero leave every image to training, but two images still give a validation."""
    assert split_counts(10, validation=0, test=0) == (10, 0, 0)
    assert split_counts(2, validation=0.1, test=0) == (1, 1, 0)


def test_every_image_is_in_one_split() -> None:
    """The splits are a partition."""
    names = [f"{index}.png" for index in range(57)]
    splits = source.assign_splits(names, np.arange(57) % 4, validation=0.15, test=0.15)

    assert sorted(index for split in splits.values() for index in split) == list(range(57))


def test_splits_depend_on_names_and_not_on_their_order() -> None:
    """Listing the files in another order puts each into the same split, and this is no sorting."""
    names = [f"{index}.png" for index in range(40)]
    forwards = source.assign_splits(names, [0] * 40, validation=0.2, test=0.2)
    backwards = source.assign_splits(names[::-1], [0] * 40, validation=0.2, test=0.2)

    for split in source.SPLITS:
        assert {names[i] for i in forwards[split]} == {names[::-1][i] for i in backwards[split]}
    assert forwards["test"] != list(range(8))


def test_adding_a_file_moves_few_others() -> None:
    """A grown folder keeps almost all images where they were: nothing is shuffled anew."""
    names = [f"{index}.png" for index in range(101)]
    before = source.assign_splits(names[:100], [0] * 100, validation=0.1, test=0.1)
    after = source.assign_splits(names, [0] * 101, validation=0.1, test=0.1)

    assert len(set(before["test"]) & set(after["test"])) >= 9


def test_an_unknown_split_is_an_error() -> None:
    """Asking for "val" names the three splits."""
    empty = Split(images=np.empty(0, object), targets=np.empty(0, np.int32))
    data = source.ImageData(source="x", labels=(), train=empty, validation=empty, test=empty)

    with pytest.raises(ValueError, match="no split 'val'; the splits are train, validation, test"):
        data.split("val")
