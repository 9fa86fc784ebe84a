"""Makes pixels of image files: reads, bounds, decodes, turns upright, lays on white, resizes.

One path of training, evaluation, prediction and export. JPEG and PNG are read by TensorFlow ops,
which run eagerly, in `tf.data` and in a SavedModel; every other format by Pillow, in Python. The
header is read first: what is too large is refused before there is memory for it.

Shapes: an image is uint8 (height, width, 3), a part of it int32 (top, left, height, width).
"""

import contextlib
import functools
import io
import os
import stat
import warnings
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps

from keras_vit.config import Resizing
from keras_vit.limits import MAX_PIXELS

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
FORMATS = "JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF"
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG"  # how files begin
OTHERS = ("WEBP", "GIF", "BMP", "TIFF", "AVIF")  # what Pillow decodes
DECODER_ERRORS = (tf.errors.OpError, UnicodeDecodeError)  # the second: a message with bytes in it

# The most pixels that are decoded are MAX_PIXELS, or what this sets. Beyond 1 GiB each counts by
# the bytes that it takes to decode, from 8 on: 12 in a PNG with alpha, which a palette can have.
MAX_PIXELS_VARIABLE = "KERAS_VIT_MAX_PIXELS"
_FREE, _COSTS = 2**30, {"WEBP": 16, "BMP": 16, "TIFF": 16, "AVIF": 12}
TOO_LARGE = "The image has more pixels than are decoded, or a header that does not say how many."
# `max_pixels` is the limit of every format; Pillow's, for which it warns, is another.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# A larger file holds more pixels than may be decoded, each of at most 8 bytes, beside so much else.
_BYTES_PER_PIXEL, _OTHER_BYTES = 8, 2**26
_LARGE_FILE, _HEAD_BYTES = 2**25, 2**20  # of a larger file the head is read before the whole
_STRIP = 2**20  # pixels that are laid on white at a time

# Exif 2.32 (CIPA DC-008), 4.6.4: the tag of IFD0 that holds the orientation, and the types it has.
_TAG, _SHORT, _LONG = 0x0112, 3, 4
_ENTRY = 12  # bytes
_PIECES = 10_000  # of a file that are looked at; a photograph has tens
# How JPEGs begin in which there is no orientation; a "?" is any byte.
_PLAIN = (
    b"\xff\xd8\xff\xe0\x00\x10JFIF\0" + b"?" * 9 + b"\xff\xdb",  # JFIF, then the tables
    b"\xff\xd8\xff\xdb" + b"?" * 18,
)
# Of each orientation from 1 on: are the stored rows columns; are rows, and columns, mirrored then?
_TURNS = np.array(
    [[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 1, 0], [1, 0, 0], [1, 0, 1], [1, 1, 1], [1, 1, 0]], bool
)
_LIMIT = 2**30  # bytes: no sum of two overflows
_KERNELS = {"bilinear": "triangle", "bicubic": "keyscubic", "lanczos": "lanczos3"}


def max_pixels() -> int:
    """Returns the most pixels that an image may have to be decoded.

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
    contents = path if isinstance(path, bytes) else read_bytes(path)
    name = f"An image of {len(path)} bytes" if isinstance(path, bytes) else repr(str(path))
    try:
        return np.asarray(decode_bytes(contents))
    except DECODER_ERRORS:
        _check_head(contents, name=name)
        raise ValueError(
            f"{name} is not an image that can be read, or is damaged; give a {FORMATS} file."
        ) from None


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Reads the file of an image; nothing of a pipe or a device, or of a file that is too large.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
        ValueError: it is no file, or holds too many pixels.
    """
    name = repr(os.fspath(path))
    try:
        # Opening a pipe would otherwise wait for a writer.
        not_waiting = getattr(os, "O_NONBLOCK", 0)
        with open(path, "rb", opener=lambda at, flags: os.open(at, flags | not_waiting)) as file:
            _check_file(file, name=name)
            return file.read()
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no image file {name}; check the path.") from None
    except IsADirectoryError:
        raise ValueError(f"{name} is a folder; give the path of a {FORMATS} file.") from None
    except OSError as error:
        raise OSError(f"The image file {name} cannot be read: {error.strerror}.") from error


