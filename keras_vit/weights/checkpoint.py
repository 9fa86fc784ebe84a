"""Opens a checkpoint file of any known layout, without reading its values."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from keras_vit.config import ViTConfig, shown
from keras_vit.weights.arrays import (
    MAX_TEXT,
    StoredArray,
    check_file,
    open_archive,
    parse_json,
    read_npz,
    read_safetensors,
)
from keras_vit.weights.companion import companion_path, read_companion
from keras_vit.weights.facts import published_channels, published_fields
from keras_vit.weights.features import check_features
from keras_vit.weights.keras_layout import keras_fields, keras_rows, position_name, read_h5
from keras_vit.weights.layouts import Row, check_published, original_rows, published_names
from keras_vit.weights.positions import square_grid
from keras_vit.weights.torch_layouts import (
    HUGGING_FACE,
    names_of,
    torch_channels,
    torch_fields,
    torch_rows,
)
from keras_vit.weights.torch_settings import (
    CONFIG,
    SETTINGS_FILES,
    hugging_face_settings,
    timm_settings,
)

# By which Keras and a .keras file know the class.
REGISTERED_NAME = "keras_vit>VisionTransformer"
# ViTConfig fields that must be the same in a file and the model it fills.
ARCHITECTURE = (
    "resnet_layers",
    "patch_size",
    "hidden_dim",
    "mlp_dim",
    "num_heads",
    "num_layers",
)
# ViTConfig fields that arrays alone decide, with those above.
PARTS = ("classes", "pooling", "class_token", "representation_dim")
# ViTConfig fields that no array shows, and every number depends on.
NUMBERS = ("activation", "layer_norm_epsilon", "image_mean", "image_std")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint file.

    Attributes:
        path: where it lies.
        arrays: its arrays by name, not yet read.
        fields: the ViTConfig fields that it, or what lies beside it, decides: `PARTS` and most of
            `ARCHITECTURE` at least, all of them where a whole config was kept.
        rows: makes the rename table for a config.
        grid: (height, width) of its position embeddings in patches, None where the file is silent.
        channels: of its images, None where the file is silent.
        assumed: what its layout usually means by those of `NUMBERS` that it does not say.
        unknown: why it is not known what the file's network computes, None where it is.
        hint: how the file would say what is assumed.
    """

    path: Path
    arrays: dict[str, StoredArray]
    fields: Mapping[str, Any]
    rows: Callable[[ViTConfig], list[Row]]
    grid: tuple[int, int] | None = None
    channels: int | None = None
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unknown: str | None = None
    hint: str = 'save models with model.save("name.keras"), which says them'


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a checkpoint file without reading its values.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of a layout that is not known.
    """
    path = Path(path)
    check_file(path)
    openers = [opener for suffix, opener in _OPENERS.items() if path.name.endswith(suffix)]
    if not openers:
        raise ValueError(
            f"A checkpoint's name ends in {', '.join(_OPENERS)}. Received: {str(path)!r}."
        )
    beside = (companion_path(path), *(path.parent / name for name in SETTINGS_FILES))
    try:
        return openers[0](path)
    except ValueError as error:
        if any(str(file) in str(error) for file in (path, *beside)):
            raise
        raise ValueError(f"{path}: {error}") from error


def _open_npz(path: Path) -> Checkpoint:
    """Takes what the layout has no room for from the companion that `save_npz` writes beside."""
    arrays = published_names(read_npz(path))
    fields = published_fields(arrays)
    grid = _square(arrays.get("Transformer/posembed_input/pos_embedding"), fields)
    config = read_companion(path)
    if config is not None:
        kept = _whole(config)
        for name in (*ARCHITECTURE, "class_token"):
            if kept[name] != fields[name]:
                raise ValueError(
                    f"{companion_path(path)} says {name}={kept[name]!r} and the arrays of "
                    f"{path.name} say {fields[name]!r}; one of the two is of another model."
                )
        fields, grid = kept, config.grid
    return Checkpoint(
        path=path,
        arrays=arrays,
        fields=fields,
        rows=original_rows,
        grid=grid,
        channels=published_channels(arrays),
    )


def _open_safetensors(path: Path) -> Checkpoint:
    """Takes what no array shows from the JSON files beside, and from the architecture's name."""
    stored = read_safetensors(path)
    check_features(stored)
    names, arrays = names_of(stored)
    fields = torch_fields(names, arrays)
    reads = hugging_face_settings if names is HUGGING_FACE else timm_settings
    settings = reads(path.parent)
    heads = settings.said.get("num_heads", 1)
    if fields["hidden_dim"] % heads:
        raise ValueError(
            f"{path.parent / CONFIG} says {heads} heads, which do not divide the width of "
            f"{path.name}, {fields['hidden_dim']}; one of the two is of another model."
        )
    fields["pooling"] = _torch_pooling(fields, settings.said.get("pooling", fields["pooling"]))
    fields |= {name: value for name, value in settings.said.items() if name != "pooling"}
    return Checkpoint(
        path=path,
        arrays=arrays,
        fields=fields,
        rows=functools.partial(torch_rows, names),
        grid=_torch_grid(arrays.get(names.positions), fields, settings.sizes),
        channels=torch_channels(names, arrays),
        assumed=settings.assumed,
        unknown=settings.unknown,
        hint=settings.hint,
    )


