"""The network with all that may depart from the published one, in float64 NumPy.

Read off the variables' paths, token by token and head by head where the package uses matrix tricks.
"""

from typing import Any

import keras
import numpy as np
import scipy.special
from explain_oracle import Pass

from keras_vit.config import ViTConfig

Arrays = dict[str, np.ndarray]
# What may be had together; positions are chosen besides.
ALL: dict[str, Any] = {
    "num_registers": 2,
    "layer_scale": 0.5,
    "query_key_norm": True,
    "activation": "swiglu",
    "distillation_token": True,
}


# Those of later networks, which go without a distillation token and added positions.
MODERN: dict[str, Any] = {
    **ALL,
    "activation": "quick_gelu",
    "distillation_token": False,
    "class_token": False,
    "pooling": "map",
    "pooling_heads": 4,
    "embedding_norm": True,
    "norm_after_pooling": True,
    "position_embedding": None,
    "rotary_period": 100.0,
}
COUNTED: dict[str, Any] = {"rotary_period": 10_000.0, "rotary_grid": (5, 3), "rotary_offset": 0.25}


def arrays(model: keras.Model) -> Arrays:
    """Returns every weight by its path, in float64."""
    return {
        v.path: keras.ops.convert_to_numpy(keras.ops.cast(v.value, "float32")).astype(np.float64)
        for v in model.weights
    }


def run(p: Arrays, images: np.ndarray, config: ViTConfig, deltas: Any = None) -> Pass:
    """Runs the network; deltas[block] (H, N, N) is added to a block's attention weights."""
    x = tokens_of(p, images, config)
    if config.embedding_norm:
        x = norm(p, "embedding_norm", x)
    deltas = [0.0] * (config.num_layers + 1) if deltas is None else deltas
    weights, tokens = [], []
    for index in range(config.num_layers):
        block = f"block_{index}"
        if config.position_placement == "every_block":
            x = x + table(p, f"positions_{index}", config)
        if config.position_placement == "every_block_shared":
            x = x + table(p, "positions", config)
        y = norm(p, f"{block}/attention_norm", x)
        w, value = attention(p, f"{block}/attention", y, config)
        weights.append(w)
        y = np.einsum("bhnm,bhmk->bnhk", w + deltas[index], value).reshape(x.shape)
        x = x + p.get(f"{block}/attention_scale", 1) * dense(p, f"{block}/attention/out", y)
        y = mlp(p, f"{block}/mlp", norm(p, f"{block}/mlp_norm", x), config)
        x = x + p.get(f"{block}/mlp_scale", 1) * y
        tokens.append(x)
    if not config.norm_after_pooling:
        x = norm(p, "encoder_norm", x)
    pooled, pooling_weights = pool(p, x, config, deltas[-1])
    if config.norm_after_pooling and config.pooling is not None:
        pooled = norm(p, "pooling_norm", pooled)
    return Pass(weights, tokens, pooling_weights, logits(p, pooled, x, config))


def tokens_of(p: Arrays, images: np.ndarray, config: ViTConfig) -> np.ndarray:
    size, (rows, columns) = config.patch_size, config.grid
    patches = [
        images[:, y * size : (y + 1) * size, x * size : (x + 1) * size].reshape(len(images), -1)
        for y in range(rows)
        for x in range(columns)
    ]
    x = dense(p, "patch_encoder/projection", np.stack(patches, axis=1).astype(np.float64))
    first = [
        np.repeat(p[f"patch_encoder/{name}"], len(images), axis=0)
        for name in ("class_token", "distillation_token", "registers")
        if f"patch_encoder/{name}" in p
    ]
    x = np.concatenate([*first, x], axis=1)
    return x + table(p, "patch_encoder", config) if config.position_placement == "input" else x


def table(p: Arrays, layer: str, config: ViTConfig) -> np.ndarray:
    """The position of each token, (N, D)."""
    placed, prefix = config.class_token + config.distillation_token, prefix_of(config)
    kind, width = config.position_embedding, config.hidden_dim
    result = np.zeros((config.num_tokens, width))
    for token in range(config.num_tokens):
        row, column = divmod(token - prefix, config.grid[1])
        is_register = placed <= token < prefix
        if kind == "learned" and not is_register:
            stored = token if token < placed else token - config.num_registers
            result[token] = p[f"{layer}/position_embedding"][0, stored]
        elif kind == "learned_2d" and token < placed:
            result[token] = p[f"{layer}/position_prefix"][0, token]
        elif kind == "learned_2d" and not is_register:
            halves = p[f"{layer}/position_x"][0, column], p[f"{layer}/position_y"][0, row]
            result[token] = np.concatenate(halves)
        elif kind == "sincos_2d" and token >= prefix:
            quarter = width // 4
            for channel in range(quarter):
                angle = 10_000 ** -(channel / (quarter - 1))
                result[token, channel::quarter] = [
                    np.sin(column * angle), np.cos(column * angle),
                    np.sin(row * angle), np.cos(row * angle),
                ]  # fmt: skip
    return result


def bias(p: Arrays, path: str, config: ViTConfig) -> Any:
    """What stands between every two tokens, (H, N, N)."""
    if config.position_embedding != "relative":
        return 0.0
    stored, prefix, (rows, columns) = p[path][0], prefix_of(config), config.grid
    result = np.zeros((config.num_heads, config.num_tokens, config.num_tokens))
    for asking in range(config.num_tokens):
        for asked in range(config.num_tokens):
            if asking < prefix:
                row = 2 if asked < prefix else 0
            elif asked < prefix:
                row = 1
            else:
                here, there = divmod(asking - prefix, columns), divmod(asked - prefix, columns)
                down, right = there[0] - here[0] + rows - 1, there[1] - here[1] + columns - 1
                row = down * (2 * columns - 1) + right + (3 if prefix else 0)
            result[:, asking, asked] = stored[row]
    return result


