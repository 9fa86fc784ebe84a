"""Rename tables of the layouts that PyTorch libraries write: Hugging Face transformers and timm.

A PyTorch linear layer keeps its kernel as (out, in), a convolution as (out, in, height, width).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ViTConfig, shown
from keras_vit.weights.arrays import StoredArray
from keras_vit.weights.facts import listed, numbered
from keras_vit.weights.layouts import Row, renamed

Arrays = Mapping[str, StoredArray]


@dataclasses.dataclass(frozen=True)
class TorchNames:
    """How one library names the arrays of a Vision Transformer; `{}` stands for the block's index.

    Attributes:
        qkv: query, key and value of a block: three arrays, or one that holds all three.
        map_head: the MAP head's parts, {} where the library has none.
        left_aside: beginnings of names that inference does not use: decoders, mask tokens.
    """

    class_token: str
    positions: str
    projection: str
    attention_norm: str
    qkv: tuple[str, ...]
    out: str
    mlp_norm: str
    fc1: str
    fc2: str
    encoder_norm: str
    representation: str
    head: str
    map_head: Mapping[str, str]
    left_aside: tuple[str, ...] = ()


HUGGING_FACE = TorchNames(
    class_token="embeddings.cls_token",
    positions="embeddings.position_embeddings",
    projection="embeddings.patch_embeddings.projection",
    attention_norm="encoder.layer.{}.layernorm_before",
    qkv=tuple(
        f"encoder.layer.{{}}.attention.attention.{part}" for part in ("query", "key", "value")
    ),
    out="encoder.layer.{}.attention.output.dense",
    mlp_norm="encoder.layer.{}.layernorm_after",
    fc1="encoder.layer.{}.intermediate.dense",
    fc2="encoder.layer.{}.output.dense",
    encoder_norm="layernorm",
    representation="pooler.dense",
    head="classifier",
    map_head={},
    left_aside=("decoder.", "embeddings.mask_token"),
)

TIMM = TorchNames(
    class_token="cls_token",
    positions="pos_embed",
    projection="patch_embed.proj",
    attention_norm="blocks.{}.norm1",
    qkv=("blocks.{}.attn.qkv",),
    out="blocks.{}.attn.proj",
    mlp_norm="blocks.{}.norm2",
    fc1="blocks.{}.mlp.fc1",
    fc2="blocks.{}.mlp.fc2",
    encoder_norm="norm",
    representation="pre_logits.fc",
    head="head",
    map_head={
        "probe": "attn_pool.latent",
        "query": "attn_pool.q",
        "key_value": "attn_pool.kv",
        "out": "attn_pool.proj",
        "norm": "attn_pool.norm",
        "mlp/fc1": "attn_pool.mlp.fc1",
        "mlp/fc2": "attn_pool.mlp.fc2",
    },
)


def names_of(arrays: Arrays) -> tuple[TorchNames, dict[str, StoredArray]]:
    """Returns the library's names and the arrays of the encoder and its head, without prefix.

    Raises:
        ValueError: the arrays are neither library's.
    """
    for names in (HUGGING_FACE, TIMM):
        anchor = f"{names.projection}.weight"
        for name in arrays:
            if name.endswith(anchor):
                prefix = name[: -len(anchor)]
                found = renamed((key.removeprefix(prefix), array) for key, array in arrays.items())
                kept = {k: v for k, v in found.items() if not k.startswith(names.left_aside)}
                return names, kept
    raise ValueError(
        "The file does not hold a Vision Transformer of Hugging Face transformers or timm: its "
        f"arrays are {listed(arrays)}."
    )


def torch_fields(names: TorchNames, arrays: Arrays) -> dict[str, Any]:
    """Returns the ViTConfig fields that the arrays decide.

    Raises:
        ValueError: an array that decides one is missing or of another kind.
    """
    mlp_dim, hidden_dim = _shape(arrays, f"{names.fc1}.weight".format(0), rank=2)
    _, _, *patch = _shape(arrays, f"{names.projection}.weight", rank=4)
    if patch[0] != patch[1]:
        raise ValueError(f"The file has patches of {patch[0]}x{patch[1]} pixels, not square ones.")
    if not patch[0]:
        raise ValueError("The file has patches of no pixels.")
    blocks = re.escape(names.out).replace(r"\{\}", r"(\d+)")
    has_token, has_map = names.class_token in arrays, names.map_head.get("probe") in arrays
    return {
        "patch_size": patch[0],
        "hidden_dim": hidden_dim,
        "mlp_dim": mlp_dim,
        "num_layers": numbered(arrays, blocks),
        "classes": _width(arrays, f"{names.head}.bias"),
        "pooling": "map" if has_map else "token" if has_token else "avg",
        "class_token": has_token,
        "representation_dim": _width(arrays, f"{names.representation}.bias"),
        "resnet_layers": None,
        "antialias": True,  # Pillow's resize, in both libraries
    }


def torch_channels(names: TorchNames, arrays: Arrays) -> int:
    """Returns the channels of the images that the patches are cut from."""
    return _shape(arrays, f"{names.projection}.weight", rank=4)[1]


def _shape(arrays: Arrays, name: str, *, rank: int) -> tuple[int, ...]:
    if name not in arrays:
        raise ValueError(f"The file lacks the array {name!r}; its arrays are {listed(arrays)}.")
    shape = arrays[name].shape
    if len(shape) != rank:
        raise ValueError(
            f"The file's array {name!r} has shape {shown(shape)}, not one of {rank} sides."
        )
    return shape


def _width(arrays: Arrays, name: str) -> int | None:
    return _shape(arrays, name, rank=1)[0] if name in arrays else None


def torch_rows(names: TorchNames, config: ViTConfig) -> list[Row]:
    """Returns the library's table for a model of this config."""
    d, m, size = config.hidden_dim, config.mlp_dim, config.patch_size
    shape = (d, config.patch_channels, size, size)
    rows = []
    if config.class_token:
        rows.append(_plain("patch_encoder/class_token", names.class_token, (1, 1, d)))
    positions = (1, config.num_tokens, d)
    rows.append(_plain("patch_encoder/position_embedding", names.positions, positions))
    rows.append(_projection_row(names, shape))
    rows.append(_plain("patch_encoder/projection/bias", f"{names.projection}.bias", (d,)))
    for index in range(config.num_layers):
        path = f"block_{index}"
        rows += _norm_rows(f"{path}/attention_norm", names.attention_norm.format(index), d)
        qkv = [name.format(index) for name in names.qkv]
        rows += _dense_rows(f"{path}/attention/qkv", qkv, d, 3 * d // len(qkv))
        rows += _dense_rows(f"{path}/attention/out", [names.out.format(index)], d, d)
        rows += _norm_rows(f"{path}/mlp_norm", names.mlp_norm.format(index), d)
        rows += _dense_rows(f"{path}/mlp/fc1", [names.fc1.format(index)], d, m)
        rows += _dense_rows(f"{path}/mlp/fc2", [names.fc2.format(index)], m, d)
    rows += _norm_rows("encoder_norm", names.encoder_norm, d)
    if config.pooling == "map" and names.map_head:
        rows += _map_rows(names.map_head, d, m)
    if config.representation_dim is not None:
        rows += _dense_rows("representation", [names.representation], d, config.representation_dim)
        d = config.representation_dim
    if config.classes is not None:
        rows += _dense_rows("head", [names.head], d, config.classes)
    return rows


def _projection_row(names: TorchNames, shape: tuple[int, ...]) -> Row:
    def join(value: np.ndarray) -> np.ndarray:
        return value.transpose(2, 3, 1, 0).reshape(-1, shape[0])

    flat = (shape[2] * shape[3] * shape[1], shape[0])
    name = f"{names.projection}.weight"
    return Row("patch_encoder/projection/kernel", flat, (name,), (shape,), join)


def _plain(path: str, name: str, shape: tuple[int, ...]) -> Row:
    return Row(path, shape, (name,), (shape,))


def _norm_rows(path: str, name: str, width: int) -> list[Row]:
    return [
        _plain(f"{path}/gamma", f"{name}.weight", (width,)),
        _plain(f"{path}/beta", f"{name}.bias", (width,)),
    ]


def _dense_rows(path: str, names: Iterable[str], width: int, units: int) -> list[Row]:
    """A dense layer made of one linear layer, or of several side by side."""
    kernels, biases = zip(*((f"{name}.weight", f"{name}.bias") for name in names), strict=True)

    count, total = len(kernels), len(kernels) * units

    def transpose(*values: np.ndarray) -> np.ndarray:
        return np.concatenate(values).T

    def join(*values: np.ndarray) -> np.ndarray:
        return np.concatenate(values)

    return [
        Row(f"{path}/kernel", (width, total), kernels, ((units, width),) * count, transpose),
        Row(f"{path}/bias", (total,), biases, ((units,),) * count, join),
    ]


def _map_rows(names: Mapping[str, str], d: int, m: int) -> list[Row]:
    return [
        _plain("pooling/probe", names["probe"], (1, 1, d)),
        *_dense_rows("pooling/query", [names["query"]], d, d),
        *_dense_rows("pooling/key_value", [names["key_value"]], d, 2 * d),
        *_dense_rows("pooling/out", [names["out"]], d, d),
        *_norm_rows("pooling/norm", names["norm"], d),
        *_dense_rows("pooling/mlp/fc1", [names["mlp/fc1"]], d, m),
        *_dense_rows("pooling/mlp/fc2", [names["mlp/fc2"]], m, d),
    ]
