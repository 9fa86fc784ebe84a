"""Turns pixels into what the models expect, and what they return into names."""

import functools
import gzip
import importlib.resources
import sys
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

# Rows of labels/, by the size of the classifier: ImageNet-1k, and ImageNet-21k in Google's order.
_LABEL_FILES = {1000: "imagenet2012.txt", 21843: "imagenet21k.txt.gz"}
_DATA_FORMATS = (None, "channels_last", "channels_first")


def preprocess_input(x: Any, data_format: str | None = None) -> Any:
    """Scales pixels from 0..255 to [-1, 1], as the original does: (x - 127.5) / 127.5.

    Models built with `include_preprocessing=True` do this themselves.

    Example:
        >>> preprocess_input(np.array([[0, 255]], "uint8"))
        array([[-1.,  1.]], dtype=float32)

    Args:
        x: images of any shape and number type, values 0..255: a NumPy array, which stays as it is,
            a tensor of the Keras backend, or a TensorFlow tensor, as in `tf.data` pipelines.
        data_format: accepted for likeness with `keras.applications`; the result does not depend on
            where the channels are.

    Returns:
        An array or tensor of the same kind and shape, float32.

    Raises:
        ValueError: `data_format` is not "channels_last", "channels_first" or None.
    """
    if data_format not in _DATA_FORMATS:
        raise ValueError(
            f"data_format must be one of {list(_DATA_FORMATS)}. Received: {data_format!r}."
        )
    return (_float32(x) - 127.5) / 127.5


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
    scores = _numpy(predictions)
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
    return tuple((identifier, _first_word(words)) for identifier, words in rows)


def _first_word(words: str) -> str:
    return words.split(", ", 1)[0].replace(" ", "_")


def _float32(x: Any) -> Any:
    if isinstance(x, np.ndarray | np.generic | list | tuple | int | float):
        return np.asarray(x, np.float32)
    # In a tf.data pipeline tensors are TensorFlow's, whatever the Keras backend is.
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.is_tensor(x):
        return tensorflow.cast(x, "float32")
    return keras.ops.cast(x, "float32")


def _numpy(x: Any) -> npt.NDArray[Any]:
    array = np.asarray(x if isinstance(x, np.ndarray | list) else keras.ops.convert_to_numpy(x))
    return array if array.dtype == np.float64 else array.astype(np.float32)
