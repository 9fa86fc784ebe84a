"""What a download keeps, what it checks and where it looks, against a real HTTP server."""

import hashlib
import logging
import os
from pathlib import Path

import download_rig as rig
import pytest

from keras_vit.weights import download

GOOGLE = "https://storage.googleapis.com/vit_models"


server, url, home = rig.server_fixture, rig.url_fixture, rig.home_fixture


def test_fetch_brings_the_file_once(
    server: rig.Server, url: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's bytes and their record for `sha256sum` alone; a second call asks nobody."""
    caplog.set_level(logging.INFO, logger="keras_vit.weights")
    path = download.fetch(url)
    first, last = (record.getMessage() for record in caplog.records)
    record = path.with_name("ViT-B_16.npz.sha256")

    assert first == "Downloading ViT-B_16.npz: 0.2 MiB."
    assert last.startswith("Downloaded ViT-B_16.npz in ")
    assert path.read_bytes() == rig.BODY
    assert rig.kept(home) == {"ViT-B_16.npz", "ViT-B_16.npz.sha256"}
    # As a kill after the last step but one leaves it.
    path.with_name("ViT-B_16.npz.partial.json").write_text("{}")
    assert download.fetch(url) == path == download.cached_path(url)
    assert rig.kept(home) == {"ViT-B_16.npz", "ViT-B_16.npz.sha256"}
    assert len(server.requests) == 1
    assert record.read_text() == f"{hashlib.sha256(rig.BODY).hexdigest()}  ViT-B_16.npz\n"
    record.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"\.sha256 holds another"):
        download.fetch(url)


def test_files_of_one_name_are_kept_apart(server: rig.Server, url: str, home: Path) -> None:
    """By folder (the bucket has four ViT-B_16.npz), host, query, and whether it came protected."""
    server.files["/vit_models/sam/ViT-B_16.npz"] = rig.OTHER
    first, second = download.fetch(url), download.fetch(url.replace("imagenet21k", "sam"))
    assert (first.read_bytes(), second.read_bytes()) == (rig.BODY, rig.OTHER)

    hosts = ("example.org/a", "example.org:8080/a", "storage.googleapis.com/vit_models/sam")
    addresses = [f"{host}/x.npz{query}" for host in hosts for query in ("", "?v=1", "?v=2")]
    safe = [download.cached_path(f"https://{address}") for address in addresses]
    unsafe = [download.cached_path(f"http://{address}") for address in addresses]
    assert len({*safe, *unsafe}) == 18
    assert all("http+" in str(path) for path in unsafe)
    assert safe[3].relative_to(home / "models" / "keras_vit").parts[0] == "example.org_8080"
    assert safe[6].parts[-3:] == ("vit_models", "sam", "x.npz")


BAD_URLS = [
    "ftp://me:hunter2@example.org/x.npz",
    "x.npz",
    "https://example.org/",
    "https://example.org/folder/",
    "https://example.org/../x.npz",
    "https://example.org/a/%2e%2e/%2e%2e/x.npz",
    "https://../x.npz",
    "https://example.org/a\\b.npz",
    "https://example.org/a b.npz",
    "https://example.org/x.npz.sha256",
    "https://example.org/x.npz.partial",
    "https://me:hunter2@[::1/x.npz",
    "https://me:hunter2/x@example.org/x.npz",
    "https://example.org/a%0ab.npz?token=hunter2",
    "https://example.org/%ff.npz?token=hunter2",
    "https://example.org/a\x1bb.npz?token=hunter2",
    f"https://example.org/{'a' * 300}.npz?token=hunter2",
    "https://example.org/x.npz.partial/y.npz?token=hunter2",
]


def test_urls_that_name_no_file_are_refused(home: Path) -> None:
    """One that is no file, or would leave the cache, in a sentence without its secrets."""
    for bad in BAD_URLS:
        with pytest.raises(ValueError, match=r"Received|is no URL") as raised:
            download.fetch(bad)
        assert "hunter2" not in str(raised.value), bad
        assert str(raised.value).isprintable(), bad
    assert not home.exists()


def test_known_sha256(url: str, home: Path) -> None:
    """A SHA-256 from the catalogue decides, whatever the server says of the file."""
    for sha256 in ("", "abc", "0" * 63, "z" * 64, " " + "0" * 64):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            download.fetch(url, sha256=sha256)
    assert not home.exists()  # refused before anything is asked
    with pytest.raises(ValueError, match="was asked for") as raised:
        download.fetch(url, sha256=hashlib.sha256(rig.OTHER).hexdigest())
    assert rig.one_sentence(raised.value)
    assert rig.kept(home) == set()
    right = hashlib.sha256(rig.BODY).hexdigest().upper()
    assert download.fetch(url, sha256=right).read_bytes() == rig.BODY


def test_kept_file_that_changed(url: str) -> None:
    """One flipped byte in a kept file is seen at the next use; deleting the file repairs it."""
    path = download.fetch(url)
    for place in (0, 1000, len(rig.BODY) - 1):
        path.write_bytes(rig.flipped(rig.BODY, place))
        with pytest.raises(ValueError, match=r"\.sha256 holds another") as raised:
            download.fetch(url)
        assert rig.one_sentence(raised.value)
    path.unlink()
    assert download.fetch(url).read_bytes() == rig.BODY


