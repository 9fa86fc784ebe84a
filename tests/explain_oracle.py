"""What keras_vit.explain computes, once more in float64 NumPy on the published names' arrays.

Slow and literal on purpose: tokens are walked one by one where the package uses matrix tricks.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import oracle

import keras_vit


@dataclasses.dataclass
class Pass:
    """One forward pass: weights (B, H, N, N) and tokens of each block, pooling weights, logits."""

    weights: list[np.ndarray]
    tokens: list[np.ndarray]
    pooling: np.ndarray | None
    logits: np.ndarray


def arrays(model: keras_vit.VisionTransformer, folder: Path) -> dict[str, np.ndarray]:
    """Returns a model's weights under the published names, in float64."""
    stored = np.load(keras_vit.weights.save_npz(model, folder / "oracle.npz"))
    return {name: stored[name].astype(np.float64) for name in stored.files}


def run(p: dict[str, np.ndarray], images: np.ndarray, pooling: str, deltas: Any = None) -> Pass:
    """Runs the network; deltas[block] (H, N, N) is added to a block's attention weights.

    With attention pooling deltas[-1] (H, 1, N) is added to the pooling's.
    """
    kernel = p["embedding/kernel"]
    size = kernel.shape[0]
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // size, size, width // size, size, channels)
    x = np.einsum("bhpwqc,pqcd->bhwd", x, kernel) + p["embedding/bias"]
    x = x.reshape(batch, -1, kernel.shape[-1])
    if "cls" in p:
        x = np.concatenate([np.broadcast_to(p["cls"], (batch, 1, x.shape[-1])), x], axis=1)
    x = x + p["Transformer/posembed_input/pos_embedding"]
    depth = sum(name.startswith("Transformer") and name.endswith("LayerNorm_0/scale") for name in p)
    deltas = [0.0] * (depth + 1) if deltas is None else deltas
    weights, tokens = [], []
    for index in range(depth):
        block = f"Transformer/encoderblock_{index}"
        y = oracle.norm(p, f"{block}/LayerNorm_0", x)
        w = weights_of(p, f"{block}/MultiHeadDotProductAttention_1", y, y)
        weights.append(w)
        x = x + apply(p, f"{block}/MultiHeadDotProductAttention_1", w + deltas[index], y)
        y = oracle.norm(p, f"{block}/LayerNorm_2", x)
        y = oracle.gelu(oracle.dense(p, f"{block}/MlpBlock_3/Dense_0", y), exact=False)
        x = x + oracle.dense(p, f"{block}/MlpBlock_3/Dense_1", y)
        tokens.append(x)
    x, pooled = pool(p, oracle.norm(p, "Transformer/encoder_norm", x), pooling, deltas[-1])
    return Pass(weights, tokens, pooled, oracle.dense(p, "head", x))


def weights_of(p: dict[str, np.ndarray], name: str, asking: np.ndarray, asked: np.ndarray) -> Any:
    query = np.einsum("bnd,dhk->bhnk", asking, p[f"{name}/query/kernel"])
    query = query + p[f"{name}/query/bias"][:, None]
    key = (
        np.einsum("bnd,dhk->bhnk", asked, p[f"{name}/key/kernel"]) + p[f"{name}/key/bias"][:, None]
    )
    logits = np.einsum("bhnk,bhmk->bhnm", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def apply(p: dict[str, np.ndarray], name: str, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    value = np.einsum("bnd,dhk->bhnk", x, p[f"{name}/value/kernel"])
    value = value + p[f"{name}/value/bias"][:, None]
    x = np.einsum("bhnm,bhmk->bnhk", weights, value)
    out: np.ndarray = np.einsum("bnhk,hkd->bnd", x, p[f"{name}/out/kernel"]) + p[f"{name}/out/bias"]
    return out


def pool(p: dict[str, np.ndarray], x: np.ndarray, pooling: str, delta: Any) -> Any:
    if pooling == "token":
        return x[:, 0], None
    if pooling == "avg":
        return x[:, int("cls" in p) :].mean(axis=1), None
    name = "MAPHead_0/MultiHeadDotProductAttention_0"
    probe = np.broadcast_to(p["MAPHead_0/probe"], (len(x), 1, x.shape[-1]))
    weights = weights_of(p, name, probe, x)
    y = apply(p, name, weights + delta, x)
    z = oracle.norm(p, "MAPHead_0/LayerNorm_0", y)
    z = oracle.gelu(oracle.dense(p, "MAPHead_0/MlpBlock_0/Dense_0", z), exact=False)
    y = y + oracle.dense(p, "MAPHead_0/MlpBlock_0/Dense_1", z)
    return y[:, 0], weights


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

    `forward` is `run` for given weights: from images, and deltas, to a pass.
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


def tokens_before(model: keras.Model, images: np.ndarray) -> np.ndarray:
    """Returns what a hybrid's stem makes of images: the oracle starts there."""
    stem = keras.ops.convert_to_numpy(model.features(images, ["stem"])["stem"])
    return np.asarray(stem, np.float64)
