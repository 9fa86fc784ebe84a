"""Puts finished artefacts in place, whole or not at all, each under the next version number.

TensorFlow Serving looks at the directory every second and serves the highest number it finds, so a
version is assembled under a name that is no number and renamed when everything is on the disk.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from keras_vit import atomic


@contextlib.contextmanager
def staging_folder(directory: Path) -> Iterator[Path]:
    """Makes a hidden folder inside `directory` to assemble versions in; it is removed at the end.

    Only one export at a time may hold it; what a killed one left behind is removed too.

    Raises:
        FileExistsError: `directory` is a file, or another export is at work there.
        OSError: it cannot be written to.
    """
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{str(directory)!r} is a file; give a directory to export to.")
    with (
        atomic.hold(directory / ".export.lock", what=f"export to {str(directory)!r}"),
        atomic.staging_folder(directory) as stage,
    ):
        yield stage


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

    Each reaches the disk before its name changes. If one rename fails, the folders
    already renamed are taken back.
    """
    done: list[tuple[Path, Path]] = []
    try:
        for stage, final in stages.items():
            if final.exists():
                raise FileExistsError(f"{str(final)!r} has appeared meanwhile; export once more.")
            with atomic.telling(final.parent):
                final.parent.mkdir(parents=True, exist_ok=True)
                _make_readable(stage)
            atomic.publish(stage, final)
            done.append((stage, final))
    except BaseException:
        for stage, final in reversed(done):
            with contextlib.suppress(OSError):  # the disk may be gone: the first error says it
                final.rename(stage)
        raise


def _make_readable(folder: Path) -> None:
    # The server runs as another user than the one who exports; mkdtemp keeps all others out.
    folder.chmod(0o755)
