"""Reads what the header of an image file says: how many pixels it has, how the camera was held.

Only TensorFlow ops, like `keras_vit.data.decoding`: they run in `tf.data` and in a SavedModel.
Nothing is decoded. What is read is what TensorFlow's decoders make room for.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import tensorflow as tf

# How files begin.
JPEG, PNG, WEBP, GIF, BMP = b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"GIF8", b"BM"

# Exif 2.32 (CIPA DC-008), 4.6.4: the tag of IFD0 that holds the orientation, and the types it has.
_TAG, _SHORT, _LONG = 0x0112, 3, 4
_ENTRY = 12  # bytes
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
# What `declared_pixels` returns where no header says it, or none that a decoder would trust.
UNKNOWN = 2**62
# GIF89a, 13 to 23: the bytes before the first color table; an image's descriptor with its
# separator; the byte of the code size after it; an extension's introducer and label.
_GIF_SCREEN, _GIF_DESCRIPTOR, _GIF_CODE_SIZE, _GIF_EXTENSION = 13, 10, 1, 2
_GIF_RECORDS = 3  # of an image that does not move: an extension, the image, the end
_GIF_BLOCKS = 1024  # data blocks of one size that are skipped at a time
# RFC 9649, 2.3 and 2.7: where an extended file has its flags, and one of them.
WEBP_FLAGS, _WEBP_ANIMATION = 20, 0x02
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


def declared_pixels(contents: bytes) -> int:
    """Returns how many pixels decoding a file makes room for; `UNKNOWN` if the header does not say.

    Of a moving GIF or WebP all frames count: the decoder holds them all, though the first is used.

    Example:
        >>> import tensorflow as tf
        >>> declared_pixels(tf.io.encode_png(tf.zeros((3, 5, 3), tf.uint8)).numpy())
        15

    Args:
        contents: the bytes of a file, or the first of them.

    Raises:
        tf.errors.InvalidArgumentError: the header of a JPEG is damaged.
    """
    for begin, pixels in PIXELS.items():
        if contents.startswith(begin):
            return int(pixels(tf.constant(contents)))
    return UNKNOWN


def webp_moves(contents: tf.Tensor) -> tf.Tensor:
    """Returns whether a WebP is an animation."""
    head = _bytes(contents, 12, 9)
    is_extended = tf.reduce_all(head[:4] == list(b"VP8X"))
    return is_extended & (head[WEBP_FLAGS - 12] & _WEBP_ANIMATION > 0)


def bmp_has_palette(contents: tf.Tensor) -> tf.Tensor:
    """Returns whether a BMP has a byte for each pixel, a place in a palette."""
    return tf.reduce_all(_bytes(contents, 28, 2) == [8, 0])


def bmp_palette(contents: tf.Tensor) -> tf.Tensor:
    """Returns the colors of a BMP's palette, uint8 of shape (count, 3): 256 at most."""
    size, count = (_number(tf.reverse(_bytes(contents, at, 4), [0])) for at in (14, 46))
    count = tf.where(count == 0, 256, tf.minimum(count, 256))  # 0 stands for all of them
    start = 14 + tf.minimum(size, _LIMIT)
    colors = tf.io.decode_raw(_substring(contents, start, 4 * count), tf.uint8)
    return tf.reshape(colors, (-1, 4))[:, 2::-1]  # stored as blue, green, red, 0


def may_be_turned(contents: tf.Tensor) -> tf.Tensor:
    """Returns whether a file could have an orientation: a look at how it begins, in a few ops."""
    width = max(map(len, _PLAIN))
    rows = np.array([list(begin.ljust(width, b"?")) for begin in _PLAIN], np.uint8)
    begin = tf.io.decode_raw(tf.strings.substr(contents, 0, width), tf.uint8, fixed_length=width)
    same = tf.equal(begin, rows) | (rows == ord("?"))
    return ~tf.reduce_any(tf.reduce_all(same, axis=1))


@one_op
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

    formats = tf.stack([begins(b"\xff\xd8"), begins(PNG), begins(WEBP), True])
    tiff = tf.switch_case(
        tf.argmax(formats, output_type=tf.int32),
        [
            lambda: _exif_of_jpeg(contents),
            lambda: _exif_of_png(contents),
            lambda: _exif_of_webp(contents),
            lambda: tf.constant(b""),
        ],
    )
    return _tiff_orientation(tiff)


