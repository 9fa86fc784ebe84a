"""Opens a checkpoint file of any known layout, without reading its values."""

import dataclasses
import functools
import io
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import ml_dtypes
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.limits import MAX_TEXT, FileError, check_file, naming, parse_json, shown
from keras_vit.preprocessing import LABELLED, class_labels
from keras_vit.weights.arrays import (
    MAX_ARRAYS,
    StoredArray,
    open_archive,
    parsing,
    read_npz,
    read_safetensors,
    read_shards,
    stored_array,
)
from keras_vit.weights.download import SHARD_INDEX
from keras_vit.weights.layouts import (
    Arrays,
    Row,
    check_published,
    listed,
    numbered,
    original_rows,
    plain_row,
    published_channels,
    published_fields,
    published_names,
)
from keras_vit.weights.positions import square_grid
from keras_vit.weights.torch_layouts import (
    as_projection,
    check_torch,
    on_one_grid,
    torch_channels,
    torch_fields,
    torch_rows,
)
from keras_vit.weights.torch_names import renamed_arrays
from keras_vit.weights.torch_settings import (
    Settings,
    check_sizes,
    hugging_face_settings,
    timm_settings,
    with_settings,
)

# By which Keras and a .keras file know the class.
REGISTERED_NAME = "keras_vit>VisionTransformer"

