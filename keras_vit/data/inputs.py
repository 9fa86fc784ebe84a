"""The images that a user names: files, folders, patterns, and what comes through a pipe."""

import dataclasses
import glob
import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from keras_vit.data import folder, images
from keras_vit.data.source import LeftOut

# Stands for the pipe in a list of names.
PIPE = "-"
_PIECE = 2**16  # bytes that are read of a pipe at a time
# How images begin: a BMP has zeros where a name such as BMW/1.jpg has text.
_IMAGE = re.compile(
    rb"\xff\xd8\xff|\x89PNG|RIFF....WEBP|GIF8[79]a|BM....\0\0\0\0|II\*\0|MM\0\*|....ftypavi[fs]",
    re.DOTALL,
)
_TEXT = frozenset(b"\n\r\t\0") | frozenset(range(32, 256))


@dataclasses.dataclass(frozen=True)
class NamedImage:
    """One image that a user named, not read yet.

    Attributes:
        name: what to call it, as the user wrote it.
        contents: the bytes of an image from a pipe; None for a file, whose path is the name.
        problem: a sentence, if it cannot be read.
    """

    name: str
    contents: bytes | None = None
    problem: str | None = None

    def read(self) -> np.ndarray:
        """Returns the pixels 0..255, uint8 of shape (height, width, 3).

        Raises:
            OSError: the file is not there, or cannot be read.
            ValueError: it is no image, or is damaged.
        """
        if self.problem is not None:
            raise ValueError(self.problem)
        return images.read_image(self.name if self.contents is None else self.contents)


def named_images(
    names: Iterable[str], *, pipe: io.BufferedIOBase | None = None
) -> Iterator[NamedImage | LeftOut]:
    """Yields the images that names mean, each once, without reading them.

    A name is that of a file; of a folder, whose images are taken at any depth as training takes
    them; a pattern such as "photos/**/*.jpg", where there is no such file; or "-" for the pipe. If
    the pipe holds an image, it is that image. Otherwise it holds names of files and folders, one a
    line, or with a NUL after each as `find -print0` prints them.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp())
        >>> for name in ("b.jpg", "a.jpg", "notes.txt"):
        ...     (place / name).touch()
        >>> [Path(each.name).name for each in named_images([str(place / "*.jpg")])]
        ['a.jpg', 'b.jpg']

    Args:
        names: what the user wrote.
        pipe: what "-" reads.

    Yields:
        Each image; and what a folder holds beside images.
    """
    seen = set()
    for image in _each(names, pipe):
        key = image.name if isinstance(image, LeftOut) else _key(image)
        if key not in seen:
            seen.add(key)
            yield image


def _key(image: NamedImage) -> str:
    return PIPE if image.contents is not None else os.path.normpath(image.name)


def _each(names: Iterable[str], pipe: io.BufferedIOBase | None) -> Iterator[NamedImage | LeftOut]:
    for name in names:
        if name != PIPE or pipe is None:
            yield from _expand(name, takes_patterns=True)
            continue
        for found in _from_pipe(pipe):
            if found.contents is not None or found.problem is not None:
                yield found
            else:
                yield from _expand(found.name, takes_patterns=False)


def _expand(name: str, *, takes_patterns: bool) -> Iterator[NamedImage | LeftOut]:
    if os.path.isdir(name):  # noqa: PTH112 - a name that no file can have is none, not an error
        yield from _in_folder(Path(name))
    elif not takes_patterns or os.path.lexists(name) or not any(char in name for char in "*?["):
        yield NamedImage(name)
    else:
        matches = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - names as they are written
        if not matches:
            yield NamedImage(name, problem=f"No file matches {name!r}; check the pattern.")
        for match in matches:
            yield from _expand(match, takes_patterns=False)


def _in_folder(root: Path) -> Iterator[NamedImage | LeftOut]:
    paths, left_out = folder.find_images(root)
    for one in left_out:
        if one.reason == folder.UNREADABLE:
            yield NamedImage(one.name, problem=f"The folder {one.name!r} cannot be read.")
        else:
            yield one
    if not paths:
        problem = f"The folder {str(root)!r} holds no {images.FORMATS} files."
        yield NamedImage(str(root), problem=problem)
    yield from (NamedImage(str(path)) for path in paths)


def _from_pipe(pipe: io.BufferedIOBase) -> Iterator[NamedImage]:
    """Yields the one image that a pipe holds, or the names that it lists."""
    head = pipe.read(16)
    if _IMAGE.match(head):
        most = images.largest_file()
        contents = head + pipe.read(most)
        if len(contents) > most:
            problem = f"The pipe holds more than {most} bytes; make the image smaller."
            yield NamedImage(PIPE, problem=problem)
        else:
            yield NamedImage(PIPE, contents=contents)
        return
    piece = head + pipe.read1(_PIECE)
    if not _TEXT.issuperset(piece):
        problem = f"The pipe holds neither a {images.FORMATS} file nor names of files."
        yield NamedImage(PIPE, problem=problem)
        return
    separator = b"\0" if b"\0" in piece else b"\n"
    rest = b""
    while piece:
        *names, rest = (rest + piece).split(separator)
        yield from _names(names, separator)
        piece = pipe.read1(_PIECE)
    yield from _names([rest], separator)


def _names(names: list[bytes], separator: bytes) -> Iterator[NamedImage]:
    for name in names:
        text = name.removesuffix(b"\r") if separator == b"\n" else name
        if text:
            yield NamedImage(os.fsdecode(text))