def test_published_file_that_changed(server: rig.Server, url: str, home: Path) -> None:
    """If the publisher replaces a file, a machine that has used the old one says so."""
    path = download.fetch(url)
    path.unlink()
    server.files[rig.NAME] = rig.OTHER

    with pytest.raises(ValueError, match="delete that record if the new content is right"):
        download.fetch(url)

    assert rig.kept(home) == {"ViT-B_16.npz.sha256"}
    path.with_name("ViT-B_16.npz.sha256").unlink()
    assert download.fetch(url).read_bytes() == rig.OTHER


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
    """KERAS_VIT_MIRROR stands for host and bucket; folders keep their names, "+" included."""
    name = "imagenet21k+imagenet2012/ViT-B_16-224.npz"
    server.files["/weights/imagenet21k%2Bimagenet2012/ViT-B_16-224.npz"] = rig.BODY
    monkeypatch.setenv("KERAS_VIT_MIRROR", f"{server.url}/weights/")

    path = download.fetch(f"{GOOGLE}/{name.replace('+', '%2B')}")

    assert path.read_bytes() == rig.BODY
    assert path == download.cached_path(f"{GOOGLE}/{name}")
    assert path.parts[-3:] == ("vit_models", *name.split("/"))


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_mirror_folder_is_used_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, home: Path
) -> None:
    """A mirror folder's files are not copied; their SHA-256 is kept in the cache."""
    file = tmp_path / "mirror" / "imagenet21k" / "ViT-B_16.npz"
    file.parent.mkdir(parents=True)
    file.write_bytes(rig.BODY)
    monkeypatch.setenv("KERAS_VIT_MIRROR", f"{prefix}{tmp_path / 'mirror'}")

    assert download.fetch(f"{GOOGLE}/imagenet21k/ViT-B_16.npz") == file
    assert rig.kept(home) == {"ViT-B_16.npz.sha256"}
    file.write_bytes(rig.flipped(rig.BODY, 1000))
    with pytest.raises(ValueError, match="holds another"):
        download.fetch(f"{GOOGLE}/imagenet21k/ViT-B_16.npz")


def test_mirror_without_the_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, never a silent download from elsewhere; other hosts are left alone."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path))
    with pytest.raises(FileNotFoundError) as raised:
        download.fetch(f"{GOOGLE}/imagenet21k/ViT-B_16.npz")
    assert str(tmp_path / "imagenet21k" / "ViT-B_16.npz") in str(raised.value)
    assert rig.one_sentence(raised.value)
    assert download.fetch(url).read_bytes() == rig.BODY

    monkeypatch.setenv("KERAS_VIT_MIRROR", "ftp://me:hunter2@example.org/weights")
    with pytest.raises(ValueError, match="http or https URL, or a folder") as refused:
        download.fetch(f"{GOOGLE}/sam/ViT-B_16.npz")
    assert "hunter2" not in str(refused.value)


def test_proxy_is_asked(server: rig.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's proxy is used, and one that is set later too."""
    server.files["http://weights.invalid/a/x.npz"] = rig.BODY
    monkeypatch.setenv("http_proxy", server.url)

    assert download.fetch("http://weights.invalid/a/x.npz").read_bytes() == rig.BODY


LEVELS = ["keras", "models", "keras_vit", "file", "record"]


@pytest.mark.parametrize("level", LEVELS)
def test_cache_that_others_may_change_is_refused(
    level: str, url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or file that belongs to another user, or that all may write to, is not trusted."""
    path = download.fetch(url)
    place = {"file": path, "record": path.with_name(f"{path.name}.sha256")}.get(level)
    place = place or next(folder for folder in path.parents if folder.name == level)
    with monkeypatch.context() as patch:
        if os.getuid() == 0:  # who does not trust another user's file either
            os.chown(place, 1234, -1)
        else:
            other = os.getuid() + 1
            patch.setattr(os, "getuid", lambda: other)
        with pytest.raises(PermissionError, match="another user") as raised:
            download.fetch(url)
    if os.getuid() == 0:
        assert "another user (number 1234)" in str(raised.value)
        os.chown(place, 0, -1)
    download.fetch(url)
    place.chmod(0o777)
    with pytest.raises(PermissionError, match="anyone") as raised:
        download.fetch(url)
    assert "set KERAS_HOME" in str(raised.value)
    assert rig.one_sentence(raised.value)


def test_sticky_folder_above_is_fine(url: str, home: Path) -> None:
    """KERAS_HOME may be as /tmp is; what we make in it is closed, whatever the umask."""
    home.mkdir()
    home.chmod(0o1777)
    before = os.umask(0)
    try:
        path = download.fetch(url)
    finally:
        os.umask(before)

    assert path.parent.stat().st_mode & 0o022 == 0
    assert download.fetch(url) == path
