"""Varies batches with layers of keras-cv 0.9, for those who have pipelines of them.

keras-cv is at the end of its life. `Augmentation` and `mix_batch` do the same faster, from a seed.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def from_keras_cv(
    layers: Sequence[Any],
) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Returns a function of batches that applies layers of keras-cv one after the other.

    It goes into `Dataset.map`, after batching. The layers are made outside of it, once, because
    they own variables. keras-cv cannot be seeded, which a warning says: a run that uses it can
    neither be repeated nor resumed to the same bits.

    Example:
        >>> import keras_cv  # doctest: +SKIP
        >>> vary = from_keras_cv([keras_cv.layers.MixUp()])  # doctest: +SKIP
        >>> batches = batches.map(lambda x, y: vary(x, tf.one_hot(y, 10)))  # doctest: +SKIP

    Args:
        layers: layers that take {"images": pixels 0..255, "labels": probabilities}, float32, such
            as `RandAugment(value_range=(0, 255))`, `MixUp` and `CutMix`.

    Returns:
        Takes and gives images, float32 of shape (batch, height, width, 3), and targets, float32 of
        shape (batch, classes).

    Raises:
        TypeError: something among the layers is no layer.
    """
    layers = tuple(layers)
    for layer in layers:
        if not callable(layer) or isinstance(layer, type):
            raise TypeError(
                "from_keras_cv takes layers that are made already, such as "
                f"keras_cv.layers.MixUp(). Received: {layer!r}."
            )
    warnings.warn(
        "keras-cv cannot be seeded: this run can neither be repeated nor resumed to the same bits.",
        stacklevel=2,
    )

    def vary(images: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if targets.shape.rank != 2:
            raise ValueError(
                "keras-cv mixes probabilities of classes, (batch, classes); make them by "
                f"tf.one_hot. Received: targets of shape {targets.shape}."
            )
        batch = {"images": tf.cast(images, tf.float32), "labels": tf.cast(targets, tf.float32)}
        for layer in layers:
            batch = layer(batch, training=True)
        return (
            tf.ensure_shape(tf.cast(batch["images"], tf.float32), images.shape),
            tf.ensure_shape(tf.cast(batch["labels"], tf.float32), targets.shape),
        )

    return vary
