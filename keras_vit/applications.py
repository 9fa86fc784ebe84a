"""Builders of the published variants, with the signature of `keras.applications`."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any, Protocol

import keras

from keras_vit.config import Pooling, ViTConfig
from keras_vit.layers.initialization import overwritten_weights
from keras_vit.model import VisionTransformer
from keras_vit.variants import VARIANTS, parameter_count
from keras_vit.weights import loading
from keras_vit.weights.checkpoint import Checkpoint, open_checkpoint
from keras_vit.weights.source import locate

LARGE = 100e6  # parameters; the examples of larger models are not run by the tests
DEFAULT_CLASSES = 1000  # ImageNet-1k, as in keras.applications


class Builder(Protocol):
    """The signature that every builder has."""

    __name__: str

    def __call__(
        self,
        include_top: bool = True,
        weights: str | Path | None = None,
        input_tensor: Any = None,
        input_shape: tuple[int, int, int] | None = None,
        pooling: Pooling | None = None,
        classes: int | None = None,
        classifier_activation: str | None = "softmax",
        include_preprocessing: bool = True,
        name: str | None = None,
        *,
        dropout_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        remat: bool = False,
    ) -> keras.Model: ...


_DOCUMENTATION = """Instantiates {title}: {parameters} parameters with 1,000 classes.

Reference:
    [{paper}]({link})

Example:
    >>> model = {function}(weights=None, input_shape={shape}, classes=10){skip}
    >>> model.output_shape{skip}
    (None, 10)

Args:
    include_top: whether to keep the classifier. Without it the representation layer goes too.
    weights: None for fresh weights, or a checkpoint, whose content decides what the other arguments
        leave open: classes, class token or none, representation layer, image size. One of
        - a published name: "imagenet21k", "imagenet21k+imagenet2012", "imagenet2012", "sam", with
          the family before it if it matters ("original/imagenet21k"), or "augreg/<file name>";
          `keras_vit.weights.catalog()` lists what exists;
        - a path or URL of an .npz, .safetensors, .weights.h5 or .keras file;
        - "hf://owner/name" on the Hugging Face Hub.
    input_tensor: a Keras tensor of images to build upon; the result is then a plain `keras.Model`
        with the Vision Transformer inside.
    input_shape: (height, width, channels); height and width are multiples of {stride}. Left open:
        the checkpoint's, or {default}. Position embeddings are resampled to it.
    pooling: "token", "avg" or "max" (over the patch tokens), or "map" (attention pooling). Left
        open: with the classifier the checkpoint's, or "{pooling}"; without, every token (B, N, D).
    classes: size of the classifier. Left open: the checkpoint's, or 1,000. Another number than the
        checkpoint's makes a fresh classifier of zeros, as the paper's fine-tuning does.
    classifier_activation: activation after the classifier; None for logits.
    include_preprocessing: whether the model takes pixels 0..255, uint8 or float, and scales them
        itself; otherwise it takes what `preprocess_input` makes of them.
    name: name of the model.
    dropout_rate, drop_path_rate: dropout and stochastic depth in training, see `ViTConfig`.
    remat: whether training computes activations anew instead of keeping them, to save memory.

Returns:
    A `VisionTransformer`: (B, classes) with the classifier; (B, {hidden_dim}) without, or
    (B, N, {hidden_dim}) without pooling.

Warns:
    UserWarning: the checkpoint's classifier is all zeros, as the original's ImageNet-21k ones are.

Raises:
    FileNotFoundError: there is no checkpoint at that path.
    OSError: a download failed, or brought something else than was published.
    ValueError: an argument is out of range, or the checkpoint does not fit; the message says how.
