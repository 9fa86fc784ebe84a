"""Tests of keras_vit.data.images: every kind of file gives pixels, and photos are upright."""

import dataclasses
import functools
import io
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import processes
import pytest
import tensorflow as tf
from conftest import TINY
from image_files import as_pillow, photo, picture
from PIL import Image

from keras_vit import data
from keras_vit.data import Resizing, images
from keras_vit.model import VisionTransformer

# Pillow's modes of each format; tolerance 2 where decoders may round their colours differently.
CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "PNG": (("RGB", "L", "P", "1"), 0),
    "JPEG": (("RGB", "L", "CMYK"), 2),
    "BMP": (("RGB", "L", "P"), 0),
    "GIF": (("RGB", "L"), 0),
    "WEBP": (("RGB", "L"), 2),
    "TIFF": (("CMYK", "P"), 0),
    "AVIF": (("RGB",), 2),
}
FORMS = tuple(CASES)
GRAPH = tf.function(images.decode_image, input_signature=[tf.TensorSpec((), tf.string)])
# Bytes that reading a file takes at most, in a process that has decoded another before.
# Where files say their width and height, in how many bytes, and how often a pixel of many counts.
SIDE = 11_000
HEADERS: dict[tuple[str, ...], tuple[int, int, Literal["big", "little"], float]] = {
    **{("PNG", mode): (16, 4, "big", 1) for mode in ("1", "L", "RGB", "I;16")},
    **{("PNG", mode): (16, 4, "big", 1.5) for mode in ("LA", "RGBA", "P")},
    ("BMP", "RGB"): (18, 4, "little", 2),
    ("GIF", "P"): (6, 2, "little", 1),
    ("WEBP", "RGB", "animated"): (24, 3, "little", 2),
}
MEASURED = """
import sys
from pathlib import Path
from keras_vit.data import images
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
images.is_decodable(Path(sys.argv[2]).read_bytes())
before = peak()
try:
    images.read_image(sys.argv[1])
except ValueError:
    pass
print(peak() - before)
"""
QUIET = """
import sys
from PIL import Image
from keras_vit.data import images
for most in (500, 300):  # Pillow warns above it, and refuses above twice as many
    Image.MAX_IMAGE_PIXELS = most
    print(images.is_decodable(open(sys.argv[1], "rb").read()))
"""
TAG = 0x0112
TURNS = range(1, 9)
# Formats with EXIF, and how far decoders may round apart.
WITH_EXIF = {"JPEG": 6, "PNG": 0, "WEBP": 0}
SIX = {"little": b"\6\0\0\0", "big": b"\0\6\0\0"}
LONG_SIX = {"little": b"\6\0\0\0", "big": b"\0\0\0\6"}


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def colors() -> np.ndarray:
    """Blocks of random colours: smooth enough for JPEG."""
    generator = np.random.default_rng(0)
    return np.kron(generator.integers(0, 256, (3, 4, 3)), np.ones((8, 8, 1))).astype(np.uint8)


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return float(np.abs(np.asarray(actual, np.float32) - expected).max())


def difference(contents: bytes, expected: np.ndarray) -> float:
    actual = images.decode_image(tf.constant(contents)).numpy()
    assert actual.dtype == np.uint8
    return distance(actual, expected)


def on_white(image: Image.Image) -> np.ndarray:
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return np.asarray(white.convert("RGB"))


