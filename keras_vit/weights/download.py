"""Brings a published file to this machine: one verified local copy per URL, whatever breaks.

Files live under Keras' own cache, one folder per source directory, each with the SHA-256 of its
first use beside it:

    <KERAS_HOME or ~/.keras>/models/keras_vit/vit_models/imagenet21k/ViT-B_16.npz
                                                                     ViT-B_16.npz.sha256

A file that came over http and not https has a place of its own, below `http+<host>`. Of the files
that the Hugging Face Hub's own library keeps, the record is here, below `hub+<host>`, by commit.
`ViT-B_16.npz.partial` is a download that was interrupted and `ViT-B_16.npz.lock` what keeps two
processes apart; both may be deleted when no process is running. A kept file is read whole and
compared with its SHA-256 at every use (about a second per GB), because its size and its date
would not show damage.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock

from keras_vit import atomic, environment
from keras_vit.weights import checksums, transfer
from keras_vit.weights.connection import plain, shown

MIRROR_SETTING = "KERAS_VIT_MIRROR"

_GOOGLE_STORAGE = "storage.googleapis.com"
_LONGEST_NAME = 200  # bytes; disks allow 255, and the files beside have longer names
_SIDE_FILES = (".partial", ".partial.json", ".sha256", ".lock")
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_LOGGER = logging.getLogger("keras_vit.weights")


def fetch(
    url: str,
    *,
    sha256: str | None = None,
    progress: bool | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """Returns a verified local copy of the file behind a URL, downloading it if need be.

    An interrupted download is resumed. Before a new file appears under its name, it is checked
    against its length, the server's checksum (`x-goog-hash`, or the Hugging Face Hub's SHA-256) and
    its format's own structure, the CRCs of an archive among it. Its SHA-256 is recorded on first
    use and compared at every later one. Any number of processes may ask at once.

    The environment variable KERAS_VIT_MIRROR replaces `https://storage.googleapis.com/<bucket>` by
    another URL or by a local folder, whose files are then used where they are:
    `<mirror>/imagenet21k/ViT-B_16.npz`.

    Example:
        >>> url = "https://storage.googleapis.com/vit_models/augreg/index.csv"
        >>> path = fetch(url)  # doctest: +SKIP

    Args:
        url: an http or https URL that names a file. Proxies are taken from the usual environment
            variables.
        sha256: the file's SHA-256 in hexadecimal, when it is known; compared before the file is
            read as what it is.
        progress: whether to draw a progress bar; None draws it when standard error is a terminal.
        wait: called with the seconds to wait before another attempt.

    Returns:
        The path of the file; do not write to it.

    Raises:
        ValueError: the URL names no file, or the file is not what it should be.
        FileNotFoundError: the server or the mirror folder has no such file.
        ConnectionError: the server cannot be reached, refuses or is too slow.
        PermissionError: the cache belongs to another user, or anyone may write to it.
        OSError: the disk is full or not writable.
    """
    sha256 = checksums.checked_sha256(sha256)
    path = cached_path(url)
    _check_owner(path)
    if path.is_file():
        transfer.clean_up(_partial_path(path))
        return _verify_local(path, path, sha256)
    source = source_of(url)
    if isinstance(source, Path):
        if not source.is_file():
            raise FileNotFoundError(
                f"{MIRROR_SETTING} names a folder without {source}: put the file from {shown(url)} "
                f"there, or unset {MIRROR_SETTING}."
            )
        return _verify_local(source, path, sha256)
    with _lock(path):
        if path.is_file():  # another process was faster
            return _verify_local(path, path, sha256)
        return _download(source, path, sha256, progress=progress, wait=wait)


def cached_path(url: str) -> Path:
    """Returns where `fetch` keeps the file of a URL, whether or not it is there.

    Example:
        >>> cached_path("https://storage.googleapis.com/vit_models/sam/ViT-B_16.npz").parts[-3:]
        ('vit_models', 'sam', 'ViT-B_16.npz')

    Raises:
        ValueError: the URL is not http or https, or names no file.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        pieces, port = _path_pieces(parts), parts.port
    except ValueError:
        raise ValueError(f"{shown(url)!r} is no URL; check how it is written.") from None
    bad = not pieces or parts.path.endswith("/") or re.search(r"[\s\x00-\x1f\x7f]", url)
    if parts.scheme not in ("http", "https") or not parts.hostname or bad:
        raise ValueError(
            f"A download needs an http or https URL that names a file. Received: {shown(url)!r}."
        )
    if (parts.scheme, parts.netloc) != ("https", _GOOGLE_STORAGE):
        host = re.sub(r"[^\w.-]", "_", f"{parts.hostname}_{port or ''}".rstrip("_"))
        pieces.insert(0, host if parts.scheme == "https" else f"http+{host}")
    if parts.query:
        pieces.insert(-1, hashlib.sha256(parts.query.encode()).hexdigest()[:12])
    if not all(_is_usable(piece) for piece in pieces):
        raise ValueError(
            "A URL's folders and file must be usable as such on disk, and not named like the files "
            f"of the cache itself. Received: {shown(url)!r}."
        )
    return cache_folder().joinpath(*pieces)


