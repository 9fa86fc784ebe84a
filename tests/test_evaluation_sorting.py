"""Tests of keras_vit.evaluation.sorting."""

import errno
import os
from pathlib import Path

import pytest

from keras_vit.evaluation import ClassFolders
from keras_vit.evaluation.sorting import folder_names


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_names_of_folders_are_safe_and_different() -> None:
    labels = ["cat", "Cat", "a/b", "a\\b", "..", ".", "", "con", "aux.jpg", "x. ", "ä" * 200]
    labels += ["two\nlines", "\x1b[31m", "a:b"]
    names = folder_names(labels)

    assert list(names) == labels
    assert len({name.casefold() for name in names.values()}) == len(labels)
    for name in names.values():
        assert name == Path(name).name
        assert name.isprintable()
        assert name not in (".", "..", "", "con", "aux.jpg")
        assert not set('/\\:*?"<>|') & set(name)
        assert len(name.encode()) <= 110
        assert name == name.strip(" .")
    assert (names["cat"], names["a/b"]) == ("cat", "a_b")


def test_nothing_is_replaced_and_names_do_not_collide(tmp_path: Path) -> None:
    """The same name from two folders, a file that is there, and the same command again."""
    one, two = (write(tmp_path / name / "1.jpg", name) for name in "ab")
    there = write(tmp_path / "sorted" / "cat" / "1.jpg", "of somebody else")
    for again in range(2):
        folders = ClassFolders(tmp_path / "sorted", ["cat"])
        assert [folders.copy(file, "cat").name for file in (one, two)] == ["1-2.jpg", "1-3.jpg"]
        assert (folders.copied, folders.present) == ((0, 2) if again else (2, 0))
    assert there.read_text() == "of somebody else"
    assert one.read_text() == "a"
    assert {file.name: file.read_text() for file in there.parent.iterdir()} == {
        "1.jpg": "of somebody else",
        "1-2.jpg": "a",
        "1-3.jpg": "b",
    }


def test_equal_files_are_all_copied(tmp_path: Path) -> None:
    """Two photos with the same bytes are two copies; bytes from a pipe are a file."""
    files = [write(tmp_path / name / "1.jpg", "same") for name in "ab"]
    folders = ClassFolders(tmp_path / "sorted", ["cat"])
    assert [folders.copy(file, "cat").name for file in files] == ["1.jpg", "1-2.jpg"]
    names = [folders.write(contents, "image.png", "cat").name for contents in (b"1", b"2")]
    assert names == ["image.png", "image-2.png"]


def test_links_are_followed_to_the_file_but_not_out_of_the_folder(tmp_path: Path) -> None:
    """A link to an image is copied as a file; the folder of a class that is a link is refused."""
    photo = write(tmp_path / "photo.jpg", "photo")
    photo.chmod(0o444)
    link = tmp_path / "link.jpg"
    link.symlink_to(photo)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "sorted").mkdir()
    (tmp_path / "sorted" / "dog").symlink_to(tmp_path / "elsewhere")
    folders = ClassFolders(tmp_path / "sorted", ["cat", "dog"])

    copy = folders.copy(link, "cat")
    assert not copy.is_symlink()
    assert copy.read_text() == "photo"
    assert copy.stat().st_nlink == 1
    (tmp_path / "sorted" / "cat" / "2.jpg").symlink_to("nowhere")
    assert folders.copy(write(tmp_path / "2.jpg", "2"), "cat").name == "2-2.jpg"
    with pytest.raises(FileExistsError, match="is a link or no folder"):
        folders.copy(link, "dog")
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(FileExistsError, match="is not a folder"):
        ClassFolders(photo, ["cat"])
    with pytest.raises(FileNotFoundError, match="any more"):
        folders.copy(tmp_path / "gone.jpg", "cat")


@pytest.mark.parametrize("has_links", [False, True])
def test_an_error_leaves_no_part_of_a_copy(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk there is a sentence; without hard links the copy is renamed into place."""
    photo = write(tmp_path / "photo.jpg", "photo")
    folders = ClassFolders(tmp_path / "sorted", ["cat"])
    number = errno.ENOSPC if has_links else errno.EPERM

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)
    if has_links:
        with pytest.raises(OSError, match="the copies so far are kept; make room"):
            folders.copy(photo, "cat")
    else:
        assert folders.copy(photo, "cat").read_text() == "photo"
    assert len(list((tmp_path / "sorted" / "cat").iterdir())) == (not has_links)
