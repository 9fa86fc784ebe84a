"""What attends to what: attention weights, rollout, distance, and relevance for a class."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.layers.attention import Records, changing, recording
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
        ValueError: the model contains none, or more than one, or one for images of any size.
    """
    vits = {id(vit): vit for vit in _vits(model)}
    if len(vits) != 1:
        raise ValueError(
            f"The model {model.name!r} contains {len(vits)} Vision Transformers of keras_vit, not "
            "one; give a model with exactly one, or the VisionTransformer itself."
        )
    vit = next(iter(vits.values()))
    _ = vit.config.image_size  # patches are laid out on its grid
    return vit


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
            f"The images are {sides(images.shape[1:3])}; they were resampled to {sides(size)}, the "
            "size that the model takes.",
            stacklevel=3,
        )
        images = resample(images, size, antialias=find_vit(model).config.antialias)
    for start in range(0, len(images), BATCH_SIZE):
        yield images[start : start + BATCH_SIZE]


def sides(size: Sequence[int]) -> str:
    """Returns (height, width) in words, the width first, as people say it.

    Example:
        >>> sides((480, 640))
        '640 pixels wide and 480 high'
    """
    return f"{size[1]} pixels wide and {size[0]} high"


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


def run(
    model: keras.Model, images: Any, layers: Sequence[keras.layers.Layer]
) -> tuple[Any, Records]:
    """Runs a model once, eagerly; returns its outputs, and what these layers computed.

    The model is not changed: it is as fast as before, and other threads may call it meanwhile.

    Raises:
        ValueError: a layer was not called, or only inside a compiled function.
    """
    with recording(*layers) as records:
        outputs = model(images, training=False)
    silent = [layer.path for layer, values in records.items() if not values]
    if silent:
        raise ValueError(
            f"The model {model.name!r} did not run its layer {silent[0]!r} eagerly, so nothing can "
            "be read from it; call the Vision Transformer outside of tf.function, or give it alone."
        )
    return outputs, records


