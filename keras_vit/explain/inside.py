"""Finds the Vision Transformer inside a user's model, and lets a caller listen while it runs."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.layers.listening import Heard, listening
from keras_vit.model import VisionTransformer

BATCH_SIZE = 8


def find_vit(model: keras.Model) -> VisionTransformer:
    """Returns the one Vision Transformer that a model is or contains, however deep.

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> config = ViTConfig(input_shape=(16, 16, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=None)
        >>> vit = VisionTransformer(config)
        >>> find_vit(keras.Sequential([vit, keras.layers.Dense(2)])) is vit
        True

    Raises:
        ValueError: the model contains none, or more than one.
    """
    found = {id(vit): vit for vit in _vits(model)}
    if len(found) != 1:
        raise ValueError(
            f"The model {model.name!r} contains {len(found)} Vision Transformers of keras_vit, not "
            "one; give a model with exactly one, or the VisionTransformer itself."
        )
    return next(iter(found.values()))


def _vits(layer: Any) -> Iterator[VisionTransformer]:
    if isinstance(layer, VisionTransformer):
        yield layer
        return
    for inner in getattr(layer, "layers", ()):
        if isinstance(inner, keras.layers.Layer):
            yield from _vits(inner)


def image_batches(model: keras.Model, images: Any) -> Iterator[np.ndarray]:
    """Yields images in small batches, resampled to the size that the model takes.

    Raises:
        ValueError: the images are not of shape (B, H, W, channels).
    """
    images = np.asarray(images)
    if images.ndim != 4 or not len(images):
        raise ValueError(
            "Images have the shape (batch, height, width, channels), at least one of them; add an "
            f"axis to a single image: image[None]. Received: shape {images.shape}."
        )
    size = image_size(model)
    if size is not None and images.shape[1:3] != size:
        warnings.warn(
            f"The images are {images.shape[1]}x{images.shape[2]} pixels; they were resampled to "
            f"{size[0]}x{size[1]}, the size that the model takes.",
            stacklevel=3,
        )
        images = resample(images, size, antialias=find_vit(model).config.antialias)
    for start in range(0, len(images), BATCH_SIZE):
        yield images[start : start + BATCH_SIZE]


def resample(images: np.ndarray, size: tuple[int, ...], *, antialias: bool) -> np.ndarray:
    """Resizes images (B, H, W, channels) to (height, width), as `keras_vit.data.resize_image`."""
    shrinks = images.shape[1] > size[0] or images.shape[2] > size[1]
    resized = keras.ops.image.resize(
        images.astype(np.float32),
        size,
        antialias=antialias and shrinks,
        data_format="channels_last",
    )
    return np.asarray(keras.ops.convert_to_numpy(resized))


def image_size(model: keras.Model) -> tuple[int, int] | None:
    """Returns the (height, width) that a model takes, or None if it says nothing about them."""
    try:
        shape = model.input_shape
    except (AttributeError, ValueError):
        return None
    if not isinstance(shape, tuple) or len(shape) != 4 or None in shape[1:3]:
        return None
    return shape[1], shape[2]


def run(model: keras.Model, images: Any, layers: Sequence[keras.layers.Layer]) -> tuple[Any, Heard]:
    """Runs a model once, eagerly; returns its answer, and what these layers told on the way.

    The model stays as it is, so it pays nothing when nobody listens, and other threads may call it.

    Raises:
        ValueError: a layer was not called, or only inside a compiled function.
    """
    with listening(*layers) as heard:
        outputs = model(images, training=False)
    silent = [layer.path for layer, values in heard.items() if not values]
    if silent:
        raise ValueError(
            f"The model {model.name!r} did not run its layer {silent[0]!r} eagerly, so nothing can "
            "be read from it; call the Vision Transformer outside of tf.function, or give it alone."
        )
    return outputs, heard


def choose(wanted: int | Sequence[int] | None, count: int, *, word: str) -> list[int]:
    """Returns the indices asked for: one, several, or None for all; -1 is the last.

    Raises:
        ValueError: there is no such layer or head.
    """
    if wanted is None:
        return list(range(count))
    indices = [wanted] if isinstance(wanted, int) else list(wanted)
    wrong = [index for index in indices if not -count <= index < count]
    if wrong or not indices:
        raise ValueError(
            f"There is no {word} {wrong[0] if wrong else indices!r}; the model has {count}, "
            f"numbered 0 to {count - 1}, or -1 for the last."
        )
    return [index % count for index in indices]


def to_numpy(tensor: Any) -> np.ndarray:
    """Returns a tensor of any precision as a float32 array."""
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32")))
