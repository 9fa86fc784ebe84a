"""Lists folders of images, one sub-folder per class, leaving out the images that are damaged."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from keras_vit.data import images, source
from keras_vit.data.damage import Damage
from keras_vit.data.listing import (
    Listing,
    existing_folder,
    find_images,
    folders,
    outside,
    some,
    split_folders,
    without_damaged,
)
from keras_vit.data.splits import FileSplit

# Fractions of a folder that has no splits of its own.
VALIDATION, TEST = 0.1, 0.1


def load_folder(
    path: str | os.PathLike[str],
    *,
    strict: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> source.ImageData:
    """Lists a folder that has one sub-folder per class.

    Or one that has `train/`, `validation/` and `test/`, which have those. Where validation or test
    is missing, a tenth of each class is carved out of the training images: always the same ones for
    the same file names. Every file is decoded once, to know the damaged ones before training
    starts; the pixels are not kept.

    Example:
        >>> import pathlib, tempfile, tensorflow as tf
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for index in range(8):
        ...     file = root / ["cat", "dog"][index % 2] / f"{index}.png"
        ...     file.parent.mkdir(exist_ok=True)
        ...     _ = file.write_bytes(tf.io.encode_png(tf.zeros((4, 4, 3), tf.uint8)).numpy())
        >>> data = load_folder(root)
        >>> data.labels, data.counts
        (('cat', 'dog'), {'train': 4, 'validation': 2, 'test': 2})

    Args:
        path: the folder.
        strict: whether a damaged image is an error, instead of being left out and counted.
        on_progress: called with (files looked at, files in all), for each split anew.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are no images, fewer than two classes, too few images for three splits,
            a class that training does not know, or, with `strict`, a damaged image.
    """
    root = existing_folder(path)
    parts = split_folders(root)
    listings = {
        name: without_damaged(_list_classes(part), strict=strict, on_progress=on_progress)
        for name, part in parts.items()
    }
    beside = () if root in parts.values() else outside(root, parts.values())
    labels = _labels(listings["train"])
    damage = Damage(strict=strict)
    splits = {
        name: dataclasses.replace(_split(listing, labels=labels), damage=damage)
        for name, listing in listings.items()
    }
    splits = _carve(splits, root=root)
    return source.ImageData(
        source=str(root),
        labels=labels,
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        left_out=(*beside, *(one for part in listings.values() for one in part.left_out)),
    )


def load_test_folder(
    path: str | os.PathLike[str],
    *,
    labels: Sequence[str],
    strict: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> source.ImageData:
    """Lists a folder to evaluate on: its `test/` if it has splits, otherwise all its class folders.

    Example:
        >>> import pathlib, tempfile, tensorflow as tf
        >>> file = pathlib.Path(tempfile.mkdtemp(), "dog", "1.png")
        >>> file.parent.mkdir()
        >>> _ = file.write_bytes(tf.io.encode_png(tf.zeros((4, 4, 3), tf.uint8)).numpy())
        >>> load_test_folder(file.parents[1], labels=["cat", "dog"]).test.targets.tolist()
        [1]

    Args:
        path: the folder.
        labels: the classes that the model knows; the folder may lack some of them.
        strict: whether a damaged image is an error, instead of being left out and counted.
        on_progress: called with (files looked at, files in all).

    Returns:
        The images as the test split; the two others are empty.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are no images, a class that the model does not know, or, with `strict`,
            a damaged image.
    """
    root = existing_folder(path)
    part = split_folders(root).get("test", root)
    listing = without_damaged(_list_classes(part), strict=strict, on_progress=on_progress)
    return source.ImageData(
        source=str(root),
        labels=tuple(labels),
        train=_split(Listing(root=root), labels=labels),
        validation=_split(Listing(root=root), labels=labels),
        test=_split(listing, labels=labels),
        left_out=listing.left_out,
    )


def _list_classes(root: Path) -> Listing:
    classes = list(folders(root))
    listing = Listing(root=root, left_out=outside(root, classes))
    for folder in classes:
        files, left_out = find_images(folder)
        if not files:
            raise ValueError(
                f"The class folder {str(folder)!r} holds no {images.FORMATS} file; "
                "put images into it, or remove it."
            )
        listing = dataclasses.replace(
            listing,
            files=(*listing.files, *files),
            names=(*listing.names, *[folder.name] * len(files)),
            left_out=(*listing.left_out, *left_out),
        )
    if not listing.files:
        raise ValueError(
            f"The folder {str(root)!r} holds no class folders; it needs one sub-folder per class, "
            f"with {images.FORMATS} files inside."
        )
    return listing


def _labels(listing: Listing) -> tuple[str, ...]:
    labels = tuple(sorted(set(listing.names)))
    if len(labels) < 2:
        raise ValueError(
            f"The folder {str(listing.root)!r} has one class, {labels[0]!r}; a classifier needs "
            "at least two sub-folders with images."
        )
    return labels


def _split(listing: Listing, *, labels: Sequence[str]) -> FileSplit:
    places = {label: place for place, label in enumerate(labels)}
    unknown = sorted(set(listing.names) - set(labels))
    if unknown:
        raise ValueError(
            f"The folder {str(listing.root)!r} has classes that the model is not trained for: "
            f"{some(unknown)}; those it is trained for are {some(labels)}."
        )
    return FileSplit(
        images=np.array([str(file) for file in listing.files], object),
        targets=np.array([places[name] for name in listing.names], np.int32),
    )


def _carve(splits: dict[str, FileSplit], *, root: Path) -> dict[str, FileSplit]:
    """Takes the splits that are missing out of the training images."""
    train = splits["train"]
    indices = source.assign_splits(
        [Path(image).relative_to(root).as_posix() for image in train.images],
        train.targets,
        validation=0 if "validation" in splits else VALIDATION,
        test=0 if "test" in splits else TEST,
    )
    whole = {name: splits.get(name, train.take(indices[name])) for name in source.SPLITS}
    whole["train"] = train.take(indices["train"])
    for name, split in whole.items():
        if not len(split):
            raise ValueError(
                f"The {len(train)} images in {str(root)!r} are too few for a {name} split; "
                "give at least one class three images, or better thirty."
            )
    return whole
