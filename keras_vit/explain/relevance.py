"""Which patches speak for a class: attention weighted by its gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.explain import attention, inside


def class_relevance(
    model: keras.Model, images: Any, classes: int | Sequence[int] | None = None
) -> np.ndarray:
    """Returns how much each patch speaks for a class.

    In each layer attention is weighted by the gradient of the class's score, what is negative is
    dropped, heads are averaged, and the result A is added up through the layers as R + A R
    (Chefer et al., arXiv 2103.15679, Equations 5 and 6).

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> from keras_vit.model import VisionTransformer
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=2, classes=5)
        >>> class_relevance(VisionTransformer(config), np.zeros((2, 16, 24, 3)), [0, 4]).shape
        (2, 2, 3)

    Args:
        model: a classifier: a `VisionTransformer`, or any Keras model with one inside and outputs
            (B, C).
        images: (B, H, W, channels) as that model takes them.
        classes: the class asked about: one, one for each image, or None for the likeliest of each.

    Returns:
        (B, h, w), not negative, in units of the model's score. The score is the logit where the
        model is a `VisionTransformer`, softmax or not, and the model's output otherwise.

    Raises:
        ValueError: the model is not a classifier, or has no such class.
    """
    vit = inside.find_vit(model)
    targets = _targets(model, len(np.asarray(images)), classes)
    # The softmax of a sure classifier is flat: its logits have the gradient.
    name = "logits" if vit.config.distillation_token else "head"
    scorer = vit.feature_extractor([name]) if model is vit and vit.config.classes else model
    parts, done = [], 0
    for batch in inside.image_batches(model, images):
        chosen = None if targets is None else targets[done : done + len(batch)]

        def run(batch: np.ndarray = batch, chosen: Any = chosen) -> tuple[Any, list[Any]]:
            heard = attention.listen(scorer, vit, batch)
            outputs = heard.outputs[name] if isinstance(heard.outputs, dict) else heard.outputs
            return _score(outputs, chosen), [*heard.blocks, *heard.pooling]

        weighted = [_positive_part(*pair) for pair in _with_gradients(run)]
        pooling = weighted.pop() if vit.config.pooling == "map" else None
        row = attention.answer_row(vit.config, pooling, _accumulated(weighted))
        parts.append(attention.on_grid(vit.config, row))
        done += len(batch)
    return np.concatenate(parts)


def _targets(
    model: keras.Model, images: int, classes: int | Sequence[int] | None
) -> np.ndarray | None:
    shape = model.output_shape
    if not isinstance(shape, tuple) or len(shape) != 2:
        raise ValueError(
            "Class relevance needs a classifier with outputs of shape (batch, classes). "
            f"Received: a model with outputs of shape {shape}."
        )
    if classes is None:
        return None
    targets = np.asarray(classes, np.int64)
    if targets.shape not in ((), (images,)):
        raise ValueError(
            f"classes must be one class, or one for each of the {images} images. "
            f"Received: classes={classes!r}."
        )
    wrong = targets[(targets < 0) | (targets >= shape[1])]
    if wrong.size:
        raise ValueError(
            f"There is no class {wrong.flat[0]}; the model has {shape[1]}, numbered from 0."
        )
    return np.broadcast_to(targets, (images,))


def _score(outputs: Any, targets: np.ndarray | None) -> Any:
    """Sums the scores of the images' classes; no image sees another, so gradients stay apart."""
    if targets is None:
        targets = np.asarray(keras.ops.convert_to_numpy(keras.ops.argmax(outputs, axis=-1)))
    chosen = keras.ops.one_hot(targets, outputs.shape[-1], dtype="float32")
    return keras.ops.sum(keras.ops.cast(outputs, "float32") * chosen)


def _with_gradients(
    run: Callable[[], tuple[Any, list[Any]]],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns each attention weight and the gradient of the score with respect to it."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "Class relevance differentiates with TensorFlow; set KERAS_BACKEND=tensorflow. "
            f"Received: the backend {keras.backend.backend()!r}."
        )
    import tensorflow as tf

    with tf.GradientTape() as tape:
        score, weights = run()
    gradients = tape.gradient(score, weights, unconnected_gradients="zero")
    return [
        (inside.to_numpy(weight), inside.to_numpy(gradient))
        for weight, gradient in zip(weights, gradients, strict=True)
    ]


def _positive_part(weights: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(weights * gradients, 0).mean(axis=1))  # (B, N, N)


def _accumulated(weighted: list[np.ndarray]) -> np.ndarray:
    tokens = weighted[0].shape[-1]
    relevance = np.broadcast_to(np.eye(tokens), weighted[0].shape)
    for attention_of_layer in weighted:
        relevance = relevance + attention_of_layer @ relevance
    return relevance
