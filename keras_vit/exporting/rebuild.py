"""Rebuilds a trained model in plain float32: other precisions do not export faithfully."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import keras
import numpy as np

from keras_vit.backend.private import layers_of
from keras_vit.config import ViTConfig
from keras_vit.layers import PatchEncoder, TokenDense
from keras_vit.layers.dense import CHANGES
from keras_vit.layers.random import overwritten_weights
from keras_vit.layers.resnet import STANDARDIZATION_EPSILON
from keras_vit.model import VisionTransformer

Range = Literal["pixels", "normalized"]

# What Keras adds to a layer for LoRA and quantisation; `_dequantized` adds it to the kernel.
_LORA_AND_SCALES = ("lora_", "kernel_scale")
_UNCHANGED_DTYPES = ("bool", "string", "uint8", "int8", "int16", "int32", "int64")

# How a network may depart from the published ones, and TFLite and ONNX still write it by hand:
# fields at any value, and some values of others. CLIP and DINOv2 need no more.
_WRITTEN = {"embedding_norm", "layer_scale", "norm_after_pooling", "num_registers"}
_WRITTEN_VALUES: dict[str, tuple[Any, ...]] = {
    "activation": ("quick_gelu",),
    "representation_activation": (None,),
    "position_embedding": ("learned_2d", "sincos_2d", None),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Exportable:
    """A model as the exporters take it.

    Attributes:
        network: float32, from images to logits, or to features without classifier.
        takes: input range of the original model: "pixels" 0..255, or "normalized":
            (pixels / 255 - mean) / deviation, with those of its config.
        network_takes: input range of `network`.
        activation: from logits to probabilities; None without classifier.
        answers: which output the original model returns.
        config: the network's config; None if there are layers around the Vision Transformer.
        input_config: the config of the Vision Transformer, alone or inside, for its mean,
            deviation and anti-aliasing.
    """

    network: keras.Model
    takes: Range
    network_takes: Range
    activation: Callable[[Any], Any] | None
    answers: Literal["logits", "probabilities", "features"]
    config: ViTConfig | None
    input_config: ViTConfig

    @property
    def written_config(self) -> ViTConfig | None:
        """The config of a network that TFLite and ONNX write by hand: a published one, or CLIP's.

        None for other networks: these are converted operation by operation.
        """
        return None if self.config is None or unwritten(self.config) else self.config

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
        """Converts float32 pixels 0..255 to the range of `network`."""
        return images if self.network_takes == "pixels" else self.normalized(images)

    def from_normalized(self, images: Any) -> Any:
        """Converts normalized float32 values to the range of `network`."""
        if self.network_takes == "normalized":
            return images
        scale, offset = self.rescaling
        return (images - offset) / scale

    def normalized(self, pixels: Any) -> Any:
        """Scales float32 pixels 0..255 like the model's own rescaling."""
        scale, offset = self.rescaling
        return pixels * scale + offset

    @property
    def rescaling(self) -> tuple[Any, Any]:
        """Factor and offset of pixels: a number each, or (channels,)."""
        scale, offset = (
            np.array(value, np.float32) if isinstance(value, tuple) else value
            for value in self.input_config.rescaling
        )
        return scale, offset

    def from_original(self, images: Any) -> Any:
        """Converts the original model's input to the range of `network`."""
        return self.from_pixels(images) if self.takes == "pixels" else self.from_normalized(images)

    def to_original(self, pixels: np.ndarray) -> np.ndarray:
        """Converts pixels 0..255 to the original model's input, float32."""
        images: np.ndarray = pixels.astype(np.float32)
        return images if self.takes == "pixels" else np.asarray(self.normalized(images))

    def outputs(self) -> keras.Model:
        """Returns a model with its outputs by name: "logits", "features" or both.

        Features are the output of a model without classifier, otherwise the pooled tokens (B, D).
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
        """Returns the outputs of a file by name, for inputs of the original model."""
        return self.named(self.network(self.from_original(images), training=False))

    def named(self, output: Any) -> dict[str, Any]:
        """Names the network's output, and adds the probabilities to logits."""
        if self.activation is None:
            return {"features": output}
        return {"logits": output, "probabilities": self.activation(output)}


