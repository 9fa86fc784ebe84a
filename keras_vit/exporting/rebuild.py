"""Rebuilds a trained model in plain float32, for nothing else exports faithfully."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras
import numpy as np

from keras_vit.backend.private import layers_of
from keras_vit.config import ViTConfig
from keras_vit.layers import TokenDense
from keras_vit.layers.dense import CHANGES
from keras_vit.layers.random import overwritten_weights
from keras_vit.layers.resnet import STANDARDIZATION_EPSILON
from keras_vit.model import VisionTransformer

Arrays = Mapping[str, np.ndarray]


def folded_arrays(network: keras.Model, config: ViTConfig) -> dict[str, np.ndarray]:
    """Returns every weight by its path, float32, with constant work done once.

    The scale of attention 1/sqrt(K) goes into the query's kernel and bias, the standardisation of
    the stem's convolutions into their kernels, the class token into its position.
    """
    arrays = {
        weight.path: np.asarray(keras.ops.convert_to_numpy(weight), np.float32)
        for weight in network.weights
    }
    scale = np.float32((config.hidden_dim // config.num_heads) ** -0.5)
    for path, value in arrays.items():
        layer, _, name = path.rpartition("/")
        if layer.endswith("attention/qkv"):
            arrays[path] = np.concatenate(
                [value[..., : config.hidden_dim] * scale, value[..., config.hidden_dim :]], axis=-1
            )
        elif layer == "pooling/query":
            arrays[path] = value * scale
        elif layer.startswith("stem/") and name == "kernel":
            arrays[path] = _standardized(value)
    return arrays


def same_padding(size: int, *, kernel: int, stride: int) -> tuple[int, int]:
    """Returns the cells that "same" padding adds before and after one side of an image.

    Example:
        >>> same_padding(224, kernel=7, stride=2)
        (2, 3)
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


Range = Literal["pixels", "normalized"]

# What Keras adds to a layer for LoRA and quantisation; `_value` folds it into the kernel.
_FOLDED = ("lora_", "kernel_scale")
_KEPT_DTYPES = ("bool", "string", "uint8", "int8", "int16", "int32", "int64")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Exportable:
    """A model as the exporters take it.

    Attributes:
        network: float32, from images to logits, or to features without classifier.
        takes: what the original model takes: "pixels" 0..255, or "normalized": pixels / 255, less
            the mean and divided by the deviation of its config.
        network_takes: what `network` takes.
        activation: from logits to probabilities; None without classifier.
        answers: what the original model answers.
        config: the network's config, if it is a Vision Transformer and nothing around it.
        pixels: the config of the Vision Transformer alone or inside, for its mean and deviation.
        antialias: whether the images of the original model are downscaled with anti-aliasing.
    """

    network: keras.Model
    takes: Range
    network_takes: Range
    activation: Callable[[Any], Any] | None
    answers: Literal["logits", "probabilities", "features"]
    config: ViTConfig | None
    pixels: ViTConfig
    antialias: bool

    @property
    def written_config(self) -> ViTConfig | None:
        """The config, if the writers of TFLite and ONNX know the network by heart, else None.

        They know the published ones; others are converted operation by operation.
        """
        return None if self.config is None or self.config.departures else self.config

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of the images."""
        height, width, channels = self.network.input_shape[1:]
        return height, width, channels

    @property
    def classes(self) -> int | None:
        """Size of the classifier, None without one."""
        return None if self.activation is None else int(self.network.output_shape[-1])

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights in float32."""
        return 4 * int(sum(np.prod(weight.shape) for weight in self.network.weights))

    def from_pixels(self, images: Any) -> Any:
        """Turns float32 pixels 0..255 into what `network` takes."""
        if self.network_takes == "pixels":
            return images
        return self.normalized(images)

    def from_normalized(self, images: Any) -> Any:
        """Turns float32 values, as `normalized` makes them, into what `network` takes."""
        if self.network_takes == "normalized":
            return images
        scale, offset = self.rescaling
        return (images - offset) / scale

    def normalized(self, pixels: Any) -> Any:
        """Scales float32 pixels 0..255 as the model's own rescaling does it."""
        scale, offset = self.rescaling
        return pixels * scale + offset

    @property
    def rescaling(self) -> tuple[Any, Any]:
        """What pixels are multiplied by and what is added: a number each, or (channels,)."""
        scale, offset = (
            np.array(value, np.float32) if isinstance(value, tuple) else value
            for value in self.pixels.rescaling
        )
        return scale, offset

    def from_original(self, images: Any) -> Any:
        """Turns what the original model takes into what `network` takes."""
        return self.from_pixels(images) if self.takes == "pixels" else self.from_normalized(images)

    def outputs(self) -> keras.Model:
        """Returns a model with every output by name: "logits", "features", as far as it has them.

        Features are what a model without classifier answers, otherwise the pooled tokens (B, D).
        """
        if self.activation is None:
            outputs = {"features": self.network.output}
        elif self.config is None:
            outputs = {"logits": self.network.output}
        else:
            name = "pooling_norm" if self.config.norm_after_pooling else "pooling"
            pooled = self.network.get_layer(name).output
            outputs = {"logits": self.network.output, "features": pooled}
        return keras.Model(self.network.input, outputs)

    def answer(self, images: Any) -> dict[str, Any]:
        """Returns the outputs of a file by name, for what the original model takes."""
        return self.named(self.network(self.from_original(images), training=False))

    def named(self, output: Any) -> dict[str, Any]:
        """Names the network's output, and adds the probabilities to logits."""
        if self.activation is None:
            return {"features": output}
        return {"logits": output, "probabilities": self.activation(output)}


