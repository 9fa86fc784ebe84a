"""Brings a published file to this machine: one verified local copy per URL, whatever breaks.

Files live under Keras' own cache, one folder per source directory, each with the SHA-256 of its
first use beside it:

    <KERAS_HOME or ~/.keras>/models/keras_vit/vit_models/imagenet21k/ViT-B_16.npz
                                                                     ViT-B_16.npz.sha256

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
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from keras_vit import atomic
from keras_vit.weights import _checksums, _progress, _transfer

MIRROR_SETTING = "KERAS_VIT_MIRROR"

_GOOGLE_STORAGE = "storage.googleapis.com"
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

    An interrupted download is resumed. A new file is checked against its length, the server's
    checksum header (`x-goog-hash`) and, for .npz, the archive's own CRCs before it appears under
    its name. Its SHA-256 is recorded on first use and compared at every later one. Any number of
    processes may ask at once.

    The environment variable KERAS_VIT_MIRROR replaces `https://storage.googleapis.com/<bucket>` by
    another URL or by a local folder, whose files are then used where they are:
    `<mirror>/imagenet21k/ViT-B_16.npz`.

    Example:
        >>> url = "https://storage.googleapis.com/vit_models/augreg/index.csv"
        >>> path = fetch(url)  # doctest: +SKIP

    Args:
        url: an http or https URL that names a file. Proxies are taken from the usual environment
            variables.
        sha256: the file's SHA-256 in hexadecimal, when it is known.
        progress: whether to draw a progress bar; None draws it when standard error is a terminal.
        wait: called with the seconds to wait before another attempt.

    Returns:
        The path of the file; do not write to it.

    Raises:
        ValueError: the URL names no file, or the file is not what it should be.
        FileNotFoundError: the server or the mirror folder has no such file.
        ConnectionError: the server cannot be reached.
        OSError: the disk is full or not writable.
    """
    path = cached_path(url)
    if path.is_file():
        return _verified(path, path, sha256)
    source = _source(url)
    if isinstance(source, Path):
        if not source.is_file():
            raise FileNotFoundError(
                f"{MIRROR_SETTING} names a folder without {source}: put the file from {url} there, "
                f"or unset {MIRROR_SETTING}."
            )
        return _verified(source, path, sha256)
    with _locked(path):
        if path.is_file():  # another process was faster
            return _verified(path, path, sha256)
        return _download(source, path, sha256, progress=progress, wait=wait)


def cached_path(url: str) -> Path:
    """Returns where `fetch` keeps the file of a URL, whether or not it is there.

    Example:
        >>> cached_path("https://storage.googleapis.com/vit_models/sam/ViT-B_16.npz").parts[-3:]
        ('vit_models', 'sam', 'ViT-B_16.npz')

    Raises:
        ValueError: the URL is not http or https, or names no file.
    """
    parts = urllib.parse.urlsplit(url)
    pieces = _path_pieces(parts)
    bad = not pieces or parts.path.endswith("/") or pieces[-1].endswith(_SIDE_FILES)
    if parts.scheme not in ("http", "https") or not parts.hostname or bad or re.search(r"\s", url):
        raise ValueError(
            f"A download needs an http or https URL that names a file. Received: {url!r}."
        )
    if parts.netloc != _GOOGLE_STORAGE:
        pieces.insert(
            0, re.sub(r"[^\w.-]", "_", f"{parts.hostname}_{parts.port or ''}".rstrip("_"))
        )
    if parts.query:
        pieces.insert(-1, hashlib.sha256(parts.query.encode()).hexdigest()[:12])
    if any(piece in (".", "..") or re.search(r'[\\:*?"<>|\0]', piece) for piece in pieces):
        raise ValueError(f"A URL's folders must be usable as folders on disk. Received: {url!r}.")
    return _cache_folder().joinpath(*pieces)


