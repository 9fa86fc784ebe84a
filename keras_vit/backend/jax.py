"""JAX: attention that does not store its weights, and GPU kernels in half precision."""

from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_vit import environment
from keras_vit.backend import plain

environment.prefer_cublas()

_HALF = ("float16", "bfloat16")
# cuDNN's flash attention takes heads of a width that is a multiple of 8, up to 128.
_CUDNN_STEP, _CUDNN_WIDEST = 8, 128


def is_concrete(x: Any) -> bool:
    """Whether x has values now, and is not traced."""
    return not isinstance(x, keras.KerasTensor | jax.core.Tracer)


def layer_norm(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Normalises x (..., D) over the last axis, in float32, then applies gamma and beta (D,)."""
    if len(x.shape) != 3 or not _has_kernels(x):
        return plain.layer_norm(x, gamma, beta, epsilon=epsilon)
    from keras_vit.backend import jax_kernels

    gamma, beta = map(keras.ops.convert_to_tensor, (gamma, beta))
    return jax_kernels.layer_norm(x, gamma, beta, epsilon)


def self_attention(qkv: Any, num_heads: int) -> Any:
    """Returns multi-head attention (B, N, D) of queries, keys and values (B, N, 3D).

    On NVIDIA GPUs in half precision this package's kernel computes it, or cuDNN's flash attention
    for heads of other widths.
    """
    size = qkv.shape[-1] // 3 // num_heads
    if not _has_kernels(qkv):
        return _attend(qkv, num_heads, implementation="xla")
    from keras_vit.backend import jax_kernels

    if jax_kernels.head_parts(size):
        return jax_kernels.attention(qkv, num_heads)
    if size % _CUDNN_STEP or size > _CUDNN_WIDEST:
        return _attend(qkv, num_heads, implementation="xla")
    # JAX refuses to train cuDNN's with an odd number of tokens: one is added, and masked as a key.
    tokens = qkv.shape[1]
    even = jnp.pad(qkv, ((0, 0), (0, tokens % 2), (0, 0)))
    lengths = jnp.full((qkv.shape[0],), tokens, "int32") if tokens % 2 else None
    y = _attend(even, num_heads, implementation="cudnn", key_value_seq_lengths=lengths)
    return y[:, :tokens]


def _attend(qkv: Any, num_heads: int, **options: Any) -> Any:
    _, tokens, width = keras.ops.shape(qkv)
    x = keras.ops.reshape(qkv, (-1, tokens, 3, num_heads, width // 3 // num_heads))
    query, key, value = keras.ops.unstack(x, axis=2)  # (B, N, H, K) each
    x = jax.nn.dot_product_attention(query, key, value, **options)
    return keras.ops.reshape(x, (-1, tokens, width // 3))


def _has_kernels(x: Any) -> bool:
    """Whether x is in half precision on an NVIDIA GPU of Ampere or newer, which have bfloat16."""
    if isinstance(x, keras.KerasTensor) or x.dtype not in _HALF:
        return False
    device = jax.config.jax_default_device or jax.devices()[0]
    major = str(getattr(device, "compute_capability", "0")).partition(".")[0]
    # GPUs of other makers have a name in place of this number.
    return getattr(device, "platform", device) == "gpu" and major.isdigit() and int(major) >= 8
