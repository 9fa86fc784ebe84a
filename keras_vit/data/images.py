"""Turns encoded images into pixels: the one path of training, evaluation, prediction and export.

Only TensorFlow ops: the same functions run eagerly, in `tf.data` and in a SavedModel.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.data import orientation

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
FORMATS = "JPEG, PNG, WebP, BMP or GIF"

# Byte offset and width of what is read of a BMP's header (BITMAPFILEHEADER, BITMAPINFOHEADER).
_BMP_INFO_SIZE = (14, 4)
_BMP_BITS_PER_PIXEL = (28, 2)
_BMP_COLORS = (46, 4)
NO_WEBP = "WebP is not decoded here; send the image as JPEG, PNG, GIF or BMP."
# Where an extended WebP file has its flags, and two of them (RFC 9649, 2.7).
_WEBP_FLAGS, _WEBP_ALPHA, _WEBP_ANIMATION = 20, 0x10, 0x02
_BYTES = [bytes([value]) for value in range(256)]
_JPEG = b"\xff\xd8\xff"


def decode_image(contents: tf.Tensor, *, webp: bool = True) -> tf.Tensor:
    """Decodes one JPEG, PNG, WebP, BMP or GIF to RGB, upright.

    Grey becomes three equal channels. What is transparent in a PNG or WebP lies on white, as on a
    page. Of a moving GIF or WebP the first frame counts. The orientation in a JPEG, PNG or WebP
    (EXIF) is applied, as browsers and Pillow's `ImageOps.exif_transpose` do; the pipelines that the
    published models come from did not (google-research/vision_transformer, big_vision).

    Example:
        >>> import tensorflow as tf
        >>> half_clear = tf.constant([[[255, 0, 0, 255], [255, 0, 0, 0]]], tf.uint8)
        >>> decode_image(tf.io.encode_png(half_clear)).numpy().tolist()
        [[[255, 0, 0], [255, 255, 255]]]

    Args:
        contents: the bytes of the file, a scalar string.
        webp: whether WebP is decoded, by an operation that TensorFlow has from 2.20 on; a graph
            that has it does not load in servers of before. Otherwise WebP is refused.

    Returns:
        The pixels 0..255, uint8 of shape (height, width, 3).

    Raises:
        tf.errors.InvalidArgumentError: the bytes are not such an image, or are damaged.
    """
    decoders = [
        (_starts_with(contents, b"\x89PNG"), lambda: _decode_png(contents)),
        (_starts_with(contents, b"BM"), lambda: _decode_bmp(contents)),
    ]
    is_webp = _starts_with(contents, b"RIFF")
    decoders.append((is_webp, lambda: _decode_webp(contents) if webp else _refuse_webp()))
    image = tf.case(
        decoders,
        default=lambda: tf.io.decode_image(contents, channels=3, expand_animations=False),
    )
    image = tf.cond(
        orientation.may_be_turned(contents),
        lambda: orientation.upright(image, orientation.read_orientation(contents)),
        lambda: image,
    )
    return tf.ensure_shape(image, (None, None, 3))


def is_sound(contents: bytes) -> bool:
    """Returns whether `decode_image` can decode what is in a file.

    Example:
        >>> is_sound(b"no image")
        False
    """
    try:
        decode_image(tf.constant(contents))
    except tf.errors.InvalidArgumentError:
        return False
    return True


def decode_part(contents: tf.Tensor, *, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Decodes a part of one upright image, of a JPEG no more than that.

    The same pixels as decoding the whole and cutting, but for colours at the part's edges, which
    JPEG interpolates from what lies beside: up to 10 of 255.

    Example:
        >>> import tensorflow as tf
        >>> contents = tf.io.encode_jpeg(tf.zeros((60, 80, 3), tf.uint8))
        >>> decode_part(contents, choose=lambda shape: tf.constant([10, 20, 30, 40])).shape
        TensorShape([30, 40, 3])

    Args:
        contents: the bytes of the file, a scalar string.
        choose: takes (height, width) of the upright image and gives (top, left, height, width) of
            the part, both int32.

    Returns:
        The pixels 0..255, uint8 of shape (height, width, 3).

    Raises:
        tf.errors.InvalidArgumentError: as in `decode_image`.
    """

    def decode_and_cut() -> tf.Tensor:
        return cut_part(decode_image(contents), choose=choose)

    def decode_jpeg() -> tf.Tensor:
        part = choose(tf.image.extract_jpeg_shape(contents)[:2])
        return tf.image.decode_and_crop_jpeg(contents, part, channels=3)

    def decode_turned_jpeg() -> tf.Tensor:
        turn = orientation.read_orientation(contents)
        shape = orientation.upright_shape(tf.image.extract_jpeg_shape(contents)[:2], turn)
        part = orientation.stored_part(choose(shape), shape, turn)
        cut = tf.image.decode_and_crop_jpeg(contents, part, channels=3)
        return orientation.upright(cut, turn)

    image = tf.cond(
        _starts_with(contents, _JPEG),
        lambda: tf.cond(orientation.may_be_turned(contents), decode_turned_jpeg, decode_jpeg),
        decode_and_cut,
    )
    return tf.ensure_shape(image, (None, None, 3))


