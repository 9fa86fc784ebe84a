"""Images in splits: pixels, encoded images, files or streams, with their labels."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import tensorflow as tf

from keras_vit.data import decoding
from keras_vit.data.images import Damage

# Records that are asked of a source at a time.
_READ = 64
Item = tuple[tf.Tensor, ...]

# Takes (height, width) of an image, gives (top, left, height, width) of a part.
Choice = Callable[[tf.Tensor], tf.Tensor]


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Switches off, here and after, tuning: a dying iterator waits for its thread up to 60 s."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


class Loader(NamedTuple):
    """What makes of an item its pixels, or those of a part, and its class."""

    pixels: Callable[[Item, Choice | None], tf.Tensor]
    target: Callable[[Item], tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
    """Shuffled passes over a split, in batches, and what one worker takes of them.

    Attributes:
        key: gives the two integers that decide the order of an epoch.
        batch_size: images in a batch, of all workers together, not above those of the split.
        first_step: first batch, counted over all epochs.
        epochs: passes over the split; the incomplete last batch of each is dropped.
        rows: the worker's part of each batch.
    """

    key: Callable[[tf.Tensor], tf.Tensor]
    batch_size: int
    first_step: int
    epochs: int
    rows: slice

    def steps(self, count: int) -> int:
        """Full batches in a pass over so many images."""
        return max(count // self.batch_size, 1)

    def order(self, count: int) -> tf.data.Dataset:
        """Returns the worker's part of batches of positions, each pass shuffled as a whole."""
        steps = self.steps(count)
        first_epoch, first_step = divmod(self.first_step, steps)

        def epoch_batches(epoch: tf.Tensor) -> tf.data.Dataset:
            order = tf.random.experimental.stateless_shuffle(tf.range(count), seed=self.key(epoch))
            batches = tf.data.Dataset.from_tensor_slices(order).batch(self.batch_size)
            return batches.take(steps)

        batches = tf.data.Dataset.range(first_epoch, self.epochs).flat_map(epoch_batches)
        return batches.skip(first_step).map(self._own)

    def _own(self, positions: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(positions, (self.batch_size,))[self.rows]


class Split:
    """Labelled images of one split.

    `Split(images=..., targets=...)` makes the kind that the images are of: `PixelSplit`,
    `EncodedSplit` or `FileSplit`. `RecordSplit` and `Stream` are made by themselves.

    Example:
        >>> split = Split(images=np.zeros((3, 8, 8, 3), np.uint8), targets=np.array([0, 1, 1]))
        >>> type(split).__name__, len(split), len(split.take([0, 2])), split.in_memory
        ('PixelSplit', 3, 2, True)

    Attributes:
        images: pixels 0..255, uint8 of shape (count, height, width, 3), the paths of image files,
            or the bytes of such files, both of shape (count,); a stream has none.
        targets: the class of each image, int32 of shape (count,).
        names: what to call each image, shape (count,); None for its path or its place.
        damage: where training writes the names of images that it could not decode.
        in_memory: whether `images` are pixels, with nothing left to decode.
        in_files: whether `images` are paths.

    Raises:
        ValueError: the images are of no such kind, or are not as many as the targets.
    """

    images: np.ndarray
    targets: np.ndarray
    damage: Damage
    in_memory: ClassVar[bool] = False
    in_files: ClassVar[bool] = False

    def __new__(cls, *arguments: Any, **fields: Any) -> "Split":
        kind = _kind(fields["images"]) if cls is Split and "images" in fields else cls
        return super().__new__(kind)

    def __len__(self) -> int:
        raise NotImplementedError

    def items(self) -> tf.data.Dataset:
        """Returns the items of one pass, in order."""
        raise NotImplementedError

    def shuffled_batches(self, passes: Passes) -> tf.data.Dataset:
        """Returns the items of a training, a worker's part of a batch at a time, none decoded."""
        raise NotImplementedError

    def loader(self) -> Loader:
        """Returns what makes of an item its pixels, or those of a part, and its class."""
        raise NotImplementedError

    def name(self, place: Any) -> str:
        """Returns what to call an image, from the last element of its item or its position."""
        raise NotImplementedError

    def take(self, indices: Iterable[int]) -> "Split":
        """Returns the images at these positions."""
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
    """Images in memory: an item is an index of the arrays."""

    images: np.ndarray
    targets: np.ndarray
    names: np.ndarray | None = None
    damage: Damage = dataclasses.field(default_factory=Damage)

    def __post_init__(self) -> None:
        if not isinstance(self, _kind(self.images)):
            raise ValueError(
                f"A {type(self).__name__} cannot hold these images, a "
                f"{_kind(self.images).__name__} can; make it by Split(images=..., targets=...)."
            )
        if len(self.images) != len(self.targets):
            raise ValueError(
                f"A split has a class for each image. Received: {len(self.images)} images and "
                f"{len(self.targets)} targets."
            )

    def __len__(self) -> int:
        return len(self.targets)

    def items(self) -> tf.data.Dataset:
        return untuned(tf.data.Dataset.range(len(self))).map(lambda place: (place,))

    def shuffled_batches(self, passes: Passes) -> tf.data.Dataset:
        return passes.order(len(self)).map(lambda positions: (positions,))

    def loader(self) -> Loader:
        # Made here, not inside of the function: a graph must not hold the images.
        contents, targets = self._contents(), tf.constant(self.targets)
        return Loader(
            lambda item, choose: self._decode(contents[item[0]], choose),
            lambda item: targets[item[0]],
        )

    def name(self, place: Any) -> str:
        return f"image {place}" if self.names is None else str(self.names[place])

    def take(self, indices: Iterable[int]) -> Self:
        positions = np.fromiter(indices, np.int64)
        names = None if self.names is None else self.names[positions]
        return dataclasses.replace(
            self, images=self.images[positions], targets=self.targets[positions], names=names
        )

    def _contents(self) -> tf.Tensor:
        return tf.constant(self.images)

    @staticmethod
    def _decode(content: tf.Tensor, choose: Choice | None) -> tf.Tensor:
        """Makes pixels of what stands in `images`."""
        raise NotImplementedError


class PixelSplit(_HeldSplit):
    """Pixels of one size, in memory."""

    in_memory = True

    @staticmethod
    def _decode(content: tf.Tensor, choose: Choice | None) -> tf.Tensor:
        return content if choose is None else decoding.cut_part(content, choose=choose)


class EncodedSplit(_HeldSplit):
    """The bytes of image files, in memory."""

    @staticmethod
    def _decode(content: tf.Tensor, choose: Choice | None) -> tf.Tensor:
        return decode_contents(content, choose)


class FileSplit(_HeldSplit):
    """The paths of image files."""

    in_files = True

    def name(self, place: Any) -> str:
        return super().name(place) if self.names is not None else str(self.images[place])

    def _contents(self) -> tf.Tensor:
        # Also names that are not UTF-8.
        return tf.constant([os.fsencode(path) for path in self.images], tf.string)

    @staticmethod
    def _decode(content: tf.Tensor, choose: Choice | None) -> tf.Tensor:
        return decode_contents(tf.io.read_file(content), choose)


@dataclasses.dataclass(frozen=True, eq=False)
class RecordSplit(Split):
    """Images of a source that gives any record by its number; they are read when they are needed.

    Example:
        >>> contents = tf.io.encode_png(tf.zeros((4, 4, 3), tf.uint8)).numpy()
        >>> split = RecordSplit([(contents, 1), (contents, 0)], prefix="image ")
        >>> len(split), split.targets.tolist(), split.take([1]).name(0)
        (2, [1, 0], 'image 1')

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

    def shuffled_batches(self, passes: Passes) -> tf.data.Dataset:
        batches = passes.order(len(self)).map(self._read, num_parallel_calls=2, deterministic=True)
        return batches.prefetch(1)

    def loader(self) -> Loader:
        return Loader(lambda item, choose: decode_contents(item[0], choose), lambda item: item[1])

    def name(self, place: Any) -> str:
        if not isinstance(place, bytes):
            place = self._records(np.array([place]))[2][0]
        return place.decode(errors="replace") if isinstance(place, bytes) else str(place)

    def take(self, indices: Iterable[int]) -> "RecordSplit":
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
        contents, targets = [row[0] for row in rows], [row[1] for row in rows]
        return objects(contents), np.array(targets, np.int32), objects(names)


class Records(Protocol):
    """Records of images that can be read from any place without those before it.

    Attributes:
        places: how many places may be read at once, so that little is read twice.
    """

    @property
    def places(self) -> int: ...

    def read(self, start: Any, stop: Any) -> tf.data.Dataset:
        """Returns the bytes, the class (int32) and the name of the images at these positions."""

    def order(self) -> np.ndarray:
        """Returns the positions in the order in which every hundredth image is counted."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some of the records, those at `positions` or all others; the positions ascend."""

    records: Records
    positions: np.ndarray
    are_left_out: bool

    @property
    def places(self) -> int:
        return self.records.places

    def read(self, start: Any, stop: Any) -> tf.data.Dataset:
        first, last = self._original(start), self._original(stop - 1)
        positions = tf.constant(self.positions, tf.int64)

        def is_among(position: tf.Tensor, record: Item) -> tf.Tensor:
            at = tf.searchsorted(positions, position[None])[0]
            listed = positions[tf.minimum(at, len(self.positions) - 1)] == position
            return tf.not_equal(listed, self.are_left_out)

        records = self.records.read(first, tf.where(stop > start, last + 1, first))
        return records.enumerate(first).filter(is_among).map(lambda position, record: record)

    def order(self) -> np.ndarray:
        raise NotImplementedError

    def _original(self, place: Any) -> tf.Tensor:
        if not self.are_left_out:
            return tf.constant(self.positions, tf.int64)[place]
        kept_before = tf.constant(self.positions - np.arange(len(self.positions)), tf.int64)
        place = tf.cast(place, tf.int64)
        return place + tf.searchsorted(kept_before, place[None], "right", tf.int64)[0]


def decode_contents(contents: tf.Tensor, choose: Choice | None) -> tf.Tensor:
    """Makes pixels of the bytes of an image file, or those of a part."""
    if choose is None:
        return decoding.decode_image(contents)
    return decoding.decode_part(contents, choose=choose)


def objects(values: Iterable[Any]) -> np.ndarray:
    """Returns an array of objects, which NumPy does not look into."""
    listed = list(values)
    array = np.empty(len(listed), object)
    array[:] = listed
    return array


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
        names: dict[str, tuple[str, ...]] = {}
        for image in self.left_out:
            names[image.reason] = (*names.get(image.reason, ()), image.name)
        return names

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
        test_count = _share(len(indices), test, at_least_one_from=3)
        validation_count = _share(
            len(indices), validation, at_least_one_from=3 if test_count else 2
        )
        splits["test"] += indices[:test_count]
        splits["validation"] += indices[test_count : test_count + validation_count]
        splits["train"] += indices[test_count + validation_count :]
    return {name: sorted(indices) for name, indices in splits.items()}


def _kind(images: Any) -> type[_HeldSplit]:
    shape, kind = np.shape(images), getattr(images, "dtype", None)
    if len(shape) == 4 and shape[3] == 3 and kind == np.uint8:
        return PixelSplit
    if len(shape) == 1 and kind is not None and kind.kind in "OSU":
        return EncodedSplit if any(isinstance(one, bytes) for one in images[:1]) else FileSplit
    raise ValueError(
        "The images of a split are pixels 0..255, a uint8 array of shape (count, height, width, "
        "3), or an array of paths or of the bytes of files, of shape (count,). Received: "
        f"{type(images).__name__} of shape {shape} and type {kind}."
    )


def _share(count: int, fraction: float, *, at_least_one_from: int) -> int:
    if not fraction or count < at_least_one_from:
        return 0
    return max(round(count * fraction), 1)