def choose(selection: int | Sequence[int] | None, count: int, *, word: str) -> list[int]:
    """Returns the indices asked for: one, several, or None for all; -1 is the last.

    Raises:
        ValueError: there is no such layer or head.
    """
    if selection is None:
        return list(range(count))
    indices = [selection] if isinstance(selection, int) else list(selection)
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
        classes: the class to explain: one, one for each image, or None for the likeliest of each.

    Returns:
        (B, h, w), not negative, in units of the model's score. The score is the logit where the
        model is a `VisionTransformer`, softmax or not, and the model's output otherwise.

    Raises:
        ValueError: the model is not a classifier, or has no such class.
    """
    vit = find_vit(model)
    targets = _targets(model, len(np.asarray(images)), classes)
    # The softmax of a sure classifier is flat: its logits have the gradient.
    name = "logits" if vit.config.distillation_token else "head"
    scorer = vit.feature_extractor([name]) if model is vit and vit.config.classes else model
    parts, start = [], 0
    for batch in image_batches(model, images):
        batch_targets = None if targets is None else targets[start : start + len(batch)]

        def run(
            batch: np.ndarray = batch, batch_targets: Any = batch_targets
        ) -> tuple[Any, list[Any]]:
            attention = record_attention(scorer, vit, batch)
            outputs = (
                attention.outputs[name]
                if isinstance(attention.outputs, dict)
                else attention.outputs
            )
            return _score(outputs, batch_targets), [*attention.blocks, *attention.pooling]

        weights = [_positive_part(*pair) for pair in _with_gradients(run)]
        pooling = weights.pop() if vit.config.pooling == "map" else None
        row = answer_row(vit.config, pooling, _accumulate(weights))
        parts.append(on_grid(vit.config, row))
        start += len(batch)
    return np.concatenate(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionPass:
    """The attention weights of one forward pass, as tensors.

    Attributes:
        blocks: the attention weights (B, H, N, N) of each block.
        pooling: those of attention pooling, (B, H, 1, N); empty without it.
        outputs: those of the model.
    """

    blocks: list[Any]
    pooling: list[Any]
    outputs: Any


def attention_weights(
    model: keras.Model,
    images: Any,
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
) -> np.ndarray:
    """Returns the attention weights of any layers and heads, from the model's own forward pass.

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=3, classes=5)
        >>> weights = attention_weights(VisionTransformer(config), np.zeros((1, 16, 24, 3)),
        ...                             layers=-1)
        >>> weights.shape
        (1, 1, 2, 7, 7)

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        images: (B, H, W, channels) as that model takes them; of another size they are resampled,
            with a warning.
        layers: which blocks, 0 the first, -1 the last; None for all.
        heads: which heads; None for all.

    Returns:
        (B, L, H, N, N): how much each token (second to last axis) takes from each (last axis); they
        sum to 1. The last tokens are the patches in row order; before them may stand, in this
        order, the class token, the distillation token and registers.

    Raises:
        ValueError: there is no such layer or head, or not one Vision Transformer in the model.
    """
    vit = find_vit(model)
    rows = choose(layers, vit.config.num_layers, word="layer")
    columns = choose(heads, vit.config.num_heads, word="head")
    parts = []
    for batch in image_batches(model, images):
        blocks = record_attention(model, vit, batch).blocks
        weights = np.stack([to_numpy(blocks[row]) for row in rows], axis=1)
        parts.append(weights[:, :, columns])
    return np.concatenate(parts)


def pooling_attention(model: keras.Model, images: Any) -> np.ndarray:
    """Returns how much attention pooling takes from each token: (B, H, N), each head sums to 1.

    Raises:
        ValueError: the model does not pool by attention.
    """
    vit = find_vit(model)
    if vit.config.pooling != "map":
        raise ValueError(
            'Only models with pooling="map" pool by attention. '
            f"Received: a model with pooling={vit.config.pooling!r}."
        )
    passes = (record_attention(model, vit, batch) for batch in image_batches(model, images))
    return np.concatenate([to_numpy(each.pooling[0])[:, :, 0] for each in passes])


def attention_rollout(model: keras.Model, images: Any) -> np.ndarray:
    """Returns how much of each patch reaches the model's answer by way of attention.

    The weights are averaged over heads, mixed in halves with the identity for the residual
    connection, and multiplied through all layers (arXiv 2005.00928; arXiv 2010.11929, Figure 6).

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=3, classes=5)
        >>> attention_rollout(VisionTransformer(config), np.zeros((1, 16, 24, 3))).shape
        (1, 2, 3)

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        images: (B, H, W, channels) as that model takes them.

    Returns:
        (B, h, w) shares in [0, 1]. With the shares of the tokens before the patches they make 1.
    """
    vit = find_vit(model)
    parts = []
    for batch in image_batches(model, images):
        attention = record_attention(model, vit, batch)
        blocks = [to_numpy(weights).mean(axis=1) for weights in attention.blocks]
        pooling = to_numpy(attention.pooling[0]).mean(axis=1) if attention.pooling else None
        parts.append(on_grid(vit.config, answer_row(vit.config, pooling, roll(blocks))))
    return np.concatenate(parts)


def mean_attention_distance(model: keras.Model, images: Any) -> np.ndarray:
    """Returns how far each head of each layer looks, in pixels (arXiv 2010.11929, Figure 7 right).

    The distance between the centres of the asking patch and each patch, weighted by attention and
    averaged over asking patches and images. Other tokens are left out on both sides, and what is
    left of each patch's attention counts as 1.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        images: (B, H, W, channels) as that model takes them; the paper averages over 128.

    Returns:
        (L, H) distances in pixels of the Vision Transformer's input.
    """
    vit = find_vit(model)
    first = vit.config.num_prefix_tokens
    distances = patch_distances(vit.config)
    total, count = np.zeros((vit.config.num_layers, vit.config.num_heads)), 0
    for batch in image_batches(model, images):
        blocks = record_attention(model, vit, batch).blocks
        for index, weights in enumerate(blocks):
            patches = to_numpy(weights)[:, :, first:, first:].astype(np.float64)
            patches /= patches.sum(axis=-1, keepdims=True)
            total[index] += (patches * distances).sum(axis=-1).mean(axis=-1).sum(axis=0)
        count += len(batch)
    return total / count


def patch_distances(config: ViTConfig) -> np.ndarray:
    """Returns the distance in pixels between the centres of every two patches, (h*w, h*w)."""
    rows, columns = np.indices(config.grid).reshape(2, -1) * config.stride
    return np.asarray(np.hypot(rows[:, None] - rows, columns[:, None] - columns))


def record_attention(model: keras.Model, vit: VisionTransformer, images: Any) -> AttentionPass:
    """Runs a model once and keeps the attention weights that it used, as they were used."""
    attentions = [vit.get_layer(f"block_{i}").attention for i in range(vit.config.num_layers)]
    pooling = [vit.get_layer("pooling")] if vit.config.pooling == "map" else []
    outputs, records = run(model, images, [*attentions, *pooling])
    return AttentionPass(
        blocks=[records[layer][0] for layer in attentions],
        pooling=[records[layer][0] for layer in pooling],
        outputs=outputs,
    )


def roll(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Multiplies weights (B, N, N) through the layers, each mixed in halves with the identity."""
    tokens = blocks[0].shape[-1]
    rollout = np.broadcast_to(np.eye(tokens), blocks[0].shape)
    for weights in blocks:
        mixed = weights + np.eye(tokens)
        rollout = mixed / mixed.sum(axis=-1, keepdims=True) @ rollout
    return rollout