def _cache_folder() -> Path:
    # Keras has no public name for its folder. This is the rule that keras.utils.get_file documents;
    # tests/test_weights_download.py compares the two.
    if keras_home := os.environ.get("KERAS_HOME"):
        return Path(keras_home).expanduser() / "models" / "keras_vit"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is none
    writable = home if os.access(home, os.W_OK) else Path("/tmp")
    return writable / ".keras" / "models" / "keras_vit"


def _path_pieces(parts: urllib.parse.SplitResult) -> list[str]:
    return [piece for piece in urllib.parse.unquote(parts.path).split("/") if piece]


def _source(url: str) -> str | Path:
    mirror = os.environ.get(MIRROR_SETTING)
    parts = urllib.parse.urlsplit(url)
    if not mirror or parts.netloc != _GOOGLE_STORAGE:
        return url
    below_bucket = _path_pieces(parts)[1:]
    if mirror.startswith(("http://", "https://")):
        return f"{mirror.rstrip('/')}/{urllib.parse.quote('/'.join(below_bucket))}"
    return Path(mirror.removeprefix("file://")).expanduser().joinpath(*below_bucket)


def _download(
    url: str,
    path: Path,
    sha256: str | None,
    *,
    progress: bool | None,
    wait: Callable[[float], None],
) -> Path:
    partial = path.with_name(f"{path.name}.partial")
    _transfer_whole(url, partial, path, progress=progress, wait=wait)
    digest = _checksums.sha256(partial)
    try:
        _compare(digest, url, path, sha256)
    except ValueError:
        _transfer.discard(partial)
        raise
    _write_record(path, digest)
    partial.replace(path)
    atomic.sync_folder(path.parent)
    _transfer.discard(partial)
    return path


def _transfer_whole(
    url: str,
    partial: Path,
    path: Path,
    *,
    progress: bool | None,
    wait: Callable[[float], None],
) -> None:
    advice = (
        f"connect to the network, put the file at {path}, "
        f"or set {MIRROR_SETTING} to a URL or folder that has it"
    )
    for last in (False, True):
        with _progress.DownloadProgress(path.name, show=progress) as bar:
            stated = _transfer.download(url, partial, advice=advice, progress=bar, wait=wait)
        if not (stated.framed or stated.hashes or path.name.endswith(_checksums.ARCHIVES)):
            _transfer.discard(partial)
            raise ValueError(
                f"{url} comes without a length and without a checksum, so that a whole file cannot "
                f"be told from a cut one: {advice}."
            )
        try:
            _checksums.check_stated(partial, stated=stated.hashes)
            _checksums.check_archive(partial, name=path.name)
            return
        except ValueError as error:
            _transfer.discard(partial)
            if last:
                raise ValueError(f"{url} arrived damaged twice ({error}): {advice}.") from error
            _LOGGER.warning("%s arrived damaged (%s); downloading it again.", url, error)


def _verified(file: Path, path: Path, sha256: str | None) -> Path:
    digest = _checksums.sha256(file)
    _compare(digest, str(file), path, sha256)
    if not _record(path).exists():
        try:
            _checksums.check_archive(file, name=path.name)
        except ValueError as error:
            raise ValueError(
                f"{file} is damaged ({error}): delete it to download it again."
            ) from error
        _write_record(path, digest)
    return file


def _compare(digest: str, subject: str, path: Path, sha256: str | None) -> None:
    if sha256 is not None and digest != sha256.lower():
        raise ValueError(
            f"{subject} has the SHA-256 {digest}, and {sha256.lower()} was asked for: "
            f"delete it where it is a local file, and get it from its publisher again."
        )
    record = _record(path)
    recorded = record.read_text().split() if record.exists() else [digest]
    if recorded[:1] != [digest]:
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
        record.parent.mkdir(parents=True, exist_ok=True)
        with atomic.whole_file(record) as fresh:
            fresh.write_text(f"{digest}  {path.name}\n")
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _LOGGER.warning(
            "Cannot record the SHA-256 of %s (%s); changes to it will go unseen.", path, error
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The operating system drops this lock when its holder dies, however it dies.
    lock = filelock.FileLock(f"{path}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
