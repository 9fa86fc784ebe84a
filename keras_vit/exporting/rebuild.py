"""Rebuilds a trained model in plain float32, and says what its files say of themselves.

Other precisions do not export faithfully.

Shapes: images (B, height, width, channels), logits (B, classes), features (B, D) of width D.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras
import numpy as np

from keras_vit import __version__
from keras_vit.adaptation import LoRAVisionTransformer
from keras_vit.backend.private import layers_of
from keras_vit.config import (
    LINEAR,
    RESIZING,
    CropMode,
    CropOffset,
    Ending,
    Interpolation,
    Resizing,
    ViTConfig,
    activation_of,
    ending_of,
    last_operation,
)
from keras_vit.layers.dense import CHANGES
from keras_vit.layers.random import skip_initialization
from keras_vit.model import Backbone, VisionTransformer, backbones, output_shape

Range = Literal["pixels", "normalized"]

# What Keras adds to a layer for LoRA and quantisation; `_float_kernel` adds it to the kernel.
_ADDED = (
    *("lora_kernel_a", "lora_kernel_b", "kernel_scale", "kernel_zero", "g_idx"),
    *(f"{name}_{of}" for name in ("inputs", "kernel") for of in ("scale", "amax_history")),
    *("outputs_grad_scale", "outputs_grad_amax_history"),
)
_MODES = (None, "int8", "int4", "float8")
# Layers before the Vision Transformer scale pixels if it then gets values of the range that it
# takes, within this factor; a model that takes 0..1 or normalised values misses it by 64 or more.
_RANGE_FACTOR = 16.0
COLOURS: Mapping[int, str] = {1: "grey", 3: "RGB", 4: "RGBA"}
_UNCHANGED_DTYPES = ("bool", "string", "uint8", "int8", "int16", "int32", "int64")


class UnsupportedModelError(TypeError, ValueError):
    """A model of a kind that export does not take; the text says what it takes."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Exportable:
    """A model as the exporters take it.

    Attributes:
        network: float32, from images to logits, or to features without classifier.
        takes: input range of the original model: "pixels" 0..255, or "normalized":
            (pixels / 255 - mean) / deviation, with those of its config.
        activation: from logits to probabilities; None without classes.
        answers: which output the original model returns: "values" of a model of numbers.
        config: the network's config; None if there are layers around the Vision Transformer.
        input_config: the config of the Vision Transformer, alone or inside, for its mean,
            deviation and anti-aliasing.
    """

    network: keras.Model
    takes: Range
    activation: Callable[[Any], Any] | None
    answers: str
    config: ViTConfig | None
    input_config: ViTConfig

    @property
    def written_config(self) -> ViTConfig | None:
        """The config of a network that TFLite and ONNX write by hand: a published one, or CLIP's.

        None for other networks: these are converted operation by operation.
        """
        config = self.config
        if config is None or config.unwritten_fields:
            return None
        return config if config.classifier_activation in LINEAR else None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of the images."""
        height, width, channels = self.network.input_shape[1:]
        return height, width, channels

    @property
    def resizing(self) -> Resizing:
        """How images become those of the model."""
        return self.input_config.resizing(self.image_shape[:2])

    @property
    def classes(self) -> int | None:
        """Size of the classifier, None without one."""
        return None if self.activation is None else int(self.network.output_shape[-1])

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights in float32."""
        return 4 * int(sum(np.prod(weight.shape) for weight in self.network.weights))

    @property
    def network_takes(self) -> Range:
        """Input range of `network`."""
        return self.takes if self.config is None else "normalized"

    @property
    def rescaling(self) -> tuple[Any, Any]:
        """Factor and offset of pixels: a number each, or (channels,)."""
        scale, offset = (
            np.array(value, np.float32) if isinstance(value, tuple) else value
            for value in self.input_config.rescaling
        )
        return scale, offset

    def to_network(self, images: Any, given: Range) -> Any:
        """Converts float32 images to the range of `network`."""
        if given == self.network_takes:
            return images
        scale, offset = self.rescaling
        return images * scale + offset if given == "pixels" else (images - offset) / scale

    def normalized(self, pixels: np.ndarray) -> np.ndarray:
        """Scales pixels 0..255 like the model's own rescaling, to float32."""
        scale, offset = self.rescaling
        return np.asarray(np.float32(pixels) * scale + offset)

    def to_original(self, pixels: np.ndarray) -> np.ndarray:
        """Converts pixels 0..255 to the original model's input, float32."""
        is_pixels = self.takes == "pixels"
        return np.asarray(pixels, np.float32) if is_pixels else self.normalized(pixels)

    def outputs(self) -> keras.Model:
        """Returns a model with its outputs by name: "logits", "features" or both, or "values".

        Features are the output of a model without classifier, otherwise the pooled tokens (B, D).
        """
        if self.activation is None:
            outputs = {self.answers: self.network.output}
        elif self.config is None:
            outputs = {"logits": self.network.output}
        else:
            name = "pooling_norm" if self.config.norm_after_pooling else "pooling"
            pooled = self.network.get_layer(name).output
            outputs = {"logits": self.network.output, "features": pooled}
        return keras.Model(self.network.input, outputs)

    def answer(self, images: Any) -> dict[str, Any]:
        """Returns the outputs of a file by name, for inputs of the original model."""
        return self.named(self.outputs()(self.to_network(images, self.takes), training=False))

    def named(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the probabilities to the network's outputs, which have their names."""
        if self.activation is None:
            return {self.answers: outputs[self.answers]}
        return {"probabilities": self.activation(outputs["logits"]), **outputs}

    @property
    def output_names(self) -> tuple[str, ...]:
        """The outputs of a file, in order: what asks for the first alone gets the answer."""
        if self.activation is None:
            return (self.answers,)
        names = ("logits", "probabilities")
        return names if self.config is None else (*names, "features")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a program must know to run an exported file without its model.

    Each format has a place for it: `metadata_props` in ONNX, the metadata of TFLite, and for a
    SavedModel, as for all, `verification.json` beside it.

    Attributes:
        name: the model's.
        keras_vit: the version of this package that wrote the file.
        weights_sha256: of the source, see `weights_sha256`.
        image_shape: (height, width, channels) of the images.
        colours: the order of the channels, "RGB" or "grey"; "" where they are no colours.
        takes: "pixels" 0..255, or "normalized": (pixels / 255 - mean) / deviation.
        image_mean: of the pixels over 255, for each channel.
        image_std: their deviation.
        antialias: whether images are smoothed where they shrink; with the last four, as of
            `ViTConfig`.
        activation: from logits to probabilities; "" without classes.
        answers: the output that the source returns.
        outputs: of an ONNX or TFLite file, in order.
        labels: the name of each class, in the order of the outputs.
    """

    name: str
    weights_sha256: str
    image_shape: tuple[int, int, int]
    colours: str
    takes: Range
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    antialias: bool
    activation: str
    answers: str
    outputs: tuple[str, ...]
    labels: tuple[str, ...]
    interpolation: Interpolation = "bilinear"
    crop_pct: float = 1.0
    crop_mode: CropMode = "squash"
    crop_offset: CropOffset = "round"
    keras_vit: str = __version__

    @property
    def input_range(self) -> tuple[float, float]:
        """The lowest and the highest value that an image may have in the file's input."""
        values = self.prepared(np.array([[0.0], [255.0]], np.float32))
        return float(values.min()), float(values.max())

    def prepared(self, pixels: np.ndarray) -> np.ndarray:
        """Converts pixels 0..255 to the file's input, float32."""
        is_pixels = self.takes == "pixels"
        return np.asarray(pixels, np.float32) if is_pixels else self.normalized(pixels)

    def normalized(self, pixels: np.ndarray) -> np.ndarray:
        """Scales pixels 0..255 by mean and deviation, as the model does."""
        pairs = zip(self.image_mean, self.image_std, strict=True)
        rows = [(1 / (255 * std), -mean / std) for mean, std in pairs]
        rows = rows[:1] if len(set(rows)) == 1 else rows  # as for images of another depth
        scale, offset = np.array(rows, np.float32).T
        return np.asarray(np.float32(pixels) * scale + offset)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and the range of the input, as plain values for JSON."""
        return {**dataclasses.asdict(self), "input_range": self.input_range}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Description":
        """Reads what `to_dict` returned.

        Raises:
            ValueError: a field is missing or of another type.
        """
        names = {field.name: field for field in dataclasses.fields(cls)}
        # Files from before there was a choice mean the defaults.
        fields = {**{name: names[name].default for name in RESIZING[1:]}, **fields}
        try:
            values = {name: fields[name] for name in names}
        except KeyError as error:
            raise ValueError(f"its description lacks {error}") from None
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
            if str(names[name].type).startswith("tuple") != isinstance(values[name], tuple):
                raise ValueError(f"its description has {name}={value!r}")
        return cls(**values)


def rebuild(model: keras.Model) -> Exportable:
    """Makes a float32 copy of a trained model, to its logits where it answers with classes.

    Args:
        model: a `VisionTransformer`, or a model of one input and one output with one inside.

    Raises:
        TypeError: it is not such a model.
        ValueError: it takes images of any size, or its weights cannot be copied.
    """
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(
            f"export takes a keras.Model. Received: {type(model).__name__}."
        )
    if isinstance(model, VisionTransformer) and model.config.any_size:
        raise ValueError(
            "keras_vit.export writes models for images of one size, since a server resizes images "
            "to it: give it keras_vit.resize(model, (height, width, 3)). Keras' own "
            "model.export(path) writes a SavedModel for images of any size."
        )
    network: keras.Model
    is_whole = isinstance(model, VisionTransformer)
    input_config = model.config if is_whole else _backbone_of(model).config
    ending = ending_of(model) if len(model.output_shape) == 2 else Ending(None)
    if is_whole:
        takes: Range = "pixels" if model.config.include_preprocessing else "normalized"
        inner = model.config.told_by(getattr(model, "loss", None))
        inner = inner.with_activation(None) if ending.is_probabilities else inner
        config = input_config = dataclasses.replace(inner, include_preprocessing=False)
        with skip_initialization():
            network = VisionTransformer(config, name=model.name, dtype="float32")
        _copy_weights(model, network)
    else:
        config = None
        network = _made_again(model)
        _copy_weights(model, network)
        takes = _input_range(network, input_config)
        if ending.is_probabilities:
            network = _without_activation(network)
    return Exportable(
        network=network,
        takes=takes,
        activation=keras.activations.get(ending.activation) if ending.activation else None,
        answers=ending.output,
        config=config,
        input_config=input_config,
    )


def describe(exportable: Exportable, *, name: str, labels: tuple[str, ...]) -> Description:
    """Returns the description of a model's files."""
    config, activation = exportable.input_config, exportable.activation
    return Description(
        name=name,
        weights_sha256=weights_sha256(exportable.network),
        image_shape=exportable.image_shape,
        colours=COLOURS.get(exportable.image_shape[2], ""),
        takes=exportable.takes,
        image_mean=tuple(config.image_mean),
        image_std=tuple(config.image_std),
        **{name: getattr(config, name) for name in RESIZING},
        activation="" if activation is None else activation.__name__,
        answers=exportable.answers,
        outputs=exportable.output_names,
        labels=labels,
    )


def weights_sha256(network: keras.Model) -> str:
    """Returns the SHA-256 of a model's weights: path and float32 values of each, by path.

    It is the same for a model in another precision or file format that holds the same values.
    """
    digest = hashlib.sha256()
    for weight in sorted(network.weights, key=lambda weight: str(weight.path)):
        digest.update(f"{weight.path}\n".encode())
        array = np.asarray(keras.ops.convert_to_numpy(weight), "<f4")
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _made_again(model: keras.Model) -> keras.Model:
    serialized = _in_float32(keras.saving.serialize_keras_object(model))
    deserialize = functools.partial(
        keras.saving.deserialize_keras_object,
        custom_objects={type(layer).__name__: type(layer) for layer in layers_of(model)},
        safe_mode=False,  # the model is in memory, so what a Lambda layer runs is trusted
    )
    try:
        if not isinstance(model, keras.Sequential):
            return deserialize(serialized)
        layers = list(map(deserialize, serialized["config"]["layers"]))
    except (TypeError, ValueError) as error:
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        raise UnsupportedModelError(
            f"export makes {model.name!r} again in float32 from the get_config of its layers, "
            "which Keras cannot; give your own classes a get_config with all arguments of "
            f"__init__, and **kwargs. Received: {str(first).splitlines()[0]}"
        ) from error
    images = keras.Input(model.input_shape[1:])
    output = functools.reduce(
        lambda x, layer: x if isinstance(layer, keras.layers.InputLayer) else layer(x),
        layers,
        images,
    )
    return keras.Model(images, output, name=model.name)


def _backbone_of(model: keras.Model) -> Backbone:
    found = backbones(model)
    inputs, outputs = (getattr(model, name, None) or () for name in ("inputs", "outputs"))
    if len(found) == 1 and not (inputs and outputs):
        raise UnsupportedModelError(
            "export takes a model that knows its input. Received: "
            f"{model.name!r}, a {type(model).__name__} without one; give export "
            "keras.Model(images, model(images)) with images = keras.Input((height, width, 3))."
        )
    if len(found) != 1 or len(inputs) != 1 or output_shape(model) is None:
        raise UnsupportedModelError(
            "export takes a VisionTransformer, or a functional or Sequential model from one batch "
            f"of images to one tensor with one VisionTransformer inside. Received: {model.name!r} "
            f"with {len(found)} inside, {len(inputs)} inputs and {len(outputs)} outputs."
        )
    if len(model.input_shape) != 4 or None in model.input_shape[1:]:
        raise ValueError(
            "export writes models for images of one size, since a server resizes images to it: "
            "build the model on keras.Input((height, width, channels)). "
            f"Received: {model.name!r} for inputs of shape {model.input_shape}."
        )
    return found[0]


def _input_range(network: keras.Model, config: ViTConfig) -> Range:
    """Returns the range of a network with layers around a Vision Transformer."""
    (backbone,) = backbones(network)
    first = backbone.model
    own: Range = "pixels" if config.include_preprocessing else "normalized"
    if not isinstance(first, VisionTransformer):  # layers of one: whoever scales, it is before this
        first, own = next(x for x in first.layers if x.name in ("stem", "patches")), "normalized"
    received: list[Any] = []
    call = first.call

    @functools.wraps(call)
    def record(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        received.append(inputs)
        return call(inputs, *args, **kwargs)

    values = np.array([0, 51, 255], np.float32)
    images = np.broadcast_to(values[:, None, None, None], (3, *network.input_shape[1:]))
    setattr(first, "call", record)  # noqa: B010, mypy takes it for a method
    try:
        network(np.ascontiguousarray(images), training=False)
    finally:
        del first.call
    medians = np.median(keras.ops.convert_to_numpy(received[0]), axis=(1, 2, 3))
    # Layers that leave a black, a dark and a white image as they are do not scale pixels.
    if np.allclose(medians, values, atol=1e-2):
        return own
    scale = 1.0 if own == "pixels" else float(np.max(config.rescaling[0]))
    ratio = float(np.ptp(medians)) / (scale * 255)
    if not 1 / _RANGE_FACTOR < ratio < _RANGE_FACTOR:
        raise ValueError(
            f"export takes models of pixels 0..255, or of what the Vision Transformer inside "
            f"takes. Received: {network.name!r}, whose layers turn 0..255 into "
            f"{medians.min():.4g}..{medians.max():.4g} before it; put a Rescaling that makes "
            "their input of pixels in front."
        )
    return "pixels"


def _in_float32(serialized: Any) -> Any:
    if isinstance(serialized, list | tuple):
        return type(serialized)(map(_in_float32, serialized))
    if not isinstance(serialized, dict):
        return serialized
    result = {key: _in_float32(value) for key, value in serialized.items()}
    config = result.get("config")
    if result.get("class_name") == LoRAVisionTransformer.__name__:
        plain = keras.saving.get_registered_name(VisionTransformer)
        result |= {"class_name": VisionTransformer.__name__, "registered_name": plain}
        result["module"] = VisionTransformer.__module__
        for key in ("rank", "targets", "alpha"):
            del result["config"][key]
    if isinstance(config, dict) and "dtype" in config and result["class_name"] != "InputLayer":
        policy = keras.dtype_policies.get(config["dtype"]).name
        config["dtype"] = policy if policy in _UNCHANGED_DTYPES else "float32"
        for key in ("lora_rank", "lora_alpha", "quantization_config", CHANGES):
            config.pop(key, None)
    return result


def _without_activation(network: keras.Model) -> keras.Model:
    last = network
    while isinstance(last, keras.Model):
        within, last = last, last_operation(last)
    if hasattr(last, "activation"):
        last.activation = keras.activations.linear
        return network
    # A layer or an operation of its own.
    if within is not network or getattr(last, "axis", -1) != -1:
        raise UnsupportedModelError(
            "export takes a model that ends in logits, or in probabilities along the last "
            f"axis that its outermost model computes. Received: one that ends in {last.name!r} "
            f"of {within.name!r}; use Activation({activation_of(last)!r})."
        )
    return keras.Model(network.input, last.input)


def _copy_weights(source: keras.Model, target: keras.Model) -> None:
    """Copies weights layer by layer, so that layers of one name do no harm."""
    for layer in layers_of(source):
        mode = getattr(layer, "quantization_mode", None)
        if mode not in _MODES or (mode and not isinstance(layer, keras.layers.Dense)):
            raise ValueError(
                f"Layer {layer.path!r} is quantised in mode {mode!r}; export can undo "
                f"{', '.join(map(str, _MODES[1:]))} in Dense layers. Export the model from before "
                "its quantisation."
            )
    layers, copies = (_with_own_weights(model) for model in (source, target))
    names = [[name for name, _ in own if name not in _ADDED] for _, own in layers]
    if [sorted(each) for each in names] != [sorted(n for n, _ in own) for _, own in copies]:
        raise ValueError(
            f"The layers of {source.name!r} do not fit those of its float32 copy, made from its "
            "get_config; give export a model that keras.models.clone_model copies."
        )
    for (layer, own), (_, weights) in zip(layers, copies, strict=True):
        values = {name: value for name, value in own if name not in _ADDED}
        for name, weight in weights:
            value = values[name]
            weight.assign(_float_kernel(layer, value) if name == "kernel" else _float32(value))


def _with_own_weights(model: keras.Model) -> list[tuple[keras.layers.Layer, list[Any]]]:
    result = []
    layers = layers_of(model)
    # A parent precedes its children, so the last layer that lists a weight is its owner.
    owners = {id(weight): layer for layer in layers for weight in layer.weights}
    for layer in layers:
        own = [(w.path.rsplit("/")[-1], w) for w in layer.weights if owners[id(w)] is layer]
        if own:
            result.append((layer, own))
    return result


def _float_kernel(layer: keras.layers.Layer, stored: Any) -> np.ndarray:
    mode = getattr(layer, "quantization_mode", None)
    is_adapted = getattr(layer, "lora_enabled", False)
    if is_adapted and not isinstance(layer, keras.layers.Dense):
        return _float32(layer.kernel)  # Keras adds it, in a layout of the layer's own
    if mode == "int4":
        stored = keras.quantizers.unpack_int4(stored, layer.units, axis=-1)
    value = _float32(stored)
    if mode == "int4" and hasattr(layer, "g_idx"):
        groups = _float32(layer.g_idx).astype(int)
        scale, zero = _float32(layer.kernel_scale), _float32(layer.kernel_zero)
        value = (value - zero[groups]) * scale[groups]
    elif mode in ("int8", "int4"):
        value = value / _float32(layer.kernel_scale)
    if is_adapted:
        down, up = map(_float32, (layer.lora_kernel_a, layer.lora_kernel_b))
        value = value + layer.lora_alpha / layer.lora_rank * np.matmul(down, up)
    return np.asarray(value, np.float32)


def _float32(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value), np.float32)
