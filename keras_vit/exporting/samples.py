"""Makes images to compare an artefact and its model on, and the model's outputs for them."""

import dataclasses
import struct
from collections.abc import Iterable, Sequence
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
COUNT = 8  # images in the largest batch
BATCH_SIZES = (1, 2, 3, COUNT)

# The difference of a float32 model and its copy, relative to the largest output.
REBUILD_LIMIT = 1e-4
# Models in bfloat16 and float16 have 8 and 11 bits: their float32 copies are more accurate.
LOW_PRECISION_COSINE = 0.99


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """Outputs by name ("logits", "probabilities", "features").

    Attributes:
        of_batch: for all images in one batch.
        of_first: for the first image alone, where convolutions sum in another order (R50+B/16:
            logits of 3.5 change by 5.6e-5, in the model and in its artefact).
    """

    of_batch: dict[str, np.ndarray]
    of_first: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class References:
    """Images and the rebuilt model's outputs for them.

    Attributes:
        files: encoded images, an object array (B,) of bytes.
        pixels: the same, decoded and resized as in evaluation, rounded to uint8 (B, H, W, C).
        values: the pixels, normalized with the model's mean and deviation, float32.
        of_files: outputs for the files.
        of_pixels: outputs for the pixels.
        of_values: outputs for the values, whose rounding convolutions may amplify.
    """

    files: np.ndarray
    pixels: np.ndarray
    values: np.ndarray
    of_files: Answers
    of_pixels: Answers
    of_values: Answers


def make_references(exportable: Exportable, images: Sequence[Image] = ()) -> References:
    """Runs the rebuilt model on `COUNT` images: evenly spread given ones, then random ones.

    Raises:
        FileNotFoundError: an image does not exist.
        ValueError: a file is not an image.
    """
    *size, channels = exportable.image_shape
    count = min(len(images), COUNT)
    user_files = [file_bytes(images[index * len(images) // count]) for index in range(count)]
    files = np.array(user_files + _random_files(size)[count:], object)
    resized = resize_files(exportable, files)
    if channels != 3:  # no file has them: any values are as good
        resized = np.ascontiguousarray(np.resize(resized, (*resized.shape[:3], channels)))
    pixels = np.round(resized).astype(np.uint8)
    values = exportable.normalized(pixels.astype(np.float32))
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
    """Compares the live model with its float32 copy."""
    images = exportable.to_original(references.pixels)
    live = np.asarray(keras.ops.convert_to_numpy(model(images, training=False)), np.float32)
    copied = references.of_pixels.of_batch[exportable.answers]
    dtypes = {weight.dtype for weight in model.weights}
    if dtypes | {layer.compute_dtype for layer in layers_of(model)} == {"float32"}:
        name, limit = "model and its float32 copy, relative difference", REBUILD_LIMIT
        measured = messages.relative_difference(live, copied)
        passed = measured <= limit
    else:
        name, limit = "model and its float32 copy, cosine", LOW_PRECISION_COSINE
        measured = messages.lowest_cosine(live, copied)
        passed = measured >= limit
    return messages.Check(name=name, measured=measured, limit=limit, passed=passed)


def file_bytes(image: Image) -> bytes:
    """Returns the content of an image file, or of a PNG of pixels."""
    if isinstance(image, np.ndarray):
        return bytes(tf.io.encode_png(image).numpy())
    image_files.read_image(image)  # raises a clear error if it is not an image
    return Path(image).read_bytes()


def resize_files(exportable: Exportable, files: Iterable[bytes]) -> np.ndarray:
    """Decodes and resizes image files as evaluation does: float32 (B, height, width, 3)."""
    size, antialias = exportable.image_shape[:2], exportable.input_config.antialias
    images = [np.asarray(decoding.decode_image(content)) for content in files]
    return np.stack(
        [image_files.resize_image(image, size=size, antialias=antialias) for image in images]
    )


def outputs(exportable: Exportable, images: np.ndarray) -> dict[str, np.ndarray]:
    """Returns every output of the rebuilt model by name, for inputs of its network."""
    tensors = dict(exportable.outputs()(images, training=False))
    if exportable.activation is not None:
        tensors["probabilities"] = exportable.activation(tensors["logits"])
    return {name: keras.ops.convert_to_numpy(value) for name, value in tensors.items()}


def draw(seed: int, *, height: int, width: int) -> np.ndarray:
    """Draws a smooth coloured image, uint8 (height, width, 3)."""
    generator = np.random.default_rng(seed)
    coarse = generator.uniform(0, 255, (1, 5, 5, 3)).astype(np.float32)
    smooth = tf.image.resize(coarse, (height, width), method="bicubic")[0]
    return np.asarray(tf.cast(tf.clip_by_value(smooth, 0, 255), tf.uint8))


def _answers(exportable: Exportable, images: np.ndarray) -> Answers:
    return Answers(of_batch=outputs(exportable, images), of_first=outputs(exportable, images[:1]))


def _random_files(size: Sequence[int]) -> list[bytes]:
    """Makes `COUNT` images of several sizes, formats and numbers of channels."""
    height, width = size
    pixels = [
        draw(seed, height=height + 7 * seed, width=max(width + 13 * seed - 20, 2))
        for seed in range(COUNT)
    ]
    grey = np.uint8(np.round(pixels[2].mean(axis=-1, keepdims=True)))
    transparent = np.concatenate([pixels[3], pixels[3][..., :1]], axis=-1)
    encoded = [
        tf.io.encode_png(pixels[0]),
        tf.io.encode_jpeg(pixels[1], quality=92),
        tf.io.encode_jpeg(grey),
        tf.io.encode_png(transparent),
        tf.io.encode_png(grey),
        tf.io.encode_jpeg(pixels[5], quality=75),
        tf.io.encode_png(pixels[6]),
    ]
    return [bytes(file.numpy()) for file in encoded] + [_encode_bmp(pixels[7])]


def _encode_bmp(pixels: np.ndarray) -> bytes:
    """Encodes RGB pixels (height, width, 3) as an uncompressed 24-bit BMP."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, -(-3 * width // 4) * 4), np.uint8)  # rows are padded to 4 bytes
    rows[:, : 3 * width] = pixels[::-1, :, ::-1].reshape(height, -1)  # bottom first, blue first
    content = rows.tobytes()
    header = struct.pack("<2sIHHI", b"BM", 54 + len(content), 0, 0, 54)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(content), 0, 0, 0, 0)
    return header + info + content
