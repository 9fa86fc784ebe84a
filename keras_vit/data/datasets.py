"""Data sets of others: `tf.data`, TensorFlow Datasets, keras-cv's layers."""

import concurrent.futures
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.data import images, source
from keras_vit.data.images import Damage
from keras_vit.data.source import (
    EncodedSplit,
    Item,
    Loader,
    Part,
    Passes,
    Records,
    RecordSplit,
    Split,
)


def from_keras_cv(
    layers: Sequence[Any],
) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Returns a function of batches that applies layers of keras-cv one after the other.

    It goes into `Dataset.map`, after batching. The layers are made outside of it, once, because
    they own variables. keras-cv cannot be seeded, which a warning says: a run that uses it can
    neither be repeated nor resumed to the same bits.

    Example:
        >>> import keras_cv  # doctest: +SKIP
        >>> vary = from_keras_cv([keras_cv.layers.MixUp()])  # doctest: +SKIP
        >>> batches = batches.map(lambda x, y: vary(x, tf.one_hot(y, 10)))  # doctest: +SKIP

    Args:
        layers: layers that take {"images": pixels 0..255, "labels": probabilities}, float32, such
            as `RandAugment(value_range=(0, 255))`, `MixUp` and `CutMix`.

    Returns:
        Takes and gives images, float32 of shape (batch, height, width, 3), and targets, float32 of
        shape (batch, classes).

    Raises:
        TypeError: something among the layers is no layer.
    """
    layers = tuple(layers)
    for layer in layers:
        if not callable(layer) or isinstance(layer, type):
            raise TypeError(
                "from_keras_cv takes layers that are made already, such as "
                f"keras_cv.layers.MixUp(). Received: {layer!r}."
            )
    warnings.warn(
        "keras-cv cannot be seeded: this run can neither be repeated nor resumed to the same bits.",
        stacklevel=2,
    )

    def vary(images: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if targets.shape.rank != 2:
            raise ValueError(
                "keras-cv mixes probabilities of classes, (batch, classes); make them by "
                f"tf.one_hot. Received: targets of shape {targets.shape}."
            )
        batch = {"images": tf.cast(images, tf.float32), "labels": tf.cast(targets, tf.float32)}
        for layer in layers:
            batch = layer(batch, training=True)
        return (
            tf.ensure_shape(tf.cast(batch["images"], tf.float32), images.shape),
            tf.ensure_shape(tf.cast(batch["labels"], tf.float32), targets.shape),
        )

    return vary


# Encoded images of a stream that are shuffled at a time: 0.9 GB of ImageNet. The next ones are read
# meanwhile, so that twice as many are held.
BUFFER = 8192
# Places that a stream is read at, of one that can be read from any place.
_LANES = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Stream(Split):
    """Images that do not fit into memory: they are read again in each epoch.

    Blocks of the stream are shuffled; where they begin is drawn too, so that the blocks of two
    epochs hold different images. While one is given, the next one is read.

    With `records`, so many places are read at once that a batch has images of all parts of the
    stream; a worker reads the parts that its images come from, and a resumed training what is left
    of the epoch. Without, each worker reads all, and a resumed training what comes before, too.

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
        records: reads the same from any place; None where that cannot be had.
        damage: where training writes the names of images that it could not decode.
    """

    dataset: tf.data.Dataset
    _: dataclasses.KW_ONLY
    count: int
    records: Records | None = None
    damage: Damage = dataclasses.field(default_factory=Damage)

    def __len__(self) -> int:
        return self.count

    @functools.cached_property
    def targets(self) -> np.ndarray:  # type: ignore[override]  # nobody assigns to it
        """The class of each image, int32 of shape (count,); the first use reads all images."""
        classes = self.items().map(lambda contents, target, name: target)
        return np.fromiter(classes.as_numpy_iterator(), np.int32, len(self))

    def items(self) -> tf.data.Dataset:
        return source.untuned(self.dataset)

    def read(self, start: Any, stop: Any) -> tf.data.Dataset:
        """Returns the records at the positions from `start` to `stop`."""
        if self.records is not None:
            return self.records.read(start, stop)
        return self.dataset.skip(start).take(stop - start)

    def lanes(self, batch_size: int) -> int:
        """Returns how many parts of the stream are read at once, each of them shuffled by itself.

        The stream and the batch decide it, not the workers: they see the same batches.
        """
        if self.records is None or len(self) < BUFFER:
            return 1
        lanes = math.gcd(batch_size, _LANES)
        while lanes > max(self.records.places, 1):
            lanes //= 2
        return lanes

    def shuffled_batches(self, passes: Passes) -> tf.data.Dataset:
        lanes = self.lanes(passes.batch_size)
        height = passes.batch_size // lanes  # rows of a batch that come from one lane
        start, stop, _ = passes.rows.indices(passes.batch_size)
        own = range(start // height, -(-stop // height))
        rows = tf.data.Dataset.range(own.start, own.stop).interleave(
            functools.partial(self._lane, lanes=lanes, passes=passes),
            cycle_length=len(own),
            block_length=height,
        )
        part = slice(start - own.start * height, stop - own.start * height)
        batches = rows.batch(len(own) * height, drop_remainder=True)
        return batches.map(lambda *item: tuple(values[part] for values in item))

    def _lane(self, lane: tf.Tensor, *, lanes: int, passes: Passes) -> tf.data.Dataset:
        """The shuffled records of one lane in all epochs."""
        steps, height = passes.steps(len(self)), passes.batch_size // lanes
        first_epoch, first_step = divmod(passes.first_step, steps)
        start, stop = len(self) * lane // lanes, len(self) * (lane + 1) // lanes
        size = tf.constant(max(BUFFER // lanes, 1), tf.int64)

        def blocks(epoch: tf.Tensor) -> tf.data.Dataset:
            # Not `Dataset.shuffle`: it also depends on TensorFlow's global seed.
            seed = tf.random.experimental.stateless_fold_in(passes.key(epoch), lane)
            drawn = tf.random.stateless_uniform((), seed, 1, size + 1, tf.int64)
            first = tf.where(stop - start > size, drawn, stop - start)
            given = tf.where(epoch == first_epoch, tf.cast(first_step * height, tf.int64), 0)
            block = (given - first + size) // size  # of the first row that is wanted
            # The first block of an epoch is short: blanks before it make it as long as the others.
            begin = first + (block - 1) * size
            nothing = tuple(tf.zeros((), spec.dtype) for spec in self.dataset.element_spec)
            blanks = tf.data.Dataset.from_tensors(nothing).repeat(tf.maximum(-begin, 0))
            records = blanks.concatenate(self.read(start + tf.maximum(begin, 0), stop))

            def shuffled(number: tf.Tensor, item: Item) -> tuple[tf.Tensor, Item]:
                at = first + (number - 1) * size
                places = tf.range(tf.maximum(-at, 0), tf.size(item[1], tf.int64))
                block_seed = tf.random.experimental.stateless_fold_in(seed, number)
                order = tf.random.experimental.stateless_shuffle(places, seed=block_seed)
                row = tf.maximum(at, 0)
                skipped = tf.maximum(given - row, 0)
                return order[skipped : tf.maximum(steps * height - row, 0)], item

            return records.batch(size).enumerate(block).map(shuffled)

        def give(order: tf.Tensor, item: Item) -> tf.data.Dataset:
            # One by one: a block that is gathered as a whole would be in memory twice.
            places = tf.data.Dataset.from_tensor_slices(order)
            return places.map(lambda place: tuple(values[place] for values in item))

        epochs = tf.data.Dataset.range(first_epoch, passes.epochs)
        return epochs.flat_map(blocks).prefetch(1).flat_map(give)

    def loader(self) -> Loader:
        return Loader(
            lambda item, choose: source.decode_contents(item[0], choose), lambda item: item[1]
        )

    def name(self, place: Any) -> str:
        if not isinstance(place, bytes):
            return self.take([place]).name(0)
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
        first, last = min(places, default=0), max(places, default=-1)
        records = (
            source.untuned(self.read(first, last + 1))
            .enumerate(first)
            .filter(lambda place, record: tf.reduce_any(tf.equal(place, unique_places)))
        )
        records_at = dict(records.as_numpy_iterator())
        selection = [records_at[place] for place in places]
        return EncodedSplit(
            images=source.objects(record[0] for record in selection),
            targets=np.array([record[1] for record in selection], np.int32),
            names=source.objects(self.name(record[2]) for record in selection),
            damage=self.damage,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what makes the records; Python functions among it cannot be."""
        if self.records is not None:
            return stream_of, (self.records, self.count, self.damage)
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


