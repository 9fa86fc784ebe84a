"""A dense layer over tokens, in the two-dimensional form that fuses."""

from typing import Any

import keras

from keras_vit import backend
from keras_vit.layers.initialization import initializer

# google-research/vision_transformer, vit_jax/models_vit.py, MlpBlock.
BIAS_STDDEV = 1e-6


@keras.saving.register_keras_serializable(package="keras_vit")
class TokenDense(keras.layers.Layer):
    """A dense layer with bias on the last axis; tokens are flattened to (B*N, D) for the product.

    Example:
        >>> TokenDense(8, activation="gelu_tanh")(keras.ops.ones((2, 5, 4))).shape
        TensorShape([2, 5, 8])

    Args:
        units: width of the output.
        activation: None, "gelu_tanh" (the original's), "gelu" (exact) or "tanh".
        kernel_initializer: name of a Keras initializer.
        random_bias: draw the bias from N(0, 1e-6) as the original's MLPs do, not zeros.
    """

    def __init__(
        self,
        units: int,
        *,
        activation: str | None = None,
        kernel_initializer: str = "glorot_uniform",
        random_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if activation not in backend.ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {list(backend.ACTIVATIONS)}. Received: {activation!r}."
            )
        self.units = units
        self.activation = activation
        self.kernel_initializer = kernel_initializer
        self.random_bias = random_bias

    def build(self, input_shape: tuple[Any, ...]) -> None:
        bias = keras.initializers.RandomNormal(stddev=BIAS_STDDEV) if self.random_bias else "zeros"
        self.kernel = self.add_weight(
            name="kernel",
            shape=(input_shape[-1], self.units),
            initializer=initializer(self.kernel_initializer),
        )
        self.bias = self.add_weight(name="bias", shape=(self.units,), initializer=initializer(bias))

    def call(self, inputs: Any) -> Any:
        *outer, width = keras.ops.shape(inputs)
        rows = keras.ops.reshape(inputs, (-1, width))  # (B*N, D)
        rows = backend.dense(rows, self.kernel, self.bias, self.activation)  # (B*N, M)
        return keras.ops.reshape(rows, (-1, *outer[1:], self.units))  # (B, N, M)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*input_shape[:-1], self.units)
