"""The MLP of a Transformer block."""

from typing import Any

import keras

from keras_vit.layers.composite import CompositeLayer
from keras_vit.layers.dense import TokenDense, add_dropped
from keras_vit.layers.random import RandomLayer, dropout, split_seed


@keras.saving.register_keras_serializable(package="keras_vit")
class MLP(CompositeLayer, RandomLayer):
    """Two dense layers with an activation between, dropout after each (arXiv 2010.11929, 3.1).

    Example:
        >>> MLP(mlp_dim=32)(keras.ops.ones((2, 5, 8))).shape
        TensorShape([2, 5, 8])

    Args:
        mlp_dim: width M of the hidden layer; the output has the input's width D.
        activation: "gelu_tanh" (the original's), "gelu" (exact), or "swiglu" (arXiv 2002.05202):
            the first layer makes a gate and a value of width M each, and silu(gate) * value goes
            on.
        dropout_rate: fraction of activations dropped in training.
    """

    def __init__(
        self,
        mlp_dim: int,
        *,
        activation: str = "gelu_tanh",
        dropout_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(is_random=dropout_rate > 0, **kwargs)
        self.mlp_dim = mlp_dim
        self.dropout_rate = dropout_rate
        self.is_gated = activation == "swiglu"
        self.fc1 = TokenDense(
            2 * mlp_dim if self.is_gated else mlp_dim,
            activation=None if self.is_gated else activation,
            random_bias=True,
            dtype=self.dtype_policy.name,
            name="fc1",
        )

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.fc2 = TokenDense(
            input_shape[-1], random_bias=True, dtype=self.dtype_policy.name, name="fc2"
        )
        self.fc1.build(input_shape)
        self.fc2.build((*input_shape[:-1], self.mlp_dim))
        self.change_dense()

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
        hidden, out = split_seed(self.seed_of_call(seed, training), 2)
        x = self.fc1(inputs)  # (B, N, M)
        if self.is_gated:
            gate, value = keras.ops.split(x, 2, axis=-1)
            x = keras.ops.silu(gate) * value  # (B, N, M)
        x = dropout(x, self.dropout_rate, seed=hidden)
        return add_dropped(self.fc2, x, self.dropout_rate, seed=out, residual=residual)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape
