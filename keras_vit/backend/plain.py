"""The forms in `keras.ops` alone, for any Keras backend."""

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

# A mixin; to the type checker it is the model that it becomes a part of.
if TYPE_CHECKING:
    from keras import Model as _Model
else:
    _Model = object

ALIGNMENT = 1  # bytes
# What `compile` takes on TensorFlow alone.
_DEFAULTS = {"accumulate": 1, "sam_rho": 0.0, "report_gradient_norm": False}

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
    """Multiplies x (..., D) by a kernel (D, M), adds the bias (M,) and applies the activation.

    Adds a residual (..., M) last, if there is one.
    """
    x = ACTIVATIONS[activation](keras.ops.add(keras.ops.matmul(x, kernel), bias))
    return x if residual is None else residual + x


def layer_norm(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> Any:
    """Normalises x (..., D) over the last axis, in float32, then applies gamma and beta (D,)."""
    wide, gamma, beta = (keras.ops.cast(each, "float32") for each in (x, gamma, beta))
    mean, variance = keras.ops.moments(wide, axes=-1, keepdims=True)
    normal = (wide - mean) * keras.ops.rsqrt(variance + epsilon)
    return keras.ops.cast(normal * gamma + beta, x.dtype)


def softmax(x: Any) -> Any:
    """Returns the softmax of x over the last axis, in its dtype, computed in float32."""
    return keras.ops.cast(keras.ops.softmax(keras.ops.cast(x, "float32"), axis=-1), x.dtype)


def self_attention(qkv: Any, num_heads: int) -> Any:
    """Returns what tokens take from each other, (B, N, D), for (B, N, 3D) query, key and value."""
    _, tokens, width = keras.ops.shape(qkv)
    size = width // 3 // num_heads
    x = keras.ops.reshape(qkv, (-1, tokens, 3, num_heads, size))
    query, key, value = keras.ops.unstack(keras.ops.transpose(x, (2, 0, 3, 1, 4)))
    logits = keras.ops.matmul(query * size**-0.5, keras.ops.transpose(key, (0, 1, 3, 2)))
    x = keras.ops.matmul(softmax(logits), value)  # (B, H, N, K)
    return keras.ops.reshape(keras.ops.transpose(x, (0, 2, 1, 3)), (-1, tokens, width // 3))


def space_to_depth(images: Any, block: int) -> Any:
    """Cuts images (B, H, W, C) into blocks (B, H/block, W/block, block * block * C)."""
    _, height, width, channels = images.shape
    x = keras.ops.reshape(images, (-1, height // block, block, width // block, block, channels))
    x = keras.ops.transpose(x, (0, 1, 3, 2, 4, 5))
    return keras.ops.reshape(x, (-1, height // block, width // block, block * block * channels))


def adopt(array: np.ndarray) -> Any:
    """Returns the array's values in a form that a variable takes; the array must not change."""
    return array


def uninitialized(shape: Any, dtype: Any = None) -> Any:
    """Returns an array whose values nobody will read; a Keras initializer."""
    return keras.ops.zeros(shape, dtype)


def is_concrete(x: Any) -> bool:
    """Whether x has values now, and is no part of a graph that is being traced."""
    return not isinstance(x, keras.KerasTensor)


def momentum_step(*arguments: Any, **options: Any) -> bool:
    """Does nothing and says so: the optimizer's own step is as fast once it is compiled."""
    return False


def adam_step(*arguments: Any, **options: Any) -> bool:
    """Does nothing and says so: the optimizer's own step is as fast once it is compiled."""
    return False


def replica_id() -> Any:
    """Returns which replica this computation is: 0, since arrays are global here."""
    return 0


def scope_of(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Returns a scope in which variables lie where the model's do: here there is only one."""
    return contextlib.nullcontext()


def warn_of_keras_step(training: bool | None) -> None:
    """Warns of nothing: Keras' own training step is right here."""


class ExactTrainer(_Model):
    """Adds no step: Keras' own is right where arrays are global, as on JAX."""

    def compile(
        self,
        optimizer: Any = "rmsprop",
        *args: Any,
        accumulate: int = 1,
        sam_rho: float = 0.0,
        report_gradient_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        """Configures training, with the arguments of `keras.Model.compile`.

        Args:
            optimizer: any Keras optimizer.
            args: of `keras.Model.compile`.
            accumulate: on TensorFlow, parts of a batch; 1 here.
            sam_rho: on TensorFlow, radius of sharpness-aware minimisation; 0 here.
            report_gradient_norm: on TensorFlow, whether the logs have it; False here.
            kwargs: of `keras.Model.compile`.

        Raises:
            ValueError: what was asked for is there on TensorFlow alone.
        """
        asked = {
            "accumulate": accumulate,
            "sam_rho": sam_rho,
            "report_gradient_norm": report_gradient_norm,
        }
        for name in _departing(asked):
            raise ValueError(
                f"compile({name}=...) works on TensorFlow alone; set KERAS_BACKEND=tensorflow, or "
                f"leave {name} at {_DEFAULTS[name]}. Received: {name}={asked[name]!r} on the "
                f"backend {keras.backend.backend()!r}."
            )
        super().compile(optimizer, *args, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        arguments = keras.saving.deserialize_keras_object(config)
        departing = _departing(arguments)
        if departing:
            warnings.warn(
                f"The model {self.name!r} was trained with {', '.join(departing)}, which works on "
                "TensorFlow alone; it was loaded without optimizer. Compile it to train it here.",
                stacklevel=2,
            )
            return
        self.compile(**arguments)
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)


def _departing(arguments: dict[str, Any]) -> list[str]:
    """Returns which options of TensorFlow's training step are not at their defaults."""
    return [name for name, value in _DEFAULTS.items() if arguments.get(name, value) != value]
