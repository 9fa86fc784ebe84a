"""Images in folders: class folders, splits, images without labels, and those that a user names."""

import concurrent.futures
import csv
import dataclasses
import glob
import io
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from keras_vit import environment
from keras_vit.data import images, source
from keras_vit.data.source import SPLIT_COLUMNS, Damage, ImageData, SkippedFile, Split

_SHOWN = 10

# Why a file is left out: the ends of sentences that begin with "they".
UNREADABLE = "cannot be read"
ENDING = f"do not end in {', '.join(images.SUFFIXES)}"
BROKEN_LINK = "are links that lead nowhere"
FOLDER_LINK = "are links to folders, which are not followed"
NO_FILE = "are neither files nor folders"
HIDDEN = "are hidden: their names begin with a dot"
OUTSIDE = "lie outside of the folders of classes or splits"

# Stands for the pipe in a list of names.
PIPE = "-"
_PIECE = 2**16  # bytes that are read of a pipe at a time
# How images begin: a BMP has zeros where a name such as BMW/1.jpg has text.
_IMAGE = re.compile(
    rb"\xff\xd8\xff|\x89PNG|RIFF....WEBP|GIF8[79]a|BM....\0\0\0\0|II\*\0|MM\0\*|....ftypavi[fs]",
    re.DOTALL,
)
_TEXT = frozenset(b"\n\r\t\0") | frozenset(range(32, 256))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Listing:
    root: Path
    rows: Sequence[tuple[Path, str]] = ()
    skipped: Sequence[SkippedFile] = ()