def stream_of(records: Records, count: int, damage: Damage) -> Stream:
    """Returns the stream of so many records."""
    return Stream(records.read(0, count), count=count, records=records, damage=damage)


def _stream_of_graph(graph: bytes, spec: Any, count: int, damage: Damage) -> Stream:
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return Stream(tf.data.experimental.from_variant(variant, spec), count=count, damage=damage)


# Bytes of a split that are held in memory; a larger split is read again in each epoch.
MEMORY = 2**30

# Fractions of a training split that has no others beside it. Of a stream, no more than the
# original takes of ImageNet (vit_jax/configs/common.py).
VALIDATION, TEST = 0.1, 0.1
_STREAM_PART = 100


def from_dataset(
    train: Any,
    validation: Any,
    *,
    labels: Sequence[str],
    test: Any = None,
    name: str = "dataset",
    strict: bool = False,
    memory: int = MEMORY,
) -> source.ImageData:
    """Takes labelled images from datasets.

    What is missing is carved out of the training images: of each class a tenth, of a stream every
    hundredth image.

    Example:
        >>> import tensorflow as tf
        >>> pixels = tf.zeros((20, 8, 8, 3), tf.uint8)
        >>> dataset = tf.data.Dataset.from_tensor_slices((pixels, [0, 1] * 10))
        >>> from_dataset(dataset, None, labels=["cat", "dog"]).counts
        {'train': 16, 'validation': 2, 'test': 2}

    Args:
        train: a tf.data.Dataset of pairs of an image and its class, and maybe its name. An image is
            the bytes of a file, or pixels 0..255, uint8 of shape (height, width, 3 or 1). The order
            must be the same each time, or training is not a function of its seed. Or anything with
            `len` that gives such pairs, of bytes, by number, as the records of array_record: it is
            shuffled as a whole, each worker reads its own images, and a resumed training no others.
            Or a `Stream`.
        validation: such a dataset, or None.
        labels: the name of each class.
        test: such a dataset, or None.
        name: what to call the source.
        strict: whether a damaged image is an error, instead of being left out and counted. Those of
            a stream are looked at in training only.
        memory: bytes of a split that may be held in memory; a larger one is a stream.

    Raises:
        ValueError: the elements are something else, a dataset has no end or no images, or a class
            is not among the labels.
    """
    damage = Damage(strict=strict)
    datasets = {"train": train, "validation": validation, "test": test}
    available = {
        split: _take(dataset, split=split, damage=damage, memory=memory)
        for split, dataset in datasets.items()
        if dataset is not None
    }
    splits = _carve(available)
    for split, images_of_split in splits.items():
        _check(images_of_split, split=split, labels=labels)
    return source.ImageData(
        source=name,
        labels=tuple(labels),
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        left_out=tuple(source.LeftOut(name, source.DAMAGED) for name in damage.names),
    )


