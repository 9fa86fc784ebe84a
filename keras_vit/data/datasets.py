"""Data sets of others: `tf.data`, TensorFlow Datasets, keras-cv's layers."""

import concurrent.futures
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.data import images, source
from keras_vit.data.images import Damage
from keras_vit.data.source import Split, Stream


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


PREFIX = "tfds:"


def load_tfds(
    name: Any, *, data_dir: str | os.PathLike[str] | None = None, strict: bool = False
) -> source.ImageData:
    """Loads a dataset of TensorFlow Datasets, which is downloaded if it is not there.

    The splits train, validation and test are the dataset's own. Where validation or test is
    missing, or has no classes, it is carved out of the training images, see
    `keras_vit.data.from_dataset`.

    Example:
        >>> load_tfds("no_such_dataset", data_dir="/nowhere")  # doctest: +SKIP
        Traceback (most recent call last):
        ValueError: TensorFlow Datasets has no dataset 'no_such_dataset'; ...

    Args:
        name: as in https://www.tensorflow.org/datasets/catalog, such as "oxford_flowers102"; or a
            builder of that package, whose data is there.
        data_dir: where the package keeps its data; None for its own choice.
        strict: whether a damaged image is an error, instead of being left out and counted.

    Raises:
        ImportError: tensorflow-datasets is not installed.
        ValueError: there is no such dataset, or it does not hold labelled images.
    """
    # TensorFlow Datasets imports importlib-resources, and declares it for Python 3.8 alone.
    with environment.installed(
        f"{PREFIX}NAME needs TensorFlow Datasets", "tensorflow-datasets", "importlib-resources"
    ):
        import tensorflow_datasets as tfds
    builder = name
    if isinstance(name, str):
        try:
            builder = tfds.builder(name, data_dir=data_dir)
        except tfds.core.DatasetNotFoundError:
            raise ValueError(
                f"TensorFlow Datasets has no dataset {name!r}; choose one of "
                "https://www.tensorflow.org/datasets/catalog."
            ) from None
        builder.download_and_prepare()
    image, label = _keys(builder)
    config = tfds.ReadConfig(add_tfds_id=True, try_autocache=False)
    datasets = {
        split: _records(builder, split, image=image, label=label, config=config)
        for split in source.SPLITS
        if split in builder.info.splits
    }
    datasets = {split: records for split, records in datasets.items() if _is_labelled(records)}
    if "train" not in datasets:
        raise ValueError(
            f"The dataset {builder.name!r} has no labelled split called train; it has "
            f"{', '.join(builder.info.splits) or 'none'}."
        )
    return from_dataset(
        datasets["train"],
        datasets.get("validation"),
        test=datasets.get("test"),
        labels=builder.info.features[label].names,
        name=f"{PREFIX}{name}" if isinstance(name, str) else PREFIX + builder.name,
        strict=strict,
    )


# Bytes of a split that are held in memory; a larger split is read again in each epoch.
MEMORY = 2**30

# Fractions of a training split that has no others beside it. Of a stream, no more than the
# original takes of ImageNet (vit_jax/configs/common.py).
VALIDATION, TEST = 0.1, 0.1
_STREAM_PART = 100


def from_dataset(
    train: tf.data.Dataset,
    validation: tf.data.Dataset | None,
    *,
    labels: Sequence[str],
    test: tf.data.Dataset | None = None,
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
        train: pairs of an image and its class, and maybe its name. An image is the bytes of a file,
            or pixels 0..255, uint8 of shape (height, width, 3 or 1). The order must be the same
            each time, or training is not a function of its seed.
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


def _keys(builder: Any) -> tuple[str, str]:
    """The names of a dataset's image and class."""
    features, keys = builder.info.features, builder.info.supervised_keys
    kinds = [type(features[key]).__name__ for key in keys or () if key in features]
    if kinds != ["Image", "ClassLabel"]:
        raise ValueError(
            f"The dataset {builder.name!r} must give an image and one class; it gives "
            f"{', '.join(kinds) or 'no such pair'}. Choose an image classification dataset."
        )
    return keys[0], keys[1]


def _records(builder: Any, split: str, *, image: str, label: str, config: Any) -> tf.data.Dataset:
    """The bytes, the class and the name of each image, in the order of the files."""
    from tensorflow_datasets import decode

    examples = builder.as_dataset(
        split=split,
        decoders={image: decode.SkipDecoding()},
        read_config=config,
        shuffle_files=False,
    )
    names = [key for key in ("tfds_id", "image/filename") if key in examples.element_spec]
    keys = (image, label, *names[:1])
    return examples.map(lambda example: tuple(example[key] for key in keys))


def _is_labelled(records: tf.data.Dataset) -> bool:
    # The test images of ImageNet are all of class -1.
    return all(record[1] >= 0 for record in records.take(1).as_numpy_iterator())


def _take(dataset: tf.data.Dataset, *, split: str, damage: Damage, memory: int) -> Split:
    """Holds a dataset in memory, or makes a stream of it."""
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
            return _stream(dataset, split=split, damage=damage)
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
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
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
        hundredths = {name: _every(train, [place]) for place, name in enumerate(missing)}
        training = _every(train, range(len(missing), _STREAM_PART))
        return {**splits, **hundredths, "train": training}
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

    def is_among(place: tf.Tensor, record: tuple[tf.Tensor, ...]) -> tf.Tensor:
        return (place % _STREAM_PART >= first) & (place % _STREAM_PART <= last)

    records = stream.dataset.enumerate().filter(is_among).map(lambda place, record: record)
    full, over = divmod(len(stream), _STREAM_PART)
    count = full * len(places) + sum(place < over for place in places)
    return Stream(records, count=count, damage=stream.damage)


def _check(images_of_split: Split, *, split: str, labels: Sequence[str]) -> None:
    if isinstance(images_of_split, Stream) or not len(images_of_split):
        return  # a stream's classes would have to be read
    low, high = images_of_split.targets.min(), images_of_split.targets.max()
    if low < 0 or high >= len(labels):
        raise ValueError(
            f"The classes of the {split} images must lie between 0 and {len(labels) - 1}, as there "
            f"are {len(labels)} labels; give all labels. Received: {low} to {high}."
        )