def rebuild(model: keras.Model) -> Exportable:
    """Makes a float32 copy of a trained model without its final activation.

    Args:
        model: a `VisionTransformer`, or a model of one input and one output with one inside.

    Raises:
        TypeError: it is not such a model.
        ValueError: it takes images of any size, or its weights cannot be copied.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"export takes a keras.Model. Received: {type(model).__name__}.")
    if isinstance(model, VisionTransformer) and model.config.any_size:
        raise ValueError(
            "keras_vit.export writes models for images of one size, since a server resizes images "
            "to it: give it keras_vit.resize(model, (height, width, 3)). Keras' own "
            "model.export(path) writes a SavedModel for images of any size."
        )
    if isinstance(model, VisionTransformer):
        return _rebuild_alone(model)
    return _rebuild_around(model)


def unwritten(config: ViTConfig) -> tuple[str, ...]:
    """Returns the fields for which a network cannot be written by hand.

    Example:
        >>> unwritten(ViTConfig(num_registers=4, activation="swiglu"))
        ('activation',)
    """
    return tuple(
        name
        for name in config.departures
        if name not in _WRITTEN and getattr(config, name) not in _WRITTEN_VALUES.get(name, ())
    )


def folded_arrays(network: keras.Model, config: ViTConfig) -> dict[str, np.ndarray]:
    """Returns the float32 weights by path, with constant computations folded into them.

    The attention scale 1/sqrt(K) is in the query's kernel and bias, layer scale in the last kernel
    and bias of its branch, and the stem's kernels are standardised. `patch_encoder/prefix` holds
    the tokens before the patches with their positions, (1, count, D), and
    `patch_encoder/position_embedding` the patches' positions (1, N, D). `pooling/query` (1, 1, D)
    replaces the probe and its projection. The patch kernel is that of a convolution, (P, P, C, D).
    """
    arrays = {
        weight.path: np.asarray(keras.ops.convert_to_numpy(weight), np.float32)
        for weight in network.weights
    }
    width, patch = config.hidden_dim, "patch_encoder/projection/kernel"
    scale = np.float32((width // config.num_heads) ** -0.5)
    for path, value in arrays.items():
        layer, _, name = path.rpartition("/")
        if layer.endswith("attention/qkv"):
            parts = value[..., :width] * scale, value[..., width:]
            arrays[path] = np.concatenate(parts, axis=-1)
        elif layer == "pooling/query":
            arrays[path] = value * scale
        elif layer.startswith("stem/") and name == "kernel":
            arrays[path] = _standardized(value)
    arrays[patch] = arrays[patch].reshape(config.patch_size, config.patch_size, -1, width)
    for index in range(config.num_layers if config.layer_scale is not None else 0):
        for branch, last in (("attention", "out"), ("mlp", "fc2")):
            factor = arrays.pop(f"block_{index}/{branch}_scale")
            for name in ("kernel", "bias"):
                arrays[f"block_{index}/{branch}/{last}/{name}"] *= factor
    _fold_positions(arrays, network.get_layer("patch_encoder"))
    if config.pooling == "map":
        probe = arrays.pop("pooling/probe").astype(np.float64)
        query = probe @ arrays.pop("pooling/query/kernel") + arrays.pop("pooling/query/bias")
        arrays["pooling/query"] = query.astype(np.float32)
    return arrays


def _fold_positions(arrays: dict[str, np.ndarray], encoder: PatchEncoder) -> None:
    """Replaces what the patch encoder adds to its tokens by two arrays, as `folded_arrays` says."""
    path = encoder.path
    tokens = [arrays.pop(f"{path}/{name}") for name, count in encoder.prefix if count]
    count = sum(each.shape[1] for each in tokens)
    for name in [name for name in arrays if name.startswith(f"{path}/position_")]:
        arrays.pop(name)
    if encoder.position_kind is not None:
        table = np.asarray(keras.ops.convert_to_numpy(encoder.position_table()), np.float32)
        tokens = [np.concatenate(tokens, axis=1) + table[:, :count]] if tokens else []
        arrays[f"{path}/position_embedding"] = table[:, count:]
    if tokens:
        arrays[f"{path}/prefix"] = np.concatenate(tokens, axis=1)


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
        input_config=config,
        **_ending(activation, is_classifier=is_classifier),
    )


def _rebuild_around(model: keras.Model) -> Exportable:
    transformers = [layer for layer in layers_of(model) if isinstance(layer, VisionTransformer)]
    is_single = len(getattr(model, "inputs", None) or ()) == len(model.outputs or ()) == 1
    if len(transformers) != 1 or not is_single or len(model.input_shape) != 4:
        raise TypeError(
            "export takes a VisionTransformer, or a functional model from one batch of images to "
            f"one output with one VisionTransformer inside. Received: {model.name!r} with "
            f"{len(transformers)} inside."
        )
    serialized = _in_float32(keras.saving.serialize_keras_object(model))
    network = keras.saving.deserialize_keras_object(serialized)
    _copy_weights(model, network)
    config = transformers[0].config
    takes: Range = "pixels" if config.include_preprocessing else "normalized"
    return Exportable(
        network=network,
        takes=takes,
        network_takes=takes,
        config=None,
        input_config=config,
        **_ending(_remove_activation(network), is_classifier=len(network.output_shape) == 2),
    )


def _in_float32(serialized: Any) -> Any:
    """Returns a serialised object with float32 policies and without LoRA."""
    if isinstance(serialized, list | tuple):
        return type(serialized)(map(_in_float32, serialized))
    if not isinstance(serialized, dict):
        return serialized
    result = {key: _in_float32(value) for key, value in serialized.items()}
    config = result.get("config")
    if isinstance(config, dict) and "dtype" in config and result["class_name"] != "InputLayer":
        policy = keras.dtype_policies.get(config["dtype"]).name
        config["dtype"] = policy if policy in _UNCHANGED_DTYPES else "float32"
        for key in ("lora_rank", "lora_alpha", "quantization_config", CHANGES):
            config.pop(key, None)
    return result


def _remove_activation(network: keras.Model) -> Callable[[Any], Any]:
    """Removes the network's final activation and returns it."""
    last = network.layers[-1]
    while isinstance(last, keras.Model):
        last = last.layers[-1]
    activation = getattr(last, "activation", None)
    if isinstance(last, keras.layers.Softmax):
        raise TypeError(
            "export takes a model that ends in logits or in a Dense or Activation layer. "
            'Received: one that ends in Softmax; use Activation("softmax").'
        )
    if not callable(activation) or isinstance(last, TokenDense):  # part of the representation
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
    # A parent precedes its children, so the last layer that lists a weight is its owner.
    owners = {
        weight.path: (layer, weight) for layer in layers_of(source) for weight in layer.weights
    }
    targets = {weight.path: weight for weight in target.weights}
    paths = {path for path in owners if not path.rsplit("/")[-1].startswith(_LORA_AND_SCALES)}
    if len(targets) != len(target.weights) or paths != set(targets):
        different = sorted(paths ^ set(targets))[:3]
        raise ValueError(
            f"The weights of {source.name!r} do not fit its float32 copy, for instance "
            f"{different}; give every layer its own name."
        )
    for path, weight in targets.items():
        weight.assign(_dequantized(*owners[path]))


def _dequantized(layer: keras.layers.Layer, weight: Any) -> np.ndarray:
    """Returns a weight in float32, without quantisation and with LoRA added."""
    value = np.asarray(keras.ops.convert_to_numpy(weight), np.float32)
    if not weight.path.endswith("/kernel"):
        return value
    if getattr(layer, "quantization_mode", None) == "int8":
        value = value / keras.ops.convert_to_numpy(layer.kernel_scale)
    if getattr(layer, "lora_enabled", False):
        down, up = map(keras.ops.convert_to_numpy, (layer.lora_kernel_a, layer.lora_kernel_b))
        value = value + layer.lora_alpha / layer.lora_rank * np.matmul(down, up)
    return np.asarray(value, np.float32)
