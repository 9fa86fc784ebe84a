"""Makes the images with which an artefact is compared with its model, and the model's answers."""

import dataclasses
import struct
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_vit.backend.private import layers_of
from keras_vit.data import decoding
from keras_vit.data import images as image_files
from keras_vit.exporting.clean import messages
from keras_vit.exporting.rebuild import Exportable

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


BATCH_SIZES = (1, 2, 3, COUNT)

# Rebuilding may cost no more than this in float32, relative to the largest output.
REBUILD_LIMIT = 1e-4

# bfloat16 and float16 models compute with 8 and 11 bits; their float32 copy is the better one.
LOW_PRECISION_COSINE = 0.99


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """Outputs by name ("logits", "probabilities", "features").

    Attributes:
        of_batch: for all images at once.
        of_first: for the first alone: convolutions sum in another order then (R50+B/16: logits of
            3.5 move by 5.6e-5, in the model as in its artefact).
    """

    of_batch: dict[str, np.ndarray]
    of_first: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class References:
    """Images and what the rebuilt model makes of them.

    Attributes:
        files: encoded images, an object array (B,) of bytes.
        pixels: the same through evaluation's decoding and resizing, rounded, uint8 (B, H, W, C).
        values: the pixels less the model's mean, divided by its deviation, float32.
        of_files: what it makes of the files.
        of_pixels: what it makes of the pixels.
        of_values: what it makes of the values, whose rounding convolutions may amplify.
    """

    files: np.ndarray
    pixels: np.ndarray
    values: np.ndarray
    of_files: Answers
    of_pixels: Answers
    of_values: Answers


def make_references(exportable: Exportable, images: Sequence[Image] = ()) -> References:
    """Runs the rebuilt model on the given images, and on drawn ones where they are too few.

    Raises:
        FileNotFoundError: an image is not there.
        ValueError: a file is not an image.
    """
    height, width, channels = exportable.image_shape
    contents = sample_files(images, size=(height, width))
    files = np.empty(len(contents), object)
    files[:] = contents
    decoded = [np.asarray(decoding.decode_image(content)) for content in contents]
    resized = np.stack(
        [
            image_files.resize_image(image, size=(height, width), antialias=exportable.antialias)
            for image in decoded
        ]
    )
    if channels != 3:  # no decoder makes these: any values will do
        resized = np.ascontiguousarray(np.resize(resized, (*resized.shape[:3], channels)))
    pixels = np.round(resized).astype(np.uint8)
    values = normalized(exportable, pixels)
    return References(
        files=files,
        pixels=pixels,
        values=values,
        of_files=_answers(exportable, exportable.from_pixels(resized)),
        of_pixels=_answers(exportable, exportable.from_pixels(pixels.astype(np.float32))),
        of_values=_answers(exportable, exportable.from_normalized(values)),
    )


def compare_rebuilt(
    model: keras.Model, exportable: Exportable, references: References
) -> messages.Check:
    """Compares the live model with its float32 copy, so that nothing is lost before the export."""
    images = as_original(exportable, references.pixels)
    live = np.asarray(keras.ops.convert_to_numpy(model(images, training=False)), np.float32)
    copied = references.of_pixels.of_batch[exportable.answers]
    if _is_float32(model):
        name, limit = "model and its float32 copy, relative difference", REBUILD_LIMIT
        measured = messages.relative_difference(live, copied)
        passed = measured <= limit
    else:
        name, limit = "model and its float32 copy, cosine", LOW_PRECISION_COSINE
        measured = messages.lowest_cosine(live, copied)
        passed = measured >= limit
    return messages.Check(name=name, measured=measured, limit=limit, passed=passed)


def outputs(exportable: Exportable, images: np.ndarray) -> dict[str, np.ndarray]:
    """Returns every output of the rebuilt model by name, for images as its network takes them."""
    found = dict(exportable.outputs()(images, training=False))
    if exportable.activation is not None:
        found["probabilities"] = exportable.activation(found["logits"])
    return {name: keras.ops.convert_to_numpy(value) for name, value in found.items()}


def as_original(exportable: Exportable, pixels: np.ndarray) -> np.ndarray:
    """Turns pixels 0..255 into what the original model takes, float32."""
    if exportable.takes == "pixels":
        return pixels.astype(np.float32)
    return normalized(exportable, pixels)


def normalized(exportable: Exportable, pixels: np.ndarray) -> np.ndarray:
    """Scales pixels 0..255 with the model's mean and deviation, float32."""
    return np.asarray(exportable.normalized(pixels.astype(np.float32)), np.float32)


def _answers(exportable: Exportable, images: np.ndarray) -> Answers:
    whole, first = outputs(exportable, images), outputs(exportable, images[:1])
    return Answers(of_batch=whole, of_first=first)


def _is_float32(model: keras.Model) -> bool:
    stored = all(weight.dtype == "float32" for weight in model.weights)
    return stored and all(layer.compute_dtype == "float32" for layer in layers_of(model))
