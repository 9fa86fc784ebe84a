"""Attacks images: damaged files of every format, through the command line and the pipelines.

Image formats have few checksums, so a decoder may return other pixels for a damaged file.
Prediction and training must see the same pixels, or refuse the file by its name.
"""

import contextlib
import hashlib
import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

import keras_vit
from campaigns import mutations, oracle
from keras_vit.cli.main import main
from keras_vit.data import images
from keras_vit.training import run

_SIZE = (32, 48)  # height and width of the sound pictures
# So few that reading an image three times takes less memory than `oracle.MEGABYTES`.
os.environ[images.MAX_PIXELS_VARIABLE] = str(2**22)
_SIDES = (0, 1, 2**14 - 1, 2**16 - 1, 30_000, 2**31 - 1, 2**31, 2**32 - 1)
Header = Callable[[bytearray, np.random.Generator], str]


class Campaign:
    """Damages an image file, and reads it as prediction, listing and training do.

    One case in twenty runs `keras-vit predict` on it and an undamaged picture, which must still be
    predicted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _sound_files()
        self._names = sorted(self._files)
        self._run = _write_run(folder / "run")
        self._beside = folder / "sound.png"
        self._beside.write_bytes(self._files["rgb.png"])
        self._decode = tf.function(
            _try_decode, input_signature=[tf.TensorSpec((), tf.string)], autograph=False
        )
        self._read(self._beside)  # the first use of a graph takes seconds
        self._predict(self._beside)

    def case(self, rng: np.random.Generator) -> oracle.Case:
        name = self._names[int(rng.integers(len(self._names)))]
        sound = self._files[name]
        damaged, what = _damaged(name, sound, rng)
        file = self._folder / f"attacked-{name}"
        through_cli = rng.integers(20) == 0
        act = self._predict if through_cli else self._read

        def write_and_act() -> str:
            file.write_bytes(damaged)
            return act(file)

        return oracle.Case(
            what=f"{'predict ' if through_cli else ''}{name}: {what}",
            act=write_and_act,
            sound="" if damaged != sound else _digest(images.read_image(sound)),
            names=(file.name,),
            has_checksum=damaged == sound and not through_cli,
        )

    def _read(self, file: Path) -> str:
        """Reads a file as prediction does; listing and training must have the same result."""
        contents = file.read_bytes()
        pixels, is_decodable = self._decode(contents)
        if images.is_decodable(contents) != bool(is_decodable):
            raise RuntimeError(f"{file.name}: listing and training differ")
        try:
            read = images.read_image(file)
        except ValueError:
            if is_decodable:
                raise RuntimeError(
                    f"{file.name}: prediction refuses an image of the training"
                ) from None
            raise
        if not is_decodable or _digest(read) != _digest(pixels.numpy()):
            raise RuntimeError(f"{file.name}: prediction and training see different pixels")
        return _digest(read)

    def _predict(self, file: Path) -> str:
        """Predicts a file and an undamaged one; raises the error that the terminal shows."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["predict", str(self._run), str(file), str(self._beside), "--json"])
        lines = out.getvalue().splitlines()
        if not any(str(self._beside) in line for line in lines):
            raise RuntimeError(f"{file.name}: the undamaged picture was not predicted")
        if code:
            images.read_image(file)  # raises the error of the terminal
            raise RuntimeError(f"{file.name}: the exit code is {code}, but the file can be read")
        return _digest(np.frombuffer("".join(lines).encode(), np.uint8))


