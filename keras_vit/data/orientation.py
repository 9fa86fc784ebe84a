"""Reads from a file how the camera was held (EXIF), and turns pixels upright.

Only TensorFlow ops, like `keras_vit.data.images`: they run in `tf.data` and in a SavedModel.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

# Exif 2.32 (CIPA DC-008), 4.6.4: the tag of IFD0 that holds the orientation, and the types it has.
_TAG, _SHORT, _LONG = 0x0112, 3, 4
_ENTRY = 12  # bytes
# Orientations in which the stored rows are columns, and those that are mirrored along an axis
# after that.
_TRANSPOSED = (5, 6, 7, 8)
_MIRRORED_ROWS = (3, 4, 7, 8)
_MIRRORED_COLUMNS = (2, 3, 6, 7)
_PIECES = 10_000  # of a file that are looked at; a photograph has tens
# How files begin in which there is no orientation; a "?" is any byte.
_PLAIN = (
    b"\xff\xd8\xff\xe0\x00\x10JFIF\0" + b"?" * 9 + b"\xff\xdb",  # a JPEG's JFIF, then its tables
    b"\xff\xd8\xff\xdb",
    b"RIFF????WEBPVP8 ",
    b"RIFF????WEBPVP8L",
    b"GIF8",
    b"BM",
)

_LIMIT = 2**30  # bytes: no sum of two overflows
Walk = tuple[tf.Tensor, tf.Tensor]

# An executor visits every op of a branch that is not taken, unless the ops are a function's.
_one_op = tf.function(autograph=False, experimental_attributes={"_noinline": True})


def may_be_turned(contents: tf.Tensor) -> tf.Tensor:
    """Returns whether a file could have an orientation: a look at how it begins, in a few ops."""
    width = max(map(len, _PLAIN))
    rows = np.array([list(begin.ljust(width, b"?")) for begin in _PLAIN], np.uint8)
    begin = tf.io.decode_raw(tf.strings.substr(contents, 0, width), tf.uint8, fixed_length=width)
    same = tf.equal(begin, rows) | (rows == ord("?"))
    return ~tf.reduce_any(tf.reduce_all(same, axis=1))


@_one_op
def read_orientation(contents: tf.Tensor) -> tf.Tensor:
    """Returns the orientation in a file, int32 from 1 (upright) to 8.

    What has none is 1, and what is damaged, or no orientation.

    Example:
        >>> import tensorflow as tf
        >>> int(read_orientation(tf.io.encode_jpeg(tf.zeros((8, 8, 3), tf.uint8))))
        1

    Args:
        contents: the bytes of a JPEG, PNG, WebP or any other file, a scalar string.
    """

    def begins(magic: bytes) -> tf.Tensor:
        return tf.equal(tf.strings.substr(contents, 0, len(magic)), magic)

    tiff = tf.case(
        [
            (begins(b"\xff\xd8"), lambda: _exif_of_jpeg(contents)),
            (begins(b"\x89PNG"), lambda: _exif_of_png(contents)),
            (begins(b"RIFF"), lambda: _exif_of_webp(contents)),
        ],
        default=lambda: tf.constant(b""),
    )
    return _tiff_orientation(tiff)


@_one_op
def upright(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turns pixels as they are stored, (height, width, channels), upright.

    Example:
        >>> import tensorflow as tf
        >>> row = tf.constant([[[1], [2]]], tf.uint8)
        >>> upright(row, tf.constant(8))[..., 0].numpy().tolist()
        [[2], [1]]
    """
    swapped = tf.cond(
        _among(orientation, _TRANSPOSED), lambda: tf.transpose(image, (1, 0, 2)), lambda: image
    )
    rows = tf.where(_among(orientation, _MIRRORED_ROWS), -1, 1)
    columns = tf.where(_among(orientation, _MIRRORED_COLUMNS), -1, 1)
    return tf.strided_slice(
        swapped, (0, 0, 0), (0, 0, 0), tf.stack([rows, columns, 1]), begin_mask=7, end_mask=7
    )