def attention(p: Arrays, path: str, x: np.ndarray, config: ViTConfig) -> Any:
    """Weights (B, H, N, N) and values (B, H, N, K)."""
    size, d = config.hidden_dim // config.num_heads, config.hidden_dim
    qkv = dense(p, f"{path}/qkv", x)
    query, key, value = (
        np.stack(np.split(qkv[..., part * d : (part + 1) * d], config.num_heads, axis=-1), axis=1)
        for part in range(3)
    )
    if config.query_key_norm:
        query, key = norm(p, f"{path}/query_norm", query), norm(p, f"{path}/key_norm", key)
    if config.rotary_period is not None:
        query, key = rotated(query, config), rotated(key, config)
    scores = np.einsum("bhnk,bhmk->bhnm", query, key) / np.sqrt(size)
    scores = scores + bias(p, f"{path}/relative_bias", config)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True), value


def rotated(x: np.ndarray, config: ViTConfig) -> np.ndarray:
    """Turns each pair of (B, H, N, K) in the complex plane, patch by patch and pair by pair."""
    result, prefix, half = x.copy(), prefix_of(config), x.shape[-1] // 2
    assert config.rotary_period is not None
    for patch in range(config.grid[0] * config.grid[1]):
        places = divmod(patch, config.grid[1])
        for pair in range(half):
            axis, step = divmod(pair, half // 2)
            place, side = places[axis], config.grid[axis]
            if config.rotary_grid is None:
                turns = (2 * place + 1) / side - 1  # of a whole circle, at the highest frequency
                angle = 2 * np.pi * turns
            else:
                angle = (place + config.rotary_offset) * config.rotary_grid[axis] / side
            angle /= config.rotary_period ** (step / (half // 2))
            token = x[:, :, prefix + patch]
            turned = (token[..., pair] + 1j * token[..., pair + half]) * np.exp(1j * angle)
            result[:, :, prefix + patch, pair] = turned.real
            result[:, :, prefix + patch, pair + half] = turned.imag
    return result


def mlp(p: Arrays, path: str, x: np.ndarray, config: ViTConfig) -> np.ndarray:
    y = dense(p, f"{path}/fc1", x)
    if config.activation == "swiglu":
        gate, value = y[..., : config.mlp_dim], y[..., config.mlp_dim :]
        return dense(p, f"{path}/fc2", gate / (1 + np.exp(-gate)) * value)
    if config.activation == "quick_gelu":
        return dense(p, f"{path}/fc2", y / (1 + np.exp(-1.702 * y)))
    if config.activation == "gelu":
        return dense(p, f"{path}/fc2", y * (1 + scipy.special.erf(y / np.sqrt(2))) / 2)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))
    return dense(p, f"{path}/fc2", y * (1 + tanh) / 2)


def pool(p: Arrays, x: np.ndarray, config: ViTConfig, delta: Any) -> Any:
    """What the classifier sees, and the weights (B, H, 1, N) of attention pooling."""
    if config.pooling is None:
        return x, None
    if config.pooling == "token":
        return x[:, 0], None
    average = x[:, prefix_of(config) :].mean(axis=1)
    if config.pooling in ("avg", "token_avg"):
        parts = [average] if config.pooling == "avg" else [x[:, 0], average]
        return np.concatenate(parts, axis=1), None
    heads, d = config.pooling_heads or config.num_heads, config.hidden_dim
    query = np.repeat(dense(p, "pooling/query", p["pooling/probe"]), len(x), axis=0)
    key, value = np.split(dense(p, "pooling/key_value", x), 2, axis=-1)
    size = d // heads
    weights, taken = [], []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = np.einsum("bqk,bnk->bqn", query[..., part], key[..., part]) / np.sqrt(size)
        row = np.exp(scores - scores.max(-1, keepdims=True))
        weights.append(row / row.sum(-1, keepdims=True))
        change = delta[head] if np.ndim(delta) else delta
        taken.append(np.einsum("bqn,bnk->bqk", weights[-1] + change, value[..., part]))
    y = dense(p, "pooling/out", np.concatenate(taken, axis=-1))
    y = y + mlp(p, "pooling/mlp", norm(p, "pooling/norm", y), config)
    return y[:, 0], np.stack(weights, axis=1)


def logits(p: Arrays, pooled: np.ndarray, x: np.ndarray, config: ViTConfig) -> np.ndarray:
    if config.representation_dim is not None:
        pooled = np.tanh(dense(p, "representation", pooled))
    answer = dense(p, "head", pooled)
    if config.distillation_token:
        answer = (answer + dense(p, "distillation_head", x[:, 1])) / 2
    return answer


def prefix_of(config: ViTConfig) -> int:
    return config.class_token + config.distillation_token + config.num_registers


def dense(p: Arrays, path: str, x: np.ndarray) -> np.ndarray:
    return x @ p[f"{path}/kernel"] + p[f"{path}/bias"]


def norm(p: Arrays, path: str, x: np.ndarray) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * p[f"{path}/gamma"] + p[f"{path}/beta"]
