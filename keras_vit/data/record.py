"""Writes down which file of a folder belongs to which split, and reads it back without decoding."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keras_vit.data import source
from keras_vit.data.splits import FileSplit

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
    known = set(labels or ("",))
    for number, row in enumerate(rows, start=2):
        path = row["path"]
        is_inside = path and not Path(path).is_absolute() and ".." not in Path(path).parts
        if row["split"] not in source.SPLITS or row["label"] not in known or not is_inside:
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
