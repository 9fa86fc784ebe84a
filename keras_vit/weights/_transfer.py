"""Moves the bytes behind a URL into a partial file: resumes, retries, never joins two versions."""

import dataclasses
import errno
import http.client
import json
import logging
import os
import re
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from keras_vit.weights import _progress

ATTEMPTS = 5  # in a row without a new byte
FIRST_WAIT = 1.0  # seconds before the second attempt; doubles from there
LONGEST_WAIT = 60.0  # seconds; a server's Retry-After is followed up to this
TIMEOUT = 20.0  # seconds without a byte
_CHUNK = 2**20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TRANSIENT_STATUS = (408, 425, 429)
_LOGGER = logging.getLogger("keras_vit.weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stated:
    """What a server says of a file: enough to know the same version again, and to check its bytes.

    Attributes:
        url: where the file is.
        length: its bytes; None when the server does not say.
        framed: whether the protocol itself shows a cut body (a length, or chunks with an end).
        etag: its entity tag, or "".
        modified: its Last-Modified date, or "".
        generation: Google Cloud Storage's version number, or "".
        hashes: its checksums as in the `x-goog-hash` header, or "".
    """

    url: str
    length: int | None
    framed: bool
    etag: str
    modified: str
    generation: str
    hashes: str

    @property
    def validator(self) -> str:
        """What to send as If-Range; "" if the server gave nothing by which a version is known."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.modified

    def same_version(self, other: "Stated") -> bool:
        """Whether both answers name a version, and everything that both state is equal."""
        names = ("etag", "modified", "generation")
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        named = [mine == theirs for mine, theirs in pairs if mine and theirs]
        same_length = None in (self.length, other.length) or self.length == other.length
        return any(named) and all(named) and same_length


class _InterruptedError(Exception):
    """A transfer that another attempt may finish."""

    def __init__(self, reason: object, *, wait: float = 0.0, unreachable: bool = False) -> None:
        super().__init__(str(reason))
        self.wait = wait
        self.unreachable = unreachable


def download(
    url: str,
    partial: Path,
    *,
    advice: str,
    progress: _progress.DownloadProgress,
    wait: Callable[[float], None],
) -> Stated:
    """Brings `partial` to its full length, from where an earlier run left it.

    Args:
        url: an http or https URL.
        partial: where the bytes go; a `.json` beside it holds what the server said of them.
        advice: the end of the sentence in every error: what to do instead.
        progress: told of every byte.
        wait: called with the seconds to let pass before another attempt.

    Raises:
        FileNotFoundError: the server has no such file.
        ConnectionError: the server cannot be reached, refuses, or broke off too often.
        ValueError: the answer is a web page.
        OSError: the disk is full.
    """
    failures, farthest, arrived = 0, _size(partial), False
    while True:
        try:
            return _attempt(url, partial, advice=advice, progress=progress)
        except _InterruptedError as error:
            arrived = arrived or _size(partial) > farthest
            failures = 1 if _size(partial) > farthest else failures + 1
            farthest = max(farthest, _size(partial))
            if error.unreachable and not arrived:
                raise ConnectionError(f"Cannot reach {url} ({error}): {advice}.") from error
            if failures >= ATTEMPTS:
                raise ConnectionError(
                    f"Gave up on {url} after {failures} failures in a row ({error}): {advice}."
                ) from error
            pause = min(max(FIRST_WAIT * 2 ** (failures - 1), error.wait), LONGEST_WAIT)
            _LOGGER.warning(
                "The download of %s was interrupted (%s); trying again in %.0f s.",
                url,
                error,
                pause,
            )
        wait(pause)


def discard(partial: Path) -> None:
    """Removes a partial file and what is known of it."""
    partial.unlink(missing_ok=True)
    _stated_path(partial).unlink(missing_ok=True)


def _attempt(
    url: str, partial: Path, *, advice: str, progress: _progress.DownloadProgress
) -> Stated:
    kept = _read_stated(partial, url)
    start = _size(partial) if kept and kept.validator else 0
    if kept and start and start == kept.length:
        return kept
    headers = {"User-Agent": "keras-vit", "Accept-Encoding": "identity"}
    if kept and start:
        headers |= {"Range": f"bytes={start}-", "If-Range": kept.validator}
    with _open(urllib.request.Request(url, headers=headers), partial, advice) as response:
        stated = _stated(url, response)
        if response.status != 206:
            kept, start = None, 0
        elif kept is None or _range_start(response) != start or not kept.same_version(stated):
            discard(partial)
            raise _InterruptedError("the server sent another part or version than was asked for")
        stated = kept or stated
        progress.begin(start, stated.length)
        if not start:
            discard(partial)
        if (stated.length or 0) - start > shutil.disk_usage(partial.parent).free:
            raise _no_room(partial, stated, errno.ENOSPC)
        try:
            _store(response, partial, stated, progress=progress)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            discard(partial)  # so that a full disk does not stay full
            raise _no_room(partial, stated, error.errno) from error
    if stated.length is not None and _size(partial) < stated.length:
        raise _InterruptedError(f"it broke off after {_size(partial):,} of {stated.length:,} bytes")
    return stated


def _store(
    response: http.client.HTTPResponse,
    partial: Path,
    stated: Stated,
    *,
    progress: _progress.DownloadProgress,
) -> None:
    _stated_path(partial).write_text(json.dumps(dataclasses.asdict(stated)))
    with partial.open("ab") as file:
        for chunk in _chunks(response):
            file.write(chunk)
            progress.advance(len(chunk))
        file.flush()
        os.fsync(file.fileno())


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read1(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _InterruptedError(repr(error)) from error
        if not chunk:
            return
        yield chunk


def _no_room(partial: Path, stated: Stated, number: int) -> OSError:
    size = "" if stated.length is None else f" ({stated.length / 2**20:.0f} MiB)"
    return OSError(
        number,
        f"{os.strerror(number)}: there is no room in {partial.parent} for {stated.url}{size}; "
        f"free some space, or set KERAS_HOME to a folder on another disk.",
    )


def _open(request: urllib.request.Request, partial: Path, advice: str) -> http.client.HTTPResponse:
    url = request.full_url
    try:
        # A new opener each time: it reads the proxy settings of the environment when it is made.
        opener = urllib.request.build_opener()
        response: http.client.HTTPResponse = opener.open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error, url, partial, advice) from error
    except urllib.error.URLError as error:
        raise _InterruptedError(error.reason, unreachable=not _transient(error.reason)) from error
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(repr(error)) from error
    if response.headers.get_content_type() in ("text/html", "application/xhtml+xml"):
        response.close()
        raise ValueError(
            f"{url} answered with a web page instead of a file (a sign-in page, perhaps): {advice}."
        )
    return response


def _refusal(error: urllib.error.HTTPError, url: str, partial: Path, advice: str) -> Exception:
    status = f"{error.code} {error.reason}"
    if error.code in (404, 410):
        return FileNotFoundError(
            f"There is no file at {url} ({status}): check the name, or {advice}."
        )
    if error.code == 416:
        discard(partial)
    elif error.code < 500 and error.code not in _TRANSIENT_STATUS:
        return ConnectionError(f"{url} was refused ({status}): {advice}.")
    after = error.headers.get("Retry-After", "")
    return _InterruptedError(status, wait=float(after) if after.isdigit() else 0.0)


def _transient(reason: object) -> bool:
    # Connection resets and time-outs pass; a refused connection, an unknown host or a bad
    # certificate means that there is no way to the server from here.
    if isinstance(reason, ssl.SSLCertVerificationError):
        return False
    return isinstance(reason, ConnectionResetError | BrokenPipeError | TimeoutError | ssl.SSLError)


def _stated(url: str, response: http.client.HTTPResponse) -> Stated:
    length = response.headers.get("Content-Length")
    if response.status == 206:
        length = (re.search(r"/(\d+)$", response.headers.get("Content-Range", "")) or ["", None])[1]
    return Stated(
        url=url,
        length=int(length) if length is not None else None,
        framed=length is not None or response.chunked,
        etag=response.headers.get("ETag", ""),
        modified=response.headers.get("Last-Modified", ""),
        generation=response.headers.get("x-goog-generation", ""),
        hashes=",".join(response.headers.get_all("x-goog-hash", [])),
    )


def _range_start(response: http.client.HTTPResponse) -> int | None:
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _stated_path(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.json")


def _read_stated(partial: Path, url: str) -> Stated | None:
    try:
        stated = Stated(**json.loads(_stated_path(partial).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return stated if stated.url == url else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
