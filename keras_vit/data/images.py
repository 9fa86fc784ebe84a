"""Turns encoded images into pixels: the one path of training, evaluation, prediction and export.

Only TensorFlow ops: the same functions run eagerly, in `tf.data` and in a SavedModel.
"""

import functools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.data import header

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
FORMATS = "JPEG, PNG, WebP, BMP or GIF"

# The most pixels that are decoded, of all frames of a moving image together: what TensorFlow itself
# takes of a PNG, room for the photos of 108 megapixels that telephones take. A pixel costs 3 to 12
# bytes while it is decoded, which tests/test_data_images.py measures. KERAS_VIT_MAX_PIXELS sets
# another number.
MAX_PIXELS = 2**27
_MAX_PIXELS_VARIABLE = "KERAS_VIT_MAX_PIXELS"
# A larger file holds more pixels than may be decoded, each of at most 8 bytes, beside so much else.
_BYTES_PER_PIXEL, _OTHER_BYTES = 8, 2**26
_LARGE_FILE, _HEAD_BYTES = 2**25, 2**20  # of a larger file the head is read before the whole
_STRIP = 2**20  # pixels that are laid on white at a time
TOO_LARGE = "The image has more pixels than are decoded, or a header that does not say how many."
DECODER_ERRORS = (tf.errors.OpError, UnicodeDecodeError)  # the second: a message with bytes in it

NO_WEBP = "WebP is not decoded here; send the image as JPEG, PNG, GIF or BMP."
_WEBP_ALPHA = 0x10  # among the flags of an extended file (RFC 9649, 2.7)
_BYTES = [bytes([value]) for value in range(256)]


def max_pixels() -> int:
    """Returns the most pixels that an image may have to be decoded.

    Example:
        >>> max_pixels()
        134217728

    Raises:
        ValueError: the environment variable KERAS_VIT_MAX_PIXELS is no number of pixels.
    """
    text = os.environ.get(_MAX_PIXELS_VARIABLE, str(MAX_PIXELS))
    if not text.isdecimal() or not 0 < int(text) < header.UNKNOWN:
        raise ValueError(
            f"{_MAX_PIXELS_VARIABLE} is the most pixels that an image may have, a whole number "
            f"such as {MAX_PIXELS}. Received: {text[:40]!r}."
        )
    return int(text)


