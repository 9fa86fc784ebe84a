"""Writes files and folders atomically, even if the process is killed, one writer at a time."""

import contextlib
import ctypes
import datetime
import errno
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# What a user can do about an error of the operating system.
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    **dict.fromkeys(
        (errno.EROFS, errno.EACCES, errno.EPERM), "make it writable or choose another place"
    ),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.ENOENT: "make the folder that it lies in",
}
_STAGED, _REPLACED = ".staged-", ".replaced"
# Errors of systems that cannot swap two names, or lock a file.
_NO_SWAP = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def explain_errors(
    path: str | Path, *, kept: str = "what was there before is kept", again: str = "try again"
) -> Iterator[None]:
    """Adds to an OSError of the block what is kept and what to do; its errno stays.

    Example:
        >>> with explain_errors("notes.txt"):
        ...     raise OSError(errno.ENOSPC, "full")
        Traceback (most recent call last):
        OSError: [Errno 28] No space left on device: 'notes.txt' cannot be written; what was there \
before is kept; make room and try again.

    Args:
        path: the file or folder that the block writes.
        kept: clause of the message: the state after the error.
        again: clause of the message: what to do once the cause is gone.
    """
    try:
        yield
    except OSError as error:
        # Errors of this package have no number, or an outer block explained them.
        if error.errno is None or isinstance(error.__cause__, OSError):
            raise
        number = error.errno
        raise OSError(
            number,
            f"{os.strerror(number)}: {str(path)!r} cannot be written; {kept}; "
            f"{_ADVICE.get(number, 'check the disk')} and {again}.",
        ) from error


@contextlib.contextmanager
def whole_file(
    path: str | Path, *, kept: str = "what was there before is kept", again: str = "try again"
) -> Iterator[Path]:
    """Yields a temporary path beside `path`, which replaces it at the end of the block.

    The content is on the disk before the name changes. After an error `path` is unchanged. The
    leftovers of a killed process are removed by the next one that writes the same file.

    Example:
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with whole_file(path) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> path.read_text()
        'whole'

    Args:
        path: the file to write or replace; the temporary name keeps its suffixes.
        kept: see `explain_errors`.
        again: see `explain_errors`.

    Raises:
        OSError: the disk is full, read-only, gone or not accessible.
    """
    path = Path(path)
    with explain_errors(path, kept=kept, again=again), _own_folder(path) as folder:
        temporary = folder / path.name
        try:
            yield temporary
            sync_file(temporary)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            with contextlib.suppress(OSError):  # would hide the first error
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """Makes a hidden folder in `parent` to assemble a folder in, and removes it at the end.

    It also removes those of killed processes: no other process may write to `parent`, see `hold`.
    `publish` renames it, so `parent` and the final place are on one file system.
    """
    with explain_errors(parent):
        for leftover in parent.glob(f"{_STAGED}*/"):
            shutil.rmtree(leftover, ignore_errors=True)
        # Not `tempfile`, whose folders only their owner may enter.
        stage = parent / f"{_STAGED}{secrets.token_hex(4)}"
        stage.mkdir()
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def publish(stage: Path, out: Path) -> None:
    """Puts an assembled folder in its place, after its files are on the disk.

    An old folder is swapped with it in one step. Where the system cannot swap names, a kill between
    two renames leaves the old folder beside the stage, and `restore` brings it back.

    Args:
        stage: from `staging_folder`.
        out: the final place.

    Raises:
        OSError: the old folder is unchanged, or where `restore` finds it.
    """
    with explain_errors(out):
        sync_tree(stage)
        if not out.exists():
            stage.rename(out)
        elif not _swap(stage, out):
            _rename_twice(stage, out)
        sync_folder(out.parent)
        sync_folder(stage.parent)


def was_cut_off(parent: Path, out: Path) -> bool:
    """Whether `publish` was killed between its two renames; `parent` is that of the stage."""
    return not out.exists() and (parent / _REPLACED).is_dir()


def restore(parent: Path, out: Path) -> None:
    """Puts back the old folder after `was_cut_off`, and removes one that has been replaced.

    No process may be publishing at the time.
    """
    old = parent / _REPLACED
    if was_cut_off(parent, out):
        with explain_errors(out, kept=f"the old folder is {str(old)!r}"):
            old.rename(out)
            sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def hold(path: Path, *, what: str) -> Iterator[None]:
    """Holds a lock file, for one process at a time; the system releases that of a killed process.

    Example:
        >>> path = Path(tempfile.mkdtemp()) / "run.lock"
        >>> with hold(path, what="training to 'run'"):
        ...     with hold(path, what="training to 'run'"):
        ...         pass
        Traceback (most recent call last):
        FileExistsError: Another training to 'run' is at work: process ... on ..., since ...; \
wait until it ends, or choose another place.

    Args:
        path: the file, which is removed at the end.
        what: the work that the lock guards, for the message.

    Raises:
        FileExistsError: another process holds it; the message says which, where and since when.
        OSError: the file cannot be written.
    """
    descriptor = None
    try:
        with explain_errors(path, kept="nothing was begun"):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _lock_file(path, what)
        yield
    finally:
        if descriptor is not None:
            _release(descriptor, path)


