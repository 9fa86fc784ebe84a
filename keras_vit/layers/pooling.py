"""From tokens to one vector: the class token, average, both, maximum, or attention pooling.

Shapes: B images, N tokens (prefix tokens first, then patches), D hidden_dim, M mlp_dim, H heads.
"""

from typing import Any

import keras

from keras_vit.layers.attention import (
    attention_weights,
    check_heads,
    merge_heads,
    record,
    split_heads,
)
from keras_vit.layers.dense import MLP, CompositeLayer, LayerNormalization, TokenDense
from keras_vit.layers.random import initializer


@keras.saving.register_keras_serializable(package="keras_vit")
class TokenPooling(keras.layers.Layer):
    """Takes one token, the average or the largest values of the patch tokens, or two of these.

    Example:
        >>> TokenPooling("avg", num_prefix_tokens=1)(keras.ops.ones((2, 5, 8))).shape
        TensorShape([2, 8])

    Args:
        pooling: "token" for one of the first tokens, "avg" and "max" for the mean and the maximum
            over the patch tokens, "token_avg" for that token and the mean side by side.
        num_prefix_tokens: tokens before the patches', which "avg" and "max" leave out.
        token: which token "token" takes; 0 is the class token.

    Input shape: (B, N, D). Output shape: (B, D), with "token_avg" (B, 2 D).
    """

    def __init__(
        self, pooling: str, *, num_prefix_tokens: int = 1, token: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if pooling not in ("token", "avg", "token_avg", "max"):
            raise ValueError(
                'pooling must be "token", "avg", "token_avg" or "max". '
                f"Received: pooling={pooling!r}."
            )
        self.pooling = pooling
        self.num_prefix_tokens = num_prefix_tokens
        self.token = token

    def call(self, inputs: Any) -> Any:
        if self.pooling == "token":
            return inputs[:, self.token]  # (B, D)
        pool = keras.ops.max if self.pooling == "max" else keras.ops.mean
        pooled = pool(inputs[:, self.num_prefix_tokens :], axis=1)  # (B, D)
        if self.pooling == "token_avg":
            return keras.ops.concatenate([inputs[:, self.token], pooled], axis=-1)  # (B, 2 D)
        return pooled

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        width = input_shape[-1]
        return (input_shape[0], 2 * width if self.pooling == "token_avg" else width)


@keras.saving.register_keras_serializable(package="keras_vit")
class AttentionPooling(CompositeLayer):
    """Pools by multi-head attention from one learned query, then an MLP (arXiv 2106.04560).

    Example:
        >>> AttentionPooling(num_heads=2, mlp_dim=32)(keras.ops.ones((2, 5, 8))).shape
        TensorShape([2, 8])

    Args:
        num_heads: attention heads; divides the width D of the tokens.
        mlp_dim: width M of the MLP's hidden layer.
        activation: of the MLP, as there.
        layer_norm_epsilon: epsilon of the layer normalisation before the MLP.

    Input shape: (B, N, D). Output shape: (B, D).
    """

    def __init__(
        self,
        num_heads: int,
        mlp_dim: int,
        *,
        activation: str = "gelu_tanh",
        layer_norm_epsilon: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        dtype = self.dtype_policy.name
        self.num_heads = num_heads
        self.norm = LayerNormalization(epsilon=layer_norm_epsilon, dtype=dtype, name="norm")
        self.mlp = MLP(mlp_dim, activation=activation, dtype=dtype, name="mlp")

    def build(self, input_shape: tuple[Any, ...]) -> None:
        hidden_dim, dtype = input_shape[-1], self.dtype_policy.name
        check_heads(hidden_dim, self.num_heads)
        self.probe = self.add_weight(
            name="probe", shape=(1, 1, hidden_dim), initializer=initializer("glorot_uniform")
        )
        self.query = TokenDense(hidden_dim, dtype=dtype, name="query")
        # LeCun uniform on the fused kernel (D, 2D) is Xavier uniform on each of its halves (D, D).
        self.key_value = TokenDense(
            2 * hidden_dim, kernel_initializer="lecun_uniform", dtype=dtype, name="key_value"
        )
        self.out = TokenDense(hidden_dim, dtype=dtype, name="out")
        for layer in (self.query, self.key_value, self.out, self.norm, self.mlp):
            layer.build((input_shape[0], 1, hidden_dim))
        self.restore_inside()

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        batch, _, hidden_dim = keras.ops.shape(inputs)
        probe = keras.ops.cast(self.probe, inputs.dtype)
        # All images have the same query: it is projected once, then repeated.
        query = keras.ops.broadcast_to(self.query(probe), (batch, 1, hidden_dim))
        key, value = keras.ops.split(self.key_value(inputs), 2, axis=-1)  # (B, N, D) each
        query, key, value = (split_heads(x, self.num_heads) for x in (query, key, value))
        weights = record(self, attention_weights(query, key))  # (B, H, 1, N)
        x = self.out(merge_heads(keras.ops.matmul(weights, value)))  # (B, 1, D)
        x = self.mlp(self.norm(x), training=training, residual=x)
        return x[:, 0]  # (B, D)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (input_shape[0], input_shape[-1])
