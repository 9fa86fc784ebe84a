"""Finds data by its name, takes that of TensorFlow Datasets and `tf.data`; keras-cv's layers."""

import concurrent.futures
import contextlib
import dataclasses
import os
import shlex
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.data import folder, images, source
from keras_vit.data.source import Damage, ImageData, RecordSplit, Split

TFDS = "tfds:"  # begins the name of a dataset of TensorFlow Datasets
# Bytes of a split that are held in memory; a larger one is read by number, again in each epoch.
MEMORY = 2**30
_INK = 16  # the digits count ink in 0..16
_DIGITS_FOR_TESTING = 0.2  # an error is then 0.3 per cent, not 0.6
# Of records every hundredth is for validation, or testing: no more than the original takes of
# ImageNet (vit_jax/configs/common.py).
_HUNDRED = 100


def load_data(
    spec: str | os.PathLike[str],
    *,
    labelled: bool = True,
    strict: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ImageData:
    """Loads images in three splits.

    Example:
        >>> load_data("digits").counts
        {'train': 1259, 'validation': 179, 'test': 359}

    Args:
        spec: "digits"; "tfds:NAME", such as "tfds:oxford_flowers102"; or the path of a folder. A
            folder called digits is "./digits".
        labelled: whether a folder must have class folders; if not, see `load_unlabelled_folder`.
        strict: whether a damaged image is an error, instead of being left out and counted.
        on_progress: called with (files checked, files in all), for each split of a folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ImportError: what "digits" or "tfds:NAME" needs is not installed.
        ValueError: there is no such dataset, or the images do not do, see `load_folder`.
    """
    if spec == "digits":
        return load_digits()
    text = os.fspath(spec)
    if text.startswith(TFDS):
        return load_tfds(text.removeprefix(TFDS), strict=strict)
    load = folder.load_folder if labelled else folder.load_unlabelled_folder
    return load(spec, strict=strict, on_progress=on_progress)


def load_digits() -> ImageData:
    """Loads the digits, white on black, 8 by 8 pixels, in three fixed splits.

    The images are the test set of the "Optical Recognition of Handwritten Digits" (E. Alpaydin and
    C. Kaynak, UCI Machine Learning Repository, 1998), as scikit-learn distributes them.

    Example:
        >>> data = load_digits()
        >>> data.counts
        {'train': 1259, 'validation': 179, 'test': 359}
        >>> data.train.images.shape
        (1259, 8, 8, 3)

    Raises:
        ImportError: scikit-learn is not installed.
    """
    with environment.installed("The digits come with scikit-learn", "scikit-learn"):
        import sklearn.datasets
    digits = sklearn.datasets.load_digits()
    grey = np.round(digits.images * 255 / _INK).astype(np.uint8)
    everything = Split(
        images=np.repeat(grey[..., None], 3, axis=-1), targets=digits.target.astype(np.int32)
    )
    names = [str(index) for index in range(len(everything))]
    splits = source.carve({"train": everything}, names, test=_DIGITS_FOR_TESTING)
    labels = tuple(map(str, digits.target_names))
    return ImageData(source="digits", labels=labels, skipped=(), **splits)


def load_tfds(
    name: Any, *, data_dir: str | os.PathLike[str] | None = None, strict: bool = False
) -> ImageData:
    """Loads a dataset of TensorFlow Datasets, which is downloaded if it is not there.

    The splits train, validation and test are the dataset's own. Where validation or test is
    missing, or has no classes, it is carved out of the training images, see
    `keras_vit.data.from_dataset`.

    Example:
        >>> load_tfds("no_such_dataset", data_dir="/nowhere")  # doctest: +SKIP
        Traceback (most recent call last):
        ValueError: TensorFlow Datasets has no dataset 'no_such_dataset', or not in that ...

    Args:
        name: as in https://www.tensorflow.org/datasets/catalog, such as "oxford_flowers102"; or a
            builder of that package, whose data is there.
        data_dir: where the package keeps its data; None for its own choice.
        strict: whether a damaged image is an error, instead of being left out and counted.

    Raises:
        ImportError: tensorflow-datasets is not installed.
        OSError: it is not there, and cannot be downloaded.
        ValueError: there is no such dataset, it is damaged or does not hold labelled images, or a
            split of it is more than 1 GiB of TFRecord files.
    """
    # TensorFlow Datasets imports importlib-resources, and declares it for Python 3.8 alone.
    with environment.installed(
        f"{TFDS}NAME needs TensorFlow Datasets", "tensorflow-datasets", "importlib-resources"
    ):
        import tensorflow_datasets as tfds
    builder = name
    if isinstance(name, str):
        try:
            builder = tfds.builder(name, data_dir=data_dir)
        except (ValueError, AssertionError):
            raise ValueError(
                f"TensorFlow Datasets has no dataset {name!r}, or not in that configuration or "
                "version; take a NAME, NAME/CONFIG or NAME:VERSION of "
                "https://www.tensorflow.org/datasets/catalog."
            ) from None
    image, label = _keys(builder)
    if isinstance(name, str):
        try:
            builder.download_and_prepare(file_format="array_record")  # if it is not there
        except (OSError, AssertionError) as error:  # the second: files that one has to fetch
            reason = getattr(error, "strerror", error) or "the server cannot be reached"
            text = f"The dataset {name!r} is not in {str(builder.data_dir)!r}, and cannot be made"
            raise OSError(f"{text}: {reason}") from None
        if builder.is_prepared():  # the folder also says what format it was converted to
            builder = tfds.builder_from_directory(builder.data_dir)
    given = {
        split: _given(builder, name, image=image, label=label)
        for split, names in source.SPLIT_NAMES.items()
        for name in [name for name in names if name in builder.info.splits][:1]
    }
    try:
        labelled = {split: each for split, each in given.items() if _is_labelled(each)}
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"The dataset {builder.name!r} is damaged; remove {str(builder.data_dir)!r}, so that "
            f"it is made again. {error}"
        ) from None
    if "train" not in labelled:
        raise ValueError(
            f"The dataset {builder.name!r} has no labelled split called train; it has "
            f"{', '.join(builder.info.splits) or 'none'}."
        )
    return from_dataset(
        labelled["train"],
        labelled.get("validation"),
        test=labelled.get("test"),
        labels=builder.info.features[label].names,
        name=TFDS + (name if isinstance(name, str) else builder.name),
        strict=strict,
        memory=MEMORY,
    )


