"""Reads what the header of a JPEG or PNG says: how many pixels it has, how the camera was held.

Only TensorFlow ops: they run in `tf.data` and in a SavedModel. Nothing is decoded. What is read is
what TensorFlow's decoders make room for. Pillow reads the headers of other formats.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG"  # how files begin

# Exif 2.32 (CIPA DC-008), 4.6.4: the tag of IFD0 that holds the orientation, and the types it has.
_TAG, _SHORT, _LONG = 0x0112, 3, 4
_ENTRY = 12  # bytes
_PIECES = 10_000  # of a file that are looked at; a photograph has tens
# How JPEGs begin in which there is no orientation; a "?" is any byte.
_PLAIN = (
    b"\xff\xd8\xff\xe0\x00\x10JFIF\0" + b"?" * 9 + b"\xff\xdb",  # JFIF, then the tables
    b"\xff\xd8\xff\xdb" + b"?" * 18,
)

_LIMIT = 2**30  # bytes: no sum of two overflows
Walk = tuple[tf.Tensor, tf.Tensor]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def one_op(function: _Function) -> _Function:
    """Makes a function of tensors one op, whatever graph it is called in.

    An executor visits every op of a branch that is not taken, unless the ops are a function's. It
    is traced once for tensors of a kind: `tf.function` would trace it in every graph anew.

    Args:
        function: takes tensors by position and constants by name.
    """
    traced: dict[Any, Any] = {}

    @functools.wraps(function)
    def call(*arguments: Any, **constants: Any) -> Any:
        tensors = tf.nest.map_structure(tf.convert_to_tensor, arguments)
        specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), tensors)
        kinds = tuple((str(x.shape), x.dtype) for x in tf.nest.flatten(tensors))
        key = kinds, tuple(constants.items())
        if key not in traced:
            graph = tf.function(
                functools.partial(function, **constants),
                autograph=False,
                experimental_attributes={"_noinline": True},
            )
            with tf.init_scope():
                traced[key] = graph.get_concrete_function(*specs)
        return traced[key](*tensors)

    return cast(_Function, call)


def may_be_turned(contents: tf.Tensor) -> tf.Tensor:
    """Returns whether a JPEG or PNG could have an orientation: a look at how it begins."""
    rows = np.array([list(begin) for begin in _PLAIN], np.uint8)
    width = rows.shape[1]
    begin = tf.io.decode_raw(tf.strings.substr(contents, 0, width), tf.uint8, fixed_length=width)
    same = tf.equal(begin, rows) | (rows == ord("?"))
    is_plain = tf.reduce_any(tf.reduce_all(same, axis=1))
    return starts_with(contents, PNG) | (starts_with(contents, JPEG) & ~is_plain)


def starts_with(contents: tf.Tensor, magic: bytes) -> tf.Tensor:
    """Returns whether a file begins so."""
    # `substr` clips to the end of shorter strings, so an empty file answers False.
    return tf.equal(tf.strings.substr(contents, 0, len(magic)), magic)


@one_op
def read_orientation(contents: tf.Tensor) -> tf.Tensor:
    """Returns the orientation in a file, int32 from 1 (upright) to 8.

    What has none is 1, and what is damaged, or no orientation.

    Example:
        >>> import tensorflow as tf
        >>> int(read_orientation(tf.io.encode_jpeg(tf.zeros((8, 8, 3), tf.uint8))))
        1

    Args:
        contents: the bytes of a JPEG or PNG, a scalar string.
    """
    tiff = tf.cond(
        starts_with(contents, JPEG[:2]),
        lambda: _exif_of_jpeg(contents),
        lambda: _exif_of_png(contents),
    )
    return _tiff_orientation(tiff)


def pixels_of_jpeg(contents: tf.Tensor) -> tf.Tensor:
    """Returns the pixels that a JPEG says it has, int64."""
    return tf.reduce_prod(tf.cast(tf.image.extract_jpeg_shape(contents)[:2], tf.int64))


@one_op
def pixels_of_png(contents: tf.Tensor) -> tf.Tensor:
    """Returns the pixels that a PNG says it has, int64, more than any has if it does not."""
    head = _bytes(contents, 8, 16)
    is_first = tf.reduce_all(head[:8] == list(b"\0\0\0\x0dIHDR"))
    sides = tf.cast(tf.stack([_number(head[8:12]), _number(head[12:16])]), tf.int64)
    return tf.where(is_first, tf.reduce_prod(sides), tf.int64.max)


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
    has_exif = (head[0] == 0xFF) & is_exif(head)
    return _substring(contents, place + 10, tf.where(has_exif, _number(head[2:4]) - 8, 0))


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
    entry_bytes = tf.io.decode_raw(_substring(tiff, start + 2, count * _ENTRY), tf.uint8)
    entries = tf.reshape(tf.cast(entry_bytes, tf.int32), (-1, _ENTRY))
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
    values = tf.io.decode_raw(part, tf.uint8, fixed_length=count)
    return tf.ensure_shape(tf.cast(values, tf.int32), (count,))


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
