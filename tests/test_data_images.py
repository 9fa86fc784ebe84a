"""Tests of keras_vit.data.images."""

import io
import os
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from keras_vit.config import ViTConfig
from keras_vit.data import decoding, images
from keras_vit.model import VisionTransformer

# Pillow's mode and format; tolerance 2 where decoders may round their colour transform differently.
CASES = [
    ("RGB", "PNG", 0),
    ("L", "PNG", 0),
    ("P", "PNG", 0),
    ("1", "PNG", 0),
    ("I;16", "PNG", 0),
    ("RGB", "JPEG", 2),
    ("L", "JPEG", 2),
    ("CMYK", "JPEG", 2),
    ("RGB", "BMP", 0),
    ("L", "BMP", 0),
    ("P", "BMP", 0),
    ("RGB", "GIF", 0),
    ("L", "GIF", 0),
    ("RGB", "WEBP", 2),
    ("L", "WEBP", 2),
]


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def colors() -> np.ndarray:
    """Blocks of random colours: smooth enough for JPEG."""
    generator = np.random.default_rng(0)
    return np.kron(generator.integers(0, 256, (3, 4, 3)), np.ones((8, 8, 1))).astype(np.uint8)


def difference(contents: bytes, expected: np.ndarray) -> int:
    actual = decoding.decode_image(tf.constant(contents)).numpy()
    assert actual.dtype == np.uint8
    assert actual.shape == expected.shape
    return int(np.abs(actual.astype(int) - expected).max())


@pytest.mark.parametrize(("mode", "form", "tolerance"), CASES)
def test_every_format_and_mode_gives_the_pixels_that_pillow_gives(
    mode: str, form: str, tolerance: int
) -> None:
    """Grey, palette, 1-bit, 16-bit and CMYK images become the RGB that another reader sees."""
    if mode == "I;16":
        grey = colors()[..., 0]
        image, expected = Image.fromarray(grey.astype(np.uint16) * 257), np.stack([grey] * 3, -1)
    else:
        image = Image.fromarray(colors()).convert(mode)
        expected = None
    contents = encoded(image, form)
    if expected is None:
        expected = np.asarray(Image.open(io.BytesIO(contents)).convert("RGB"))

    assert difference(contents, expected) <= tolerance


@pytest.mark.parametrize("colors_used", [2, 5, 200])
def test_palettes_of_every_length_are_followed(colors_used: int) -> None:
    """A BMP or PNG with a short palette shows its colours, not the palette's indices."""
    image = Image.fromarray(colors()).quantize(colors_used)
    expected = np.asarray(image.convert("RGB"))

    assert difference(encoded(image, "BMP"), expected) == 0
    assert difference(encoded(image, "PNG"), expected) == 0


def test_what_is_transparent_in_a_webp_lies_on_white() -> None:
    """As in a PNG."""
    image = Image.fromarray(colors()).convert("RGBA")
    alpha = np.resize(np.array([0, 128, 255], np.uint8), image.size[::-1])
    image.putalpha(Image.fromarray(alpha))
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)

    contents = encoded(image, "WEBP", lossless=True, exact=True)
    assert difference(contents, np.asarray(white.convert("RGB"))) <= 1


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_lies_on_white(mode: str) -> None:
    """Alpha of 0, 128 and 255, and a transparent palette colour, are blended with white."""
    image = Image.fromarray(colors()).convert("RGBA")
    alpha = np.resize(np.array([0, 128, 255], np.uint8), image.size[::-1])
    image.putalpha(Image.fromarray(alpha if mode != "P" else np.where(alpha == 128, 255, alpha)))
    contents = encoded(image.convert(mode) if mode != "P" else image.quantize(16), "PNG")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(Image.open(io.BytesIO(contents)).convert("RGBA"))

    assert difference(contents, np.asarray(white.convert("RGB"))) <= 1