# Keras' names of the layers, and the places of their variables.
_LAYERS = {
    "stem": "res_net_stem",
    "encoder_norm": "layer_normalization",
    "pooling": "attention_pooling",
    "representation": "token_dense",
    "head": "dense",
}
_PLACES = {"kernel": 0, "bias": 1, "gamma": 0, "beta": 1, "class_token": 0, "probe": 0}
_UNSAID = Settings(hint='save models with model.save("name.keras"), which says them')
_MAX_DEPTH = 20  # of groups in an HDF5 file; its library descends by recursion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint file.

    Attributes:
        path: where it lies.
        arrays: its arrays by name, not yet read.
        fields: the ViTConfig fields that it, or what lies beside it, decides: those of the role
            "shape" and most of "architecture" at least, all where a whole config was kept.
        rows: makes the rename table for a config.
        check: raises a ValueError for a config that the layout has no room for.
        grid: (height, width) of its position embeddings in patches, None where the file is silent.
        channels: of its images, None where the file is silent.
        settings: what lies beside it.
    """

    path: Path
    arrays: dict[str, StoredArray]
    fields: Mapping[str, Any]
    rows: Callable[[ViTConfig], list[Row]]
    check: Callable[[ViTConfig], None] = check_published
    grid: tuple[int, int] | None = None
    channels: int | None = None
    settings: Settings = _UNSAID

    @property
    def class_names(self) -> tuple[tuple[str, str], ...] | None:
        """The settings' labels where they are as many as the classes; without any, ImageNet's.

        transformers' files name ImageNet's classes without their identifiers: these are added.
        """
        classes, labels = self.fields["classes"], self.settings.labels
        known = class_labels(classes) if classes in LABELLED else None
        if known is None or not labels or len(labels) != classes:
            names = labels or known
            return names if names is not None and len(names) == classes else None
        words = [label.split(", ")[0].replace(" ", "_") for _, label in labels]
        same = sum(word == other for word, (_, other) in zip(words, known, strict=True))
        if same < 0.9 * classes or any(identifier != label for identifier, label in labels):
            return labels
        return tuple((known[place][0], label) for place, (_, label) in enumerate(labels))


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
    with naming(path):
        return openers[0](path)


def _open_npz(path: Path) -> Checkpoint:
    arrays = published_names(read_npz(path))
    fields = published_fields(arrays)
    return Checkpoint(
        path=path,
        arrays=arrays,
        fields=fields,
        rows=original_rows,
        grid=_square(arrays.get("Transformer/posembed_input/pos_embedding"), fields),
        channels=published_channels(arrays),
    )


def _open_safetensors(path: Path) -> Checkpoint:
    is_index = path.name.endswith(SHARD_INDEX)
    family, arrays = renamed_arrays(read_shards(path) if is_index else read_safetensors(path))
    reads = hugging_face_settings if family.library == "transformers" else timm_settings
    settings = reads(path.parent)
    arrays = as_projection(arrays) if settings.projects else arrays
    arrays, grid = on_one_grid(arrays, settings.sizes)
    fields, channels = torch_fields(arrays), torch_channels(arrays)
    check_sizes(settings, {**fields, "channels": channels}, grid)
    return Checkpoint(
        path=path,
        arrays=arrays,
        fields=with_settings(fields, settings),
        rows=functools.partial(torch_rows, rotary_layout=settings.rotary_layout),
        check=functools.partial(check_torch, rotary_layout=settings.rotary_layout),
        grid=grid,
        channels=channels,
        settings=settings,
    )


def _open_h5(path: Path) -> Checkpoint:
    arrays = read_h5(path)
    fields = keras_fields(arrays)
    grid = _square(arrays.get(_position_name(fields["class_token"])), fields)
    return Checkpoint(path=path, arrays=arrays, fields=fields, rows=keras_rows, grid=grid)


def _open_keras(path: Path) -> Checkpoint:
    settings = keras_settings(path)
    if settings.get("registered_name") != REGISTERED_NAME:
        raise FileError(
            f"{path} holds a {shown(settings.get('class_name'))}, not a VisionTransformer; load it "
            "with keras.saving.load_model.",
            path,
        )
    inner = settings.get("config")
    config = ViTConfig.from_dict(inner.get("config", {}) if isinstance(inner, dict) else {})
    check_published(config)
    try:
        keras.activations.get(config.classifier_activation)
    except ValueError:
        raise ValueError(
            f"Keras has no activation {shown(config.classifier_activation)}, which "
            "classifier_activation names."
        ) from None
    return Checkpoint(
        path=path,
        arrays=read_h5(path, _keras_member(path, "model.weights.h5")),
        fields={field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        rows=keras_rows,
        grid=config.grid,
        channels=config.input_shape[2],
    )


_OPENERS: dict[str, Callable[[Path], Checkpoint]] = {
    ".npz": _open_npz,
    ".safetensors": _open_safetensors,
    SHARD_INDEX: _open_safetensors,
    ".weights.h5": _open_h5,
    ".keras": _open_keras,
}
SUFFIXES = tuple(_OPENERS)


def keras_settings(path: Path, *, limit: int = MAX_TEXT) -> dict[str, Any]:
    """Returns the settings of the model in a .keras file, which may have `limit` bytes.

    Raises:
        FileError: the file is not a whole .keras file, or declares too much.
    """
    text = _keras_member(path, "config.json", limit + 1)
    return parse_json(text, path, inside=": its config.json", limit=limit)


def _keras_member(path: Path, name: str, size: int = -1) -> bytes:
    whole = f"{path} is not a whole .keras file: its {name} cannot be read"
    with parsing(path, whole), open_archive(path) as archive, archive.open(name) as member:
        return member.read(size)


def read_h5(path: Path, content: bytes | None = None) -> dict[str, StoredArray]:
    """Lists the arrays of a Keras .weights.h5 file without reading their values.

    HDF5 can point into other files, repeat values that were never written and unpack them through
    programs of others; Keras uses none of it. So only arrays are taken that lie in one piece within
    the file, and their values are read without the HDF5 library. What Keras writes of the optimizer
    beside the layers of a compiled model is left aside.

    Args:
        path: the file, named in errors.
        content: the HDF5 content, where it is only a part of that file.

    Raises:
        FileError: the file is not a whole HDF5 file, or not as Keras writes it.
    """
    size = path.stat().st_size if content is None else len(content)
    arrays: dict[str, StoredArray] = {}
    addresses: set[int | None] = set()
    ranges: list[tuple[int, int, str]] = []

    def visit(name: str, link: object) -> str | None:  # h5py takes no exception from here
        node: Any = file[name].id if isinstance(link, h5py.HardLink) else None
        dtype = _h5_dtype(node)
        address = None if node is None else h5py.h5o.get_info(node).addr
        is_odd = (dtype is None and not isinstance(node, h5py.h5g.GroupID)) or address in addresses
        addresses.add(address)
        if dtype is not None:
            start, stored_size = node.get_offset() or 0, node.get_storage_size()
            is_odd |= math.prod(node.shape) * dtype.itemsize != (stored_size if start else 0)
            arrays[name] = stored_array(path, name, node.shape, dtype, start=start, content=content)
            ranges.append((start, start + stored_size if start else 0, name))
        is_odd |= len(addresses) > MAX_ARRAYS or name.count("/") > _MAX_DEPTH
        return name if is_odd else None

    with (
        parsing(path, f"{path} is not a whole HDF5 file"),
        h5py.File(path if content is None else io.BytesIO(content), "r") as file,
    ):
        odd = "/" if file.userblock_size else file.visititems_links(visit)
    for (_, end, name), (start, _, _) in itertools.pairwise([*sorted(ranges), (size, size, "")]):
        odd = odd or (name if start < end else None)
    if odd is not None:
        raise FileError(
            f"{path}: {shown(odd)} is not what Keras writes, arrays of numbers that lie in one "
            "piece within the file, each by one name.",
            path,
        )
    return {name: array for name, array in arrays.items() if not name.startswith("optimizer/")}


def _h5_dtype(node: Any) -> np.dtype | None:
    if not isinstance(node, h5py.h5d.DatasetID) or node.shape is None:
        return None
    kind = node.get_type()
    if kind.get_class() == h5py.h5t.OPAQUE and kind.get_size() == 2:
        bfloat16: np.dtype = np.dtype(ml_dtypes.bfloat16)  # two raw bytes, marked by an attribute
        return bfloat16
    if kind.get_class() not in (h5py.h5t.FLOAT, h5py.h5t.INTEGER):
        return None
    dtype = np.dtype(str(kind.dtype.str))
    return dtype if h5py.h5t.py_create(dtype).equal(kind) else None


def keras_rows(config: ViTConfig) -> list[Row]:
    """Returns Keras' table for a model of this config."""
    shapes = {row.path: row.shape for row in original_rows(config)}
    units = [path.split("/")[1] for path in shapes if path.startswith("stem/stage")]
    order = {unit: index for index, unit in enumerate(dict.fromkeys(units))}
    return [plain_row(path, _name(config, path, order), shape) for path, shape in shapes.items()]


