"""Brings a published file to this machine: one verified local copy per URL, whatever breaks.

Files live in Keras' own cache, each with the SHA-256 of its first download beside it:

    <KERAS_HOME or ~/.keras>/models/keras_vit/vit_models/imagenet21k/ViT-B_16.npz
                                                                     ViT-B_16.npz.sha256

`ViT-B_16.npz.partial` is a download that was interrupted, `ViT-B_16.npz.version` says of what
version, and `ViT-B_16.npz.lock` keeps two processes apart; all may be deleted when no process is
running. A kept file is read whole at every use (about a second per GB), because its size and its
date would not show damage.
"""

import base64
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import ssl
import struct
import sys
import time
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import filelock
import google_crc32c
import h5py
import requests
import safetensors
import urllib3
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from keras_vit import atomic
from keras_vit.limits import short

MIRROR_SETTING = "KERAS_VIT_MIRROR"
# How the name of a list of .safetensors files ends that hold one model's arrays between them.
SHARD_INDEX = ".safetensors.index.json"
ATTEMPTS = 5  # in a row without a new byte
LONGEST_WAIT = 60.0  # seconds between attempts: they double from 1 on, or are the server's wish
TIMEOUT = 20.0  # seconds without a byte
LARGEST = 2**36  # bytes of a file; twice those of the largest ViT
LARGEST_JSON = 2**24  # bytes; a config.json with the names of 21,843 classes has 1.5 million

_GOOGLE_STORAGE = "storage.googleapis.com"
_ARCHIVES = (".npz", ".keras")
_FORMATS = (*_ARCHIVES, ".safetensors", ".h5", ".json")
# Names that a disk can have too, and that the cache has not for files of its own.
_NAME = re.compile(r'(?!\.\.?$|.*\.(partial|version|sha256|lock)$)[^\\:*?"<>|\x00-\x1f\x7f]{1,200}')
# What an archive may unpack to: weights hardly deflate, but heads of zeros do, a thousandfold.
_UNPACKED_RATIO, _UNPACKED_FREE = 20, 2**26
_READ_ERRORS = (
    *(OSError, ValueError, RuntimeError, EOFError, OverflowError, struct.error, zlib.error),
    *(zipfile.BadZipFile, safetensors.SafetensorError),
)
AGAIN = "delete it where it is a local file, and get it from its publisher again"
_LOGGER = logging.getLogger("keras_vit.weights")
_SENDABLE = r"[\x20-\x7e]+"  # of an entity tag or a date that can be sent back
_Wait = Callable[[float], None]


class DamagedError(ValueError):
    """A file is not what was sent: another download may bring that."""


class InterruptedTransferError(Exception):
    """A request that another attempt may finish, after the seconds that the server asks for."""

    def __init__(self, reason: object, *, wait: float = 0.0, unreachable: bool = False) -> None:
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        super().__init__(printable(text))
        self.wait, self.unreachable = wait, unreachable


def fetch(url: str, *, sha256: str | None = None, wait: _Wait = time.sleep) -> Path:
    """Returns a verified local copy of the file behind a URL, downloading it if need be.

    An interrupted download is resumed. Before a new file appears under its name, it is checked
    against its length, the server's checksum (`x-goog-hash`, or the Hugging Face Hub's SHA-256) and
    its format. Its SHA-256 is stored then, and compared at every later use (trust on first use).
    Any number of processes may ask at once.

    KERAS_VIT_MIRROR is another URL, or a folder whose files are used where they are, in place of
    `https://storage.googleapis.com/<bucket>`.

    Args:
        url: http or https; a user and password in it go to its own host alone.
        sha256: the file's, in small letters; compared before the file is read as what it is.
        wait: called with the seconds to wait before another attempt.

    Raises:
        ValueError: the URL names no file of weights, or the file is not what it should be.
        FileNotFoundError: the server or the mirror folder has no such file.
        ConnectionError: the server cannot be reached, refuses, or broke off too often.
        OSError: the disk is full or not writable.
    """
    path = cached_path(url)
    source = path if path.is_file() else source_of(url)
    if isinstance(source, str):
        kept = f"{redact_url(url)} was not downloaded"
        again = "try again, or set KERAS_HOME to a folder that you can write to"
        with atomic.explain_errors(path, kept=kept, again=again):
            path.parent.mkdir(parents=True, exist_ok=True)
            # The operating system drops this lock when its holder dies, however it dies.
            with filelock.FileLock(f"{path}.lock"):
                if not path.is_file():  # another process may have been faster
                    return _download(source, path, sha256, wait)
        source = path
    if not source.is_file():
        raise FileNotFoundError(
            f"{MIRROR_SETTING} names a folder without {source}: put the file from "
            f"{redact_url(url)} there, or unset {MIRROR_SETTING}."
        )
    verify(source, path, str(source), sha256=sha256)
    return source


def cached_path(url: str) -> Path:
    """Returns where `fetch` keeps the file of a URL, whether or not it is there.

    A file that came over http and not https has a place of its own, below `http+<host>`.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host = re.sub(r"[^\w.-]", "_", f"{parts.hostname}_{parts.port or ''}".rstrip("_"))
        names = [host if parts.scheme == "https" else f"http+{host}", *_names(parts)]
        is_known = parts.scheme in ("http", "https") and parts.path.endswith(_FORMATS)
        if not parts.hostname or not is_known or not all(map(_NAME.fullmatch, names)):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"A download needs an http or https URL that names a {', '.join(_FORMATS)} file, in "
            f"folders that a disk can have too. Received: {redact_url(url)!r}."
        ) from None
    if parts.query:
        names.insert(-1, hashlib.sha256(parts.query.encode()).hexdigest()[:12])
    is_google = (parts.scheme, parts.netloc) == ("https", _GOOGLE_STORAGE)
    return cache_folder().joinpath(*names[is_google:])


def cache_folder() -> Path:
    """Returns the folder of this package among those that Keras keeps for the user."""
    # Keras has no public name for its folder. This is the rule that keras.utils.get_file documents;
    # tests/test_weights_download.py compares the two.
    if keras_home := os.environ.get("KERAS_HOME"):
        return Path(keras_home).expanduser() / "models" / "keras_vit"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is none
    writable = home if os.access(home, os.W_OK) else Path("/tmp")  # noqa: S108 - as Keras does
    return writable / ".keras" / "models" / "keras_vit"


def source_of(url: str) -> str | Path:
    """Returns where `fetch` looks for the file of a URL: there, or in the mirror that is set."""
    mirror = os.environ.get(MIRROR_SETTING)
    parts = urllib.parse.urlsplit(url)
    if not mirror or (parts.scheme, parts.netloc) != ("https", _GOOGLE_STORAGE):
        return url
    below_bucket, folder = _names(parts)[1:], mirror.removeprefix("file://")
    if mirror.startswith(("http://", "https://")):
        return f"{mirror.rstrip('/')}/{urllib.parse.quote('/'.join(below_bucket))}"
    if "://" in folder:
        text = f"{MIRROR_SETTING} is an http or https URL, or a folder. Received: "
        raise ValueError(f"{text}{redact_url(mirror)!r}.")
    return Path(folder).expanduser().joinpath(*below_bucket)


def _names(parts: urllib.parse.SplitResult) -> list[str]:
    path = urllib.parse.unquote(parts.path, errors="strict")
    return [name for name in path.split("/") if name]


def redact_url(url: str) -> str:
    """Returns a URL as messages, logs and files may hold it: no user, no password, no query."""
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port  # which a password with a slash in it seems to be
    except ValueError:
        return f"{printable(url.partition(':')[0])}://..."
    query = "..." if parts.query or parts.fragment else ""
    shown = parts._replace(netloc=re.sub("^.*@", "***@", parts.netloc), query=query, fragment="")
    return printable(shown.geturl(), limit=160)


def printable(text: str, *, limit: int = 100) -> str:
    """Returns a stranger's words for a message: printable, on one line, the middle cut out."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return short(text, limit)


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(file: Path, path: Path, subject: str, *, sha256: str | None, stated: str = "") -> None:
    """Compares a file with each SHA-256 that is known of it; stores that of a first download.

    The record is beside `path`, its place in the cache. Errors call the file `subject`; the caller
    asked for `sha256`, and the publisher states `stated`.
    """
    digest, record = digest_of(file), path.with_name(f"{path.name}.sha256")
    text = f"{subject} has the SHA-256 {digest}, and"
    if stated not in ("", digest):
        raise DamagedError(f"{text} its publisher states {stated}: {AGAIN}.")
    if sha256 not in (None, digest):
        raise ValueError(f"{text} {sha256} was asked for: {AGAIN}.")
    if not record.exists():
        check_structure(file, path.suffix, subject)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic.whole_file(record) as file:
                file.write_text(f"{digest}  {path.name}\n")  # as `sha256sum --check` takes it
        except OSError as error:
            message = "Cannot record the SHA-256 of %s (%s); changes to it will go unseen."
            _LOGGER.warning(message, path, error)
    elif record.read_text(errors="replace").split()[:1] != [digest]:
        raise ValueError(
            f"{text} {record} holds another one from its first download: delete that record if the "
            "new content is right, the local file otherwise."
        )