def _area(height: tf.Tensor, width: tf.Tensor) -> tf.Tensor:
    return tf.cast(height, tf.int64) * tf.cast(width, tf.int64)


def _pixels_if(is_known: tf.Tensor, pixels: tf.Tensor) -> tf.Tensor:
    return tf.where(is_known, pixels, tf.constant(UNKNOWN, tf.int64))


def _pixels_of_jpeg(contents: tf.Tensor) -> tf.Tensor:
    return _area(*tf.unstack(tf.image.extract_jpeg_shape(contents)[:2]))


@one_op
def _pixels_of_png(contents: tf.Tensor) -> tf.Tensor:
    head = _bytes(contents, 8, 16)
    is_first = tf.reduce_all(head[:8] == list(b"\0\0\0\x0dIHDR"))
    return _pixels_if(is_first, _area(_number(head[12:16]), _number(head[8:12])))


@one_op
def _pixels_of_bmp(contents: tf.Tensor) -> tf.Tensor:
    head = tf.reverse(_bytes(contents, 18, 8), [0])
    height = tf.where(head[0] > 127, _number(255 - head[:4]) + 1, _number(head[:4]))
    return _area(height, _number(head[4:]))  # a negative height: from the top down


def _pixels_of_webp(contents: tf.Tensor) -> tf.Tensor:
    pixels = _canvas_of_webp(contents)
    moves = webp_moves(contents)
    return tf.cond(moves, lambda: pixels * _frames_of_webp(contents), lambda: pixels)


