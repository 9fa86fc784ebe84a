"""Runs the model itself on a few images: what its artefacts must answer."""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np

from keras_vit.data import images as image_files
from keras_vit.export import samples
from keras_vit.export.clean import measures
from keras_vit.export.clean import request as requests
from keras_vit.export.rebuild import Exportable

BATCH_SIZES = (1, 2, 3, samples.COUNT)
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


def make_references(exportable: Exportable, images: Sequence[samples.Image] = ()) -> References:
    """Runs the rebuilt model on the given images, and on drawn ones where they are too few.

    Raises:
        FileNotFoundError: an image is not there.
        ValueError: a file is not an image.
    """
    height, width, channels = exportable.image_shape
    contents = samples.sample_files(images, size=(height, width))
    files = np.empty(len(contents), object)
    files[:] = contents
    decoded = [np.asarray(image_files.decode_image(content)) for content in contents]
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
) -> requests.Check:
    """Compares the live model with its float32 copy, so that nothing is lost before the export."""
    images = as_original(exportable, references.pixels)
    live = np.asarray(keras.ops.convert_to_numpy(model(images, training=False)), np.float32)
    copied = references.of_pixels.of_batch[exportable.answers]
    if _is_float32(model):
        name, limit = "model and its float32 copy, relative difference", REBUILD_LIMIT
        measured = measures.relative_difference(live, copied)
        passed = measured <= limit
    else:
        name, limit = "model and its float32 copy, cosine", LOW_PRECISION_COSINE
        measured = measures.lowest_cosine(live, copied)
        passed = measured >= limit
    return requests.Check(name=name, measured=measured, limit=limit, passed=passed)


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
    return stored and all(layer.compute_dtype == "float32" for layer in model._flatten_layers())
