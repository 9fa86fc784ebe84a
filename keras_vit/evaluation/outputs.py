"""Runs a model: over labelled images or others, in a precision, and names what images show."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np

from keras_vit.data import (
    Split,
    antialias_of,
    evaluation_batches,
    image_size_of,
    naming_damaged,
    resize_image,
)
from keras_vit.layers.dense import dense_changes
from keras_vit.model import VisionTransformer


def frozen_features(
    model: keras.Model, split: Split, *, batch_size: int | None = None
) -> np.ndarray:
    """Returns the vector that a model makes of each image, before any classifier.

    Example:
        >>> import keras_vit
        >>> from keras_vit.data import load_digits
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8, num_heads=1,
        ...     num_layers=1, classes=10, include_preprocessing=True)
        >>> frozen_features(keras_vit.VisionTransformer(config), load_digits().test).shape
        (359, 8)

    Args:
        model: a `VisionTransformer` that pools, whose vector before the classifier is taken (with
            the pre-logits layer, if there is one), or any model with outputs (B, D), taken as they
            are. It takes pixels 0..255.
        split: the images.
        batch_size: images in a batch; None for `sensible_batch_size`.

    Returns:
        (count, D), float32.

    Raises:
        ValueError: the split is empty, or the model makes no vector of an image.
    """
    _check_not_empty(split)
    antialias = antialias_of(model)
    if isinstance(model, VisionTransformer) and model.config.classes is not None:
        model = keras.Model(model.input, model.get_layer("head").input)
    if len(model.output_shape) != 2:
        raise ValueError(
            "Features are one vector for each image, (batch, width); build the model with pooling. "
            f"Received: a model with outputs of shape {model.output_shape}."
        )
    return _predict(model, split, batch_size, antialias=antialias)


def log_probabilities(
    model: keras.Model, split: Split, *, batch_size: int | None = None
) -> np.ndarray:
    """Returns a classifier's log-probabilities for each image of a split, (count, C) in float64.

    Raises:
        ValueError: the split is empty.
    """
    _check_not_empty(split)
    outputs = _predict(model, split, batch_size, antialias=antialias_of(model))
    return log_softmax(outputs, model=model)


PRECISIONS = ("float32", "bfloat16")
_LARGEST_BATCH = 128

# A batch's largest arrays then stay below 1 GiB in L/16, whatever the size of its images.
_TOKENS_IN_BATCH = 2**15

# What lets a processor multiply bfloat16, by its name in /proc/cpuinfo.
_BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})


def log_softmax(outputs: np.ndarray, *, model: keras.Model) -> np.ndarray:
    """Turns a classifier's outputs, logits or probabilities, into log-probabilities in float64."""
    if not np.isfinite(outputs).all():
        raise ValueError(
            f"The model {model.name!r} answers with what is no number (NaN or infinite): its "
            "weights are damaged, or its training went astray; use another."
        )
    outputs = outputs.astype(np.float64)
    config = getattr(model, "config", None)
    if config is not None and config.classifier_activation == "softmax":
        outputs = np.log(np.maximum(outputs, np.finfo(np.float32).tiny))
    shifted = outputs - outputs.max(axis=-1, keepdims=True)
    normalised: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def in_precision(model: keras.Model, precision: str) -> keras.Model:
    """Returns the model, or a copy of it that computes and keeps its weights in another precision.

    bfloat16 is for processors with units for it, see `has_bfloat16_units`; without, it is slower
    than float32. The classifier stays in float32. On the digits, in a model of 8 epochs, the
    accuracy on 359 test images stayed the same, 61.28 %, and the loss rose from 1.1877 to 1.1879.

    Example:
        >>> import keras_vit
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8, num_heads=1,
        ...     num_layers=1, classes=2)
        >>> in_precision(VisionTransformer(config), "bfloat16").get_layer("block_0").dtype
        'bfloat16'

    Args:
        model: the model; any Keras model if it is to stay as it is.
        precision: "float32", which changes nothing, or "bfloat16".

    Raises:
        TypeError: a model that is not a `VisionTransformer` cannot be copied.
        ValueError: another precision, or the model has been adapted by LoRA or quantised.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}. Received: {precision!r}.")
    if precision == "float32":
        return model
    if not isinstance(model, VisionTransformer):
        raise TypeError(
            f"Only a VisionTransformer runs in {precision}. Received: {type(model).__name__}."
        )
    if dense_changes(model):
        raise ValueError(
            f"Only plain dense layers run in {precision}. Merge the adapter first, with "
            "keras_vit.merge_lora, or convert the model from before it was quantised. "
            f"Received: {model.name!r}, whose dense layers are adapted or quantised."
        )
    return model.copy(dtype=precision)


def has_bfloat16_units() -> bool:
    """Whether this machine's processor has units for bfloat16, as far as Linux tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return not _BFLOAT16_FLAGS.isdisjoint(text.split())


