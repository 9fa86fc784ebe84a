"""Runs a model over labelled images: frozen features, log-probabilities."""

import keras
import numpy as np

from keras_vit.data import Split, antialias_of, evaluation_batches, naming_damaged
from keras_vit.evaluation.metrics import log_softmax
from keras_vit.evaluation.precision import sensible_batch_size
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
    _check_filled(split)
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
    _check_filled(split)
    outputs = _predict(model, split, batch_size, antialias=antialias_of(model))
    return log_softmax(outputs, model=model)


def _check_filled(split: Split) -> None:
    if not len(split):
        raise ValueError("There are no images to evaluate on; give a split that has some.")


def _predict(
    model: keras.Model, split: Split, batch_size: int | None, *, antialias: bool
) -> np.ndarray:
    size = tuple(model.input_shape[1:3])
    batch_size = batch_size or sensible_batch_size(model)
    batches = evaluation_batches(split, image_size=size, batch_size=batch_size, antialias=antialias)
    with naming_damaged(split):
        outputs = model.predict(batches.map(lambda images, targets: images), verbose=0)
    return np.asarray(outputs, np.float32)
