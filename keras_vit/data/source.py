"""Describes labelled images in three splits, and decides which image goes into which."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence

import numpy as np

from keras_vit.data.splits import Split

SPLITS = ("train", "validation", "test")
DAMAGED = "cannot be decoded"


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A file, or a folder with all that is in it, that is not among the images.

    Attributes:
        name: its path, or what its dataset calls it.
        reason: why, as the end of a sentence that begins with "they".
    """

    name: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImageData:
    """Everything a training run sees: labelled images in three splits, and what was left out.

    Example:
        >>> part = Split(images=np.zeros((3, 8, 8, 3), np.uint8), targets=np.array([0, 1, 1]))
        >>> data = ImageData(source="memory", labels=("cat", "dog"), train=part, validation=part,
        ...                  test=part)
        >>> data.counts
        {'train': 3, 'validation': 3, 'test': 3}

    Attributes:
        source: "digits", "tfds:NAME", the absolute path of a folder, or any other word.
        labels: the name of each class; a target is a position in it.
        train: what the weights are fitted to.
        validation: what the recipe and the best epoch are chosen on.
        test: what is looked at once, at the end.
        left_out: files that are not used, each with the reason.
    """

    source: str
    labels: tuple[str, ...]
    train: Split
    validation: Split
    test: Split
    left_out: tuple[LeftOut, ...] = ()

    def split(self, name: str) -> Split:
        """Returns the split called "train", "validation" or "test"."""
        if name not in SPLITS:
            raise ValueError(f"There is no split {name!r}; the splits are {', '.join(SPLITS)}.")
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]

    @property
    def damaged(self) -> tuple[str, ...]:
        """Images that cannot be decoded, left out."""
        return self.reasons.get(DAMAGED, ())

    @property
    def reasons(self) -> dict[str, tuple[str, ...]]:
        """The names of what is left out, by reason."""
        found: dict[str, tuple[str, ...]] = {}
        for one in self.left_out:
            found[one.reason] = (*found.get(one.reason, ()), one.name)
        return found

    @property
    def counts(self) -> dict[str, int]:
        """Number of images in each split."""
        return {name: len(self.split(name)) for name in SPLITS}


def assign_splits(
    names: Sequence[str], targets: np.ndarray | Sequence[int], *, validation: float, test: float
) -> dict[str, list[int]]:
    """Divides images into splits, each class in the same proportions.

    The names and classes alone decide: the splits are the same on every machine and for every
    training seed. A class of three or more images has at least one in each split that is asked
    for, a class of two none for testing, a class of one only trains.

    Example:
        >>> names = [f"{index}.png" for index in range(20)]
        >>> splits = assign_splits(names, [0] * 10 + [1] * 10, validation=0.1, test=0.2)
        >>> {name: len(indices) for name, indices in splits.items()}
        {'train': 14, 'validation': 2, 'test': 4}

    Args:
        names: a name for each image, all different.
        targets: the class of each image.
        validation: fraction that goes to validation.
        test: fraction that goes to test.

    Returns:
        The positions of the images in each split, ascending.
    """
    by_class: dict[int, list[int]] = {}
    # A hash orders as a seeded shuffle would, and is the same in every version of NumPy.
    for index in sorted(
        range(len(names)), key=lambda index: hashlib.sha256(os.fsencode(names[index])).digest()
    ):
        by_class.setdefault(int(targets[index]), []).append(index)
    splits: dict[str, list[int]] = {name: [] for name in SPLITS}
    for indices in by_class.values():
        tested = _share(len(indices), test, at_least_one_from=3)
        validated = _share(len(indices), validation, at_least_one_from=3 if tested else 2)
        splits["test"] += indices[:tested]
        splits["validation"] += indices[tested : tested + validated]
        splits["train"] += indices[tested + validated :]
    return {name: sorted(indices) for name, indices in splits.items()}


def _share(count: int, fraction: float, *, at_least_one_from: int) -> int:
    if not fraction or count < at_least_one_from:
        return 0
    return max(round(count * fraction), 1)
