"""Builds the model that a source describes, and fills it."""

import dataclasses
import functools
import logging
import os
import re
import urllib.parse
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from keras_vit.config import InputShape, Pooling, ViTConfig, stride_of
from keras_vit.layers.random import overwritten_weights
from keras_vit.model import VisionTransformer
from keras_vit.weights import loading
from keras_vit.weights.arrays import shard_places
from keras_vit.weights.catalog import resolve
from keras_vit.weights.checkpoint import (
    ARCHITECTURE,
    BEYOND,
    NUMBERS,
    SUFFIXES,
    Checkpoint,
    open_checkpoint,
)
from keras_vit.weights.checksums import SHARD_INDEX, check_one_file, check_sha256, checked_sha256
from keras_vit.weights.connection import shown
from keras_vit.weights.download import cached_path, fetch, fetch_from_hub, hub_parts
from keras_vit.weights.positions import Method, check_method
from keras_vit.weights.torch_layouts import without_distillation
from keras_vit.weights.torch_settings import SETTINGS_FILES

HUB_WEIGHTS, HUB_INDEX = "model.safetensors", f"model{SHARD_INDEX}"

# What a folder is looked through for, before any other file that can be read.
FOLDER_FILES = (HUB_WEIGHTS, HUB_INDEX, "model.keras")
_OF_TORCH = (".safetensors", SHARD_INDEX)  # with settings beside them
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
_LOGGER = logging.getLogger("keras_vit.weights")


def find(source: str | os.PathLike[str], *, sha256: str | None = None) -> Path:
    """Returns the local file that a source means, downloading it if need be.

    Args:
        source: a file, a folder that holds one, an http(s) URL, or on the Hugging Face Hub
            "hf://owner/name", "hf://owner/name@revision" or "hf://owner/name@revision/file", where
            a slash of the revision is written %2F. All files of a model come from one commit.
        sha256: the SHA-256 of the file of weights, compared before anything is read from it; None
            for weights in shards, which are several files.

    Returns:
        The file of weights, or the index of its shards.

    Raises:
        FileNotFoundError: there is no such file, or the folder holds none.
        ValueError: the folder holds several, or the file has another SHA-256.
        OSError: the file cannot be fetched, or is not what was published.
        ImportError: the Hub's library is not installed.
    """
    address, sha256 = os.fsdecode(source), checked_sha256(sha256)
    if re.match(r"https?://", address, re.IGNORECASE):
        return _url_file(address, sha256)
    if address.startswith("hf://"):
        return _hub_file(address, sha256)
    path = Path(address)
    if path.is_dir():
        path = _folder_file(path)
    if not path.exists():
        text = shown(address) if "://" in address else address
        raise FileNotFoundError(
            f"There is no file or folder {text!r}; a source is one of these, a URL or "
            "hf://owner/name. Published names belong to builders, as in keras_vit.ViTB16(weights="
            '"imagenet21k").'
        )
    return _check_file(path, sha256)


def locate(
    weights: str | os.PathLike[str],
    variant: str,
    *,
    image_size: int | None = None,
    sha256: str | None = None,
) -> Path:
    """Returns the local file for a builder's `weights`, downloading it if need be.

    Args:
        weights: what `find` takes, or a name that `keras_vit.weights.resolve` knows.
        variant: a key of `keras_vit.VARIANTS`, to which a name belongs.
        image_size: side of the images in pixels, which a name's file is chosen by.
        sha256: as in `find`.

    Raises:
        ValueError: no published checkpoint has that name, or the file has another SHA-256.
        OSError: the file cannot be fetched, or is not what was published.
        ImportError: the Hub's library is not installed.
    """
    sha256 = checked_sha256(sha256)
    if not isinstance(weights, str) and not Path(weights).is_dir():
        return _check_file(Path(weights), sha256)
    if not isinstance(weights, str) or "://" in weights:
        return find(weights, sha256=sha256)
    if weights.endswith(SUFFIXES):
        return _check_file(Path(weights), sha256)
    try:
        row = resolve(variant, weights, image_size=image_size)
    except ValueError:
        if Path(weights).exists():
            return find(weights, sha256=sha256)
        raise
    return fetch(row.url, sha256=sha256 or row.sha256)


