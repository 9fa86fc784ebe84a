"""Decodes one image, upright and on white, once its header says how many pixels it has.

JPEG and PNG by TensorFlow ops, which run eagerly, in `tf.data` and in a SavedModel; every other
format by Pillow, in Python.
"""

import contextlib
import functools
import io
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps

from keras_vit.data import header

# Orientations in which the stored rows are columns, and those that are mirrored along an axis
# after that.
_TRANSPOSED = (5, 6, 7, 8)
_MIRRORED_ROWS = (3, 4, 7, 8)
_MIRRORED_COLUMNS = (2, 3, 6, 7)

# The most pixels that are decoded: what TensorFlow itself takes of a PNG, room for photos of 108
# megapixels. A pixel costs 3 (JPEG) to 17 bytes (WebP) while it is decoded.
# KERAS_VIT_MAX_PIXELS sets another number.
MAX_PIXELS = 2**27
MAX_PIXELS_VARIABLE = "KERAS_VIT_MAX_PIXELS"
_STRIP = 2**20  # pixels that are laid on white at a time
TOO_LARGE = "The image has more pixels than are decoded, or a header that does not say how many."
OTHERS = ("WEBP", "GIF", "BMP", "TIFF", "AVIF")  # what Pillow decodes
# `max_pixels` is the limit of every format; Pillow's, for which it warns, is another.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def max_pixels() -> int:
    """Returns the most pixels that an image may have to be decoded.

    Example:
        >>> max_pixels()
        134217728

    Raises:
        ValueError: the environment variable KERAS_VIT_MAX_PIXELS is no number of pixels.
    """
    text = os.environ.get(MAX_PIXELS_VARIABLE, str(MAX_PIXELS))
    if not text.isdecimal() or not 0 < int(text) < 2**62:
        raise ValueError(
            f"{MAX_PIXELS_VARIABLE} is the most pixels that an image may have, a whole number "
            f"such as {MAX_PIXELS}. Received: {text[:40]!r}."
        )
    return int(text)


def decode_image(contents: tf.Tensor, *, others: bool = True) -> tf.Tensor:
    """Decodes one JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF to RGB, upright.

    Grey becomes three equal channels. What is transparent lies on white, as on a page. Of several
    frames the first counts. The orientation in a file (EXIF) is applied, as browsers and Pillow's
    `ImageOps.exif_transpose` do; the pipelines that the published models come from did not
    (google-research/vision_transformer, big_vision).

    The header is read first: an image of more than `max_pixels()` is refused before there is memory
    for it.

    Example:
        >>> import tensorflow as tf
        >>> half_clear = tf.constant([[[255, 0, 0, 255], [255, 0, 0, 0]]], tf.uint8)
        >>> decode_image(tf.io.encode_png(half_clear)).numpy().tolist()
        [[[255, 0, 0], [255, 255, 255]]]

    Args:
        contents: the bytes of the file, a scalar string.
        others: whether formats other than JPEG and PNG are decoded, by Pillow, which no SavedModel
            holds. Otherwise they are refused.

    Returns:
        The pixels 0..255, uint8 of shape (height, width, 3).

    Raises:
        tf.errors.InvalidArgumentError: the bytes are not such an image, are damaged, or hold too
            many pixels.
    """
    return _decode_upright(contents, tf.constant(max_pixels(), tf.int64), others=others)