def check_structure(file: Path, suffix: str, subject: str) -> None:
    """Opens a file as what its suffix says, and reads an archive's members against their CRCs.

    Raises:
        DamagedError: the file is of another format, or not whole.
    """
    try:
        if suffix in _ARCHIVES:
            _check_archive(file)
        elif suffix == ".safetensors":
            with safetensors.safe_open(file, framework="numpy"):
                pass
        elif suffix == ".h5":
            h5py.File(file).close()
        elif file.stat().st_size > LARGEST_JSON or type(json.loads(file.read_bytes())) is not dict:
            raise ValueError(f"no JSON object of at most {LARGEST_JSON:,} bytes")
    except _READ_ERRORS as error:
        with file.open("rb") as opened:
            start = opened.read(16)
        reason = printable(str(error), limit=160)
        text = f"not a whole {suffix} file, {reason}, it begins with {start!r}"
        raise DamagedError(f"{subject} is damaged ({text}): {AGAIN}.") from None


def _check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members, size = archive.infolist(), path.stat().st_size
        unpacked_size = sum(member.file_size for member in members)
        if unpacked_size > _UNPACKED_FREE + _UNPACKED_RATIO * size:
            raise ValueError(f"{size:,} bytes unpack to {unpacked_size:,}")
        if any(member.compress_type not in (0, zipfile.ZIP_DEFLATED) for member in members):
            raise ValueError("a member is packed otherwise than stored or deflated")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the member {damaged!r} does not have its own CRC")


def check_hashes(file: Path, hashes: str, subject: str) -> None:
    """Compares a file with a server's `x-goog-hash` header, "crc32c=<base64>,md5=<base64>".

    The MD5 is compared when the header holds one, otherwise the CRC-32C (Google sends it alone for
    objects that were uploaded in parts).
    """
    kind = "md5" if "md5=" in hashes else "crc32c"
    stated = re.search(rf"{kind}=([^,\s]*)", hashes)
    hasher = hashlib.md5(usedforsecurity=False) if kind == "md5" else google_crc32c.Checksum()
    with file.open("rb") as opened:
        while stated and (chunk := opened.read(2**20)):
            hasher.update(chunk)
    digest = base64.b64encode(hasher.digest()).decode()
    if stated and stated[1] != digest:
        text = f"the server states {printable(stated[0])}, the bytes have {digest}"
        raise DamagedError(f"{subject} is damaged ({text}): {AGAIN}.")


