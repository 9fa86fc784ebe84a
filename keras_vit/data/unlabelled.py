"""Lists the images of a folder for training without labels."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from keras_vit.data import folder, images, source
from keras_vit.data.damage import Damage
from keras_vit.data.listing import (
    Listing,
    existing_folder,
    find_images,
    folders,
    outside,
    without_damaged,
)
from keras_vit.data.splits import FileSplit


def load_unlabelled_folder(
    path: str | os.PathLike[str],
    *,
    strict: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> source.ImageData:
    """Lists a folder for training without labels.

    With class folders it is `load_folder`, so that the same images stay unseen that a classifier is
    later tested on. Otherwise every image below the folder is taken, at any depth; `train/`,
    `validation/` and `test/` are splits if the first is there, and a tenth is carved out for
    validation if there is none.

    Example:
        >>> import pathlib, tempfile, tensorflow as tf
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for index in range(20):
        ...     picture = tf.io.encode_png(tf.zeros((4, 4, 3), tf.uint8)).numpy()
        ...     _ = (root / f"{index}.png").write_bytes(picture)
        >>> data = load_unlabelled_folder(root)
        >>> data.labels, data.counts
        ((), {'train': 18, 'validation': 2, 'test': 0})

    Args:
        path: the folder.
        strict: whether a damaged image is an error, instead of being left out and counted.
        on_progress: called with (files looked at, files in all), for each split anew.

    Returns:
        The images; without class folders there are no labels, and every target is 0.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are too few images, or, with `strict`, a damaged one.
    """
    root = existing_folder(path)
    if _has_classes(root):
        return folder.load_folder(root, strict=strict, on_progress=on_progress)
    has_splits = bool(_images(root / "train"))
    parts = {name: root / name for name in source.SPLITS} if has_splits else {"train": root}
    listings = {
        name: without_damaged(_listing(part), strict=strict, on_progress=on_progress)
        for name, part in parts.items()
    }
    beside = outside(root, parts.values()) if has_splits else ()
    damage = Damage(strict=strict)
    splits = {name: _split(listing, damage) for name, listing in listings.items()}
    none = _split(Listing(root=root), damage)
    train, validation = splits["train"], splits.get("validation", none)
    if not len(validation):
        names = [Path(image).relative_to(root).as_posix() for image in train.images]
        carved = source.assign_splits(names, train.targets, validation=folder.VALIDATION, test=0)
        train, validation = train.take(carved["train"]), train.take(carved["validation"])
    if not len(train) or not len(validation):
        raise ValueError(
            f"The folder {str(root)!r} holds too few images to train and validate on; it needs at "
            f"least two {images.FORMATS} files, or better thousands."
        )
    return source.ImageData(
        source=str(root),
        labels=(),
        train=train,
        validation=validation,
        test=splits.get("test", none),
        left_out=(*beside, *(one for part in listings.values() for one in part.left_out)),
    )


def _has_classes(root: Path) -> bool:
    """Whether images lie in class folders, two or more, and nowhere else."""
    train = root / "train"
    root = train if train.is_dir() and any(folders(train)) else root
    classes = list(folders(root))
    if len(classes) < 2 or any(entry.name in source.SPLITS for entry in classes):
        return False
    has_stray = any(file.suffix.lower() in images.SUFFIXES for file in root.iterdir())
    return not has_stray and all(_images(entry) for entry in classes)


def _images(root: Path) -> list[Path]:
    """The image files below a folder, or none if there is no such folder."""
    return find_images(root)[0] if root.is_dir() else []


def _listing(root: Path) -> Listing:
    files, left_out = find_images(root) if root.is_dir() else ([], [])
    return Listing(
        root=root, files=tuple(files), names=(root.name,) * len(files), left_out=tuple(left_out)
    )


def _split(listing: Listing, damage: Damage) -> FileSplit:
    return FileSplit(
        images=np.array([str(file) for file in listing.files], object),
        targets=np.zeros(len(listing.files), np.int32),
        damage=damage,
    )