def files() -> Iterator[tuple[str, bytes, np.ndarray, int]]:
    """Name, contents, pixels and tolerance of a file of every kind."""
    kinds = [(mode, form, far) for form, (modes, far) in CASES.items() for mode in modes]
    for mode, form, tolerance in kinds:
        contents = encoded(Image.fromarray(colors()).convert(mode), form)
        expected = np.asarray(Image.open(io.BytesIO(contents)).convert("RGB"))
        yield f"{mode} {form}", contents, expected, tolerance
    grey = colors()[..., 0]
    for form in ("PNG", "TIFF"):
        deep = encoded(Image.fromarray(grey.astype(np.uint16) * 257), form)
        yield f"16 bits {form}", deep, np.stack([grey] * 3, axis=-1), 0
    for count in (2, 5, 200):  # a short palette shows its colours, not its indices
        image = Image.fromarray(colors()).quantize(count)
        for form in ("BMP", "PNG"):
            expected = np.asarray(image.convert("RGB"))
            yield f"{count} colours {form}", encoded(image, form), expected, 0
    clear = Image.fromarray(colors()).convert("RGBA")
    alpha = np.resize(np.array([0, 128, 255], np.uint8), clear.size[::-1])
    clear.putalpha(Image.fromarray(alpha))
    lossless = encoded(clear, "WEBP", lossless=True, exact=True)
    yield "transparent WEBP", lossless, on_white(clear), 1
    hard = clear.copy()
    hard.putalpha(Image.fromarray(np.where(alpha == 128, 255, alpha)))
    for form in ("GIF", "TIFF"):
        contents = encoded(hard, form)
        yield f"transparent {form}", contents, on_white(Image.open(io.BytesIO(contents))), 1
    for image in (clear, clear.convert("LA"), hard.quantize(16)):
        contents = encoded(image, "PNG")
        yield f"transparent {image.mode}", contents, on_white(Image.open(io.BytesIO(contents))), 1
    padded = np.dstack([colors(), np.zeros(colors().shape[:2], np.uint8)])
    yield "the padding is not alpha", encoded(Image.fromarray(padded, "RGBA"), "BMP"), colors(), 0
    frames = [Image.fromarray(np.full((6, 5, 3), level, np.uint8)) for level in (10, 200)]
    for form in ("GIF", "WEBP"):
        moving = encoded(frames[0], form, save_all=True, append_images=frames[1:], lossless=True)
        yield f"the first frame of a {form}", moving, np.full((6, 5, 3), 10), 0


def test_every_kind_of_file_gives_the_pixels_that_pillow_gives() -> None:
    """Any number of bits and colours becomes the RGB that another reader sees, laid on white."""
    actual = {name: difference(contents, expected) for name, contents, expected, _ in files()}
    allowed = {name: tolerance for name, _, _, tolerance in files()}

    assert {name for name in actual if actual[name] > allowed[name]} == set()
    assert len(actual) == 34


