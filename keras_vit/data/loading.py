"""Finds data by its name: the digits, a data set, a folder, or the splits that a run recorded."""

import csv
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.data import datasets, folder, source
from keras_vit.data.images import Damage
from keras_vit.data.source import FileSplit, PixelSplit

# Fractions of the images. Testing has the larger one: an error is then 0.3 per cent, not 0.6.
VALIDATION, TEST = 0.1, 0.2
INK = 16  # the images count ink in 0..16


def load_digits() -> source.ImageData:
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
    grey = np.round(digits.images * 255 / INK).astype(np.uint8)
    everything = PixelSplit(
        images=np.repeat(grey[..., None], 3, axis=-1), targets=digits.target.astype(np.int32)
    )
    names = [str(index) for index in range(len(everything))]
    splits = source.assign_splits(names, everything.targets, validation=VALIDATION, test=TEST)
    return source.ImageData(
        source="digits",
        labels=tuple(map(str, digits.target_names)),
        train=everything.take(splits["train"]),
        validation=everything.take(splits["validation"]),
        test=everything.take(splits["test"]),
    )


_COLUMNS = ("split", "label", "path")


def write_splits(data: source.ImageData, file: Path) -> None:
    """Writes a CSV file with the columns split, label and path.

    Args:
        data: images of a folder.
        file: where to write; the paths in it are relative to `data.source`.
    """
    with file.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(_COLUMNS)
        for name in source.SPLITS:
            split = data.split(name)
            for image, target in zip(split.images, split.targets, strict=True):
                path = Path(image).relative_to(data.source).as_posix()
                writer.writerow([name, data.labels[target] if data.labels else "", path])


def read_splits(
    file: Path, *, root: str | os.PathLike[str], labels: Sequence[str]
) -> source.ImageData:
    """Returns the images that `write_splits` wrote down.

    Args:
        file: the CSV file.
        root: the folder that its paths are relative to.
        labels: the classes, in the order of the model's outputs.

    Raises:
        FileNotFoundError: an image is no longer there.
        ValueError: the file is damaged, or names a class or a split that there is not, or an image
            outside of the folder.
    """
    rows = _rows(file)
    allowed = set(labels or ("",))
    for number, row in enumerate(rows, start=2):
        path = row["path"]
        is_inside = path and not Path(path).is_absolute() and ".." not in Path(path).parts
        if row["split"] not in source.SPLITS or row["label"] not in allowed or not is_inside:
            raise ValueError(
                f"Line {number} of {str(file)!r} is not of this run: split {row['split'][:40]!r}, "
                f"label {row['label'][:40]!r}, path {path[:80]!r}; put back the one that training "
                "wrote, or name a folder to evaluate on."
            )
    missing = [row["path"] for row in rows if not _is_file(Path(root, row["path"]))]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of the {len(rows)} images of {str(file)!r} are no longer in "
            f"{repr(str(root))[:200]}, the first is {missing[0][:200]!r}; put them back, or name a "
            "folder to evaluate on."
        )
    places = {label: place for place, label in enumerate(labels or ("",))}  # "" without labels
    splits = {}
    for name in source.SPLITS:
        part = [row for row in rows if row["split"] == name]
        splits[name] = FileSplit(
            images=np.array([str(Path(root, row["path"])) for row in part], object),
            targets=np.array([places[row["label"]] for row in part], np.int32),
        )
    return source.ImageData(
        source=str(root),
        labels=tuple(labels),
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
    )


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
    given = {
        split: _given(builder, split, image=image, label=label)
        for split in source.SPLITS
        if split in builder.info.splits and _is_labelled(builder, split, image=image, label=label)
    }
    if "train" not in given:
        raise ValueError(
            f"The dataset {builder.name!r} has no labelled split called train; it has "
            f"{', '.join(builder.info.splits) or 'none'}."
        )
    return datasets.from_dataset(
        given["train"],
        given.get("validation"),
        test=given.get("test"),
        labels=builder.info.features[label].names,
        name=f"{PREFIX}{name}" if isinstance(name, str) else PREFIX + builder.name,
        strict=strict,
        memory=datasets.MEMORY,
    )


def load_data(
    spec: str | os.PathLike[str],
    *,
    labelled: bool = True,
    strict: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> source.ImageData:
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
    if text.startswith(PREFIX):
        return load_tfds(text.removeprefix(PREFIX), strict=strict)
    load = folder.load_folder if labelled else folder.load_unlabelled_folder
    return load(spec, strict=strict, on_progress=on_progress)


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


def _given(builder: Any, split: str, *, image: str, label: str) -> Any:
    """What `from_dataset` makes a split of."""
    info, kind = builder.info.splits[split], _format(builder)
    if kind == "array_record":
        return _Source(builder, split, image, label)
    files = info.file_instructions if info.num_bytes > datasets.MEMORY else ()
    folders = {os.path.dirname(file.filename) for file in files}  # noqa: PTH120 - maybe gs://
    if kind != "tfrecord" or len(folders) != 1:
        return _records(builder, split, image=image, label=label)
    records = RecordFiles(
        paths=tuple(os.fspath(file.filename) for file in files),
        counts=np.array([file.take for file in files], np.int64),
        features=builder.info.features,
        image=image,
        label=label,
        in_order=builder.info.disable_shuffling,
    )
    return datasets.stream_of(records, info.num_examples, Damage())


def _format(builder: Any) -> str:
    kind = builder.info.file_format
    return "tfrecord" if kind is None else kind.value


@dataclasses.dataclass(frozen=True)
class _Source:
    """The bytes, the class and the name of each image of a split in array_record files."""

    builder: Any
    split: str
    image: str
    label: str

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, number: int) -> tuple[bytes, int, str]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[bytes, int, str]]:
        return [
            (example[self.image], example[self.label], f"{self.split} image {number}")
            for number, example in zip(numbers, self._examples.__getitems__(numbers), strict=True)
        ]

    @functools.cached_property
    def _examples(self) -> Any:
        from tensorflow_datasets import decode

        return self.builder.as_data_source(self.split, decoders={self.image: decode.SkipDecoding()})


