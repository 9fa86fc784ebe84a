"""What computes on each token alone: dense layers, normalisation, and the MLP, as they fuse.

Shapes: B images, N tokens, D width of the input, M width of the output, or inside of an MLP.
"""

import gc
from typing import Any

import keras

from keras_vit import backend
from keras_vit.backend import private
from keras_vit.layers.random import RandomLayer, dropout, initializer, split_seed

# The keys of `inner_state` in configs.
CHANGES = "dense"
FROZEN = "frozen"

# google-research/vision_transformer, vit_jax/models_vit.py, MlpBlock.
BIAS_STDDEV = 1e-6

# Keras' other modes, "gptq" and "awq", are calibrated on text.
MODES = ("int8", "int4", "float8")

# What LoRA adds, in the order of files.
_LORA_KERNELS = ("lora_kernel_a", "lora_kernel_b")


class CompositeLayer(keras.layers.Layer):
    """A layer made of others, whose config says what has become of them.

    Keras writes that to the config of the inner layer alone, not to those of the layers around it.
    """

    _inside: dict[str, Any] = {}  # noqa: RUF012, never written to

    @private.config_of_arguments
    def get_config(self) -> dict[str, Any]:
        inside = inner_state(self, f"{self.path}/") if self.built else self._inside
        return {**super().get_config(), **inside}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CompositeLayer":
        arguments, inside = split_state(config)
        layer: CompositeLayer = super().from_config(arguments)
        layer._inside = inside
        return layer

    def restore_inside(self) -> None:
        """Makes new layers what the config says; a subclass builds, then calls this."""
        restore_state(self, self._inside, f"{self.path}/")

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape


def inner_state(layer: keras.layers.Layer, scope: str) -> dict[str, Any]:
    """Returns what has become of the layers inside, for a config; nothing of fresh ones.

    `FROZEN` has the paths of frozen weights, without the scope that they begin with.
    """
    changes = dense_changes(layer)
    frozen = [weight.path.removeprefix(scope) for weight in layer.weights if not weight.trainable]
    if changes:  # LoRA freezes layers that are built anew, whatever has been thawed since
        return {CHANGES: changes, FROZEN: frozen}
    return {FROZEN: frozen} if frozen else {}