def test_a_graph_decodes_as_eager_code_does_and_half_a_file_is_an_error() -> None:
    """One traced function serves all formats; a truncated image is never half a picture."""
    for form in FORMS:
        contents = encoded(Image.fromarray(colors()), form)
        assert np.array_equal(GRAPH(contents), images.decode_image(tf.constant(contents)))
        with pytest.raises(tf.errors.InvalidArgumentError):
            images.decode_image(tf.constant(contents[: len(contents) // 2]))


def photograph() -> np.ndarray:
    """Soft colours, fine stripes and noise, as large as a photograph of ImageNet."""
    generator = np.random.default_rng(0)
    soft = tf.image.resize(generator.integers(0, 200, (24, 32, 3)), (375, 500), method="bicubic")
    fine = 30 * (np.arange(500) % 3)[None, :, None] + generator.normal(0, 8, (375, 500, 3))
    return np.asarray(np.clip(soft.numpy() + fine, 0, 255), np.uint8)


@pytest.mark.parametrize("size", [(224, 224), (384, 100), (400, 300), (500, 600)])
def test_resizing_is_as_pillow_does_it(size: tuple[int, int]) -> None:
    """To a grey level for rounding, in one direction or both; without anti-aliasing it is not."""
    pixels = photograph()
    expected = np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR))

    assert np.abs(images.resize_image(pixels, Resizing(size)).numpy() - expected).max() < 1.5
    plain = images.resize_image(pixels, Resizing(size, antialias=False)).numpy()
    assert (np.abs(plain - expected).max() > 15) == (size != (500, 600))


@pytest.mark.parametrize("antialias", [False, True])
def test_resizing_has_the_bits_of_tensorflow(antialias: bool) -> None:
    """Shrunk in both directions or in one, or enlarged; alone, as a batch and in open graphs."""
    pixels = np.stack([photograph(), photograph()[::-1]])
    for size in ((64, 64), (400, 30), (30, 600), (1, 1), (500, 600)):
        resize = functools.partial(images.resize_image, resizing=Resizing(size, antialias))
        signature = [tf.TensorSpec((None, None, 3), tf.uint8)]
        graph = tf.function(lambda image, resize=resize: resize(image), input_signature=signature)
        is_smooth = antialias and size != (500, 600)  # enlarging is plain interpolation
        expected = tf.image.resize(pixels, size, antialias=is_smooth).numpy()

        assert expected.dtype == resize(pixels).numpy().dtype == np.float32
        assert np.array_equal(resize(pixels), expected), size
        assert np.array_equal(resize(pixels[1]), expected[1]), size
        assert np.array_equal(graph(pixels[1]), expected[1]), size


def test_a_model_says_how_its_images_are_resized() -> None:
    """Its own config does, or that of the model inside; two that differ are refused."""
    smooth, plain = (
        VisionTransformer(dataclasses.replace(TINY, antialias=value), name=f"vit_{value}")
        for value in (True, False)
    )
    image = keras.Input(TINY.input_shape)

    assert data.resizing_of(smooth).antialias
    assert not data.resizing_of(plain).antialias
    assert not data.resizing_of(keras.Sequential([image, keras.Sequential([plain])])).antialias
    assert not data.resizing_of(keras.Model(image, plain(image))).antialias
    both = keras.Model(image, [plain(image), smooth(image)])
    with pytest.raises(ValueError, match="with antialias=True and with antialias=False"):
        data.resizing_of(both)


def test_a_file_reads_as_its_bytes_do(tmp_path: Path) -> None:
    """`read_image` and `read_images` are decoding and resizing, of a path and of bytes."""
    file = tmp_path / "image.png"
    Image.fromarray(colors()).save(file)

    assert np.array_equal(images.read_image(file), colors())
    assert np.array_equal(images.read_image(file.read_bytes()), colors())
    assert np.array_equal(
        images.read_images([file], Resizing((5, 6)))[0],
        images.resize_image(colors(), Resizing((5, 6))),
    )


def test_what_is_no_image_file_is_named(tmp_path: Path) -> None:
    """A missing file, a folder, a text, an empty file, a pipe, a device, a huge file, bytes.

    Nothing waits for a writer, and nothing without end is read.
    """
    for name, contents in (("text", "not a picture"), ("empty", "")):
        (tmp_path / f"{name}.png").write_text(contents)
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    with (tmp_path / "sparse.png").open("wb") as file:
        file.write(b"\x89PNG")
        file.truncate(40 * 2**30)
    wrong = {
        "": "is a folder",
        "text.png": "text.png' is not an image",
        "empty.png": "empty.png' is not an image",
        "pipe.jpg": "pipe.jpg' is a pipe or a device, not a file",
        "zero.jpg": "zero.jpg' is a pipe or a device, not a file",
        "sparse.png": "sparse.png' has 42949672960 bytes, more than",
    }
    with pytest.raises(FileNotFoundError, match=r"There is no image file '.*gone.png'"):
        images.read_image(tmp_path / "gone.png")
    with pytest.raises(ValueError, match="An image of 7 bytes is not an image"):
        images.read_image(encoded(Image.fromarray(colors()), "PNG")[:7])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            images.read_image(tmp_path / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


@pytest.mark.parametrize("form", FORMS)
def test_a_part_has_the_pixels_of_the_whole(form: str) -> None:
    """Decoding a part is decoding the whole and cutting, but for JPEG's colours at the edges."""
    soft = Image.fromarray(colors()).resize((80, 60), Image.Resampling.BICUBIC)
    contents = tf.constant(encoded(soft, form))
    for part in ((0, 0, 60, 80), (3, 1, 7, 9), (20, 33, 40, 47), (59, 79, 1, 1)):
        top, left, height, width = part
        choose = functools.partial(lambda chosen, _: chosen, tf.constant(part))
        actual = images.decode_part(contents, choose=choose).numpy()
        whole = images.decode_image(contents).numpy()[top : top + height, left : left + width]

        assert actual.shape == (height, width, 3)
        apart = np.abs(actual.astype(int) - whole)
        assert apart.max() <= (10 if form == "JPEG" else 0), part
        assert apart[1:-1, 1:-1].sum() == 0, part


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_memory_is_bounded_by_the_pixels(tmp_path: Path) -> None:
    """A sound image takes 16 bytes a pixel at most while decoded; one that is too large none."""
    small, sound, large = tmp_path / "small.png", tmp_path / "sound.png", tmp_path / "large.png"
    Image.new("RGBA", (8, 8)).save(small)
    Image.new("RGBA", (5000, 5000)).save(sound)
    Image.new("L", (13_000, 13_000)).save(large)
    for file, most in ((sound, 16 * 5000 * 5000), (large, 100e6)):
        assert int(processes.python("-c", MEASURED, file, small).stdout) < most


def test_an_image_above_the_budget_is_refused_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, listing and a part of it in training; the number is the environment's to set."""
    file = tmp_path / "large.png"
    for form in FORMS:
        contents = encoded(Image.fromarray(colors()), form)
        file.write_bytes(contents)
        monkeypatch.setenv("KERAS_VIT_MAX_PIXELS", str(24 * 32))
        assert images.is_decodable(contents)
        assert images.read_image(file).shape == (24, 32, 3)
        monkeypatch.setenv("KERAS_VIT_MAX_PIXELS", str(24 * 32 - 1))
        assert not images.is_decodable(contents)
        with pytest.raises(ValueError, match=r"large.png' has 768 pixels, more than the 767 that"):
            images.read_image(file)
        with pytest.raises(tf.errors.InvalidArgumentError, match="more pixels than are decoded"):
            images.decode_part(
                tf.constant(contents), choose=lambda shape: tf.constant([0, 0, 1, 1])
            )
    for text in ("", "0", "-1", "1e6", "many", "9" * 30):
        monkeypatch.setenv("KERAS_VIT_MAX_PIXELS", text)
        with pytest.raises(ValueError, match="KERAS_VIT_MAX_PIXELS is the most pixels"):
            images.read_image(b"no image")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pixels_that_take_much_memory_count_more() -> None:
    """Above 1 GiB, by the bytes that each takes; nothing is decoded of a file that is refused."""
    for (form, mode, *more), (place, width, order, share) in HEADERS.items():
        frames = [Image.new(mode, (8, 8), color) for color in (0, 255)]
        animated = {"save_all": True, "append_images": frames[1:]} if more else {}
        contents = encoded(frames[0], form, **animated)
        assert images.declared_pixels(contents) == 64
        side = (SIDE - (form == "WEBP")).to_bytes(width, order)
        contents = contents[:place] + side + side + contents[place + 2 * width :]
        assert images.declared_pixels(contents) == pytest.approx(share * SIDE**2, abs=16), form
        if share > 1:
            with pytest.raises(ValueError, match=r"one that takes 16 bytes counts twice"):
                images.read_image(contents)
            with pytest.raises(tf.errors.InvalidArgumentError, match="more pixels than are"):
                images.decode_image(tf.constant(contents))


def test_only_the_first_frame_counts() -> None:
    """An animation above the budget is read where its first frame is within it."""
    frames = [Image.fromarray(colors()[..., ::step]) for step in (1, -1)]
    for form in ("GIF", "WEBP"):
        moving = encoded(frames[0], form, save_all=True, append_images=frames[1:], lossless=True)
        assert images.declared_pixels(moving) == 24 * 32
    for contents in (b"", b"<html>", b"RIFF", encoded(frames[0], "PNG").replace(b"IHDR", b"tEXt")):
        assert images.declared_pixels(contents) is None


def test_pillow_warns_of_no_pixels(tmp_path: Path) -> None:
    """The limit is this package's; what Pillow refuses before is an image that cannot be read."""
    (tmp_path / "a.gif").write_bytes(encoded(Image.fromarray(colors()), "GIF"))
    done = processes.python("-c", QUIET, tmp_path / "a.gif")
    assert done.stdout.split() == ["True", "False"]
    assert "DecompressionBomb" not in done.stderr


def test_laying_on_white_in_integers_is_laying_on_white(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each colour with each alpha gives what floating point gives; in strips too."""
    color, alpha = np.meshgrid(np.arange(256), np.arange(256))
    pixels = np.stack([color, color[::-1], color, alpha], axis=-1).astype(np.uint8)
    share = pixels[..., 3:].astype(np.float64) / 255
    expected = np.round(pixels[..., :3] * share + 255 * (1 - share)).astype(np.uint8)
    contents = encoded(Image.fromarray(pixels, "RGBA"), "PNG")
    assert difference(contents, expected) == 0
    monkeypatch.setattr(images, "_STRIP", 1000)
    assert difference(contents, expected) == 0


@pytest.mark.parametrize("form", WITH_EXIF)
@pytest.mark.parametrize("turn", [0, *TURNS, 9])
def test_every_orientation_is_as_pillow_shows_it(turn: int, form: str) -> None:
    """Eagerly and in a graph; 0 and 9 are none. A part is chosen and cut in the upright photo."""
    contents, shapes = photo(turn, form), []
    expected = as_pillow(contents)

    assert distance(images.read_image(contents), expected) <= WITH_EXIF[form]
    assert np.array_equal(GRAPH(contents), images.read_image(contents))
    if turn in TURNS[1:]:
        stored = np.asarray(Image.open(io.BytesIO(contents)).convert("RGB"))
        assert stored.shape != expected.shape or distance(stored, expected) > 100

    def choose(shape: tf.Tensor) -> tf.Tensor:
        shapes.append(shape.numpy().tolist())
        return tf.constant([3, 7, 17, 23])

    part = images.decode_part(tf.constant(contents), choose=choose).numpy()
    assert shapes == [[36, 52] if 5 <= turn <= 8 else [52, 36]]
    assert distance(part[1:-1, 1:-1], expected[4:19, 8:29]) <= WITH_EXIF[form]


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
    whole = encoded(Image.fromarray(picture()), "JPEG")
    return whole[:2] + b"".join(segments) + whole[2:]


@pytest.mark.parametrize("order", ["little", "big"])
def test_both_byte_orders_and_any_segments_before_are_read(order: Literal["little", "big"]) -> None:
    """Comments, fill bytes, another APP1 and other tags stand before the tag, which may be long."""
    other = (0x010F, 2, 4, b"abc\0")
    for entry in ((TAG, 3, 1, SIX[order]), (TAG, 4, 1, LONG_SIX[order])):
        exif = segment(0xE1, b"Exif\0\0" + tiff(order, [other, entry]))
        xmp = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0")
        file = with_segments(segment(0xFE, b"hello"), b"\xff\xff\xff", xmp, exif)
        assert int(images.read_orientation(tf.constant(file))) == 6
        assert images.read_image(file).shape == (36, 52, 3)


def test_a_damaged_block_is_upright() -> None:
    """Cut anywhere, with lengths and offsets that lead nowhere, or of other types: no error."""
    right, starts = (TAG, 3, 1, SIX["big"]), (0, 9, 2**16, 2**31 - 1, 2**32 - 1)
    wrong = ((3, 2, SIX["big"]), (2, 1, b"6\0\0\0"), (3, 1, b"\0\x09\0\0"), (4, 1, b"\xff" * 4))
    six = tiff("big", [right])
    blocks = [six[:cut] for cut in range(len(six) - 5)]
    blocks += [tiff("big", [right], start=start) for start in starts]
    blocks += [tiff("big", [(TAG, *entry)]) for entry in wrong]
    bodies = [b"Exif\0\0" + block for block in (*blocks, b"XX" + six[2:], b"")]
    bodies += [b"Exif\0", b""]
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
    actual = [int(images.read_orientation(tf.constant(one))) for one in spoilt]

    assert set(actual) <= set(TURNS)
    assert 1 in actual


def test_a_plain_file_is_told_from_its_first_bytes() -> None:
    """What encoders write without EXIF costs no search; what may have an orientation does."""
    for plain in (tf.io.encode_jpeg(tf.constant(picture())), tf.constant(b"GIF89a")):
        assert not bool(images.may_have_orientation(plain))
    for form in ("JPEG", "PNG"):
        assert bool(images.may_have_orientation(tf.constant(photo(6, form))))


def test_the_whole_path_can_fail() -> None:
    """A photo whose tag is taken out no longer is what Pillow showed."""
    stored = Image.fromarray(np.asarray(Image.open(io.BytesIO(photo(6)))))
    untagged = images.read_image(encoded(stored, "JPEG", quality=95))

    assert untagged.shape != as_pillow(photo(6)).shape


def test_one_op_is_traced_once_for_all_graphs() -> None:
    """Each graph calls the same function; another shape or constant is another."""
    traces = []

    @images.one_op
    def scaled(x: tf.Tensor, *, by: int) -> tf.Tensor:
        traces.append((tuple(x.shape), by))
        return x * by

    for _ in range(2):
        assert list(tf.data.Dataset.range(3).map(lambda x: scaled(x, by=2))) == [0, 2, 4]
    assert scaled(tf.constant(3, tf.int64), by=2) == 6
    assert scaled(tf.constant([1, 2]), by=3).numpy().tolist() == [3, 6]
    assert traces == [((), 2), ((2,), 3)]
