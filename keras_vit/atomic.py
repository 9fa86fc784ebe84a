"""Writes a file whole or not at all, whenever the process ends."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`; what is written there takes its place at the end.

    The content reaches the disk before the name changes. After an error `path` is as it was.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with whole_file(path) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> path.read_text()
        'whole'

    Args:
        path: the file to write or replace; the temporary name keeps its suffixes.
    """
    path = Path(path)
    folder = tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(folder) / path.name
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
        Path(folder).rmdir()


def sync_tree(folder: Path) -> None:
    """Brings every file and name under a folder to the disk."""
    for entry in folder.iterdir():
        if entry.is_dir():
            sync_tree(entry)
        else:
            with entry.open("rb") as written:
                os.fsync(written.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