def check_unheld(path: Path, *, what: str) -> None:
    """Raises the FileExistsError of `hold` if another process holds the file; makes no file."""
    if path.exists():
        with hold(path, what=what):
            pass


def sync_tree(folder: Path) -> None:
    """Flushes every file and name under a folder to the disk."""
    for entry in folder.iterdir():
        if entry.is_dir():
            sync_tree(entry)
        else:
            sync_file(entry)
    sync_folder(folder)


def sync_file(file: Path) -> None:
    """Flushes a file's content to the disk."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(first: Path, second: Path) -> bool:
    """Swaps two names in one step; returns False where the system cannot."""
    if sys.platform == "win32":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin":
        function, arguments = getattr(library, "renamex_np", None), (*names, 2)  # RENAME_SWAP
    else:  # AT_FDCWD is -100, RENAME_EXCHANGE is 2
        function = getattr(library, "renameat2", None)
        arguments = (-100, names[0], -100, names[1], 2)
    if function is None:
        return False
    if function(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_SWAP:
        return False
    raise OSError(number, os.strerror(number), str(second))


def _rename_twice(stage: Path, out: Path) -> None:
    old = stage.with_name(_REPLACED)
    shutil.rmtree(old, ignore_errors=True)
    try:
        out.rename(old)
        stage.rename(out)
    except BaseException:
        if not out.exists():
            with contextlib.suppress(OSError):  # `restore` tries again
                old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _lock_file(path: Path, what: str) -> int:
    """Opens and locks a file, writes into it which process holds it, and returns its descriptor."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path, flags, 0o644)
        is_held = False
        try:
            _lock(descriptor, path, what)
            is_held = _is_at(descriptor, path)  # else its holder removed it after it was opened
            if is_held:
                now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                holder = f"process {os.getpid()} on {socket.gethostname()}, since {now}"
                os.truncate(descriptor, 0)
                os.write(descriptor, holder.encode())
                return descriptor
        except BaseException:  # an interruption, too
            if is_held:
                _release(descriptor, path)
            else:
                os.close(descriptor)
            raise
        os.close(descriptor)


def _release(descriptor: int, path: Path) -> None:
    # Removed first: a process that opened the file meanwhile sees that its name is gone.
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, path: Path, what: str) -> None:
    number = errno.ENOSYS
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            number = error.errno or errno.EIO
    if number in (errno.EAGAIN, errno.EACCES):  # held by another
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "a process"
        raise FileExistsError(
            f"Another {what} is at work: {holder}; wait until it ends, or choose another place."
        )
    if number not in _NO_LOCKS:
        raise OSError(number, os.strerror(number), str(path))
    warnings.warn(
        f"The file system of {str(path.parent)!r} has no locks ({os.strerror(number)}): make sure "
        f"that no other {what} is at work.",
        stacklevel=2,
    )


@contextlib.contextmanager
def _own_folder(path: Path) -> Iterator[Path]:
    """Makes a hidden folder beside a file, and locks it, so that it is not taken for a leftover."""
    _remove_leftovers(path)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        # Until it is locked, another process may take it for a leftover, lock it and remove it.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            descriptor = _lock_folder(folder)
            if folder.exists():
                break
            _close(descriptor)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
        _close(descriptor)


def _remove_leftovers(path: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(path.name)}-[a-z0-9_]{{8}}")  # as tempfile names them
    with os.scandir(path.parent) as entries:
        leftovers = [entry.name for entry in entries if pattern.fullmatch(entry.name)]
    for folder in map(path.parent.joinpath, leftovers):
        with contextlib.suppress(OSError):
            descriptor = _lock_folder(folder)
            if descriptor is None:
                continue
            with contextlib.suppress(OSError):
                (folder / path.name).unlink(missing_ok=True)
                folder.rmdir()
            os.close(descriptor)


def _lock_folder(folder: Path) -> int | None:
    """Locks a folder and returns its descriptor, or None where the file system has no locks.

    Raises:
        BlockingIOError: another process holds it.
        FileNotFoundError: it is gone.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_LOCKS:
            return None
        raise BlockingIOError(error.errno, "held by another process") from error
    return descriptor


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
