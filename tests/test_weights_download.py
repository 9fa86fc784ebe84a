"""Downloads from a real HTTP server: what is brought, kept, compared, resumed and refused."""

import base64
import dataclasses
import gzip
import hashlib
import io
import logging
import socket
import zipfile
from pathlib import Path
from typing import Any

import download_rig as rig
import google_crc32c
import h5py
import numpy as np
import published
import pytest

from keras_vit.weights import download

GOOGLE = "https://storage.googleapis.com/vit_models"
MD5 = base64.b64encode(hashlib.md5(rig.BODY).digest()).decode()
CRC = base64.b64encode(google_crc32c.Checksum(rig.BODY).digest()).decode()
STEPS = [step * len(rig.BODY) // 20 for step in range(1, 20)]
DONE = {"ViT-B_16.npz", "ViT-B_16.npz.sha256"}

server, url, home = rig.server_fixture, rig.url_fixture, rig.home_fixture
BAD_URLS: list[str] = published.TABLES["bad urls"]
TOO_MUCH = (
    f"HTTP/1.1 206 Part\r\nContent-Range: bytes {rig.MIDDLE - 1}-{len(rig.BODY) - 1}/"
    f"{len(rig.BODY)}\r\nContent-Length: {len(rig.BODY)}\r\n"
    f'ETag: "{hashlib.md5(rig.BODY).hexdigest()}"\r\n\r\n'
)
OK = b"HTTP/1.1 200 OK\r\n"
SOUND = rig.safetensors()
PAGE = b"\n<!doctype HTML><html><body>Sign in</body></html>"
ATTEMPTS = download.ATTEMPTS
MD5_OF_NOTHING = "md5=AAAAAAAAAAAAAAAAAAAAAA=="
SECRETS = ["?token=hunter2", "?X-Amz-Signature=hunter2&x=1", "?hunter2", "?sig=hunter2#hunter2"]
SHORT = rig.raw(OK + b"Content-Length: 1\r\n\r\n")
STRANGE = {
    "length": OK + b"Content-Length: abc\r\n\r\n" + SOUND,
    "length of many digits": OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + SOUND,
    "negative length": OK + b"Content-Length: -5\r\n\r\n" + SOUND,
    "two lengths": OK + b"Content-Length: 5, 6\r\n\r\n" + SOUND,
    "chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n",
    "wish to wait": b"HTTP/1.1 503 No\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n",
    "range": b"HTTP/1.1 206 P\r\nContent-Range: bytes " + b"9" * 5000 + b"-/1\r\n\r\n",
    "reason": b"HTTP/1.1 403 \x1b[31m" + b"red" * 9000 + b"\r\n\r\n",
    "status": b"\x1b" * 60_000 + b"\r\n\r\n",
    "headers": OK + b"A: b\r\n" * 200 + b"\r\n",
    "header": OK + b"A: " + b"b" * 100_000,
    "redirect": b"HTTP/1.1 302 Go\r\nLocation: \xe9\x07\r\n\r\n",
    "folded tag": OK + b"ETag: a\r\n b\r\nContent-Length: 9\r\n\r\nx",
}


def fetch(address: str, **options: Any) -> bytes:
    return download.fetch(address, wait=lambda _: None, **options).read_bytes()


def test_fetch_brings_the_file_once(
    server: rig.Server, url: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's bytes and their record for `sha256sum` alone; a second call asks nobody."""
    caplog.set_level(logging.INFO, logger="keras_vit.weights")
    path = download.fetch(url)
    record = path.with_name("ViT-B_16.npz.sha256")

    assert caplog.messages[0] == f"Downloading ViT-B_16.npz: 0 of {len(rig.BODY)} bytes are here."
    assert caplog.messages[1:] == ["Downloaded ViT-B_16.npz."]
    assert download.fetch(url) == path == download.cached_path(url)
    assert path.read_bytes() == rig.BODY
    assert rig.kept(home) == DONE
    assert len(server.requests) == 1
    assert record.read_text() == f"{hashlib.sha256(rig.BODY).hexdigest()}  ViT-B_16.npz\n"
    record.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"\.sha256 holds another"):
        download.fetch(url)


def test_files_of_one_name_are_kept_apart(server: rig.Server, url: str, home: Path) -> None:
    """By folder (the bucket has four ViT-B_16.npz), host, query, and whether it came protected."""
    server.files["/vit_models/sam/ViT-B_16.npz"] = rig.OTHER
    assert (fetch(url), fetch(url.replace("imagenet21k", "sam"))) == (rig.BODY, rig.OTHER)

    hosts = ("example.org/a", "example.org:8080/a", "[::1]/a", "storage.googleapis.com/vit_models")
    addresses = [f"{host}/x.npz{query}" for host in hosts for query in ("", "?v=1", "?v=2")]
    safe = [download.cached_path(f"https://{address}") for address in addresses]
    unsafe = [download.cached_path(f"http://{address}") for address in addresses]
    assert len({*safe, *unsafe}) == 24
    assert all("http+" in str(path) for path in unsafe)
    assert safe[3].relative_to(home / "models" / "keras_vit").parts[0] == "example.org_8080"
    assert safe[9].parts[-2:] == ("vit_models", "x.npz")


def test_urls_that_name_no_file_are_refused(home: Path) -> None:
    """One of no file of weights, or that would leave the cache; without its secrets."""
    for bad in BAD_URLS:
        with pytest.raises(ValueError, match="Received") as raised:
            download.fetch(bad)
        assert "hunter2" not in str(raised.value), bad
        assert str(raised.value).isprintable(), bad
    assert not home.exists()


def test_what_is_known_of_a_file_decides(server: rig.Server, url: str, home: Path) -> None:
    """A SHA-256 that is asked for, and that of the first use, after which either side changed."""
    with pytest.raises(ValueError, match="was asked for") as raised:
        download.fetch(url, sha256=hashlib.sha256(rig.OTHER).hexdigest())
    assert rig.one_sentence(raised.value)
    assert rig.kept(home) == set()

    path = download.fetch(url, sha256=hashlib.sha256(rig.BODY).hexdigest())
    for place in (0, 1000, len(rig.BODY) - 1):
        path.write_bytes(rig.flipped(rig.BODY, place))
        with pytest.raises(ValueError, match=r"\.sha256 holds another") as raised:
            download.fetch(url)
        assert rig.one_sentence(raised.value)
        assert str(path) in str(raised.value)
    path.unlink()
    assert fetch(url) == rig.BODY

    path.unlink()
    server.files[rig.NAME] = rig.OTHER
    with pytest.raises(ValueError, match="delete that record if the new content is right"):
        download.fetch(url)
    assert rig.kept(home) == {"ViT-B_16.npz.sha256"}
    path.with_name("ViT-B_16.npz.sha256").unlink()
    assert fetch(url) == rig.OTHER


def test_file_put_there_by_hand(server: rig.Server, url: str) -> None:
    """It is checked, recorded and used without the network; a cut copy is refused at once."""
    path = download.cached_path(url)
    path.parent.mkdir(parents=True)
    path.write_bytes(rig.BODY[: rig.MIDDLE])
    with pytest.raises(ValueError, match="is damaged") as raised:
        download.fetch(url)
    assert rig.one_sentence(raised.value)

    path.write_bytes(rig.BODY)
    assert download.fetch(url) == path
    assert path.with_name("ViT-B_16.npz.sha256").exists()
    assert server.requests == []


def test_mirror_url(server: rig.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """KERAS_VIT_MIRROR stands for host and bucket, "+" in names too; a proxy is used, set late."""
    name = "imagenet21k+imagenet2012/ViT-B_16-224.npz"
    server.files["/weights/imagenet21k%2Bimagenet2012/ViT-B_16-224.npz"] = rig.BODY
    monkeypatch.setenv("KERAS_VIT_MIRROR", f"{server.url}/weights/")

    path = download.fetch(f"{GOOGLE}/{name.replace('+', '%2B')}")

    assert path.read_bytes() == rig.BODY
    assert path == download.cached_path(f"{GOOGLE}/{name}")
    assert path.parts[-3:] == ("vit_models", *name.split("/"))

    server.files["http://weights.invalid/a/x.npz"] = rig.BODY
    monkeypatch.setenv("http_proxy", server.url)  # also one that is set later
    assert fetch("http://weights.invalid/a/x.npz") == rig.BODY


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_mirror_folder(
    prefix: str, tmp_path: Path, home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are used in place; one that is not there is never looked for elsewhere."""
    file = tmp_path / "mirror" / "imagenet21k" / "ViT-B_16.npz"
    monkeypatch.setenv("KERAS_VIT_MIRROR", f"{prefix}{tmp_path / 'mirror'}")
    with pytest.raises(FileNotFoundError, match=str(file)) as raised:
        download.fetch(f"{GOOGLE}/imagenet21k/ViT-B_16.npz")
    assert rig.one_sentence(raised.value)

    file.parent.mkdir(parents=True)
    file.write_bytes(rig.BODY)
    assert download.fetch(f"{GOOGLE}/imagenet21k/ViT-B_16.npz") == file
    assert rig.kept(home) == {"ViT-B_16.npz.sha256"}
    file.write_bytes(rig.flipped(rig.BODY, 1000))
    with pytest.raises(ValueError, match="holds another"):
        download.fetch(f"{GOOGLE}/imagenet21k/ViT-B_16.npz")
    assert fetch(url) == rig.BODY  # other hosts have no mirror

    monkeypatch.setenv("KERAS_VIT_MIRROR", "ftp://me:hunter2@example.org/weights")
    with pytest.raises(ValueError, match="http or https URL, or a folder") as refused:
        download.fetch(f"{GOOGLE}/sam/ViT-B_16.npz")
    assert "hunter2" not in str(refused.value)


def linked(body: bytes) -> rig.Fault:
    """The Hub's redirect to a large file, whose SHA-256 it says in a header of its own."""
    digest = hashlib.sha256(body).hexdigest()
    return rig.status(302, Location=rig.ELSEWHERE, X_Linked_ETag=f'"{digest}"')


# Faults that pass, what the server cannot do, and how many bytes are here at each further request;
# None where that is by chance.
PASSING: dict[str, tuple[list[rig.Fault], dict[str, Any], list[int] | None]] = {
    "statuses that pass": ([rig.status(code) for code in (500, 503, 429, 408)], {}, [0, 0, 0, 0]),
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
    "redirect with a body without end": (
        [rig.raw(b"HTTP/1.1 302 F\r\nLocation: /elsewhere.npz\r\n\r\n", each=bytes(2**16))],
        {},
        [0],
    ),
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
    monkeypatch.setattr(download, "TIMEOUT", 2.0)
    faults, switches, starts = PASSING[name]
    server.faults = list(faults)
    vars(server).update(switches)

    assert fetch(url) == rig.BODY
    assert len(server.requests) == 1 + len(faults)
    assert starts is None or server.starts == [0, *(max(here - 1, 0) for here in starts)]
    assert ("is damaged" in caplog.text) == ("flipped" in name)
    ranged = [request for request in server.requests if "range" in request]
    assert all(request["if-range"] == server.tag(rig.BODY) for request in ranged)


def give_up(server: rig.Server, url: str) -> Path:
    """Leaves half the file in the cache; returns its path."""
    server.faults = [rig.cut(rig.MIDDLE), *[rig.status(503)] * (download.ATTEMPTS - 1)]
    with pytest.raises(ConnectionError, match="Gave up"):
        fetch(url)
    return download.cached_path(url).with_name("ViT-B_16.npz.partial")


def test_resume_in_a_later_call(
    server: rig.Server, url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call that gave up left behind is used by the next one, once the disk has room."""
    partial = give_up(server, url)
    assert rig.kept(home) == {"ViT-B_16.npz.partial", "ViT-B_16.npz.version"}
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        with pytest.raises(OSError, match=r"No space left .* set KERAS_HOME") as raised:
            fetch(url)
        assert url in str(raised.value)

    there = partial.stat().st_size
    assert fetch(url) == rig.BODY
    assert server.starts[-1] == there - 1 >= rig.MIDDLE - 2
    assert rig.kept(home) == DONE


@pytest.mark.parametrize(
    "fault", ["longer than the file", "damaged", "the rest is too long", "none, unchecked"]
)
def test_a_partial_file_that_does_not_fit(fault: str, server: rig.Server, url: str) -> None:
    """It is dropped where the file is shorter (416) or the whole does not have its checksum.

    Of a file whose process was killed after its last byte, one byte is fetched.
    """
    partial = give_up(server, url)
    if fault == "longer than the file":
        partial.write_bytes(rig.BODY + b"x")
        server.faults = [rig.status(416)]
    elif fault == "damaged":
        partial.write_bytes(rig.flipped(partial.read_bytes(), 1000))
    elif fault == "none, unchecked":
        partial.write_bytes(rig.BODY)
    else:
        server.faults = [rig.raw(TOO_MUCH.encode() + rig.BODY)]
    assert fetch(url) == rig.BODY
    assert fault != "none, unchecked" or server.starts[-1] == len(rig.BODY) - 1


def test_damaged_notes_of_a_partial_file(server: rig.Server, url: str) -> None:
    """What an interrupted download noted is not trusted to be whole, or of this address."""
    notes = give_up(server, url).with_suffix(".version")
    whole = notes.read_text()
    for damaged in ("", whole[:-40], f"{whole}\r\nX: y", whole.replace("http", "ftp"), "\n\xff"):
        notes.write_text(damaged)
        server.faults = [rig.status(403)]
        with pytest.raises(ConnectionError, match="403"):
            download.fetch(url)
        assert server.starts[-1] == 0


@pytest.mark.parametrize("if_range", [True, False])
def test_changed_file_is_not_glued(server: rig.Server, if_range: bool) -> None:
    """If the file changes between two attempts, the result is the new one, whole."""
    old, new = rig.safetensors(50_000), rig.safetensors(50_000).replace(b"w", b"v", 1)
    server.if_range = if_range  # False: the server answers with a part of the new file
    server.hashes = ()
    server.files["/vit.safetensors"] = old  # no archive: nothing else would show the mixture
    change = rig.cut(rig.MIDDLE, then=lambda _: server.files.update({"/vit.safetensors": new}))
    server.faults = [change]

    assert fetch(f"{server.url}/vit.safetensors") == new


def test_waits_grow_and_follow_the_server(server: rig.Server, url: str) -> None:
    """They double up to the last attempt; the server's own wish is respected, up to a minute."""
    waits: list[float] = []
    server.faults = [rig.status(500)] * download.ATTEMPTS
    with pytest.raises(ConnectionError, match="500"):
        download.fetch(url, wait=waits.append)
    server.faults = [rig.status(429, Retry_After="7"), rig.status(503, Retry_After="86400")]
    download.fetch(url, wait=waits.append)

    assert waits == [1.0, 2.0, 4.0, 8.0, 7.0, download.LONGEST_WAIT]


H5 = io.BytesIO()
with h5py.File(H5, "w") as file:
    file["layers/w"] = np.arange(300.0)
FILES = {
    "x.npz": rig.BODY,
    "x.safetensors": SOUND,
    "x.weights.h5": H5.getvalue(),
    "config.json": b'{"a": 1}',
}


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
    requests: int = 2  # what is seen after it came is asked for once more: that may mend it
    keeps_part: bool = False
    switches: dict[str, Any] = dataclasses.field(default_factory=dict)


def refused(fault: rig.Fault, words: str, *, requests: int = 1, **options: Any) -> Final:
    return Final(fault, words, ConnectionError, requests=requests, **options)


def redirect(target: str, words: str, *, requests: int = 1) -> Final:
    return refused(rig.status(302, Location=target), words, requests=requests)


def settings(content: bytes, words: str = "no.* JSON|is damaged", requests: int = 2) -> Final:
    return Final(body(content), words, name="config.json", requests=requests)


FINAL = {
    "500": refused(rig.status(500), "500", requests=ATTEMPTS),
    "cut again": refused(rig.cut(100), "broke off after", requests=ATTEMPTS, keeps_part=True),
    "404": Final(
        rig.status(404), "no file at .*404.*check the name", FileNotFoundError, requests=1
    ),
    "403": refused(rig.status(403), r"refused \(403"),
    "204": refused(rig.raw(b"HTTP/1.1 204 No Content\r\n\r\n"), "204 No Content"),
    "web page of a type": refused(body(SOUND, b"Content-Type: text/html; charset=a"), "a web page"),
    # What comes under a good status instead of the file is shown.
    "web page": Final(body(PAGE), r"begins with b'\\n<!doctype"),
    "web page for an archive": Final(body(PAGE), r"begins with b'\\n<!doctype", name="x.npz"),
    "gzip": Final(body(gzip.compress(SOUND, mtime=0)), r"begins with b'\\x1f\\x8b"),
    "empty": Final(body(b""), "begins with b''"),
    **{
        f"cut {name}": Final(body(FILES[name][:-9]), "is damaged .not a whole", name=name)
        for name in FILES
    },
    **{
        f"zip archive as {name}": Final(body(rig.archive(3, floats=9)), "not a whole", name=name)
        for name in [*FILES][1:]
    },
    "cut without length": Final(rig.raw(OK + b"\r\n" + SOUND[:-1]), "not a whole .safetensors"),
    "too long": Final(body(SOUND + b"x"), "not a whole .safetensors"),
    "endless": Final(
        rig.raw(OK + b"\r\n", each=bytes(2**16)), "the 1,048,576 bytes", switches={"LARGEST": 2**20}
    ),
    # Settings are one object of JSON, of at most 16 MiB.
    "list": settings(b"[1]"),
    "deep JSON": settings(b"[" * 100_000),
    "no text": settings(b"\xff{}"),
    "20 MB of settings": settings(b" " * 20_000_000, "the 16,777,216 bytes", requests=1),
    # Damage that stays.
    "flipped": Final(rig.flip(rig.MIDDLE), "is damaged", name="x.npz"),
    "flipped, no checksum": Final(
        rig.flip(rig.MIDDLE), "its own CRC", name="x.npz", switches={"hashes": ()}
    ),
    **{
        f"wrong checksum {hashes}": Final(
            None, "the server states", name="x.npz", switches={"hashes": (hashes,)}
        )
        for hashes in (MD5_OF_NOTHING, "crc32c=AAAAAA==", f"crc32c=AAAAAA==,{MD5_OF_NOTHING}")
    },
    "another SHA-256 of the Hub": Final(
        linked(rig.OTHER), "its publisher states", name="x.npz", requests=4, switches={"hashes": ()}
    ),
    # Redirects that are not followed.
    "to a file": redirect("file:///etc/passwd", "not http or https"),
    "to data": redirect("data:,x", "not http or https"),
    "to a user": redirect("http://me:hunter2@127.0.0.1/x.npz", "user name"),
    "to nothing": redirect("http://[::1/x.npz", "cannot be read"),
    "circle": redirect("/x.safetensors", "circle", requests=31),
    "nowhere": redirect("", "is no file .302"),
}


@pytest.mark.parametrize("final", FINAL.values(), ids=FINAL)
def test_what_stays_is_refused(
    final: Final, server: rig.Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence with the address and the reason; no file of that name, and later the file."""
    address = f"{server.url}/{final.name}"
    server.files |= {f"/{name}": content for name, content in FILES.items()}
    server.faults = [final.fault] * 100 if final.fault else []
    with monkeypatch.context() as patch:
        for name, value in final.switches.items():
            patch.setattr(download if name.isupper() else server, name, value)
        with pytest.raises(final.kind, match=final.words) as raised:
            fetch(address)

    assert address in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert rig.one_sentence(raised.value)
    assert len(server.requests) == final.requests
    part = {f"{final.name}.partial", "x.safetensors.version"} if final.keeps_part else set()
    assert rig.kept(home) == part
    server.faults = []
    assert fetch(address) == FILES[final.name]


def test_no_network(home: Path) -> None:
    """Without a network the error names the URL, the place for the file, and the setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}/imagenet21k/ViT-B_16.npz"
    waits: list[float] = []

    with pytest.raises(ConnectionError, match="Connection refused") as raised:
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
        with pytest.raises(ConnectionError, match=r"Cannot reach .*CERTIFICATE_VERIFY_FAILED"):
            download.fetch(safe.url + rig.NAME)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "certificate.pem"))
        safe.faults = [rig.status(302, Location=f"{server.url}{rig.NAME}")]
        with pytest.raises(ConnectionError, match="redirects to http, and not https"):
            download.fetch(safe.url + rig.NAME)
        assert (rig.kept(home), server.requests) == (set(), [])

        safe.faults = [rig.status(302, Location=rig.ELSEWHERE)]
        assert fetch(safe.url + rig.NAME) == rig.BODY


def test_password_stays_with_its_host(server: rig.Server) -> None:
    """A redirect to another address does not get the password of the first."""
    with rig.serving() as other:
        server.files["/x.safetensors"] = other.files["/y.safetensors"] = SOUND
        server.faults = [rig.status(302, Location=f"{other.url}/y.safetensors")]
        assert fetch(f"{server.url}/x.safetensors".replace("//", "//me:hunter2@")) == SOUND
        assert "authorization" in server.requests[0]
        assert "authorization" not in other.requests[0]


@pytest.mark.parametrize("query", SECRETS)
@pytest.mark.parametrize("user", ["", "me:hunter2@", "hunter2@"])
def test_secrets_of_an_address_reach_no_text(
    user: str, query: str, server: rig.Server, caplog: pytest.LogCaptureFixture, home: Path
) -> None:
    """No error, log or file of the cache holds a password, a token or a signature."""
    caplog.set_level(logging.DEBUG, logger="keras_vit")
    address = f"{server.url}/a/x.safetensors{query}".replace("//", f"//{user}", 1)
    server.files[f"/a/x.safetensors{query.partition('#')[0]}"] = SOUND
    for fault in (rig.status(403), rig.status(404), rig.cut(100), body(PAGE), SHORT):
        server.faults = [fault] * 20
        with pytest.raises((OSError, ValueError)) as raised:
            fetch(address)
        files = [file.read_bytes() for file in home.rglob("*") if file.is_file()]
        names = [str(file) for file in home.rglob("*")]
        assert "hunter2" not in f"{raised.value!r}{caplog.text}{files}{names}"
    server.faults = []
    assert fetch(address) == SOUND
    assert ("authorization" in server.requests[-1]) == bool(user)


@pytest.mark.parametrize("name", STRANGE)
def test_strange_headers(name: str, server: rig.Server) -> None:
    """Whatever stands in a header: the sound file comes, or one short plain sentence."""
    server.files["/x.safetensors"] = SOUND
    server.faults = [rig.raw(STRANGE[name])] * 20
    address = f"{server.url}/x.safetensors"
    said = ""
    try:
        assert fetch(address) == SOUND
    except (ConnectionError, ValueError) as error:
        said = str(error)
    assert said == "" or address in said
    assert said.isprintable()
    assert len(said) < 600


def test_archive_that_unpacks_to_too_much(tmp_path: Path) -> None:
    """100 MB of zeros in 100 KB are refused unread; heads of zeros beside weights are not."""
    file = tmp_path / "x.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", bytes(100_000_000))
    with pytest.raises(ValueError, match="unpack to 100,000,000"):
        download.check_structure(file, ".npz", "x.npz")
    np.savez_compressed(file, w=np.ones(9), head=np.zeros((21_843, 192), np.float32))
    download.check_structure(file, ".npz", "x.npz")


def test_the_checks_of_these_tests_can_fail(tmp_path: Path) -> None:
    """The list of kept files is not always empty; two sentences and a line break are refused."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.partial").write_bytes(b"")
    (tmp_path / "a" / "x.lock").write_bytes(b"")

    assert rig.kept(tmp_path) == {"x.partial"}
    assert rig.one_sentence(ValueError("Cannot reach http://x.y/z.npz (a, b): do it."))
    assert not rig.one_sentence(ValueError("It failed. Do something."))
    assert not rig.one_sentence(ValueError("It failed\nsomewhere."))