def decode_image(contents: tf.Tensor, *, webp: bool = True) -> tf.Tensor:
    """Decodes one JPEG, PNG, WebP, BMP or GIF to RGB, upright.

    Grey becomes three equal channels. What is transparent in a PNG or WebP lies on white, as on a
    page. Of a moving GIF or WebP the first frame counts. The orientation in a JPEG, PNG or WebP
    (EXIF) is applied, as browsers and Pillow's `ImageOps.exif_transpose` do; the pipelines that the
    published models come from did not (google-research/vision_transformer, big_vision).

    The header is read first: an image of more than `max_pixels()` is refused before there is memory
    for it.

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
        tf.errors.InvalidArgumentError: the bytes are not such an image, are damaged, or hold too
            many pixels.
    """
    most = tf.constant(max_pixels(), tf.int64)
    decode = {
        header.JPEG: _decode_jpeg,
        header.PNG: _decode_png,
        header.WEBP: _decode_webp if webp else _refuse_webp,
        header.GIF: _decode_gif,
        header.BMP: _decode_bmp,
    }
    begins = tf.stack([_starts_with(contents, begin) for begin in decode])
    place = tf.argmax(tf.pad(begins, [[0, 1]], constant_values=True), output_type=tf.int32)
    branches = [functools.partial(one, contents, most) for one in decode.values()]
    # What begins otherwise goes where it is said that no such file is known.
    image = tf.switch_case(place, [*branches, functools.partial(_decode_plain, contents)])
    image = tf.cond(
        header.may_be_turned(contents),
        lambda: header.upright(image, header.read_orientation(contents)),
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
        _decoder(max_pixels())(contents)
    except DECODER_ERRORS:
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

    most = tf.constant(max_pixels(), tf.int64)

    def decode_jpeg() -> tf.Tensor:
        checked = _within(contents, most, begin=header.JPEG)
        part = choose(tf.image.extract_jpeg_shape(checked)[:2])
        return tf.image.decode_and_crop_jpeg(checked, part, channels=3)

    def decode_turned_jpeg() -> tf.Tensor:
        checked = _within(contents, most, begin=header.JPEG)
        turn = header.read_orientation(contents)
        shape = header.upright_shape(tf.image.extract_jpeg_shape(checked)[:2], turn)
        part = header.stored_part(choose(shape), shape, turn)
        cut = tf.image.decode_and_crop_jpeg(checked, part, channels=3)
        return header.upright(cut, turn)

    image = tf.cond(
        _starts_with(contents, header.JPEG),
        lambda: tf.cond(header.may_be_turned(contents), decode_turned_jpeg, decode_jpeg),
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
    return _decode(read_bytes(path), name=repr(str(path)))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Reads the file of an image; nothing of a pipe or a device, or of a file that is too large.

    Example:
        >>> read_bytes("no-such.jpg")
        Traceback (most recent call last):
        FileNotFoundError: There is no image file 'no-such.jpg'; check the path.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
        ValueError: it is no file, or holds too many pixels.
    """
    name = repr(os.fspath(path))
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            _check_file(file, name=name)
            return file.read()
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no image file {name}; check the path.") from None
    except IsADirectoryError:
        raise ValueError(f"{name} is a folder; give the path of a {FORMATS} file.") from None
    except OSError as error:
        raise OSError(f"The image file {name} cannot be read: {error.strerror}.") from error


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


def _open_at_once(path: str, flags: int) -> int:
    # A pipe that nobody writes to would otherwise be waited for.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_file(file: IO[bytes], *, name: str) -> None:
    """Raises an error if an opened file is none, or too large; reads no more than its head."""
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(
            f"{name} is a pipe or a device, not a file; give the path of a {FORMATS} file."
        )
    most = _BYTES_PER_PIXEL * max_pixels() + _OTHER_BYTES
    if about.st_size > most:
        raise ValueError(
            f"{name} has {about.st_size} bytes, more than the {most} of the largest image that "
            f"is decoded; make it smaller, or raise {_MAX_PIXELS_VARIABLE}."
        )
    if about.st_size > _LARGE_FILE:
        _check_head(file.read(_HEAD_BYTES), name=name)
        file.seek(0)


def _decode(contents: bytes, *, name: str) -> np.ndarray:
    try:
        return np.asarray(_decoder(max_pixels())(contents))
    except DECODER_ERRORS:
        _check_head(contents, name=name)
        raise ValueError(
            f"{name} is not an image that can be read, or is damaged; give a {FORMATS} file."
        ) from None


@functools.cache
def _decoder(most: int) -> Callable[[bytes], tf.Tensor]:
    """Returns `decode_image` as one graph, which gives memory back earlier than eager code.

    Args:
        most: `max_pixels()`, which the graph holds.
    """
    graph: Callable[[bytes], tf.Tensor] = tf.function(
        decode_image, input_signature=[tf.TensorSpec((), tf.string)], autograph=False
    )
    return graph


def _check_head(contents: bytes, *, name: str) -> None:
    """Raises an error if the head of a file says that it holds too many pixels."""
    try:
        pixels = header.declared_pixels(contents)
    except DECODER_ERRORS:
        return  # the decoder has the last word
    most = max_pixels()
    if most < pixels < header.UNKNOWN:
        raise ValueError(
            f"{name} has {pixels} pixels, all frames of a moving image together, more than the "
            f"{most} that are decoded; make it smaller, or raise {_MAX_PIXELS_VARIABLE}."
        )


def _within(contents: tf.Tensor, most: tf.Tensor, *, begin: bytes) -> tf.Tensor:
    """Passes on a file of so many pixels at most; any other is an error."""
    few = header.PIXELS[begin](contents) <= most
    # Not `tf.debugging.Assert`: its branches cost more than what is asked here.
    checked = tf.raw_ops.Assert(condition=few, data=[TOO_LARGE])
    with tf.control_dependencies([checked] if checked is not None else []):
        return tf.identity(contents)


def _starts_with(contents: tf.Tensor, magic: bytes) -> tf.Tensor:
    # `substr` clips to the end of shorter strings, so an empty file answers False.
    return tf.equal(tf.strings.substr(contents, 0, len(magic)), magic)


def _decode_plain(contents: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(contents, channels=3, expand_animations=False)


def _decode_jpeg(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    return _decode_plain(_within(contents, most, begin=header.JPEG))


def _decode_gif(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    return _decode_plain(_within(contents, most, begin=header.GIF))


def _decode_png(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    contents = _within(contents, most, begin=header.PNG)
    # `channels=4` would be shorter, but makes grey images of 1, 2 or 4 bits almost transparent.
    return _on_white(tf.io.decode_png(contents, channels=0))


def _decode_webp(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    contents = _within(contents, most, begin=header.WEBP)
    pixels = tf.cond(
        header.webp_moves(contents),
        lambda: _first_of_webp(contents),
        lambda: tf.image.decode_webp(contents)[0],
    )
    return _on_white(pixels)


@header.one_op
def _first_of_webp(contents: tf.Tensor) -> tf.Tensor:
    # TensorFlow 2.21 takes animations with alpha alone, and left to choose, writes beyond the
    # pixels of others: to it every animation says that it has alpha.
    place = header.WEBP_FLAGS
    flags = tf.io.decode_raw(tf.strings.substr(contents, place, 1), tf.uint8)[0] | _WEBP_ALPHA
    rest = tf.strings.substr(contents, place + 1, tf.int32.max)
    marked = [
        tf.strings.substr(contents, 0, place),
        tf.gather(_BYTES, tf.cast(flags, tf.int32)),
        rest,
    ]
    return tf.image.decode_webp(tf.strings.join(marked), channels=4)[0]


def _refuse_webp(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    # `decode_image` would take it where TensorFlow is new enough, and lay it on black.
    refused = tf.debugging.Assert(False, [NO_WEBP])
    with tf.control_dependencies([refused] if refused is not None else []):
        return tf.zeros((1, 1, 3), tf.uint8)


def _on_white(pixels: tf.Tensor) -> tf.Tensor:
    """Lays pixels with 1 to 4 channels on white, uint8 of shape (height, width, 3)."""
    channels = tf.shape(pixels)[2]  # 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha
    color = tf.cond(tf.equal(channels % 2, 0), lambda: _blended(pixels), lambda: pixels)
    return tf.cond(channels > 2, lambda: color, lambda: tf.image.grayscale_to_rgb(color[..., :1]))


def _blended(pixels: tf.Tensor) -> tf.Tensor:
    """Lays colors whose last channel is alpha on white, without that channel; large ones in strips.

    A strip and no more is held in 16 bits.
    """
    is_large = tf.size(pixels) // 4 > _STRIP
    return tf.cond(
        is_large,
        lambda: _blended_strips(pixels, tf.constant(_STRIP)),
        lambda: _blended_strip(pixels),
    )


@header.one_op
def _blended_strips(pixels: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    height, width = tf.unstack(tf.shape(pixels)[:2])
    rows = tf.maximum(size // width, 1)
    count = (height + rows - 1) // rows

    def blend(place: tf.Tensor, made: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        strip = pixels[place * rows : (place + 1) * rows]
        return place + 1, made.write(place, _blended_strip(strip))

    made = tf.TensorArray(tf.uint8, count, infer_shape=False, element_shape=(None, None, None))
    _, made = tf.while_loop(lambda place, made: place < count, blend, (0, made))
    return made.concat()


@header.one_op
def _blended_strip(pixels: tf.Tensor) -> tf.Tensor:
    # (color * alpha + 255 * (255 - alpha)) / 255, rounded: all that 16 bits hold.
    wide = tf.cast(pixels, tf.uint16)
    alpha = wide[..., -1:]
    total = wide[..., :-1] * alpha + (255 * 255 + 128 - 255 * alpha)
    return tf.cast(_shifted(total + _shifted(total)), tf.uint8)


def _shifted(values: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.right_shift(values, tf.constant(8, values.dtype))


def _decode_bmp(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    contents = _within(contents, most, begin=header.BMP)
    return tf.cond(
        header.bmp_has_palette(contents),
        lambda: _decode_palette_bmp(contents),
        lambda: tf.io.decode_bmp(contents, channels=0)[..., :3],  # the fourth byte is padding
    )


@header.one_op
def _decode_palette_bmp(contents: tf.Tensor) -> tf.Tensor:
    # `tf.io.decode_bmp` returns the palette's indices as if they were grey values.
    indices = tf.io.decode_bmp(contents, channels=0)[..., 0]
    return tf.gather(header.bmp_palette(contents), tf.cast(indices, tf.int32))
