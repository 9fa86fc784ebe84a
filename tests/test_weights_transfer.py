"""Interrupted, refused and changed downloads, against a real HTTP server with faults."""

import gzip
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import download_rig as rig
import pytest

from keras_vit.weights import connection, download, transfer


@pytest.fixture
def server() -> Iterator[rig.Server]:
    with rig.serving() as server:
        yield server


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("KERAS_VIT_MIRROR", raising=False)
    return tmp_path / "keras"


@pytest.fixture
def url(server: rig.Server) -> str:
    return server.url + rig.NAME


@pytest.fixture
def waits() -> list[float]:
    return []


def test_broken_download_is_resumed(server: rig.Server, url: str, waits: list[float]) -> None:
    """After a break only the missing part is asked for, and only of the same version."""
    server.faults = [rig.cut(rig.MIDDLE)]

    path = download.fetch(url, wait=waits.append)

    assert path.read_bytes() == rig.BODY
    assert server.requests[1]["range"] == f"bytes={rig.MIDDLE}-"
    assert server.requests[1]["if-range"] == server.tag(rig.BODY)
    assert waits == [1.0]


def test_resume_in_a_later_call(server: rig.Server, url: str, home: Path) -> None:
    """What a call that gave up left behind is used by the next one."""
    server.faults = [rig.cut(rig.MIDDLE), *[rig.status(503)] * transfer.ATTEMPTS]
    with pytest.raises(ConnectionError, match="Gave up"):
        download.fetch(url, wait=lambda _: None)
    assert rig.kept(home) == {"ViT-B_16.npz.partial", "ViT-B_16.npz.partial.json"}

    assert download.fetch(url).read_bytes() == rig.BODY
    assert server.requests[-1]["range"] == f"bytes={rig.MIDDLE}-"
    assert rig.kept(home) == {"ViT-B_16.npz", "ViT-B_16.npz.sha256"}


def test_server_that_ignores_ranges(server: rig.Server, url: str) -> None:
    """A server that answers a range with the whole file is understood."""
    server.ranges = False
    server.faults = [rig.cut(rig.MIDDLE)]

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY


def test_server_without_versions(server: rig.Server, url: str) -> None:
    """Where nothing identifies a version the download starts again from nothing."""
    server.validators = False
    server.faults = [rig.cut(rig.MIDDLE)]

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY
    assert "range" not in server.requests[1]


@pytest.mark.parametrize("if_range", [True, False])
def test_changed_file_is_not_glued(server: rig.Server, url: str, if_range: bool) -> None:
    """If the file changes between two attempts, the result is the new one, whole."""
    server.if_range = if_range  # False: the server answers with a part of the new file
    server.hashes = ()
    server.files["/table.bin"] = rig.BODY
    url = f"{server.url}/table.bin"  # not an archive: nothing else would show the mixture

    def change(handler: rig.Handler, body: bytes) -> bool:
        handler.send_file(body, body, upto=rig.MIDDLE)
        server.files["/table.bin"] = rig.OTHER
        return False

    server.faults = [change]

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.OTHER


def test_partial_file_beyond_the_end(server: rig.Server, url: str) -> None:
    """A partial file longer than the published one (416) is dropped."""
    server.faults = [rig.cut(rig.MIDDLE), *[rig.status(503)] * transfer.ATTEMPTS]
    with pytest.raises(ConnectionError):
        download.fetch(url, wait=lambda _: None)
    partial = download.cached_path(url).with_name("ViT-B_16.npz.partial")
    partial.write_bytes(rig.BODY + b"x")
    server.faults = [rig.status(416)]

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY


RETRIED = {
    "500": [rig.status(500)],
    "503 twice": [rig.status(503), rig.status(503)],
    "429": [rig.status(429)],
    "408": [rig.status(408)],
    "reset": [rig.reset(rig.MIDDLE)],
    "reset before the first byte": [rig.reset(0)],
    "cut": [rig.cut(0), rig.cut(100), rig.cut(200)],
}


@pytest.mark.parametrize("name", RETRIED)
def test_passing_faults_are_retried(name: str, server: rig.Server, url: str) -> None:
    """A fault of the server or the line that passes costs an attempt, not the download."""
    server.faults = list(RETRIED[name])

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY
    assert len(server.requests) == len(RETRIED[name]) + 1


