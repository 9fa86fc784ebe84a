"""The same network once more, in float64 NumPy, read off the published checkpoint's names."""

from typing import Any

import numpy as np


def forward(arrays: dict[str, np.ndarray], images: np.ndarray, *, exact_gelu: bool = False) -> Any:
    """Returns the logits (B, C) of a plain (not hybrid) Vision Transformer with a class token."""
    p = {name: array.astype(np.float64) for name, array in arrays.items()}
    kernel = p["embedding/kernel"]
    size = kernel.shape[0]
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // size, size, width // size, size, channels)
    x = np.einsum("bhpwqc,pqcd->bhwd", x, kernel) + p["embedding/bias"]
    x = x.reshape(batch, -1, kernel.shape[-1])
    x = np.concatenate([np.broadcast_to(p["cls"], (batch, 1, x.shape[-1])), x], axis=1)
    x = x + p["Transformer/posembed_input/pos_embedding"]
    depth = sum(name.endswith("LayerNorm_0/scale") for name in p)
    for index in range(depth):
        block = f"Transformer/encoderblock_{index}"
        x = x + attention(
            p, f"{block}/MultiHeadDotProductAttention_1", norm(p, f"{block}/LayerNorm_0", x)
        )
        y = gelu(
            dense(p, f"{block}/MlpBlock_3/Dense_0", norm(p, f"{block}/LayerNorm_2", x)), exact_gelu
        )
        x = x + dense(p, f"{block}/MlpBlock_3/Dense_1", y)
    x = norm(p, "Transformer/encoder_norm", x)[:, 0]
    if "pre_logits/kernel" in p:
        x = np.tanh(dense(p, "pre_logits", x))
    return dense(p, "head", x)


def norm(p: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    out: np.ndarray = x * p[f"{name}/scale"] + p[f"{name}/bias"]
    return out


def dense(p: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    out: np.ndarray = x @ p[f"{name}/kernel"] + p[f"{name}/bias"]
    return out


def gelu(x: np.ndarray, exact: bool) -> np.ndarray:
    if exact:
        import scipy.special

        doubled: np.ndarray = x * (1 + scipy.special.erf(x / np.sqrt(2)))
    else:
        doubled = x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return np.asarray(doubled / 2)


def attention(p: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    query, key, value = (
        np.einsum("bnd,dhk->bhnk", x, p[f"{name}/{part}/kernel"])
        + p[f"{name}/{part}/bias"][:, None]
        for part in ("query", "key", "value")
    )
    logits = np.einsum("bhnk,bhmk->bhnm", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = np.einsum("bhnm,bhmk->bnhk", weights, value)
    out: np.ndarray = np.einsum("bnhk,hkd->bnd", x, p[f"{name}/out/kernel"]) + p[f"{name}/out/bias"]
    return out