def decode_part(contents: tf.Tensor, *, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Decodes a part of one upright image; of a JPEG, only that part is decoded.

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
    most = tf.constant(max_pixels(), tf.int64)
    is_jpeg = header.starts_with(contents, header.JPEG)
    turn = tf.cond(
        is_jpeg & header.may_be_turned(contents),
        lambda: header.read_orientation(contents),
        lambda: tf.constant(1),
    )
    contents = once_made(contents, turn)
    decoded = tf.cond(
        is_jpeg,
        lambda: tf.zeros((0, 0, 3), tf.uint8),  # not decoded before the part is chosen
        lambda: _decode_in_one_op(contents, most, others=True),
    )

    def jpeg_shape() -> tf.Tensor:
        shape = tf.image.extract_jpeg_shape(contents)[:2]
        return _pass_if(shape, tf.reduce_prod(tf.cast(shape, tf.int64)) <= most)

    stored_shape = tf.cond(is_jpeg, jpeg_shape, lambda: tf.shape(decoded)[:2])
    shape = tf.cond(turn > 1, lambda: _upright_shape(stored_shape, turn), lambda: stored_shape)
    part = choose(shape)

    def decode_jpeg() -> tf.Tensor:
        return tf.image.decode_and_crop_jpeg(contents, part, channels=3)

    def decode_turned_jpeg() -> tf.Tensor:
        place = _stored_part(part, shape, turn)
        crop = tf.image.decode_and_crop_jpeg(contents, place, channels=3)
        return _turned(crop, turn)

    image = tf.cond(
        is_jpeg,
        lambda: tf.cond(turn > 1, decode_turned_jpeg, decode_jpeg),
        lambda: cut_part(decoded, choose=lambda _: part),
    )
    return tf.ensure_shape(image, (None, None, 3))


def cut_part(image: tf.Tensor, *, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Cuts a part out of pixels of shape (height, width, 3), see `decode_part`."""
    part = choose(tf.shape(image)[:2])
    return tf.image.crop_to_bounding_box(image, part[0], part[1], part[2], part[3])


def once_made(value: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Passes a value on once another one is made.

    An error inside of a function cancels those that would start beside it, and the caller may hear
    of the cancelling alone, which `tf.data` does not take for an error.
    """
    with tf.control_dependencies([before]):
        return tf.identity(value)


def decode_bytes(contents: bytes) -> tf.Tensor:
    """Does eagerly what `decode_image` says."""
    return _decoder(max_pixels(), contents.startswith(header.JPEG))(contents)


def declared_pixels(contents: bytes) -> int | None:
    """Returns how many pixels the header of a file says it has, None if it does not say.

    Example:
        >>> import tensorflow as tf
        >>> declared_pixels(tf.io.encode_png(tf.zeros((3, 5, 3), tf.uint8)).numpy())
        15

    Args:
        contents: the bytes of a file, or the first of them.
    """
    try:
        if contents.startswith(header.JPEG):
            return int(header.pixels_of_jpeg(tf.constant(contents)))
        if contents.startswith(header.PNG):
            pixels = int(header.pixels_of_png(tf.constant(contents)))
            return pixels if pixels < tf.int64.max else None
        image = Image.open(io.BytesIO(contents), formats=OTHERS)
        return image.width * image.height
    except Exception:  # each format raises errors of its own
        return None


@functools.cache
def _decoder(most: int, is_jpeg: bool) -> Callable[[bytes], tf.Tensor]:
    """Returns `decode_image` as one graph, which gives memory back earlier than eager code.

    That of JPEGs is made in half the time of the other, which photos alone need not wait for.
    """

    def decode(contents: tf.Tensor) -> tf.Tensor:
        decode_format = _decode_jpeg if is_jpeg else functools.partial(_decode_no_jpeg, others=True)
        return _upright(decode_format(contents, tf.constant(most, tf.int64)), contents)

    graph: Callable[[bytes], tf.Tensor] = tf.function(
        decode, input_signature=[tf.TensorSpec((), tf.string)], autograph=False
    )
    return graph


def _decode_upright(contents: tf.Tensor, most: tf.Tensor, *, others: bool) -> tf.Tensor:
    """Does what `decode_image` says, with the most pixels as an argument."""
    image = tf.cond(
        header.starts_with(contents, header.JPEG),
        lambda: _decode_jpeg(contents, most),
        lambda: _decode_no_jpeg(contents, most, others=others),
    )
    return _upright(image, contents)


def _upright(image: tf.Tensor, contents: tf.Tensor) -> tf.Tensor:
    contents = once_made(contents, image)
    image = tf.cond(
        header.may_be_turned(contents),
        lambda: _turned(image, header.read_orientation(contents)),
        lambda: image,
    )
    return tf.ensure_shape(image, (None, None, 3))


@header.one_op
def _turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turns pixels as they are stored, (height, width, channels), upright."""
    pixels = tf.cond(
        _among(orientation, _TRANSPOSED), lambda: tf.transpose(image, (1, 0, 2)), lambda: image
    )
    rows = tf.where(_among(orientation, _MIRRORED_ROWS), -1, 1)
    columns = tf.where(_among(orientation, _MIRRORED_COLUMNS), -1, 1)
    return tf.strided_slice(
        pixels, (0, 0, 0), (0, 0, 0), tf.stack([rows, columns, 1]), begin_mask=7, end_mask=7
    )


@header.one_op
def _upright_shape(shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Returns (height, width) of the upright image, from those of the stored one."""
    return tf.where(_among(orientation, _TRANSPOSED), tf.reverse(shape, [0]), shape)


@header.one_op
def _stored_part(part: tf.Tensor, shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Returns where a part (top, left, height, width) of an upright image of a shape is stored."""
    rows, columns = _among(orientation, _MIRRORED_ROWS), _among(orientation, _MIRRORED_COLUMNS)
    start, size = part[:2], part[2:]
    start = tf.where(tf.stack([rows, columns]), shape - start - size, start)
    both = tf.stack([start, size])
    both = tf.where(_among(orientation, _TRANSPOSED), tf.reverse(both, [1]), both)
    return tf.reshape(both, (4,))


def _among(orientation: tf.Tensor, values: tuple[int, ...]) -> tf.Tensor:
    return tf.reduce_any(tf.equal(orientation, values))


_decode_in_one_op = header.one_op(_decode_upright)


@header.one_op
def _decode_no_jpeg(contents: tf.Tensor, most: tf.Tensor, *, others: bool) -> tf.Tensor:
    def decode_other() -> tf.Tensor:
        if not others:
            return _pass_if(tf.zeros((1, 1, 3), tf.uint8), tf.constant(False), "no JPEG, no PNG")
        image, problem = tf.numpy_function(
            _decode_by_pillow, [contents, most], (tf.uint8, tf.string), stateful=False
        )
        return _pass_if(tf.ensure_shape(image, (None, None, 3)), problem == b"", problem)

    is_png = header.starts_with(contents, header.PNG)
    return tf.cond(is_png, lambda: _decode_png(contents, most), decode_other)


def _decode_by_pillow(contents: bytes, most: int) -> tuple[np.ndarray, bytes]:
    """Decodes the first frame of what is neither JPEG nor PNG; returns its pixels, or a problem."""
    try:
        image = Image.open(io.BytesIO(contents), formats=OTHERS)
        if not 0 < image.width * image.height <= most:
            raise Image.DecompressionBombError
        image.load()
        with contextlib.suppress(Exception):  # a damaged orientation is none
            ImageOps.exif_transpose(image, in_place=True)
        pixels = np.empty((image.height, image.width, 3), np.uint8)
        rows = max(_STRIP // image.width, 1)
        for top in range(0, image.height, rows):
            end = min(top + rows, image.height)
            pixels[top:end] = np.asarray(_rgb_of(image.crop((0, top, image.width, end))))
        return pixels, b""
    except Image.DecompressionBombError:
        problem = TOO_LARGE
    except Exception as error:  # each format raises errors of its own
        problem = f"The image is of no known format, or damaged: {error}"
    return np.zeros((0, 0, 3), np.uint8), problem.encode()


def _rgb_of(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # `convert` would make all from 256 on white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("it does not say which of its numbers of 32 bits is white")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


def _pass_if(value: tf.Tensor, condition: tf.Tensor, problem: Any = TOO_LARGE) -> tf.Tensor:
    # Not `tf.debugging.Assert`: its branches cost more than this check.
    assertion = tf.raw_ops.Assert(condition=condition, data=[problem])
    with tf.control_dependencies([assertion] if assertion is not None else []):
        return tf.identity(value)


def _decode_jpeg(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    contents = _pass_if(contents, header.pixels_of_jpeg(contents) <= most)
    return tf.io.decode_image(contents, channels=3, expand_animations=False)


def _decode_png(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    contents = _pass_if(contents, header.pixels_of_png(contents) <= most)
    # `channels=4` would be shorter, but makes grey images of 1, 2 or 4 bits almost transparent.
    return _on_white(tf.io.decode_png(contents, channels=0))


def _on_white(pixels: tf.Tensor) -> tf.Tensor:
    """Lays pixels with 1 to 4 channels on white, uint8 of shape (height, width, 3).

    Large ones in strips: a strip and no more is held in 16 bits.
    """

    def blend() -> tf.Tensor:
        return tf.cond(
            tf.size(pixels) // 4 > _STRIP,
            lambda: _blend_strips(pixels, tf.constant(_STRIP)),
            lambda: _blend_strip(pixels),
        )

    channels = tf.shape(pixels)[2]  # 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha
    color = tf.cond(tf.equal(channels % 2, 0), blend, lambda: pixels)
    return tf.cond(channels > 2, lambda: color, lambda: tf.image.grayscale_to_rgb(color[..., :1]))


@header.one_op
def _blend_strips(pixels: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    height, width = tf.unstack(tf.shape(pixels)[:2])
    rows = tf.maximum(size // width, 1)
    count = (height + rows - 1) // rows

    def blend(place: tf.Tensor, strips: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        strip = pixels[place * rows : (place + 1) * rows]
        return place + 1, strips.write(place, _blend_strip(strip))

    strips = tf.TensorArray(tf.uint8, count, infer_shape=False, element_shape=(None, None, None))
    _, strips = tf.while_loop(lambda place, strips: place < count, blend, (0, strips))
    return strips.concat()


@header.one_op
def _blend_strip(pixels: tf.Tensor) -> tf.Tensor:
    # (color * alpha + 255 * (255 - alpha)) / 255, rounded: all that 16 bits hold.
    wide = tf.cast(pixels, tf.uint16)
    alpha = wide[..., -1:]
    total = wide[..., :-1] * alpha + (255 * 255 + 128 - 255 * alpha)
    eight = tf.constant(8, tf.uint16)
    total += tf.bitwise.right_shift(total, eight)
    return tf.cast(tf.bitwise.right_shift(total, eight), tf.uint8)
