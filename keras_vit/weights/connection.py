"""Opens a URL, and bounds what the server of a stranger may do: redirects, time, words."""

import base64
import contextlib
import http.client
import re
import socket
import ssl
import string
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

_TRANSIENT_STATUS = (408, 425, 429)
_OTHER_SCHEME = "to an address that is not http or https"


class InterruptedTransferError(Exception):
    """A transfer that another attempt may finish.

    Args:
        reason: why it ended.
        wait: seconds that the server asks to wait.
        unreachable: whether there is no way to the server.
        is_beyond: whether what is here already is longer than the file.
    """

    def __init__(
        self,
        reason: object,
        *,
        wait: float = 0.0,
        unreachable: bool = False,
        is_beyond: bool = False,
    ) -> None:
        super().__init__(plain(str(reason)))
        self.wait = wait
        self.unreachable = unreachable
        self.is_beyond = is_beyond


def shown(url: str) -> str:
    """Returns a URL as messages, logs and files may hold it: no user, no password, no query.

    Example:
        >>> shown("https://me:secret@example.org/vit.npz?X-Amz-Signature=secret")
        'https://***@example.org/vit.npz?...'
    """
    match = re.match(r"([a-z][a-z0-9+.-]*)://([^/?#]*)([^?#]*)(.*)", url, re.IGNORECASE | re.DOTALL)
    if match is None:
        return plain(re.split("[?#]", url)[0], limit=160)
    scheme, host, path, query = match.groups()
    if "@" not in host and re.search(r":(?!\d*$)", re.sub(r"^\[[^]]*\]", "", host)):
        return f"{plain(scheme)}://..."  # a password with a slash or question mark in it
    host = re.sub(r"^.*@", "***@", host)
    return plain(f"{scheme}://{host}{path}{'?...' if query else ''}", limit=160)


def plain(text: str, *, limit: int = 100) -> str:
    """Returns a stranger's words for a message: printable, on one line, the middle cut out."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


class Pace:
    """Ends what hardly moves: `least` bytes must arrive in each window, or the connection is shut.

    A time-out sees silence alone, neither a byte a second nor headers without an end.
    """

    def __init__(
        self, *, window: float, least: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._window, self._least, self._now = window, least, now
        self._connections: list[socket.socket] = []
        self.restart()

    @property
    def is_late(self) -> bool:
        """Whether too little came in the time that there was."""
        return self._now() > self._deadline

    def __str__(self) -> str:
        return f"less than {self._least:,} bytes in {self._window:g} seconds"

    def restart(self) -> None:
        """Begins a new window."""
        self._deadline, self._gained = self._now() + self._window, 0

    def excuse(self, seconds: float) -> None:
        """Lengthens the window, by what the server asked to wait."""
        self._deadline += seconds

    def add(self, count: int) -> None:
        """Counts bytes that have arrived."""
        self._gained += count
        if self._gained >= self._least:
            self.restart()

    def hold(self, connection: socket.socket) -> None:
        """Takes a connection to shut; a duplicate, since TLS takes the original for itself."""
        self._connections.append(connection.dup())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Shuts the connections that are held when time is up; this unblocks any read of them."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            while self._connections:
                self._connections.pop().close()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(max(self._deadline - self._now(), 0.05)):
            for connection in tuple(self._connections) if self.is_late else ():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def open_url(
    url: str, headers: dict[str, str], *, advice: str, timeout: float, pace: Pace
) -> tuple[http.client.HTTPResponse, dict[str, str]]:
    """Returns the response to a request, and the headers of the Hub where it redirects to a file.

    Args:
        url: as in `download`; so is `advice`.
        headers: to send.
        timeout: seconds without a byte.
        pace: shuts the connection when it is late.

    Raises:
        InterruptedTransferError: another attempt may succeed.
        FileNotFoundError: the server has no such file.
        ConnectionError: the server refuses, or redirects to where it is not followed.
        ValueError: the answer is a web page, or compressed.
    """
    redirects = _Redirects()
    try:
        # A new opener each time: it reads the proxy settings of the environment when it is made.
        opener = urllib.request.build_opener(redirects, _Http(pace), _Https(pace))
        response: http.client.HTTPResponse = opener.open(_request(url, headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error, url, advice) from None
    except urllib.error.URLError as error:
        is_lost = not _transient(error.reason)
        raise InterruptedTransferError(error.reason, unreachable=is_lost) from error
    except (OSError, http.client.HTTPException) as error:
        raise InterruptedTransferError(repr(error)) from error
    except ValueError:  # urllib's, of an address
        raise ConnectionError(
            f"{shown(url)} is, or redirects to, an address that cannot be read: {advice}."
        ) from None
    try:
        _check_answer(response, url, advice)
    except (ValueError, ConnectionError):
        response.close()
        raise
    return response, redirects.hub_headers


class _RedirectError(urllib.error.HTTPError):
    """A redirect that is not followed; its reason is our own."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects that stay as safe as they began.

    Attributes:
        hub_headers: those of the Hub, whose answer with a file's SHA-256 is a redirect to the file.
    """

    def __init__(self) -> None:
        self.hub_headers: dict[str, str] = {}

    def http_error_302(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any
    ) -> Any:
        """Closes the answer too where the address in it is none."""
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except ValueError:
            fp.close()
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Returns the request to make instead; raises `_RedirectError` for one that is not made."""
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        reason = None
        if new.scheme not in ("http", "https"):
            reason = _OTHER_SCHEME
        elif old.scheme == "https" and new.scheme == "http":
            reason = "from https to http, where anyone on the way could change the file"
        elif "@" in new.netloc:
            reason = "to an address with a user name in it"
        if reason is not None:
            raise _RedirectError(req.full_url, code, reason, headers, fp)
        if "X-Linked-ETag" in headers:
            self.hub_headers = {name.lower(): text for name, text in headers.items()}
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if request is not None and token and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            request.add_unredirected_header("Authorization", token)
        return request


