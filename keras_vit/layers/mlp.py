"""The MLP of a Transformer block."""

from typing import Any

import keras

from keras_vit.layers.dense import TokenDense


@keras.saving.register_keras_serializable(package="keras_vit")
class MLP(keras.layers.Layer):
    """Two dense layers with a GELU between, dropout after each (arXiv 2010.11929, 3.1).

    Example:
        >>> MLP(mlp_dim=32)(keras.ops.ones((2, 5, 8))).shape
        TensorShape([2, 5, 8])

    Args:
        mlp_dim: width M of the hidden layer; the output has the input's width D.
        activation: "gelu_tanh" (the original's) or "gelu" (exact).
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
        super().__init__(**kwargs)
        self.mlp_dim = mlp_dim
        self.fc1 = TokenDense(
            mlp_dim,
            activation=activation,
            random_bias=True,
            dtype=self.dtype_policy.name,
            name="fc1",
        )
        self.dropout = keras.layers.Dropout(dropout_rate, dtype=self.dtype_policy.name)

    def build(self, input_shape: tuple[Any, ...]) -> None:
        self.fc2 = TokenDense(
            input_shape[-1], random_bias=True, dtype=self.dtype_policy.name, name="fc2"
        )
        self.fc1.build(input_shape)
        self.fc2.build((*input_shape[:-1], self.mlp_dim))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        x = self.dropout(self.fc1(inputs), training=training)  # (B, N, M)
        return self.dropout(self.fc2(x), training=training)  # (B, N, D)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape
