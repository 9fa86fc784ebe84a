"""Moves the bytes behind a URL into a partial file: resumes, retries, never joins two versions."""

import contextlib
import dataclasses
import errno
import http.client
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from keras_vit.weights.connection import InterruptedTransferError, Pace, open_url, plain, shown

if TYPE_CHECKING:
    import rich.progress


_LOGGER = logging.getLogger("keras_vit.weights")
_MIB = 2**20


class DownloadProgress(contextlib.AbstractContextManager["DownloadProgress"]):
    """Reports one download.

    Args:
        name: what to call the file.
        show: whether to draw the bar on standard error; None draws it when that is a terminal.
    """

    def __init__(self, name: str, *, show: bool | None) -> None:
        self._name = name
        self._started = time.monotonic()
        self._bar = _bar() if (sys.stderr.isatty() if show is None else show) else None
        self._task = self._bar.add_task(name, total=None) if self._bar is not None else None

    def begin(self, completed: int, total: int | None) -> None:
        """States how many bytes are here already, and how many there will be."""
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, completed=completed, total=total)
        size = "unknown size" if total is None else f"{total / _MIB:.1f} MiB"
        already = f", {completed / _MIB:.1f} MiB of them already here" if completed else ""
        _LOGGER.info("Downloading %s: %s%s.", self._name, size, already)

    def advance(self, count: int) -> None:
        """Adds bytes that have arrived."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)

    def __enter__(self) -> "DownloadProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            _LOGGER.info("Downloaded %s in %.1f s.", self._name, time.monotonic() - self._started)


ATTEMPTS = 5  # in a row without a new byte
FIRST_WAIT = 1.0  # seconds before the second attempt; doubles from there
LONGEST_WAIT = 60.0  # seconds; a server's Retry-After is followed up to this
TIMEOUT = 20.0  # seconds without a byte
WINDOW = 60.0  # seconds in which LEAST_BYTES must arrive: a byte a second is no download
LEAST_BYTES = 60 * 2**10
LARGEST_UNSTATED = 2**36  # bytes of a body without a stated length; ten times the largest ViT
_CHUNK = 2**20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stated:
    """What a server states of a file: enough to recognise the version, and to check its bytes.

    Attributes:
        url: where the file is, as `shown` writes it: this is kept on the disk.
        length: its bytes; None when the server does not say.
        framed: whether the protocol itself shows a cut body (a length, or chunks with an end).
        etag: its entity tag, or "".
        modified: its Last-Modified date, or "".
        generation: Google Cloud Storage's version number, or "".
        hashes: its checksums as in the `x-goog-hash` header, or "".
        sha256: its SHA-256 as the Hugging Face Hub states it, or "".
    """

    url: str
    length: int | None
    framed: bool
    etag: str
    modified: str
    generation: str
    hashes: str
    sha256: str

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


def download(
    url: str,
    partial: Path,
    *,
    advice: str,
    progress: DownloadProgress,
    wait: Callable[[float], None],
    largest: int | None = None,
) -> Stated:
    """Brings `partial` to its full length, from where an earlier run left it.

    Args:
        url: an http or https URL; a user and password in it go to its own host alone.
        partial: where the bytes go; a `.json` beside it holds what the server states of them.
        advice: the end of the sentence in every error: what to do instead.
        progress: counts the bytes.
        wait: called with the seconds to let pass before another attempt.
        largest: bytes that a file may have; None for what the disk holds.

    Raises:
        FileNotFoundError: the server has no such file.
        ConnectionError: the server cannot be reached, refuses, is too slow, or broke off too often.
        ValueError: the answer is a web page, compressed, or too large.
        OSError: the disk is full.
    """
    failures, farthest, has_arrived = 0, _size(partial), False
    pace = Pace(window=WINDOW, least=LEAST_BYTES)
    while True:
        try:
            with pace.watching():
                return _attempt(
                    url, partial, advice=advice, progress=progress, pace=pace, largest=largest
                )
        except InterruptedTransferError as error:
            has_gained = _size(partial) > farthest
            has_arrived, failures = has_arrived or has_gained, 1 if has_gained else failures + 1
            farthest = max(farthest, _size(partial))
            if error.is_beyond:
                discard(partial)
            end = _end(error, failures, has_arrived=has_arrived, pace=pace)
            if end is not None:
                raise ConnectionError(f"{end[0]} {shown(url)} {end[1]}: {advice}.") from None
            own_pause = FIRST_WAIT * 2 ** (failures - 1)
            pause = min(max(own_pause, error.wait), LONGEST_WAIT)
            message = "The download of %s was interrupted (%s); trying again in %.0f s."
            _LOGGER.warning(message, shown(url), error, pause)
        wait(pause)
        if has_gained:
            pace.excuse(max(pause - own_pause, 0.0))
        else:
            pace.restart()


def discard(partial: Path) -> None:
    """Removes a partial file and what is known of it."""
    partial.unlink(missing_ok=True)
    _stated_path(partial).unlink(missing_ok=True)


def clean_up(partial: Path) -> None:
    """Removes the record that a process left which was killed once its file was in place."""
    if not partial.exists():
        with contextlib.suppress(OSError):  # the folder may be read-only
            _stated_path(partial).unlink(missing_ok=True)


def _bar() -> "rich.progress.Progress":
    import rich.console
    import rich.progress

    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=rich.console.Console(stderr=True),
    )


def _end(
    error: InterruptedTransferError, failures: int, *, has_arrived: bool, pace: Pace
) -> tuple[str, str] | None:
    """Returns how to say, around the address, that no further attempt is made; None for another."""
    if pace.is_late:
        return "Gave up on", f"after {pace}"
    if error.unreachable and not has_arrived:
        return "Cannot reach", f"({error})"
    if failures >= ATTEMPTS:
        return "Gave up on", f"after {failures} failures in a row ({error})"
    return None


def _attempt(
    url: str,
    partial: Path,
    *,
    advice: str,
    progress: DownloadProgress,
    pace: Pace,
    largest: int | None,
) -> Stated:
    """Asks once, for what is missing."""
    earlier = _read_stated(partial, url)
    start = _size(partial) if earlier and earlier.validator else 0
    if earlier and start and start == earlier.length:
        return earlier
    headers = {"User-Agent": "keras-vit", "Accept-Encoding": "identity"}
    if earlier and start:
        headers |= {"Range": f"bytes={start}-", "If-Range": earlier.validator}
    response, hub_headers = open_url(url, headers, advice=advice, timeout=TIMEOUT, pace=pace)
    with response:
        stated = _parse_stated(url, response, hub_headers)
        if response.status != 206:
            earlier, start = None, 0
        elif earlier is None or _range_start(response) != start or not earlier.same_version(stated):
            discard(partial)
            raise InterruptedTransferError("the server sent another part or version than requested")
        stated = earlier or stated
        progress.begin(start, stated.length)
        if not start:
            discard(partial)
        limit = _limit(partial, stated, start=start, largest=largest)
        _store(response, partial, stated, limit=limit, progress=progress, pace=pace)
    size = _size(partial)
    if stated.length is not None and size < stated.length:
        raise InterruptedTransferError(f"it broke off after {size:,} of {stated.length:,} bytes")
    if stated.length is None and pace.is_late:
        raise InterruptedTransferError("it was cut")
    return stated


def _limit(partial: Path, stated: Stated, *, start: int, largest: int | None) -> int:
    """Returns how many bytes `partial` may grow to."""
    free = shutil.disk_usage(partial.parent).free
    if stated.length is None:  # an endless body stops before the disk is full
        return min(start + free - free // 10, LARGEST_UNSTATED, largest or LARGEST_UNSTATED)
    if largest is not None and stated.length > largest:
        raise _too_large(stated, largest)
    if stated.length - start > free:
        raise _no_room(partial, stated, errno.ENOSPC)
    return stated.length


def _store(
    response: http.client.HTTPResponse,
    partial: Path,
    stated: Stated,
    *,
    limit: int,
    progress: DownloadProgress,
    pace: Pace,
) -> None:
    size = _size(partial)
    try:
        _stated_path(partial).write_text(json.dumps(dataclasses.asdict(stated)))
        with partial.open("ab") as file:
            for chunk in _chunks(response):
                size += len(chunk)
                if size > limit:
                    _refuse_excess(partial, stated, limit)
                file.write(chunk)
                progress.advance(len(chunk))
                pace.add(len(chunk))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        discard(partial)  # so that a full disk does not stay full
        raise _no_room(partial, stated, error.errno) from None


def _refuse_excess(partial: Path, stated: Stated, limit: int) -> NoReturn:
    free = shutil.disk_usage(partial.parent).free
    discard(partial)
    if stated.length is not None:
        raise InterruptedTransferError(f"more came than the {stated.length:,} bytes stated")
    if limit >= LARGEST_UNSTATED or limit < free:
        raise _too_large(stated, limit)
    raise _no_room(partial, stated, errno.ENOSPC)


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read1(_CHUNK)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise InterruptedTransferError(repr(error)) from error
        if not chunk:
            return
        yield chunk


def _too_large(stated: Stated, limit: int) -> ValueError:
    size = "an unknown number of" if stated.length is None else f"{stated.length:,}"
    return ValueError(
        f"{stated.url} brings {size} bytes, and at most {limit:,} are taken for such a file: check "
        "the address."
    )


def _no_room(partial: Path, stated: Stated, number: int) -> OSError:
    size = "" if stated.length is None else f" ({stated.length / 2**20:.0f} MiB)"
    return OSError(
        number,
        f"{os.strerror(number)}: there is no room in {partial.parent} for {stated.url}{size}; "
        f"free some space, or set KERAS_HOME to a folder on another disk.",
    )


def _parse_stated(
    url: str, response: http.client.HTTPResponse, hub_headers: dict[str, str]
) -> Stated:
    length = re.fullmatch(r"(\d{1,18})", response.headers.get("Content-Length", ""))
    if response.status == 206:
        length = re.search(r"/(\d{1,18})$", response.headers.get("Content-Range", ""))
    return Stated(
        url=shown(url),
        length=int(length[1]) if length else None,
        framed=length is not None or response.chunked,
        etag=_header(response, "ETag"),
        modified=_header(response, "Last-Modified"),
        generation=_header(response, "x-goog-generation"),
        hashes=plain(",".join(response.headers.get_all("x-goog-hash", [])), limit=200),
        sha256=_hub_sha256(response, hub_headers),
    )


def _header(response: http.client.HTTPResponse, name: str) -> str:
    """Returns a header that names a version, "" for one that could not be sent back."""
    text = response.headers.get(name, "")
    return text if text.isprintable() and len(text) <= 200 else ""


def _hub_sha256(response: http.client.HTTPResponse, hub_headers: dict[str, str]) -> str:
    """Returns the SHA-256 of a large file: the Hub's `X-Linked-ETag`, or the ETag beside a commit.

    Source: "Understand caching" in the documentation of huggingface_hub; a small file's ETag is a
    Git object's SHA-1.
    """
    own_headers = {name.lower(): text for name, text in response.headers.items()}
    for headers in (hub_headers, own_headers):
        tag = headers.get("x-linked-etag", headers.get("etag", ""))
        match = re.fullmatch(r'"?([0-9a-f]{64})"?', tag)
        if match and ("x-linked-etag" in headers or "x-repo-commit" in headers):
            return match[1]
    return ""


def _range_start(response: http.client.HTTPResponse) -> int | None:
    match = re.match(r"bytes (\d{1,18})-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _stated_path(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.json")


def _read_stated(partial: Path, url: str) -> Stated | None:
    try:
        stated = Stated(**json.loads(_stated_path(partial).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    texts = (stated.etag, stated.modified, stated.generation, stated.hashes, stated.sha256)
    is_sound = all(isinstance(text, str) and text.isprintable() for text in texts)
    is_sound = is_sound and (stated.length is None or type(stated.length) is int)
    return stated if is_sound and stated.url == shown(url) else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
