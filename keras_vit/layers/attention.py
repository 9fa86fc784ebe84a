"""Multi-head self-attention, and a recorder of what layers compute, for one thread alone.

Shapes: B images, N tokens (prefix tokens first, then patches), D hidden_dim, H heads, K = D / H.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_vit import backend
from keras_vit.layers.dense import CompositeLayer, LayerNormalization, TokenDense, add_dropped
from keras_vit.layers.positions import (
    bias_index,
    bias_rows,
    check_grid,
    cos_sin_of,
    position_initializer,
    rotary_angles,
    rotate,
)
from keras_vit.layers.random import RandomLayer, dropout, split_seed

Records = dict[keras.layers.Layer, list[Any]]
Change = Callable[[keras.layers.Layer, Any], Any]
_recorder: contextvars.ContextVar[tuple[Records, Change | None] | None]
_recorder = contextvars.ContextVar("recorder", default=None)


@contextlib.contextmanager
def recording(*layers: keras.layers.Layer, change: Change | None = None) -> Iterator[Records]:
    """Records what the given layers compute in this scope, each time they are called.

    Attention records its weights (B, H, N, N), attention pooling its own (B, H, 1, N), a block its
    tokens (B, N, D). What is traced into a graph records nothing, and neither layers nor graphs are
    changed: other threads may call the model meanwhile.

    Args:
        layers: the layers.
        change: gets each recorded layer and what it computed, and returns what takes its place, for
            a gradient with respect to it; with it, values are recorded while JAX traces, too.
    """
    records: Records = {layer: [] for layer in layers}
    token = _recorder.set((records, change))
    try:
        yield records
    finally:
        _recorder.reset(token)


def is_recorded(layer: keras.layers.Layer, x: Any) -> bool:
    """Whether a layer that now computes with x is recorded."""
    if (recorder := _recorder.get()) is None:
        return False
    records, change = recorder
    return layer in records and (change is not None or backend.is_concrete(x))


def is_recording() -> bool:
    """Whether any layer is recorded."""
    return _recorder.get() is not None


def record(layer: keras.layers.Layer, value: Any) -> Any:
    """Adds what a layer has computed to its records, if it is recorded, and returns it."""
    recorder = _recorder.get()
    if recorder is None or not is_recorded(layer, value):
        return value
    records, change = recorder
    value = value if change is None else change(layer, value)
    records[layer].append(value)
    return value


@keras.saving.register_keras_serializable(package="keras_vit")
class MultiHeadSelfAttention(CompositeLayer, RandomLayer):
    """Self-attention with one product for query, key and value (arXiv 2010.11929, Appendix A).

    Example:
        >>> MultiHeadSelfAttention(num_heads=2)(keras.ops.ones((2, 5, 8))).shape
        TensorShape([2, 5, 8])

    Args:
        num_heads: heads; divides the width D of the tokens.
        attention_dropout_rate: fraction of attention weights dropped in training.
        dropout_rate: fraction of outputs dropped in training.
        query_key_norm: whether queries and keys are normalised in each head (arXiv 2302.05442).
        layer_norm_epsilon: epsilon of these normalisations.
        relative_grid: (height, width) in patches; each head then adds a learned bias for the offset
            between two patches to its logits. None for no bias. The paper's relative embeddings
            (arXiv 2010.11929, Appendix D.4) multiply the query; this simpler form, which looks at
            places alone, has become the common one (arXiv 2103.14030; 2106.08254).
        rotary: arguments of `rotary_angles`: queries and keys of the patches, the last tokens, are
            turned by these angles (arXiv 2104.09864); those of other tokens are not. None for none,
            or for those that `call` is given.

    Raises:
        ValueError: `num_heads` does not divide the width of the tokens, or there are fewer tokens
            than a grid has patches.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        attention_dropout_rate: float = 0.0,
        dropout_rate: float = 0.0,
        query_key_norm: bool = False,
        layer_norm_epsilon: float = 1e-6,
        relative_grid: tuple[int, int] | None = None,
        rotary: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(is_random=attention_dropout_rate > 0 or dropout_rate > 0, **kwargs)
        self.num_heads = num_heads
        self.attention_dropout_rate = attention_dropout_rate
        self.dropout_rate = dropout_rate
        self.query_key_norm = query_key_norm
        self.layer_norm_epsilon = layer_norm_epsilon
        self.relative_grid = relative_grid
        self.rotary = None if rotary is None else dict(rotary)
        self._cos_sin: Any = None

    def build(self, input_shape: tuple[Any, ...]) -> None:
        hidden_dim, dtype = input_shape[-1], self.dtype_policy.name
        check_heads(hidden_dim, self.num_heads)
        # LeCun uniform on the fused kernel (D, 3D) is Xavier uniform on each of its thirds (D, D).
        self.qkv = TokenDense(
            3 * hidden_dim, kernel_initializer="lecun_uniform", dtype=dtype, name="qkv"
        )
        self.out = TokenDense(hidden_dim, dtype=dtype, name="out")
        self.qkv.build(input_shape)
        self.out.build(input_shape)
        if self.query_key_norm:
            self.query_norm, self.key_norm = (
                LayerNormalization(epsilon=self.layer_norm_epsilon, dtype=dtype, name=name)
                for name in ("query_norm", "key_norm")
            )
            for norm in (self.query_norm, self.key_norm):
                norm.build((None, self.num_heads, None, hidden_dim // self.num_heads))
        if self.relative_grid is not None:
            prefix = check_grid(self.relative_grid, input_shape[1])
            self._bias_index = bias_index(self.relative_grid, prefix)
            self.relative_bias = self.add_weight(
                name="relative_bias",
                shape=(1, bias_rows(self.relative_grid, prefix), self.num_heads),
                initializer=position_initializer(),
            )
        if self.rotary is not None:
            prefix = check_grid(self.rotary["grid"], input_shape[1])
            angles = rotary_angles(size=hidden_dim // self.num_heads, **self.rotary)
            self._cos_sin = tuple(x.astype(np.float32) for x in cos_sin_of(angles, prefix, np))
        self.restore_inside()

    def call(
        self,
        inputs: Any,
        training: bool | None = None,
        seed: Any = None,
        residual: Any = None,
        scale: Any = None,
        cos_sin: Any = None,
    ) -> Any:
        """Drops with `seed`, drawn by `next_seed`; with a new one if it is None.

        Multiplies by `scale` (D,) and adds `residual` (B, N, D) last. `cos_sin` are those of
        `RotaryEmbedding`, (2, N, K), or of each image, (2, B, N, K).
        """
        cos_sin = self._cos_sin if cos_sin is None else keras.ops.unstack(cos_sin)  # (N, K) each
        seeds = split_seed(self.seed_of_call(seed, training), 2)
        qkv = self._apply_rotary(self.qkv(inputs), cos_sin)  # (B, N, 3D)
        bias = None
        if self.relative_grid is not None:
            bias = keras.ops.take(self.relative_bias[0], self._bias_index, axis=0)  # (N, N, H)
            bias = keras.ops.cast(keras.ops.transpose(bias, (2, 0, 1)), qkv.dtype)  # (H, N, N)
        is_dropping = seeds[0] is not None and self.attention_dropout_rate
        # Fused kernels neither drop weights nor return them: only then are the weights made here.
        if not (is_dropping or is_recorded(self, qkv)):
            x = backend.self_attention(qkv, self.num_heads, bias=bias)  # (B, N, D)
        else:
            thirds = keras.ops.split(qkv, 3, axis=-1)
            query, key, value = (split_heads(x, self.num_heads) for x in thirds)  # (B, H, N, K)
            weights = record(self, attention_weights(query, key, bias=bias))  # (B, H, N, N)
            weights = dropout(weights, self.attention_dropout_rate, seed=seeds[0])
            x = merge_heads(keras.ops.matmul(weights, value))  # (B, N, D)
        return add_dropped(
            self.out, x, self.dropout_rate, seed=seeds[1], residual=residual, scale=scale
        )

    def _apply_rotary(self, qkv: Any, cos_sin: Any) -> Any:
        """Normalises and rotates the queries and keys in (B, N, 3D); the values stay."""
        if cos_sin is None and not self.query_key_norm:
            return qkv
        _, tokens, width = keras.ops.shape(qkv)
        both, value = keras.ops.split(qkv, [width // 3 * 2], axis=-1)
        shape = (-1, tokens, 2 * self.num_heads, width // 3 // self.num_heads)
        # Queries and keys as 2H heads: they are rotated in one operation.
        both = keras.ops.reshape(both, shape)  # (B, N, 2H, K)
        if self.query_key_norm:
            query, key = keras.ops.split(both, 2, axis=2)  # (B, N, H, K)
            both = keras.ops.concatenate([self.query_norm(query), self.key_norm(key)], axis=2)
        if cos_sin is not None:
            cosines, sines = (x[..., None, :] for x in cos_sin)  # (N, 1, K)
            both = rotate(both, cosines, sines)
        both = keras.ops.reshape(both, (-1, tokens, width // 3 * 2))
        # Joined again, since every kernel takes (B, N, 3D).
        return keras.ops.concatenate([both, value], axis=-1)


def check_heads(hidden_dim: int, num_heads: int) -> None:
    """Raises a ValueError unless `num_heads` divides `hidden_dim`."""
    if hidden_dim % num_heads:
        raise ValueError(
            f"num_heads must divide the width of the tokens. Received: num_heads={num_heads}, "
            f"tokens of width {hidden_dim}."
        )


def split_heads(x: Any, num_heads: int) -> Any:
    """Splits tokens (B, N, D) into heads (B, H, N, K)."""
    _, tokens, width = keras.ops.shape(x)
    x = keras.ops.reshape(x, (-1, tokens, num_heads, width // num_heads))
    return keras.ops.transpose(x, (0, 2, 1, 3))


def merge_heads(x: Any) -> Any:
    """Joins heads (B, H, N, K) into tokens (B, N, D)."""
    _, num_heads, tokens, width = keras.ops.shape(x)
    return keras.ops.reshape(keras.ops.transpose(x, (0, 2, 1, 3)), (-1, tokens, num_heads * width))


def attention_weights(query: Any, key: Any, *, bias: Any = None) -> Any:
    """Returns softmax(query key^T / sqrt(K) + bias), (B, H, N, N); its sums are float32's."""
    # Before the product: the logits are N / K times as large as the queries.
    query = query * (query.shape[-1] ** -0.5)
    logits = keras.ops.matmul(query, keras.ops.transpose(key, (0, 1, 3, 2)))
    return backend.softmax(logits if bias is None else logits + bias)