# How TensorFlow Datasets reads its files in turn; what is carved out of a stream depends on it.
_CYCLE, _BLOCK = 16, 16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordFiles:
    """The TFRecord files of a split of TensorFlow Datasets, one after the other.

    Attributes:
        paths: the files.
        counts: records of each.
        features: what the package makes of a record.
        image: the name of the image among them.
        label: the name of its class.
        in_order: whether the package, too, reads the files one after the other.
    """

    paths: tuple[str, ...]
    counts: np.ndarray
    features: Any
    image: str
    label: str
    in_order: bool

    @property
    def places(self) -> int:
        """Half of the files: what comes before a place in its file is read, too, and passed by."""
        return len(self.paths) // 2

    def read(self, start: Any, stop: Any) -> tf.data.Dataset:
        """Returns the images at these positions; files that hold none of them are not opened."""
        start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
        ends, paths = tf.constant(np.cumsum(self.counts)), tf.constant(self.paths)
        begins = ends - self.counts
        first = tf.searchsorted(ends, start[None], "right", tf.int64)[0]
        last = tf.searchsorted(begins, stop[None], "left", tf.int64)[0]

        def read_file(number: tf.Tensor) -> tf.data.Dataset:
            begin = tf.maximum(start - begins[number], 0)
            end = tf.minimum(stop, ends[number]) - begins[number]
            examples = tf.data.TFRecordDataset(paths[number]).skip(begin).take(end - begin)
            examples = examples.apply(tf.data.experimental.assert_cardinality(end - begin))
            name = tf.strings.split(paths[number], "/")[-1]
            places = tf.data.Dataset.range(begin, end).map(
                lambda place: tf.strings.join([name, tf.as_string(place)], "__")
            )
            return tf.data.Dataset.zip(examples, places)

        files = tf.data.Dataset.range(first, last)
        return files.flat_map(read_file).map(self._parse)

    def order(self) -> np.ndarray:
        """Returns the positions in the order in which the package reads the files, in turn."""
        if self.in_order:
            return np.arange(self.counts.sum())
        ends = np.cumsum(self.counts)
        files = iter(zip(ends - self.counts, ends, strict=True))
        turns: list[tuple[int, int] | None] = [None] * _CYCLE
        runs, place, idle = [], 0, 0
        while idle < _CYCLE:
            turn = turns[place] or next(files, None)
            idle = idle + 1 if turn is None else 0
            if turn is not None:
                begin, end = turn
                runs.append(np.arange(begin, min(begin + _BLOCK, end)))
                # A file that ends with its turn is found to be empty at the next one.
                is_full = len(runs[-1]) == _BLOCK
                turns[place] = (begin + _BLOCK, end) if is_full else None
            place = (place + 1) % _CYCLE
        return np.concatenate(runs)

    def _parse(self, example: tf.Tensor, name: tf.Tensor) -> tuple[tf.Tensor, ...]:
        from tensorflow_datasets import decode

        parts = self.features.deserialize_example(
            example, decoders={self.image: decode.SkipDecoding()}
        )
        return parts[self.image], tf.cast(parts[self.label], tf.int32), name


def _records(builder: Any, split: str, *, image: str, label: str) -> tf.data.Dataset:
    """The bytes, the class and the name of each image, as the package reads them."""
    import tensorflow_datasets as tfds

    turns = (
        {}
        if builder.info.disable_shuffling
        else {
            "interleave_cycle_length": _CYCLE,
            "interleave_block_length": _BLOCK,
        }
    )
    examples = builder.as_dataset(
        split=split,
        decoders={image: tfds.decode.SkipDecoding()},
        read_config=tfds.ReadConfig(add_tfds_id=True, try_autocache=False, **turns),
        shuffle_files=False,
    )
    names = [key for key in ("tfds_id", "image/filename") if key in examples.element_spec]
    keys = (image, label, *names[:1])
    return examples.map(lambda example: tuple(example[key] for key in keys))


def _is_labelled(builder: Any, split: str, *, image: str, label: str) -> bool:
    # The test images of ImageNet are all of class -1.
    if _format(builder) == "array_record":
        return bool(_Source(builder, split, image, label)[0][1] >= 0)
    records = source.untuned(_records(builder, split, image=image, label=label)).take(1)
    return all(record[1] >= 0 for record in records.as_numpy_iterator())


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(encoding="utf-8", errors="surrogateescape", newline="") as stream:
            rows = list(csv.DictReader(stream, strict=True))
    except csv.Error:
        rows = [{}]
    if not rows or any(tuple(row) != _COLUMNS or None in row.values() for row in rows):
        raise ValueError(
            f"{str(file)!r} is damaged: it is not lines of {', '.join(_COLUMNS)}; put back the one "
            "that training wrote, or name a folder to evaluate on."
        )
    return rows


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