def from_dataset(
    train: Any,
    validation: Any,
    *,
    labels: Sequence[str],
    test: Any = None,
    name: str = "dataset",
    strict: bool = False,
    memory: int = MEMORY,
) -> ImageData:
    """Takes labelled images from datasets.

    What is missing is carved out of the training images: of each class a tenth, of records that are
    not held in memory every hundredth image.

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
        validation: such a dataset, or None.
        labels: the name of each class.
        test: such a dataset, or None.
        name: what to call the source.
        strict: whether a damaged image is an error, instead of being left out and counted. Those of
            records that are not held are looked at in training only.
        memory: bytes of a split that may be held in memory; of a larger one, records are read by
            number when they are needed. Records that have `nbytes` are not read to know their size.

    Raises:
        ValueError: the elements are something else, a dataset has no end or no images, a
            tf.data.Dataset is larger than `memory`, or a class is not among the labels.
    """
    damage = Damage(strict=strict)
    datasets = {"train": train, "validation": validation, "test": test}
    available = {
        split: _take(dataset, split=split, damage=damage, memory=memory)
        for split, dataset in datasets.items()
        if dataset is not None
    }
    held = available["train"]
    if isinstance(held, RecordSplit):
        missing = [split for split in source.SPLITS if split not in available]
        parts = np.arange(len(held)) % _HUNDRED
        carved = {split: held.take(np.flatnonzero(parts == n)) for n, split in enumerate(missing)}
        rest = held.take(np.flatnonzero(parts >= len(missing)))
        splits = {**available, **carved, "train": rest}
    else:
        splits = source.carve(available, [held.name(place) for place in range(len(held))])
    for split, part in splits.items():
        if isinstance(part, RecordSplit) or not len(part):
            continue  # the classes of records would have to be read
        low, high = part.targets.min(), part.targets.max()
        if low < 0 or high >= len(labels):
            raise ValueError(
                f"The classes of the {split} images must lie between 0 and {len(labels) - 1}, as "
                f"there are {len(labels)} labels; give all labels. Received: {low} to {high}."
            )
    skipped = tuple(source.SkippedFile(each, source.DAMAGED) for each in damage.names)
    labels = tuple(map(source.composed, labels))
    return ImageData(source=name, labels=labels, skipped=skipped, **splits)


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


def _keys(builder: Any) -> tuple[str, str]:
    features, keys = builder.info.features, builder.info.supervised_keys
    kinds = [type(features[key]).__name__ for key in keys or () if key in features]
    if kinds != ["Image", "ClassLabel"]:
        raise ValueError(
            f"The dataset {builder.name!r} must give an image and one class; it gives "
            f"{', '.join(kinds) or 'no such pair'}. Choose an image classification dataset."
        )
    return keys[0], keys[1]


