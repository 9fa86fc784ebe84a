"""Turns pixels into what the models expect, and what they return into names.

Shapes: images (B, H, W, channels) of H and W pixels, scores (B, C) of C classes.
"""

import functools
import gzip
import importlib.resources
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

# Rows of labels/, by the size of the classifier: ImageNet-1k, and ImageNet-21k in Google's order.
_LABEL_FILES = {1000: "imagenet2012.txt", 21843: "imagenet21k.txt.gz"}
LABELLED = tuple(_LABEL_FILES)
_DATA_FORMATS = (None, "channels_last", "channels_first")


def preprocess_input(
    x: Any,
    data_format: str | None = None,
    *,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
) -> Any:
    """Turns pixels 0..255 into what the network computes on: (x / 255 - mean) / std.

    The defaults are the original's, which make values in [-1, 1]. A function does not know the
    model: `VisionTransformer.preprocess_input` takes mean and deviation from its config, and models
    built with `include_preprocessing=True` do all of it themselves.

    Example:
        >>> preprocess_input(np.array([[0, 255]], "uint8"))
        array([[-1.,  1.]], dtype=float32)

    Args:
        x: images of any shape and number type, values 0..255: a NumPy array, which stays as it is,
            a tensor of the Keras backend, or a TensorFlow tensor, as in `tf.data` pipelines.
        data_format: where the channels are: "channels_last", which None stands for, or
            "channels_first". It matters where `mean` or `std` differs between channels.
        mean: what to subtract, in units of 1 (pixels divided by 255); one number, or one for each
            channel.
        std: what to divide by, in the same units.

    Returns:
        An array or tensor of the same kind and shape, float32.

    Raises:
        ValueError: `data_format` is not "channels_last", "channels_first" or None; or mean and
            deviation are not finite, a deviation is not above 0, or they do not fit the channels.
    """
    if data_format not in _DATA_FORMATS:
        raise ValueError(
            f"data_format must be one of {list(_DATA_FORMATS)}. Received: {data_format!r}."
        )
    pixels = as_float32(x)
    axis = -3 if data_format == "channels_first" else -1
    levels, scale = (
        _of_channels(name, value, tuple(pixels.shape), axis)
        for name, value in (("mean", mean), ("std", std))
    )
    if np.min(scale) <= 0:
        raise ValueError(f"std must be above 0. Received: std={std!r}.")
    return (pixels - levels) / scale


def decode_predictions(predictions: Any, top: int = 5) -> list[list[tuple[str, str, float]]]:
    """Names the classes with the highest scores.

    Example:
        >>> scores = np.zeros((1, 1000))
        >>> scores[0, 207] = 0.9
        >>> decode_predictions(scores, top=1)
        [[('n02099601', 'golden_retriever', 0.9)]]

    Args:
        predictions: (B, C) scores of any kind, C = 1000 for ImageNet-1k or 21843 for ImageNet-21k
            in the order of Google's classifiers.
        top: how many classes to name for each sample.

    Returns:
        For each sample a list of (WordNet identifier, first word of the class, score), highest
        score first.

    Raises:
        ValueError: the scores are not of such a shape, or `top` is not from 1 to C.
    """
    is_array = isinstance(predictions, np.ndarray | list)
    scores = np.asarray(predictions if is_array else keras.ops.convert_to_numpy(predictions))
    if scores.dtype != np.float64:
        scores = scores.astype(np.float32)
    if scores.ndim != 2 or scores.shape[1] not in _LABEL_FILES:
        raise ValueError(
            "decode_predictions takes scores of shape (batch, 1000) or (batch, 21843). "
            f"Received: shape {scores.shape}."
        )
    if not 1 <= top <= scores.shape[1]:
        raise ValueError(f"top must be from 1 to {scores.shape[1]}. Received: top={top!r}.")
    labels = class_labels(scores.shape[1])
    best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    return [
        [(*labels[index], float(sample[index])) for index in indices]
        for sample, indices in zip(scores, best, strict=True)
    ]


def as_float32(x: Any) -> Any:
    """Returns an array or tensor of the same kind in float32."""
    if isinstance(x, np.ndarray | np.generic | list | tuple | int | float):
        return np.asarray(x, np.float32)
    # In a tf.data pipeline tensors are TensorFlow's, whatever the Keras backend is.
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.is_tensor(x):
        return tensorflow.cast(x, "float32")
    return keras.ops.cast(x, "float32")


@functools.cache
def class_labels(classes: int) -> tuple[tuple[str, str], ...]:
    """Returns (WordNet identifier, first word) of every class, in the order of the classifier.

    Example:
        >>> class_labels(1000)[281]
        ('n02123045', 'tabby')

    Args:
        classes: 1000 for ImageNet-1k or 21843 for ImageNet-21k.

    Raises:
        ValueError: there are no names for that number of classes.
    """
    if classes not in _LABEL_FILES:
        raise ValueError(
            f"There are names for {' and '.join(map(str, _LABEL_FILES))} classes. "
            f"Received: classes={classes!r}."
        )
    file = importlib.resources.files("keras_vit") / "labels" / _LABEL_FILES[classes]
    content = file.read_bytes()
    text = (gzip.decompress(content) if file.name.endswith(".gz") else content).decode()
    rows = (line.split("\t") for line in text.splitlines())
    return tuple((name, words.split(", ", 1)[0].replace(" ", "_")) for name, words in rows)


def _of_channels(name: str, value: float | Sequence[float], shape: Any, axis: int) -> Any:
    """Returns 255 times the value: a number, or an array that broadcasts along the channels."""
    numbers = np.asarray(value, np.float64)
    if numbers.ndim > 1 or not numbers.size or not np.isfinite(numbers).all():
        raise ValueError(
            f"{name} must be a finite number, or one for each channel. Received: {name}={value!r}."
        )
    if np.all(numbers == numbers.flat[0]):
        return float(255 * numbers.flat[0])
    if len(shape) < -axis or shape[axis] not in (None, numbers.size):
        raise ValueError(
            f"{name} has {numbers.size} numbers, one for each channel, and the images of shape "
            f"{shape} have other channels; give their layout by data_format, or one number."
        )
    return np.reshape(255 * numbers, (-1, *(1,) * (-axis - 1))).astype(np.float32)