def _torch_pooling(fields: Mapping[str, Any], said: Any) -> Any:
    """Holds the pooling that the settings say against the arrays."""
    has_map, has_token = fields["pooling"] == "map", fields["class_token"]
    if has_map and has_token:
        raise ValueError(
            "The file needs attention pooling that leaves the class token out, which keras_vit "
            "does not have."
        )
    if fields["representation_dim"] is not None and not has_token:
        raise ValueError(
            "The file needs a pooler on the first patch, without class token, which keras_vit does "
            "not have."
        )
    if (said == "map") != has_map or (said == "token" and not has_token):
        raise ValueError(
            f"The file's settings say pooling={said!r}, and its arrays have "
            f"{'' if has_map else 'no '}attention pooling and {'a' if has_token else 'no'} class "
            "token."
        )
    return said


def _torch_grid(
    table: StoredArray | None, fields: Mapping[str, Any], sizes: Iterable[tuple[int, int]]
) -> tuple[int, int] | None:
    """Returns the first grid among the sizes that has as many positions as there are, or a square.

    Raises:
        ValueError: there are positions of the patches alone, beside a class token.
    """
    if table is None or len(table.shape) != 3:
        return None
    count, patch = table.shape[1], fields["patch_size"]
    grids = [(height // patch, width // patch) for height, width in sizes]
    counts = {rows * columns: (rows, columns) for rows, columns in reversed(grids)}
    found = counts.get(count - fields["class_token"]) or square_grid(count - fields["class_token"])
    if found is None and fields["class_token"] and count in counts:
        raise ValueError(
            "The file needs a class token without a position of its own (as in DeiT III and "
            "FlexiViT), which keras_vit does not read yet."
        )
    return found


def _open_h5(path: Path) -> Checkpoint:
    arrays = _without_optimizer(read_h5(path))
    fields = keras_fields(arrays)
    grid = _square(arrays.get(position_name(fields)), fields)
    return Checkpoint(path=path, arrays=arrays, fields=fields, rows=keras_rows, grid=grid)


def _open_keras(path: Path) -> Checkpoint:
    settings, content = _keras_members(path)
    if settings.get("registered_name") != REGISTERED_NAME:
        raise ValueError(
            f"{path} holds a {shown(settings.get('class_name'))}, not a VisionTransformer; load it "
            "with keras.saving.load_model."
        )
    inner = settings.get("config")
    config = ViTConfig.from_dict(inner.get("config", {}) if isinstance(inner, dict) else {})
    check_published(config)
    return Checkpoint(
        path=path,
        arrays=_without_optimizer(read_h5(path, content)),
        fields=_whole(config),
        rows=keras_rows,
        grid=config.grid,
        channels=config.input_shape[2],
    )


def _keras_members(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns the settings and the HDF5 content of a .keras file."""
    with open_archive(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        text, weights = infos.get("config.json"), infos.get("model.weights.h5")
        if text is None or weights is None:
            raise ValueError(
                f"{path} is not a whole .keras file: config.json or model.weights.h5 is missing."
            )
        if text.file_size > MAX_TEXT:
            raise ValueError(
                f"{path}: its config.json has {text.file_size} bytes; at most {MAX_TEXT} are read."
            )
        settings = parse_json(archive.read(text), name=f"{path}: its config.json")
        return settings, archive.read(weights)


def _without_optimizer(arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
    """Leaves aside what Keras writes beside the layers of a compiled model."""
    return {name: array for name, array in arrays.items() if not name.startswith("optimizer/")}


def _whole(config: ViTConfig) -> dict[str, Any]:
    try:
        keras.activations.get(config.classifier_activation)
    except ValueError:
        raise ValueError(
            f"Keras has no activation {shown(config.classifier_activation)}, which "
            "classifier_activation names."
        ) from None
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


_OPENERS: dict[str, Callable[[Path], Checkpoint]] = {
    ".npz": _open_npz,
    ".safetensors": _open_safetensors,
    ".weights.h5": _open_h5,
    ".keras": _open_keras,
}
SUFFIXES = tuple(_OPENERS)


def _square(table: StoredArray | None, fields: Mapping[str, Any]) -> tuple[int, int] | None:
    if table is None or len(table.shape) != 3:
        return None
    return square_grid(table.shape[1] - fields["class_token"])
