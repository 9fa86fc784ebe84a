"""Makes images to compare an artefact and its model on, and the model's outputs for them."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit.backend.private import layers_of
from keras_vit.data import images as image_files
from keras_vit.exporting.clean import agreement
from keras_vit.exporting.clean.agreement import Check
from keras_vit.exporting.rebuild import Exportable

# A file, or pixels 0..255, uint8 (height, width, 3).
Image = str | Path | np.ndarray
COUNT = 8  # images in the largest batch
CALIBRATION_LEAST = 16  # given images, from which on half of them are for calibration
CALIBRATION_MOST = 256  # images that set the ranges of int8 throughout

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
class Batch:
    """Inputs of one kind for `COUNT` images, and the rebuilt model's outputs for them by name.

    Attributes:
        inputs: (B, ...).
        batched: the outputs for all of them in one batch.
        of_first: for the first image alone, where convolutions sum in another order (R50+B/16:
            logits of 3.5 change by 5.6e-5, in the model and in its artefact).
    """

    inputs: np.ndarray
    batched: dict[str, np.ndarray]
    of_first: dict[str, np.ndarray]


def make_batch(exportable: Exportable, inputs: np.ndarray, images: np.ndarray) -> Batch:
    """Runs the rebuilt model on images, which are inputs in the range of its network."""
    batched, of_first = (outputs(exportable, each) for each in (images, images[:1]))
    return Batch(inputs=inputs, batched=batched, of_first=of_first)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VerificationImages:
    """Images that decide about an artefact, and the rebuilt model's outputs for them.

    Attributes:
        pixels: uint8 (B, H, W, C).
        targets: their true classes int (B,), -1 where unknown.
        outputs: the outputs by name.
        of_first: those of the first image alone.
        about: where the images are from.
    """

    pixels: np.ndarray
    targets: np.ndarray
    outputs: dict[str, np.ndarray]
    of_first: dict[str, np.ndarray]
    about: str

    @property
    def batch(self) -> Batch:
        """The first images, as pixels."""
        batched = {name: value[:COUNT] for name, value in self.outputs.items()}
        return Batch(inputs=self.pixels[:COUNT], batched=batched, of_first=self.of_first)


def make_verification_images(
    exportable: Exportable,
    images: Sequence[Image] = (),
    targets: Sequence[int] = (),
    *,
    work: float = FLOAT_WORK,
) -> VerificationImages:
    """Chooses the given images, or makes such as resemble photographs where there are too few.

    Of sixteen images and more every second one: the others are for `make_calibration`.

    Args:
        exportable: the rebuilt model.
        images: those that the model will see, at best.
        targets: their true classes; empty if unknown.
        work: multiplications to spend on the model's outputs.
    """
    start, step = (1, 2) if len(images) >= CALIBRATION_LEAST else (0, 1)
    chosen, known = list(images)[start::step], list(targets)[start::step]
    height, width, channels = exportable.image_shape
    # Each weight takes part once for each token, or for fewer.
    each = exportable.parameter_bytes / 4 * exportable.input_config.num_tokens
    least, most = GATE_COUNTS
    most = min(most, _GATE_BYTES // (4 * height * width * channels))
    most = max(min(most, int(work / each)), COUNT)
    # The same images each time, so that chance does not decide about an export.
    order = np.random.default_rng(0).permutation(len(chosen))[:most]
    drawn = max(min(least, most) - len(order), 0)
    scenes = [draw_scene(seed, height=height, width=width) for seed in range(drawn)]
    pixels = to_pixels(exportable, [*(file_bytes(chosen[place]) for place in order), *scenes])
    true = [known[place] if known else -1 for place in order] + [-1] * drawn
    inputs = exportable.to_network(pixels.astype(np.float32), "pixels")
    starts = range(0, len(inputs), COUNT)
    batches = [outputs(exportable, inputs[start : start + COUNT]) for start in starts]
    counts = {f"{len(order)} of {len(images)} given": len(order), f"{drawn} drawn": drawn}
    return VerificationImages(
        pixels=pixels,
        targets=np.array(true, np.int64),
        outputs={name: np.concatenate([part[name] for part in batches]) for name in batches[0]},
        of_first=outputs(exportable, inputs[:1]),
        about=", ".join(text for text, count in counts.items() if count),
    )


def make_calibration(exportable: Exportable, images: Sequence[Image]) -> np.ndarray:
    """Returns the images that decide nothing, as the original model takes them."""
    chosen = list(images)[::2][:CALIBRATION_MOST]
    return exportable.to_original(to_pixels(exportable, map(file_bytes, chosen)))


def to_pixels(exportable: Exportable, images: Iterable[bytes | np.ndarray]) -> np.ndarray:
    """Returns images as a model takes pixels 0..255, rounded to uint8 (B, H, W, C)."""
    return np.round(resize_images(exportable, images)).astype(np.uint8)


def compare_rebuilt(model: keras.Model, exportable: Exportable, batch: Batch) -> Check:
    """Compares the live model with its float32 copy, on pixels."""
    images = exportable.to_original(batch.inputs)
    live = np.asarray(keras.ops.convert_to_numpy(model(images, training=False)), np.float32)
    copied = batch.batched[exportable.answers]
    layers = layers_of(model)
    dtypes = {weight.dtype for weight in model.weights}
    dtypes |= {layer.compute_dtype for layer in layers}
    is_quantised = any(getattr(layer, "quantization_mode", None) for layer in layers)
    if dtypes == {"float32"} and not is_quantised:
        name = "model and its float32 copy, relative difference"
        largest = max(float(np.abs(copied).max()), 1e-30)
        relative = agreement.largest_difference(live, copied) / largest
        return Check.at_most(name, relative, REBUILD_LIMIT)
    rows, others = (each.reshape(len(each), -1).astype(np.float64) for each in (live, copied))
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(others, axis=1)
    cosine = float(((rows * others).sum(axis=1) / lengths).min())
    return Check.at_least("model and its float32 copy, cosine", cosine, LOW_PRECISION_COSINE)


def _png(pixels: np.ndarray) -> bytes:
    return bytes(tf.io.encode_png(pixels).numpy())


def file_bytes(image: Image) -> bytes:
    """Returns the content of a JPEG or PNG file, or a PNG of the pixels of any other image."""
    if isinstance(image, np.ndarray):
        return _png(image)
    pixels = image_files.read_image(image)  # raises a clear error if it is not an image
    contents = Path(image).read_bytes()
    is_taken = contents.startswith((image_files.JPEG, image_files.PNG))
    return contents if is_taken else _png(pixels)


def resize_images(exportable: Exportable, images: Iterable[bytes | np.ndarray]) -> np.ndarray:
    """Decodes and resizes images as evaluation does: float32 (B, height, width, channels).

    An image is the content of a file, or pixels 0..255, uint8 (height, width, 3).
    """
    channels = exportable.image_shape[2]
    decoded = (
        image_files.decode_image(each) if isinstance(each, bytes) else each for each in images
    )
    resized = np.stack([image_files.resize_image(one, exportable.resizing) for one in decoded])
    if channels == 1:
        return np.asarray(to_grey(resized))
    return resized[..., np.arange(channels) % 3]  # no file has other numbers of them


def to_grey(images: Any) -> tf.Tensor:
    """Returns the luma of pixels (..., 3) as (..., 1), weighted as in Pillow's mode "L"."""
    red, green, blue = tf.split(images, 3, axis=-1)
    return 0.299 * red + 0.587 * green + 0.114 * blue  # Rec. ITU-R BT.601


def outputs(exportable: Exportable, images: np.ndarray) -> dict[str, np.ndarray]:
    """Returns every output of the rebuilt model by name, for inputs of its network."""
    tensors = exportable.named(exportable.outputs()(images, training=False))
    return {name: keras.ops.convert_to_numpy(value) for name, value in tensors.items()}


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


def make_files(exportable: Exportable, images: Sequence[Image]) -> np.ndarray:
    """Returns `COUNT` image files: evenly spread given ones, then such of several kinds."""
    count = min(len(images), COUNT)
    given = [file_bytes(images[index * len(images) // count]) for index in range(count)]
    height, width, _ = exportable.image_shape
    pixels = [
        draw_scene(seed, height=height + 7 * seed, width=max(width + 13 * seed - 20, 2))
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
    drawn = [bytes(file.numpy()) for file in encoded]
    return np.array(given + drawn[count:], object)