def rebuild(model: keras.Model) -> Exportable:
    """Makes a float32 copy of a trained model, its final activation taken off.

    Args:
        model: a `VisionTransformer`, or a model of one input and one output with one inside.

    Raises:
        TypeError: it is not such a model.
        ValueError: its weights cannot be brought over.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"export takes a keras.Model. Received: {type(model).__name__}.")
    if isinstance(model, VisionTransformer):
        return _rebuild_alone(model)
    return _rebuild_around(model)


def _standardized(kernel: np.ndarray) -> np.ndarray:
    wide = kernel.astype(np.float64)
    centred = wide - wide.mean(axis=(0, 1, 2))
    folded = centred / (wide.std(axis=(0, 1, 2)) + STANDARDIZATION_EPSILON)
    return np.asarray(folded, np.float32)


def _rebuild_alone(model: VisionTransformer) -> Exportable:
    config = dataclasses.replace(
        model.config, classifier_activation=None, include_preprocessing=False
    )
    with overwritten_weights():
        network = VisionTransformer(config, name=model.name, dtype="float32")
    _copy_weights(model, network)
    activation = keras.activations.get(model.config.classifier_activation)
    is_classifier = config.classes is not None and len(network.output_shape) == 2
    return Exportable(
        network=network,
        takes="pixels" if model.config.include_preprocessing else "normalized",
        network_takes="normalized",
        config=config,
        pixels=config,
        antialias=config.antialias,
        **_ending(activation, is_classifier=is_classifier),
    )


def _rebuild_around(model: keras.Model) -> Exportable:
    inner = [layer for layer in layers_of(model) if isinstance(layer, VisionTransformer)]
    is_single = len(getattr(model, "inputs", None) or ()) == len(model.outputs or ()) == 1
    if len(inner) != 1 or not is_single or len(model.input_shape) != 4:
        raise TypeError(
            "export takes a VisionTransformer, or a functional model from one batch of images to "
            f"one output with one VisionTransformer inside. Received: {model.name!r} with "
            f"{len(inner)} inside."
        )
    serialized = _in_float32(keras.saving.serialize_keras_object(model))
    network = keras.saving.deserialize_keras_object(serialized)
    _copy_weights(model, network)
    ending = _ending(_take_off_activation(network), is_classifier=len(network.output_shape) == 2)
    takes: Range = "pixels" if inner[0].config.include_preprocessing else "normalized"
    return Exportable(
        network=network,
        takes=takes,
        network_takes=takes,
        config=None,
        pixels=inner[0].config,
        antialias=inner[0].config.antialias,
        **ending,
    )


def _in_float32(serialized: Any) -> Any:
    """Returns a serialised object with every layer's policy float32 and no LoRA."""
    if isinstance(serialized, list | tuple):
        return type(serialized)(map(_in_float32, serialized))
    if not isinstance(serialized, dict):
        return serialized
    result = {key: _in_float32(value) for key, value in serialized.items()}
    config = result.get("config")
    if isinstance(config, dict) and "dtype" in config and result["class_name"] != "InputLayer":
        policy = keras.dtype_policies.get(config["dtype"]).name
        config["dtype"] = policy if policy in _KEPT_DTYPES else "float32"
        for key in ("lora_rank", "lora_alpha", "quantization_config", CHANGES):
            config.pop(key, None)
    return result