def _take(given: Any, *, split: str, damage: Damage, memory: int) -> Split:
    """Holds a dataset in memory, or reads it in each epoch."""
    if isinstance(given, Stream):
        return dataclasses.replace(given, damage=Damage(strict=damage.strict))
    unheld = None
    if not isinstance(given, tf.data.Dataset):
        unheld = _record_split(given, split=split, strict=damage.strict)
    dataset = source.untuned(given) if unheld is None else unheld.items()
    _check_elements(dataset, split=split)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(f"The {split} dataset has no end; give it without `repeat`.")
    shape = dataset.element_spec[0].shape
    pixels = shape.rank == 3 and shape.is_fully_defined()
    records, size = [], 0
    for record in (dataset if pixels else _encode(dataset, split=split)).as_numpy_iterator():
        records.append(record)
        size += record[0].nbytes if pixels else len(record[0])
        if size > memory:
            return unheld if unheld is not None else _stream(dataset, split=split, damage=damage)
    if not records:
        raise ValueError(f"The {split} dataset holds no images; give it some.")
    contents, targets = [record[0] for record in records], [record[1] for record in records]
    names = [_name(record, place, split=split) for place, record in enumerate(records)]
    array: np.ndarray = np.stack(contents) if pixels else np.array(contents, object)
    in_memory = Split(
        images=np.broadcast_to(array, (*array.shape[:3], 3)) if pixels else array,
        targets=np.array(targets, np.int32),
        names=np.array(names, object),
        damage=Damage(strict=damage.strict),
    )
    return in_memory if pixels else _drop_damaged(in_memory, damage=damage)


def _record_split(given: Any, *, split: str, strict: bool) -> RecordSplit:
    if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        raise ValueError(
            f"The {split} dataset must be a tf.data.Dataset, or have `len` and give pairs of an "
            f"image and its class by number. Received: {type(given).__name__}."
        )
    return RecordSplit(given, prefix=f"{split} image ", damage=Damage(strict=strict))


def _check_elements(dataset: tf.data.Dataset, *, split: str) -> None:
    spec = dataset.element_spec
    if isinstance(spec, tuple) and len(spec) in (2, 3):
        image, target = spec[:2]
        encoded = image.dtype == tf.string and image.shape.rank == 0
        pixels = image.dtype == tf.uint8 and image.shape.rank == 3 and image.shape[2] in (1, 3)
        if (encoded or pixels) and target.dtype.is_integer and target.shape.rank == 0:
            return
    raise ValueError(
        f"The {split} dataset must give pairs of an image (the bytes of a file, or uint8 of shape "
        "(height, width, 3 or 1)) and its class (an integer), unbatched; map it to such pairs. "
        f"Received: {spec}."
    )