def _name(config: ViTConfig, path: str, units: Mapping[str, int]) -> str:
    layer, *inside, leaf = path.split("/")
    if leaf == "position_embedding":
        return _position_name(config.class_token)
    if layer.startswith("block_"):
        layer = _name_of("transformer_block", int(layer.removeprefix("block_")))
    if inside and inside[0] in units:
        inside = ["units", _name_of("bottleneck_unit", units[inside[0]]), *inside[1:]]
    return "/".join(("layers", _LAYERS.get(layer, layer), *inside, "vars", str(_PLACES[leaf])))


def _name_of(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name


def keras_fields(arrays: Arrays) -> dict[str, Any]:
    """Returns the ViTConfig fields that the arrays decide; heads and epsilon are not among them.

    Raises:
        ValueError: the arrays are not those of a VisionTransformer.
    """
    shapes = {name: array.shape for name, array in arrays.items()}
    try:
        hidden_dim, mlp_dim = shapes["layers/transformer_block/mlp/fc1/vars/0"]
        positions = shapes.get("layers/patch_encoder/vars/0", (1, 2))[1]
        classes, width = (
            shapes.get(f"layers/{name}/vars/1", (None,))[0] for name in ("dense", "token_dense")
        )
    except (KeyError, ValueError, IndexError):
        raise ValueError(
            f"The file holds no VisionTransformer's weights: its arrays are {listed(shapes)}."
        ) from None
    has_token = "layers/patch_encoder/vars/1" in shapes
    if not has_token and positions == 1:
        raise ValueError(
            "The file holds one learned token, and either no position embeddings or no class "
            "token: it does not say which. Fill a model of its config with model.load_weights."
        )
    has_map = "layers/attention_pooling/vars/0" in shapes
    return {
        "hidden_dim": hidden_dim,
        "mlp_dim": mlp_dim,
        "num_layers": 1 + numbered(shapes, r"layers/transformer_block_(\d+)/", first=1),
        "classes": classes,
        "pooling": "map" if has_map else "token" if has_token else "avg",
        "class_token": has_token,
        "representation_dim": width,
    }


def _position_name(has_token: bool) -> str:
    return f"layers/patch_encoder/vars/{int(has_token)}"  # after the class token


def _square(table: StoredArray | None, fields: Mapping[str, Any]) -> tuple[int, int] | None:
    if table is None or len(table.shape) != 3:
        return None
    return square_grid(table.shape[1] - fields["class_token"])
