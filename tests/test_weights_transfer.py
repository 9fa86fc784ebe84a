"""Interrupted, refused and changed downloads: what a fault of the server, a real one, leads to."""

import base64
import dataclasses
import gzip
import hashlib
import logging
import socket
from pathlib import Path
from typing import Any

import download_rig as rig
import pytest

from keras_vit.weights import connection, download, transfer

server, url, home = rig.server_fixture, rig.url_fixture, rig.home_fixture

MD5 = base64.b64encode(hashlib.md5(rig.BODY).digest()).decode()
CRC = base64.b64encode(rig.reference_crc32c(rig.BODY).to_bytes(4, "big")).decode()
STEPS = [step * len(rig.BODY) // 20 for step in range(1, 20)]


def linked(body: bytes) -> rig.Fault:
    """The Hub's redirect to a large file, whose SHA-256 it says in a header of its own."""
    digest = hashlib.sha256(body).hexdigest()
    return rig.status(302, Location=rig.ELSEWHERE, X_Linked_ETag=f'"{digest}"')


# Faults that pass, what the server cannot do, and where each further request begins; None where
# that is by chance.
PASSING: dict[str, tuple[list[rig.Fault], dict[str, Any], list[int] | None]] = {
    "500": ([rig.status(500)], {}, [0]),
    "503 twice": ([rig.status(503), rig.status(503)], {}, [0, 0]),
    "429": ([rig.status(429)], {}, [0]),
    "408": ([rig.status(408)], {}, [0]),
    "reset": ([rig.reset(rig.MIDDLE)], {}, None),
    "reset before the first byte": ([rig.reset(0)], {}, [0]),
    "cut": ([rig.cut(0), rig.cut(100), rig.cut(200)], {}, [0, 100, 200]),
    "cut 19 times, further on": ([rig.cut(step) for step in STEPS], {}, STEPS),
    "silent": ([rig.stall(rig.MIDDLE)], {}, [rig.MIDDLE]),
    "cut, and ranges ignored": ([rig.cut(rig.MIDDLE)], {"ranges": False}, [rig.MIDDLE]),
    "cut, and no word of versions": ([rig.cut(rig.MIDDLE)], {"validators": False}, [0]),
    "cut, in chunks": ([rig.cut(rig.MIDDLE)], {"length": False}, None),
    "a byte flipped": ([rig.flip(rig.MIDDLE)], {}, [0]),
    "redirect": ([rig.status(302, Location=rig.ELSEWHERE)], {}, [0]),
    "redirect with a SHA-256": ([linked(rig.BODY)], {"hashes": ()}, [0]),
    "CRC-32C alone": ([], {"hashes": (f"crc32c={CRC}",)}, []),  # of what came up in parts
    "two headers of checksums": ([], {"hashes": (f"crc32c={CRC}", f"md5={MD5}")}, []),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_gone_through(
    name: str,
    server: rig.Server,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fault costs a request for the missing part alone, of the same version; the file comes."""
    monkeypatch.setattr(transfer, "TIMEOUT", 2.0)
    faults, switches, starts = PASSING[name]
    server.faults = list(faults)
    vars(server).update(switches)

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY
    assert len(server.requests) == 1 + len(faults)
    assert starts is None or server.starts == [0, *starts]
    assert ("arrived damaged" in caplog.text) == ("flipped" in name)
    ranged = [request for request in server.requests if "range" in request]
    assert all(request["if-range"] == server.tag(rig.BODY) for request in ranged)


def give_up(server: rig.Server, url: str) -> Path:
    """Leaves half the file in the cache; returns its path."""
    server.faults = [rig.cut(rig.MIDDLE), *[rig.status(503)] * (transfer.ATTEMPTS - 1)]
    with pytest.raises(ConnectionError, match="Gave up"):
        download.fetch(url, wait=lambda _: None)
    return download.cached_path(url).with_name("ViT-B_16.npz.partial")


def test_resume_in_a_later_call(server: rig.Server, url: str, home: Path) -> None:
    """What a call that gave up left behind is used by the next one."""
    give_up(server, url)
    assert rig.kept(home) == {"ViT-B_16.npz.partial", "ViT-B_16.npz.partial.json"}

    assert download.fetch(url).read_bytes() == rig.BODY
    assert server.starts[-1] == rig.MIDDLE
    assert rig.kept(home) == {"ViT-B_16.npz", "ViT-B_16.npz.sha256"}


TOO_MUCH = (
    f"HTTP/1.1 206 Part\r\nContent-Range: bytes {rig.MIDDLE}-{len(rig.BODY) - 1}/"
    f"{len(rig.BODY)}\r\nContent-Length: {len(rig.BODY)}\r\n"
    f'ETag: "{hashlib.md5(rig.BODY).hexdigest()}"\r\n\r\n'
)


@pytest.mark.parametrize("fault", ["longer than the file", "damaged", "the rest is too long"])
def test_a_partial_file_that_does_not_fit(fault: str, server: rig.Server, url: str) -> None:
    """It is dropped where the file is shorter (416) or the whole does not have its checksum."""
    partial = give_up(server, url)
    if fault == "longer than the file":
        partial.write_bytes(rig.BODY + b"x")
        server.faults = [rig.status(416)]
    elif fault == "damaged":
        partial.write_bytes(rig.flipped(partial.read_bytes(), 1000))
    else:
        server.faults = [rig.raw(TOO_MUCH.encode() + rig.BODY)]

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY


def test_damaged_notes_of_a_partial_file(server: rig.Server, url: str) -> None:
    """What an interrupted download noted is not trusted to be whole or of the right types."""
    partial = give_up(server, url)
    notes = partial.with_name(f"{partial.name}.json")
    whole = notes.read_text()
    other = whole.replace('"etag": "', '"etag": "\\r\\nX: y')
    for damaged in ("[", "[]", "{}", other, whole.replace("http", "ftp"), "[" * 99_999):
        notes.write_text(damaged)
        server.faults = [rig.status(403)]
        with pytest.raises(ConnectionError, match="403"):
            download.fetch(url)
        assert server.starts[-1] == 0


@pytest.mark.parametrize("if_range", [True, False])
def test_changed_file_is_not_glued(server: rig.Server, if_range: bool) -> None:
    """If the file changes between two attempts, the result is the new one, whole."""
    server.if_range = if_range  # False: the server answers with a part of the new file
    server.hashes = ()
    server.files["/table.bin"] = rig.BODY  # not an archive: nothing else would show the mixture
    change = rig.cut(rig.MIDDLE, then=lambda _: server.files.update({"/table.bin": rig.OTHER}))
    server.faults = [change]

    path = download.fetch(f"{server.url}/table.bin", wait=lambda _: None)
    assert path.read_bytes() == rig.OTHER


def test_waits_grow_and_follow_the_server(server: rig.Server, url: str) -> None:
    """They double up to the last attempt; the server's own wish is respected, up to a minute."""
    waits: list[float] = []
    server.faults = [rig.status(500)] * transfer.ATTEMPTS
    with pytest.raises(ConnectionError, match="500"):
        download.fetch(url, wait=waits.append)
    server.faults = [rig.status(429, Retry_After="7"), rig.status(503, Retry_After="86400")]
    download.fetch(url, wait=waits.append)

    assert waits == [1.0, 2.0, 4.0, 8.0, 7.0, transfer.LONGEST_WAIT]


OK = b"HTTP/1.1 200 OK\r\n"
SOUND = rig.safetensors()
PAGE = b"\n<!doctype HTML><html><body>Sign in</body></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 9\n"
FAILURE = b'{"error": "Repository not found"}'
FILES = {"x.npz": rig.BODY, "x.safetensors": SOUND, "config.json": b'{"a": 1}', "table.bin": b"abc"}


def body(content: bytes, *headers: bytes) -> rig.Fault:
    lines = (b"Content-Length: %d" % len(content), *headers)
    return rig.raw(OK + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + content)


@dataclasses.dataclass(frozen=True)
class Final:
    """What each request is answered with, and what it ends in."""

    fault: rig.Fault | None
    words: str
    kind: type[Exception] = ValueError
    name: str = "x.safetensors"
    requests: int = 1
    keeps_part: bool = False
    switches: dict[str, Any] = dataclasses.field(default_factory=dict)


def junk(fault: rig.Fault, words: str) -> Final:
    """What is seen after it came is asked for once more: another download may mend it."""
    return Final(fault, words, requests=2)


def redirect(target: str, words: str) -> Final:
    return Final(rig.status(302, Location=target), words, ConnectionError)


def late(fault: rig.Fault) -> Final:
    words, switches = r"Gave up .* less than 61,440 bytes in 0\.4 s", {"WINDOW": 0.4}
    return Final(fault, words, ConnectionError, requests=0, keeps_part=True, switches=switches)


def slowly(begin: bytes, each: bytes) -> Final:
    return late(rig.raw(begin, each=each, pause=0.05))


def one_byte(handler: rig.Handler, body: bytes) -> None:
    handler.send_file(body, body, upto=handler.server.starts[-1] + 1)


def settings(content: bytes, words: str = "JSON|web page") -> Final:
    return Final(body(content), words, name="config.json", requests=0)


ATTEMPTS = transfer.ATTEMPTS
MD5_OF_NOTHING = "md5=AAAAAAAAAAAAAAAAAAAAAA=="
UNSTATED = {"LARGEST_UNSTATED": 2**20}
FINAL = {
    "500": Final(rig.status(500), "500", ConnectionError, requests=ATTEMPTS),
    "cut again": Final(
        rig.cut(100), "broke off after", ConnectionError, requests=ATTEMPTS, keeps_part=True
    ),
    "404": Final(rig.status(404), "no file at .*404", FileNotFoundError),
    "403": Final(rig.status(403), r"refused \(403", ConnectionError),
    "204": Final(rig.raw(b"HTTP/1.1 204 No Content\r\n\r\n"), "204 No Content", ConnectionError),
    # What comes under a good status instead of the file, and how it is called.
    "web page": Final(body(PAGE), "a web page instead of x.safetensors"),
    "web page of a type": Final(body(SOUND, b"Content-Type: text/html; charset=a"), "a web page"),
    "web page for an archive": Final(body(b"<!DOCTYPE html><p>"), "a web page", name="x.npz"),
    "error in JSON": Final(body(FAILURE), "a JSON text"),
    "Git LFS pointer": Final(body(POINTER), "a Git LFS pointer"),
    "gzip": Final(body(gzip.compress(SOUND)), "gzip data"),
    "gzip by its header": Final(body(SOUND, b"Content-Encoding: gzip"), "compressed"),
    "empty": Final(body(b""), "an empty file"),
    "zip archive": Final(body(rig.archive(3, floats=9)), "a zip archive"),
    "pickle": Final(body(b"\x80\x04K\x01."), "a pickle"),
    "cut without length": junk(
        rig.raw(OK + b"\r\n" + SOUND[:-1]), "of 4,068 bytes of which 4,067 are here"
    ),
    "cut by its length": junk(body(SOUND[:2000]), "of which 2,000 are here"),
    "too long": junk(body(SOUND + b"x"), "of which 4,069 are here"),
    "neither length nor checksum": Final(
        rig.raw(OK + b"\r\nabc"), "without a length", name="table.bin"
    ),
    "endless": Final(
        rig.raw(OK + b"\r\n", each=bytes(2**16)), "at most 1,048,576", switches=UNSTATED
    ),
    # Settings are one object of JSON, of at most 16 MiB.
    "list": settings(b"[1]"),
    "no JSON": settings(b"{"),
    "deep JSON": settings(b"[" * 100_000),
    "no text": settings(b"\xff{}"),
    "page of settings": settings(PAGE),
    "20 MB of settings": settings(b" " * 20_000_000, "at most"),
    # Damage that stays.
    "flipped": Final(rig.flip(rig.MIDDLE), "arrived damaged twice", name="x.npz", requests=2),
    "flipped, no checksum": Final(
        rig.flip(rig.MIDDLE), "archive", name="x.npz", requests=2, switches={"hashes": ()}
    ),
    **{
        f"wrong checksum {hashes}": Final(
            None, "the server states", name="x.npz", requests=2, switches={"hashes": (hashes,)}
        )
        for hashes in (MD5_OF_NOTHING, "crc32c=AAAAAA==", f"crc32c=AAAAAA==,{MD5_OF_NOTHING}")
    },
    "another SHA-256 of the Hub": Final(
        linked(rig.OTHER),
        "the server states sha256",
        name="x.npz",
        requests=4,
        switches={"hashes": ()},
    ),
    # Redirects that are not followed.
    "to a file": redirect("file:///etc/passwd", "not http or https"),
    "to FTP": redirect("ftp://127.0.0.1/x.npz", "not http or https"),
    "to data": redirect("data:,x", "not http or https"),
    "to a user": redirect("http://me:hunter2@127.0.0.1/x.npz", "user name"),
    "to nothing": redirect("http://[::1/x.npz", "cannot be read"),
    "circle": dataclasses.replace(redirect("", "circle"), requests=0),
    # A byte now and then, wherever in the answer, ends when its time is over.
    "slow body": slowly(OK + b"Content-Length: 99999\r\n\r\n", b"x"),
    "slow body without length": slowly(OK + b"\r\n", b"x"),
    "slow chunks": slowly(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "slow line with a chunk's size": slowly(OK + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
    "slow headers": slowly(OK, b"A: b\r\n"),
    "slow header": slowly(OK + b"A: ", b"b"),
    "slow status line": slowly(b"HTTP/1.1 ", b"2"),
    "go on, go on": slowly(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a byte with each attempt": late(one_byte),
}


@pytest.mark.parametrize("case", FINAL)
def test_what_stays_is_refused(
    case: str, server: rig.Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence with the address and the reason; no file of that name, and later the file."""
    final = FINAL[case]
    address = f"{server.url}/{final.name}"
    server.files |= {f"/{name}": content for name, content in FILES.items()}
    server.faults = [final.fault] * 10_000 if final.fault else []
    for name, value in final.switches.items():
        monkeypatch.setattr(transfer if name.isupper() else server, name, value)

    with pytest.raises(final.kind, match=final.words) as raised:
        download.fetch(address, wait=lambda _: None)

    assert address in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert rig.one_sentence(raised.value)
    assert final.requests in (0, len(server.requests))  # 0: whatever their number
    part = {f"{final.name}.partial", f"{final.name}.partial.json"} if final.keeps_part else set()
    assert rig.kept(home) <= part
    server.faults, server.hashes = [], None
    assert download.fetch(address).read_bytes() == FILES[final.name]


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


def test_no_network(home: Path) -> None:
    """Without a network the error names the URL, the place for the file, and the setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}/imagenet21k/ViT-B_16.npz"
    waits: list[float] = []

    with pytest.raises(ConnectionError) as raised:
        download.fetch(url, wait=waits.append)

    for words in (url, str(download.cached_path(url)), "KERAS_VIT_MIRROR"):
        assert words in str(raised.value)
    assert rig.one_sentence(raised.value)
    assert (waits, rig.kept(home)) == ([], set())


def test_no_redirect_from_https_to_http(
    server: rig.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """What begins in safety stays there; a redirect within https is followed."""
    with rig.serving_safely(tmp_path) as safe:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        safe.faults = [rig.status(302, Location=f"{server.url}{rig.NAME}")]
        with pytest.raises(ConnectionError, match="from https to http"):
            download.fetch(safe.url + rig.NAME)
        assert (rig.kept(home), server.requests) == (set(), [])

        safe.faults = [rig.status(302, Location=rig.ELSEWHERE)]
        assert download.fetch(safe.url + rig.NAME).read_bytes() == rig.BODY


def test_password_stays_with_its_host(server: rig.Server) -> None:
    """A redirect to another address does not get the password of the first."""
    with rig.serving() as other:
        server.files["/x.safetensors"] = other.files["/y.safetensors"] = SOUND
        server.faults = [rig.status(302, Location=f"{other.url}/y.safetensors")]
        address = f"{server.url}/x.safetensors".replace("//", "//me:hunter2@")
        assert download.fetch(address).read_bytes() == SOUND
        assert "authorization" in server.requests[0]
        assert "authorization" not in other.requests[0]


SECRETS = ["?token=hunter2", "?X-Amz-Signature=hunter2&x=1", "?hunter2", "?sig=hunter2#hunter2"]
SHORT = rig.raw(OK + b"Content-Length: 1\r\n\r\n")


@pytest.mark.parametrize("query", SECRETS)
@pytest.mark.parametrize("user", ["", "me:hunter2@", "hunter2@"])
def test_secrets_of_an_address_reach_no_text(
    user: str, query: str, server: rig.Server, caplog: pytest.LogCaptureFixture, home: Path
) -> None:
    """No error, log or file of the cache holds a password, a token or a signature."""
    caplog.set_level(logging.DEBUG)
    address = f"{server.url}/a/x.safetensors{query}".replace("//", f"//{user}", 1)
    server.files[f"/a/x.safetensors{query.partition('#')[0]}"] = SOUND
    for fault in (rig.status(403), rig.status(404), rig.cut(100), body(PAGE), SHORT):
        server.faults = [fault] * 20
        with pytest.raises((OSError, ValueError)) as raised:
            download.fetch(address, wait=lambda _: None)
        files = [file.read_bytes() for file in home.rglob("*") if file.is_file()]
        names = [str(file) for file in home.rglob("*")]
        assert "hunter2" not in f"{raised.value!r}{caplog.text}{files}{names}"
    server.faults = []
    assert download.fetch(address).read_bytes() == SOUND
    assert ("authorization" in server.requests[-1]) == bool(user)


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
    address = f"{server.url}/x.safetensors"
    said: bytes | str
    try:
        said = download.fetch(address, wait=lambda _: None).read_bytes()
    except (ConnectionError, ValueError) as error:
        said = str(error)
    if isinstance(said, bytes):
        assert said == SOUND
    else:
        assert address in said
        assert said.isprintable()
        assert len(said) < 600


def test_the_checks_of_these_tests_can_fail(tmp_path: Path) -> None:
    """The list of kept files is not always empty; two sentences and a line break are refused."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.partial").write_bytes(b"")
    (tmp_path / "a" / "x.lock").write_bytes(b"")

    assert rig.kept(tmp_path) == {"x.partial"}
    assert rig.one_sentence(ValueError("Cannot reach http://x.y/z.npz (a, b): do it."))
    assert not rig.one_sentence(ValueError("It failed. Do something."))
    assert not rig.one_sentence(ValueError("It failed\nsomewhere."))
