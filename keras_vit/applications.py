"""Builders of the published variants, with the signature of `keras.applications`."""

from pathlib import Path
from typing import Any, Protocol

import keras

from keras_vit.config import InputShape, Pooling, ViTConfig
from keras_vit.model import ExactModel, VisionTransformer
from keras_vit.variants import VARIANTS, parameter_count
from keras_vit.weights import building
from keras_vit.weights.building import AUTO, Request
from keras_vit.weights.checkpoint import Checkpoint, open_checkpoint
from keras_vit.weights.positions import Method
from keras_vit.weights.sources import find

__all__: list[str] = ["R26ViTB32", "R26ViTS32", "R50ViTB16", "R50ViTL32", "RViTTi16", "ViTB8",
                      "ViTB16", "ViTB32", "ViTG14", "ViTH14", "ViTL16", "ViTL32", "ViTS16",
                      "ViTS32", "ViTSo400m14", "ViTTi16", "ViTg14"]  # fmt: skip

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
        input_shape: InputShape | None = None,
        pooling: Pooling | None = None,
        classes: int | None = None,
        classifier_activation: str | None = AUTO,
        include_preprocessing: bool = True,
        name: str | None = None,
        *,
        dropout_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        remat: bool = False,
        positions: Method = "original",
        sha256: str | None = None,
    ) -> keras.Model: ...


_DOCUMENTATION = """Instantiates {title}, with random weights unless `weights` names others.

It has {parameters} parameters with 1,000 classes.

Reference:
    [{paper}]({link})

Example:
    >>> model = {function}(weights=None, input_shape={shape}, classes=10){skip}
    >>> model.output_shape{skip}
    (None, 10)

Args:
    include_top: whether to keep the classifier. Without it the representation layer goes too.
    weights: None for random weights, or a checkpoint, which decides what the other arguments leave
        open: classes, class token or none, representation layer, image size, and the
        activation, epsilon, pixels' mean and deviation, resizing and crop of its weights. One of
        - a published name: "imagenet21k", "imagenet21k+imagenet2012", "imagenet2012", "sam", with
          the family before it if it matters ("original/imagenet21k"), or "augreg/<file name>";
          `keras_vit.weights.catalog()` lists what exists;
        - a path or URL of an .npz, .safetensors, .weights.h5 or .keras file, or a folder with one;
        - "hf://owner/name" on the Hugging Face Hub, "hf://owner/name@revision" for a branch, tag or
          commit of it, "hf://owner/name@revision/file" for one file.
    input_tensor: a Keras tensor of images to build upon; the result is then an `ExactModel` with
        the Vision Transformer inside.
    input_shape: (height, width, channels); height and width are multiples of {stride}. Left open:
        the checkpoint's, or {default}. Position embeddings are resampled to it. With (None, None,
        channels) one graph takes images of any such size; hybrids do not.
    pooling: "token", "avg" or "max" (over the patch tokens), "token_avg" (token and average side
        by side), or "map" (attention pooling). Left open: with the classifier the checkpoint's, or
        "{pooling}"; without, every token (B, N, D).
    classes: size of the classifier. Left open: the checkpoint's, or 1,000. Another number than the
        checkpoint's makes a new classifier of zeros, as the paper's fine-tuning does.
    classifier_activation: activation after the classifier; None for logits. Left "auto": the
        checkpoint's, or "softmax" where it does not say, and none for a single class.
    include_preprocessing: whether the model takes pixels 0..255, uint8 or float, and scales them
        itself; otherwise it takes what its `preprocess_input` makes of them.
    name: name of the model.
    dropout_rate, drop_path_rate: dropout and stochastic depth in training, see `ViTConfig`.
    remat: whether training recomputes activations instead of storing them, to save memory.
    positions: how a checkpoint's position embeddings are resampled to `input_shape`: "original", as
        the original's fine-tuning does; "bilinear", "bicubic" or "bicubic_antialias", see
        `keras_vit.weights.resample_positions`.
    sha256: the SHA-256 of the checkpoint's file, in hexadecimal; compared before anything is read
        from it.

Returns:
    A `VisionTransformer`: (B, classes) with the classifier; (B, {hidden_dim}) without, or
    (B, N, {hidden_dim}) without pooling.

Warns:
    UserWarning: the checkpoint's classifier is all zeros, as the original's ImageNet-21k ones are,
        or it does not say its activation, epsilon or pixels, which are then assumed.

Raises:
    FileNotFoundError: there is no checkpoint at that path.
    OSError: a download failed, or brought something else than was published.
    ValueError: an argument is out of range, or the checkpoint does not fit; the message says how.
"""


def _builder(variant: str) -> Builder:

    def build(
        include_top: bool = True,
        weights: str | Path | None = None,
        input_tensor: Any = None,
        input_shape: InputShape | None = None,
        pooling: Pooling | None = None,
        classes: int | None = None,
        classifier_activation: str | None = AUTO,
        include_preprocessing: bool = True,
        name: str | None = None,
        *,
        dropout_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        remat: bool = False,
        positions: Method = "original",
        sha256: str | None = None,
    ) -> keras.Model:
        training = {"dropout_rate": dropout_rate, "drop_path_rate": drop_path_rate, "remat": remat}
        request = Request(
            include_top=include_top,
            input_shape=_input_shape(input_shape, input_tensor),
            pooling=pooling,
            classes=classes,
            classifier_activation=classifier_activation,
            include_preprocessing=include_preprocessing,
            name=name or build.__name__.lower(),
            positions=positions,
            training=training,
        )
        if weights is None:
            if sha256 is not None:
                raise ValueError("sha256 is of a checkpoint; leave it out with weights=None.")
            model = VisionTransformer(_fresh_config(VARIANTS[variant], request), name=request.name)
        else:
            checkpoint = _open_fitting(variant, weights, request, sha256=sha256)
            model = building.build(checkpoint, request, base=VARIANTS[variant])
        if input_tensor is None:
            return model
        inputs = keras.utils.get_source_inputs(input_tensor)
        inputs = inputs[0] if len(inputs) == 1 else inputs
        return ExactModel(inputs, model(input_tensor), name=f"{model.name}_on_tensor")

    build.__name__ = build.__qualname__ = _function_name(variant)
    build.__doc__ = _documentation(variant)
    return build


def _open_fitting(
    variant: str, weights: str | Path, request: Request, *, sha256: str | None
) -> Checkpoint:
    height, width = request.input_shape[:2] if request.input_shape else (None, None)
    image_size = max(height, width) if height and width else None
    path = find(weights, variant=variant, image_size=image_size, sha256=sha256)
    checkpoint = open_checkpoint(path)
    if request.include_top and request.classes_or(checkpoint.fields["classes"]) is None:
        raise ValueError(
            f"{checkpoint.path} holds no classifier; pass classes=N for a new one, or "
            "include_top=False."
        )
    return checkpoint


def _fresh_config(variant: ViTConfig, request: Request) -> ViTConfig:
    pooling = request.pooling or (variant.pooling if request.include_top else None)
    return request.applied(
        variant,
        input_shape=request.input_shape or variant.input_shape,
        pooling=pooling,
        # Average and attention pooling go without a class token in the original.
        class_token=variant.class_token if pooling in ("token", "token_avg", None) else False,
        classes=request.classes_or(DEFAULT_CLASSES),
    )


def _input_shape(input_shape: InputShape | None, input_tensor: Any) -> InputShape | None:
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
