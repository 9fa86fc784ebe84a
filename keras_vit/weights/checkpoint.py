"""Opens a checkpoint file of any known layout, without reading its values."""

import dataclasses
import functools
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import ml_dtypes
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.limits import shown
from keras_vit.preprocessing import LABELLED, class_labels
from keras_vit.weights.arrays import (
    MAX_ARRAYS,
    MAX_TEXT,
    Region,
    StoredArray,
    check_file,
    open_archive,
    parse_json,
    read_npz,
    read_safetensors,
    read_shards,
)
from keras_vit.weights.download import SHARD_INDEX
from keras_vit.weights.layouts import (
    Row,
    check_published,
    listed,
    numbered,
    original_rows,
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
    CONFIG,
    SETTINGS_FILES,
    hugging_face_settings,
    timm_settings,
    with_settings,
)

Arrays = Mapping[str, StoredArray]
_LAYERS = {
    "stem": "res_net_stem",
    "encoder_norm": "layer_normalization",
    "pooling": "attention_pooling",
    "representation": "token_dense",
    "head": "dense",
}
_PLACES = {"kernel": 0, "bias": 1, "gamma": 0, "beta": 1, "class_token": 0, "probe": 0}

# What h5py makes of the many errors of the HDF5 library.
_NO_HDF5 = (
    *(OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError, OverflowError),
    SystemError,  # an error of the library while another is handled
)


def read_h5(path: Path, content: bytes | None = None) -> dict[str, StoredArray]:
    """Lists the arrays of a Keras .weights.h5 file without reading their values.

    HDF5 can point into other files, repeat values that were never written and unpack them through
    programs of others; Keras uses none of it. So only arrays are taken that lie in one piece within
    the file, and their values are read without the HDF5 library.

    Args:
        path: the file, named in errors.
        content: the HDF5 content, where it is only a part of that file.

    Raises:
        ValueError: the file is not a whole HDF5 file, or not as Keras writes it.
    """
    try:
        with h5py.File(path if content is None else io.BytesIO(content), "r") as file:
            nodes = _h5_nodes(file)
            has_more = file.userblock_size > 0
    except _NO_HDF5 as error:
        raise ValueError(
            f"{path} is not a whole HDF5 file; delete it and fetch it again."
        ) from error
    if has_more or len(nodes) > MAX_ARRAYS:
        raise ValueError(f"{path} holds more than the arrays of a model; Keras wrote no such file.")
    size = path.stat().st_size if content is None else len(content)
    regions, end, places = [], 0, set()
    for node in sorted(nodes, key=lambda node: node.offset or 0):
        problem = node.problem(size)
        if problem is None and (node.place in places or (node.size and node.offset < end)):
            problem = "shares its place with another"
        if problem is not None:
            raise ValueError(
                f"{path}: {shown(node.name)} {problem}; keras_vit reads what Keras writes, arrays "
                "of numbers that lie in one piece within the file."
            )
        places.add(node.place)
        end = node.offset + node.size if node.size else end
        if node.dtype is not None:
            start = node.offset or 0
            regions.append(Region(path, node.name, node.shape, node.dtype, start, content))
    return {region.name: region.array() for region in regions}


def keras_rows(config: ViTConfig) -> list[Row]:
    """Returns Keras' table for a model of this config."""
    shapes = {row.path: row.shape for row in original_rows(config)}
    units = [path.split("/")[1] for path in shapes if path.startswith("stem/stage")]
    order = {unit: index for index, unit in enumerate(dict.fromkeys(units))}
    return [
        Row(path, shape, (_name(config, path, order),), (shape,)) for path, shape in shapes.items()
    ]


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


def position_name(fields: Mapping[str, Any]) -> str:
    """Returns the name of the position embeddings, which stand after the class token."""
    return f"layers/patch_encoder/vars/{int(fields['class_token'])}"