def cut_part(image: tf.Tensor, *, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Cuts a part out of pixels of shape (height, width, 3), see `decode_part`."""
    part = choose(tf.shape(image)[:2])
    return tf.image.crop_to_bounding_box(image, part[0], part[1], part[2], part[3])


def resize_image(image: tf.Tensor, *, size: tuple[int, int], antialias: bool = True) -> tf.Tensor:
    """Resizes to (height, width) by bilinear interpolation, stretching to another aspect.

    With anti-aliasing it is Pillow's `resize` with BILINEAR, to a grey level; without,
    `tf.image.resize`, as Google's published models were trained and evaluated
    (google-research/vision_transformer, vit_jax/input_pipeline.py). Enlarging is the same in both.

    Example:
        >>> import numpy as np
        >>> resize_image(np.zeros((2, 4, 3), np.uint8), size=(6, 6)).shape.as_list()
        [6, 6, 3]

    Args:
        image: pixels of shape (height, width, 3), or (batch, height, width, 3).
        size: (height, width) in pixels.
        antialias: whether an image that shrinks is smoothed; a model's own choice is
            `antialias_of(model)`.

    Returns:
        The pixels, float32 in 0..255.
    """
    image = tf.convert_to_tensor(image)

    def plain() -> tf.Tensor:
        return tf.cast(tf.image.resize(image, size), tf.float32)

    def smooth() -> tf.Tensor:
        return tf.image.resize(image, size, antialias=True)

    known = image.shape[-3:-1]
    if not antialias or all(side and side <= to for side, to in zip(known, size, strict=True)):
        return plain()  # smoothing would cost, and change nothing
    return tf.cond(tf.reduce_any(tf.shape(image)[-3:-1] > size), smooth, plain)


def antialias_of(model: Any) -> bool:
    """Returns whether the images of a model are downscaled with anti-aliasing.

    Example:
        >>> import keras
        >>> antialias_of(keras.Sequential([keras.layers.Flatten()]))
        True

    Args:
        model: a model with a `ViTConfig`, or around one, which decides; any other is anti-aliased.

    Raises:
        ValueError: it contains two that differ.
    """
    found = {config.antialias for config in _configs(model)}
    if len(found) > 1:
        raise ValueError(
            f"The model {model.name!r} contains Vision Transformers with antialias=True and with "
            "antialias=False, so that no one image is right for both; rebuild one of them."
        )
    return found.pop() if found else True


def read_image(path: str | os.PathLike[str] | bytes) -> np.ndarray:
    """Reads one image.

    Example:
        >>> import pathlib, tempfile, tensorflow as tf
        >>> file = pathlib.Path(tempfile.mkdtemp(), "dot.png")
        >>> _ = file.write_bytes(tf.io.encode_png(tf.zeros((1, 1, 1), tf.uint8)).numpy())
        >>> read_image(file).tolist()
        [[[0, 0, 0]]]

    Args:
        path: the path of a file, or what is in one.

    Returns:
        The pixels 0..255, uint8 of shape (height, width, 3).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not an image, or is damaged.
    """
    if isinstance(path, bytes):
        return _decode(path, name=f"An image of {len(path)} bytes")
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"There is no image file {str(path)!r}; check the path.")
    if file.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; give the path of a {FORMATS} file.")
    return _decode(file.read_bytes(), name=repr(str(path)))


def read_images(
    paths: Sequence[str | os.PathLike[str]], *, size: tuple[int, int], antialias: bool = True
) -> np.ndarray:
    """Reads image files and resizes them to one size, see `resize_image`.

    Example:
        >>> import pathlib, tempfile, tensorflow as tf
        >>> file = pathlib.Path(tempfile.mkdtemp(), "dot.png")
        >>> _ = file.write_bytes(tf.io.encode_png(tf.zeros((1, 1, 1), tf.uint8)).numpy())
        >>> read_images([file, file], size=(4, 6)).shape
        (2, 4, 6, 3)

    Returns:
        The pixels, float32 in 0..255 of shape (len(paths), height, width, 3).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not an image, or is damaged.
    """
    resized = [resize_image(read_image(path), size=size, antialias=antialias) for path in paths]
    return np.stack([np.asarray(image) for image in resized])


def _configs(layer: Any) -> Iterator[ViTConfig]:
    config = getattr(layer, "config", None)
    if isinstance(config, ViTConfig):
        yield config
        return
    for inner in getattr(layer, "layers", ()):
        yield from _configs(inner)


def _decode(contents: bytes, *, name: str) -> np.ndarray:
    try:
        return np.asarray(decode_image(tf.constant(contents)))
    except tf.errors.InvalidArgumentError:
        raise ValueError(
            f"{name} is not an image that can be read, or is damaged; give a {FORMATS} file."
        ) from None


def _starts_with(contents: tf.Tensor, magic: bytes) -> tf.Tensor:
    # `substr` clips to the end of shorter strings, so an empty file answers False.
    return tf.equal(tf.strings.substr(contents, 0, len(magic)), magic)


def _decode_png(contents: tf.Tensor) -> tf.Tensor:
    # `channels=4` would be shorter, but makes grey images of 1, 2 or 4 bits almost transparent.
    return _on_white(tf.io.decode_png(contents, channels=0))


def _decode_webp(contents: tf.Tensor) -> tf.Tensor:
    # TensorFlow 2.21 takes animations with alpha alone, and left to choose, writes beyond the
    # pixels of others: to it every animation says that it has alpha.
    start = tf.strings.substr(contents, 0, _WEBP_FLAGS + 1)
    head = tf.io.decode_raw(start, tf.uint8, fixed_length=_WEBP_FLAGS + 1)
    is_extended = tf.reduce_all(head[12:16] == list(b"VP8X"))

    def moving() -> tf.Tensor:
        flags = tf.gather(_BYTES, tf.cast(head[_WEBP_FLAGS] | _WEBP_ALPHA, tf.int32))
        rest = tf.strings.substr(contents, _WEBP_FLAGS + 1, tf.int32.max)
        marked = tf.strings.join([tf.strings.substr(contents, 0, _WEBP_FLAGS), flags, rest])
        return tf.image.decode_webp(marked, channels=4)[0]

    pixels = tf.cond(
        is_extended & (head[_WEBP_FLAGS] & _WEBP_ANIMATION > 0),
        moving,
        lambda: tf.image.decode_webp(contents)[0],
    )
    return _on_white(pixels)


def _refuse_webp() -> tf.Tensor:
    # `decode_image` would take it where TensorFlow is new enough, and lay it on black.
    refused = tf.debugging.Assert(False, [NO_WEBP])
    with tf.control_dependencies([refused] if refused is not None else []):
        return tf.zeros((1, 1, 3), tf.uint8)


def _on_white(pixels: tf.Tensor) -> tf.Tensor:
    """Lays pixels with 1 to 4 channels on white, uint8 of shape (height, width, 3)."""
    pixels = tf.cast(pixels, tf.float32)
    channels = tf.shape(pixels)[2]
    has_alpha = 1 - channels % 2  # of 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha
    color = pixels[..., : channels - has_alpha] * tf.ones(3)
    alpha = tf.cond(
        tf.equal(has_alpha, 1),
        lambda: pixels[..., -1:] / 255,
        lambda: tf.ones_like(pixels[..., :1]),
    )
    return tf.cast(tf.round(color * alpha + 255 * (1 - alpha)), tf.uint8)


def _decode_bmp(contents: tf.Tensor) -> tf.Tensor:
    bits = _little_endian(contents, *_BMP_BITS_PER_PIXEL)
    return tf.cond(
        tf.equal(bits, 8),
        lambda: _decode_palette_bmp(contents),
        lambda: tf.io.decode_bmp(contents, channels=0)[..., :3],  # the fourth byte is padding
    )


def _decode_palette_bmp(contents: tf.Tensor) -> tf.Tensor:
    # `tf.io.decode_bmp` returns the palette's indices as if they were grey values.
    start, count = (
        14 + _little_endian(contents, *_BMP_INFO_SIZE),
        _little_endian(contents, *_BMP_COLORS),
    )
    count = tf.where(tf.equal(count, 0), 256, count)  # 0 stands for all of them
    palette = tf.io.decode_raw(tf.strings.substr(contents, start, 4 * count), tf.uint8)
    colors = tf.reshape(palette, (-1, 4))[:, 2::-1]  # stored as blue, green, red, 0
    return tf.gather(colors, tf.cast(tf.io.decode_bmp(contents, channels=0)[..., 0], tf.int32))


def _little_endian(contents: tf.Tensor, offset: int, width: int) -> tf.Tensor:
    digits = tf.cast(
        tf.io.decode_raw(tf.strings.substr(contents, offset, width), tf.uint8), tf.int32
    )
    return tf.reduce_sum(digits * [256**place for place in range(width)])
