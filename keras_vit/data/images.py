"""Reads image files and resizes them: one path of training, evaluation, prediction and export."""

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.data.decoding import (
    MAX_PIXELS_VARIABLE,
    declared_pixels,
    decode_bytes,
    max_pixels,
)

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
FORMATS = "JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF"
# A larger file holds more pixels than may be decoded, each of at most 8 bytes, beside so much else.
_BYTES_PER_PIXEL, _OTHER_BYTES = 8, 2**26
_LARGE_FILE, _HEAD_BYTES = 2**25, 2**20  # of a larger file the head is read before the whole
DECODER_ERRORS = (tf.errors.OpError, UnicodeDecodeError)  # the second: a message with bytes in it


def is_sound(contents: bytes) -> bool:
    """Returns whether `decode_image` can decode what is in a file.

    Example:
        >>> is_sound(b"no image")
        False
    """
    try:
        decode_bytes(contents)
    except DECODER_ERRORS:
        return False
    return True


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
        return _resize_smoothly(image, size=size)

    sides = image.shape[-3:-1]
    if not antialias or all(side and side <= to for side, to in zip(sides, size, strict=True)):
        return plain()  # smoothing would cost, and change nothing
    return tf.cond(tf.reduce_any(tf.shape(image)[-3:-1] > size), smooth, plain)


def to_grey(images: Any) -> tf.Tensor:
    """Returns the luma of pixels (..., 3) as (..., 1), weighted as in Pillow's mode "L".

    Example:
        >>> to_grey([[[100.0, 100.0, 100.0], [255.0, 0.0, 0.0]]]).numpy().round().tolist()
        [[[100.0], [76.0]]]
    """
    red, green, blue = tf.split(images, 3, axis=-1)
    return 0.299 * red + 0.587 * green + 0.114 * blue  # Rec. ITU-R BT.601


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
    choices = {config.antialias for config in _configs(model)}
    if len(choices) > 1:
        raise ValueError(
            f"The model {model.name!r} contains Vision Transformers with antialias=True and with "
            "antialias=False, so that no image is right for both; rebuild one of them."
        )
    return choices.pop() if choices else True


def image_size_of(model: Any) -> tuple[int, int]:
    """Returns the (height, width) that images are resized to for a model.

    Example:
        >>> import keras
        >>> image_size_of(keras.Sequential([keras.Input((32, 48, 3)), keras.layers.Flatten()]))
        (32, 48)

    Raises:
        ValueError: the model takes images of any size.
    """
    height, width = model.input_shape[1:3]
    if height is None or width is None:
        raise ValueError(
            "Images are resized to the size that the model takes, and this model takes any; give "
            "one for images of one size, as keras_vit.resize(model, (height, width, 3)) makes it. "
            f"Received: a model for inputs of shape {model.input_shape}."
        )
    return height, width


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


def _resize_smoothly(image: tf.Tensor, *, size: tuple[int, int]) -> tf.Tensor:
    """Returns what `tf.image.resize(image, size, antialias=True)` does, to the bit, in less time.

    TensorFlow's kernel resizes the rows, then the columns pixel by pixel. Here both are rows to it,
    each a single pixel of many channels: it works through them as vectors.
    """
    shape = (*image.shape[:-3], *size, image.shape[-1])
    images = image if image.shape.rank == 4 else image[None]
    for side in size:
        count, height, width, channels = tf.unstack(tf.shape(images))
        resized = tf.raw_ops.ScaleAndTranslate(
            images=tf.reshape(images, (count, height, 1, width * channels)),
            size=(side, 1),
            scale=tf.stack([tf.constant(side, tf.float32) / tf.cast(height, tf.float32), 1.0]),
            translation=(0.0, 0.0),
            kernel_type="triangle",
            antialias=True,
        )
        images = tf.transpose(tf.reshape(resized, (count, side, width, channels)), (0, 2, 1, 3))
    return tf.ensure_shape(images if image.shape.rank == 4 else images[0], shape)


def _configs(layer: Any) -> Iterator[ViTConfig]:
    config = getattr(layer, "config", None)
    if isinstance(config, ViTConfig):
        yield config
        return
    for inner in getattr(layer, "layers", ()):
        yield from _configs(inner)