@one_op
def _canvas_of_webp(contents: tf.Tensor) -> tf.Tensor:
    head = _bytes(contents, 0, 30)

    def little(start: int, width: int) -> tf.Tensor:
        return _number(tf.reverse(head[start : start + width], [0]))

    sizes = {
        b"VP8 ": _area(little(28, 2) % 2**14, little(26, 2) % 2**14),
        b"VP8L": _area(little(22, 3) // 2**6 % 2**14 + 1, little(21, 2) % 2**14 + 1),
        b"VP8X": _area(little(27, 3) + 1, little(24, 3) + 1),
    }
    names = tf.reduce_all(head[12:16] == [list(name) for name in sizes], axis=1)
    pixels = tf.reduce_sum(tf.where(names, tf.stack(list(sizes.values())), 0))
    return _pixels_if(tf.reduce_any(names), pixels)


@one_op
def _frames_of_webp(contents: tf.Tensor) -> tf.Tensor:
    """The number of chunks ANMF, one at least, int64."""

    def advance(place: tf.Tensor, head: tf.Tensor, frames: tf.Tensor) -> tuple[tf.Tensor, ...]:
        is_frame = tf.reduce_all(head[:4] == list(b"ANMF"))
        size = tf.minimum(_number(tf.reverse(head[4:8], [0])), _LIMIT)
        following = place + tf.minimum(8 + size + size % 2, tf.strings.length(contents) - place)
        return following, _bytes(contents, following, 8), frames + tf.cast(is_frame, tf.int64)

    _, head, frames = tf.while_loop(
        lambda place, head, frames: tf.reduce_any(head > 0),
        advance,
        (tf.constant(12), _bytes(contents, 12, 8), tf.constant(0, tf.int64)),
        maximum_iterations=_PIECES,
    )
    # So large that no product of it is few, and none overflows.
    return tf.where(tf.reduce_any(head > 0), tf.constant(_LIMIT, tf.int64), tf.maximum(frames, 1))


class _Gif(NamedTuple):
    """How far a GIF is read: `pixels` of all images, and of the largest side each."""

    place: tf.Tensor
    inside: tf.Tensor
    goes_on: tf.Tensor
    pixels: tf.Tensor
    height: tf.Tensor
    width: tf.Tensor


def _pixels_of_gif(contents: tf.Tensor) -> tf.Tensor:
    """The pixels of all frames, or of one as wide as the widest and as high as the highest."""
    state = _start_of_gif(contents)
    state = tf.cond(state[2], lambda: _rest_of_gif(contents, *state), lambda: state)
    _, _, goes_on, pixels, height, width = state
    return _pixels_if(~goes_on, tf.maximum(pixels, _area(height, width)))


@one_op
def _start_of_gif(contents: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Reads as many records as an image that does not move has: a loop would cost more."""
    screen = _bytes(contents, 0, _GIF_SCREEN)
    state = _Gif(
        place=_GIF_SCREEN + _color_table(screen[10]),
        inside=tf.constant(False),
        goes_on=tf.constant(True),
        pixels=tf.constant(0, tf.int64),
        height=_number(tf.reverse(screen[8:10], [0])),
        width=_number(tf.reverse(screen[6:8], [0])),
    )
    data = tf.io.decode_raw(contents, tf.uint8)
    for _ in range(_GIF_RECORDS):
        state = _read_record(data, state)
    return tuple(state)


@one_op
def _rest_of_gif(contents: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
    data = tf.io.decode_raw(contents, tf.uint8)
    final = tf.while_loop(
        lambda place, inside, goes_on, *sizes: goes_on,
        lambda *state: tuple(_read_record(data, _Gif(*state))),
        state,
        maximum_iterations=_PIECES,
    )
    return tuple(final)


@one_op
def _read_record(data: tf.Tensor, state: _Gif) -> _Gif:
    """Reads an image or an extension with its data blocks, or more blocks of the one it is inside.

    Past the end nothing changes any more.
    """
    head = tf.cast(data[state.place : state.place + _GIF_DESCRIPTOR], tf.int32)
    head = tf.pad(head, [[0, _GIF_DESCRIPTOR]])[:_GIF_DESCRIPTOR]
    head = tf.ensure_shape(head, (_GIF_DESCRIPTOR,))
    is_image = ~state.inside & (head[0] == 0x2C)
    is_extension = ~state.inside & (head[0] == 0x21)
    size = tf.where(is_image, tf.reverse(head[5:9], [0]), 0)  # height, then width
    height, width = _number(size[:2]), _number(size[2:])
    image_start = _GIF_DESCRIPTOR + _color_table(head[9]) + _GIF_CODE_SIZE
    start = tf.where(is_image, image_start, tf.where(is_extension, _GIF_EXTENSION, 0))
    goes_on = state.inside | is_image | is_extension
    end, is_over = _after_blocks(data, state.place + start)
    return _Gif(
        place=tf.where(goes_on, end, state.place),
        inside=goes_on & ~is_over,
        goes_on=goes_on,
        pixels=state.pixels + _area(height, width),
        height=tf.maximum(state.height, height),
        width=tf.maximum(state.width, width),
    )


def _color_table(flags: tf.Tensor) -> tf.Tensor:
    """The bytes of the color table that the flags of a GIF's screen or image announce."""
    return tf.where(flags > 127, 3 * tf.bitwise.left_shift(2, flags & 7), 0)


def _after_blocks(data: tf.Tensor, start: tf.Tensor) -> Walk:
    """Skips data blocks as long as the first, and one more; says whether that was the last."""
    length = tf.size(data)
    start = tf.minimum(start, length)
    step = _byte(data, start) + 1
    last = start + tf.minimum(length - start, step * _GIF_BLOCKS)
    same = tf.equal(tf.cast(data[start:last:step], tf.int32), step - 1) & (step > 1)
    count = tf.argmin(tf.pad(tf.cast(same, tf.int32), [[0, 1]]), output_type=tf.int32)
    place = tf.minimum(start + count * step, length)
    # Not as long as the others: none at all ends the data, and so does none after it.
    end = tf.minimum(place + 1 + _byte(data, place), length)
    is_last = (_byte(data, place) > 0) & (_byte(data, end) == 0)
    return tf.where(is_last, tf.minimum(end + 1, length), end), is_last | (_byte(data, place) == 0)


def _byte(data: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """A byte as int32, 0 past the end."""
    return tf.reduce_sum(tf.cast(data[place : place + 1], tf.int32))


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


# How the files begin that are read, and what reads the number of their pixels in a graph.
PIXELS: Mapping[bytes, Callable[[tf.Tensor], tf.Tensor]] = {
    JPEG: _pixels_of_jpeg,
    PNG: _pixels_of_png,
    WEBP: _pixels_of_webp,
    GIF: _pixels_of_gif,
    BMP: _pixels_of_bmp,
}