def split_state(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a config without `inner_state`, and that."""
    inside = {key: config[key] for key in (CHANGES, FROZEN) if key in config}
    return {key: value for key, value in config.items() if key not in inside}, inside


def restore_state(layer: keras.layers.Layer, inside: dict[str, Any], scope: str) -> None:
    """Makes of new layers inside what `inner_state` of the same scope says."""
    apply_changes(layer, inside.get(CHANGES, {}))
    if not layer.trainable:  # which Keras does not tell the layers inside
        for each in private.layers_of(layer, with_itself=False):
            each.trainable = False
    if FROZEN not in inside:
        return
    frozen = set(inside[FROZEN])
    for weight in layer.weights:
        weight.trainable = weight.path.removeprefix(scope) not in frozen
    for each in private.layers_of(layer, with_itself=False):
        if each.weights and not any(weight.trainable for weight in each.weights):
            each.trainable = False


def dense_changes(layer: keras.layers.Layer) -> dict[str, dict[str, Any]]:
    """Returns which dense layers inside are quantised or adapted by LoRA, by their number."""
    changes = {str(place): _change(dense) for place, dense in enumerate(_dense(layer))}
    return {place: change for place, change in changes.items() if change}


def apply_changes(layer: keras.layers.Layer, changes: dict[str, dict[str, Any]]) -> None:
    """Applies the result of `dense_changes` to new dense layers; their values are loaded later.

    Raises:
        ValueError: there are not so many dense layers.
    """
    inside = {str(place): dense for place, dense in enumerate(_dense(layer))}
    for place, change in changes.items():
        if place not in inside:
            raise ValueError(
                f"The config changes dense layer {place} of {layer.name!r}, which has only "
                f"{len(inside)}; it is the config of another model."
            )
        dense = inside[place]
        if "mode" in change and dense.quantization_mode is None:
            config = keras.saving.deserialize_keras_object(change["quantization_config"])
            dense.quantize(change["mode"], config=config)
        if "lora_rank" in change and not dense.lora_enabled:
            dense.enable_lora(change["lora_rank"], lora_alpha=change["lora_alpha"])


def without_lora(changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns a result of `dense_changes` without the changes of LoRA."""
    remaining = {
        place: {key: value for key, value in change.items() if not key.startswith("lora")}
        for place, change in changes.items()
    }
    return {place: change for place, change in remaining.items() if change}


@keras.saving.register_keras_serializable(package="keras_vit")
class LayerNormalization(keras.layers.Layer):
    """Normalises each token over its width, then scales and shifts it (arXiv 1607.06450).

    Statistics are float32's whatever the dtype. Its weights are those of
    `keras.layers.LayerNormalization`.

    Example:
        >>> LayerNormalization()(keras.ops.ones((2, 5, 8))).shape
        TensorShape([2, 5, 8])

    Args:
        epsilon: added to the variance.

    Input shape: (..., D). Output shape: the same.
    """

    def __init__(self, *, epsilon: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def build(self, input_shape: tuple[Any, ...]) -> None:
        shape = (input_shape[-1],)
        self.gamma = self.add_weight(name="gamma", shape=shape, initializer=initializer("ones"))
        self.beta = self.add_weight(name="beta", shape=shape, initializer=initializer("zeros"))

    def call(self, inputs: Any) -> Any:
        return backend.layer_norm(inputs, self.gamma, self.beta, epsilon=self.epsilon)

    def compute_output_shape(self, input_shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return input_shape


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
        activation: None, "gelu_tanh" (the original's), "gelu" (exact), "quick_gelu" (OpenAI's) or
            "tanh".
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
        initializers = self.kernel_initializer, self.bias_initializer
        self.kernel_initializer, self.bias_initializer = map(initializer, initializers)
        super().build(input_shape)
        self.kernel_initializer, self.bias_initializer = initializers

    def call(
        self, inputs: Any, residual: Any = None, scale: Any = None, training: bool | None = None
    ) -> Any:
        """Adds `residual` (B, N, M) to the result, in the same kernel where that is possible.

        With `scale` (M,), for a layer without activation and LoRA, the kernel is multiplied by it.
        """
        kernel, bias = private.stored_kernel(self), self.bias
        if self.lora_enabled:
            *outer, width = keras.ops.shape(inputs)
            rows = keras.ops.reshape(inputs, (-1, width))  # (B*N, D): one product, not one an image
            rows = keras.ops.matmul(keras.ops.matmul(rows, self.lora_kernel_a), self.lora_kernel_b)
            change = keras.ops.reshape(rows, (-1, *outer[1:], self.units))  # (B, N, M)
            x = backend.dense(inputs, kernel, bias) + self.lora_alpha / self.lora_rank * change
            return _add(residual, self.activation(x))
        if scale is not None:
            # s (x k + b) = x (s k) + s b: so the product can add the residual, which is not scaled.
            kernel, bias = keras.ops.multiply(kernel, scale), keras.ops.multiply(bias, scale)
        return backend.dense(  # (B, N, M)
            inputs, kernel, bias, self.activation_name, residual=residual
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
        # Keras lets the garbage collector look at every object there is, three times a layer: B/16
        # takes 17 s, and 2 s where it looks at the new ones alone, with as much memory.
        gc.freeze()
        try:
            # Keras refuses subclasses of its layer, for they might compute something else.
            super().quantize(mode, type_check=False, config=config)
        finally:
            gc.unfreeze()

    def enable_lora(
        self,
        rank: int,
        lora_alpha: float | None = None,
        a_initializer: Any = "he_uniform",
        b_initializer: Any = "zeros",
    ) -> None:
        """Adds a trainable product of two low-rank matrices to the kernel (LoRA, arXiv 2106.09685).

        The second matrix is zero, so nothing changes until it is trained. The kernel is frozen;
        `keras_vit.lora` freezes what else there is.

        Args:
            rank: width of the low-rank matrices.
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
        for index, variable in enumerate(self._stored_variables()):
            store[str(index)] = variable

    def load_own_variables(self, store: Any) -> None:
        variables = self._stored_variables()
        if self.lora_enabled and len(store.keys()) == len(variables) - len(_LORA_KERNELS):
            # A file of the model from before it was adapted.
            variables = variables[: -len(_LORA_KERNELS)]
            self.lora_kernel_b.assign(keras.ops.zeros_like(self.lora_kernel_b))
        elif len(store.keys()) != len(variables):
            raise ValueError(
                f"The layer {self.path!r} has {len(variables)} variables, the file has "
                f"{len(store.keys())} for it; load the weights of a model that was made alike."
            )
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

    def _stored_variables(self) -> list[keras.Variable]:
        names = (*self.variable_serialization_spec[self.quantization_mode], *_LORA_KERNELS)
        variables = (
            private.stored_kernel(self) if name == "kernel" else getattr(self, name, None)
            for name in names
        )
        return [variable for variable in variables if variable is not None]


@keras.saving.register_keras_serializable(package="keras_vit")
class MLP(CompositeLayer, RandomLayer):
    """Two dense layers with an activation between, dropout after each (arXiv 2010.11929, 3.1).

    Example:
        >>> MLP(mlp_dim=32)(keras.ops.ones((2, 5, 8))).shape
        TensorShape([2, 5, 8])

    Args:
        mlp_dim: width M of the hidden layer; the output has the input's width D.
        activation: "gelu_tanh" (the original's), "gelu" (exact), "quick_gelu" (OpenAI's), or
            "swiglu" (arXiv 2002.05202): the first layer makes a gate and a value of width M each,
            and silu(gate) * value goes on.
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
        self.restore_inside()

    def call(
        self,
        inputs: Any,
        training: bool | None = None,
        seed: Any = None,
        residual: Any = None,
        scale: Any = None,
    ) -> Any:
        """Drops with `seed`, drawn by `next_seed`; with a new one if it is None.

        Multiplies by `scale` (D,) and adds `residual` (B, N, D) last.
        """
        hidden, out = split_seed(self.seed_of_call(seed, training), 2)
        x = self.fc1(inputs)  # (B, N, M)
        if self.is_gated:
            gate, value = keras.ops.split(x, 2, axis=-1)
            x = keras.ops.silu(gate) * value  # (B, N, M)
        x = dropout(x, self.dropout_rate, seed=hidden)
        return add_dropped(self.fc2, x, self.dropout_rate, seed=out, residual=residual, scale=scale)


def add_dropped(
    layer: TokenDense, x: Any, rate: float, *, seed: Any, residual: Any, scale: Any = None
) -> Any:
    """Applies a layer, dropout and a scale, and adds the residual; in the layer where it can be.

    Args:
        layer: from (B, N, D) to (B, N, M).
        x: (B, N, D).
        rate: fraction of the layer's output that is dropped.
        seed: two integers, or None, which drops nothing.
        residual: (B, N, M), or None.
        scale: factors (M,) of the output's channels, or None.
    """
    is_dropping = seed is not None and rate
    is_plain = not layer.lora_enabled and layer.quantization_mode is None
    if not is_dropping and scale is None:
        return layer(x, residual=residual)
    if not is_dropping and is_plain and backend.fuses_scale(x):
        return layer(x, residual=residual, scale=scale)
    # Dropout and scale stand between product and residual, so that the product cannot add it.
    x = dropout(layer(x), rate, seed=seed)
    return _add(residual, x if scale is None else x * keras.ops.cast(scale, x.dtype))


def _dense(layer: keras.layers.Layer) -> list[keras.layers.Dense]:
    inside = private.layers_of(layer, with_itself=False)
    return [each for each in inside if isinstance(each, keras.layers.Dense)]


def _change(dense: keras.layers.Dense) -> dict[str, Any]:
    change: dict[str, Any] = {}
    if dense.quantization_mode is not None:
        config = keras.saving.serialize_keras_object(dense.quantization_config)
        change |= {"mode": dense.quantization_mode, "quantization_config": config}
    if dense.lora_enabled:
        change |= {"lora_rank": dense.lora_rank, "lora_alpha": dense.lora_alpha}
    return change


def _add(residual: Any, x: Any) -> Any:
    return x if residual is None else residual + x