def _check_file(file: IO[bytes], *, name: str) -> None:
    """Raises an error if an opened file is none, or too large; reads no more than its head."""
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


def _decode(contents: bytes, *, name: str) -> np.ndarray:
    try:
        return np.asarray(decode_bytes(contents))
    except DECODER_ERRORS:
        _check_head(contents, name=name)
        raise ValueError(
            f"{name} is not an image that can be read, or is damaged; give a {FORMATS} file."
        ) from None


def _check_head(contents: bytes, *, name: str) -> None:
    """Raises an error if the head of a file says that it holds too many pixels."""
    pixels, most = declared_pixels(contents), max_pixels()
    if pixels is not None and pixels > most:  # otherwise the decoder has the last word
        raise ValueError(
            f"{name} has {pixels} pixels, more than the {most} that are decoded; make it smaller, "
            f"or raise {MAX_PIXELS_VARIABLE}."
        )


_LOGGER = logging.getLogger(__name__)


class Damage:
    """The names of the images that could not be decoded while training.

    Example:
        >>> damage = Damage()
        >>> damage.add("cat/7.jpg")
        >>> damage.names
        ('cat/7.jpg',)

    Args:
        strict: whether such an image ends the training, instead of being replaced and named.

    Attributes:
        fatal: the sentence that a training ended with, as an error in a graph loses its type.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.fatal: str | None = None
        self._names: set[str] = set()
        self._lock = threading.Lock()  # tf.data calls from several threads

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_names, (self.strict, self.names)  # a lock cannot be copied

    def add(self, name: str) -> None:
        """Adds a name, and logs it the first time."""
        with self._lock:
            is_known = name in self._names
            self._names.add(name)
        if not is_known:
            _LOGGER.warning("%r cannot be decoded; another image stands in for it.", name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names so far, in alphabetic order."""
        with self._lock:
            return tuple(sorted(self._names))


def _with_names(strict: bool, names: tuple[str, ...]) -> Damage:
    damage = Damage(strict=strict)
    damage._names.update(names)
    return damage


def replace_damaged(
    images: tf.Tensor,
    targets: tf.Tensor,
    *,
    places: tf.Tensor,
    names: tf.Tensor,
    damage: Damage,
    name: Callable[[Any], str],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Makes a batch of what could be loaded of it.

    In the place of each damaged image stands the next sound one, with its target.

    Args:
        images: those that could be loaded, in the order of the batch, (sound, height, width, 3).
        targets: theirs, shape (sound,).
        places: where in the batch they stand, int64 of shape (sound,).
        names: what `name` makes a name of, for each image of the batch, shape (batch,).
        damage: where the names go.
        name: makes a name of one of `names`.

    Returns:
        Images and targets of the whole batch.

    Raises:
        ValueError: none of the batch could be loaded; or one could not, where `damage` is strict.
            From `tf.data` it comes as `tf.errors.InvalidArgumentError`.
    """

    def record(damaged: np.ndarray, any_sound: np.ndarray) -> None:
        damaged_names = [name(one) for one in damaged]
        if damage.strict or not any_sound:
            reason = "be decoded" if damage.strict else "be decoded, which is all of a batch"
            listed = ", ".join(map(repr, damaged_names))
            damage.fatal = f"{listed} cannot {reason}; repair or remove the images."
            raise ValueError(damage.fatal)
        for one in damaged_names:
            damage.add(one)

    def replaced() -> tuple[tf.Tensor, tf.Tensor]:
        batch_places = tf.range(tf.size(names, tf.int64))
        sound = tf.reduce_any(tf.equal(batch_places[:, None], places), axis=1)
        done = tf.numpy_function(record, [tf.boolean_mask(names, ~sound), tf.reduce_any(sound)], [])
        with tf.control_dependencies([] if done is None else [done]):
            following = tf.searchsorted(places, batch_places) % tf.size(places)
        return tf.gather(images, following), tf.gather(targets, following)

    is_whole = tf.equal(tf.size(places), tf.size(names))
    pair = tf.cond(is_whole, lambda: (images, targets), replaced)
    return pair[0], pair[1]
