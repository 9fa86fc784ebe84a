"""A dense layer over tokens, in the form that fuses."""

from typing import Any

import keras

from keras_vit import backend
from keras_vit.layers.initialization import initializer
from keras_vit.layers.random import dropout

# google-research/vision_transformer, vit_jax/models_vit.py, MlpBlock.
BIAS_STDDEV = 1e-6
# Uniform up to 1 / sqrt(width): microsoft/LoRA, loralib/layers.py, reset_parameters.
LORA_UNIFORM = keras.initializers.VarianceScaling(1 / 3, mode="fan_in", distribution="uniform")


@keras.saving.register_keras_serializable(package="keras_vit")
class TokenDense(keras.layers.Layer):
    """A dense layer with bias on the last axis, which one kernel computes where it can.

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
        self.lora_rank = 0

    def build(self, input_shape: tuple[Any, ...]) -> None:
        bias = keras.initializers.RandomNormal(stddev=BIAS_STDDEV) if self.random_bias else "zeros"
        self.kernel = self.add_weight(
            name="kernel",
            shape=(input_shape[-1], self.units),
            initializer=initializer(self.kernel_initializer),
        )
        self.bias = self.add_weight(name="bias", shape=(self.units,), initializer=initializer(bias))

    def call(self, inputs: Any, residual: Any = None) -> Any:
        """Adds `residual` (B, N, M) to the result, in the same kernel where that is possible."""
        if self.lora_rank:
            x = self._adapted(inputs)  # (B, N, M)
            return x if residual is None else residual + x
        return backend.dense(  # (B, N, M)
            inputs, self.kernel, self.bias, self.activation, residual=residual
        )

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*input_shape[:-1], self.units)

    def enable_lora(self, rank: int, *, alpha: float | None = None) -> None:
        """Adds a trainable product of two thin matrices to the kernel (LoRA, arXiv 2106.09685).

        The second matrix is zero, so nothing changes until it is trained. Freezing what else there
        is, is the caller's part, as `keras_vit.lora` does.

        Args:
            rank: width of the thin matrices.
            alpha: the product is scaled by alpha / rank; None for rank, a scale of 1.

        Raises:
            ValueError: the layer is not built, has it already, or the rank does not fit.
        """
        if not self.built or self.lora_rank:
            state = "not built" if not self.built else f"adapted at rank {self.lora_rank} already"
            raise ValueError(f"Only a built layer can be adapted, once. {self.path!r} is {state}.")
        if not 1 <= rank <= min(self.kernel.shape):
            raise ValueError(
                f"rank must be from 1 to {min(self.kernel.shape)}, the smaller side of the kernel "
                f"of {self.path!r}. Received: rank={rank!r}."
            )
        width, units = self.kernel.shape
        # As keras.layers.Dense.enable_lora does: a built layer takes no weights otherwise.
        self._tracker.unlock()
        self.lora_a = self.add_weight(name="lora_a", shape=(width, rank), initializer=LORA_UNIFORM)
        self.lora_b = self.add_weight(name="lora_b", shape=(rank, units), initializer="zeros")
        self._tracker.lock()
        self.lora_rank = rank
        self.lora_scale = (rank if alpha is None else alpha) / rank

    def _adapted(self, inputs: Any) -> Any:
        *outer, width = keras.ops.shape(inputs)
        rows = keras.ops.reshape(inputs, (-1, width))  # (B*N, D): one product, not one an image
        change = keras.ops.matmul(keras.ops.matmul(rows, self.lora_a), self.lora_b)
        change = keras.ops.reshape(change, (-1, *outer[1:], self.units))
        x = backend.dense(inputs, self.kernel, self.bias)
        return backend.ACTIVATIONS[self.activation](x + self.lora_scale * change)


def add_dropped(layer: TokenDense, x: Any, rate: float, *, seed: Any, residual: Any) -> Any:
    """Applies a layer, then dropout; then adds the residual, in the layer itself if nothing drops.

    Args:
        layer: from (B, N, D) to (B, N, M).
        x: (B, N, D).
        rate: fraction of the layer's output that is dropped.
        seed: two integers, or None, which drops nothing.
        residual: (B, N, M), or None.
    """
    if seed is None or not rate:
        return layer(x, residual=residual)
    x = dropout(layer(x), rate, seed=seed)
    return x if residual is None else residual + x