AUTO = "auto"

# What no argument decides: the file does.
_KEPT = ("class_token", *NUMBERS, "antialias", *BEYOND)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a caller asks of a model; None is left open.

    Attributes:
        training: fields of the config that matter in training alone.
    """

    include_top: bool
    input_shape: InputShape | None
    pooling: Pooling | None
    classes: int | None
    classifier_activation: str | None
    include_preprocessing: bool
    name: str
    dtype: Any = None
    positions: Method = "original"
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def applied(self, config: ViTConfig, *, input_shape: InputShape, **fields: Any) -> ViTConfig:
        """Returns the config with what the caller decides, this shape and the given fields."""
        activation = self.classifier_activation if self.include_top else None
        applied = dataclasses.replace(
            config,
            classifier_activation=activation,
            include_preprocessing=self.include_preprocessing,
            **self.training,
            **fields,
        ).resized(input_shape)
        check_method(self.positions, any_size=applied.any_size)
        return applied

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
            source's makes a fresh classifier of zeros.
        include_top: whether to keep the classifier and the representation layer.
        pooling: "token", "avg", "token_avg" or "map". Left open: the source's; every token without
            the top.
        classifier_activation: activation after the classifier, None for logits. Left "auto": the
            source's, or "softmax" where it holds weights alone.
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
    checkpoint = open_checkpoint(find(source, sha256=sha256))
    if checkpoint.unknown is not None:
        raise ValueError(_refusal(checkpoint, checkpoint.unknown))
    stored = checkpoint.fields
    if classifier_activation == AUTO:
        classifier_activation = stored.get("classifier_activation", "softmax")
    if include_preprocessing is None:
        include_preprocessing = stored.get("include_preprocessing", True)
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
    return build(checkpoint, request, base=_config_of(checkpoint, input_shape))


def labels(
    source: str | os.PathLike[str], *, sha256: str | None = None
) -> tuple[tuple[str, str], ...] | None:
    """Returns (identifier, name) of each class of a source's classifier, None where nobody says.

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


def build(checkpoint: Checkpoint, request: Request, *, base: ViTConfig) -> VisionTransformer:
    """Builds and fills the model of a request; `base` has what neither it nor the file decides.

    Raises:
        ValueError: the file does not fit the base, or its weights' numbers are not known.
    """
    loading.check_architecture(checkpoint, base)
    if checkpoint.unknown is not None:
        raise ValueError(_refusal(checkpoint, checkpoint.unknown))
    checkpoint = _with_heads_asked_for(checkpoint, request)
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


def _check_file(path: Path, sha256: str | None) -> Path:
    check_sha256(path, sha256)
    return path


def _folder_file(folder: Path) -> Path:
    """Returns the one checkpoint of a folder, or the index of its shards."""
    entries = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    files = [name for name in FOLDER_FILES if name in entries]
    whole = [name for name in entries if not _SHARD.fullmatch(name)]
    files = files or [name for name in whole if name.endswith(SUFFIXES)]
    if len(files) == 1:
        return folder / files[0]
    if files:
        raise ValueError(
            f"The folder {str(folder)!r} holds several checkpoints ({', '.join(files)}); pass the "
            "path of one."
        )
    parts = [name for name in entries if name not in whole or name.endswith(".index.json")]
    reason = (
        f"its weights are in parts ({parts[0]}) without {HUB_INDEX}; fetch it, or save one file"
        if parts
        else (f"put one there whose name ends in {', '.join(SUFFIXES)}")
    )
    raise FileNotFoundError(f"The folder {str(folder)!r} holds no checkpoint: {reason}.")


def _url_file(url: str, sha256: str | None) -> Path:
    """Fetches a file with its shards; a PyTorch library's with the settings beside it."""
    check_one_file(cached_path(url).name, sha256)
    path = fetch(url, sha256=sha256)
    for name in _shards(path):
        fetch(_beside(url, name))
    for name in SETTINGS_FILES if path.name.endswith(_OF_TORCH) else ():
        address = _beside(url, name)
        try:
            fetch(address, progress=False)
        except FileNotFoundError:
            _LOGGER.info("There is no %s.", shown(address))
        except (OSError, ValueError) as error:
            if cached_path(address).exists():  # it would be read, and is not what it was
                raise
            _LOGGER.warning("%s was not fetched: %s", shown(address), error)
    return path


