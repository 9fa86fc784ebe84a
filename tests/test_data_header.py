"""Tests of keras_vit.data.header: photos are upright wherever a file is read."""

import io
from typing import Literal

import numpy as np
import pytest
import tensorflow as tf
from image_files import as_pillow, photo, picture
from PIL import Image

from keras_vit.data import decoding, images
from keras_vit.data import header as held

TAG = 0x0112
TURNS = range(1, 9)
# Formats with EXIF, and how far decoders may round apart.
FORMS = {"JPEG": 6, "PNG": 0, "WEBP": 0}
GRAPH = tf.function(decoding.decode_image, input_signature=[tf.TensorSpec((), tf.string)])


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return float(np.abs(np.asarray(actual, np.float32) - expected).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("turn", [0, *TURNS, 9])
def test_every_orientation_is_as_pillow_shows_it(turn: int, form: str) -> None:
    """Eagerly and in a graph; 0 and 9 are none. A part is chosen and cut in the upright photo."""
    contents, shapes = photo(turn, form), []
    expected = as_pillow(contents)

    assert difference(images.read_image(contents), expected) <= FORMS[form]
    assert np.array_equal(GRAPH(contents), images.read_image(contents))
    if turn in TURNS[1:]:
        stored = np.asarray(Image.open(io.BytesIO(contents)).convert("RGB"))
        assert stored.shape != expected.shape or difference(stored, expected) > 100

    def choose(shape: tf.Tensor) -> tf.Tensor:
        shapes.append(shape.numpy().tolist())
        return tf.constant([3, 7, 17, 23])

    part = decoding.decode_part(tf.constant(contents), choose=choose).numpy()
    assert shapes == [[36, 52] if 5 <= turn <= 8 else [52, 36]]
    assert difference(part[1:-1, 1:-1], expected[4:19, 8:29]) <= FORMS[form]


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2, "big") + body


def tiff(
    order: Literal["little", "big"], entries: list[tuple[int, int, int, bytes]], *, start: int = 8
) -> bytes:
    """IFD0 in either byte order: (tag, type, count, the value's four bytes)."""
    head = (b"II*\0" if order == "little" else b"MM\0*") + start.to_bytes(4, order)
    rows = [
        tag.to_bytes(2, order) + kind.to_bytes(2, order) + count.to_bytes(4, order) + value
        for tag, kind, count, value in entries
    ]
    return head + len(rows).to_bytes(2, order) + b"".join(rows) + b"\0\0\0\0"


def with_segments(*segments: bytes) -> bytes:
    """A JPEG with these segments before its tables."""
    stream = io.BytesIO()
    Image.fromarray(picture()).save(stream, "JPEG")
    whole = stream.getvalue()
    return whole[:2] + b"".join(segments) + whole[2:]


SIX = {"little": b"\6\0\0\0", "big": b"\0\6\0\0"}
LONG_SIX = {"little": b"\6\0\0\0", "big": b"\0\0\0\6"}


@pytest.mark.parametrize("order", ["little", "big"])
def test_both_byte_orders_and_any_segments_before_are_read(order: Literal["little", "big"]) -> None:
    """Comments, fill bytes, another APP1 and other tags stand before the tag, which may be long."""
    other = (0x010F, 2, 4, b"abc\0")
    for entry in ((TAG, 3, 1, SIX[order]), (TAG, 4, 1, LONG_SIX[order])):
        exif = segment(0xE1, b"Exif\0\0" + tiff(order, [other, entry]))
        xmp = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0")
        file = with_segments(segment(0xFE, b"hello"), b"\xff\xff\xff", xmp, exif)
        assert int(held.read_orientation(tf.constant(file))) == 6
        assert images.read_image(file).shape == (36, 52, 3)


def test_a_damaged_block_is_upright() -> None:
    """Cut anywhere, with lengths and offsets that lead nowhere, or of other types: no error."""
    six = tiff("big", [(TAG, 3, 1, SIX["big"])])
    bodies = [b"Exif\0\0" + six[:cut] for cut in range(len(six) - 5)]
    bodies += [
        b"Exif\0\0" + tiff("big", [(TAG, 3, 1, SIX["big"])], start=start)
        for start in (0, 9, 2**16, 2**31 - 1, 2**32 - 1)
    ]
    bodies += [
        b"Exif\0\0" + tiff("big", [(TAG, *entry)])
        for entry in (
            (3, 2, SIX["big"]),
            (2, 1, b"6\0\0\0"),
            (3, 1, b"\0\x09\0\0"),
            (4, 1, b"\xff" * 4),
        )
    ]
    bodies += [b"Exif\0\0XX" + six[2:], b"Exif\0\0", b"Exif\0", b""]
    for body in bodies:
        assert images.read_image(with_segments(segment(0xE1, body))).shape == (52, 36, 3)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_no_bytes_make_the_search_fail_or_go_on_for_ever(form: str) -> None:
    """Every cut of a file, bytes changed at random, and megabytes of nothing give 1 to 8."""
    file, generator = photo(6, form), np.random.default_rng(0)
    spoilt = [file[:cut] for cut in range(0, min(len(file), 120), 3)]
    for _ in range(100):
        changed = bytearray(file)
        for place in generator.integers(8, min(len(file), 160), 4):
            changed[place] = generator.integers(256)
        spoilt.append(bytes(changed))
    spoilt += [file[:12] + byte * 3_000_000 for byte in (b"\0", b"\xff")]
    spoilt += [b"\xff\xd8" + b"\xff" * 3_000_000, b"", b"\x89PNG"]
    actual = [int(held.read_orientation(tf.constant(one))) for one in spoilt]

    assert set(actual) <= set(TURNS)
    assert 1 in actual


def test_a_plain_file_is_told_from_its_first_bytes() -> None:
    """What encoders write without EXIF costs no search; what may have an orientation does."""
    for plain in (tf.io.encode_jpeg(tf.constant(picture())), tf.constant(b"GIF89a")):
        assert not bool(held.may_be_turned(plain))
    for form in ("JPEG", "PNG"):
        assert bool(held.may_be_turned(tf.constant(photo(6, form))))


def test_the_whole_path_can_fail() -> None:
    """A photo whose tag is taken out no longer is what Pillow showed."""
    stored, stream = Image.open(io.BytesIO(photo(6))), io.BytesIO()
    Image.fromarray(np.asarray(stored)).save(stream, "JPEG", quality=95)

    assert images.read_image(stream.getvalue()).shape != as_pillow(photo(6)).shape


def test_one_op_is_traced_once_for_all_graphs() -> None:
    """Each graph calls the same function; another shape or constant is another."""
    traces = []

    @held.one_op
    def scaled(x: tf.Tensor, *, by: int) -> tf.Tensor:
        traces.append((tuple(x.shape), by))
        return x * by

    for _ in range(2):
        assert list(tf.data.Dataset.range(3).map(lambda x: scaled(x, by=2))) == [0, 2, 4]
    assert scaled(tf.constant(3, tf.int64), by=2) == 6
    assert scaled(tf.constant([1, 2]), by=3).numpy().tolist() == [3, 6]
    assert traces == [((), 2), ((2,), 3)]
