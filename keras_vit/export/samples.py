"""Makes the images with which an artefact is compared with its model."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_vit.data import images as image_files

# A file, or pixels 0..255, uint8 (height, width, 3).
Image = str | Path | np.ndarray

COUNT = 8  # images in the largest batch that is compared


def sample_files(images: Sequence[Image], *, size: tuple[int, int]) -> list[bytes]:
    """Returns `COUNT` image files as bytes: the given ones, and drawn ones of every format.

    Example:
        >>> len(sample_files((), size=(32, 32)))
        8

    Args:
        images: image files or pixels; of more than `COUNT`, evenly spread ones.
        size: (height, width) around which the drawn images vary.

    Raises:
        FileNotFoundError: an image is not there.
        ValueError: a file is not an image.
    """
    count = min(len(images), COUNT)
    chosen = [images[index * len(images) // count] for index in range(count)]
    return [file_bytes(image) for image in chosen] + drawn_files(size=size)[count:]


def file_bytes(image: Image) -> bytes:
    """Returns the bytes of an image file, or of a PNG of pixels.

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: the file is not an image.
    """
    if isinstance(image, np.ndarray):
        return bytes(tf.io.encode_png(image).numpy())
    image_files.read_image(image)
    return Path(image).read_bytes()


def drawn_files(*, size: tuple[int, int]) -> list[bytes]:
    """Draws `COUNT` smooth coloured images, of several sizes, formats and numbers of channels."""
    height, width = size
    pixels = [
        draw(seed, height=height + 7 * seed, width=max(width + 13 * seed - 20, 2))
        for seed in range(COUNT)
    ]
    grey = np.uint8(np.round(pixels[2].mean(axis=-1, keepdims=True)))
    clear = np.concatenate([pixels[3], pixels[3][..., :1]], axis=-1)
    encoded = [
        tf.io.encode_png(pixels[0]),
        tf.io.encode_jpeg(pixels[1], quality=92),
        tf.io.encode_jpeg(grey),
        tf.io.encode_png(clear),
        tf.io.encode_png(grey),
        tf.io.encode_jpeg(pixels[5], quality=75),
        tf.io.encode_png(pixels[6]),
    ]
    return [bytes(file.numpy()) for file in encoded] + [encode_bmp(pixels[7])]


def draw(seed: int, *, height: int, width: int) -> np.ndarray:
    """Draws a smooth coloured image, uint8 (height, width, 3)."""
    generator = np.random.default_rng(seed)
    coarse = generator.uniform(0, 255, (1, 5, 5, 3)).astype(np.float32)
    smooth = tf.image.resize(coarse, (height, width), method="bicubic")[0]
    return np.asarray(tf.cast(tf.clip_by_value(smooth, 0, 255), tf.uint8))


def encode_bmp(pixels: np.ndarray) -> bytes:
    """Encodes RGB pixels (height, width, 3) as an uncompressed 24-bit BMP."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, -(-3 * width // 4) * 4), np.uint8)  # rows are padded to 4 bytes
    rows[:, : 3 * width] = pixels[::-1, :, ::-1].reshape(height, -1)  # bottom first, blue first
    content = rows.tobytes()
    header = struct.pack("<2sIHHI", b"BM", 54 + len(content), 0, 0, 54)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(content), 0, 0, 0, 0)
    return header + info + content