def _encode(dataset: tf.data.Dataset, *, split: str) -> tf.data.Dataset:
    """The bytes, the class and the name of each image; pixels become a PNG, which loses nothing."""

    def encode(place: tf.Tensor, record: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
        contents = record[0]
        if contents.dtype != tf.string:
            contents = tf.io.encode_png(contents)
        name = (
            record[2]
            if len(record) == 3
            else tf.strings.join([f"{split} image ", tf.as_string(place)])
        )
        return contents, tf.cast(record[1], tf.int32), name

    return dataset.enumerate().map(encode)


def _name(record: tuple[bytes, ...], place: int, *, split: str) -> str:
    return record[2].decode(errors="replace") if len(record) == 3 else f"{split} image {place}"


def _stream(dataset: tf.data.Dataset, *, split: str, damage: Damage) -> Stream:
    count = int(dataset.cardinality())
    if count < 0:
        count = int(dataset.reduce(np.int64(0), lambda count, _: count + 1))
    return Stream(_encode(dataset, split=split), count=count, damage=Damage(strict=damage.strict))


def _drop_damaged(split: Split, *, damage: Damage) -> Split:
    with concurrent.futures.ThreadPoolExecutor(environment.cores()) as threads:
        sound = list(threads.map(images.is_sound, split.images))
    damaged = [split.name(place) for place, is_sound in enumerate(sound) if not is_sound]
    if damaged and damage.strict:
        raise ValueError(
            f"{len(damaged)} of {len(split)} images cannot be decoded, the first is "
            f"{damaged[0]!r}; repair or remove them, or do not ask for strictness."
        )
    for name in damaged:
        damage.add(name)
    return split.take(np.flatnonzero(sound))


def _carve(splits: dict[str, Split]) -> dict[str, Split]:
    """Takes the splits that are missing out of the training images."""
    train = splits["train"]
    if isinstance(train, Stream):
        missing = [name for name in ("validation", "test") if name not in splits]
        streams = {name: _every(train, [place]) for place, name in enumerate(missing)}
        training = _every(train, range(len(missing), _STREAM_PART))
        return {**splits, **streams, "train": training}
    if isinstance(train, RecordSplit):
        missing = [name for name in ("validation", "test") if name not in splits]
        hundredths = np.arange(len(train)) % _STREAM_PART
        carved = {
            name: train.take(np.flatnonzero(hundredths == place))
            for place, name in enumerate(missing)
        }
        rest = train.take(np.flatnonzero(hundredths >= len(missing)))
        return {**splits, **carved, "train": rest}
    names = [train.name(place) for place in range(len(train))]
    indices = source.assign_splits(
        names,
        train.targets,
        validation=0 if "validation" in splits else VALIDATION,
        test=0 if "test" in splits else TEST,
    )
    parts = {name: train.take(indices[name]) for name in source.SPLITS if name not in splits}
    return {**splits, **parts, "train": train.take(indices["train"])}


def _every(stream: Stream, places: Sequence[int]) -> Stream:
    """The images at some of each hundred places."""
    first, last = places[0], places[-1]
    if stream.records is not None:
        hundredths = np.arange(len(stream)) % _STREAM_PART
        chosen = (first <= hundredths) & (hundredths <= last)
        are_left_out = len(places) > _STREAM_PART // 2
        positions = np.sort(stream.records.order()[chosen != are_left_out])
        part = Part(stream.records, positions, are_left_out)
        return stream_of(part, int(chosen.sum()), stream.damage)

    def is_among(place: tf.Tensor, record: tuple[tf.Tensor, ...]) -> tf.Tensor:
        return (place % _STREAM_PART >= first) & (place % _STREAM_PART <= last)

    records = stream.dataset.enumerate().filter(is_among).map(lambda place, record: record)
    full, over = divmod(len(stream), _STREAM_PART)
    count = full * len(places) + sum(place < over for place in places)
    return Stream(records, count=count, damage=stream.damage)


def _check(images_of_split: Split, *, split: str, labels: Sequence[str]) -> None:
    if isinstance(images_of_split, Stream | RecordSplit) or not len(images_of_split):
        return  # a stream's classes would have to be read
    low, high = images_of_split.targets.min(), images_of_split.targets.max()
    if low < 0 or high >= len(labels):
        raise ValueError(
            f"The classes of the {split} images must lie between 0 and {len(labels) - 1}, as there "
            f"are {len(labels)} labels; give all labels. Received: {low} to {high}."
        )