def test_the_padding_of_a_32_bit_bmp_is_not_alpha() -> None:
    """A BMP with four bytes per pixel shows its colours whatever the fourth byte is."""
    pixels = np.dstack([colors(), np.zeros(colors().shape[:2], np.uint8)])
    contents = encoded(Image.fromarray(pixels, "RGBA"), "BMP")

    assert difference(contents, colors()) == 0


@pytest.mark.parametrize(("form", "options"), [("GIF", {}), ("WEBP", {"lossless": True})])
def test_of_a_moving_picture_the_first_frame_counts(form: str, options: dict[str, bool]) -> None:
    """An animation decodes to one image."""
    frames = [Image.fromarray(np.full((6, 5, 3), grey, np.uint8)) for grey in (10, 200)]
    contents = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)

    assert difference(contents, np.full((6, 5, 3), 10)) == 0


def test_a_graph_decodes_as_eager_code_does() -> None:
    """One traced function serves all formats, as a SavedModel or tf.data needs it."""
    graph = tf.function(decoding.decode_image, input_signature=[tf.TensorSpec((), tf.string)])

    for form in ("PNG", "JPEG", "BMP", "GIF", "WEBP"):
        contents = encoded(Image.fromarray(colors()), form)
        assert np.array_equal(graph(contents), decoding.decode_image(tf.constant(contents)))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP", "GIF", "WEBP"])
