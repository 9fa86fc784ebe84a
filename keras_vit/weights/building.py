"""Builds the model that a source describes, and fills it."""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from keras_vit.config import (
    ACTIVATIONS,
    ARCHITECTURE,
    ASSUMED,
    EXTENSIONS,
    RESIZING,
    InputShape,
    Pooling,
    ViTConfig,
    stride_of,
)
from keras_vit.layers.random import skip_initialization
from keras_vit.limits import naming
from keras_vit.model import VisionTransformer
from keras_vit.weights import loading
from keras_vit.weights.checkpoint import Checkpoint, open_checkpoint
from keras_vit.weights.positions import Method, check_method
from keras_vit.weights.sources import find
from keras_vit.weights.torch_layouts import without_distillation

AUTO = "auto"

# What the file decides, before any argument.
_BY_FILE = ("class_token", *ASSUMED, *RESIZING, *EXTENSIONS)
# What the file decides where the caller leaves it open.
_ENDING = ("classifier_activation", "problem_type")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a caller asks of a model; None is left open.

    Attributes:
        training: fields of the config that matter in training alone.
    """

    include_top: bool = True
    input_shape: InputShape | None = None
    pooling: Pooling | None = None
    classes: int | None = None
    classifier_activation: str | None = AUTO
    include_preprocessing: bool | None = None
    name: str = "vit"
    dtype: Any = None
    positions: Method = "original"
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def applied(self, config: ViTConfig, *, input_shape: InputShape, **fields: Any) -> ViTConfig:
        """Returns the config with what the caller decides, this shape and the given fields."""
        changes = {**self.training, **fields}
        if self.include_preprocessing is not None:
            changes["include_preprocessing"] = self.include_preprocessing
        applied = dataclasses.replace(config, **changes).resized(input_shape)
        check_method(self.positions, any_size=applied.any_size)
        if applied.resolved_problem_type is None:
            return applied.with_activation(None)
        if self.classifier_activation != AUTO:
            return applied.with_activation(self.classifier_activation)
        if "classifier_activation" in fields:
            return applied
        return applied.with_activation(ACTIVATIONS.get(applied.resolved_problem_type))

    def classes_or(self, default: int | None) -> int | None:
        """Returns the size of the classifier, None for no classifier."""
        if not self.include_top:
            return None
        return default if self.classes is None else self.classes


def load(
    source: str | os.PathLike[str],
    *,
    input_shape: InputShape | None = None,
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
            - a folder that holds one of these, such as a run directory or a downloaded repository,
              whose .safetensors file may be in shards beside their model.safetensors.index.json;
            - the http(s) URL of a file;
            - "hf://owner/name" on the Hugging Face Hub, "hf://owner/name@revision" for a branch,
              tag or commit of it, "hf://owner/name@revision/file" for one file.
        input_shape: (height, width, channels). Left open: the source's. Position embeddings are
            resampled to it; (None, None, channels) takes images of any size, see `ViTConfig`.
        classes: size of the classifier. Left open: the source's, or none. Another number than the
            source's makes a new classifier of zeros.
        include_top: whether to keep the classifier and the representation layer.
        pooling: "token", "avg", "token_avg" or "map". Left open: the source's; every token without
            the top.
        classifier_activation: activation after the classifier, None for logits. Left "auto": the
            source's, or that of its `problem_type`: "softmax", "sigmoid", or None for numbers.
        include_preprocessing: whether the model takes pixels 0..255 and scales them itself,
            otherwise it takes what its `preprocess_input` makes of them. Left open: the source's,
            or True.
        dtype: dtype policy, e.g. "mixed_bfloat16"; None for the global one.
        name: name of the model.
        positions: how position embeddings are resampled, see `resample_positions`.
        sha256: the SHA-256 of the file of weights, in hexadecimal; compared before anything is read
            from it. Without it, a download is checked by the server's checksum and its first use.
            Shards are several files, and their index says nothing of their bytes: with them it is
            refused; of "hf://owner/name@commit" they are always those of that commit.

    Warns:
        UserWarning: something was assumed that the source does not say, or its classifier is zeros.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: a download failed, or brought something else than was published.
        ValueError: the source does not say enough, holds another network, or has another SHA-256;
            the message says what is missing.
    """
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
    return build(open_checkpoint(find(source, sha256=sha256)), request)


def labels(
    source: str | os.PathLike[str], *, sha256: str | None = None
) -> tuple[tuple[str, str], ...] | None:
    """Returns (identifier, name) of each class of a source's classifier, None if unknown.

    They are those of the config.json beside the weights: `id2label` of transformers, `label_names`
    and `label_descriptions` of timm. A classifier of 1,000 or 21,843 classes without such names is
    taken for one of ImageNet, as `decode_predictions` takes it.

    Example:
        >>> labels("hf://google/vit-base-patch16-224")[281]  # doctest: +SKIP
        ('n02123045', 'tabby, tabby cat')

    Args:
        source: what `keras_vit.load` takes.
        sha256: as in `keras_vit.load`, which raises the same errors.
    """
    return open_checkpoint(find(source, sha256=sha256)).class_names


