"""Tests of keras_vit.weights.sources.reach: where published weights would come from."""

from collections.abc import Iterator
from pathlib import Path

import download_rig as rig
import pytest

from keras_vit.weights import resolve
from keras_vit.weights.download import cached_path
from keras_vit.weights.sources import reach

ROW = resolve("Ti/16", "imagenet21k")


@pytest.fixture
def server() -> Iterator[rig.Server]:
    with rig.serving() as server:
        server.files[f"/{ROW.name}.npz"] = rig.BODY
        yield server


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("KERAS_VIT_MIRROR", raising=False)
    return tmp_path / "keras"


def test_a_server_is_asked_for_one_byte(
    server: rig.Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request, of the first byte; nothing is kept."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", server.url)
    assert reach("imagenet21k", "Ti/16") == "mirror"
    assert [request["range"] for request in server.requests] == ["bytes=0-0"]
    assert not home.exists()


def test_what_is_in_the_cache_is_not_asked_for(
    server: rig.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_VIT_MIRROR", server.url)
    file = cached_path(ROW.url)
    file.parent.mkdir(parents=True)
    file.write_bytes(rig.BODY)
    assert reach("imagenet21k", "Ti/16") == "cache"
    assert not server.requests


def test_a_folder_has_the_file_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "mirror"))
    with pytest.raises(ConnectionError, match=r"there is no .*Ti_16.*\.npz"):
        reach("imagenet21k", "Ti/16")
    file = tmp_path / "mirror" / f"{ROW.name}.npz"
    file.parent.mkdir(parents=True)
    file.write_bytes(rig.BODY)
    assert reach("imagenet21k", "Ti/16") == "mirror"


FAULTS = {
    "gone": (rig.status(404), r"no file at .*404"),
    "refused": (rig.status(403), r"was refused \(403"),
    "busy": (rig.status(503), r"^127\.0\.0\.1:\d+: 503"),
    "sign-in page": (
        rig.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>"),
        "answered with a web page",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_reached_has_a_reason(
    fault: str, server: rig.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason alone, as the middle of a sentence."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", server.url)
    server.faults, message = [FAULTS[fault][0]], FAULTS[fault][1]
    with pytest.raises(ConnectionError, match=message) as caught:
        reach("imagenet21k", "Ti/16")
    assert not str(caught.value).endswith(".")


def test_nobody_is_waited_for_long(server: rig.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes the request and says nothing; a host that is not there."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", server.url)
    server.faults = [lambda handler, _: handler.server.released.wait() and False]
    with pytest.raises(ConnectionError, match="127"):
        reach("imagenet21k", "Ti/16", seconds=0.3)
    monkeypatch.setenv("KERAS_VIT_MIRROR", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9: Connection refused"):
        reach("imagenet21k", "Ti/16")


def test_a_name_that_nobody_publishes_is_an_error() -> None:
    with pytest.raises(ValueError, match="There are no weights 'imagenet22k'"):
        reach("imagenet22k", "Ti/16")
