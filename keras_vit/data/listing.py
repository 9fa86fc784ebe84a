"""Finds image files in folders, and leaves out those that are damaged."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from keras_vit.data import images, source

_SHOWN = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """Image files of one folder, each with the name of its class."""

    root: Path
    files: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


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


def without_damaged(
    listing: Listing, *, strict: bool, on_progress: Callable[[int, int], None] | None
) -> Listing:
    """Decodes every file and moves the damaged ones to `damaged`."""
    sound = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        for done, is_sound in enumerate(threads.map(_is_sound, listing.files), start=1):
            sound.append(is_sound)
            if on_progress is not None:
                on_progress(done, len(listing.files))
    pairs = list(zip(listing.files, listing.names, strict=True))
    kept = [pair for pair, is_sound in zip(pairs, sound, strict=True) if is_sound]
    damaged = [str(file) for (file, _), is_sound in zip(pairs, sound, strict=True) if not is_sound]
    if damaged and strict:
        raise ValueError(
            f"{len(damaged)} of {len(pairs)} images in {str(listing.root)!r} cannot be decoded: "
            f"{some(damaged)}; repair or remove them, or do not ask for strictness."
        )
    lost = sorted(set(listing.names) - {name for _, name in kept})
    if lost:
        raise ValueError(
            f"In {str(listing.root)!r} none of the images of class {lost[0]!r} can be decoded; "
            "repair them, or remove the class folder."
        )
    return dataclasses.replace(
        listing,
        files=tuple(file for file, _ in kept),
        names=tuple(name for _, name in kept),
        damaged=tuple(damaged),
    )


def some(names: Sequence[str]) -> str:
    """Names the first few."""
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _is_sound(file: Path) -> bool:
    return images.is_sound(file.read_bytes())
