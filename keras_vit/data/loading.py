"""Finds data by its name: the digits, a data set, a folder, or the splits that a run recorded."""

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from keras_vit import environment
from keras_vit.data import datasets, folder, source
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
    if text.startswith(datasets.PREFIX):
        return datasets.load_tfds(text.removeprefix(datasets.PREFIX), strict=strict)
    load = folder.load_folder if labelled else folder.load_unlabelled_folder
    return load(spec, strict=strict, on_progress=on_progress)


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
