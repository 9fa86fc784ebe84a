"""A dense layer over tokens, in the form that fuses."""

from typing import Any

import keras

from keras_vit import backend
from keras_vit.layers.initialization import initializer
from keras_vit.layers.random import dropout

# google-research/vision_transformer, vit_jax/models_vit.py, MlpBlock.
BIAS_STDDEV = 1e-6
# Keras' other modes, "gptq" and "awq", are calibrated on text.
MODES = ("int8", "int4", "float8")
# What LoRA adds, in the order of files.
_THIN = ("lora_kernel_a", "lora_kernel_b")


@keras.saving.register_keras_serializable(package="keras_vit")
class TokenDense(keras.layers.Dense):
    """A dense layer with bias on the last axis, which one kernel computes where it can.

    What `keras.layers.Dense` can do beside that is Keras': `quantize` to "int8", "int4" or
    "float8", and `enable_lora`. What LoRA adds is saved beside the kernel, not added to it.

    Example:
        >>> TokenDense(8, activation="gelu_tanh")(keras.ops.ones((2, 5, 4))).shape
        TensorShape([2, 5, 8])

    Args:
        units: width of the output.
        activation: None, "gelu_tanh" (the original's), "gelu" (exact) or "tanh".
        kernel_initializer: name of a Keras initializer.
        random_bias: draw the bias from N(0, 1e-6) as the original's MLPs do, not zeros.
    """

    kernel_initializer: Any
    bias_initializer: Any

    def __init__(
        self,
        units: int,
        *,
        activation: str | None = None,
        kernel_initializer: str = "glorot_uniform",
        random_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        if activation not in backend.ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {list(backend.ACTIVATIONS)}. Received: {activation!r}."
            )
        # Made here: an initializer draws its seed where it is made, after `set_random_seed`.
        random = keras.initializers.RandomNormal(stddev=BIAS_STDDEV)
        super().__init__(
            units,
            activation=backend.ACTIVATIONS[activation],
            kernel_initializer=kernel_initializer,
            bias_initializer=random if random_bias else "zeros",
            **kwargs,
        )
        self.activation_name = activation
        self._kernel_initializer_name = kernel_initializer
        self.random_bias = random_bias

    def build(self, input_shape: tuple[Any, ...]) -> None:
        wanted = self.kernel_initializer, self.bias_initializer
        self.kernel_initializer, self.bias_initializer = map(initializer, wanted)
        super().build(input_shape)
        self.kernel_initializer, self.bias_initializer = wanted

    def call(self, inputs: Any, residual: Any = None, training: bool | None = None) -> Any:
        """Adds `residual` (B, N, M) to the result, in the same kernel where that is possible."""
        if self.lora_enabled:
            return _add(residual, self._adapted(inputs))  # (B, N, M)
        return backend.dense(  # (B, N, M)
            inputs, self._kernel, self.bias, self.activation_name, residual=residual
        )

    def quantized_call(
        self, inputs: Any, residual: Any = None, training: bool | None = None
    ) -> Any:
        """As `call`, where the layer is quantised."""
        return _add(residual, super().quantized_call(inputs, training=training))

    def quantize(
        self, mode: str | None = None, type_check: bool = True, config: Any = None
    ) -> None:
        """Makes the kernel int8 or int4, or the products float8; see `keras.Model.quantize`.

        Raises:
            ValueError: the mode needs calibration.
        """
        if mode not in MODES:
            raise ValueError(
                f"The dense layers of a Vision Transformer are quantised in the modes {MODES}; "
                f"the others need calibration on text. Received: mode={mode!r}."
            )
        # Keras refuses subclasses of its layer, for they might compute something else.
        super().quantize(mode, type_check=False, config=config)

    def enable_lora(
        self,
        rank: int,
        lora_alpha: float | None = None,
        a_initializer: Any = "he_uniform",
        b_initializer: Any = "zeros",
    ) -> None:
        """Adds a trainable product of two thin matrices to the kernel (LoRA, arXiv 2106.09685).

        The second matrix is zero, so nothing changes until it is trained. The kernel is frozen;
        `keras_vit.lora` freezes what else there is.

        Args:
            rank: width of the thin matrices.
            lora_alpha: the product is scaled by lora_alpha / rank; None for rank, a scale of 1.
            a_initializer: of the first matrix.
            b_initializer: of the second.

        Raises:
            ValueError: the layer is not built, has it already, or the rank does not fit.
        """
        if not self.built or self.lora_enabled:
            state = "not built" if not self.built else f"adapted at rank {self.lora_rank} already"
            raise ValueError(f"Only a built layer can be adapted, once. {self.path!r} is {state}.")
        if not 1 <= rank <= min(self.kernel.shape):
            raise ValueError(
                f"rank must be from 1 to {min(self.kernel.shape)}, the smaller side of the kernel "
                f"of {self.path!r}. Received: rank={rank!r}."
            )
        # Keras forgets the alpha of a config, where it enables what the config has.
        alpha = self.lora_alpha if lora_alpha is None else lora_alpha
        super().enable_lora(rank, alpha, a_initializer, b_initializer)

    def save_own_variables(self, store: Any) -> None:
        # Keras' own adds LoRA to the kernel, so that training could not go on.
        for index, variable in enumerate(self._stored()):
            store[str(index)] = variable

    def load_own_variables(self, store: Any) -> None:
        variables = self._stored()
        if self.lora_enabled and len(store.keys()) == len(variables) - len(_THIN):
            # A file of the model from before it was adapted.
            variables = variables[: -len(_THIN)]
            self.lora_kernel_b.assign(keras.ops.zeros_like(self.lora_kernel_b))
        else:
            self._check_load_own_variables(store)
        for index, variable in enumerate(variables):
            variable.assign(store[str(index)])

    def get_config(self) -> dict[str, Any]:
        config = {
            **keras.layers.Layer.get_config(self),  # Dense's own has much that is settled here
            "units": self.units,
            "activation": self.activation_name,
            "kernel_initializer": self._kernel_initializer_name,
            "random_bias": self.random_bias,
        }
        if self.lora_enabled:
            config |= {"lora_rank": self.lora_rank, "lora_alpha": self.lora_alpha}
        if self.quantization_config is not None:
            serialized = keras.saving.serialize_keras_object(self.quantization_config)
            config["quantization_config"] = serialized
        return config

    def _stored(self) -> list[keras.Variable]:
        """Returns the variables of a file, in its order."""
        names = (*self.variable_serialization_spec[self.quantization_mode], *_THIN)
        found = (getattr(self, "_kernel" if name == "kernel" else name, None) for name in names)
        return [variable for variable in found if variable is not None]

    def _adapted(self, inputs: Any) -> Any:
        *outer, width = keras.ops.shape(inputs)
        rows = keras.ops.reshape(inputs, (-1, width))  # (B*N, D): one product, not one an image
        change = keras.ops.matmul(keras.ops.matmul(rows, self.lora_kernel_a), self.lora_kernel_b)
        change = keras.ops.reshape(change, (-1, *outer[1:], self.units))
        x = backend.dense(inputs, self._kernel, self.bias)
        return self.activation(x + self.lora_alpha / self.lora_rank * change)


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
    return _add(residual, dropout(layer(x), rate, seed=seed))


def _add(residual: Any, x: Any) -> Any:
    return x if residual is None else residual + x