def _beside(url: str, name: str) -> str:
    """Returns the URL of another file of the same folder."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{name}"))


def _shards(path: Path) -> list[str]:
    """Returns the names of the files that an index names, none for another file."""
    return sorted(set(shard_places(path).values())) if path.name.endswith(SHARD_INDEX) else []


def _hub_file(address: str, sha256: str | None) -> Path:
    """Fetches a model from the Hugging Face Hub, all files of one commit; settings land beside."""
    repository, revision, file = hub_parts(address, suffixes=SUFFIXES)
    check_one_file(file or "", sha256)
    weights = file or HUB_WEIGHTS
    folder = weights.rpartition("/")[0]
    get = functools.partial(fetch_from_hub, address, repository)
    beside = [f"{folder}/{name}".lstrip("/") for name in SETTINGS_FILES]
    beside = beside if weights.endswith(_OF_TORCH) else []
    commit = revision
    if file is None:  # the small file first: it tells whether this is a model at all
        _, commit = get(beside.pop(0), revision=commit)
        path, commit = _hub_weights(address, get, commit, sha256)
    else:
        path, commit = get(file, revision=commit, sha256=sha256)
    _LOGGER.info("%s is commit %s.", address, commit)
    for name in _shards(path):
        get(f"{folder}/{name}".lstrip("/"), revision=commit)
    for name in beside:
        try:
            get(name, revision=commit)
        except OSError as error:
            _LOGGER.info("%s", error)
    return path


def _hub_weights(
    address: str, get: Callable[..., tuple[Path, str]], commit: str | None, sha256: str | None
) -> tuple[Path, str]:
    """Returns a repository's file of weights, or the index of its shards, and the commit."""
    try:
        return get(HUB_WEIGHTS, revision=commit, sha256=sha256)
    except OSError as error:  # without a network nobody says that a file is not there
        first = error
    try:
        path, commit = get(HUB_INDEX, revision=commit)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{address} has neither {HUB_WEIGHTS} nor {HUB_INDEX}; weights are read from "
            f"{', '.join(SUFFIXES)} files, one of them named as hf://owner/name/FILE."
        ) from None
    except OSError:
        raise first from None
    check_one_file(path.name, sha256)
    return path, commit


def _config_of(checkpoint: Checkpoint, input_shape: InputShape | None) -> ViTConfig:
    """Returns the config of the model that the file describes."""
    fields = dict(checkpoint.fields)
    missing = [name for name in ARCHITECTURE if name not in fields]
    if missing:
        raise ValueError(_refusal(checkpoint, f"it does not say its {' and '.join(missing)}"))
    shape = None if input_shape is None or None in input_shape else input_shape
    shape = shape or fields.get("input_shape") or _shape(checkpoint)
    _check_channels(checkpoint, input_shape or shape)
    places = {} if None in shape else {"input_shape": shape, "position_grid": None}
    try:
        return ViTConfig(**{**checkpoint.assumed, **fields, **places}).resized(input_shape or shape)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from error


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


def _with_heads_asked_for(checkpoint: Checkpoint, request: Request) -> Checkpoint:
    """Leaves the distillation token's classifier aside where the class token's is not asked for."""
    fields = checkpoint.fields
    is_asked = request.include_top and request.pooling in (None, "token")
    if is_asked or "dist_token" not in checkpoint.arrays:
        return checkpoint
    registers = {"distillation_token": False, "num_registers": fields["num_registers"] + 1}
    return dataclasses.replace(
        checkpoint,
        arrays=without_distillation(checkpoint.arrays),
        fields={**fields, **registers},
    )


def _config(base: ViTConfig, checkpoint: Checkpoint, request: Request) -> ViTConfig:
    fields = {**checkpoint.assumed, **checkpoint.fields}
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
    kept = {name: fields[name] for name in _KEPT if name in fields}
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
