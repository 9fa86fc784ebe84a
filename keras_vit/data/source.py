"""Labelled images in splits: pixels, encoded images, files, or records that are read by number."""

import csv
import dataclasses
import functools
import hashlib
import logging
import os
import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import tensorflow as tf

from keras_vit.data import images

# What splits are called, by the words that Hugging Face's datasets knows.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLITS = tuple(SPLIT_NAMES)
_SPLIT_OF = {name: split for split, names in SPLIT_NAMES.items() for name in names}
SPLIT_COLUMNS = ("split", "label", "path")  # of the file that says which images a run has seen
# Fractions of the training images that become the splits that are missing.
VALIDATION, TEST = 0.1, 0.1
DAMAGED = "cannot be decoded"
_NAMED = 5  # of the files that are left out for one reason
_READ = 64  # records that are asked of a source at a time
_LOGGER = logging.getLogger(__name__)
Item = tuple[tf.Tensor, ...]
# Takes (height, width) of an image, gives (top, left, height, width) of a part.
Choice = Callable[[tf.Tensor], tf.Tensor]


def composed(text: str) -> str:
    """Returns text whose accents are part of their letters: some disks store them beside these."""
    return unicodedata.normalize("NFC", text)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Switches off, here and after, tuning: a dying iterator waits for its thread up to 60 s."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


class Loader(NamedTuple):
    """What makes of an item its pixels, or those of a part, and its class."""

    pixels: Callable[[Item, Choice | None], tf.Tensor]
    target: Callable[[Item], tf.Tensor]


class Damage:
    """The names of the images that could not be decoded while training.

    Example:
        >>> damage = Damage()
        >>> damage.add("cat/7.jpg")
        >>> damage.names
        ('cat/7.jpg',)

    Args:
        strict: whether such an image ends the training, instead of being replaced and named.

    Attributes:
        fatal: the sentence that a training ended with, as an error in a graph loses its type.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.fatal: str | None = None
        self._names: set[str] = set()
        self._lock = threading.Lock()  # tf.data calls from several threads

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_names, (self.strict, self.names)  # a lock cannot be copied

    def add(self, name: str) -> None:
        """Adds a name, and logs it the first time."""
        with self._lock:
            is_known = name in self._names
            self._names.add(name)
        if not is_known:
            _LOGGER.warning("%r cannot be decoded; another image stands in for it.", name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names so far, in alphabetic order."""
        with self._lock:
            return tuple(sorted(self._names))


def _with_names(strict: bool, names: tuple[str, ...]) -> Damage:
    damage = Damage(strict=strict)
    damage._names.update(names)
    return damage