def sensible_batch_size(model: keras.Model) -> int:
    """Returns how many images to run at once: 128, or fewer where the model makes many tokens."""
    grid = getattr(getattr(model, "config", None), "grid", None)
    if grid is None:
        return _LARGEST_BATCH
    fitting = max(_TOKENS_IN_BATCH // (grid[0] * grid[1] + 1), 1)
    return min(_LARGEST_BATCH, int(2 ** (fitting.bit_length() - 1)))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One class that an image may show.

    Attributes:
        label: its name.
        probability: 0..1.
    """

    label: str
    probability: float


def predict(
    model: keras.Model, images: Sequence[np.ndarray], *, labels: Sequence[str], top: int = 5
) -> list[tuple[Prediction, ...]]:
    """Names the likeliest classes of each image, the likeliest first.

    Example:
        >>> import keras_vit, numpy as np
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8, num_heads=1,
        ...     num_layers=1, classes=2)
        >>> photo = np.zeros((480, 640, 3), np.uint8)
        >>> predict(keras_vit.VisionTransformer(config), [photo], labels=["cat", "dog"], top=1)
        [(Prediction(label='cat', probability=0.5),)]

    Args:
        model: takes pixels 0..255 of shape (batch, height, width, 3), gives logits or
            probabilities of shape (batch, classes).
        images: pixels 0..255 of shape (height, width, 3), of any size.
        labels: the name of each class, in the order of the model's outputs.
        top: how many classes to name; all of them if there are fewer.

    Returns:
        The predictions for each image.

    Raises:
        ValueError: the model has another number of classes, or an image another shape.
    """
    if model.output_shape[-1] != len(labels):
        raise ValueError(
            f"The model has {model.output_shape[-1]} classes. Received: {len(labels)} labels."
        )
    for image in images:
        if np.ndim(image) != 3 or np.shape(image)[2] != 3:
            raise ValueError(
                "An image has the shape (height, width, 3). "
                f"Received: an array of shape {np.shape(image)}."
            )
    size, antialias = image_size_of(model), antialias_of(model)
    predictions = []
    for image in images:  # one by one, so that an image's numbers do not depend on the others
        resized = resize_image(image, size=size, antialias=antialias)
        outputs = model(resized[None], training=False)
        probabilities = np.exp(log_softmax(np.asarray(outputs), model=model))[0]
        likeliest = np.argsort(-probabilities, kind="stable")[:top]
        predictions.append(
            tuple(Prediction(labels[place], float(probabilities[place])) for place in likeliest)
        )
    return predictions


def _check_not_empty(split: Split) -> None:
    if not len(split):
        raise ValueError("There are no images to evaluate on; give a split that has some.")


def _predict(
    model: keras.Model, split: Split, batch_size: int | None, *, antialias: bool
) -> np.ndarray:
    size = image_size_of(model)
    batch_size = batch_size or sensible_batch_size(model)
    batches = evaluation_batches(split, image_size=size, batch_size=batch_size, antialias=antialias)
    with naming_damaged(split):
        outputs = model.predict(batches.map(lambda images, targets: images), verbose=0)
    return np.asarray(outputs, np.float32)
