"""What JAX does better than `keras.ops`: attention that never holds its weights."""

from typing import Any

import jax
import keras


def is_concrete(x: Any) -> bool:
    """Whether x has values now, and is no part of a function that is being traced."""
    return not isinstance(x, keras.KerasTensor | jax.core.Tracer)


def self_attention(qkv: Any, num_heads: int) -> Any:
    """Returns what tokens take from each other, (B, N, D), for (B, N, 3D) query, key and value.

    On a GPU, in float16 and bfloat16, cuDNN's flash attention computes it.
    """
    _, tokens, width = keras.ops.shape(qkv)
    x = keras.ops.reshape(qkv, (-1, tokens, 3, num_heads, width // 3 // num_heads))
    query, key, value = keras.ops.unstack(x, axis=2)  # (B, N, H, K) each
    is_flash = jax.default_backend() == "gpu" and query.dtype in ("float16", "bfloat16")
    x = jax.nn.dot_product_attention(
        query, key, value, implementation="cudnn" if is_flash else "xla"
    )
    return keras.ops.reshape(x, (-1, tokens, width // 3))
