"""Interrupted, refused and changed downloads, against a real HTTP server with faults."""

import socket
from collections.abc import Iterator
from pathlib import Path

import download_rig as rig
import pytest

from keras_vit.weights import _transfer, download


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
    server.faults = [rig.cut(rig.MIDDLE), *[rig.status(503)] * _transfer.ATTEMPTS]
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
    server.faults = [rig.cut(rig.MIDDLE), *[rig.status(503)] * _transfer.ATTEMPTS]
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
    monkeypatch.setattr(_transfer, "TIMEOUT", 0.3)
    server.faults = [rig.stall(rig.MIDDLE)]

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY
    assert server.requests[1]["range"] == f"bytes={rig.MIDDLE}-"


def test_retries_are_bounded(server: rig.Server, url: str, waits: list[float], home: Path) -> None:
    """Five failures in a row end the download, with growing waits between them."""
    server.faults = [rig.status(500)] * 100

    with pytest.raises(ConnectionError, match="500") as raised:
        download.fetch(url, wait=waits.append)

    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert len(server.requests) == _transfer.ATTEMPTS
    assert rig.one_sentence(raised.value)
    assert rig.kept(home) == set()


def test_always_truncated_body_ends(server: rig.Server, url: str, home: Path) -> None:
    """A server that never sends more than half is given up, and no half file gets the name."""
    server.faults = [rig.cut(rig.MIDDLE)] * 100

    with pytest.raises(ConnectionError, match="broke off after") as raised:
        download.fetch(url, wait=lambda _: None)

    assert len(server.requests) == _transfer.ATTEMPTS
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

    assert waits == [7.0, _transfer.LONGEST_WAIT]


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