def test_half_a_file_is_an_error(form: str) -> None:
    """A truncated image is never half a picture."""
    contents = encoded(Image.fromarray(colors()), form)

    with pytest.raises(tf.errors.InvalidArgumentError):
        decoding.decode_image(tf.constant(contents[: len(contents) // 2]))


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

    assert np.abs(images.resize_image(pixels, size=size).numpy() - expected).max() < 1.5
    plain = images.resize_image(pixels, size=size, antialias=False).numpy()
    assert (np.abs(plain - expected).max() > 15) == (size != (500, 600))


@pytest.mark.parametrize("size", [(64, 64), (400, 30), (30, 600), (1, 1)])
def test_anti_aliasing_has_the_bits_of_tensorflow(size: tuple[int, int]) -> None:
    """Shrunk in both directions or in one, alone and as a batch."""
    pixels = np.stack([photograph(), photograph()[::-1]])
    expected = tf.image.resize(pixels, size, antialias=True).numpy()

    assert np.array_equal(images.resize_image(pixels, size=size), expected)
    assert np.array_equal(images.resize_image(pixels[1], size=size), expected[1])


def test_without_antialiasing_few_pixels_are_seen() -> None:
    """Quartering an image averages nothing but the two middle pixels of each four."""
    image = np.arange(8, dtype=np.float32).reshape(1, 8, 1) * np.ones((8, 1, 3), np.float32)

    resized = images.resize_image(image, size=(2, 2), antialias=False).numpy()

    assert resized.dtype == np.float32
    assert resized[0, :, 0].tolist() == [1.5, 5.5]


def test_enlarging_has_the_bits_of_plain_interpolation() -> None:
    """Smoothing has no effect there; batches and graphs of open shape give the same bits."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    graph = tf.function(
        lambda image: images.resize_image(image, size=(16, 17)),
        input_signature=[tf.TensorSpec((None, None, 3), tf.uint8)],
    )
    plain = tf.image.resize(pixels, (16, 17)).numpy()

    assert np.array_equal(images.resize_image(pixels, size=(16, 17)), plain)
    assert np.array_equal(graph(pixels[1]), plain[1])
    small = images.resize_image(photograph(), size=(16, 17)).numpy()
    assert np.array_equal(graph(photograph()), small)


def test_a_model_says_how_its_images_are_resized() -> None:
    """Its own config does, or that of the model inside; two that differ are refused."""
    fields: dict[str, Any] = {
        "input_shape": (8, 8, 3),
        "patch_size": 4,
        "hidden_dim": 8,
        "mlp_dim": 8,
    }
    smooth, plain = (
        VisionTransformer(
            ViTConfig(**fields, num_heads=1, num_layers=1, antialias=value), name=f"vit_{value}"
        )
        for value in (True, False)
    )
    image = keras.Input((8, 8, 3))

    assert images.antialias_of(smooth)
    assert not images.antialias_of(plain)
    assert not images.antialias_of(keras.Sequential([keras.Sequential([plain])]))
    assert not images.antialias_of(keras.Model(image, plain(image)))
    both = keras.Model(image, [plain(image), smooth(image)])
    with pytest.raises(ValueError, match="with antialias=True and with antialias=False"):
        images.antialias_of(both)


def test_a_file_reads_as_its_bytes_do(tmp_path: Path) -> None:
    """`read_image` and `read_images` are decoding and resizing, nothing else."""
    file = tmp_path / "image.png"
    Image.fromarray(colors()).save(file)

    assert np.array_equal(images.read_image(file), colors())
    assert np.array_equal(
        images.read_images([file], size=(5, 6))[0], images.resize_image(colors(), size=(5, 6))
    )


def test_what_is_no_image_file_is_named(tmp_path: Path) -> None:
    """A missing file, a folder, a text and an empty file each give a sentence with the path."""
    text, empty = tmp_path / "text.png", tmp_path / "empty.png"
    text.write_text("not a picture")
    empty.touch()

    with pytest.raises(FileNotFoundError, match=r"There is no image file '.*gone.png'"):
        images.read_image(tmp_path / "gone.png")
    with pytest.raises(ValueError, match="is a folder"):
        images.read_image(tmp_path)
    for file in (text, empty):
        with pytest.raises(ValueError, match=f"{file.name}' is not an image"):
            images.read_image(file)


@pytest.mark.parametrize("part", [(0, 0, 60, 80), (3, 1, 7, 9), (20, 33, 40, 47), (59, 79, 1, 1)])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "GIF", "WEBP"])
def test_a_part_has_the_pixels_of_the_whole(form: str, part: tuple[int, ...]) -> None:
    """Decoding a part is decoding the whole and cutting, but for JPEG's colours at the edges."""
    soft = Image.fromarray(colors()).resize((80, 60), Image.Resampling.BICUBIC)
    contents = tf.constant(encoded(soft, form))
    top, left, height, width = part

    shapes = []

    def choose(shape: tf.Tensor) -> tf.Tensor:
        shapes.append(shape.numpy().tolist())
        return tf.constant(part)

    actual = decoding.decode_part(contents, choose=choose).numpy()
    whole = decoding.decode_image(contents).numpy()[top : top + height, left : left + width]

    assert shapes == [[60, 80]]
    assert actual.shape == (height, width, 3)
    difference = np.abs(actual.astype(int) - whole)
    assert difference.max() <= (10 if form == "JPEG" else 0)
    assert difference[1:-1, 1:-1].sum() == 0


def test_encoded_bytes_are_read_as_a_file_is() -> None:
    """`read_image` takes what is in a file, and says what it is if it is no image."""
    contents = encoded(Image.fromarray(colors()), "PNG")
    assert np.array_equal(images.read_image(contents), colors())
    with pytest.raises(ValueError, match="An image of 7 bytes is not an image"):
        images.read_image(contents[:7])


def bomb(width: int, height: int, *, kind: int = 6) -> bytes:
    """A PNG of one colour: a thousandth of its pixels' bytes."""
    row = b"\0" + b"\x80" * (width * {2: 3, 6: 4}[kind])
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", packed), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


MEASURED = """
import sys
from pathlib import Path
from keras_vit.data import images
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
images.is_sound(Path(sys.argv[2]).read_bytes())
before = peak()
try:
    images.read_image(sys.argv[1])
except ValueError:
    pass
print(peak() - before)
"""


def grown(file: Path, *, small: Path) -> int:
    """Bytes that reading a file takes at most, in a process that has decoded another before."""
    run = [sys.executable, "-c", MEASURED, str(file), str(small)]
    return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_memory_is_bounded_by_the_pixels(tmp_path: Path) -> None:
    """A sound image takes 16 bytes a pixel at most while decoded; one that is too large none."""
    small, sound, large = tmp_path / "small.png", tmp_path / "sound.png", tmp_path / "large.png"
    small.write_bytes(bomb(8, 8))
    sound.write_bytes(bomb(5000, 5000))
    large.write_bytes(bomb(13_000, 13_000))
    assert grown(sound, small=small) < 16 * 5000 * 5000
    assert grown(large, small=small) < 100e6


def test_an_image_above_the_budget_is_refused_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, listing and a part of it in training; the number is the environment's to set."""
    file = tmp_path / "large.png"
    for form in ("PNG", "JPEG", "BMP", "GIF", "WEBP"):
        contents = encoded(Image.fromarray(colors()), form)
        file.write_bytes(contents)
        monkeypatch.setenv("KERAS_VIT_MAX_PIXELS", str(24 * 32))
        assert images.is_sound(contents)
        assert images.read_image(file).shape == (24, 32, 3)
        monkeypatch.setenv("KERAS_VIT_MAX_PIXELS", str(24 * 32 - 1))
        assert not images.is_sound(contents)
        with pytest.raises(ValueError, match=r"large.png' has 768 pixels, .* than the 767 that"):
            images.read_image(file)
        with pytest.raises(tf.errors.InvalidArgumentError, match="more pixels than are decoded"):
            decoding.decode_part(
                tf.constant(contents), choose=lambda shape: tf.constant([0, 0, 1, 1])
            )


@pytest.mark.parametrize("text", ["", "0", "-1", "1e6", "many", "9" * 30])
def test_a_budget_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KERAS_VIT_MAX_PIXELS", text)
    with pytest.raises(ValueError, match="KERAS_VIT_MAX_PIXELS is the most pixels"):
        images.read_image(b"no image")


def test_a_pipe_a_device_and_a_huge_file_are_refused_at_once(tmp_path: Path) -> None:
    """Nothing waits for a writer, and nothing without end is read."""
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    with (tmp_path / "sparse.png").open("wb") as file:
        file.write(b"\x89PNG")
        file.truncate(40 * 2**30)
    with pytest.raises(ValueError, match=r"pipe.jpg' is a pipe or a device, not a file"):
        images.read_image(tmp_path / "pipe.jpg")
    with pytest.raises(ValueError, match=r"zero.jpg' is a pipe or a device, not a file"):
        images.read_image(tmp_path / "zero.jpg")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"sparse.png' has 42949672960 bytes, more than"):
        images.read_image(tmp_path / "sparse.png")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


@pytest.mark.parametrize("place", [14, 18, 28, 46])
@pytest.mark.parametrize("value", [0, 3, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_damaged_palette_bmp_is_refused_by_name(place: int, value: int) -> None:
    """TensorFlow's message holds bytes of the file, which are no text: nobody meets that error."""
    palette = Image.fromarray(colors()).quantize(64)
    contents = bytearray(encoded(palette, "BMP"))
    contents[place : place + 4] = struct.pack("<I", value)
    for damaged in (bytes(contents), bytes(contents[:30])):
        if images.is_sound(damaged):
            images.read_image(damaged)
        else:
            with pytest.raises(ValueError, match=r"An image of \d+ bytes (is not|has \d+ pixels)"):
                images.read_image(damaged)


def test_laying_on_white_in_integers_is_laying_on_white(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each colour with each alpha gives what floating point gives; in strips too."""
    color, alpha = np.meshgrid(np.arange(256), np.arange(256))
    pixels = np.stack([color, color[::-1], color, alpha], axis=-1).astype(np.uint8)
    share = pixels[..., 3:].astype(np.float64) / 255
    expected = np.round(pixels[..., :3] * share + 255 * (1 - share)).astype(np.uint8)
    contents = encoded(Image.fromarray(pixels, "RGBA"), "PNG")
    assert difference(contents, expected) == 0
    monkeypatch.setattr(decoding, "_STRIP", 1000)
    assert difference(contents, expected) == 0