def build(
    checkpoint: Checkpoint, request: Request, *, base: ViTConfig | None = None
) -> VisionTransformer:
    """Builds and fills the model of a request.

    Args:
        checkpoint: the opened file.
        request: what the caller decides.
        base: the config of what neither of them decides; None for the one that the file describes.

    Raises:
        ValueError: the file does not fit the base, does not say enough without one, or its weights'
            numbers are not known.
    """
    if base is not None:
        loading.check_architecture(checkpoint, base)
    if checkpoint.settings.unsupported_reason is not None:
        raise ValueError(_refusal(checkpoint, checkpoint.settings.unsupported_reason))
    base = base or _config_of(checkpoint, request.input_shape)
    checkpoint = _select_heads(checkpoint, request)
    config = _config(base, checkpoint, request)
    keeps_head = config.classes == checkpoint.fields["classes"]
    rows = loading.match(checkpoint, config, head="file" if keeps_head else "new")
    reading = loading.reading(checkpoint, config, rows=rows, positions=request.positions)
    with reading as values:
        with skip_initialization():
            model = VisionTransformer(config, name=request.name, dtype=request.dtype)
        loading.assign(model, values, path=checkpoint.path)
    _warn(checkpoint, model, is_head_kept=keeps_head and request.classes is None)
    return model


def _config_of(checkpoint: Checkpoint, input_shape: InputShape | None) -> ViTConfig:
    fields = dict(checkpoint.fields)
    missing = [name for name in ARCHITECTURE if name not in fields]
    if missing:
        raise ValueError(_refusal(checkpoint, f"it does not say its {' and '.join(missing)}"))
    shape = None if input_shape is None or None in input_shape else input_shape
    shape = shape or fields.get("input_shape") or _shape(checkpoint)
    _check_channels(checkpoint, input_shape or shape)
    places = {} if None in shape else {"input_shape": shape, "position_grid": None}
    with naming(checkpoint.path):
        defaults = {"include_preprocessing": True, **checkpoint.settings.assumed}
        config = ViTConfig(**{**defaults, **fields, **places})
        return config.resized(input_shape or shape)


def _check_channels(checkpoint: Checkpoint, input_shape: InputShape) -> None:
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


def _select_heads(checkpoint: Checkpoint, request: Request) -> Checkpoint:
    """Leaves the distillation token's classifier aside where the class token's is not asked for."""
    fields = checkpoint.fields
    is_asked = request.include_top and request.pooling in (None, "token")
    if is_asked or "dist_token" not in checkpoint.arrays:
        return checkpoint
    registers = {"distillation_token": False, "num_registers": fields["num_registers"] + 1}
    return dataclasses.replace(
        checkpoint, arrays=without_distillation(checkpoint.arrays), fields={**fields, **registers}
    )


def _config(base: ViTConfig, checkpoint: Checkpoint, request: Request) -> ViTConfig:
    fields = {**checkpoint.settings.assumed, **checkpoint.fields}
    classes = request.classes_or(fields["classes"])
    keeps_top = request.include_top and classes == fields["classes"]
    shape = base.input_shape
    if checkpoint.grid is not None:
        rows, columns = checkpoint.grid
        shape = (rows * base.stride, columns * base.stride, checkpoint.channels or shape[2])
        base = base.resized(shape)
    stored = fields.get("input_shape", shape)
    shape = request.input_shape or (stored if None in stored else shape)
    _check_channels(checkpoint, shape)
    pooling = request.pooling or (fields["pooling"] if request.include_top else None)
    kept = {name: fields[name] for name in (*_BY_FILE, *_ENDING) if name in fields}
    if pooling != "map":
        kept["pooling_heads"] = None
    return request.applied(
        base,
        input_shape=shape,
        pooling=pooling,
        classes=classes,
        representation_dim=fields["representation_dim"] if keeps_top else None,
        **kept,
    )


def _refusal(checkpoint: Checkpoint, why: str) -> str:
    return (
        f"{checkpoint.path} cannot be built from: {why}. Make a "
        "keras_vit.VisionTransformer of the config that you know to be right, and fill it with "
        "keras_vit.weights.load_weights(model, file)."
    )


def _warn(checkpoint: Checkpoint, model: VisionTransformer, *, is_head_kept: bool) -> None:
    """Tells the caller of `load` or of a builder what a number hangs on that no file says."""
    level = 4  # this function, build, load or the builder, the caller
    loading.warn_assumed(checkpoint, model.config, ASSUMED, stacklevel=level + 1)
    if checkpoint.settings.warning:
        warnings.warn(f"{checkpoint.path}: {checkpoint.settings.warning}", stacklevel=level)
    has_kernel = is_head_kept and model.config.classes
    if has_kernel and not keras.ops.any(model.get_layer("head").kernel != 0):
        warnings.warn(
            f"The classifier in {checkpoint.path} is all zeros, as the original's ImageNet-21k "
            "ones were published: it predicts nothing. Pass classes=N to train a new one, "
            'include_top=False for features, or weights="augreg/imagenet21k" for a trained one.',
            stacklevel=level,
        )
