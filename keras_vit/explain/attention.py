"""What attends to what: attention weights, attention rollout, mean attention distance.

Letters: B images, L layers, H heads, N tokens, (h, w) the grid in patches.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.explain import inside
from keras_vit.model import VisionTransformer


@dataclasses.dataclass(frozen=True, eq=False)
class Heard:
    """What one forward pass let be heard, as tensors.

    Attributes:
        blocks: the attention weights (B, H, N, N) of each block.
        pooling: those of attention pooling, (B, H, 1, N); empty without it.
        outputs: what the model answered.
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
    vit = inside.find_vit(model)
    rows = inside.choose(layers, vit.config.num_layers, word="layer")
    columns = inside.choose(heads, vit.config.num_heads, word="head")
    parts = []
    for batch in inside.image_batches(model, images):
        blocks = listen(model, vit, batch).blocks
        stacked = np.stack([inside.to_numpy(blocks[row]) for row in rows], axis=1)
        parts.append(stacked[:, :, columns])
    return np.concatenate(parts)


def pooling_attention(model: keras.Model, images: Any) -> np.ndarray:
    """Returns how much attention pooling takes from each token: (B, H, N), each head sums to 1.

    Raises:
        ValueError: the model does not pool by attention.
    """
    vit = inside.find_vit(model)
    if vit.config.pooling != "map":
        raise ValueError(
            'Only models with pooling="map" pool by attention. '
            f"Received: a model with pooling={vit.config.pooling!r}."
        )
    heard = (listen(model, vit, batch) for batch in inside.image_batches(model, images))
    return np.concatenate([inside.to_numpy(each.pooling[0])[:, :, 0] for each in heard])


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
    vit = inside.find_vit(model)
    parts = []
    for batch in inside.image_batches(model, images):
        heard = listen(model, vit, batch)
        blocks = [inside.to_numpy(weights).mean(axis=1) for weights in heard.blocks]
        pooling = inside.to_numpy(heard.pooling[0]).mean(axis=1) if heard.pooling else None
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
    vit = inside.find_vit(model)
    first = vit.config.num_prefix_tokens
    distances = patch_distances(vit.config)
    total, count = np.zeros((vit.config.num_layers, vit.config.num_heads)), 0
    for batch in inside.image_batches(model, images):
        blocks = listen(model, vit, batch).blocks
        for index, weights in enumerate(blocks):
            patches = inside.to_numpy(weights)[:, :, first:, first:].astype(np.float64)
            patches /= patches.sum(axis=-1, keepdims=True)
            total[index] += (patches * distances).sum(axis=-1).mean(axis=-1).sum(axis=0)
        count += len(batch)
    return total / count


def patch_distances(config: ViTConfig) -> np.ndarray:
    """Returns the distance in pixels between the centres of every two patches, (h*w, h*w)."""
    rows, columns = np.indices(config.grid).reshape(2, -1) * config.stride
    return np.asarray(np.hypot(rows[:, None] - rows, columns[:, None] - columns))


def listen(model: keras.Model, vit: VisionTransformer, images: Any) -> Heard:
    """Runs a model once and keeps the attention weights that it used, as they were used."""
    attentions = [vit.get_layer(f"block_{i}").attention for i in range(vit.config.num_layers)]
    pooling = [vit.get_layer("pooling")] if vit.config.pooling == "map" else []
    outputs, heard = inside.run(model, images, [*attentions, *pooling])
    return Heard(
        blocks=[heard[layer][0] for layer in attentions],
        pooling=[heard[layer][0] for layer in pooling],
        outputs=outputs,
    )


def roll(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Multiplies weights (B, N, N) through the layers, each mixed in halves with the identity."""
    tokens = blocks[0].shape[-1]
    rolled = np.broadcast_to(np.eye(tokens), blocks[0].shape)
    for weights in blocks:
        mixed = weights + np.eye(tokens)
        rolled = mixed / mixed.sum(axis=-1, keepdims=True) @ rolled
    return rolled


def answer_row(config: ViTConfig, pooling: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
    """Follows the pooling from tokens (B, N, N) to the answer: (B, N).

    A distillation token and the class token answer in halves.

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
    return np.asarray(tokens[:, config.num_prefix_tokens :].mean(axis=1))


def on_grid(config: ViTConfig, row: np.ndarray) -> np.ndarray:
    """Lays the patches' part of (B, N) out as (B, h, w)."""
    return np.asarray(row[:, config.num_prefix_tokens :].reshape(-1, *config.grid))
