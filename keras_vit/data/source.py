"""Images in splits: pixels, encoded images, files or streams, with their labels."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import tensorflow as tf

from keras_vit.data import decoding
from keras_vit.data.images import Damage

# Encoded images of a stream that are shuffled at a time: 0.9 GB of ImageNet.
BUFFER = 8192
Item = tuple[tf.Tensor, ...]

# Takes (height, width) of an image, gives (top, left, height, width) of a part.
Choice = Callable[[tf.Tensor], tf.Tensor]


class Loader(NamedTuple):
    """What makes of an item its pixels, or those of a part, and its class."""

    pixels: Callable[[Item, Choice | None], tf.Tensor]
    target: Callable[[Item], tf.Tensor]


class Split:
    """Labelled images of one split.

    `Split(images=..., targets=...)` makes the kind that the images are of: `PixelSplit`,
    `EncodedSplit` or `FileSplit`. The fourth kind is `Stream`.

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

    def shuffled_items(self, *, seed: tf.Tensor) -> tf.data.Dataset:
        """Returns the items of one pass in an order that two integers decide, none decoded."""
        raise NotImplementedError

    def loader(self) -> Loader:
        """Returns what makes of an item its pixels, or those of a part, and its class."""
        raise NotImplementedError

    def name(self, place: Any) -> str:
        """Returns what to call an image, from the last element of its item."""
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
        return tf.data.Dataset.range(len(self)).map(lambda place: (place,))

    def shuffled_items(self, *, seed: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(tf.range(len(self)), seed=seed)
        return tf.data.Dataset.from_tensor_slices((order,))

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
        return _decode_contents(content, choose)


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
        return _decode_contents(tf.io.read_file(content), choose)


@dataclasses.dataclass(frozen=True, eq=False)
class Stream(Split):
    """Images that do not fit into memory: they are read again, in order, in each epoch.

    Example:
        >>> import tensorflow as tf
        >>> image = tf.io.encode_png(tf.zeros((4, 4, 3), tf.uint8))
        >>> dataset = tf.data.Dataset.from_tensors((image, 1, "first")).repeat(3)
        >>> stream = Stream(dataset, count=3)
        >>> len(stream), stream.targets.tolist()
        (3, [1, 1, 1])

    Attributes:
        dataset: gives the bytes, the class (int32) and the name of each image; always in the same
            order.
        count: how many.
        damage: where training writes the names of images that it could not decode.
    """

    dataset: tf.data.Dataset
    _: dataclasses.KW_ONLY
    count: int
    damage: Damage = dataclasses.field(default_factory=Damage)

    def __len__(self) -> int:
        return self.count

    @functools.cached_property
    def targets(self) -> np.ndarray:  # type: ignore[override]  # nobody assigns to it
        """The class of each image, int32 of shape (count,); the first use reads all images."""
        classes = self.dataset.map(lambda contents, target, name: target)
        return np.fromiter(classes.as_numpy_iterator(), np.int32, len(self))

    def items(self) -> tf.data.Dataset:
        return self.dataset

    def shuffled_items(self, *, seed: tf.Tensor) -> tf.data.Dataset:
        """Returns the records in an order that the seed decides, without decoding any.

        Blocks of the stream are shuffled, one after the other; where they begin is drawn too, so
        that the blocks of two seeds hold different images.
        """
        # Not `Dataset.shuffle`: it also depends on TensorFlow's global seed.
        first = tf.random.stateless_uniform(
            (), seed, maxval=min(BUFFER, len(self)), dtype=tf.int64, minval=0
        )
        records = self.dataset
        blocks = records.take(first).batch(BUFFER).concatenate(records.skip(first).batch(BUFFER))

        def shuffle(number: tf.Tensor, block: tuple[tf.Tensor, ...]) -> tf.data.Dataset:
            block_seed = tf.random.experimental.stateless_fold_in(seed, number)
            places = tf.range(tf.size(block[1]))
            order = tf.random.experimental.stateless_shuffle(places, seed=block_seed)
            return tf.data.Dataset.from_tensor_slices(tuple(tf.gather(x, order) for x in block))

        return blocks.enumerate().flat_map(lambda number, block: shuffle(number, block))

    def loader(self) -> Loader:
        return Loader(lambda item, choose: _decode_contents(item[0], choose), lambda item: item[1])

    def name(self, place: bytes) -> str:
        return place.decode(errors="replace")

    def take(self, indices: Iterable[int]) -> Split:
        """Reads the images at these positions into memory, as they are encoded.

        Raises:
            IndexError: there is no such position.
        """
        places = [index + len(self) if index < 0 else index for index in indices]
        outside = [place for place in places if not 0 <= place < len(self)]
        if outside:
            raise IndexError(
                f"The stream has {len(self)} images, counted from 0. Received: {outside[0]}."
            )
        unique_places = tf.constant(sorted(set(places)), tf.int64)
        records = self.dataset.enumerate().filter(
            lambda place, record: tf.reduce_any(tf.equal(place, unique_places))
        )
        records_at = dict(records.take(len(set(places))).as_numpy_iterator())
        selection = [records_at[place] for place in places]
        return EncodedSplit(
            images=_objects(record[0] for record in selection),
            targets=np.array([record[1] for record in selection], np.int32),
            names=_objects(self.name(record[2]) for record in selection),
            damage=self.damage,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what makes the records; Python functions among it cannot be."""
        try:
            graph = tf.raw_ops.DatasetToGraphV2(
                input_dataset=tf.data.experimental.to_variant(self.dataset),
                external_state_policy=2,  # an error
                strip_device_assignment=True,
            )
        except tf.errors.OpError as error:
            raise TypeError(
                "A stream whose dataset calls Python, or keeps state, cannot be pickled; make it "
                f"again in the other process ({error.message})."
            ) from None
        return _stream_of_graph, (graph.numpy(), self.dataset.element_spec, self.count, self.damage)


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


def _stream_of_graph(graph: bytes, spec: Any, count: int, damage: Damage) -> Stream:
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return Stream(tf.data.experimental.from_variant(variant, spec), count=count, damage=damage)


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


def _decode_contents(contents: tf.Tensor, choose: Choice | None) -> tf.Tensor:
    if choose is None:
        return decoding.decode_image(contents)
    return decoding.decode_part(contents, choose=choose)


def _objects(values: Iterable[Any]) -> np.ndarray:
    listed = list(values)
    array = np.empty(len(listed), object)
    array[:] = listed
    return array


def _share(count: int, fraction: float, *, at_least_one_from: int) -> int:
    if not fraction or count < at_least_one_from:
        return 0
    return max(round(count * fraction), 1)
