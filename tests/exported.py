"""A tiny exported model, and image files of many kinds, for the tests of export."""

import dataclasses
import io
import struct
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from conftest import TINY, randomize
from PIL import Image

from keras_vit.exporting import export, samples
from keras_vit.model import VisionTransformer

LABELS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
SERVED = dataclasses.replace(TINY, include_preprocessing=True, classifier_activation="softmax")


def served_model(**fields: Any) -> VisionTransformer:
    """A tiny classifier of pixels with every weight random."""
    return randomize(VisionTransformer(dataclasses.replace(SERVED, **fields)))


def export_for_ever(directory: Path, connection: Connection) -> None:
    """Exports version after version until the process is killed; each is told by a True."""
    model = served_model()
    while True:
        export(model, directory, labels=LABELS, verify=False)
        connection.send(True)


def photo(
    seed: int = 0, *, height: int = 40, width: int = 56, kind: str = "PNG", mode: str = "RGB"
) -> bytes:
    """The bytes of an image file."""
    stream = io.BytesIO()
    Image.fromarray(samples.draw(seed, height=height, width=width)).convert(mode).save(stream, kind)
    return stream.getvalue()


def strings(*values: bytes) -> np.ndarray:
    """Bytes as the array that signatures take."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def png_of_declared_size(width: int, height: int) -> bytes:
    """A small PNG file that claims to be huge."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(100_000), 9)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def jpeg_of_declared_size(width: int, height: int) -> bytes:
    """A small JPEG file that claims to be huge."""
    content = photo(kind="JPEG")
    place = content.index(b"\xff\xc0") + 5  # marker, length, precision
    return content[:place] + struct.pack(">HH", height, width) + content[place + 4 :]


def gif_of_declared_size(width: int, height: int) -> bytes:
    """A small GIF file that claims to be huge."""
    content = photo(kind="GIF")
    sized = content[:6] + struct.pack("<HH", width, height) + content[10:]
    place = sized.index(b"\x2c\x00\x00\x00\x00") + 5
    return sized[:place] + struct.pack("<HH", width, height) + sized[place + 4 :]


def bmp_of_declared_size(width: int, height: int) -> bytes:
    """A small BMP file that claims to be huge."""
    content = photo(kind="BMP")
    return content[:18] + struct.pack("<ii", width, height) + content[26:]