def verify(file: Path, *, place: tuple[str, ...], sha256: str | None, stated: str = "") -> None:
    """Holds a file that another library keeps against its SHA-256, as `fetch` does its own files.

    Args:
        file: the file.
        place: folders and name below the cache, where the record of its first use is.
        sha256: what the caller asked for, None for nothing.
        stated: what the file's publisher states, "" for nothing.

    Raises:
        ValueError: the file is not what it should be.
        OSError: it cannot be read.
    """
    path = cache_folder().joinpath(*place)
    _check_owner(path)
    digest = checksums.digest_of(file)
    if stated and digest != stated:
        raise ValueError(
            f"{file} has the SHA-256 {digest}, and its publisher states {stated}: delete it to "
            "download it again."
        )
    _use(file, path, digest, checksums.checked_sha256(sha256))


def hub_parts(address: str, *, suffixes: tuple[str, ...]) -> tuple[str, str | None, str | None]:
    """Returns the repository, and the revision and the file where an address says them.

    Raises:
        ValueError: it is no address on the Hub, or its file has none of the suffixes.
    """
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([^@/\s?#]+))?(?:/([^@\s?#]+))?", address)
    if match is None:
        raise ValueError(
            f"A Hub address is hf://owner/name. Received: {shown(address)!r}; after the name may "
            "come @revision, and then /file."
        )
    repository, revision, file = match.groups()
    if file is not None and (not file.endswith(suffixes) or ".." in file.split("/")):
        raise ValueError(
            f"A file on the Hub that holds weights ends in {', '.join(suffixes)}. "
            f"Received: {shown(address)!r}."
        )
    return repository, revision and urllib.parse.unquote(revision), file


def fetch_from_hub(
    address: str,
    repository: str,
    name: str,
    *,
    revision: str | None,
    sha256: str | None = None,
) -> tuple[Path, str]:
    """Returns the local copy of one file of a repository, verified, and its commit.

    Args:
        address: what the caller wrote, for errors.
        repository: "owner/name".
        name: the file's, with its folders.
        revision: branch, tag or commit; None for the Hub's default.
        sha256: the file's SHA-256, where the caller knows it.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it could not be fetched.
        ValueError: it is not what the Hub, an earlier use or the caller says.
    """
    hub = _hub_library(address)
    try:
        path = Path(hub.hf_hub_download(repository, name, revision=revision))
    except (hub.errors.HfHubHTTPError, OSError, ValueError, hub.errors.EntryNotFoundError) as error:
        is_local = isinstance(error, hub.errors.LocalEntryNotFoundError)  # for lack of a network
        if isinstance(error, hub.errors.EntryNotFoundError) and not is_local:
            message = f"{address} has no {name}; check the name and the revision."
            raise FileNotFoundError(message) from None
        reason = plain(str(error).partition("\n")[0])
        raise OSError(
            f"{address} could not be fetched ({reason}); download its {name} and what is beside it "
            "into one folder, and pass the path of the file of weights."
        ) from None
    # The Hub's library keeps snapshots/<commit>/<name>, a link to blobs/<ETag>; a large file's ETag
    # is its SHA-256 ("Understand caching" in its documentation).
    commit = path.parents[name.count("/")].name
    link = Path(path.readlink()) if path.is_symlink() else path
    is_sha256 = link.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", link.name)
    host = urllib.parse.urlsplit(hub.constants.ENDPOINT).netloc.rpartition("@")[2]
    verify(
        path,
        place=(f"hub+{host.replace(':', '_')}", *repository.split("/"), commit, *name.split("/")),
        sha256=sha256,
        stated=link.name if is_sha256 else "",
    )
    return path, commit


def _is_usable(piece: str) -> bool:
    is_name = piece not in (".", "..") and not re.search(r'[\\:*?"<>|\x00-\x1f\x7f]', piece)
    return is_name and not piece.endswith(_SIDE_FILES) and len(piece.encode()) <= _LONGEST_NAME


def cache_folder() -> Path:
    """Returns the folder of this package among those that Keras keeps for the user."""
    # Keras has no public name for its folder. This is the rule that keras.utils.get_file documents;
    # tests/test_weights_download_processes.py compares the two.
    if keras_home := os.environ.get("KERAS_HOME"):
        return Path(keras_home).expanduser() / "models" / "keras_vit"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is none
    writable = home if os.access(home, os.W_OK) else Path("/tmp")  # noqa: S108 - its owner is checked
    return writable / ".keras" / "models" / "keras_vit"


def _path_pieces(parts: urllib.parse.SplitResult) -> list[str]:
    path = urllib.parse.unquote(parts.path, errors="strict")
    return [piece for piece in path.split("/") if piece]


def source_of(url: str) -> str | Path:
    """Returns where `fetch` looks for the file of a URL: there, or in the mirror that is set."""
    mirror = os.environ.get(MIRROR_SETTING)
    parts = urllib.parse.urlsplit(url)
    if not mirror or (parts.scheme, parts.netloc) != ("https", _GOOGLE_STORAGE):
        return url
    below_bucket = _path_pieces(parts)[1:]
    if mirror.startswith(("http://", "https://")):
        return f"{mirror.rstrip('/')}/{urllib.parse.quote('/'.join(below_bucket))}"
    if "://" in mirror.removeprefix("file://"):
        raise ValueError(
            f"{MIRROR_SETTING} is an http or https URL, or a folder. Received: {shown(mirror)!r}."
        )
    return Path(mirror.removeprefix("file://")).expanduser().joinpath(*below_bucket)


def _hub_library(address: str) -> Any:
    with environment.installed(f"{address} needs the library huggingface-hub", "huggingface-hub"):
        import huggingface_hub
    return huggingface_hub


def _partial_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


class _DamagedError(ValueError):
    """What came is not what was sent: another download may mend it."""


def _download(
    url: str,
    path: Path,
    sha256: str | None,
    *,
    progress: bool | None,
    wait: Callable[[float], None],
) -> Path:
    partial = _partial_path(path)
    advice = (
        f"connect to the network, put the file at {path}, "
        f"or set {MIRROR_SETTING} to a URL or folder that has it"
    )
    largest = checksums.LARGEST_JSON if path.name.endswith(".json") else None
    for last in (False, True):
        with transfer.DownloadProgress(path.name, show=progress) as bar:
            stated = transfer.download(
                url, partial, advice=advice, progress=bar, wait=wait, largest=largest
            )
        try:
            digest = _checked_digest(partial, path, stated, sha256, advice=advice)
            break
        except _DamagedError as error:
            transfer.discard(partial)
            if last:
                raise ValueError(
                    f"{stated.url} arrived damaged twice ({error}): {advice}."
                ) from None
            _LOGGER.warning("%s arrived damaged (%s); downloading it again.", stated.url, error)
        except ValueError:
            transfer.discard(partial)
            raise
    _write_record(path, digest)
    _close(partial)
    partial.replace(path)
    atomic.sync_folder(path.parent)
    transfer.discard(partial)
    return path


def _checked_digest(
    partial: Path, path: Path, stated: transfer.Stated, sha256: str | None, *, advice: str
) -> str:
    """Returns the SHA-256 of the downloaded file after all checks of it."""
    if not (stated.framed or stated.hashes or stated.sha256 or checksums.structured(path.name)):
        raise ValueError(
            f"{stated.url} comes without a length and without a checksum, so that a cut "
            f"file would go unseen: {advice}."
        )
    digest = checksums.digest_of(partial)
    if description := checksums.junk(partial, name=path.name):
        raise ValueError(
            f"{stated.url} answered with {description} instead of {path.name}: {advice}."
        )
    try:
        checksums.check_stated(partial, stated=stated.hashes)
    except ValueError as error:
        raise _DamagedError(str(error)) from error
    if stated.sha256 not in ("", digest):
        raise _DamagedError(f"the server states sha256={stated.sha256}, the bytes have {digest}")
    _compare(digest, stated.url, path, sha256)
    try:
        checksums.check_structure(partial, name=path.name)
    except ValueError as error:
        raise _DamagedError(str(error)) from error
    return digest


def _verify_local(file: Path, path: Path, sha256: str | None) -> Path:
    _use(file, path, checksums.digest_of(file), sha256)
    return file


def _use(file: Path, path: Path, digest: str, sha256: str | None) -> None:
    """Compares a local file with what is known of it; at its first use, records it."""
    _compare(digest, str(file), path, sha256)
    if _record(path).exists():
        return
    try:
        checksums.check_structure(file, name=path.name)
    except ValueError as error:
        description = checksums.junk(file, name=path.name)
        raise ValueError(
            f"{file} is {description or f'damaged ({error})'}: delete it to download it again."
        ) from None
    _write_record(path, digest)


def _compare(digest: str, subject: str, path: Path, sha256: str | None) -> None:
    if sha256 is not None and digest != sha256:
        raise ValueError(
            f"{subject} has the SHA-256 {digest}, and {sha256} was asked for: "
            f"delete it where it is a local file, and get it from its publisher again."
        )
    record = _record(path)
    digests = record.read_text(errors="replace").split() if record.exists() else [digest]
    if digests[:1] != [digest]:
        raise ValueError(
            f"{subject} has the SHA-256 {digest}, and {record} holds another one from its first "
            f"use: delete that record if the new content is right, the local file otherwise."
        )


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _write_record(path: Path, digest: str) -> None:
    # The format of `sha256sum`, so that `sha256sum --check` works too.
    record = _record(path)
    try:
        _make_folder(record.parent)
        with atomic.whole_file(record) as fresh:
            fresh.write_text(f"{digest}  {path.name}\n")
            _close(fresh)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _LOGGER.warning(
            "Cannot record the SHA-256 of %s (%s); changes to it will go unseen.", path, error
        )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    # The operating system drops this lock when its holder dies, however it dies.
    lock = filelock.FileLock(f"{path}.lock")
    try:
        _make_folder(path.parent)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            _LOGGER.info("Another process is downloading %s; waiting for it.", path.name)
            lock.acquire()
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: cannot write to {path.parent}; "
            f"set KERAS_HOME to a folder that you can write to.",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _make_folder(folder: Path) -> None:
    """Makes folders that others may not write to, whatever the process' umask says."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o755, exist_ok=True)


def _close(file: Path) -> None:
    """Takes the right to write to a file from all others; a umask may have left it."""
    file.chmod(stat.S_IMODE(file.stat().st_mode) & ~stat.S_IWOTH)


def _check_owner(path: Path) -> None:
    """Raises a PermissionError if another user could have put the file at `path` there.

    The cache, from Keras' own folder down to the file and its record, belongs to this user or to
    root, and is not writable by all; above our own folder a sticky one, as /tmp is, may be.
    """
    if not hasattr(os, "getuid"):  # Windows
        return
    cache = cache_folder()
    below = [folder for folder in path.parents if folder.is_relative_to(cache)]
    for place in (*cache.parents[1::-1], *reversed(below), path, _record(path)):
        try:
            status = place.stat()
        except OSError:  # not there yet
            continue
        is_sticky = status.st_mode & stat.S_ISVTX and place in cache.parents
        reason = None
        if status.st_uid not in (os.getuid(), 0):
            reason = f"belongs to another user (number {status.st_uid})"
        elif status.st_mode & stat.S_IWOTH and not is_sticky:
            reason = "may be written to by anyone (chmod o-w takes that away)"
        if reason is not None:
            raise PermissionError(
                errno.EPERM,
                f"{place} {reason}, so that what is kept there cannot be trusted; set KERAS_HOME "
                "to a folder of your own.",
            )