class Session(requests.Session):
    """Follows redirects that are as safe as what they come from, and reads none of their bodies."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Returns where a response redirects to; closes it, as its body may have no end."""
        target: str | None = super().get_redirect_target(resp)
        if target:
            resp.close()
            parts = urllib.parse.urlsplit(urllib.parse.urljoin(resp.url, target))
            reason = "an address with a user name in it" if "@" in parts.netloc else ""
            if resp.url.startswith("https:") and parts.scheme == "http":
                reason = "http, and not https, where anyone on the way could change the file"
            if parts.scheme not in ("http", "https"):
                reason = "an address that is not http or https"
            if reason:
                raise ConnectionError(f"{redact_url(resp.url)} redirects to {reason}")
        return target

    def open(self, url: str, headers: dict[str, str], *, timeout: float) -> requests.Response:
        """Returns the answer to a request for a file or a part of it, its body unread.

        Raises InterruptedTransferError where another attempt may succeed, FileNotFoundError, and
        ConnectionError for what else is no answer with a file.
        """
        parts = urllib.parse.urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        # requests writes text as Latin-1: these are the bytes of UTF-8.
        name, _, password = urllib.parse.unquote_to_bytes(user).decode("latin-1").partition(":")
        try:
            response: requests.Response = self.get(
                parts._replace(netloc=host).geturl(),
                headers={"User-Agent": "keras-vit", "Accept-Encoding": "identity", **headers},
                auth=(name, password) if user else None,
                stream=True,
                timeout=timeout,
            )
        except requests.TooManyRedirects:
            raise ConnectionError(f"{redact_url(url)} redirects in a circle") from None
        except ValueError:  # of an address, or a header
            text = "gives, or redirects to, what cannot be read"
            raise ConnectionError(f"{redact_url(url)} {text}") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            cause = _cause(error)
            passing = (ConnectionResetError, BrokenPipeError, TimeoutError, ssl.SSLEOFError)
            is_lost = isinstance(cause, OSError) and not isinstance(cause, passing)
            raise InterruptedTransferError(cause, unreachable=is_lost) from None
        if refusal := _refusal(response, redact_url(url)):
            response.close()
            raise refusal
        return response


def _refusal(response: requests.Response, url: str) -> Exception | None:
    code, headers = response.status_code, response.headers
    status = f"{code} {printable(response.reason)}"
    if code in (404, 410):
        return FileNotFoundError(f"There is no file at {url} ({status})")
    if code >= 500 or code in (408, 425, 429):
        after = headers.get("Retry-After", "")
        return InterruptedTransferError(status, wait=float(after) if after.isdecimal() else 0.0)
    if code not in (200, 206, 416):
        return ConnectionError(f"{url} {'was refused' if code >= 400 else 'is no file'} ({status})")
    if headers.get("Content-Type", "").lower().startswith(("text/html", "application/xhtml+xml")):
        return ConnectionError(f"{url} answered with a web page (to sign in, perhaps), and no file")
    return None


def _cause(error: BaseException) -> BaseException:
    """Returns the first error of a chain; its text alone has no URL, and so no secret."""
    inner = (*error.args, getattr(error, "reason", None), error.__cause__)
    return next((_cause(each) for each in inner if isinstance(each, BaseException)), error)


def _download(url: str, path: Path, sha256: str | None, wait: _Wait) -> Path:
    partial, shown = path.with_name(f"{path.name}.partial"), redact_url(url)
    for is_last in (False, True):
        try:
            answer = _transfer(url, partial, wait)
            check_hashes(partial, answer.headers.get("x-goog-hash", ""), shown)
            verify(partial, path, shown, sha256=sha256, stated=_hub_sha256(answer))
            break
        except (FileNotFoundError, ConnectionError) as error:
            hint = "check the name, " if isinstance(error, FileNotFoundError) else ""
            raise type(error)(
                f"{error}: {hint}connect to the network, put the file at {path}, or set "
                f"{MIRROR_SETTING} to a URL or folder that has it."
            ) from None
        except ValueError as error:
            _discard(partial)
            if is_last or not isinstance(error, DamagedError):
                raise
            _LOGGER.warning("%s Downloading it again.", error)
    partial.with_suffix(".version").unlink(missing_ok=True)
    partial.replace(path)
    atomic.sync(path.parent)
    _LOGGER.info("Downloaded %s.", path.name)
    return path


