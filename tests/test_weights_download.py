"""What a download keeps, what it checks and where it looks, against a real HTTP server."""

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import download_rig as rig
import pytest

from keras_vit.weights import download, transfer

GOOGLE = "https://storage.googleapis.com/vit_models"


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


def test_fetch_brings_the_file_once(server: rig.Server, url: str, home: Path) -> None:
    """The bytes are the server's, nothing else is left behind, and a second call asks nobody."""
    path = download.fetch(url)

    assert path.read_bytes() == rig.BODY
    assert rig.kept(home) == {"ViT-B_16.npz", "ViT-B_16.npz.sha256"}
    assert download.fetch(url) == path == download.cached_path(url)
    assert len(server.requests) == 1


def test_record_is_what_sha256sum_reads(url: str) -> None:
    """The record beside the file is a line of `sha256sum`."""
    path = download.fetch(url)

    expected = f"{hashlib.sha256(rig.BODY).hexdigest()}  ViT-B_16.npz\n"
    assert path.with_name("ViT-B_16.npz.sha256").read_text() == expected


def test_equal_names_from_two_folders_are_kept_apart(server: rig.Server, url: str) -> None:
    """ViT-B_16.npz exists in four folders of the bucket: each has its own copy."""
    server.files["/vit_models/sam/ViT-B_16.npz"] = rig.OTHER

    first, second = download.fetch(url), download.fetch(url.replace("imagenet21k", "sam"))

    assert (first.read_bytes(), second.read_bytes()) == (rig.BODY, rig.OTHER)


def test_redirects_are_followed(server: rig.Server, url: str) -> None:
    """A mirror may send the client elsewhere."""
    server.files["/elsewhere.npz"] = rig.BODY
    server.faults = [rig.status(302, Location=f"{server.url}/elsewhere.npz")]

    assert download.fetch(url).read_bytes() == rig.BODY


def test_body_without_length(server: rig.Server, url: str) -> None:
    """A chunked answer is whole when its last chunk came, and is tried again when it did not."""
    server.length = False
    server.faults = [rig.cut(rig.MIDDLE)]

    assert download.fetch(url, wait=lambda _: None).read_bytes() == rig.BODY
    assert len(server.requests) == 2


BAD_URLS = [
    "ftp://example.org/x.npz",
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
]


@pytest.mark.parametrize("bad", BAD_URLS)
def test_urls_that_name_no_file_are_refused(bad: str, home: Path) -> None:
    """A URL that is no file, or that would leave the cache, is refused before a byte is written."""
    with pytest.raises(ValueError, match="Received"):
        download.fetch(bad)

    assert not home.exists()


def test_queries_are_kept_apart(home: Path) -> None:
    """Two URLs that differ in their query are two files."""
    first = download.cached_path("https://example.org:8080/a/x.npz?version=1")
    second = download.cached_path("https://example.org:8080/a/x.npz?version=2")

    assert first != second
    assert first.relative_to(home / "models" / "keras_vit").parts[0] == "example.org_8080"


