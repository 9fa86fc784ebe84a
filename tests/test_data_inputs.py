"""Tests of keras_vit.data.inputs."""

import io
import os
from pathlib import Path

import image_files
import pytest

from keras_vit.data import LeftOut, NamedImage, named_images
from keras_vit.data.images import largest_file


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos in folders, names with spaces and accents, and what is no photo."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos/b/ä 1.jpg", "photos/a.png", "photos/[1].jpg", "one.jpg"):
        image_files.write_image(tmp_path / name)
    (tmp_path / "photos" / "notes.txt").write_text("notes")
    (tmp_path / "photos" / ".hidden.jpg").write_text("hidden")
    (tmp_path / "photos" / "broken.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "empty").mkdir()
    return tmp_path


def names(arguments: list[str], pipe: bytes | None = None) -> list[str]:
    stream = None if pipe is None else io.BufferedReader(io.BytesIO(pipe))
    found = named_images(arguments, pipe=stream)
    return [one.name for one in found if isinstance(one, NamedImage) and one.problem is None]


PHOTOS = ["photos/[1].jpg", "photos/a.png", "photos/b/ä 1.jpg"]


def test_files_folders_and_patterns(place: Path) -> None:
    """A folder is walked, a pattern expanded, a file with brackets taken by its name, once each."""
    assert names(["photos"]) == PHOTOS
    matching = ["photos/[1].jpg", "photos/b/ä 1.jpg", "photos/broken.jpg"]
    assert names(["photos/**/*.jpg"]) == matching  # as a shell expands it
    assert names(["photos/[1].jpg", "one.jpg"]) == ["photos/[1].jpg", "one.jpg"]
    assert names(["one.jpg", "./one.jpg", "photos", "photos/a.png"]) == ["one.jpg", *PHOTOS]
    left_out = {one.name for one in named_images(["photos"]) if isinstance(one, LeftOut)}
    assert left_out == {"photos/notes.txt", "photos/.hidden.jpg", "photos/broken.jpg"}


def test_what_is_not_there_is_told_when_it_is_read(place: Path) -> None:
    """No match, an empty folder, a missing file."""
    problems = {
        "*.webp": "No file matches",
        "empty": "holds no JPEG",
        "gone.jpg": "There is no image file",
    }
    for name, problem in problems.items():
        (image,) = named_images([name])
        assert isinstance(image, NamedImage)
        with pytest.raises((ValueError, OSError), match=problem):
            image.read()


def piped(contents: bytes) -> NamedImage:
    (image,) = named_images(["-"], pipe=io.BufferedReader(io.BytesIO(contents)))
    assert isinstance(image, NamedImage)
    return image


def test_an_image_comes_through_a_pipe(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each format; what is neither an image nor a list of names, and a huge one, are refused."""
    for kind in ("jpg", "png", "bmp", "gif", "webp", "tif", "avif"):
        contents = image_files.write_image(place / f"image.{kind}").read_bytes()
        image = piped(contents)
        assert (image.name, image.contents) == ("-", contents)
        assert image.read().shape[2] == 3
    for contents in (b"%PDF-1.7\x01\x02" + bytes(100), b"\x7fELF\x02\x01\x01"):
        with pytest.raises(ValueError, match="neither a JPEG"):
            piped(contents).read()
    monkeypatch.setenv("KERAS_VIT_MAX_PIXELS", "10")
    with pytest.raises(ValueError, match="make the image smaller"):
        piped(b"\xff\xd8\xff" + bytes(largest_file() + 1)).read()
    assert names(["-"], pipe=b"") == []


@pytest.mark.parametrize("separator", [b"\n", b"\r\n", b"\0"])
@pytest.mark.parametrize("has_end", [False, True])
def test_names_come_through_a_pipe(separator: bytes, has_end: bool, place: Path) -> None:
    """One a line or with NULs between; folders are walked, patterns are names."""
    odd = os.fsdecode(b"odd-\xff.jpg")
    listed = ["BMW/1.jpg", "one.jpg", "photos/[1].jpg", "GIF8.gif", odd]
    if separator == b"\0":
        listed.append("two\nlines.jpg")
    pipe = separator.join(map(os.fsencode, listed)) + separator * has_end
    assert names(["-"], pipe=pipe) == listed
    assert names(["-", "one.jpg"], pipe=b"photos\n") == [*PHOTOS, "one.jpg"]


def test_a_long_list_is_read_as_it_comes(place: Path) -> None:
    """The first name comes before the last is read."""
    listed = [f"{number:06}.jpg" for number in range(50_000)]
    pipe = io.BufferedReader(io.BytesIO("\n".join(listed).encode()))
    found = named_images(["-"], pipe=pipe)
    assert next(found).name == "000000.jpg"
    assert pipe.tell() < 2**18
    assert sum(1 for _ in found) == 49_999
