"""Puts finished artefacts in place, whole or not at all, each under the next version number.

TensorFlow Serving looks at the directory every second and serves the highest number it finds, so a
version is assembled under a name that is no number and renamed when everything is on the disk.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import filelock

from keras_vit import atomic

_LOCK = ".export.lock"
_STAGING = ".export-"


@contextlib.contextmanager
def staging_folder(directory: Path) -> Iterator[Path]:
    """Makes a hidden folder inside `directory` to assemble versions in; it is removed at the end.

    Only one export at a time may hold it; what a killed one left behind is removed too.

    Raises:
        FileExistsError: `directory` is a file.
        OSError: another export is at work there.
    """
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{str(directory)!r} is a file; give a directory to export to.")
    directory.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(directory / _LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise OSError(
            f"Another export is writing to {str(directory)!r}; wait until it has finished."
        ) from None
    try:
        for leftover in directory.glob(f"{_STAGING}*/"):
            shutil.rmtree(leftover, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGING, dir=directory))
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    finally:
        lock.release()


def next_version(directories: Sequence[Path]) -> int:
    """Returns the number after the highest that any of these directories holds.

    Example:
        >>> next_version([Path("not-there")])
        1
    """
    versions = [
        int(child.name)
        for directory in directories
        if directory.is_dir()
        for child in directory.iterdir()
        if child.name.isdecimal()
    ]
    return max(versions, default=0) + 1


def publish(stages: Mapping[Path, Path]) -> None:
    """Renames assembled folders to their final paths, in the given order.

    Everything reaches the disk before the first name changes. If one rename fails, the folders
    already renamed are taken back.
    """
    for stage in stages:
        atomic.sync_tree(stage)
    done: list[tuple[Path, Path]] = []
    try:
        for stage, final in stages.items():
            final.parent.mkdir(parents=True, exist_ok=True)
            _make_readable(stage)
            stage.rename(final)
            done.append((stage, final))
            atomic.sync_folder(final.parent)
    except BaseException:
        for stage, final in reversed(done):
            final.rename(stage)
        raise


def _make_readable(folder: Path) -> None:
    # The server runs as another user than the one who exports; mkdtemp keeps all others out.
    folder.chmod(0o755)