def _given(builder: Any, split: str, *, image: str, label: str) -> Any:
    from tensorflow_datasets import ReadConfig, decode

    decoders, size = {image: decode.SkipDecoding()}, builder.info.splits[split].num_bytes
    with contextlib.suppress(NotImplementedError):  # of TFRecord files, which are read in order
        return _Records(builder.as_data_source(split, decoders=decoders), image, label, size)
    if size > MEMORY:
        raise ValueError(
            f"The {split} split of the dataset {builder.name!r} is {size / 2**30:.1f} GiB of "
            "TFRecord files, of which no image can be read by its number; convert them once: pip "
            "install apache-beam mlcroissant && tfds convert_format --dataset_version_dir="
            f"{shlex.quote(builder.data_dir)} --out_file_format=array_record"
        )
    config = ReadConfig(add_tfds_id=True, try_autocache=False)
    examples = builder.as_dataset(split=split, decoders=decoders, read_config=config)
    return examples.map(lambda each: (each[image], each[label], each["tfds_id"]))


def _is_labelled(given: Any) -> bool:
    """Whether the first image has a class: the test images of ImageNet are all of class -1."""
    if isinstance(given, tf.data.Dataset):
        given = list(source.untuned(given).take(1).as_numpy_iterator())
    return not len(given) or bool(given[0][1] >= 0)


@dataclasses.dataclass(frozen=True)
class _Records(Sequence[tuple[bytes, int]]):
    examples: Any
    image: str
    label: str
    nbytes: int

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: Any) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[bytes, int]]:
        examples = self.examples.__getitems__(numbers)
        return [(each[self.image], each[self.label]) for each in examples]


def _take(given: Any, *, split: str, damage: Damage, memory: int) -> Split:
    records = None
    if not isinstance(given, tf.data.Dataset):
        if not _gives_pairs(given):
            raise ValueError(
                f"The {split} dataset must be a tf.data.Dataset, or have `len` and give pairs of "
                "the bytes of an image file and its class by number. Received: "
                f"{type(given).__name__}."
            )
        own_damage = Damage(strict=damage.strict)
        records = RecordSplit(given, prefix=f"{split} image ", damage=own_damage)
        if getattr(given, "nbytes", 0) > memory:
            return records
    dataset = source.untuned(given) if records is None else records.items()
    _check_elements(dataset, split=split)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(f"The {split} dataset has no end; give it without `repeat`.")
    image = dataset.element_spec[0]
    pixels = image.shape.rank == 3 and image.shape.is_fully_defined()
    if image.dtype != tf.string and not pixels:  # of many sizes: as PNGs, which lose nothing
        dataset = dataset.map(lambda contents, *others: (tf.io.encode_png(contents), *others))
    rows, size = [], 0
    for row in dataset.as_numpy_iterator():
        rows.append(row)
        size += row[0].nbytes if pixels else len(row[0])
        if size > memory and records is not None:
            return records
        if size > memory:
            raise ValueError(
                f"The {split} dataset holds more than the {memory} bytes that may be in memory, "
                "and gives its images in order alone; raise `memory`, or give anything with `len` "
                "that gives pairs of a file's bytes and its class by number."
            )
    if not rows:
        raise ValueError(f"The {split} dataset holds no images; give it some.")
    contents = [row[0] for row in rows]
    array: np.ndarray = np.stack(contents) if pixels else np.array(contents, object)
    names = [
        row[2].decode(errors="replace") if len(row) == 3 else f"{split} image {place}"
        for place, row in enumerate(rows)
    ]
    in_memory = Split(
        images=np.broadcast_to(array, (*array.shape[:3], 3)) if pixels else array,
        targets=np.array([row[1] for row in rows], np.int32),
        names=np.array(names, object),
        damage=Damage(strict=damage.strict),
    )
    return in_memory if pixels else _drop_damaged(in_memory, damage=damage)


def _gives_pairs(given: Any) -> bool:
    """Whether records give what `RecordSplit` takes; of none that is not known."""
    try:
        contents, target = given[0][:2] if len(given) else (b"", 0)
        return isinstance(contents, bytes) and np.issubdtype(np.asarray(target).dtype, np.integer)
    except (TypeError, KeyError, ValueError):
        return False


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


def _drop_damaged(split: Split, *, damage: Damage) -> Split:
    with concurrent.futures.ThreadPoolExecutor(environment.cores()) as threads:
        sound = list(threads.map(images.is_decodable, split.images))
    damaged = [split.name(place) for place, is_decodable in enumerate(sound) if not is_decodable]
    if damaged and damage.strict:
        raise ValueError(
            f"{len(damaged)} of {len(split)} images cannot be decoded, the first is "
            f"{damaged[0]!r}; repair or remove them, or do not ask for strictness."
        )
    for name in damaged:
        damage.add(name)
    return split.take(np.flatnonzero(sound))
