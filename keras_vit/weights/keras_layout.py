"""The files that Keras itself writes for a VisionTransformer: their arrays and rename table.

Keras names an array after the classes and attributes on the way to it, and its place in its layer.
"""

import dataclasses
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np

from keras_vit.config import ViTConfig, shown
from keras_vit.weights.arrays import MAX_ARRAYS, Region, StoredArray
from keras_vit.weights.facts import listed, numbered
from keras_vit.weights.layouts import Row, original_rows

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
        with h5py.File(path if content is None else io.BytesIO(content), "r") as opened:
            nodes = _h5_nodes(opened)
            has_more = opened.userblock_size > 0
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


def _name(config: ViTConfig, path: str, units: Mapping[str, int]) -> str:
    layer, *inside, leaf = path.split("/")
    if leaf == "position_embedding":
        return position_name({"class_token": config.class_token})
    if layer.startswith("block_"):
        layer = _numbered("transformer_block", int(layer.removeprefix("block_")))
    if inside and inside[0] in units:
        inside = ["units", _numbered("bottleneck_unit", units[inside[0]]), *inside[1:]]
    return "/".join(("layers", _LAYERS.get(layer, layer), *inside, "vars", str(_PLACES[leaf])))


def _numbered(name: str, index: int) -> str:
    return f"{name}_{index}" if index else name


@dataclasses.dataclass(frozen=True)
class _Node:
    """What an HDF5 file says of one name in it."""

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


def _h5_nodes(opened: h5py.File) -> list[_Node]:
    """Returns every name in the file; no link is followed, and nothing read."""
    nodes: list[_Node] = []
    pending = [("", opened.id)]
    places: set[int] = set()

    def visit(name: bytes, info: Any) -> None:
        if len(nodes) > MAX_ARRAYS:
            raise ValueError("too many names")
        path = prefix + name.decode(errors="backslashreplace")
        if info.type != h5py.h5l.TYPE_HARD:
            nodes.append(_Node(path, None, odd="is a link to somewhere else"))
            return
        found = h5py.h5o.open(group, name)
        if isinstance(found, h5py.h5g.GroupID) and info.u not in places:
            pending.append((f"{path}/", found))
        places.add(info.u)
        nodes.append(_h5_node(path, info.u, found))

    while pending:
        prefix, group = pending.pop()
        group.links.iterate(visit, info=True)
    return nodes


def _h5_node(name: str, place: int, found: Any) -> _Node:
    if isinstance(found, h5py.h5g.GroupID):
        return _Node(name, place)
    if not isinstance(found, h5py.h5d.DatasetID):
        return _Node(name, place, odd="is neither group nor array")
    plan = found.get_create_plist()
    in_one_piece = plan.get_layout() == h5py.h5d.CONTIGUOUS
    if not in_one_piece or plan.get_external_count() or plan.get_nfilters():
        return _Node(name, place, odd="is packed, put together or kept in another file")
    dtype = _h5_dtype(found.get_type())
    if dtype is None or found.shape is None:
        return _Node(name, place, odd="holds other than numbers")
    offset, size = found.get_offset(), found.get_storage_size()
    if offset is None and math.prod(found.shape):
        return _Node(name, place, odd="was never written")
    return _Node(name, place, tuple(found.shape), dtype, offset or 0, size if offset else 0)


def _h5_dtype(kind: Any) -> np.dtype | None:
    """Returns the dtype of numbers as Keras writes them, None for anything else."""
    if kind.get_class() == h5py.h5t.OPAQUE and kind.get_size() == 2:
        marked: np.dtype = np.dtype(ml_dtypes.bfloat16)  # two raw bytes, marked by an attribute
        return marked
    if kind.get_class() not in (h5py.h5t.FLOAT, h5py.h5t.INTEGER):
        return None
    dtype = np.dtype(str(kind.dtype.str))
    return dtype if h5py.h5t.py_create(dtype).equal(kind) else None
