"""Decodes one image, upright and on white, once its header says how many pixels it has.

Only TensorFlow ops: the same functions run eagerly, in `tf.data` and in a SavedModel.
"""

import functools
import os
from collections.abc import Callable

import tensorflow as tf

from keras_vit.data import header

# Orientations in which the stored rows are columns, and those that are mirrored along an axis
# after that.
_TRANSPOSED = (5, 6, 7, 8)
_MIRRORED_ROWS = (3, 4, 7, 8)
_MIRRORED_COLUMNS = (2, 3, 6, 7)

# The most pixels that are decoded, of all frames of a moving image together: what TensorFlow itself
# takes of a PNG, room for the photos of 108 megapixels that telephones take. A pixel costs 3 to 12
# bytes while it is decoded, which tests/test_data_images.py measures. KERAS_VIT_MAX_PIXELS sets
# another number.
MAX_PIXELS = 2**27
MAX_PIXELS_VARIABLE = "KERAS_VIT_MAX_PIXELS"
_STRIP = 2**20  # pixels that are laid on white at a time
TOO_LARGE = "The image has more pixels than are decoded, or a header that does not say how many."

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
    text = os.environ.get(MAX_PIXELS_VARIABLE, str(MAX_PIXELS))
    if not text.isdecimal() or not 0 < int(text) < header.UNKNOWN:
        raise ValueError(
            f"{MAX_PIXELS_VARIABLE} is the most pixels that an image may have, a whole number "
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
    return _decode_upright(contents, tf.constant(max_pixels(), tf.int64), webp=webp)


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
    is_jpeg = _starts_with(contents, header.JPEG)
    turn = tf.cond(
        is_jpeg & header.may_be_turned(contents),
        lambda: header.read_orientation(contents),
        lambda: tf.constant(1),
    )
    contents = once_made(contents, turn)
    decoded = tf.cond(
        is_jpeg,
        lambda: tf.zeros((0, 0, 3), tf.uint8),  # not decoded before the part is chosen
        lambda: _decode_in_one_op(contents, most, webp=True),
    )
    stored_shape = tf.cond(
        is_jpeg, lambda: _jpeg_shape(contents, most), lambda: tf.shape(decoded)[:2]
    )
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


@functools.cache
def _decoder(most: int, is_jpeg: bool) -> Callable[[bytes], tf.Tensor]:
    """Returns `decode_image` as one graph, which gives memory back earlier than eager code.

    Args:
        most: `max_pixels()`, which the graph holds.
        is_jpeg: whether it is for JPEGs, whose graph is made in a fifth of the time, or for others.
    """

    def decode(contents: tf.Tensor) -> tf.Tensor:
        pixels = tf.constant(most, tf.int64)
        decode_format = _decode_jpeg if is_jpeg else functools.partial(_decode_other, webp=True)
        return _upright(decode_format(contents, pixels), contents)

    graph: Callable[[bytes], tf.Tensor] = tf.function(
        decode, input_signature=[tf.TensorSpec((), tf.string)], autograph=False
    )
    return graph


def _decode_upright(contents: tf.Tensor, most: tf.Tensor, *, webp: bool) -> tf.Tensor:
    """Does what `decode_image` says, with the most pixels as an argument."""
    image = tf.cond(
        _starts_with(contents, header.JPEG),
        lambda: _decode_jpeg(contents, most),
        lambda: _decode_other(contents, most, webp=webp),
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
    """Turns pixels as they are stored, (height, width, channels), upright.

    Example:
        >>> import tensorflow as tf
        >>> row = tf.constant([[[1], [2]]], tf.uint8)
        >>> _turned(row, tf.constant(8))[..., 0].numpy().tolist()
        [[2], [1]]
    """
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
    """Returns where a part of the upright image is stored.

    Example:
        >>> import tensorflow as tf
        >>> part, shape = tf.constant((0, 1, 2, 3)), tf.constant((5, 9))
        >>> _stored_part(part, shape, tf.constant(3)).numpy().tolist()
        [3, 5, 2, 3]

    Args:
        part: (top, left, height, width) in the upright image, int32.
        shape: (height, width) of the upright image, int32.
        orientation: 1 to 8, int32.

    Returns:
        (top, left, height, width) in the stored image, int32 of shape (4,).
    """
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
def _decode_other(contents: tf.Tensor, most: tf.Tensor, *, webp: bool) -> tf.Tensor:
    """Decodes what is no JPEG."""
    decode = {
        header.PNG: _decode_png,
        header.WEBP: _decode_webp if webp else _refuse_webp,
        header.GIF: _decode_gif,
        header.BMP: _decode_bmp,
    }
    begins = tf.stack([_starts_with(contents, begin) for begin in decode])
    place = tf.argmax(tf.pad(begins, [[0, 1]], constant_values=True), output_type=tf.int32)
    branches = [functools.partial(decode_one, contents, most) for decode_one in decode.values()]
    # Files of any other beginning go to the branch that raises the error.
    return tf.switch_case(place, [*branches, functools.partial(_decode_plain, contents)])


def _within(contents: tf.Tensor, most: tf.Tensor, *, begin: bytes) -> tf.Tensor:
    """Passes on a file of so many pixels at most; any other is an error."""
    return _pass_if(contents, header.PIXELS[begin](contents) <= most)


def _pass_if(value: tf.Tensor, condition: tf.Tensor) -> tf.Tensor:
    # Not `tf.debugging.Assert`: its branches cost more than this check.
    assertion = tf.raw_ops.Assert(condition=condition, data=[TOO_LARGE])
    with tf.control_dependencies([assertion] if assertion is not None else []):
        return tf.identity(value)


def _jpeg_shape(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    """Returns (height, width) of a JPEG as it is stored; more pixels than `most` are an error."""
    shape = tf.image.extract_jpeg_shape(contents)[:2]
    return _pass_if(shape, tf.reduce_prod(tf.cast(shape, tf.int64)) <= most)


def _starts_with(contents: tf.Tensor, magic: bytes) -> tf.Tensor:
    # `substr` clips to the end of shorter strings, so an empty file answers False.
    return tf.equal(tf.strings.substr(contents, 0, len(magic)), magic)


def _decode_plain(contents: tf.Tensor) -> tf.Tensor:
    return tf.io.decode_image(contents, channels=3, expand_animations=False)


def _decode_jpeg(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([_jpeg_shape(contents, most)]):
        return _decode_plain(contents)


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
    remainder = tf.strings.substr(contents, place + 1, tf.int32.max)
    parts = [
        tf.strings.substr(contents, 0, place),
        tf.gather(_BYTES, tf.cast(flags, tf.int32)),
        remainder,
    ]
    return tf.image.decode_webp(tf.strings.join(parts), channels=4)[0]


def _refuse_webp(contents: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    # `decode_image` would take it where TensorFlow is new enough, and lay it on black.
    assertion = tf.debugging.Assert(False, [NO_WEBP])
    with tf.control_dependencies([assertion] if assertion is not None else []):
        return tf.zeros((1, 1, 3), tf.uint8)


def _on_white(pixels: tf.Tensor) -> tf.Tensor:
    """Lays pixels with 1 to 4 channels on white, uint8 of shape (height, width, 3)."""
    channels = tf.shape(pixels)[2]  # 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha
    color = tf.cond(tf.equal(channels % 2, 0), lambda: _blend(pixels), lambda: pixels)
    return tf.cond(channels > 2, lambda: color, lambda: tf.image.grayscale_to_rgb(color[..., :1]))


def _blend(pixels: tf.Tensor) -> tf.Tensor:
    """Lays colors whose last channel is alpha on white, without that channel; large ones in strips.

    A strip and no more is held in 16 bits.
    """
    is_large = tf.size(pixels) // 4 > _STRIP
    return tf.cond(
        is_large,
        lambda: _blend_strips(pixels, tf.constant(_STRIP)),
        lambda: _blend_strip(pixels),
    )


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
    return tf.cast(_shift_right(total + _shift_right(total)), tf.uint8)


def _shift_right(values: tf.Tensor) -> tf.Tensor:
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
