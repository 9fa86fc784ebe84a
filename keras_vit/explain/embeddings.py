"""What the model has learned about places and patches: positions, filters, tokens."""

import dataclasses
from typing import Any, Literal

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.explain import attention
from keras_vit.model import position_layer


@dataclasses.dataclass(frozen=True, eq=False)
class Filters:
    """Principal components of the filters that turn patches into tokens.

    Attributes:
        components: (n, P, P, channels) directions of unit length, the most telling first.
        variance: (n,) fraction of the filters' variance that each holds.
    """

    components: np.ndarray
    variance: np.ndarray


def position_similarity(model: keras.Model) -> np.ndarray:
    """Returns the cosine similarity of the position embeddings (arXiv 2010.11929, Figure 7 centre).

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> from keras_vit.model import VisionTransformer
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=5)
        >>> position_similarity(VisionTransformer(config)).shape
        (2, 3, 2, 3)

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.

    Returns:
        (h, w, h, w): of the patch in a row and column with every other, from -1 to 1. Where
        every block has a table, of the first block's.

    Raises:
        ValueError: the model adds no position embeddings to its tokens.
    """
    vit = attention.find_vit(model)
    if not vit.config.adds_positions:
        raise ValueError(
            "The model adds no position embeddings to its tokens. Received: a model with "
            f"position_embedding={vit.config.position_embedding!r}."
        )
    layer = vit.get_layer(position_layer(vit.config, 0) or "patch_encoder")
    directions = _unit(
        attention.to_numpy(layer.position_table())[0, vit.config.num_prefix_tokens :]
    )
    return np.asarray((directions @ directions.T).reshape(*vit.config.grid, *vit.config.grid))


def embedding_filters(model: keras.Model, *, count: int = 28) -> Filters:
    """Returns the principal components of the patch embedding (arXiv 2010.11929, Figure 7 left).

    The signs are arbitrary; each component's largest value is made positive.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        count: how many; the paper shows 28. Fewer where there are fewer.

    Raises:
        ValueError: `count` is not positive.
    """
    if count < 1:
        raise ValueError(f"count must be a positive integer. Received: count={count!r}.")
    vit = attention.find_vit(model)
    kernel = attention.to_numpy(vit.get_layer("patch_encoder").projection.kernel)  # (P*P*C, D)
    filters = kernel.T - kernel.mean(axis=1)
    _, strength, components = np.linalg.svd(filters, full_matrices=False)
    largest = np.take_along_axis(
        components, np.abs(components).argmax(axis=1, keepdims=True), axis=1
    )
    size, channels = vit.config.patch_size, vit.config.patch_channels
    components = (components * np.sign(largest)).reshape(-1, size, size, channels)
    total = max(float((strength**2).sum()), np.finfo(np.float32).tiny)
    return Filters(components[:count], strength[:count] ** 2 / total)


def token_similarity(
    model: keras.Model,
    images: Any,
    *,
    token: tuple[int, int] | Literal["class"] = "class",
    layer: int = -1,
) -> np.ndarray:
    """Returns how like each patch's token is to one chosen token, after any block.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        images: (B, H, W, channels) as that model takes them.
        token: (row, column) of a patch in the grid, or "class" for the class token.
        layer: after which block, 0 the first, -1 the last.

    Returns:
        (B, h, w) cosine similarities from -1 to 1.

    Raises:
        ValueError: there is no such token or layer.
    """
    vit = attention.find_vit(model)
    (index,) = attention.choose(layer, vit.config.num_layers, word="layer")
    place = _place(vit.config, token)
    block = vit.get_layer(f"block_{index}")
    parts = []
    for batch in attention.image_batches(model, images):
        _, records = attention.run(model, batch, [block])
        directions = _unit(attention.to_numpy(records[block][0]))
        similarity = (directions @ directions[:, place, :, None])[..., 0]
        parts.append(attention.on_grid(vit.config, similarity))
    return np.concatenate(parts)


def _place(config: ViTConfig, token: tuple[int, int] | str) -> int:
    if token == "class":
        if config.class_token:
            return 0
        raise ValueError(
            "The model has no class token; choose a patch by its (row, column) in the grid of "
            f"{config.grid[0]}x{config.grid[1]} patches."
        )
    rows, columns = config.grid
    if isinstance(token, str) or not (0 <= token[0] < rows and 0 <= token[1] < columns):
        raise ValueError(
            f"There is no patch {token!r}; the grid has {rows} rows and {columns} columns, "
            'numbered from 0. Give (row, column), or "class".'
        )
    return token[0] * columns + token[1] + config.num_prefix_tokens


def _unit(vectors: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, np.finfo(np.float32).tiny))