class Split:
    """Labelled images of one split: `Split(images=..., targets=...)`, or a `RecordSplit`.

    Example:
        >>> split = Split(images=np.zeros((3, 8, 8, 3), np.uint8), targets=np.array([0, 1, 1]))
        >>> len(split), len(split.take([0, 2])), split.in_memory, split.in_files
        (3, 2, True, False)

    Attributes:
        images: pixels 0..255, uint8 of shape (count, height, width, 3), the paths of image files,
            or the bytes of such files, both of shape (count,); records have none.
        targets: the class of each image, int32 of shape (count,).
        names: what to call each image, shape (count,); None for its path or its place.
        damage: where training writes the names of images that it could not decode.

    Raises:
        ValueError: the images are of no such kind, or are not as many as the targets.
    """

    images: np.ndarray
    targets: np.ndarray
    damage: Damage

    def __new__(cls, *arguments: Any, **fields: Any) -> "Split":
        return super().__new__(_HeldSplit if cls is Split else cls)

    @property
    def in_memory(self) -> bool:
        """Whether `images` are pixels, with nothing left to decode."""
        return False

    @property
    def in_files(self) -> bool:
        """Whether `images` are paths."""
        return False

    def __len__(self) -> int:
        raise NotImplementedError

    def items(self) -> tf.data.Dataset:
        """Returns the items of one pass, in order."""
        raise NotImplementedError

    def items_at(self, positions: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the items at batches of positions, integers (batch,); none is decoded."""
        raise NotImplementedError

    def loader(self) -> Loader:
        """Returns what makes of an item its pixels, or those of a part, and its class."""
        raise NotImplementedError

    def name(self, place: Any) -> str:
        """Returns what to call an image, from the last element of its item or its position."""
        raise NotImplementedError

    def take(self, indices: Iterable[int]) -> Self:
        """Returns the images at these positions.

        Raises:
            IndexError: there is no such position.
        """
        raise NotImplementedError

    def pixels(self, place: int) -> np.ndarray:
        """Returns the image at a position, uint8 of shape (height, width, 3).

        Raises:
            tf.errors.InvalidArgumentError: it is damaged.
        """
        part = self.take([place])
        item = next(iter(part.items()))
        return np.asarray(part.loader().pixels(item, None))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _HeldSplit(Split):
    """Pixels, bytes of files, or paths in an array: an item is a place in it."""

    images: np.ndarray
    targets: np.ndarray
    names: np.ndarray | None = None
    damage: Damage = dataclasses.field(default_factory=Damage)

    def __post_init__(self) -> None:
        shape, kind = np.shape(self.images), getattr(self.images, "dtype", None)
        are_pixels = len(shape) == 4 and shape[3] == 3 and kind == np.uint8
        if not are_pixels and (len(shape) != 1 or kind is None or kind.kind not in "OSU"):
            raise ValueError(
                "The images of a split are pixels 0..255, a uint8 array of shape (count, height, "
                "width, 3), or an array of paths or of the bytes of files, of shape (count,). "
                f"Received: {type(self.images).__name__} of shape {shape} and type {kind}."
            )
        if len(self.images) != len(self.targets):
            raise ValueError(
                f"A split has a class for each image. Received: {len(self.images)} images and "
                f"{len(self.targets)} targets."
            )

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def in_memory(self) -> bool:
        return self.images.ndim == 4

    @property
    def in_files(self) -> bool:
        return not self.in_memory and not any(isinstance(one, bytes) for one in self.images[:1])

    def items(self) -> tf.data.Dataset:
        return untuned(tf.data.Dataset.range(len(self))).map(lambda place: (place,))

    def items_at(self, positions: tf.data.Dataset) -> tf.data.Dataset:
        return positions.map(lambda places: (places,))

    def loader(self) -> Loader:
        # Made here, not inside of the function: a graph must not hold the images.
        in_files, targets = self.in_files, tf.constant(self.targets)
        if in_files:  # also with names that are not UTF-8
            held = tf.constant([os.fsencode(path) for path in self.images], tf.string)
        else:
            held = tf.constant(self.images)

        def load(item: Item, choose: Choice | None) -> tf.Tensor:
            one = held[item[0]]
            if self.in_memory:
                return one if choose is None else images.cut_part(one, choose=choose)
            return _decode(tf.io.read_file(one) if in_files else one, choose)

        return Loader(load, lambda item: targets[item[0]])

    def name(self, place: Any) -> str:
        if self.names is not None:
            return str(self.names[place])
        return str(self.images[place]) if self.in_files else f"image {place}"

    def take(self, indices: Iterable[int]) -> Self:
        positions = np.fromiter(indices, np.int64)
        names = None if self.names is None else self.names[positions]
        return dataclasses.replace(
            self, images=self.images[positions], targets=self.targets[positions], names=names
        )


@dataclasses.dataclass(frozen=True, eq=False)
class RecordSplit(Split):
    """Images of a source that gives any record by its number; they are read when they are needed.

    Attributes:
        source: has `len`, and gives by number the bytes of an image file, its class, and maybe its
            name; it is asked from several threads, and by `__getitems__`, of many numbers, if it
            has that.
        prefix: stands before the number of an image that has no name.
        places: numbers of the images of this split; None for all.
        damage: where training writes the names of images that it could not decode.
    """

    source: Any
    _: dataclasses.KW_ONLY
    prefix: str = "record "
    places: np.ndarray | None = None
    damage: Damage = dataclasses.field(default_factory=Damage)

    def __len__(self) -> int:
        return len(self.source) if self.places is None else len(self.places)

    @functools.cached_property
    def targets(self) -> np.ndarray:  # type: ignore[override]  # nobody assigns to it
        """The class of each image, int32 of shape (count,); the first use reads all images."""
        return np.fromiter((item[1] for item in self.items().as_numpy_iterator()), np.int32)

    def items(self) -> tf.data.Dataset:
        return untuned(tf.data.Dataset.range(len(self)).batch(_READ)).map(self._read).unbatch()

    def items_at(self, positions: tf.data.Dataset) -> tf.data.Dataset:
        return positions.map(self._read, num_parallel_calls=2, deterministic=True).prefetch(1)

    def loader(self) -> Loader:
        return Loader(lambda item, choose: _decode(item[0], choose), lambda item: item[1])

    def name(self, place: Any) -> str:
        if not isinstance(place, bytes):
            place = self._records(np.array([place]))[2][0]
        return place.decode(errors="replace") if isinstance(place, bytes) else str(place)

    def take(self, indices: Iterable[int]) -> Self:
        every = np.arange(len(self)) if self.places is None else self.places
        return dataclasses.replace(self, places=every[np.fromiter(indices, np.int64)])

    def _read(self, positions: tf.Tensor) -> Item:
        kinds = (tf.string, tf.int32, tf.string)
        item = tf.numpy_function(self._records, [positions], kinds)
        return tuple(tf.ensure_shape(values, positions.shape) for values in item)

    def _records(self, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        numbers = (positions if self.places is None else self.places[positions]).tolist()
        many = getattr(self.source, "__getitems__", None)
        rows = many(numbers) if many else [self.source[number] for number in numbers]
        names = [
            row[2] if len(row) == 3 else f"{self.prefix}{number}"
            for row, number in zip(rows, numbers, strict=True)
        ]
        # Arrays of objects, which NumPy does not look into.
        contents = np.fromiter((row[0] for row in rows), object)
        targets = np.array([row[1] for row in rows], np.int32)
        return contents, targets, np.fromiter(names, object)


@dataclasses.dataclass(frozen=True)
class SkippedFile:
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
        skipped: files that are not used, each with the reason.
    """

    source: str
    labels: tuple[str, ...]
    train: Split
    validation: Split
    test: Split
    skipped: tuple[SkippedFile, ...] = ()

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
        names: dict[str, list[str]] = {}
        for image in self.skipped:
            names.setdefault(image.reason, []).append(image.name)
        return {reason: tuple(each) for reason, each in names.items()}

    @property
    def counts(self) -> dict[str, int]:
        """Number of images in each split."""
        return {name: len(self.split(name)) for name in SPLITS}

    def write_splits(self, file: Path) -> None:
        """Writes which image of a folder is in which split as CSV; paths are relative to it."""
        with file.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(SPLIT_COLUMNS)
            for name in SPLITS:
                split = self.split(name)
                for image, target in zip(split.images, split.targets, strict=True):
                    path = Path(image).relative_to(self.source).as_posix()
                    writer.writerow([name, self.labels[target] if self.labels else "", path])


def first_names(reasons: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Returns by reason the number of what is left out ("count"), and its first names ("names")."""
    return {
        reason: {"count": len(names), "names": list(names[:_NAMED])}
        for reason, names in reasons.items()
        if names
    }


def split_of(name: str) -> tuple[str, str] | None:
    """Returns the split that a name means, and its rest: ("train", "seg_") of "Seg_Train"."""
    words = re.split(r"([^\W\d_]+)", composed(name).casefold())
    found = [word for word in words if word in _SPLIT_OF]
    rest = "".join(word for word in words if word not in found).strip()
    return (_SPLIT_OF[found[0]], rest) if len(found) == 1 else None


def assign_splits(
    names: Sequence[str], targets: np.ndarray | Sequence[int], *, validation: float, test: float
) -> dict[str, list[int]]:
    """Divides images into splits, each class in the same proportions.

    The names and classes alone decide: the splits are the same on every machine and for every
    training seed. A class of three or more images has at least one in each split that is asked
    for, a class of two none for testing, a class of one only trains.

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
        test_count = _share(len(indices), test, at_least_one_from=3)
        validation_count = _share(
            len(indices), validation, at_least_one_from=3 if test_count else 2
        )
        splits["test"] += indices[:test_count]
        splits["validation"] += indices[test_count : test_count + validation_count]
        splits["train"] += indices[test_count + validation_count :]
    return {name: sorted(indices) for name, indices in splits.items()}


def carve(
    splits: dict[str, Split], names: Sequence[str], *, test: float = TEST
) -> dict[str, Split]:
    """Takes the splits that are missing out of the training images, see `assign_splits`."""
    train = splits["train"]
    fractions = {"validation": VALIDATION, "test": test}
    fractions = {name: 0 if name in splits else share for name, share in fractions.items()}
    indices = assign_splits(names, train.targets, **fractions)
    taken = {name: train.take(indices[name]) for name in SPLITS}
    return {**taken, **splits, "train": taken["train"]}


def _decode(contents: tf.Tensor, choose: Choice | None) -> tf.Tensor:
    if choose is None:
        return images.decode_image(contents)
    return images.decode_part(contents, choose=choose)


def _share(count: int, fraction: float, *, at_least_one_from: int) -> int:
    return max(round(count * fraction), 1) if fraction and count >= at_least_one_from else 0