def load_folder(
    path: str | os.PathLike[str],
    *,
    strict: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ImageData:
    """Lists a folder that has one sub-folder per class.

    Or one that has `train/`, `validation/` and `test/`, which have those, also by other usual names
    (`SPLIT_NAMES`) in any case, such as `Training/` and `Val/`, or all with the same addition, such
    as `seg_train/` and `seg_test/`. Where validation or test is missing, a tenth of each class is
    carved out of the training images: always the same ones for the same file names. Every file is
    decoded once, to know the damaged ones before training starts; the pixels are not kept.

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
            a class that training does not know, splits without one for training, class folders
            that look like splits, or, with `strict`, a damaged image.
    """
    root = _existing_folder(path)
    parts = _split_folders(root, needed="train")
    listings = {
        name: _without_damaged(_list_classes(part), strict=strict, on_progress=on_progress)
        for name, part in parts.items()
    }
    beside = _outside(root, parts.values())
    train = listings["train"]
    labels = tuple(sorted({name for _, name in train.rows}))
    if len(labels) < 2:
        raise ValueError(
            f"The folder {str(train.root)!r} has one class, {labels[0]!r}; a classifier needs "
            "at least two sub-folders with images."
        )
    damage = Damage(strict=strict)
    listed = {name: _split(each, labels=labels, damage=damage) for name, each in listings.items()}
    splits = source.carve(listed, _names_in(root, listed["train"]))
    for name, split in splits.items():
        if not len(split):
            raise ValueError(
                f"The {len(listed['train'])} images in {str(root)!r} are too few for a {name} "
                "split; give at least one class three images, or better thirty."
            )
    return ImageData(
        source=str(root),
        labels=labels,
        skipped=(*beside, *(one for part in listings.values() for one in part.skipped)),
        **splits,
    )


def load_test_folder(
    path: str | os.PathLike[str],
    *,
    labels: Sequence[str] | Callable[[Sequence[str]], Sequence[str]],
    strict: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ImageData:
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
        labels: the classes that the model knows, of which the folder may lack some; or what gives
            them for the names of the class folders.
        strict: whether a damaged image is an error, instead of being left out and named.
        on_progress: called with (files looked at, files in all).

    Returns:
        The images as the test split; the two others are empty.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are no images, a class that the model does not know, splits without one
            for testing, or, with `strict`, a damaged image.
    """
    root = _existing_folder(path)
    listing = _list_classes(_split_folders(root, needed="test")["test"])
    if callable(labels):
        labels = labels(sorted({name for _, name in listing.rows}))
    labels = tuple(map(source.composed, labels))
    listing = _without_damaged(listing, strict=strict, on_progress=on_progress)
    none, test = _split(_Listing(root=root), labels=labels), _split(listing, labels=labels)
    return ImageData(
        source=str(root),
        labels=labels,
        train=none,
        validation=none,
        test=test,
        skipped=tuple(listing.skipped),
    )


def load_unlabelled_folder(
    path: str | os.PathLike[str],
    *,
    strict: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ImageData:
    """Lists a folder for training without labels.

    With class folders it is `load_folder`, so that the same images stay unseen that a classifier is
    later tested on. Otherwise every image below the folder is taken, at any depth. Splits are known
    as there; a tenth is carved out for validation if there is none.

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
    root = _existing_folder(path)
    parts = _split_folders(root, needed="train")
    folders = _folders(parts["train"])
    found = {source.composed(folder.name): find_images(folder)[0] for folder in folders}
    are_classes = len(found) > 1 and all(found.values()) and not _has_images(parts["train"])
    if are_classes and not _shared(parts["train"], found):
        return load_folder(root, strict=strict, on_progress=on_progress)
    listings = {}
    for name, part in parts.items():
        files, skipped = find_images(part)
        rows = [(file, part.name) for file in files]
        listing = _Listing(root=part, rows=rows, skipped=skipped)
        listings[name] = _without_damaged(listing, strict=strict, on_progress=on_progress)
    beside = _outside(root, parts.values())
    damage = Damage(strict=strict)
    listed = {
        name: _split(listing, labels=(listing.root.name,), damage=damage)
        for name, listing in listings.items()
        if name == "train" or listing.rows
    }
    splits = source.carve(listed, _names_in(root, listed["train"]), test=0)
    if not len(splits["train"]) or not len(splits["validation"]):
        raise ValueError(
            f"The folder {str(root)!r} holds too few images to train and validate on; it needs at "
            f"least two {images.FORMATS} files, or better thousands."
        )
    return ImageData(
        source=str(root),
        labels=(),
        skipped=(*beside, *(one for part in listings.values() for one in part.skipped)),
        **splits,
    )


def read_splits(file: Path, *, root: str | os.PathLike[str], labels: Sequence[str]) -> ImageData:
    """Returns the images that `ImageData.write_splits` wrote down.

    Args:
        file: the CSV file.
        root: the folder that its paths are relative to.
        labels: the classes, in the order of the model's outputs.

    Raises:
        FileNotFoundError: an image is no longer there.
        ValueError: the file is damaged, or names a class or a split that there is not, or an image
            outside of the folder.
    """
    rows = [{**row, "label": source.composed(row["label"])} for row in _rows(file)]
    labels = tuple(map(source.composed, labels))
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
    paths = [row["path"] for row in rows]
    # `Path.is_file` raises an error for a name that no file can have.
    missing = [path for path in paths if not os.path.isfile(Path(root, path))]  # noqa: PTH113
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
        splits[name] = Split(
            images=np.array([str(Path(root, row["path"])) for row in part], object),
            targets=np.array([places[row["label"]] for row in part], np.int32),
        )
    return ImageData(source=str(root), labels=labels, skipped=(), **splits)


@dataclasses.dataclass(frozen=True)
class NamedImage:
    """One image that a user named, not read yet.

    Attributes:
        name: what to call it, as the user wrote it.
        contents: the bytes of an image from a pipe; None for a file, whose path is the name.
        problem: a sentence, if it cannot be read.
    """

    name: str
    contents: bytes | None = None
    problem: str | None = None

    def read(self) -> np.ndarray:
        """Returns the pixels 0..255, uint8 of shape (height, width, 3).

        Raises:
            OSError: the file is not there, or cannot be read.
            ValueError: it is no image, or is damaged.
        """
        if self.problem is not None:
            raise ValueError(self.problem)
        return images.read_image(self.name if self.contents is None else self.contents)


def named_images(
    names: Iterable[str], *, pipe: io.BufferedIOBase | None = None
) -> Iterator[NamedImage | SkippedFile]:
    """Yields the images that names mean, each once, without reading them.

    A name is that of a file; of a folder, whose images are taken at any depth as training takes
    them; a pattern such as "photos/**/*.jpg", where there is no such file; or "-" for the pipe. If
    the pipe holds an image, it is that image. Otherwise it holds names of files and folders, one a
    line, or with a NUL after each as `find -print0` prints them.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp())
        >>> for name in ("b.jpg", "a.jpg", "notes.txt"):
        ...     (place / name).touch()
        >>> [Path(each.name).name for each in named_images([str(place / "*.jpg")])]
        ['a.jpg', 'b.jpg']

    Args:
        names: what the user wrote.
        pipe: what "-" reads.

    Yields:
        Each image; and what a folder holds beside images.
    """
    seen = set()
    for name in names:
        if name == PIPE and pipe is not None:
            found = _from_pipe(pipe)
        else:
            found = _expand(name, takes_patterns=True)
        for image in found:
            key = image.name
            if isinstance(image, NamedImage):
                key = PIPE if image.contents is not None else os.path.normpath(key)
            if key not in seen:
                seen.add(key)
                yield image


def _existing_folder(path: str | os.PathLike[str]) -> Path:
    if not Path(path).exists():
        raise FileNotFoundError(f"There is no folder {str(path)!r}; check the path.")
    if not Path(path).is_dir():
        raise NotADirectoryError(
            f"{str(path)!r} is a file; give a folder with one sub-folder per class."
        )
    return Path(path).resolve()


def _split_folders(root: Path, *, needed: str) -> dict[str, Path]:
    """The folder of each split; the root itself for the one that is needed if it has no splits."""
    named: dict[str, dict[str, list[Path]]] = {}  # by what names say beside the split, then by it
    nested: dict[str, set[str]] = {}  # by the same, the splits that hold folders
    names = []
    for folder in _folders(root):
        split, rest = source.split_of(folder.name) or ("", "")
        if split:
            named.setdefault(rest, {}).setdefault(split, []).append(folder)
            nested.setdefault(rest, set()).update({split} if any(_folders(folder)) else ())
            names.append(folder.name)
    chosen: dict[str, list[Path]] = {}
    for rest, found in sorted(named.items()):  # train/ before seg_train/
        several = len(found) > 1 and (not rest or "train" in found)
        # One alone may be a class: "train" with images in it, "steam_train", "dev_board".
        if several or (not rest and nested[rest] & {"train", needed}):
            chosen = found
            break
    holding = set().union(*nested.values())
    if holding - chosen.keys() and (chosen or {"train"} < holding):
        raise ValueError(
            f"The folder {str(root)!r} has folders that are named as splits, but not alike: "
            f"{some(names)}; name them train, validation and test."
        )
    for split, folders in chosen.items():
        if len(folders) > 1:
            raise ValueError(
                f"The folder {str(root)!r} has more than one folder of {split} images: "
                f"{some([each.name for each in folders])}; rename all but one."
            )
    if chosen and needed not in chosen:
        raise ValueError(
            f"The folder {str(root)!r} has no folder of {needed} images beside {some(names)}; "
            "rename one, or give a folder whose sub-folders are the classes."
        )
    splits = {name: _inside(chosen[name][0], name) for name in source.SPLITS if name in chosen}
    return splits or {needed: root}


def _inside(folder: Path, split: str) -> Path:
    """Where the images of a split are: `seg_train/seg_train/`, for one."""
    inner = list(_folders(folder))
    meant = source.split_of(inner[0].name) if len(inner) == 1 else None
    return inner[0] if meant and meant[0] == split and not _has_images(folder) else folder


def _has_images(folder: Path) -> bool:
    return any(file.suffix.lower() in images.SUFFIXES for file in folder.iterdir())


def _shared(root: Path, classes: Mapping[str, Sequence[Path]]) -> list[str]:
    """The folders, two at least, that all classes hold and nothing else, as splits hold classes."""
    depth = len(root.parts)
    while len(classes) > 1:
        depth += 1
        folders = ({path.parts[depth:-1][:1] for path in paths} for paths in classes.values())
        first = next(folders)
        if () in first or any(names != first for names in folders):
            break
        if len(first) > 1:
            return sorted(name for (name,) in first)
    return []


def _folders(root: Path) -> Iterator[Path]:
    entries = sorted(root.iterdir())
    return (entry for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def find_images(root: Path) -> tuple[list[Path], list[SkippedFile]]:
    """Returns the image files below a folder, at any depth, in order, and what is not taken."""
    paths: list[Path] = []
    skipped: list[SkippedFile] = []

    def note(error: OSError) -> None:
        skipped.append(SkippedFile(str(error.filename), UNREADABLE))

    for folder, inner, names in os.walk(root, onerror=note):
        for path in [Path(folder, name) for name in (*inner, *names)]:
            reason = _reason(path)
            if reason is not None:
                skipped.append(SkippedFile(str(path), reason))
            elif not path.is_dir():
                paths.append(path)
        inner[:] = [name for name in inner if not name.startswith(".")]
    return sorted(paths), sorted(skipped, key=lambda one: one.name)


def _outside(root: Path, used: Collection[Path]) -> list[SkippedFile]:
    """What lies beside the folders that are used, in that or on the way to them."""
    kept = {path for folder in used for path in (folder, *folder.parents)}
    places = {folder for folder in kept.difference(used) if folder.is_relative_to(root)}
    others = sorted(path for place in places for path in place.iterdir() if path not in kept)
    return [SkippedFile(str(path), _hidden_or_broken(path) or OUTSIDE) for path in others]


def _without_damaged(
    listing: _Listing, *, strict: bool, on_progress: Callable[[int, int], None] | None
) -> _Listing:
    """Moves files that cannot be decoded to `skipped`; with `strict` they are an error."""
    sound: list[tuple[Path, str]] = []
    faulty: list[SkippedFile] = []
    count = len(listing.rows)
    with concurrent.futures.ThreadPoolExecutor(environment.cores()) as threads:
        faults = threads.map(_fault, [file for file, _ in listing.rows])
        for done, (row, fault) in enumerate(zip(listing.rows, faults, strict=True), start=1):
            if fault is None:
                sound.append(row)
            else:
                faulty.append(SkippedFile(str(row[0]), fault))
            if on_progress is not None:
                on_progress(done, count)
    if faulty and strict:
        raise ValueError(
            f"{len(faulty)} of {count} images in {str(listing.root)!r} cannot be decoded or "
            f"read: {some([one.name for one in faulty])}; repair or remove them, or do not ask for "
            "strictness."
        )
    empty = sorted({name for _, name in listing.rows} - {name for _, name in sound})
    if empty:
        raise ValueError(
            f"In {str(listing.root)!r} none of the images of class {empty[0]!r} can be decoded; "
            "repair them, or remove the class folder."
        )
    return dataclasses.replace(listing, rows=sound, skipped=[*listing.skipped, *faulty])


def some(names: Sequence[str]) -> str:
    """Names the first few."""
    text = ", ".join(map(repr, names[:_SHOWN]))
    return text if len(names) <= _SHOWN else f"{text} and {len(names) - _SHOWN} more"


def _reason(path: Path) -> str | None:
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


def _fault(file: Path) -> str | None:
    try:
        return None if images.is_decodable(images.read_bytes(file)) else source.DAMAGED
    except OSError:
        return UNREADABLE
    except ValueError:
        return source.DAMAGED


def _list_classes(root: Path) -> _Listing:
    folders = list(_folders(root))
    classes: dict[str, list[Path]] = {}
    skipped = _outside(root, folders)
    for folder in folders:
        paths, others = find_images(folder)
        if not paths:
            raise ValueError(
                f"The class folder {str(folder)!r} holds no {images.FORMATS} file; "
                "put images into it, or remove it."
            )
        classes.setdefault(source.composed(folder.name), []).extend(paths)
        skipped += others
    if not classes:
        raise ValueError(
            f"The folder {str(root)!r} holds no class folders; it needs one sub-folder per class, "
            f"with {images.FORMATS} files inside."
        )
    shared = _shared(root, classes)
    if shared:
        raise ValueError(
            f"The sub-folders of {str(root)!r}, {some(list(classes))}, hold no images but all the "
            f"same folders, {some(shared)}; name them train, validation and test if they are "
            "splits, or move the images of each into it if they are classes."
        )
    rows = [(path, name) for name, paths in classes.items() for path in paths]
    return _Listing(root=root, rows=rows, skipped=skipped)


def _names_in(root: Path, split: Split) -> list[str]:
    """The names of the files of a split that decide how it is divided, on every machine."""
    return [source.composed(Path(image).relative_to(root).as_posix()) for image in split.images]


def _split(listing: _Listing, *, labels: Sequence[str], damage: Damage | None = None) -> Split:
    places = {label: place for place, label in enumerate(labels)}
    unknown = sorted({name for _, name in listing.rows} - set(labels))
    if unknown:
        raise ValueError(
            f"The folder {str(listing.root)!r} has classes that the model is not trained for: "
            f"{some(unknown)}; those it is trained for are {some(labels)}."
        )
    return Split(
        images=np.array([str(file) for file, _ in listing.rows], object),
        targets=np.array([places[name] for _, name in listing.rows], np.int32),
        damage=damage or Damage(),
    )


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(encoding="utf-8", errors="surrogateescape", newline="") as stream:
            rows = list(csv.DictReader(stream, strict=True))
    except csv.Error:
        rows = [{}]
    if not rows or any(tuple(row) != SPLIT_COLUMNS or None in row.values() for row in rows):
        raise ValueError(
            f"{str(file)!r} is damaged: it is not lines of {', '.join(SPLIT_COLUMNS)}; put back "
            "the one that training wrote, or name a folder to evaluate on."
        )
    return rows


def _expand(name: str, *, takes_patterns: bool) -> Iterator[NamedImage | SkippedFile]:
    if os.path.isdir(name):  # noqa: PTH112 - a name that no file can have is none, not an error
        yield from _in_folder(Path(name))
    elif not takes_patterns or os.path.lexists(name) or not any(char in name for char in "*?["):
        yield NamedImage(name)
    else:
        matches = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - names as they are written
        if not matches:
            yield NamedImage(name, problem=f"No file matches {name!r}; check the pattern.")
        for match in matches:
            yield from _expand(match, takes_patterns=False)


def _in_folder(root: Path) -> Iterator[NamedImage | SkippedFile]:
    paths, skipped = find_images(root)
    for one in skipped:
        if one.reason == UNREADABLE:
            yield NamedImage(one.name, problem=f"The folder {one.name!r} cannot be read.")
        else:
            yield one
    if not paths:
        problem = f"The folder {str(root)!r} holds no {images.FORMATS} files."
        yield NamedImage(str(root), problem=problem)
    yield from (NamedImage(str(path)) for path in paths)


def _from_pipe(pipe: io.BufferedIOBase) -> Iterator[NamedImage | SkippedFile]:
    head = pipe.read(16)
    if _IMAGE.match(head):
        most = images.largest_file()
        contents = head + pipe.read(most)
        if len(contents) > most:
            problem = f"The pipe holds more than {most} bytes; make the image smaller."
            yield NamedImage(PIPE, problem=problem)
        else:
            yield NamedImage(PIPE, contents=contents)
        return
    piece = head + pipe.read1(_PIECE)
    if not _TEXT.issuperset(piece):
        problem = f"The pipe holds neither a {images.FORMATS} file nor names of files."
        yield NamedImage(PIPE, problem=problem)
        return
    separator = b"\0" if b"\0" in piece else b"\n"
    rest = b""
    while piece:
        *names, rest = (rest + piece).split(separator)
        yield from _listed(names, separator)
        piece = pipe.read1(_PIECE)
    yield from _listed([rest], separator)


def _listed(names: list[bytes], separator: bytes) -> Iterator[NamedImage | SkippedFile]:
    for name in names:
        text = name.removesuffix(b"\r") if separator == b"\n" else name
        if text:
            yield from _expand(os.fsdecode(text), takes_patterns=False)
