"""All operations in `keras.ops` alone, for any Keras backend.

Shapes: B images, N tokens, D hidden_dim, M units of a dense layer, H heads, K = D / H; in images
(B, H, W, C) H and W pixels, C channels.
"""

import contextlib
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np

from keras_vit.backend import private

# `ExactTrainer` is a mixin; the type checker sees it as a model.
if TYPE_CHECKING:
    from keras import Model as _Model
else:
    _Model = object

# What every backend has, and `keras_vit.backend` gives.
__all__ = ["ACTIVATIONS", "ALIGNMENT", "ExactTrainer", "adam_step", "dense", "empty",
           "flatten_batch", "from_numpy_without_copy", "fuses_scale", "is_concrete",
           "is_in_scope", "layer_norm", "momentum_step", "remat", "replica_id", "scan_layers",
           "scope_of", "self_attention", "softmax", "space_to_depth", "values_of",
           "warn_of_keras_step"]  # fmt: skip

ALIGNMENT = 1  # bytes
SAM_EPSILON = 1e-12  # keeps the division of sharpness-aware minimisation finite
# Options of `compile` that Keras' own step does not have.
OPTION_DEFAULTS = {"gradient_accumulation_steps": 1, "sam_rho": 0.0, "report_gradient_norm": False}

ACTIVATIONS = {
    None: lambda x: x,
    "gelu_tanh": lambda x: keras.ops.gelu(x, approximate=True),
    "gelu": lambda x: keras.ops.gelu(x, approximate=False),
    "quick_gelu": lambda x: x * keras.ops.sigmoid(1.702 * x),
    "tanh": keras.ops.tanh,
}


def dense(
    x: Any, kernel: Any, bias: Any, activation: str | None = None, *, residual: Any = None
) -> Any:
    """Returns activation(x kernel + bias) + residual, (..., M), for x (..., D), kernel (D, M)."""
    x = ACTIVATIONS[activation](keras.ops.add(keras.ops.matmul(x, kernel), bias))
    return x if residual is None else residual + x


def fuses_scale(x: Any) -> bool:
    """Returns False: what scales a product of x is fused with it, or is no slower after it."""
    return False