def _take_off_activation(network: keras.Model) -> Callable[[Any], Any]:
    """Makes the network end in logits, and returns the activation in which it ended."""
    last = network.layers[-1]
    while isinstance(last, keras.Model):
        last = last.layers[-1]
    activation = getattr(last, "activation", None)
    if isinstance(last, keras.layers.Softmax):
        raise TypeError(
            "export takes a model that ends in logits or in a Dense or Activation layer. "
            'Received: one that ends in Softmax; use Activation("softmax").'
        )
    if not callable(activation) or isinstance(last, TokenDense):  # a part of the representation
        activation = "linear"
    else:
        last.activation = keras.activations.linear
    function: Callable[[Any], Any] = keras.activations.get(activation)
    return function


def _ending(activation: Callable[[Any], Any], *, is_classifier: bool) -> dict[str, Any]:
    if not is_classifier:
        return {"activation": None, "answers": "features"}
    if activation is keras.activations.linear:
        return {"activation": keras.activations.softmax, "answers": "logits"}
    return {"activation": activation, "answers": "probabilities"}


def _copy_weights(source: keras.Model, target: keras.Model) -> None:
    for layer in layers_of(source):
        mode = getattr(layer, "quantization_mode", None)
        if mode is not None and (mode != "int8" or not isinstance(layer, keras.layers.Dense)):
            raise ValueError(
                f"Layer {layer.path!r} is quantised in mode {mode!r}; export can undo int8 in "
                "Dense layers. Export the model from before its quantisation."
            )
    # A parent comes before its children, so that the last to claim a weight owns it.
    owners = {
        weight.path: (layer, weight) for layer in layers_of(source) for weight in layer.weights
    }
    wanted = {weight.path: weight for weight in target.weights}
    kept = {path for path in owners if not path.rsplit("/")[-1].startswith(_FOLDED)}
    if len(wanted) != len(target.weights) or kept != set(wanted):
        different = sorted(kept ^ set(wanted))[:3]
        raise ValueError(
            f"The weights of {source.name!r} do not fit its float32 copy, for instance "
            f"{different}; give every layer its own name."
        )
    for path, weight in wanted.items():
        weight.assign(_value(*owners[path]))


def _value(layer: keras.layers.Layer, weight: Any) -> np.ndarray:
    """Returns a weight in float32, quantisation undone and LoRA added to it."""
    value = np.asarray(keras.ops.convert_to_numpy(weight), np.float32)
    if not weight.path.endswith("/kernel"):
        return value
    if getattr(layer, "quantization_mode", None) == "int8":
        value = value / keras.ops.convert_to_numpy(layer.kernel_scale)
    if getattr(layer, "lora_enabled", False):
        down, up = map(keras.ops.convert_to_numpy, (layer.lora_kernel_a, layer.lora_kernel_b))
        value = value + layer.lora_alpha / layer.lora_rank * np.matmul(down, up)
    return np.asarray(value, np.float32)