@_one_op
def upright_shape(shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Returns (height, width) of the upright image, from those of the stored one."""
    return tf.where(_among(orientation, _TRANSPOSED), tf.reverse(shape, [0]), shape)


@_one_op
def stored_part(part: tf.Tensor, shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Returns where a part of the upright image is stored.

    Example:
        >>> import tensorflow as tf
        >>> part, shape = tf.constant((0, 1, 2, 3)), tf.constant((5, 9))
        >>> stored_part(part, shape, tf.constant(3)).numpy().tolist()
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


def _exif_of_jpeg(contents: tf.Tensor) -> tf.Tensor:
    """The TIFF in the first APP1 segment that is called "Exif"; it comes before the tables."""

    def is_exif(head: tf.Tensor) -> tf.Tensor:
        return (head[1] == 0xE1) & tf.reduce_all(head[4:] == list(b"Exif\0\0"))

    def goes_on(head: tf.Tensor) -> tf.Tensor:
        is_application = (head[1] >= 0xE0) & (head[1] <= 0xEF)
        is_other = (head[1] == 0xFE) | (head[1] == 0xFF)  # a comment, a fill byte
        return (head[0] == 0xFF) & (is_application | is_other) & ~is_exif(head)

    def step(head: tf.Tensor) -> tf.Tensor:
        return tf.where(head[1] == 0xFF, 1, 2 + tf.maximum(_number(head[2:4]), 2))

    place, head = _walk(contents, start=2, width=10, goes_on=goes_on, step=step)
    found = (head[0] == 0xFF) & is_exif(head)
    return _substring(contents, place + 10, tf.where(found, _number(head[2:4]) - 8, 0))


def _exif_of_png(contents: tf.Tensor) -> tf.Tensor:
    """The TIFF in the chunk eXIf."""

    def is_exif(head: tf.Tensor) -> tf.Tensor:
        return tf.reduce_all(head[4:] == list(b"eXIf"))

    place, head = _walk(
        contents,
        start=8,
        width=8,
        goes_on=lambda head: ~is_exif(head) & tf.reduce_any(head > 0),
        step=lambda head: 12 + tf.minimum(_number(head[:4]), _LIMIT),
    )
    return _substring(contents, place + 8, tf.where(is_exif(head), _number(head[:4]), 0))


def _exif_of_webp(contents: tf.Tensor) -> tf.Tensor:
    """The TIFF in the chunk EXIF."""

    def is_exif(head: tf.Tensor) -> tf.Tensor:
        return tf.reduce_all(head[:4] == list(b"EXIF"))

    def size(head: tf.Tensor) -> tf.Tensor:
        return tf.minimum(_number(tf.reverse(head[4:8], [0])), _LIMIT)

    place, head = _walk(
        contents,
        start=12,
        width=8,
        goes_on=lambda head: ~is_exif(head) & tf.reduce_any(head > 0),
        step=lambda head: 8 + size(head) + size(head) % 2,
    )
    tiff = _substring(contents, place + 8, tf.where(is_exif(head), size(head), 0))
    is_named = tf.equal(tf.strings.substr(tiff, 0, 6), b"Exif\0\0")  # as in a JPEG: some do
    return _substring(tiff, tf.where(is_named, 6, 0), _LIMIT)


def _walk(
    contents: tf.Tensor,
    *,
    start: int,
    width: int,
    goes_on: Callable[[tf.Tensor], tf.Tensor],
    step: Callable[[tf.Tensor], tf.Tensor],
) -> Walk:
    """Goes from piece to piece of a file; returns where it stops, and the first bytes there."""
    length = tf.strings.length(contents)

    def advance(place: tf.Tensor, head: tf.Tensor) -> Walk:
        # Past the end there are zeros, which no piece begins with. Without overflow:
        following = place + tf.minimum(step(head), length - place)
        return following, _bytes(contents, following, width)

    place, head = tf.while_loop(
        lambda place, head: goes_on(head),
        advance,
        (tf.constant(start), _bytes(contents, start, width)),
        maximum_iterations=_PIECES,
    )
    return place, head


def _tiff_orientation(tiff: tf.Tensor) -> tf.Tensor:
    """Reads the orientation out of IFD0 of a TIFF; 1 if there is none, or it is damaged."""
    is_little = tf.equal(tf.strings.substr(tiff, 0, 4), b"II*\0")
    is_big = tf.equal(tf.strings.substr(tiff, 0, 4), b"MM\0*")

    def number(digits: tf.Tensor) -> tf.Tensor:
        return _number(tf.where(is_little, tf.reverse(digits, [-1]), digits))

    length = tf.strings.length(tiff)
    start = tf.minimum(number(_bytes(tiff, 4, 4)), length)
    count = tf.minimum(number(_bytes(tiff, start, 2)), tf.maximum(length - start - 2, 0) // _ENTRY)
    found = tf.io.decode_raw(_substring(tiff, start + 2, count * _ENTRY), tf.uint8)
    entries = tf.reshape(tf.cast(found, tf.int32), (-1, _ENTRY))
    entries = tf.pad(entries, ((0, 1), (0, 0)))  # never none at all
    kind = number(entries[:, 2:4])
    value = tf.where(kind == _SHORT, number(entries[:, 8:10]), number(entries[:, 8:12]))
    fits = (number(entries[:, :2]) == _TAG) & ((kind == _SHORT) | (kind == _LONG))
    fits &= (number(entries[:, 4:8]) == 1) & (value >= 1) & (value <= 8)
    is_there = (is_little | is_big) & tf.reduce_any(fits)
    return tf.where(is_there, value[tf.argmax(tf.cast(fits, tf.int32), output_type=tf.int32)], 1)


def _bytes(contents: tf.Tensor, start: tf.Tensor | int, count: int) -> tf.Tensor:
    """Returns bytes of a string as int32 of shape (count,), zeros past its end."""
    part = _substring(contents, start, count)
    found = tf.io.decode_raw(part, tf.uint8, fixed_length=count)
    return tf.ensure_shape(tf.cast(found, tf.int32), (count,))


def _substring(contents: tf.Tensor, start: tf.Tensor | int, count: tf.Tensor | int) -> tf.Tensor:
    # `substr` refuses to start beyond the end, and counts from there if it is negative.
    start = tf.minimum(start, tf.strings.length(contents))
    return tf.strings.substr(contents, start, tf.maximum(count, 0))


def _number(digits: tf.Tensor) -> tf.Tensor:
    """Returns the number that bytes mean, the most significant first; below 2**31."""
    width = digits.shape[-1]
    powers = [256**place for place in reversed(range(width))]
    limit = [127 if width == 4 and place == 0 else 255 for place in range(width)]
    return tf.reduce_sum(tf.minimum(digits, limit) * powers, axis=-1)


def _among(orientation: tf.Tensor, values: tuple[int, ...]) -> tf.Tensor:
    return tf.reduce_any(tf.equal(orientation, values))
