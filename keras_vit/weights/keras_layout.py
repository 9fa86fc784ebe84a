"""The rename table of the files that Keras itself writes for a VisionTransformer.

Keras names an array after the classes and attributes on the way to it, and its place in its layer.
"""

import re
from collections.abc import Mapping
from typing import Any

from keras_vit.config import ViTConfig
from keras_vit.weights.arrays import StoredArray
from keras_vit.weights.facts import listed
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
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"The file holds no VisionTransformer's weights: its arrays are {listed(shapes)}."
        ) from error
    has_token = "layers/patch_encoder/vars/1" in shapes
    if not has_token and shapes.get("layers/patch_encoder/vars/0", (1, 2))[1] == 1:
        raise ValueError(
            "The file holds one learned token, and either no position embeddings or no class "
            "token: it does not say which. Fill a model of its config with model.load_weights."
        )
    has_map = "layers/attention_pooling/vars/0" in shapes
    blocks = [re.match(r"layers/transformer_block(?:_(\d+))?/", name) for name in shapes]
    return {
        "hidden_dim": hidden_dim,
        "mlp_dim": mlp_dim,
        "num_layers": 1 + max(int(found[1] or 0) for found in blocks if found),
        "classes": shapes.get("layers/dense/vars/1", (None,))[0],
        "pooling": "map" if has_map else "token" if has_token else "avg",
        "class_token": has_token,
        "representation_dim": shapes.get("layers/token_dense/vars/1", (None,))[0],
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
