"""What keras_vit.explain computes, once more in float64 NumPy from a pass of the oracles.

Slow and literal on purpose: tokens are walked one by one where the package uses matrix tricks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import keras_vit


@dataclasses.dataclass
class Pass:
    """One forward pass: weights (B, H, N, N) and tokens of each block, pooling weights, logits."""

    weights: list[np.ndarray]
    tokens: list[np.ndarray]
    pooling: np.ndarray | None
    logits: np.ndarray


def rollout(values: Pass, config: keras_vit.ViTConfig) -> np.ndarray:
    """Follows every path of shares from the answer down through the layers, token by token."""
    heatmaps = []
    for image in range(len(values.logits)):
        share = first_share(values, config, image)
        for weights in reversed(values.weights):
            below = np.zeros_like(share)
            for token, amount in enumerate(share):
                row = weights[image].mean(axis=0)[token]
                below += amount * 0.5 * row
                below[token] += amount * 0.5
            share = below
        heatmaps.append(share[first_patch(config) :].reshape(config.grid))
    return np.stack(heatmaps)


def first_share(values: Pass, config: keras_vit.ViTConfig, image: int) -> np.ndarray:
    if values.pooling is not None:
        first: np.ndarray = values.pooling[image].mean(axis=0)[0]
        return first
    share = np.zeros(config.num_tokens)
    if config.distillation_token:
        share[0] = share[1] = 0.5  # the answer is the mean of both tokens' classifiers
    elif config.pooling == "token":
        share[0] = 1
    else:
        share[first_patch(config) :] = 1 / (config.grid[0] * config.grid[1])
    if config.pooling == "token_avg":  # the classifier sees both
        share /= 2
        share[0] = 0.5
    return share


def first_patch(config: keras_vit.ViTConfig) -> int:
    return config.num_tokens - config.grid[0] * config.grid[1]


def distance(values: Pass, config: keras_vit.ViTConfig) -> np.ndarray:
    """Walks over every pair of patches: (L, H)."""
    first, (rows, columns) = first_patch(config), config.grid
    places = [(row, column) for row in range(rows) for column in range(columns)]
    result = np.zeros((config.num_layers, config.num_heads))
    for layer, weights in enumerate(values.weights):
        per_query = []
        for query, (y, x) in enumerate(places):
            row = weights[:, :, first + query, first:]
            far = [config.stride * ((y - v) ** 2 + (x - u) ** 2) ** 0.5 for v, u in places]
            per_query.append((row * far).sum(axis=-1) / row.sum(axis=-1))
        result[layer] = np.mean(per_query, axis=(0, 1))
    return result


def relevance(
    forward: Callable[..., Pass], image: np.ndarray, config: keras_vit.ViTConfig, target: int
) -> np.ndarray:
    """Class relevance (h, w) of one image with gradients by central differences.

    `forward` is `variants_oracle.run` for given weights: from images, and deltas, to a pass.
    """
    values = forward(image[None], None)
    weighted = []
    layers = [*values.weights, *([values.pooling] if values.pooling is not None else [])]
    for layer, weights in enumerate(layers):
        gradient = np.zeros(weights.shape[1:])
        for place in np.ndindex(gradient.shape):
            scores = []
            for step in (1e-5, -1e-5):
                deltas: list[Any] = [0.0] * (len(values.weights) + 1)
                deltas[layer] = np.zeros(gradient.shape)
                deltas[layer][place] = step
                scores.append(forward(image[None], deltas).logits[0, target])
            gradient[place] = (scores[0] - scores[1]) / 2e-5
        weighted.append(np.maximum(gradient * weights[0], 0).mean(axis=0))
    total = np.eye(config.num_tokens)
    for matrix in weighted[: len(values.weights)]:
        total = total + matrix @ total
    if values.pooling is not None:
        row = (weighted[-1] @ total)[0]
    else:
        row = first_share(values, config, 0) @ total
    heatmap: np.ndarray = row[first_patch(config) :].reshape(config.grid)
    return heatmap
