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
import warnings
from collections.abc import Iterator
from pathlib import Path

import filelock

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
_PARTIAL = re.compile(r"\.partial-[0-9a-f]{16}(\.lock)?")
# Errors of systems that cannot swap two names, or lock a file.
_NO_SWAP = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def explain_errors(
    path: str | Path, *, kept: str = "what was there before is kept", again: str = "try again"
) -> Iterator[None]:
    """Adds to an OSError of the block what is kept and what to do; its errno stays.

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
    leftovers of a killed process are removed by the next one that writes a file to the folder.

    Args:
        path: the file to write or replace; the temporary name keeps its suffixes.
        kept: see `explain_errors`.
        again: see `explain_errors`.

    Raises:
        OSError: the disk is full, read-only, gone or not accessible.
    """
    path = Path(path)
    with explain_errors(path, kept=kept, again=again):
        _remove_leftovers(path.parent)
        folder = path.with_name(f".partial-{secrets.token_hex(8)}")
        with _locked(folder.with_suffix(".lock")):
            temporary = folder / path.name
            try:
                folder.mkdir()
                yield temporary
                sync(temporary)
                temporary.replace(path)
                sync(path.parent)
            finally:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """Makes a hidden folder in `parent` to assemble a folder in, and removes it at the end.

    It also removes those of killed processes: no other process may write to `parent`, see `lock`.
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
        sync(out.parent)
        sync(stage.parent)


def was_interrupted(parent: Path, out: Path) -> bool:
    """Whether `publish` was killed between its two renames; `parent` is that of the stage."""
    return not out.exists() and (parent / _REPLACED).is_dir()


def restore(parent: Path, out: Path) -> None:
    """Puts back the old folder after `was_interrupted`, and removes one that has been replaced.

    No process may be publishing at the time.
    """
    old = parent / _REPLACED
    if was_interrupted(parent, out):
        with explain_errors(out, kept=f"the old folder is {str(old)!r}"):
            old.rename(out)
            sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def lock(path: Path, *, what: str) -> Iterator[None]:
    """Holds a lock file, for one process at a time; the system releases that of a killed process.

    Args:
        path: the file, which is removed at the end.
        what: the work that the lock guards, for the message.

    Raises:
        FileExistsError: another process holds it; the message says which, where and since when.
        OSError: the file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with explain_errors(path, kept="nothing was begun"):
            try:
                # It waits a moment, since the holder may be about to remove the file.
                locked = stack.enter_context(_locked(path, timeout=0.1))
            except filelock.Timeout:
                holder = ""
                with contextlib.suppress(OSError), path.open("rb") as file:
                    file.seek(1)  # Windows lets no other read the first byte, which is locked
                    holder = file.read(200).decode(errors="replace")
                raise FileExistsError(
                    f"Another {what} is at work: {holder or 'a process'}; wait until it ends, or "
                    "choose another place."
                ) from None
            if isinstance(locked, OSError):
                warnings.warn(
                    f"The file system of {str(path.parent)!r} has no locks ({locked.strerror}): "
                    f"make sure that no other {what} is at work.",
                    stacklevel=2,
                )
            else:
                now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                holder = f"\nprocess {os.getpid()} on {socket.gethostname()}, since {now}"
                os.truncate(locked, 0)
                os.write(locked, holder.encode())
        yield


def check_unheld(path: Path, *, what: str) -> None:
    """Raises the FileExistsError of `lock` if another process holds the file; makes no file."""
    if path.exists():
        with lock(path, what=what):
            pass


def sync_tree(folder: Path) -> None:
    """Flushes every file and name under a folder to the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Flushes a file's content or, except on Windows, the names in a folder to the disk."""
    is_windows = sys.platform == "win32"
    if is_windows and path.is_dir():
        return
    # Windows flushes only what is open for writing.
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
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


@contextlib.contextmanager
def _locked(path: Path, *, timeout: float = 60) -> Iterator[int | OSError]:
    """Locks a file that it makes and removes; yields its descriptor, or why there is no lock."""
    descriptors: list[int] = []
    lock = filelock.FileLock(
        path, timeout=timeout, thread_local=False, on_acquired=descriptors.append
    )
    is_there, refusal = False, None
    try:
        while not is_there:  # if its holder removed it before it was locked
            lock.release()
            lock.acquire()
            # filelock looks at the number of links, but NFS keeps one to a removed file.
            with contextlib.suppress(FileNotFoundError):
                opened = os.fstat(descriptors[-1])
                is_there = sys.platform == "win32" or os.path.samestat(opened, path.stat())
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        refusal = error
    try:
        yield refusal or descriptors[-1]
    finally:
        # Before the release: a process that opened it meanwhile sees that its name is gone.
        # Windows removes no open file; there, filelock removes it after the release.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        lock.release()


def _remove_leftovers(folder: Path) -> None:
    for entry in folder.iterdir():
        if _PARTIAL.fullmatch(entry.name):
            lock = entry.with_suffix(".lock")
            with contextlib.suppress(OSError), _locked(lock, timeout=0) as locked:
                if not isinstance(locked, OSError):
                    shutil.rmtree(entry.with_suffix(""))