def test_silent_server_is_retried(
    server: rig.Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops sending is left after the time-out, and asked for the rest."""
    monkeypatch.setattr(transfer, "TIMEOUT", 2.0)
    server.faults = [rig.stall(rig.MIDDLE)]

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY
    assert server.requests[1]["range"] == f"bytes={rig.MIDDLE}-"


def test_retries_are_bounded(server: rig.Server, url: str, waits: list[float], home: Path) -> None:
    """Five failures in a row end the download, with growing waits between them."""
    server.faults = [rig.status(500)] * 100

    with pytest.raises(ConnectionError, match="500") as raised:
        download.fetch(url, wait=waits.append)

    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert len(server.requests) == transfer.ATTEMPTS
    assert rig.one_sentence(raised.value)
    assert rig.kept(home) == set()


def test_always_truncated_body_ends(server: rig.Server, url: str, home: Path) -> None:
    """A server that never sends more than half is given up, and no half file gets the name."""
    server.faults = [rig.cut(rig.MIDDLE)] * 100

    with pytest.raises(ConnectionError, match="broke off after") as raised:
        download.fetch(url, wait=lambda _: None)

    assert len(server.requests) == transfer.ATTEMPTS
    assert rig.one_sentence(raised.value)
    assert "ViT-B_16.npz" not in rig.kept(home)


def test_slow_line_is_not_given_up(server: rig.Server, url: str) -> None:
    """Any number of breaks is fine as long as each attempt brings something."""
    server.faults = [rig.cut(step * len(rig.BODY) // 20) for step in range(1, 20)]

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY


def test_retry_after_is_followed(server: rig.Server, url: str, waits: list[float]) -> None:
    """The server's own wish is respected, up to a minute."""
    server.faults = [rig.status(429, Retry_After="7"), rig.status(503, Retry_After="86400")]

    download.fetch(url, wait=waits.append)

    assert waits == [7.0, transfer.LONGEST_WAIT]


# Answers that no retry repairs.


def test_missing_file(server: rig.Server, url: str, home: Path) -> None:
    """404 is final and says which URL."""
    missing = url.replace("B_16", "B_17")

    with pytest.raises(FileNotFoundError, match="404") as raised:
        download.fetch(missing)

    assert missing in str(raised.value)
    assert rig.one_sentence(raised.value)
    assert len(server.requests) == 1
    assert rig.kept(home) == set()


def test_refused_file(server: rig.Server, url: str) -> None:
    """403 is final."""
    server.faults = [rig.status(403)]

    with pytest.raises(ConnectionError, match=r"refused \(403"):
        download.fetch(url)

    assert len(server.requests) == 1


def test_web_page_instead_of_a_file(server: rig.Server, url: str, home: Path) -> None:
    """A sign-in page with status 200 is not taken for weights."""
    server.headers = {"Content-Type": "text/html; charset=utf-8"}

    with pytest.raises(ValueError, match="web page") as raised:
        download.fetch(url)

    assert rig.one_sentence(raised.value)
    assert rig.kept(home) == set()


def test_web_page_without_its_type(server: rig.Server, url: str, home: Path) -> None:
    """A page that does not call itself one is known by its beginning."""
    server.files[rig.NAME] = b"<!DOCTYPE html><p>Sign in"

    with pytest.raises(ValueError, match=r"answered with a web page instead of ViT-B_16\.npz"):
        download.fetch(url)

    assert rig.kept(home) == set()


def test_unverifiable_answer_is_refused(server: rig.Server, home: Path) -> None:
    """Without length, checksum and CRCs nothing could show a cut: such a file is not kept."""

    def bare(handler: rig.Handler, body: bytes) -> bool:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        return False

    server.files["/table.bin"] = b"abc"
    server.faults = [bare]

    with pytest.raises(ValueError, match="without a length"):
        download.fetch(f"{server.url}/table.bin")

    assert rig.kept(home) == set()


def test_no_network(home: Path, waits: list[float]) -> None:
    """Without a network the error names the URL, the place for the file, and the setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}/imagenet21k/ViT-B_16.npz"

    with pytest.raises(ConnectionError) as raised:
        download.fetch(url, wait=waits.append)

    text = str(raised.value)
    assert url in text
    assert str(download.cached_path(url)) in text
    assert "KERAS_VIT_MIRROR" in text
    assert rig.one_sentence(raised.value)
    assert waits == []
    assert rig.kept(home) == set()


OK = b"HTTP/1.1 200 OK\r\n"
SOUND = rig.safetensors()
PAGE = b"\n<!doctype HTML><html><body>Sign in</body></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 9\n"
FAILURE = b'{"error": "Repository not found"}'


def body(content: bytes, *headers: bytes) -> bytes:
    lines = (b"Content-Length: %d" % len(content), *headers)
    return OK + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + content


# What comes under a good status instead of a .safetensors file, and how it is called.
JUNK = {
    "web page": (body(PAGE), "a web page"),
    "web page of a type": (body(PAGE, b"Content-Type: text/html"), "a web page"),
    "error in JSON": (body(FAILURE), "a JSON text"),
    "Git LFS pointer": (body(POINTER), "a Git LFS pointer"),
    "gzip": (body(gzip.compress(SOUND)), "gzip data"),
    "gzip by its header": (body(gzip.compress(SOUND), b"Content-Encoding: gzip"), "compressed"),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", "204 No Content"),
    "empty": (body(b""), "an empty file"),
    "cut without length": (OK + b"\r\n" + SOUND[:-1], "of 4,068 bytes of which 4,067 are here"),
    "cut by its length": (body(SOUND[:2000]), "of which 2,000 are here"),
    "too long": (body(SOUND + b"x"), "of which 4,069 are here"),
    "zip archive": (body(rig.archive(3, floats=9)), "a zip archive"),
    "pickle": (body(b"\x80\x04K\x01."), "a pickle"),
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_is_not_kept(name: str, server: rig.Server, home: Path) -> None:
    """What is not a whole file of its suffix is called by its name, and nothing is left of it."""
    answer, words = JUNK[name]
    server.files["/x.safetensors"] = SOUND
    server.faults = [rig.raw(answer)] * 2

    with pytest.raises((ValueError, ConnectionError), match=words) as raised:
        download.fetch(f"{server.url}/x.safetensors", wait=lambda _: None)

    assert "/x.safetensors" in str(raised.value)
    assert rig.one_sentence(raised.value)
    assert rig.kept(home) == set()
    server.faults = []
    assert download.fetch(f"{server.url}/x.safetensors").read_bytes() == SOUND


@pytest.mark.parametrize("content", [b"[1]", b"{", b"[" * 100_000, b"\xff{}", PAGE])
def test_settings_are_a_json_object(content: bytes, server: rig.Server, home: Path) -> None:
    """A config.json that is no object of JSON is not kept, nor is one of 20 MB."""
    server.files["/config.json"] = content

    with pytest.raises(ValueError, match=r"JSON|web page"):
        download.fetch(f"{server.url}/config.json")
    server.files["/config.json"] = b" " * 20_000_000
    with pytest.raises(ValueError, match="at most"):
        download.fetch(f"{server.url}/config.json")

    assert rig.kept(home) == set()
    server.files["/config.json"] = b'{"a": 1}'
    assert download.fetch(f"{server.url}/config.json").read_bytes() == b'{"a": 1}'


REDIRECTS = {
    "file:///etc/passwd": "not http or https",
    "ftp://127.0.0.1/x.npz": "not http or https",
    "data:,x": "not http or https",
    "http://me:secret@127.0.0.1/x.npz": "user name",
    "http://[::1/x.npz": "cannot be read",
    "": "circle",
}


@pytest.mark.parametrize("target", REDIRECTS)
def test_redirects_that_are_not_followed(target: str, server: rig.Server, url: str) -> None:
    """Another scheme, a circle and an address that is none are refused at once."""
    server.faults = [rig.status(302, Location=target)] * 20

    with pytest.raises(ConnectionError, match=REDIRECTS[target]) as raised:
        download.fetch(url)

    assert rig.one_sentence(raised.value)
    assert "secret" not in str(raised.value)


def test_no_redirect_from_https_to_http(
    server: rig.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """What begins in safety stays there; a redirect within https is followed."""
    with rig.serving_safely(tmp_path) as safe:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
        safe.faults = [rig.status(302, Location=f"{server.url}{rig.NAME}")]
        with pytest.raises(ConnectionError, match="from https to http"):
            download.fetch(safe.url + rig.NAME)
        assert (rig.kept(home), server.requests) == (set(), [])

        safe.files["/other.npz"] = rig.BODY
        safe.faults = [rig.status(302, Location="/other.npz")]
        assert download.fetch(safe.url + rig.NAME).read_bytes() == rig.BODY


SLOW = {
    "body": (OK + b"Content-Length: 99999\r\n\r\n", b"x"),
    "body without length": (OK + b"\r\n", b"x"),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "a line that tells a chunk's size": (OK + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
    "headers": (OK, b"A: b\r\n"),
    "one header": (OK + b"A: ", b"b"),
    "status line": (b"HTTP/1.1 ", b"2"),
    "go on, go on": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_barely_moves_is_given_up(
    name: str, server: rig.Server, url: str, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """A byte now and then, wherever in the answer, ends when its time is over."""
    monkeypatch.setattr(transfer, "WINDOW", 0.4)
    begin, each = SLOW[name]
    server.faults = [rig.raw(begin, each=each, pause=0.05)]

    with pytest.raises(ConnectionError, match=r"Gave up .* less than 61,440 bytes in 0\.4 s"):
        download.fetch(url, wait=lambda _: None)

    assert "ViT-B_16.npz" not in rig.kept(home)


def test_a_byte_with_each_attempt_is_given_up(
    server: rig.Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts that bring a byte each do not go on for ever either."""
    monkeypatch.setattr(transfer, "WINDOW", 0.5)
    server.faults = [rig.cut(step) for step in range(1, 10_000)]

    with pytest.raises(ConnectionError, match="Gave up"):
        download.fetch(url, wait=lambda _: None)


def test_steady_line_is_not_given_up() -> None:
    """A download may take many windows, if enough comes in each."""
    clock = [0.0]
    pace = connection.Pace(window=60, least=100, now=lambda: clock[0])
    for _ in range(10):
        clock[0] += 40
        pace.add(100)
        assert not pace.is_late
    clock[0] += 59
    pace.add(99)
    assert not pace.is_late
    clock[0] += 2
    assert pace.is_late


def test_endless_body_is_refused(
    server: rig.Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body without length ends at a bound, long before the disk does."""
    monkeypatch.setattr(transfer, "LARGEST_UNSTATED", 2**20)
    server.files["/x.safetensors"] = SOUND
    server.faults = [rig.raw(OK + b"\r\n", each=bytes(2**16))]

    with pytest.raises(ValueError, match="at most 1,048,576") as raised:
        download.fetch(f"{server.url}/x.safetensors")

    assert rig.one_sentence(raised.value)
    assert rig.kept(home) == set()


def test_more_than_the_stated_rest(server: rig.Server, url: str, home: Path) -> None:
    """A part that is longer than what is missing is not joined to what is here."""
    server.faults = [rig.cut(rig.MIDDLE), *[rig.status(503)] * transfer.ATTEMPTS]
    with pytest.raises(ConnectionError):
        download.fetch(url, wait=lambda _: None)
    rest = rig.BODY[rig.MIDDLE :] + b"more"
    answer = (
        f"HTTP/1.1 206 Part\r\nContent-Range: bytes {rig.MIDDLE}-{len(rig.BODY) - 1}/"
        f"{len(rig.BODY)}\r\nContent-Length: {len(rest)}\r\nETag: {server.tag(rig.BODY)}\r\n\r\n"
    )
    server.faults = [rig.raw(answer.encode() + rest)]

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY


SECRETS = ["?token=hunter2", "?X-Amz-Signature=hunter2&x=1", "?hunter2", "?sig=hunter2#hunter2"]


@pytest.mark.parametrize("query", SECRETS)
@pytest.mark.parametrize("user", ["", "me:hunter2@", "hunter2@"])
@pytest.mark.parametrize("fault", ["403", "404", "cut", "page", "length"])
def test_secrets_of_an_address_reach_no_text(
    fault: str,
    user: str,
    query: str,
    server: rig.Server,
    caplog: pytest.LogCaptureFixture,
    home: Path,
) -> None:
    """No error, log or file of the cache holds a password, a token or a signature."""
    caplog.set_level(logging.DEBUG)
    address = f"{server.url}/a/x.safetensors{query}".replace("//", f"//{user}", 1)
    path = f"/a/x.safetensors{query.partition('#')[0]}"
    server.files[path] = SOUND
    faults = {"403": rig.status(403), "404": rig.status(404), "cut": rig.cut(100)}
    faults |= {"page": rig.raw(body(PAGE)), "length": rig.raw(OK + b"Content-Length: 1\r\n\r\n")}
    server.faults = [faults[fault]] * 20

    with pytest.raises((OSError, ValueError)) as raised:
        download.fetch(address, wait=lambda _: None)

    files = [file.read_bytes() for file in home.rglob("*") if file.is_file()]
    names = [str(file) for file in home.rglob("*")]
    assert "hunter2" not in f"{raised.value!r}{caplog.text}{files}{names}"
    server.faults = []
    assert download.fetch(address).read_bytes() == SOUND
    assert ("authorization" in server.requests[-1]) == bool(user)


def test_password_stays_with_its_host(server: rig.Server, home: Path) -> None:
    """A redirect to another address does not get the password of the first."""
    with rig.serving() as other:
        server.files["/x.safetensors"] = other.files["/y.safetensors"] = SOUND
        server.faults = [rig.status(302, Location=f"{other.url}/y.safetensors")]
        address = f"{server.url}/x.safetensors".replace("//", "//me:hunter2@")
        assert download.fetch(address).read_bytes() == SOUND
        assert "authorization" in server.requests[0]
        assert "authorization" not in other.requests[0]


STRANGE = {
    "length": OK + b"Content-Length: abc\r\n\r\n" + SOUND,
    "length of many digits": OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + SOUND,
    "negative length": OK + b"Content-Length: -5\r\n\r\n" + SOUND,
    "wish to wait": b"HTTP/1.1 503 No\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n",
    "range": b"HTTP/1.1 206 P\r\nContent-Range: bytes " + b"9" * 5000 + b"-/1\r\n\r\n",
    "reason": b"HTTP/1.1 403 \x1b[31m" + b"red" * 9000 + b"\r\n\r\n",
    "status": b"\x1b" * 60_000 + b"\r\n\r\n",
    "headers": OK + b"A: b\r\n" * 200 + b"\r\n",
    "folded tag": OK + b"ETag: a\r\n b\r\nContent-Length: 9\r\n\r\nx",
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_headers(name: str, server: rig.Server) -> None:
    """Whatever stands in a header: the sound file comes, or one short plain sentence."""
    server.files["/x.safetensors"] = SOUND
    server.faults = [rig.raw(STRANGE[name])] * 20

    said: bytes | str
    try:
        said = download.fetch(f"{server.url}/x.safetensors", wait=lambda _: None).read_bytes()
    except (ConnectionError, ValueError) as error:
        said = str(error)

    if isinstance(said, bytes):
        assert said == SOUND
    else:
        assert "/x.safetensors" in said
        assert said.isprintable()
        assert len(said) < 600


def test_damaged_notes_of_a_partial_file(server: rig.Server, url: str) -> None:
    """What an interrupted download noted is not trusted to be whole or of the right types."""
    server.faults = [rig.cut(rig.MIDDLE), *[rig.status(503)] * transfer.ATTEMPTS]
    with pytest.raises(ConnectionError):
        download.fetch(url, wait=lambda _: None)
    notes = download.cached_path(url).with_name("ViT-B_16.npz.partial.json")
    whole = notes.read_text()
    other = whole.replace('"etag": "', '"etag": "\\r\\nX: y')
    for damaged in ("[", "[]", "{}", other, whole.replace("http", "ftp"), "[" * 99_999):
        notes.write_text(damaged)
        server.faults = [rig.status(403)]
        with pytest.raises(ConnectionError, match="403"):
            download.fetch(url)
        assert "range" not in server.requests[-1]


def test_kept_shows_what_is_left(tmp_path: Path) -> None:
    """The list of kept files, on which these tests rest, is not always empty."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.partial").write_bytes(b"")
    (tmp_path / "a" / "x.lock").write_bytes(b"")

    assert rig.kept(tmp_path) == {"x.partial"}


def test_one_sentence_tells_two_apart() -> None:
    """The check of messages refuses two sentences and a line break."""
    assert rig.one_sentence(ValueError("Cannot reach http://x.y/z.npz (a, b): do it."))
    assert not rig.one_sentence(ValueError("It failed. Do something."))
    assert not rig.one_sentence(ValueError("It failed\nsomewhere."))