def test_byte_flipped_on_the_way(
    server: rig.Server, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A download that fails the server's checksum is made again."""
    server.faults = [rig.flip(rig.MIDDLE)]

    assert download.fetch(url).read_bytes() == rig.BODY
    assert len(server.requests) == 2
    assert "arrived damaged" in caplog.text


def test_byte_always_flipped(server: rig.Server, url: str, home: Path) -> None:
    """Two damaged downloads end in an error and leave nothing."""
    server.faults = [rig.flip(rig.MIDDLE)] * 10

    with pytest.raises(ValueError, match="arrived damaged twice") as raised:
        download.fetch(url)

    assert rig.one_sentence(raised.value)
    assert len(server.requests) == 2
    assert rig.kept(home) == set()


def test_flipped_byte_without_checksum_header(server: rig.Server, url: str, home: Path) -> None:
    """The archive's own CRCs find damage when the server sends no checksum."""
    server.hashes = ()
    server.faults = [rig.flip(rig.MIDDLE)] * 10

    with pytest.raises(ValueError, match="archive"):
        download.fetch(url)

    assert rig.kept(home) == set()


def test_damage_in_the_resumed_part(server: rig.Server, url: str) -> None:
    """Damage in what an earlier attempt wrote is found too."""
    server.faults = [rig.cut(rig.MIDDLE), *[rig.status(503)] * transfer.ATTEMPTS]
    with pytest.raises(ConnectionError):
        download.fetch(url, wait=lambda _: None)
    partial = download.cached_path(url).with_name("ViT-B_16.npz.partial")
    partial.write_bytes(rig.flipped(partial.read_bytes(), 1000))

    assert download.fetch(url).read_bytes() == rig.BODY


def crc32c_header(body: bytes) -> str:
    return f"crc32c={base64.b64encode(rig.reference_crc32c(body).to_bytes(4, 'big')).decode()}"


WRONG_HASHES = [
    ("md5=AAAAAAAAAAAAAAAAAAAAAA==",),
    ("crc32c=AAAAAA==",),
    ("crc32c=AAAAAA==,md5=AAAAAAAAAAAAAAAAAAAAAA==",),
]


@pytest.mark.parametrize("hashes", WRONG_HASHES)
def test_wrong_checksum_header(
    server: rig.Server, url: str, home: Path, hashes: tuple[str, ...]
) -> None:
    """A file that is not what the header states is not kept, whichever checksum it is."""
    server.hashes = hashes

    with pytest.raises(ValueError, match="the server states"):
        download.fetch(url)

    assert rig.kept(home) == set()


def test_crc32c_alone_is_checked(server: rig.Server, url: str) -> None:
    """Objects that were uploaded in parts have no MD5: their CRC-32C is compared."""
    server.hashes = (crc32c_header(rig.BODY),)

    assert download.fetch(url).read_bytes() == rig.BODY


def test_two_checksum_headers(server: rig.Server, url: str) -> None:
    """Google sends the two checksums as two headers of one name."""
    md5 = base64.b64encode(hashlib.md5(rig.BODY).digest()).decode()
    server.hashes = (crc32c_header(rig.BODY), f"md5={md5}")

    assert download.fetch(url).read_bytes() == rig.BODY


@pytest.mark.parametrize("right", [True, False])
def test_known_sha256(url: str, home: Path, right: bool) -> None:
    """A SHA-256 from the catalogue decides, whatever the server says of the file."""
    sha256 = hashlib.sha256(rig.BODY if right else rig.OTHER).hexdigest()

    if right:
        assert download.fetch(url, sha256=sha256.upper()).read_bytes() == rig.BODY
        return
    with pytest.raises(ValueError, match="was asked for") as raised:
        download.fetch(url, sha256=sha256)
    assert rig.one_sentence(raised.value)
    assert rig.kept(home) == set()


@pytest.mark.parametrize("place", [0, 1000, len(rig.BODY) - 1])
def test_kept_file_that_changed(url: str, place: int) -> None:
    """One flipped byte in a kept file is seen at the next use; deleting the file repairs it."""
    path = download.fetch(url)
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
    """A file copied to its place is checked, recorded and used without the network."""
    path = download.cached_path(url)
    path.parent.mkdir(parents=True)
    path.write_bytes(rig.BODY)

    assert download.fetch(url) == path
    assert path.with_name("ViT-B_16.npz.sha256").exists()
    assert server.requests == []


def test_half_file_put_there_by_hand(url: str) -> None:
    """A cut copy is refused at its first use."""
    path = download.cached_path(url)
    path.parent.mkdir(parents=True)
    path.write_bytes(rig.BODY[: rig.MIDDLE])

    with pytest.raises(ValueError, match="is damaged") as raised:
        download.fetch(url)

    assert rig.one_sentence(raised.value)


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


def test_mirror_folder_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that lacks a file is an error, never a silent download from elsewhere."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path))

    with pytest.raises(FileNotFoundError) as raised:
        download.fetch(f"{GOOGLE}/imagenet21k/ViT-B_16.npz")

    assert str(tmp_path / "imagenet21k" / "ViT-B_16.npz") in str(raised.value)
    assert rig.one_sentence(raised.value)


def test_mirror_leaves_other_hosts_alone(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL of the user's own is fetched from where it says."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path))

    assert download.fetch(url).read_bytes() == rig.BODY


def test_proxy_is_asked(server: rig.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's proxy is used, and one that is set later too."""
    server.files["http://weights.invalid/a/x.npz"] = rig.BODY
    monkeypatch.setenv("http_proxy", server.url)

    assert download.fetch("http://weights.invalid/a/x.npz").read_bytes() == rig.BODY


def test_http_and_https_are_kept_apart(home: Path) -> None:
    """What came unprotected is not used for an address that is protected, nor Google's for both."""
    for host in ("example.org/a", "example.org:8080/a", "storage.googleapis.com/vit_models/sam"):
        places = [download.cached_path(f"{scheme}://{host}/x.npz") for scheme in ("http", "https")]
        assert places[0] != places[1]
        assert "http+" in str(places[0])
    assert download.cached_path(f"{GOOGLE}/sam/x.npz").parts[-3:] == ("vit_models", "sam", "x.npz")


STRANGE_URLS = [
    "https://me:hunter2@[::1/x.npz",
    "https://me:hunter2/x@example.org/x.npz",
    "https://example.org/a%0ab.npz?token=hunter2",
    "https://example.org/%ff.npz?token=hunter2",
    "https://example.org/a\x1bb.npz?token=hunter2",
    f"https://example.org/{'a' * 300}.npz?token=hunter2",
    "https://example.org/x.npz.partial/y.npz?token=hunter2",
    "ftp://me:hunter2@example.org/x.npz",
]


@pytest.mark.parametrize("bad", STRANGE_URLS)
def test_urls_that_cannot_be_kept_are_refused(bad: str, home: Path) -> None:
    """Addresses that make no good file name are refused in a sentence without their secrets."""
    with pytest.raises(ValueError, match=r"Received|is no URL") as raised:
        download.fetch(bad)

    assert "hunter2" not in str(raised.value)
    assert str(raised.value).isprintable()
    assert not home.exists()


@pytest.mark.parametrize("level", ["keras", "models", "keras_vit", "file", "record"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_cache_that_others_may_change_is_refused(
    level: str, is_ours: bool, url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or file that belongs to another user, or that all may write to, is not trusted."""
    path = download.fetch(url)
    place = {"file": path, "record": path.with_name(f"{path.name}.sha256")}.get(level)
    place = place or next(folder for folder in path.parents if folder.name == level)
    if is_ours:
        place.chmod(0o777)
        pattern = "anyone"
    else:
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        pattern = "another user|anyone"
        if place.stat().st_uid == 0:
            pytest.skip("what belongs to root is trusted")

    with pytest.raises(PermissionError, match=pattern) as raised:
        download.fetch(url)

    assert "set KERAS_HOME" in str(raised.value)
    assert rig.one_sentence(raised.value)


def test_cache_of_another_user(url: str, home: Path) -> None:
    """Root, too, does not read what another user may have put there."""
    if os.getuid() != 0:
        pytest.skip("only root gives files away")
    path = download.fetch(url)
    os.chown(path.parent, 1234, -1)

    with pytest.raises(PermissionError, match=r"belongs to another user \(number 1234\)"):
        download.fetch(url)


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


@pytest.mark.parametrize("sha256", ["", "abc", "0" * 63, "z" * 64, " " + "0" * 64])
def test_sha256_that_is_none(sha256: str, url: str, home: Path) -> None:
    """A SHA-256 that no file could have is refused before anything is asked."""
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        download.fetch(url, sha256=sha256)

    assert not home.exists()


@pytest.mark.parametrize("is_true", [True, False])
def test_hub_sha256_on_the_way(server: rig.Server, url: str, home: Path, is_true: bool) -> None:
    """The Hub's own SHA-256, in a header of the redirect to a large file, is compared."""
    server.files["/large"] = rig.BODY
    server.hashes = ()
    digest = hashlib.sha256(rig.BODY if is_true else rig.OTHER).hexdigest()
    server.faults = [
        fault
        for _ in range(2)
        for fault in (
            rig.status(302, Location="/large", X_Linked_ETag=f'"{digest}"', X_Repo_Commit="0" * 40),
            lambda handler, body: True,
        )
    ]

    if is_true:
        assert download.fetch(url).read_bytes() == rig.BODY
        return
    with pytest.raises(ValueError, match="the server states sha256"):
        download.fetch(url)
    assert rig.kept(home) == set()


def test_record_of_strange_bytes(url: str) -> None:
    """A record that is damaged is named as such, not decoded."""
    path = download.fetch(url)
    path.with_name("ViT-B_16.npz.sha256").write_bytes(b"\xff\xfe")

    with pytest.raises(ValueError, match=r"\.sha256 holds another"):
        download.fetch(url)


def test_mirror_of_another_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that is neither a web address nor a folder is not taken for a folder."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", "ftp://me:hunter2@example.org/weights")

    with pytest.raises(ValueError, match="http or https URL, or a folder") as raised:
        download.fetch(f"{GOOGLE}/sam/ViT-B_16.npz")

    assert "hunter2" not in str(raised.value)