def layer_norm(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Normalises x (..., D) over the last axis, in float32, then applies gamma and beta (D,)."""
    # In 16 bits the sums over a token would lose most of their digits.
    x32, gamma, beta = (keras.ops.cast(each, "float32") for each in (x, gamma, beta))
    mean, variance = keras.ops.moments(x32, axes=-1, keepdims=True)
    normalized = (x32 - mean) * keras.ops.rsqrt(variance + epsilon)
    return keras.ops.cast(normalized * gamma + beta, x.dtype)


def softmax(x: Any) -> Any:
    """Returns the softmax of x over the last axis, in its dtype, computed in float32."""
    return keras.ops.cast(keras.ops.softmax(keras.ops.cast(x, "float32"), axis=-1), x.dtype)


def self_attention(qkv: Any, num_heads: int, *, bias: Any = None) -> Any:
    """Returns multi-head attention (B, N, D) of queries, keys and values (B, N, 3D).

    Args:
        qkv: queries, keys and values, each by heads.
        num_heads: heads H.
        bias: added to the logits, (H, N, N), or None.
    """
    _, tokens, width = keras.ops.shape(qkv)
    size = width // 3 // num_heads
    x = keras.ops.reshape(qkv, (-1, tokens, 3, num_heads, size))
    # (3, B, H, N, K): one transposition for all three.
    query, key, value = keras.ops.unstack(keras.ops.transpose(x, (2, 0, 3, 1, 4)))
    # Scaled before the product: the logits are N / K times as large as the queries.
    logits = keras.ops.matmul(query * size**-0.5, keras.ops.transpose(key, (0, 1, 3, 2)))
    x = keras.ops.matmul(softmax(logits if bias is None else logits + bias), value)  # (B, H, N, K)
    return keras.ops.reshape(keras.ops.transpose(x, (0, 2, 1, 3)), (-1, tokens, width // 3))


def space_to_depth(images: Any, block: int) -> Any:
    """Rearranges images (B, H, W, C) into blocks (B, H/block, W/block, block * block * C)."""
    _, height, width, channels = images.shape
    x = keras.ops.reshape(images, (-1, height // block, block, width // block, block, channels))
    # Pixels of a patch in row order, channels last: the order of the published patch kernels.
    x = keras.ops.transpose(x, (0, 1, 3, 2, 4, 5))
    return keras.ops.reshape(x, (-1, height // block, width // block, block * block * channels))


def from_numpy_without_copy(array: np.ndarray) -> Any:
    """Returns the array's values for a variable; the array must not change afterwards."""
    return array


def values_of(variable: Any) -> np.ndarray:
    """Returns the present values; in the computer's memory they need not be copied."""
    return np.asarray(keras.ops.convert_to_numpy(variable.value))


def empty(shape: Any, dtype: Any = None) -> Any:
    """Returns an array with any values; a Keras initializer for what is overwritten."""
    return keras.ops.zeros(shape, dtype)


def is_concrete(x: Any) -> bool:
    """Whether x has values now, and is not traced."""
    return not isinstance(x, keras.KerasTensor)


def remat(function: Callable[..., Any], kept: str | None = None) -> Callable[..., Any]:
    """Returns a function of tensors that is computed again for its gradient.

    Args:
        function: takes tensors alone.
        kept: what is not computed again, one of JAX's policies; None for nothing.

    Raises:
        ValueError: something is to be kept; only JAX can.
    """
    if kept is not None:
        raise ValueError(
            f"remat={kept!r} works on JAX: set KERAS_BACKEND=jax, or choose remat=True, which "
            f"recomputes all of a block. Received: the backend {keras.backend.backend()!r}."
        )
    recomputed: Callable[..., Any] = keras.remat(function)
    return recomputed


def flatten_batch(x: Any) -> Any:
    """Returns x (B, ...), whose images lie on the devices they came to."""
    return x


# Runs alike layers as one; None where each is traced by itself.
scan_layers: Any = None


def adam_step(*arguments: Any, **options: Any) -> bool:
    """Returns False, for no fused kernel: the compiled step of the optimizer is as fast."""
    return False


momentum_step = adam_step


def replica_id() -> Any:
    """Returns the replica of this computation: 0, since arrays are global."""
    return 0


def scope_of(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Returns the scope in which the model's variables were made: there is only one."""
    return contextlib.nullcontext()


def is_in_scope(model: keras.Model) -> bool:
    """Whether a model's variables lie where those made in this scope do."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return True
    layouts = [distribution.get_variable_layout(variable) for variable in model.variables]
    return all(
        getattr(variable.value, "sharding", None) == layout.backend_layout
        for variable, layout in zip(model.variables, layouts, strict=True)
    )


def warn_of_keras_step() -> None:
    """Does not warn: Keras' own training step is exact here."""


class StepOptions(_Model):
    """What the training steps of TensorFlow and JAX share: their options, and files of them."""

    _accumulation_steps = 1
    _sam_rho = 0.0
    _norm: Any = None

    _compiles_itself = False  # whether the step compiles what it runs, in place of Keras

    def compile(
        self,
        optimizer: Any = "rmsprop",
        *args: Any,
        gradient_accumulation_steps: int = 1,
        sam_rho: float = 0.0,
        report_gradient_norm: bool = False,
        jit_compile: bool | Literal["auto"] = "auto",
        **kwargs: Any,
    ) -> None:
        """Configures training, with the arguments of `keras.Model.compile` and a few more.

        Args:
            optimizer: any Keras optimizer; wrapped in a `LossScaleOptimizer` if layers compute in
                float16. Under several replicas its `apply` sums gradients before it clips them, in
                any caller.
            args: of `keras.Model.compile`.
            gradient_accumulation_steps: micro-batches of the batch, under TensorFlow of that of a
                replica, which run one after another, in the memory of one, and their gradients are
                summed.
            sam_rho: radius of sharpness-aware minimisation (arXiv 2010.01412); 0 for none. A step
                takes twice the time.
            report_gradient_norm: whether the logs have "gradient_norm", the norm before clipping,
                mean over the epoch.
            jit_compile: whether XLA compiles the forward and backward pass; "auto" for GPUs, and
                on JAX. On a CPU TensorFlow's XLA is slower, and does not use bfloat16 units; a TPU
                always compiles.
            kwargs: of `keras.Model.compile`.

        Raises:
            ValueError: an option is out of range, cannot be exact under the strategy, or is one
                that only TensorFlow and JAX have.
        """
        options = (gradient_accumulation_steps, sam_rho, report_gradient_norm)
        self.check_options(dict(zip(OPTION_DEFAULTS, options, strict=True)))
        jit = False if self._compiles_itself else jit_compile
        super().compile(self.scaled(optimizer), *args, jit_compile=jit, **kwargs)
        self.prepare_step(jit_compile)
        self._accumulation_steps, self._sam_rho = gradient_accumulation_steps, sam_rho
        self._norm = None
        if report_gradient_norm:
            # In a namespace Keras does not find the metric, and does not report it in evaluation.
            self._norm = types.SimpleNamespace(value=keras.metrics.Mean(name="gradient_norm"))

    def check_options(self, options: dict[str, Any]) -> None:
        """Raises a ValueError for options out of range."""
        if options["gradient_accumulation_steps"] < 1 or options["sam_rho"] < 0:
            raise ValueError(
                "gradient_accumulation_steps must be at least 1 and sam_rho at least 0. Received: "
                f"gradient_accumulation_steps={options['gradient_accumulation_steps']!r}, "
                f"sam_rho={options['sam_rho']!r}."
            )

    def prepare_step(self, jit_compile: bool | Literal["auto"]) -> None:
        """Does what a backend's own step needs once the model is compiled."""

    def check_trainable(self) -> None:
        """Raises a ValueError if there is nothing to train."""
        if self.built and not self.trainable_variables:
            raise ValueError("There is nothing to train: every weight of the model is frozen.")

    def scaled(self, optimizer: Any) -> Any:
        """Returns the optimizer, with a loss scale if layers compute in float16."""
        optimizer = keras.optimizers.get(optimizer)
        layers = private.layers_of(self)
        is_half = any(layer.compute_dtype == "float16" for layer in layers)
        # Keras would look at the model's own policy alone, not at those of its layers.
        has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if optimizer is None or not is_half or has_scale:
            return optimizer
        return keras.optimizers.LossScaleOptimizer(optimizer)

    def get_compile_config(self) -> dict[str, Any] | None:
        config = super().get_compile_config()
        own = (self._accumulation_steps, self._sam_rho, self._norm is not None)
        pairs = zip(OPTION_DEFAULTS, own, strict=True)
        # Without defaults, so that a `keras.Model` can be compiled from the config.
        options = {name: value for name, value in pairs if value != OPTION_DEFAULTS[name]}
        return config and {**config, **options}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)


class ExactTrainer(StepOptions):
    """Keeps Keras' own training step, which is exact where arrays are global, as on JAX."""

    def check_options(self, options: dict[str, Any]) -> None:
        for name in _unsupported(options):
            raise ValueError(
                f"compile({name}=...) works on TensorFlow and JAX; set KERAS_BACKEND to one of "
                f"them, or leave {name} at {OPTION_DEFAULTS[name]}. "
                f"Received: {name}={options[name]!r} on "
                f"the backend {keras.backend.backend()!r}."
            )

    def compile_from_config(self, config: dict[str, Any]) -> None:
        if unsupported := _unsupported(keras.saving.deserialize_keras_object(config)):
            warnings.warn(
                f"The model {self.name!r} was trained with {', '.join(unsupported)}, which works "
                "on TensorFlow and JAX; it is loaded without optimizer. Compile it to train it "
                "here.",
                stacklevel=2,
            )
            return
        super().compile_from_config(config)


def _unsupported(options: dict[str, Any]) -> list[str]:
    return [name for name, value in OPTION_DEFAULTS.items() if options.get(name, value) != value]
