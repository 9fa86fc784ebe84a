"""Makes images to compare an artefact and its model on, and the model's outputs for them."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_vit.backend.private import layers_of
from keras_vit.data import decoding, header
from keras_vit.data import images as image_files
from keras_vit.exporting.clean import messages
from keras_vit.exporting.rebuild import Exportable

# A file, or pixels 0..255, uint8 (height, width, 3).
Image = str | Path | np.ndarray
COUNT = 8  # images in the largest batch
BATCH_SIZES = (1, 2, 3, COUNT)
CALIBRATION_LEAST = 16  # given images, from which on half of them are for calibration

# Images that decide about an artefact, at least and at most, where the model needs no more than so
# many multiplications for them: of artefacts in float32, and of those whose weights are rounded.
GATE_COUNTS = (32, 512)
FLOAT_WORK, ROUNDED_WORK = 1.5e11, 1e12
_GATE_BYTES = 100_000_000  # of these images in float32

# The difference of a float32 model and its copy, relative to the largest output.
REBUILD_LIMIT = 1e-4
# Models in bfloat16 and float16 have 8 and 11 bits, quantised ones round their inputs too: their
# float32 copies are more accurate.
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
    resized = _with_channels(resized, channels)  # no file has other numbers of them
    pixels = np.round(resized).astype(np.uint8)
    values = exportable.normalized(pixels.astype(np.float32))
    of_pixels = _answers(exportable, exportable.from_pixels(pixels.astype(np.float32)))
    of_values = of_pixels  # what a network of normalised pixels gets is the same
    if exportable.network_takes == "pixels":
        of_values = _answers(exportable, exportable.from_normalized(values))
    return References(
        files=files,
        pixels=pixels,
        values=values,
        of_files=_answers(exportable, exportable.from_pixels(resized)),
        of_pixels=of_pixels,
        of_values=of_values,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GateImages:
    """Images that decide about an artefact, and the rebuilt model's outputs for them.

    Attributes:
        pixels: uint8 (B, H, W, C).
        targets: their true classes int (B,), -1 where unknown.
        outputs: the outputs by name.
        about: where the images are from.
    """

    pixels: np.ndarray
    targets: np.ndarray
    outputs: dict[str, np.ndarray]
    about: str


def make_gate_images(
    exportable: Exportable,
    images: Sequence[Image] = (),
    targets: Sequence[int] = (),
    *,
    work: float = FLOAT_WORK,
) -> GateImages:
    """Chooses the given images, or makes such as resemble photographs where there are too few.

    Of sixteen images and more every second one: the others are for `calibration_pixels`.

    Args:
        exportable: the rebuilt model.
        images: those that the model will see, at best.
        targets: their true classes; empty if unknown.
        work: multiplications to spend on the model's outputs.
    """
    start, step = (1, 2) if len(images) >= CALIBRATION_LEAST else (0, 1)
    chosen, known = list(images)[start::step], list(targets)[start::step]
    most, least = _counts(exportable, work)
    order = np.random.default_rng(0).permutation(len(chosen))[:most]
    pixels = _given_pixels(exportable, [chosen[place] for place in order])
    drawn = max(least - len(pixels), 0)
    pixels = np.concatenate([pixels, _drawn_pixels(exportable, drawn)])
    true = [known[place] if known else -1 for place in order] + [-1] * drawn
    batches = [
        outputs(
            exportable, exportable.from_pixels(pixels[place : place + COUNT].astype(np.float32))
        )
        for place in range(0, len(pixels), COUNT)
    ]
    parts = [f"{len(order)} of {len(images)} given"] * bool(len(order)) + [f"{drawn} drawn"] * bool(
        drawn
    )
    return GateImages(
        pixels=pixels,
        targets=np.array(true, np.int64),
        outputs={name: np.concatenate([part[name] for part in batches]) for name in batches[0]},
        about=", ".join(parts),
    )


def calibration_pixels(exportable: Exportable, images: Sequence[Image], *, most: int) -> np.ndarray:
    """Returns float32 pixels 0..255 of given images that decide nothing, or of drawn ones."""
    if len(images) < CALIBRATION_LEAST:
        count = min(most, GATE_COUNTS[0])
        return _drawn_pixels(exportable, count, seed=10_000).astype(np.float32)
    return _given_pixels(exportable, list(images)[0::2][:most]).astype(np.float32)


def compare_rebuilt(
    model: keras.Model, exportable: Exportable, references: References
) -> messages.Check:
    """Compares the live model with its float32 copy."""
    images = exportable.to_original(references.pixels)
    live = np.asarray(keras.ops.convert_to_numpy(model(images, training=False)), np.float32)
    copied = references.of_pixels.of_batch[exportable.answers]
    layers = layers_of(model)
    dtypes = {weight.dtype for weight in model.weights}
    dtypes |= {layer.compute_dtype for layer in layers}
    is_quantised = any(getattr(layer, "quantization_mode", None) for layer in layers)
    if dtypes == {"float32"} and not is_quantised:
        name, limit = "model and its float32 copy, relative difference", REBUILD_LIMIT
        measured = messages.relative_difference(live, copied)
        passed = measured <= limit
    else:
        name, limit = "model and its float32 copy, cosine", LOW_PRECISION_COSINE
        measured = messages.lowest_cosine(live, copied)
        passed = measured >= limit
    return messages.Check(name=name, measured=measured, limit=limit, passed=passed)


def file_bytes(image: Image) -> bytes:
    """Returns the content of a JPEG or PNG file, or a PNG of the pixels of any other image."""
    if isinstance(image, np.ndarray):
        return bytes(tf.io.encode_png(image).numpy())
    pixels = image_files.read_image(image)  # raises a clear error if it is not an image
    contents = Path(image).read_bytes()
    is_taken = contents.startswith((header.JPEG, header.PNG))
    return contents if is_taken else bytes(tf.io.encode_png(pixels).numpy())


def resize_files(exportable: Exportable, files: Iterable[bytes]) -> np.ndarray:
    """Decodes and resizes image files as evaluation does: float32 (B, height, width, 1 or 3)."""
    size, antialias = exportable.image_shape[:2], exportable.input_config.antialias
    images = [np.asarray(decoding.decode_image(content)) for content in files]
    resized = np.stack(
        [image_files.resize_image(image, size=size, antialias=antialias) for image in images]
    )
    is_grey = exportable.image_shape[2] == 1
    return np.asarray(image_files.to_grey(resized)) if is_grey else resized


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


def draw_scene(seed: int, *, height: int, width: int) -> np.ndarray:
    """Draws an image with the statistics of photographs, uint8 (height, width, 3).

    Its detail falls with the frequency, it has edges, and a light, a contrast and a tint of its
    own: a model answers such images more differently than it answers smooth ones.
    """
    generator = np.random.default_rng(seed)
    scene = np.zeros((height, width, 3), np.float32)
    fall = generator.uniform(0.5, 1.2)
    for cells in 2 ** np.arange(1, int(np.log2(max(height, width, 2))) + 1):
        coarse = generator.normal(size=(1, cells, cells, 3)).astype(np.float32)
        scene += np.asarray(tf.image.resize(coarse, (height, width), method="bicubic")[0]) * (
            (2 / cells) ** fall
        )
    rows, columns = np.mgrid[:height, :width] / max(height, width)
    for _ in range(generator.integers(1, 5)):
        angle, row, column = generator.uniform(0, [2 * np.pi, 1, 1])
        side = np.cos(angle) * (columns - column) + np.sin(angle) * (rows - row) > 0
        scene[side] += generator.normal(size=3)
    scene *= generator.uniform(20, 70) / scene.std()
    scene += generator.uniform(60, 190) + 20 * generator.normal(size=3)
    return np.asarray(np.clip(scene, 0, 255), np.uint8)


def _counts(exportable: Exportable, work: float) -> tuple[int, int]:
    """Returns how many images may decide, and how many must."""
    height, width, channels = exportable.image_shape
    # Each weight takes part once for each token, or for fewer.
    each = exportable.parameter_bytes / 4 * exportable.input_config.num_tokens
    least, most = GATE_COUNTS
    most = min(most, _GATE_BYTES // (4 * height * width * channels))
    most = max(min(most, int(work / each)), COUNT)
    return most, min(least, most)


def _given_pixels(exportable: Exportable, images: Sequence[Image]) -> np.ndarray:
    height, width, channels = exportable.image_shape
    if not images:
        return np.zeros((0, height, width, channels), np.uint8)
    resized = resize_files(exportable, [file_bytes(image) for image in images])
    return _with_channels(np.round(resized), channels).astype(np.uint8)


def _drawn_pixels(exportable: Exportable, count: int, *, seed: int = 0) -> np.ndarray:
    height, width, channels = exportable.image_shape
    scenes = [draw_scene(seed + index, height=height, width=width) for index in range(count)]
    shaped = np.array(scenes, np.uint8).reshape(count, height, width, 3)
    return _with_channels(shaped, channels)


def _with_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    if channels == 1:
        return np.asarray(pixels.mean(axis=-1, keepdims=True), pixels.dtype)
    return pixels[..., np.arange(channels) % 3]


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
        *map(tf.io.encode_png, pixels[6:]),
    ]
    return [bytes(file.numpy()) for file in encoded]