class _Connection(http.client.HTTPConnection):
    """A connection that is held from before any TLS begins."""

    pace: Pace

    def connect(self) -> None:
        super().connect()
        self.pace.hold(self.sock)


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    """The same with TLS: HTTPSConnection calls the `connect` above, then wraps the socket."""


class _Paced(urllib.request.AbstractHTTPHandler):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace


class _Http(_Paced, urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_connecting(_Connection, self._pace), req)


class _Https(_Paced, urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_connecting(_SecureConnection, self._pace), req)


def _check_answer(response: http.client.HTTPResponse, url: str, advice: str) -> None:
    if response.status not in (200, 206):
        status = f"{response.status} {plain(response.reason)}"
        raise ConnectionError(f"{shown(url)} answered {status}, without a file: {advice}.")
    if response.headers.get_content_type() in ("text/html", "application/xhtml+xml"):
        raise ValueError(
            f"{shown(url)} answered with a web page instead of a file (a sign-in page, perhaps): "
            f"{advice}."
        )
    encoding = plain(response.headers.get("Content-Encoding", "identity"), limit=20)
    is_own = url.partition("?")[0].endswith(".gz")  # some servers call a .gz file encoded
    if encoding.lower() not in ("identity", "") and not is_own:
        raise ValueError(
            f"{shown(url)} comes compressed ({encoding}), which was not requested: {advice}."
        )


def _request(url: str, headers: dict[str, str]) -> urllib.request.Request:
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    safe = string.punctuation
    path, query = (urllib.parse.quote(text, safe=safe) for text in (parts.path, parts.query))
    bare = urllib.parse.urlunsplit((parts.scheme, host, path, query, ""))
    request = urllib.request.Request(bare, headers=headers)  # noqa: S310 - http or https, checked
    if user:
        token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    return request


def _refusal(error: urllib.error.HTTPError, url: str, advice: str) -> Exception:
    status = f"{error.code} {plain(str(error.reason))}"
    if error.code in (404, 410):
        return FileNotFoundError(
            f"There is no file at {shown(url)} ({status}): check the name, or {advice}."
        )
    if 300 <= error.code < 400:
        return ConnectionError(f"{shown(url)} redirects {_where(error)}: {advice}.")
    is_beyond = error.code == 416
    if error.code < 500 and error.code not in _TRANSIENT_STATUS and not is_beyond:
        return ConnectionError(f"{shown(url)} was refused ({status}): {advice}.")
    after = error.headers.get("Retry-After", "")
    pause = float(after) if after.isdecimal() else 0.0
    return InterruptedTransferError(status, wait=pause, is_beyond=is_beyond)


def _where(error: urllib.error.HTTPError) -> str:
    """Says of a redirect that was not followed where it leads."""
    if isinstance(error, _RedirectError):
        return str(error.reason)
    if re.match(r"(?!https?:)[a-z][a-z0-9+.-]*:", error.headers.get("Location", ""), re.IGNORECASE):
        return _OTHER_SCHEME
    return "in a circle or to no address that can be followed"


def _transient(reason: object) -> bool:
    # Connection resets and time-outs pass; a refused connection, an unknown host or a bad
    # certificate means that there is no way to the server from here.
    if isinstance(reason, ssl.SSLCertVerificationError):
        return False
    return isinstance(reason, ConnectionResetError | BrokenPipeError | TimeoutError | ssl.SSLError)


def _connecting(kind: type[_Connection], pace: Pace) -> Any:
    def connect(host: str, **options: Any) -> _Connection:
        connection = kind(host, **options)
        connection.pace = pace
        return connection

    return connect