def largest_file() -> int:
    """Returns how many bytes the file of an image may have: more would be too many pixels."""
    return _BYTES_PER_PIXEL * max_pixels() + _OTHER_BYTES


def read_images(paths: Sequence[str | os.PathLike[str]], resizing: Resizing) -> np.ndarray:
    """Reads image files and resizes them to one size, see `resize_image`.

    Example:
        >>> import pathlib, tempfile, tensorflow as tf
        >>> file = pathlib.Path(tempfile.mkdtemp(), "dot.png")
        >>> _ = file.write_bytes(tf.io.encode_png(tf.zeros((1, 1, 1), tf.uint8)).numpy())
        >>> read_images([file, file], Resizing((4, 6))).shape
        (2, 4, 6, 3)

    Returns:
        The pixels, float32 in 0..255 of shape (len(paths), height, width, 3).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not an image, or is damaged.
    """
    return np.stack([resize_image(read_image(path), resizing).numpy() for path in paths])


def is_decodable(contents: bytes) -> bool:
    """Returns whether `decode_image` can decode what is in a file."""
    try:
        decode_bytes(contents)
    except DECODER_ERRORS:
        return False
    return True


def decode_image(contents: tf.Tensor, *, others: bool = True) -> tf.Tensor:
    """Decodes one JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF to RGB, upright.

    Grey becomes three equal channels. What is transparent lies on white, as on a page. Of several
    frames the first counts. The orientation in a file (EXIF) is applied, as browsers and Pillow's
    `ImageOps.exif_transpose` do; the pipelines that the published models come from did not
    (google-research/vision_transformer, big_vision).

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
        tf.errors.InvalidArgumentError: the bytes are not such an image, are damaged, or their
            header, which is read before there is memory for them, says too many pixels.
    """
    return _decode_upright(contents, tf.constant(max_pixels(), tf.int64), others=others)