def _transfer(url: str, partial: Path, wait: _Wait) -> requests.Response:
    shown, failures, start = redact_url(url), 0, _size(partial)
    farthest = start
    with (
        Session() as session,
        Progress(
            *Progress.get_default_columns(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty() or partial.stem.endswith(".json"),
        ) as bar,
    ):
        bar.add_task(partial.stem, total=None)
        while True:
            try:
                return _attempt(session, url, partial, bar)
            except InterruptedTransferError as error:
                failures = 1 if _size(partial) > farthest else failures + 1
                farthest = max(farthest, _size(partial))
                if error.unreachable and farthest == start:
                    raise ConnectionError(f"Cannot reach {shown} ({error})") from None
                if failures == ATTEMPTS:
                    text = f"Gave up on {shown} after {failures} failures in a row ({error})"
                    raise ConnectionError(text) from None
                pause = min(max(2.0 ** (failures - 1), error.wait), LONGEST_WAIT)
                message = "The download of %s was interrupted (%s); trying again in %.0f s."
                _LOGGER.warning(message, shown, error, pause)
            wait(pause)


def _attempt(session: Session, url: str, partial: Path, bar: Progress) -> requests.Response:
    notes, shown = partial.with_suffix(".version"), redact_url(url)
    start, headers = max(_size(partial) - 1, 0), {}  # a whole file, not yet checked, has a rest too
    text = notes.read_text(errors="replace") if notes.exists() else ""
    noted = text.removeprefix(f"{shown}\n")
    if start and noted != text and re.fullmatch(_SENDABLE, noted):
        headers = {"Range": f"bytes={start}-", "If-Range": noted}
    with session.open(url, headers, timeout=TIMEOUT) as answer:
        etag, date = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified", "")
        version = etag if etag and not etag.startswith("W/") else date
        pattern, name = rf"bytes {start}-\d+/(\d{{1,18}})", "Content-Range"
        if answer.status_code == 200:
            pattern, name, start = r"(\d{1,18})", "Content-Length", 0
        length = re.fullmatch(pattern, answer.headers.get(name, ""))
        if start and headers and length and version == noted:
            os.truncate(partial, start)
        else:
            _discard(partial)
            if answer.status_code != 200:
                raise InterruptedTransferError("another part or version came than was requested")
        if re.fullmatch(_SENDABLE, version):
            notes.write_text(f"{shown}\n{version}")
        total = int(length[1]) if length else None
        _LOGGER.info("Downloading %s: %d of %s bytes are here.", partial.stem, start, total)
        bar.reset(bar.task_ids[0], completed=start, total=total)
        _store(answer, partial, total, bar)
    return answer


def _store(answer: requests.Response, partial: Path, total: int | None, bar: Progress) -> None:
    size, largest = _size(partial), LARGEST_JSON if partial.stem.endswith(".json") else LARGEST
    limit = largest if total is None else min(total, largest)
    subject = redact_url((*answer.history, answer)[0].url)
    too_large = f"{subject} brings more than the {limit:,} bytes that it may have: {AGAIN}."
    if total is not None and total > limit:
        raise ValueError(too_large)
    if total is not None and total - size > shutil.disk_usage(partial.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        with partial.open("ab") as file:
            for chunk in iter(lambda: answer.raw.read1(2**18, decode_content=False), b""):
                size += len(chunk)
                if size > limit:
                    raise DamagedError(too_large)
                file.write(chunk)
                bar.advance(bar.task_ids[0], len(chunk))
            file.flush()
            os.fsync(file.fileno())
    except urllib3.exceptions.HTTPError as error:
        text = f"it broke off after {size:,} bytes ({InterruptedTransferError(_cause(error))})"
        raise InterruptedTransferError(text) from None
    except OSError:
        _discard(partial)  # so that a full disk does not stay full
        raise
    if total is not None and size < total:
        raise InterruptedTransferError(f"it broke off after {size:,} of {total:,} bytes")


def _hub_sha256(answer: requests.Response) -> str:
    # "Understand caching" in the documentation of huggingface_hub; a small file's ETag is a SHA-1.
    for headers in (each.headers for each in (*answer.history, answer)):
        tag = headers.get("ETag", "") if "X-Repo-Commit" in headers else ""
        if match := re.fullmatch(r'"?([0-9a-f]{64})"?', headers.get("X-Linked-ETag", tag)):
            return match[1]
    return ""


def _discard(partial: Path) -> None:
    partial.unlink(missing_ok=True)
    partial.with_suffix(".version").unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