@dataclasses.dataclass(frozen=True)
class _Node:
    """One name in an HDF5 file, and the array or link behind it."""

    name: str
    place: int | None  # of the object, which has one name
    shape: tuple[int, ...] = ()
    dtype: np.dtype | None = None  # None for a group
    offset: int = 0
    size: int = 0  # bytes
    odd: str | None = None  # what Keras does not do

    def problem(self, size: int) -> str | None:
        """Returns what keeps it from being read out of a file of that size."""
        if self.odd is not None or self.dtype is None:
            return self.odd
        if self.size != math.prod(self.shape) * self.dtype.itemsize:
            return f"declares shape {shown(self.shape)} and holds {self.size} bytes"
        return "ends behind the file's end" if self.offset + self.size > size else None


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

# ViTConfig fields beyond the published network; a layout without room for them says nothing.
BEYOND = (
    *("representation_activation", "position_embedding", "num_registers", "distillation_token"),
    *("layer_scale", "embedding_norm", "norm_after_pooling", "pooling_heads"),
    *("rotary_period", "rotary_grid", "rotary_offset"),
)

# ViTConfig fields that no array shows, and every number depends on; the first are assumed where
# nobody says them.
NUMBERS = ("activation", "layer_norm_epsilon", "image_mean", "image_std")
PLACES = ("rotary_period", "rotary_grid", "rotary_offset")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint file.

    Attributes:
        path: where it lies.
        arrays: its arrays by name, not yet read.
        fields: the ViTConfig fields that it, or what lies beside it, decides: `PARTS` and most of
            `ARCHITECTURE` at least, all of them where a whole config was kept.
        rows: makes the rename table for a config.
        check: raises a ValueError for a config that the layout has no room for.
        grid: (height, width) of its position embeddings in patches, None where the file is silent.
        channels: of its images, None where the file is silent.
        assumed: what its layout usually means by those of `NUMBERS` that it does not say.
        unknown: why it is not known what the file's network computes, None where it is.
        hint: how the file would say what is assumed.
        labels: (identifier, name) of each class, as the files beside it say; () where none does.
        naming: what messages say of the arrays' names, where these are not the file's own.
        remark: what a user should know of its numbers, "" for nothing.
    """

    path: Path
    arrays: dict[str, StoredArray]
    fields: Mapping[str, Any]
    rows: Callable[[ViTConfig], list[Row]]
    check: Callable[[ViTConfig], None] = check_published
    grid: tuple[int, int] | None = None
    channels: int | None = None
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unknown: str | None = None
    hint: str = 'save models with model.save("name.keras"), which says them'
    labels: tuple[tuple[str, str], ...] = ()
    naming: str = ""
    remark: str = ""

    @property
    def class_names(self) -> tuple[tuple[str, str], ...] | None:
        """`labels` where they are as many as the classes; without any, those of ImageNet.

        transformers' files name ImageNet's classes without their identifiers: these are added.
        """
        classes = self.fields["classes"]
        known = class_labels(classes) if classes in LABELLED else None
        if known is None or not self.labels or len(self.labels) != classes:
            names = self.labels or known
            return names if names is not None and len(names) == classes else None
        words = [label.split(", ")[0].replace(" ", "_") for _, label in self.labels]
        same = sum(word == other for word, (_, other) in zip(words, known, strict=True))
        if same < 0.9 * classes or any(identifier != label for identifier, label in self.labels):
            return self.labels
        return tuple((known[place][0], label) for place, (_, label) in enumerate(self.labels))


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
    try:
        return openers[0](path)
    except ValueError as error:
        beside = (path.parent / name for name in SETTINGS_FILES)
        if any(str(file) in str(error) for file in (path, *beside)):
            raise
        raise ValueError(f"{path}: {error}") from error


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
    """Takes what no array shows from the JSON files beside, and from the architecture's name."""
    is_index = path.name.endswith(SHARD_INDEX)
    family, arrays = renamed_arrays(read_shards(path) if is_index else read_safetensors(path))
    reads = hugging_face_settings if family.library == "transformers" else timm_settings
    settings = reads(path.parent)
    arrays = as_projection(arrays) if settings.projects else arrays
    arrays, grid = on_one_grid(arrays, settings.sizes)
    fields = torch_fields(arrays)
    heads = settings.fields.get("num_heads", 1)
    if fields["hidden_dim"] % heads:
        raise ValueError(
            f"{path.parent / CONFIG} says {heads} heads, which do not divide the width of "
            f"{path.name}, {fields['hidden_dim']}; one of the two is of another model."
        )
    is_renamed = family.library != "timm"
    return Checkpoint(
        path=path,
        arrays=arrays,
        fields=with_settings(fields, settings),
        rows=functools.partial(torch_rows, rotary_layout=settings.rotary_layout),
        check=functools.partial(check_torch, rotary_layout=settings.rotary_layout),
        grid=grid,
        channels=torch_channels(arrays),
        assumed=settings.assumed,
        unknown=settings.unknown,
        hint=settings.hint,
        labels=settings.labels,
        remark=settings.remark,
        naming=", by timm's names," if is_renamed else "",
    )


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
        fields=_all_fields(config),
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


