"""Opens a checkpoint file of any known layout, without reading its values."""

import dataclasses
import functools
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.arrays import StoredArray, read_h5, read_npz, read_safetensors
from keras_vit.weights.facts import published_fields
from keras_vit.weights.keras_layout import keras_fields, keras_rows, position_name
from keras_vit.weights.layouts import Row, check_published, original_rows, published_names
from keras_vit.weights.positions import square_grid
from keras_vit.weights.torch_layouts import names_of, torch_fields, torch_rows

# ViTConfig fields that must be the same in a file and the model it fills.
ARCHITECTURE = (
    "resnet_layers",
    "patch_size",
    "hidden_dim",
    "mlp_dim",
    "num_heads",
    "num_layers",
)
# ViTConfig fields that a file decides for the model that is built for it.
DECIDED = (
    "classes",
    "pooling",
    "class_token",
    "representation_dim",
    "activation",
    "layer_norm_epsilon",
    "antialias",
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint file.

    Attributes:
        path: where it lies.
        arrays: its arrays by name, not yet read.
        fields: the ViTConfig fields that its content decides.
        rows: makes the rename table for a config.
        grid: (height, width) of its position embeddings in patches, None where the file is silent.
    """

    path: Path
    arrays: dict[str, StoredArray]
    fields: dict[str, Any]
    rows: Callable[[ViTConfig], list[Row]]
    grid: tuple[int, int] | None = None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a checkpoint file without reading its values.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of a layout that is not known.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint file {str(path)!r}.")
    openers = [opener for suffix, opener in _OPENERS.items() if path.name.endswith(suffix)]
    if not openers:
        raise ValueError(
            f"A checkpoint's name ends in {', '.join(_OPENERS)}. Received: {str(path)!r}."
        )
    try:
        return openers[0](path)
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def _open_npz(path: Path) -> Checkpoint:
    arrays = published_names(read_npz(path))
    fields = published_fields(arrays)
    grid = _square(arrays.get("Transformer/posembed_input/pos_embedding"), fields)
    return Checkpoint(path, arrays, fields, original_rows, grid)


def _open_safetensors(path: Path) -> Checkpoint:
    """Takes activation, epsilon, heads and grid from the config.json beside the file."""
    names, arrays = names_of(read_safetensors(path))
    beside = path.parent / "config.json"
    settings = json.loads(beside.read_text()) if beside.is_file() else {}
    fields = torch_fields(names, arrays, settings)
    size = settings.get("image_size")
    size = (size, size) if isinstance(size, int) else size
    grid = _square(arrays.get(names.positions), fields)
    if size is not None:
        grid = (size[0] // fields["patch_size"], size[1] // fields["patch_size"])
    return Checkpoint(path, arrays, fields, functools.partial(torch_rows, names), grid)


def _open_h5(path: Path) -> Checkpoint:
    arrays = read_h5(path)
    fields = keras_fields(arrays)
    grid = _square(arrays.get(position_name(fields)), fields)
    return Checkpoint(path, arrays, fields, keras_rows, grid)


def _open_keras(path: Path) -> Checkpoint:
    try:
        with zipfile.ZipFile(path) as archive:
            settings = json.loads(archive.read("config.json"))
            content = io.BytesIO(archive.read("model.weights.h5"))
    except (zipfile.BadZipFile, KeyError, json.JSONDecodeError, OSError) as error:
        raise ValueError(f"{path} is not a whole .keras file ({error}).") from error
    if settings.get("registered_name") != "keras_vit>VisionTransformer":
        raise ValueError(
            f"{path} holds a {settings.get('class_name')}, not a VisionTransformer; load it with "
            "keras.saving.load_model."
        )
    config = ViTConfig.from_dict(settings["config"]["config"])
    check_published(config)
    fields = {name: getattr(config, name) for name in (*ARCHITECTURE, *DECIDED)}
    return Checkpoint(path, read_h5(path, content), fields, keras_rows, config.grid)


_OPENERS: dict[str, Callable[[Path], Checkpoint]] = {
    ".npz": _open_npz,
    ".safetensors": _open_safetensors,
    ".weights.h5": _open_h5,
    ".keras": _open_keras,
}
SUFFIXES = tuple(_OPENERS)


def _square(table: StoredArray | None, fields: dict[str, Any]) -> tuple[int, int] | None:
    if table is None or len(table.shape) != 3:
        return None
    return square_grid(table.shape[1] - fields["class_token"])
