"""Multi-head self-attention."""

from typing import Any

import keras

from keras_vit import backend
from keras_vit.layers.dense import TokenDense, add_dropped
from keras_vit.layers.random import RandomLayer, dropout, split_seed


@keras.saving.register_keras_serializable(package="keras_vit")
class MultiHeadSelfAttention(RandomLayer):
    """Self-attention with one product for query, key and value (arXiv 2010.11929, Appendix A).

    Example:
        >>> MultiHeadSelfAttention(num_heads=2)(keras.ops.ones((2, 5, 8))).shape
        TensorShape([2, 5, 8])

    Args:
        num_heads: heads; divides the width D of the tokens.
        attention_dropout_rate: fraction of attention weights dropped in training.
        dropout_rate: fraction of outputs dropped in training.

    Raises:
        ValueError: `num_heads` does not divide the width of the tokens.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        attention_dropout_rate: float = 0.0,
        dropout_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(is_random=attention_dropout_rate > 0 or dropout_rate > 0, **kwargs)
        self.num_heads = num_heads
        self.attention_dropout_rate = attention_dropout_rate
        self.dropout_rate = dropout_rate

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

    def call(
        self,
        inputs: Any,
        training: bool | None = None,
        seed: Any = None,
        residual: Any = None,
    ) -> Any:
        """Drops with `seed`, drawn by `next_seed`; with a fresh one if it is None.

        Adds `residual` (B, N, D) last.
        """
        seeds = split_seed(self.seed_of_call(seed, training), 2)
        qkv = self.qkv(inputs)  # (B, N, 3D)
        if seeds[0] is None or not self.attention_dropout_rate:
            x = backend.self_attention(qkv, self.num_heads)  # (B, N, D)
        else:
            x = self._dropping(qkv, seeds[0])  # (B, N, D)
        return add_dropped(self.out, x, self.dropout_rate, seed=seeds[1], residual=residual)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape

    def _dropping(self, qkv: Any, seed: Any) -> Any:
        query, key, value = (
            split_heads(x, self.num_heads) for x in keras.ops.split(qkv, 3, axis=-1)
        )
        weights = attention_weights(query, key)  # (B, H, N, N)
        weights = dropout(weights, self.attention_dropout_rate, seed=seed)
        return merge_heads(keras.ops.matmul(weights, value))


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


def attention_weights(query: Any, key: Any) -> Any:
    """Returns softmax(query key^T / sqrt(K)), (B, H, N, N); its sums are float32's."""
    query = query * (query.shape[-1] ** -0.5)
    logits = keras.ops.matmul(query, keras.ops.transpose(key, (0, 1, 3, 2)))
    return backend.softmax(logits)