"""


def _builder(variant: str) -> Builder:
    """Returns the builder of one row of the table of variants."""

    def build(
        include_top: bool = True,
        weights: str | Path | None = None,
        input_tensor: Any = None,
        input_shape: tuple[int, int, int] | None = None,
        pooling: Pooling | None = None,
        classes: int | None = None,
        classifier_activation: str | None = "softmax",
        include_preprocessing: bool = True,
        name: str | None = None,
        *,
        dropout_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        remat: bool = False,
    ) -> keras.Model:
        request = _Request(
            include_top=include_top,
            input_shape=_input_shape(input_shape, input_tensor),
            pooling=pooling,
            classes=classes,
            classifier_activation=classifier_activation,
            include_preprocessing=include_preprocessing,
            name=name or build.__name__.lower(),
            training={
                "dropout_rate": dropout_rate,
                "drop_path_rate": drop_path_rate,
                "remat": remat,
            },
        )
        model = _build(variant, weights, request)
        return model if input_tensor is None else _on_tensor(model, input_tensor)

    build.__name__ = build.__qualname__ = _function_name(variant)
    build.__doc__ = _documentation(variant)
    return build


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """What a call of a builder asks for; None is left open."""

    include_top: bool
    input_shape: tuple[int, int, int] | None
    pooling: Pooling | None
    classes: int | None
    classifier_activation: str | None
    include_preprocessing: bool
    name: str
    training: dict[str, Any]  # fields of the config that matter in training alone


def _build(name: str, weights: str | Path | None, request: _Request) -> VisionTransformer:
    variant = VARIANTS[name]
    if weights is None:
        return VisionTransformer(_fresh_config(variant, request), name=request.name)
    image_size = max(request.input_shape[:2]) if request.input_shape else None
    checkpoint = open_checkpoint(locate(weights, name, image_size=image_size))
    loading.check_architecture(checkpoint, variant)
    config = _checkpoint_config(variant, checkpoint, request)
    keeps_head = config.classes == checkpoint.fields["classes"]
    rows = loading.match(checkpoint, config, head="file" if keeps_head else "fresh")
    with loading.reading(checkpoint, config, rows=rows) as values:
        with overwritten_weights():
            model = VisionTransformer(config, name=request.name)
        loading.assign(model, values, path=checkpoint.path)
    if config.classes and request.classes is None and not _has_trained_head(model):
        warnings.warn(
            f"The classifier in {checkpoint.path} is all zeros, as the original's ImageNet-21k "
            "ones were published: it predicts nothing. Pass classes=N to train a fresh one, "
            'include_top=False for features, or weights="augreg/imagenet21k" for a trained one.',
            stacklevel=3,
        )
    return model


def _has_trained_head(model: VisionTransformer) -> bool:
    return bool(keras.ops.any(model.get_layer("head").kernel != 0))


def _fresh_config(variant: ViTConfig, request: _Request) -> ViTConfig:
    pooling = request.pooling or (variant.pooling if request.include_top else None)
    return _with_request(
        variant,
        request,
        input_shape=request.input_shape or variant.input_shape,
        pooling=pooling,
        # Average and attention pooling go without a class token in the original.
        class_token=variant.class_token if pooling in ("token", None) else False,
        classes=_classes(request, DEFAULT_CLASSES),
    )


def _checkpoint_config(variant: ViTConfig, checkpoint: Checkpoint, request: _Request) -> ViTConfig:
    fields = checkpoint.fields
    classes = _classes(request, fields["classes"])
    if request.include_top and classes is None:
        raise ValueError(
            f"{checkpoint.path} holds no classifier; pass classes=N for a fresh one, or "
            "include_top=False."
        )
    decided = ("class_token", "activation", "layer_norm_epsilon")
    kept = {name: fields[name] for name in decided if name in fields}
    return _with_request(
        variant,
        request,
        input_shape=request.input_shape or _checkpoint_shape(variant, checkpoint),
        pooling=request.pooling or (fields["pooling"] if request.include_top else None),
        classes=classes,
        representation_dim=fields["representation_dim"] if classes == fields["classes"] else None,
        **kept,
    )


def _classes(request: _Request, default: int | None) -> int | None:
    if not request.include_top:
        return None
    return default if request.classes is None else request.classes


def _with_request(variant: ViTConfig, request: _Request, **fields: Any) -> ViTConfig:
    activation = request.classifier_activation if request.include_top else None
    return dataclasses.replace(
        variant,
        classifier_activation=activation,
        include_preprocessing=request.include_preprocessing,
        **request.training,
        **fields,
    )


def _checkpoint_shape(variant: ViTConfig, checkpoint: Checkpoint) -> tuple[int, int, int]:
    if checkpoint.grid is None:
        return variant.input_shape
    rows, columns = checkpoint.grid
    return (rows * variant.stride, columns * variant.stride, variant.input_shape[2])


def _input_shape(
    input_shape: tuple[int, int, int] | None, input_tensor: Any
) -> tuple[int, int, int] | None:
    if input_tensor is None:
        return input_shape
    if not keras.backend.is_keras_tensor(input_tensor):
        raise TypeError(
            "input_tensor must be a Keras tensor, such as keras.Input(...) or a layer's output. "
            f"Received: {type(input_tensor).__name__}."
        )
    shape = tuple(input_tensor.shape[1:])
    if None in shape and input_shape is None:
        raise ValueError(
            f"input_tensor has an open shape {shape}; give its height and width, or input_shape."
        )
    return input_shape or shape


def _on_tensor(model: VisionTransformer, input_tensor: Any) -> keras.Model:
    inputs = keras.utils.get_source_inputs(input_tensor)
    inputs = inputs[0] if len(inputs) == 1 else inputs
    return keras.Model(inputs, model(input_tensor), name=f"{model.name}_on_tensor")


def _function_name(variant: str) -> str:
    """ "L/16" -> "ViTL16", "R50+L/32" -> "R50ViTL32"."""
    stem, _, size = variant.rpartition("+")
    return f"{stem}ViT{size.replace('/', '')}"


def _documentation(variant: str) -> str:
    config = VARIANTS[variant]
    is_scaled = config.pooling == "map"
    side = 2 * config.stride
    return _DOCUMENTATION.format(
        title=f"ViT-{variant}",
        function=_function_name(variant),
        parameters=f"{parameter_count(config):,}",
        paper="Scaling Vision Transformers" if is_scaled else "An Image is Worth 16x16 Words",
        link=f"https://arxiv.org/abs/{'2106.04560' if is_scaled else '2010.11929'}",
        shape=(side, side, 3),
        skip="  # doctest: +SKIP" if parameter_count(config) > LARGE else "",
        stride=config.stride,
        default=config.input_shape,
        pooling=config.pooling,
        hidden_dim=config.hidden_dim,
    )


BUILDERS: dict[str, Builder] = {variant: _builder(variant) for variant in VARIANTS}

ViTTi16 = BUILDERS["Ti/16"]
ViTS16 = BUILDERS["S/16"]
ViTS32 = BUILDERS["S/32"]
ViTB8 = BUILDERS["B/8"]
ViTB16 = BUILDERS["B/16"]
ViTB32 = BUILDERS["B/32"]
ViTL16 = BUILDERS["L/16"]
ViTL32 = BUILDERS["L/32"]
ViTH14 = BUILDERS["H/14"]
ViTg14 = BUILDERS["g/14"]
ViTG14 = BUILDERS["G/14"]
ViTSo400m14 = BUILDERS["So400m/14"]
RViTTi16 = BUILDERS["R+Ti/16"]
R26ViTS32 = BUILDERS["R26+S/32"]
R26ViTB32 = BUILDERS["R26+B/32"]
R50ViTB16 = BUILDERS["R50+B/16"]
R50ViTL32 = BUILDERS["R50+L/32"]
