"""Finds image files in folders, and leaves out those that are damaged."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from keras_vit.data import images, source

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
    found: list[Path] = []
    left_out: list[source.LeftOut] = []

    def note(error: OSError) -> None:
        left_out.append(source.LeftOut(str(error.filename), UNREADABLE))

    for folder, inner, names in os.walk(root, onerror=note):
        for path in [Path(folder, name) for name in (*inner, *names)]:
            reason = _reason(path)
            if reason is not None:
                left_out.append(source.LeftOut(str(path), reason))
            elif not path.is_dir():
                found.append(path)
        inner[:] = [name for name in inner if not name.startswith(".")]
    return sorted(found), sorted(left_out, key=lambda one: one.name)


def outside(root: Path, used: Collection[Path]) -> tuple[source.LeftOut, ...]:
    """Returns what lies in a folder beside the folders that are used, in order."""
    others = [path for path in sorted(root.iterdir()) if path not in used]
    return tuple(source.LeftOut(str(path), _hidden_or_broken(path) or OUTSIDE) for path in others)


def without_damaged(
    listing: Listing, *, strict: bool, on_progress: Callable[[int, int], None] | None
) -> Listing:
    """Decodes every file and moves those that cannot be to `left_out`."""
    faults = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        for done, fault in enumerate(threads.map(_fault, listing.files), start=1):
            faults.append(fault)
            if on_progress is not None:
                on_progress(done, len(listing.files))
    rows = list(zip(listing.files, listing.names, faults, strict=True))
    kept = [row for row in rows if row[2] is None]
    faulty = [source.LeftOut(str(file), fault) for file, _, fault in rows if fault is not None]
    if faulty and strict:
        raise ValueError(
            f"{len(faulty)} of {len(rows)} images in {str(listing.root)!r} cannot be decoded or "
            f"read: {some([one.name for one in faulty])}; repair or remove them, or do not ask for "
            "strictness."
        )
    lost = sorted(set(listing.names) - {name for _, name, _ in kept})
    if lost:
        raise ValueError(
            f"In {str(listing.root)!r} none of the images of class {lost[0]!r} can be decoded; "
            "repair them, or remove the class folder."
        )
    return dataclasses.replace(
        listing,
        files=tuple(file for file, _, _ in kept),
        names=tuple(name for _, name, _ in kept),
        left_out=(*listing.left_out, *faulty),
    )


def some(names: Sequence[str]) -> str:
    """Names the first few."""
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


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


def _fault(file: Path) -> str | None:
    try:
        return None if images.is_sound(images.read_bytes(file)) else source.DAMAGED
    except OSError:
        return UNREADABLE
    except ValueError:
        return source.DAMAGED
