"""Shows what masked patch prediction has learnt: images, what was hidden, what was predicted."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.data import Split, evaluation_batches
from keras_vit.training.masked_patches import LEVELS, SMALL_SIDE, MaskedPatchModel, as_colors
from keras_vit.training.report import check_matplotlib

# What a hidden patch is drawn as: in [-1, 1].
_HIDDEN = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reconstructions:
    """What a model predicts of corrupted patches; pixels in [-1, 1] of shape (B, H, W, channels).

    Attributes:
        images: the images.
        hidden: the same, corrupted patches grey, whatever the model was given in their place.
        predicted: the same, in their place what the model predicts.
        wanted: the same, in their place what it should have predicted: their mean colour, their
            4x4 colours, or the pixels themselves.
        corrupted: (B, patches), 0 or 1.
    """

    images: np.ndarray
    hidden: np.ndarray
    predicted: np.ndarray
    wanted: np.ndarray
    corrupted: np.ndarray


def reconstruct(model: MaskedPatchModel, images: np.ndarray) -> Reconstructions:
    """Returns what a model makes of images whose patches are corrupted as in evaluation.

    Example:
        >>> from keras_vit import ViTConfig
        >>> model = MaskedPatchModel(ViTConfig(
        ...     input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16, num_heads=2,
        ...     num_layers=1))
        >>> reconstruct(model, np.zeros((2, 16, 24, 3), "float32")).predicted.shape
        (2, 16, 24, 3)

    Args:
        model: a masked patch model.
        images: (B, H, W, channels), as it takes them.
    """
    answer = model(images, training=False)
    predictions, corrupted = (
        np.asarray(keras.ops.convert_to_numpy(answer[key])) for key in ("predictions", "corrupted")
    )
    colors = as_colors(np.asarray(images, np.float32), model.config)
    pixels = np.asarray(keras.ops.convert_to_numpy(colors), np.float32)
    patches = _patches(pixels, model)  # (B, patches, stride, stride, channels)
    wanted = _colors(patches, model)
    where = corrupted.astype(bool)[..., None, None, None]
    parts = [np.full_like(patches, _HIDDEN), _predicted(predictions, model), wanted]
    hidden, predicted, wanted = (_image(np.where(where, part, patches), model) for part in parts)
    return Reconstructions(
        images=pixels, hidden=hidden, predicted=predicted, wanted=wanted, corrupted=corrupted
    )


def plot_reconstructions(model: MaskedPatchModel, split: Split, file: Path, *, count: int) -> None:
    """Draws some images of a split: what was hidden, what was predicted, what was to be predicted.

    Args:
        model: takes pixels 0..255.
        split: the images.
        file: the PNG file to write.
        count: how many, the first of the split.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib.figure

    count = min(count, len(split))
    size = model.config.input_shape[:2]
    batches = evaluation_batches(
        split, image_size=size, batch_size=count, antialias=model.config.antialias
    )
    batch, _ = next(iter(batches))
    found = reconstruct(model, batch.numpy())
    rows = {
        "image": found.images,
        "patches hidden": found.hidden,
        "predicted": found.predicted,
        f"target: {model.target.replace('_', ' ')}": found.wanted,
    }
    figure = matplotlib.figure.Figure(figsize=(1.3 * count + 1.1, 5.6), layout="constrained")
    grid = figure.subplots(len(rows), count, squeeze=False)
    for line, (name, images) in zip(grid, rows.items(), strict=True):
        line[0].set_ylabel(name)
        for axes, image in zip(line, images, strict=True):
            axes.imshow(np.clip((image + 1) / 2, 0, 1), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
    figure.savefig(file, dpi=120, format="png")


def _predicted(predictions: np.ndarray, model: MaskedPatchModel) -> np.ndarray:
    """Turns predictions into pixels: the likeliest colours, or the values as they are."""
    channels = model.config.input_shape[2]
    if model.target == "pixels":
        return _enlarged(predictions, model.config.stride, model)
    scores = predictions.reshape(*predictions.shape[:2], -1, LEVELS**channels)
    likeliest = scores.argmax(axis=-1)[..., None]
    places = LEVELS ** np.arange(channels - 1, -1, -1)
    levels = likeliest // places % LEVELS  # (B, patches, colours, channels)
    return _enlarged(_middle(levels), _side(model), model)


def _colors(patches: np.ndarray, model: MaskedPatchModel) -> np.ndarray:
    """Returns the patches as the target has them: coarser in space and colour, or as they are."""
    if model.target == "pixels":
        return patches
    side, stride = _side(model), model.config.stride
    parts = patches.reshape(*patches.shape[:2], side, stride // side, side, stride // side, -1)
    levels = np.clip(np.floor((parts.mean(axis=(3, 5)) + 1) / 2 * LEVELS), 0, LEVELS - 1)
    return _enlarged(_middle(levels), side, model)


def _side(model: MaskedPatchModel) -> int:
    return 1 if model.target == "mean_color" else SMALL_SIDE


def _middle(levels: np.ndarray) -> np.ndarray:
    """The middle of each of the levels that a colour is divided into, in [-1, 1]."""
    return ((levels + 0.5) / LEVELS * 2 - 1).astype(np.float32)


def _enlarged(values: np.ndarray, side: int, model: MaskedPatchModel) -> np.ndarray:
    """(B, patches, side * side * channels), in any shape -> (B, patches, stride, stride, ...)."""
    count, stride = values.shape[1], model.config.stride
    small = values.reshape(-1, count, side, side, model.config.input_shape[2])
    return small.repeat(stride // side, axis=2).repeat(stride // side, axis=3)


def _patches(images: np.ndarray, model: MaskedPatchModel) -> np.ndarray:
    (rows, columns), stride = model.config.grid, model.config.stride
    x = images.reshape(-1, rows, stride, columns, stride, images.shape[-1])
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, rows * columns, stride, stride, x.shape[-1])


def _image(patches: np.ndarray, model: MaskedPatchModel) -> np.ndarray:
    (rows, columns), stride = model.config.grid, model.config.stride
    x: Any = patches.reshape(-1, rows, columns, stride, stride, patches.shape[-1])
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return np.asarray(x.reshape(-1, *model.config.input_shape))
