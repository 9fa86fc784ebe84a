"""Copies image files into one folder for each predicted class; it moves and replaces nothing."""

import contextlib
import errno
import filecmp
import os
import re
import secrets
import shutil
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from keras_vit import atomic

_FORBIDDEN = re.compile(r'[/\\:*?"<>|]')
# What Windows takes for a device, whatever the ending.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_LONGEST = 100  # bytes of a folder's name; disks allow 255
# Errors of file systems that know no hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def folder_names(labels: Sequence[str]) -> dict[str, str]:
    """Returns a name for the folder of each class that every file system takes, all different.

    Example:
        >>> folder_names(["cat", "Cat", "a/b", ".."])
        {'cat': 'cat', 'Cat': 'Cat-2', 'a/b': 'a_b', '..': '_'}
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    for label in labels:
        plain = _safe(label)
        name, number = plain, 1
        while name.casefold() in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name.casefold())
        names[label] = name
    return names


def _safe(label: str) -> str:
    text = unicodedata.normalize("NFC", label)
    text = "".join(char if char.isprintable() else "_" for char in text)
    text = _FORBIDDEN.sub("_", text).strip(" ").strip(".").strip(" ")
    text = text.encode("utf-8", "replace")[:_LONGEST].decode("utf-8", "ignore").rstrip(" .")
    return f"{text}_" if not text or _DEVICES.fullmatch(text) else text


class ClassFolders:
    """A folder with one sub-folder for each class, into which image files are copied.

    A file keeps its name. Where another file has it, a number is added, as in "photo-2.jpg". A copy
    that is there from before with the same bytes is not made again.

    Example:
        >>> place = Path(tempfile.mkdtemp())
        >>> for name in ("a", "b"):
        ...     (place / name).mkdir()
        ...     _ = (place / name / "1.jpg").write_text(name)
        >>> folders = ClassFolders(place / "sorted", ["cat", "dog"])
        >>> [folders.copy(place / name / "1.jpg", "cat").name for name in ("a", "b")]
        ['1.jpg', '1-2.jpg']

    Args:
        root: the folder, which is made with the first copy.
        labels: the classes.

    Attributes:
        root: as in the arguments.
        names: the name of the folder of each class, see `folder_names`.
        copied: how many files were copied.
        present: how many were there already.

    Raises:
        FileExistsError: `root` is no folder.
    """

    def __init__(self, root: str | os.PathLike[str], labels: Sequence[str]) -> None:
        self.root = Path(root)
        self.names = folder_names(labels)
        self.copied = self.present = 0
        self._taken: set[Path] = set()
        if (self.root.exists() or self.root.is_symlink()) and not self.root.is_dir():
            raise FileExistsError(f"{str(root)!r} is not a folder; choose another one to copy to.")

    def copy(self, file: str | os.PathLike[str], label: str) -> Path:
        """Copies a file to the folder of a class, and returns where it is.

        A link is copied as the file that it leads to.

        Raises:
            FileExistsError: the folder of the class is a link or no folder.
            OSError: the file cannot be read, or the copy not be written.
        """
        source = Path(file)
        if not source.is_file():
            raise FileNotFoundError(f"There is no image file {str(file)!r} any more to copy.")
        with atomic.explain_errors(self.root, kept="the copies so far are kept"):
            places = _numbered(self._folder(label) / source.name)
            return next(place for place in places if self._is_new(source, place))

    def write(self, contents: bytes, name: str, label: str) -> Path:
        """Writes bytes, such as an image from a pipe, as `copy` copies a file of that name."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, name)
            file.write_bytes(contents)
            return self.copy(file, label)

    def _folder(self, label: str) -> Path:
        folder = self.root / self.names[label]
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise FileExistsError(
                f"{str(folder)!r} is a link or no folder, so that nothing is copied to it; move it "
                "away, or choose another folder to copy to."
            )
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _is_new(self, source: Path, target: Path) -> bool:
        """Whether the file is at this place now: copied, or from before with the same bytes."""
        if target in self._taken:
            return False
        if not os.path.lexists(target):
            try:
                _copy(source, target)
            except FileExistsError:  # another process was faster
                return False
            self.copied += 1
        elif _is_same(source, target):
            self.present += 1
        else:
            return False
        self._taken.add(target)
        return True


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1


def _is_same(source: Path, target: Path) -> bool:
    if target.is_symlink() or not target.is_file():
        return False
    return filecmp.cmp(source, target, shallow=False)


def _copy(source: Path, target: Path) -> None:
    """Copies a file to a name that no file has; it appears whole or not at all."""
    # A name alone: a file made before the block would stay where Ctrl-C comes between.
    temporary = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        shutil.copyfile(source, temporary)
        with contextlib.suppress(OSError):  # where a file system has no such rights or times
            shutil.copystat(source, temporary)
        try:
            os.link(temporary, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            temporary.rename(target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