def _name(config: ViTConfig, path: str, units: Mapping[str, int]) -> str:
    layer, *inside, leaf = path.split("/")
    if leaf == "position_embedding":
        return position_name({"class_token": config.class_token})
    if layer.startswith("block_"):
        layer = _name_of("transformer_block", int(layer.removeprefix("block_")))
    if inside and inside[0] in units:
        inside = ["units", _name_of("bottleneck_unit", units[inside[0]]), *inside[1:]]
    return "/".join(("layers", _LAYERS.get(layer, layer), *inside, "vars", str(_PLACES[leaf])))


def _name_of(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name


def _h5_nodes(file: h5py.File) -> list[_Node]:
    """Returns every name in the file; no link is followed, and nothing read."""
    nodes: list[_Node] = []
    pending = [("", file.id)]
    places: set[int] = set()

    def visit(name: bytes, info: Any) -> None:
        if len(nodes) > MAX_ARRAYS:
            raise ValueError("too many names")
        path = prefix + name.decode(errors="backslashreplace")
        if info.type != h5py.h5l.TYPE_HARD:
            nodes.append(_Node(path, None, odd="is a link to somewhere else"))
            return
        item = h5py.h5o.open(group, name)
        if isinstance(item, h5py.h5g.GroupID) and info.u not in places:
            pending.append((f"{path}/", item))
        places.add(info.u)
        nodes.append(_h5_node(path, info.u, item))

    while pending:
        prefix, group = pending.pop()
        group.links.iterate(visit, info=True)
    return nodes


def _h5_node(name: str, place: int, item: Any) -> _Node:
    if isinstance(item, h5py.h5g.GroupID):
        return _Node(name, place)
    if not isinstance(item, h5py.h5d.DatasetID):
        return _Node(name, place, odd="is neither group nor array")
    plan = item.get_create_plist()
    in_one_piece = plan.get_layout() == h5py.h5d.CONTIGUOUS
    if not in_one_piece or plan.get_external_count() or plan.get_nfilters():
        return _Node(name, place, odd="is packed, put together or kept in another file")
    dtype = _h5_dtype(item.get_type())
    if dtype is None or item.shape is None:
        return _Node(name, place, odd="holds other than numbers")
    offset, size = item.get_offset(), item.get_storage_size()
    if offset is None and math.prod(item.shape):
        return _Node(name, place, odd="was never written")
    return _Node(name, place, tuple(item.shape), dtype, offset or 0, size if offset else 0)


def _h5_dtype(kind: Any) -> np.dtype | None:
    """Returns the dtype of numbers as Keras writes them, None for anything else."""
    if kind.get_class() == h5py.h5t.OPAQUE and kind.get_size() == 2:
        bfloat16: np.dtype = np.dtype(ml_dtypes.bfloat16)  # two raw bytes, marked by an attribute
        return bfloat16
    if kind.get_class() not in (h5py.h5t.FLOAT, h5py.h5t.INTEGER):
        return None
    dtype = np.dtype(str(kind.dtype.str))
    return dtype if h5py.h5t.py_create(dtype).equal(kind) else None


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


def _all_fields(config: ViTConfig) -> dict[str, Any]:
    try:
        keras.activations.get(config.classifier_activation)
    except ValueError:
        raise ValueError(
            f"Keras has no activation {shown(config.classifier_activation)}, which "
            "classifier_activation names."
        ) from None
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _square(table: StoredArray | None, fields: Mapping[str, Any]) -> tuple[int, int] | None:
    if table is None or len(table.shape) != 3:
        return None
    return square_grid(table.shape[1] - fields["class_token"])
