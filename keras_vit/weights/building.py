"""Builds the model that a checkpoint describes, and fills it."""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from keras_vit.config import Pooling, ViTConfig, stride_of
from keras_vit.layers.initialization import overwritten_weights
from keras_vit.model import VisionTransformer
from keras_vit.weights import loading
from keras_vit.weights.checkpoint import ARCHITECTURE, NUMBERS, Checkpoint, open_checkpoint
from keras_vit.weights.positions import Method
from keras_vit.weights.source import find

AUTO = "auto"
# What no argument decides: the file does.
_KEPT = ("class_token", *NUMBERS, "antialias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a caller asks of a model; None is left open.

    Attributes:
        training: fields of the config that matter in training alone.
    """

    include_top: bool
    input_shape: tuple[int, int, int] | None
    pooling: Pooling | None
    classes: int | None
    classifier_activation: str | None
    include_preprocessing: bool
    name: str
    dtype: Any = None
    positions: Method = "original"
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def applied(self, config: ViTConfig, **fields: Any) -> ViTConfig:
        """Returns the config with what the caller decides, and the given fields."""
        activation = self.classifier_activation if self.include_top else None
        return dataclasses.replace(
            config,
            classifier_activation=activation,
            include_preprocessing=self.include_preprocessing,
            **self.training,
            **fields,
        )

    def classes_or(self, default: int | None) -> int | None:
        """Returns the size of the classifier, None for no classifier."""
        if not self.include_top:
            return None
        return default if self.classes is None else self.classes


def load(
    source: str | os.PathLike[str],
    *,
    input_shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    include_top: bool = True,
    pooling: Pooling | None = None,
    classifier_activation: str | None = AUTO,
    include_preprocessing: bool | None = None,
    dtype: Any = None,
    name: str = "vit",
    positions: Method = "original",
    sha256: str | None = None,
) -> VisionTransformer:
    """Builds the model that a file, folder or address describes, with its weights.

    Sizes, heads, activation, epsilon and the pixels' mean and deviation all come from the source;
    what cannot be known is refused.

    Example:
        >>> import tempfile
        >>> from keras_vit.weights import save_npz
        >>> config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=3)
        >>> path = save_npz(VisionTransformer(config), tempfile.mkdtemp() + "/vit.npz")
        >>> load(path, include_top=False, pooling="avg").output_shape
        (None, 8)

    Args:
        source: where the weights are:
            - a file: .npz in the published layout or of big_vision, .safetensors of timm or Hugging
              Face transformers with its config.json beside it, or a .keras file;
            - a folder that holds one of these, such as a run directory or a downloaded repository;
            - the http(s) URL of a file;
            - "hf://owner/name" on the Hugging Face Hub, "hf://owner/name@revision" for a branch,
              tag or commit of it, "hf://owner/name@revision/file" for one file.
        input_shape: (height, width, channels). Left open: the source's. Position embeddings are
            resampled to it.
        classes: size of the classifier. Left open: the source's, or none. Another number than the
            source's makes a fresh classifier of zeros.
        include_top: whether to keep the classifier and the representation layer.
        pooling: "token", "avg" or "map". Left open: the source's; every token without the top.
        classifier_activation: activation after the classifier, None for logits. Left "auto": the
            source's, or "softmax" where it holds weights alone.
        include_preprocessing: whether the model takes pixels 0..255 and scales them itself,
            otherwise it takes what its `preprocess_input` makes of them. Left open: the source's,
            or True.
        dtype: dtype policy, e.g. "mixed_bfloat16"; None for the global one.
        name: name of the model.
        positions: how position embeddings are resampled, see `resample_positions`.
        sha256: the SHA-256 of the file of weights, in hexadecimal; compared before anything is read
            from it. Left open, a download is held against the server's word and its own first use.

    Warns:
        UserWarning: something was assumed that the source does not say, or its classifier is zeros.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: a download failed, or brought something else than was published.
        ValueError: the source does not say enough, holds another network, or has another SHA-256;
            the message says what is missing.
    """
    checkpoint = open_checkpoint(find(source, sha256=sha256))
    if checkpoint.unknown is not None:
        raise ValueError(_refusal(checkpoint, checkpoint.unknown))
    kept = checkpoint.fields
    if classifier_activation == AUTO:
        classifier_activation = kept.get("classifier_activation", "softmax")
    if include_preprocessing is None:
        include_preprocessing = kept.get("include_preprocessing", True)
    request = Request(
        include_top=include_top,
        input_shape=input_shape,
        pooling=pooling,
        classes=classes,
        classifier_activation=classifier_activation,
        include_preprocessing=include_preprocessing,
        name=name,
        dtype=dtype,
        positions=positions,
    )
    return build(checkpoint, request, base=_described(checkpoint, input_shape))


def build(checkpoint: Checkpoint, request: Request, *, base: ViTConfig) -> VisionTransformer:
    """Builds and fills the model of a request; `base` has what neither it nor the file decides.

    Raises:
        ValueError: the file does not fit the base, or its weights' numbers are not known.
    """
    loading.check_architecture(checkpoint, base)
    if checkpoint.unknown is not None:
        raise ValueError(_refusal(checkpoint, checkpoint.unknown))
    config = _config(base, checkpoint, request)
    keeps_head = config.classes == checkpoint.fields["classes"]
    rows = loading.match(checkpoint, config, head="file" if keeps_head else "fresh")
    reading = loading.reading(checkpoint, config, rows=rows, positions=request.positions)
    with reading as values:
        with overwritten_weights():
            model = VisionTransformer(config, name=request.name, dtype=request.dtype)
        loading.assign(model, values, path=checkpoint.path)
    _warn(checkpoint, model, is_head_kept=keeps_head and request.classes is None)
    return model


def _described(checkpoint: Checkpoint, input_shape: tuple[int, int, int] | None) -> ViTConfig:
    """Returns the config of the model that the file describes."""
    fields = dict(checkpoint.fields)
    missing = [name for name in ARCHITECTURE if name not in fields]
    if missing:
        raise ValueError(_refusal(checkpoint, f"it does not say its {' and '.join(missing)}"))
    shape = input_shape or fields.get("input_shape") or _shape(checkpoint)
    _check_channels(checkpoint, shape)
    try:
        return ViTConfig(**{**checkpoint.assumed, **fields, "input_shape": shape})
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from error


def _check_channels(checkpoint: Checkpoint, input_shape: tuple[int, ...]) -> None:
    if checkpoint.channels not in (None, *input_shape[2:]):
        raise ValueError(
            f"{checkpoint.path} is of a model for images of {checkpoint.channels} channels. "
            f"Received: input_shape={input_shape}."
        )


def _shape(checkpoint: Checkpoint) -> tuple[int, int, int]:
    if checkpoint.grid is None or checkpoint.channels is None:
        raise ValueError(
            f"{checkpoint.path} does not say the height and width of its images; pass input_shape, "
            "the one that it was trained at."
        )
    stride = stride_of(checkpoint.fields["patch_size"], checkpoint.fields["resnet_layers"])
    rows, columns = checkpoint.grid
    return rows * stride, columns * stride, checkpoint.channels


def _config(base: ViTConfig, checkpoint: Checkpoint, request: Request) -> ViTConfig:
    fields = {**checkpoint.assumed, **checkpoint.fields}
    classes = request.classes_or(fields["classes"])
    keeps_top = request.include_top and classes == fields["classes"]
    shape = base.input_shape
    if checkpoint.grid is not None:
        rows, columns = checkpoint.grid
        shape = (rows * base.stride, columns * base.stride, checkpoint.channels or shape[2])
    _check_channels(checkpoint, request.input_shape or shape)
    return request.applied(
        base,
        input_shape=request.input_shape or shape,
        pooling=request.pooling or (fields["pooling"] if request.include_top else None),
        classes=classes,
        representation_dim=fields["representation_dim"] if keeps_top else None,
        **{name: fields[name] for name in _KEPT if name in fields},
    )


def _refusal(checkpoint: Checkpoint, why: str) -> str:
    return (
        f"{checkpoint.path} cannot be built from: {why}. Make a "
        "keras_vit.VisionTransformer of the config that you know to be right, and fill it with "
        "keras_vit.weights.load(model, file)."
    )


def _warn(checkpoint: Checkpoint, model: VisionTransformer, *, is_head_kept: bool) -> None:
    """Tells the caller of `load` or of a builder what a number hangs on that no file says."""
    level = 4  # this function, build, load or the builder, the caller
    assumed = [name for name in NUMBERS if name not in checkpoint.fields]
    if assumed:
        values = ", ".join(f"{name}={getattr(model.config, name)!r}" for name in assumed)
        warnings.warn(
            f"{checkpoint.path} does not say what it was trained with; assumed {values}. Where "
            f"that is wrong, so is every number: {checkpoint.hint}.",
            stacklevel=level,
        )
    if is_head_kept and model.config.classes and not _has_trained_head(model):
        warnings.warn(
            f"The classifier in {checkpoint.path} is all zeros, as the original's ImageNet-21k "
            "ones were published: it predicts nothing. Pass classes=N to train a fresh one, "
            'include_top=False for features, or weights="augreg/imagenet21k" for a trained one.',
            stacklevel=level,
        )


def _has_trained_head(model: VisionTransformer) -> bool:
    return bool(keras.ops.any(model.get_layer("head").kernel != 0))