def decode_part(contents: tf.Tensor, *, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Decodes a part of one upright image; of a JPEG, only that part is decoded.

    The same pixels as decoding the whole and cutting, but for colours at the part's edges, which
    JPEG interpolates from what lies beside: up to 10 of 255.

    Args:
        contents: the bytes of the file, a scalar string.
        choose: takes (height, width) of the upright image and gives (top, left, height, width) of
            the part, both int32.
    """
    most = tf.constant(max_pixels(), tf.int64)
    is_jpeg = starts_with(contents, JPEG)
    turn = tf.cond(
        is_jpeg & may_have_orientation(contents),
        lambda: read_orientation(contents),
        lambda: tf.constant(1),
    )
    contents = with_control_dependency(contents, turn)
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
        place = tf.cond(turn > 1, lambda: _stored_part(part, shape, turn), lambda: part)
        crop = tf.image.decode_and_crop_jpeg(contents, place, channels=3)
        return tf.cond(turn > 1, lambda: _turned(crop, turn), lambda: crop)

    image = tf.cond(is_jpeg, decode_jpeg, lambda: cut_part(decoded, choose=lambda _: part))
    return tf.ensure_shape(image, (None, None, 3))


def cut_part(image: tf.Tensor, *, choose: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Cuts a part out of pixels of shape (height, width, 3), see `decode_part`."""
    part = choose(tf.shape(image)[:2])
    return tf.image.crop_to_bounding_box(image, part[0], part[1], part[2], part[3])


def with_control_dependency(value: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Passes a value on once another one is made.

    An error inside of a function cancels those that would start beside it, and the caller may hear
    of the cancelling alone, which `tf.data` does not take for an error.
    """
    with tf.control_dependencies([before]):
        return tf.identity(value)


def declared_pixels(contents: bytes) -> int | None:
    """Returns how many pixels the header of a file says it has, None if it does not say."""
    try:
        if contents.startswith(JPEG):
            return int(pixels_of_jpeg(tf.constant(contents)))
        if contents.startswith(PNG):
            pixels = int(pixels_of_png(tf.constant(contents)))
            return pixels if pixels < tf.int64.max else None
        return _weighed(Image.open(io.BytesIO(contents), formats=OTHERS))
    except Exception:  # each format raises errors of its own
        return None


def resize_image(image: tf.Tensor, resizing: Resizing) -> tf.Tensor:
    """Resizes an image, and cuts the middle out, as timm and transformers do for evaluation.

    With anti-aliasing the filters are Pillow's, to two grey levels, since it rounds; without,
    bilinear is `tf.image.resize`, as Google's published models were trained and evaluated
    (google-research/vision_transformer, vit_jax/input_pipeline.py).

    Example:
        >>> import numpy as np
        >>> resize_image(np.zeros((2, 4, 3), np.uint8), Resizing((6, 6))).shape.as_list()
        [6, 6, 3]

    Args:
        image: pixels (height, width, 3) or (batch, height, width, 3); uint8 stays within 0..255.
        resizing: the size, and how it is reached; for a model, `resizing_of(model)`.

    Returns:
        The pixels, float32 in 0..255.
    """
    image, size = tf.convert_to_tensor(image), resizing.size
    resample = functools.partial(_resize_axes, image, resizing)
    if resizing != Resizing(size, resizing.antialias):
        return resample()

    def plain() -> tf.Tensor:
        return tf.cast(tf.image.resize(image, size), tf.float32)

    sides = image.shape[-3:-1]
    grows = all(side and side <= to for side, to in zip(sides, size, strict=True))
    if grows or not resizing.antialias:
        return plain()  # smoothing would cost, and change nothing
    return tf.cond(tf.reduce_any(tf.shape(image)[-3:-1] > size), resample, plain)


def placement(shape: tf.Tensor, resizing: Resizing) -> tuple[Any, Any]:
    """Returns (height, width) of an image resized, and where its middle begins, in float64.

    They are whole numbers, those of torchvision's Resize and CenterCrop, of timm's ResizeKeepRatio
    where the size is oblong, and of transformers' image processors.
    """
    least = np.array([side / resizing.crop_pct // 1 for side in resizing.size])
    if resizing.crop_mode == "squash":
        resized, exact = least, np  # the same for all images: no operations
    else:
        sides, exact = tf.cast(shape, tf.float64), tf
        if least[0] == least[1]:
            resized = tf.floor(least[0] * sides / tf.reduce_min(sides))
        else:
            resized = tf.round(sides / tf.reduce_min(sides / least))
    middle = (resized - resizing.size) / 2
    return resized, exact.round(middle) if resizing.crop_offset == "round" else exact.floor(middle)


def one_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of tensors one op, whatever graph it is called in.

    An executor visits every op of a branch that is not taken, unless the ops are a function's. It
    is traced once for tensors of a kind: `tf.function` would trace it in every graph anew. Tensors
    are given by position, constants by name.
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

    return call


def may_have_orientation(contents: tf.Tensor) -> tf.Tensor:
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
    """Returns the orientation in a JPEG or PNG, int32 from 1 (upright, or none is said) to 8."""
    is_jpeg = starts_with(contents, JPEG[:2])
    tiff = tf.cond(is_jpeg, lambda: _exif_of_jpeg(contents), lambda: _exif_of_png(contents))
    return _tiff_orientation(tiff)


def pixels_of_jpeg(contents: tf.Tensor) -> tf.Tensor:
    """Returns the pixels that a JPEG says it has, int64."""
    return tf.reduce_prod(tf.cast(tf.image.extract_jpeg_shape(contents)[:2], tf.int64))


@one_op
def pixels_of_png(contents: tf.Tensor) -> tf.Tensor:
    """Returns the pixels that a PNG says it has, int64, more than any has if it does not."""
    head = _bytes(contents, 8, 18)
    is_first = tf.reduce_all(head[:8] == list(b"\0\0\0\x0dIHDR"))
    pixels = tf.reduce_prod(tf.cast([_number(head[8:12]), _number(head[12:16])], tf.int64))
    is_costly = (head[17] > 2) & (pixels > _FREE // 12)  # there is alpha, or a palette
    return tf.where(is_first, tf.where(is_costly, pixels // 8 * 12, pixels), tf.int64.max)


def _weighed(image: Image.Image) -> int:
    pixels, cost = image.width * image.height, _COSTS.get(image.format or "", 8)
    return pixels * cost // 8 if pixels * cost > _FREE else pixels


def _check_file(file: IO[bytes], *, name: str) -> None:
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(
            f"{name} is a pipe or a device, not a file; give the path of a {FORMATS} file."
        )
    most = largest_file()
    if about.st_size > most:
        raise ValueError(
            f"{name} has {about.st_size} bytes, more than the {most} of the largest image that "
            f"is decoded; make it smaller, or raise {MAX_PIXELS_VARIABLE}."
        )
    if about.st_size > _LARGE_FILE:
        _check_head(file.read(_HEAD_BYTES), name=name)
        file.seek(0)


def _check_head(contents: bytes, *, name: str) -> None:
    pixels, most = declared_pixels(contents), max_pixels()
    if pixels is not None and pixels > most:  # otherwise the decoder has the last word
        raise ValueError(
            f"{name} has {pixels} pixels, more than the {most} that are decoded (one "
            f"that takes 16 bytes counts twice); make it smaller, or raise {MAX_PIXELS_VARIABLE}."
        )


def decode_bytes(contents: bytes) -> tf.Tensor:
    """Does eagerly what `decode_image` says."""
    return _decoder(max_pixels(), contents.startswith(JPEG))(contents)


@functools.cache
def _decoder(most: int, is_jpeg: bool) -> Callable[[bytes], tf.Tensor]:
    """Returns `decode_image` as one graph, of JPEGs alone or of all formats."""

    def decode(contents: tf.Tensor) -> tf.Tensor:
        # A graph gives memory back earlier than eager code. That of JPEGs alone is made in half the
        # time, and photos need not wait for the other.
        decode_format = _decode_jpeg if is_jpeg else functools.partial(_decode_no_jpeg, others=True)
        return _upright(decode_format(contents, tf.constant(most, tf.int64)), contents)

    graph: Callable[[bytes], tf.Tensor] = tf.function(
        decode, input_signature=[tf.TensorSpec((), tf.string)], autograph=False
    )
    return graph


def _decode_upright(contents: tf.Tensor, most: tf.Tensor, *, others: bool) -> tf.Tensor:
    """Does what `decode_image` says, with the most pixels as an argument."""
    image = tf.cond(
        starts_with(contents, JPEG),
        lambda: _decode_jpeg(contents, most),
        lambda: _decode_no_jpeg(contents, most, others=others),
    )
    return _upright(image, contents)


def _upright(image: tf.Tensor, contents: tf.Tensor) -> tf.Tensor:
    contents = with_control_dependency(contents, image)
    image = tf.cond(
        may_have_orientation(contents),
        lambda: _turned(image, read_orientation(contents)),
        lambda: image,
    )
    return tf.ensure_shape(image, (None, None, 3))


@one_op
def _turned(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    is_transposed, rows, columns = tf.unstack(tf.gather(_TURNS, orientation - 1))
    pixels = tf.cond(is_transposed, lambda: tf.transpose(image, (1, 0, 2)), lambda: image)
    steps = tf.where(tf.stack([rows, columns, False]), -1, 1)
    return tf.strided_slice(pixels, (0, 0, 0), (0, 0, 0), steps, begin_mask=7, end_mask=7)


@one_op
def _upright_shape(shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.gather(_TURNS, orientation - 1)[0], tf.reverse(shape, [0]), shape)


@one_op
def _stored_part(part: tf.Tensor, shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Returns where a part of an upright image of a shape (height, width) is stored."""
    is_transposed, rows, columns = tf.unstack(tf.gather(_TURNS, orientation - 1))
    start, size = part[:2], part[2:]
    start = tf.where(tf.stack([rows, columns]), shape - start - size, start)
    both = tf.stack([start, size])
    return tf.reshape(tf.where(is_transposed, tf.reverse(both, [1]), both), (4,))


_decode_in_one_op = one_op(_decode_upright)


@one_op
def _decode_no_jpeg(contents: tf.Tensor, most: tf.Tensor, *, others: bool) -> tf.Tensor:
    def decode_png() -> tf.Tensor:
        checked = _pass_if(contents, pixels_of_png(contents) <= most)
        # `channels=4` would be shorter, but makes grey images of 1, 2 or 4 bits almost transparent.
        pixels = tf.io.decode_png(checked, channels=0)
        channels = tf.shape(pixels)[2]  # 1 grey, 2 grey and alpha, 3 RGB, 4 RGB and alpha
        color = tf.cond(channels % 2 == 0, lambda: _blend(pixels, _STRIP), lambda: pixels)
        return tf.cond(
            channels > 2, lambda: color, lambda: tf.image.grayscale_to_rgb(color[..., :1])
        )

    def decode_other() -> tf.Tensor:
        if not others:
            return _pass_if(tf.zeros((1, 1, 3), tf.uint8), tf.constant(False), "no JPEG, no PNG")
        image, problem = tf.numpy_function(
            _decode_by_pillow, [contents, most], (tf.uint8, tf.string), stateful=False
        )
        return _pass_if(tf.ensure_shape(image, (None, None, 3)), problem == b"", problem)

    return tf.cond(starts_with(contents, PNG), decode_png, decode_other)


def _decode_by_pillow(contents: bytes, most: int) -> tuple[np.ndarray, bytes]:
    try:
        image = Image.open(io.BytesIO(contents), formats=OTHERS)
        if not 0 < _weighed(image) <= most:
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
    contents = _pass_if(contents, pixels_of_jpeg(contents) <= most)
    return tf.io.decode_image(contents, channels=3, expand_animations=False)


@one_op
def _blend(pixels: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Lays colour and alpha on white; strips of so many pixels and no more are held in 16 bits."""
    height, width = tf.unstack(tf.shape(pixels)[:2])
    rows = tf.maximum(size // width, 1)
    count = (height + rows - 1) // rows

    def blend(place: tf.Tensor, strips: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        strip = tf.cast(pixels[place * rows : (place + 1) * rows], tf.uint16)
        # (color * alpha + 255 * (255 - alpha)) / 255, rounded: all that 16 bits hold.
        alpha = strip[..., -1:]
        total = strip[..., :-1] * alpha + (255 * 255 + 128 - 255 * alpha)
        eight = tf.constant(8, tf.uint16)
        # With 128 added before, (t + (t >> 8)) >> 8 is t / 255 rounded, without a division.
        total = tf.bitwise.right_shift(total + tf.bitwise.right_shift(total, eight), eight)
        return place + 1, strips.write(place, tf.cast(total, tf.uint8))

    strips = tf.TensorArray(tf.uint8, count, infer_shape=False, element_shape=(None, None, None))
    _, strips = tf.while_loop(lambda place, strips: place < count, blend, (0, strips))
    return strips.concat()


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
) -> tuple[tf.Tensor, tf.Tensor]:
    """Goes from piece to piece of a file; returns where it stops, and the first bytes there."""
    length = tf.strings.length(contents)

    def advance(place: tf.Tensor, head: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
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
    # A first byte above 127 would make int32 negative; a length so large is past every end.
    limit = [127 if width == 4 and place == 0 else 255 for place in range(width)]
    return tf.reduce_sum(tf.minimum(digits, limit) * powers, axis=-1)


def _resize_axes(image: tf.Tensor, resizing: Resizing) -> tf.Tensor:
    size, kernel = resizing.size, _KERNELS[resizing.interpolation]
    resized, offset = placement(tf.shape(image)[-3:-1], resizing)
    shape = (*image.shape[:-3], *size, image.shape[-1])
    images = image if image.shape.rank == 4 else image[None]
    # Pillow resizes the width first, which matters only where values are cut off.
    overshoots = kernel != "triangle"
    for axis in (1, 0) if overshoots else (0, 1):
        # TensorFlow's kernel resizes rows as vectors, columns pixel by pixel. Here both are rows to
        # it, each a single pixel of many channels.
        turn = (0, 1 + axis, 2 - axis, 3)
        images = tf.transpose(images, turn)
        count, length, lines, channels = tf.unstack(tf.shape(images))
        scale = tf.cast(resized[axis], tf.float32) / tf.cast(length, tf.float32)
        made = tf.raw_ops.ScaleAndTranslate(
            images=tf.reshape(images, (count, length, 1, lines * channels)),
            size=(size[axis], 1),
            scale=tf.stack([scale, 1.0]),
            translation=tf.cast(tf.stack([-offset[axis], 0.0]), tf.float32),
            kernel_type=kernel,
            antialias=resizing.antialias,
        )
        images = tf.transpose(tf.reshape(made, (count, size[axis], lines, channels)), turn)
        if overshoots and image.dtype == tf.uint8:
            images = tf.clip_by_value(images, 0, 255)
    return tf.ensure_shape(images if image.shape.rank == 4 else images[0], shape)
