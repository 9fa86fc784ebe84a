"""Images in folders: one folder per class, or without labels."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from keras_vit import environment
from keras_vit.data import images, source
from keras_vit.data.images import Damage
from keras_vit.data.source import FileSplit

_SHOWN = 10

# Why a file is left out: the ends of sentences that begin with "they".
UNREADABLE = "cannot be read"
ENDING = f"do not end in {', '.join(images.SUFFIXES)}"
BROKEN_LINK = "are links that lead nowhere"
FOLDER_LINK = "are links to folders, which are not followed"
NO_FILE = "are neither files nor folders"
HIDDEN = "are hidden: their names begin with a dot"
OUTSIDE = "lie outside of the folders of classes or splits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """Image files of one folder, each with the name of its class."""

    root: Path
    files: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()
    left_out: tuple[source.LeftOut, ...] = ()


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a folder; raises an error if it is none."""
    if not Path(path).exists():
        raise FileNotFoundError(f"There is no folder {str(path)!r}; check the path.")
    if not Path(path).is_dir():
        raise NotADirectoryError(
            f"{str(path)!r} is a file; give a folder with one sub-folder per class."
        )
    return Path(path).resolve()


def split_folders(root: Path) -> dict[str, Path]:
    """The folders that hold class folders, by the name of their split."""
    train = root / "train"
    if not (train.is_dir() and any(folders(train))):
        return {"train": root}  # also when "train" is one of the classes
    return {name: root / name for name in source.SPLITS if (root / name).is_dir()}


def folders(root: Path) -> Iterator[Path]:
    """The folders in a folder that are not hidden, in order."""
    entries = sorted(root.iterdir())
    return (entry for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def find_images(root: Path) -> tuple[list[Path], list[source.LeftOut]]:
    """Returns the image files below a folder, at any depth, in order, and what is not taken."""
    paths: list[Path] = []
    left_out: list[source.LeftOut] = []

    def note(error: OSError) -> None:
        left_out.append(source.LeftOut(str(error.filename), UNREADABLE))

    for folder, inner, names in os.walk(root, onerror=note):
        for path in [Path(folder, name) for name in (*inner, *names)]:
            reason = _reason(path)
            if reason is not None:
                left_out.append(source.LeftOut(str(path), reason))
            elif not path.is_dir():
                paths.append(path)
        inner[:] = [name for name in inner if not name.startswith(".")]
    return sorted(paths), sorted(left_out, key=lambda one: one.name)


def outside(root: Path, used: Collection[Path]) -> tuple[source.LeftOut, ...]:
    """Returns what lies in a folder beside the folders that are used, in order."""
    others = [path for path in sorted(root.iterdir()) if path not in used]
    return tuple(source.LeftOut(str(path), _hidden_or_broken(path) or OUTSIDE) for path in others)


def without_damaged(
    listing: Listing, *, strict: bool, on_progress: Callable[[int, int], None] | None
) -> Listing:
    """Moves files that cannot be decoded to `left_out`; with `strict` they are an error."""
    faults = _faults(listing, on_progress=on_progress)
    rows = list(zip(listing.files, listing.names, faults, strict=True))
    sound = [row for row in rows if row[2] is None]
    faulty = [source.LeftOut(str(file), fault) for file, _, fault in rows if fault is not None]
    if faulty and strict:
        raise ValueError(
            f"{len(faulty)} of {len(rows)} images in {str(listing.root)!r} cannot be decoded or "
            f"read: {some([one.name for one in faulty])}; repair or remove them, or do not ask for "
            "strictness."
        )
    empty = sorted(set(listing.names) - {name for _, name, _ in sound})
    if empty:
        raise ValueError(
            f"In {str(listing.root)!r} none of the images of class {empty[0]!r} can be decoded; "
            "repair them, or remove the class folder."
        )
    return dataclasses.replace(
        listing,
        files=tuple(file for file, _, _ in sound),
        names=tuple(name for _, name, _ in sound),
        left_out=(*listing.left_out, *faulty),
    )


def some(names: Sequence[str]) -> str:
    """Names the first few."""
    text = ", ".join(map(repr, names[:_SHOWN]))
    return text if len(names) <= _SHOWN else f"{text} and {len(names) - _SHOWN} more"


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
        strict: whether a damaged image is an error, instead of being left out and named.
        on_progress: called with (files checked, files in all), for each split.

    Returns:
        The images; without class folders there are no labels, and every target is 0.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are too few images, or, with `strict`, a damaged one.
    """
    root = existing_folder(path)
    if _has_classes(root):
        return load_folder(root, strict=strict, on_progress=on_progress)
    has_splits = bool(_images(root / "train"))
    parts = {name: root / name for name in source.SPLITS} if has_splits else {"train": root}
    listings = {
        name: without_damaged(_listing(part), strict=strict, on_progress=on_progress)
        for name, part in parts.items()
    }
    beside = outside(root, parts.values()) if has_splits else ()
    damage = Damage(strict=strict)
    splits = {name: _split_unlabelled(listing, damage) for name, listing in listings.items()}
    none = _split_unlabelled(Listing(root=root), damage)
    train, validation = splits["train"], splits.get("validation", none)
    if not len(validation):
        names = [Path(image).relative_to(root).as_posix() for image in train.images]
        indices = source.assign_splits(names, train.targets, validation=VALIDATION, test=0)
        train, validation = train.take(indices["train"]), train.take(indices["validation"])
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
        strict: whether a damaged image is an error, instead of being left out and named.
        on_progress: called with (files checked, files in all), for each split.

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
        strict: whether a damaged image is an error, instead of being left out and named.
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


def _reason(path: Path) -> str | None:
    """Returns why something in a folder is left out, None for an image and a folder."""
    reason = _hidden_or_broken(path)
    if reason is not None or (path.is_dir() and not path.is_symlink()):
        return reason
    if path.is_dir():
        return FOLDER_LINK
    if path.suffix.lower() not in images.SUFFIXES:
        return ENDING
    return None if path.is_file() else NO_FILE


def _hidden_or_broken(path: Path) -> str | None:
    if path.is_symlink() and not path.exists():
        return BROKEN_LINK
    return HIDDEN if path.name.startswith(".") else None


def _faults(
    listing: Listing, *, on_progress: Callable[[int, int], None] | None
) -> list[str | None]:
    """Why each file cannot be used, or None; decodes all of them."""
    faults: list[str | None] = []
    with concurrent.futures.ThreadPoolExecutor(environment.cores()) as threads:
        for fault in threads.map(_fault, listing.files):
            faults.append(fault)
            if on_progress is not None:
                on_progress(len(faults), len(listing.files))
    return faults


def _fault(file: Path) -> str | None:
    try:
        return None if images.is_sound(images.read_bytes(file)) else source.DAMAGED
    except OSError:
        return UNREADABLE
    except ValueError:
        return source.DAMAGED


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


def _split_unlabelled(listing: Listing, damage: Damage) -> FileSplit:
    return FileSplit(
        images=np.array([str(file) for file in listing.files], object),
        targets=np.zeros(len(listing.files), np.int32),
        damage=damage,
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
    full_splits = {name: splits.get(name, train.take(indices[name])) for name in source.SPLITS}
    full_splits["train"] = train.take(indices["train"])
    for name, split in full_splits.items():
        if not len(split):
            raise ValueError(
                f"The {len(train)} images in {str(root)!r} are too few for a {name} split; "
                "give at least one class three images, or better thirty."
            )
    return full_splits