def answer_row(config: ViTConfig, pooling: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
    """Follows the pooling from tokens (B, N, N) to the answer: (B, N).

    A distillation token and the class token answer in halves, as do class token and average.

    Raises:
        ValueError: each channel comes from a patch of its own.
    """
    if config.pooling == "max":
        raise ValueError(
            'With pooling="max" each channel of the answer comes from another patch, so there is '
            "no one way back to the patches; attention_weights and mean_attention_distance work."
        )
    if pooling is not None:
        return np.asarray((pooling @ tokens)[:, 0])
    if config.pooling == "token" or (config.pooling is None and config.class_token):
        return np.asarray(tokens[:, : 1 + config.distillation_token].mean(axis=1))
    average = np.asarray(tokens[:, config.num_prefix_tokens :].mean(axis=1))
    return (tokens[:, 0] + average) / 2 if config.pooling == "token_avg" else average


def on_grid(config: ViTConfig, row: np.ndarray) -> np.ndarray:
    """Lays the patches' part of (B, N) out as (B, h, w)."""
    return np.asarray(row[:, config.num_prefix_tokens :].reshape(-1, *config.grid))


def _vits(layer: Any) -> Iterator[VisionTransformer]:
    if isinstance(layer, VisionTransformer):
        yield layer
        return
    for inner in getattr(layer, "layers", ()):
        if isinstance(inner, keras.layers.Layer):
            yield from _vits(inner)


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
        targets = keras.ops.argmax(outputs, axis=-1)
    one_hot = keras.ops.one_hot(targets, outputs.shape[-1], dtype="float32")
    return keras.ops.sum(keras.ops.cast(outputs, "float32") * one_hot)


def _with_gradients(
    run: Callable[[], tuple[Any, list[Any]]],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns each attention weight and the gradient of the score with respect to it."""
    backend = keras.backend.backend()
    if backend not in _DERIVATIVES:
        raise ValueError(
            f"Class relevance differentiates with TensorFlow or JAX. Received: {backend!r}; set "
            "KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax."
        )
    weights, gradients = _DERIVATIVES[backend](run)
    return [
        (to_numpy(weight), to_numpy(gradient))
        for weight, gradient in zip(weights, gradients, strict=True)
    ]


def _derive_with_tensorflow(run: Callable[[], tuple[Any, list[Any]]]) -> tuple[Any, Any]:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        score, weights = run()
    return weights, tape.gradient(score, weights, unconnected_gradients="zero")


def _derive_with_jax(run: Callable[[], tuple[Any, list[Any]]]) -> tuple[Any, Any]:
    import jax

    def changed(changes: list[Any]) -> tuple[Any, list[Any]]:
        with changing(changes):
            return run()

    _, weights = run()
    nothing = [keras.ops.zeros_like(weight) for weight in weights]
    gradients, _ = jax.grad(changed, has_aux=True)(nothing)
    return weights, gradients


_DERIVATIVES = {"tensorflow": _derive_with_tensorflow, "jax": _derive_with_jax}


def _positive_part(weights: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(weights * gradients, 0).mean(axis=1))  # (B, N, N)


def _accumulate(weights: list[np.ndarray]) -> np.ndarray:
    tokens = weights[0].shape[-1]
    relevance = np.broadcast_to(np.eye(tokens), weights[0].shape)
    for attention_of_layer in weights:
        relevance = relevance + attention_of_layer @ relevance
    return relevance