def _try_decode(contents: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Decodes as training does, whose datasets skip errors."""
    black = tf.data.Dataset.from_tensors((tf.zeros((0, 0, 3), tf.uint8), False))
    image = tf.data.Dataset.from_tensors(contents).map(lambda x: (images.decode_image(x), True))
    first = image.ignore_errors(log_warning=False).concatenate(black).take(1)
    pixels, is_decodable = first.get_single_element()
    return pixels, is_decodable


def _digest(pixels: np.ndarray) -> str:
    shape = str(pixels.shape).encode()
    return hashlib.sha256(shape + np.ascontiguousarray(pixels).tobytes()).hexdigest()


def _sound_files() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (_SIZE[0] // 8, _SIZE[1] // 8, 4), np.uint8)
    picture = Image.fromarray(np.kron(blocks, np.ones((8, 8, 1), np.uint8)), "RGBA")
    rgb, grey, palette = picture.convert("RGB"), picture.convert("L"), picture.convert("P")
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    turned = Image.Exif()
    turned[0x0112] = 6
    others = [Image.fromarray(255 - np.asarray(rgb)), rgb]
    return {
        "rgb.png": _saved(rgb, "PNG"),
        "rgba.png": _saved(picture, "PNG", exif=turned),
        "palette.png": _saved(palette, "PNG"),
        "sixteen.png": _saved(wide, "PNG"),
        "interlaced.png": _interlaced(np.asarray(grey)),
        "rgb.jpg": _saved(rgb, "JPEG", exif=turned),
        "progressive.jpg": _saved(rgb, "JPEG", progressive=True),
        "cmyk.jpg": _saved(rgb.convert("CMYK"), "JPEG"),
        "grey.jpg": _saved(grey, "JPEG"),
        "still.gif": _saved(palette, "GIF"),
        "moving.gif": _saved(rgb, "GIF", save_all=True, append_images=others),
        "rgb.bmp": _saved(rgb, "BMP"),
        "palette.bmp": _saved(palette, "BMP"),
        "lossy.webp": _saved(rgb, "WEBP"),
        "lossless.webp": _saved(picture, "WEBP", lossless=True, exif=turned),
        "rgb.tif": _saved(rgb, "TIFF", exif=turned),
        "sixteen.tif": _saved(wide, "TIFF", compression="tiff_deflate"),
        "rgba.avif": _saved(picture, "AVIF", exif=turned),
        "moving.webp": _saved(rgb, "WEBP", save_all=True, append_images=others),
    }


def _saved(picture: Image.Image, form: str, **options: object) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, form, **options)
    return stream.getvalue()


def _interlaced(grey: np.ndarray) -> bytes:
    """Encodes a PNG in the seven passes of Adam7, which Pillow does not write."""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2))
    rows = [
        b"\0" + row.tobytes()
        for top, left, down, right in (*passes, (1, 0, 2, 1))
        for row in grey[top::down, left::right]
    ]
    head = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 1)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _damaged(name: str, sound: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    """Returns a file with random damage or with a damaged header, or the file itself."""
    choice = rng.integers(10)
    if choice == 0:
        return sound, "undamaged"
    if choice < 5:
        content = bytearray(sound)
        what = _HEADERS.get(name.rsplit(".", 1)[1], _any_header)(content, rng)
        return bytes(content), what
    return mutations.mutate(sound, rng)


def _side(rng: np.random.Generator) -> int:
    if rng.integers(2):
        return int(rng.integers(0, 200))
    return _SIDES[int(rng.integers(len(_SIDES)))]


def _png_header(content: bytearray, rng: np.random.Generator) -> str:
    """Changes the fields of IHDR and corrects their checksum."""
    width, height = _side(rng), _side(rng)
    content[16:24] = struct.pack(">II", width, height)
    if rng.integers(2):
        content[24:29] = rng.choice([0, 1, 2, 3, 4, 6, 8, 16, 255], 5).astype(np.uint8).tobytes()
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return f"IHDR of {width} by {height}, {bytes(content[24:29]).hex()}"


def _jpeg_header(content: bytearray, rng: np.random.Generator) -> str:
    start = max(content.find(b"\xff\xc0"), content.find(b"\xff\xc2"))
    height, width = _side(rng) % 2**16, _side(rng) % 2**16
    content[start + 5 : start + 9] = struct.pack(">HH", height, width)
    if rng.integers(4) == 0:
        content[start + 9] = int(rng.integers(0, 6))
    return f"frame of {width} by {height}, {content[start + 9]} components"


def _gif_header(content: bytearray, rng: np.random.Generator) -> str:
    place = 6 if rng.integers(2) else content.find(b",", 13) + 5
    width, height = _side(rng) % 2**16, _side(rng) % 2**16
    content[place : place + 4] = struct.pack("<HH", width, height)
    return f"{width} by {height} at {place}"


def _bmp_header(content: bytearray, rng: np.random.Generator) -> str:
    place = int(rng.choice([10, 14, 18, 22, 26, 28, 30, 34, 46]))
    value = int(rng.choice([0, 1, 3, 8, 24, 32, _side(rng), 2**31 + _side(rng) % 2**31]))
    content[place : place + 4] = struct.pack("<I", value)
    return f"{value} at {place}"


def _webp_header(content: bytearray, rng: np.random.Generator) -> str:
    place = int(rng.choice([4, 16, 20, 21, 24, 26, 27, 28]))
    value = _side(rng)
    content[place : place + 4] = struct.pack("<I", value)
    return f"{value} at {place}"


def _any_header(content: bytearray, rng: np.random.Generator) -> str:
    """Changes four bytes among the first hundreds, where TIFF and AVIF have offsets and sizes."""
    place, value = int(rng.integers(4, 400)), _side(rng)
    content[place : place + 4] = struct.pack(str(rng.choice(["<I", ">I"])), value)
    return f"{value} at {place}"


_HEADERS: dict[str, Header] = {
    "png": _png_header,
    "jpg": _jpeg_header,
    "gif": _gif_header,
    "bmp": _bmp_header,
    "webp": _webp_header,
}


def _write_run(folder: Path) -> Path:
    """Makes the files of a run that `predict` needs: a tiny model with two classes."""
    keras.utils.set_random_seed(0)
    config = keras_vit.ViTConfig(
        input_shape=(16, 16, 3),
        patch_size=8,
        hidden_dim=8,
        mlp_dim=8,
        num_heads=1,
        num_layers=1,
        classes=2,
        include_preprocessing=True,
    )
    return run_folder(folder, keras_vit.VisionTransformer(config), labels=["dark", "striped"])


def run_folder(folder: Path, model: keras_vit.VisionTransformer, *, labels: list[str]) -> Path:
    """Writes a run directory with random weights, like the result of a training."""
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0, 0.3, variable.shape))
    folder.mkdir()
    model.save(folder / run.MODEL)
    fields = {"model": model.config.to_dict(), "labels": labels, "data": {"source": "digits"}}
    (folder / run.CONFIG).write_text(json.dumps(fields), encoding="utf-8")
    (folder / run.LABELS).write_text("\n".join(labels), encoding="utf-8")
    return folder
