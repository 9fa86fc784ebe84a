"""The layouts of timm and Hugging Face transformers: settings and variables of their arrays.

The arrays have the names of `torch_names`; what is said of them beside the file is read by
`torch_settings`.

Shapes: D hidden_dim; PyTorch's kernels are (outputs, inputs), ours (inputs, outputs).
"""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from keras_vit.config import EXTENSIONS, ViTConfig
from keras_vit.layers.positions import BIAS_PREFIX
from keras_vit.limits import shown
from keras_vit.weights.arrays import StoredArray
from keras_vit.weights.layouts import (
    Arrays,
    Row,
    check_held,
    listed,
    norm_rows,
    numbered,
    plain_row,
)
from keras_vit.weights.positions import square_grid
from keras_vit.weights.torch_names import RotaryLayout, blocks_with, concatenate, zeros

_TABLE = "attn.relative_position_bias_table"

# Fields of a network beyond the published one that these files hold.
_HELD = ("activation", "pooling", *EXTENSIONS)

# What `layer_scale` is in the config of a loaded model: only new blocks would begin with it, as
# those of most files did (timm's init_values).
_LAYER_SCALE = 1e-5

_norm_rows = functools.partial(norm_rows, scale=".weight")


def check_torch(config: ViTConfig, *, rotary_layout: RotaryLayout | None) -> None:
    """Raises a ValueError for a network that these layouts have no room for.

    Args:
        config: the network's.
        rotary_layout: which channels of a head the file's rotary positions turn together, None
            where it is not stated.
    """
    held = [name for name in _HELD if name != "position_embedding" or not config.adds_positions]
    check_held(config, held, "The layouts of timm and transformers hold other networks")
    if config.rotary_period is not None and rotary_layout is None:
        raise ValueError(
            "The file does not say which channels its rotary positions turn together, as the "
            "architecture's name in config.json would."
        )


def torch_fields(arrays: Arrays) -> dict[str, Any]:
    """Returns the ViTConfig fields that the arrays decide.

    Raises:
        ValueError: an array that decides one is missing or of another kind.
    """
    hidden, hidden_dim = _shape(arrays, "blocks.0.mlp.fc1.weight", rank=2)
    _, mlp_dim = _shape(arrays, "blocks.0.mlp.fc2.weight", rank=2)
    patch = _patch_size(arrays)
    is_gated = hidden == 2 * mlp_dim
    has_token, has_map = "cls_token" in arrays, "attn_pool.latent" in arrays
    has_table, has_bias = "pos_embed" in arrays, any(blocks_with(arrays, _TABLE))
    if has_table and has_bias:
        raise ValueError(
            "The file needs learned positions and a relative position bias together (pos_embed, "
            f"{_TABLE}), which keras_vit does not have."
        )
    projection, representation = (
        _width(arrays, f"{name}.bias") for name in ("projection", "pre_logits.fc")
    )
    head = arrays["head.weight"].shape if "head.weight" in arrays else ()
    is_double = has_token and head[1:] == (2 * hidden_dim,)
    natural = "token_avg" if is_double else "token" if has_token else "avg"
    registers = _shape(arrays, "reg_token", rank=3)[1] if "reg_token" in arrays else 0
    return {
        "patch_size": patch,
        "hidden_dim": hidden_dim,
        "mlp_dim": mlp_dim if is_gated else hidden,
        "num_layers": numbered(arrays, r"blocks\.(\d+)\.attn\.proj\."),
        "classes": _width(arrays, "head.bias"),
        "pooling": "map" if has_map else natural,
        "class_token": has_token,
        "representation_dim": representation or projection,
        "representation_activation": None if projection and not representation else "tanh",
        "resnet_layers": None,
        "antialias": True,  # Pillow's resize, in both libraries
        "position_embedding": "learned" if has_table else "relative" if has_bias else None,
        "num_registers": registers,
        "distillation_token": "dist_token" in arrays,
        "layer_scale": _LAYER_SCALE if any(blocks_with(arrays, "ls1.gamma")) else None,
        "embedding_norm": "norm_pre.weight" in arrays,
        "norm_after_pooling": "fc_norm.weight" in arrays,
        **({"activation": "swiglu"} if is_gated else {}),
    }


def torch_channels(arrays: Arrays) -> int:
    """Returns the channels of the images that the patches are cut from."""
    return _shape(arrays, "patch_embed.proj.weight", rank=4)[1]


def on_one_grid(
    arrays: Arrays, sizes: Iterable[tuple[int, int]]
) -> tuple[dict[str, StoredArray], tuple[int, int] | None]:
    """Gives every token that has a place in the network one in the file, and finds the grid.

    A class token whose position the file leaves out has zeros. A distillation token without
    classifier of its own becomes the first register, with its position added to it once and for
    all; so are the positions of registers that have some.

    Args:
        arrays: by the names of `torch_names`.
        sizes: (height, width) of images that the settings mention, the most likely first.

    Returns:
        The arrays, and the first grid among the sizes that the file's tables are made for,
        otherwise a square; None for neither.
    """
    arrays, patch = dict(arrays), _patch_size(arrays)
    grids = [(height // patch, width // patch) for height, width in sizes]
    grid = grids[0] if grids else None
    placed = ("cls_token" in arrays) + ("dist_token" in arrays)
    table = arrays.get("pos_embed")
    if table is not None and len(table.shape) == 3:
        _, count, width = table.shape
        grid = _grid_of(count - placed, grids)
        if grid is None and count in {rows * columns for rows, columns in grids}:
            grid = _grid_of(count, grids)
            arrays["pos_embed"] = concatenate([zeros((1, placed, width)), table], axis=1)
        elif grid is None and "reg_token" in arrays:
            registers = arrays["reg_token"].shape[1]
            grid = _grid_of(count - placed - registers, grids)
            if grid is not None:
                token = arrays["reg_token"]
                arrays["reg_token"] = _placed(token, arrays, first=placed, count=registers)
    tables = [name for name in blocks_with(arrays, _TABLE) if len(arrays[name].shape) == 2]
    offsets = [(2 * rows - 1, 2 * columns - 1) for rows, columns in grids]
    for name in tables:
        places, heads = arrays[name].shape
        found = _grid_of(places - BIAS_PREFIX, offsets)
        grid = None if found is None else ((found[0] + 1) // 2, (found[1] + 1) // 2)
        arrays[name] = arrays[name].map(_in_our_order, (1, places, heads))
    if "dist_token" in arrays and "head_dist.weight" not in arrays:
        arrays = without_distillation(arrays)
    return arrays, grid


def as_projection(arrays: Arrays) -> dict[str, StoredArray]:
    """Returns the arrays with the classifier under the name of a projection after the pooling."""
    return {re.sub(r"^head\.", "projection.", name): array for name, array in arrays.items()}


def without_distillation(arrays: Arrays) -> dict[str, StoredArray]:
    """Makes of a distillation token whose classifier is not there the first register.

    Nothing reads such a token, as nothing reads registers; its position is added to it.
    """
    arrays = {name: array for name, array in arrays.items() if not name.startswith("head_dist.")}
    token, table = arrays.pop("dist_token"), arrays.get("pos_embed")
    if table is not None and len(table.shape) == 3 and "cls_token" in arrays:
        token = _placed(token, arrays, first=1, count=1)
    others = [arrays["reg_token"]] if "reg_token" in arrays else []
    arrays["reg_token"] = concatenate([token, *others], axis=1)
    return arrays


def torch_rows(config: ViTConfig, *, rotary_layout: RotaryLayout | None) -> list[Row]:
    """Returns the table of these layouts for a model of this config, see `check_torch`."""
    d, size = config.hidden_dim, config.patch_size
    count = config.num_tokens - config.num_registers
    kernel = (d, config.patch_channels, size, size)
    tokens = (
        ("class_token", "cls_token", int(config.class_token)),
        ("distillation_token", "dist_token", int(config.distillation_token)),
        ("registers", "reg_token", config.num_registers),
    )
    rows = [plain_row(f"patch_encoder/{path}", name, (1, n, d)) for path, name, n in tokens if n]
    if config.position_embedding == "learned":
        rows.append(plain_row("patch_encoder/position_embedding", "pos_embed", (1, count, d)))
    projection = Row(
        "patch_encoder/projection/kernel",
        (size * size * config.patch_channels, d),
        ("patch_embed.proj.weight",),
        (kernel,),
        lambda value: value.transpose(2, 3, 1, 0).reshape(-1, d),
    )
    rows.append(projection)
    rows.append(plain_row("patch_encoder/projection/bias", "patch_embed.proj.bias", (d,)))
    if config.embedding_norm:
        rows += _norm_rows("embedding_norm", "norm_pre", d)
    order = _rotary_order(config, rotary_layout)
    for index in range(config.num_layers):
        rows += _block_rows(config, f"block_{index}", f"blocks.{index}", order)
    if not config.norm_after_pooling:
        rows += _norm_rows("encoder_norm", "norm", d)
    elif config.pooling is not None:
        rows += _norm_rows("pooling_norm", "fc_norm", config.pooled_dim)
    if config.pooling == "map":
        rows += _map_rows(d, config.mlp_dim * (1 + _is_gated(config)), config.mlp_dim)
    return rows + _head_rows(config)


def _block_rows(config: ViTConfig, path: str, name: str, order: np.ndarray | None) -> list[Row]:
    d, m = config.hidden_dim, config.mlp_dim
    rows = [
        *_norm_rows(f"{path}/attention_norm", f"{name}.norm1", d),
        *_dense_rows(f"{path}/attention/qkv", f"{name}.attn.qkv", d, 3 * d, order),
    ]
    if config.position_embedding == "relative":
        height, width = config.grid
        shape = (1, BIAS_PREFIX + (2 * height - 1) * (2 * width - 1), config.num_heads)
        rows.append(plain_row(f"{path}/attention/relative_bias", f"{name}.{_TABLE}", shape))
    rows += [
        *_dense_rows(f"{path}/attention/out", f"{name}.attn.proj", d, d),
        *_norm_rows(f"{path}/mlp_norm", f"{name}.norm2", d),
        *_dense_rows(f"{path}/mlp/fc1", f"{name}.mlp.fc1", d, m * (1 + _is_gated(config))),
        *_dense_rows(f"{path}/mlp/fc2", f"{name}.mlp.fc2", m, d),
    ]
    if config.layer_scale is not None:
        rows.append(plain_row(f"{path}/attention_scale", f"{name}.ls1.gamma", (d,)))
        rows.append(plain_row(f"{path}/mlp_scale", f"{name}.ls2.gamma", (d,)))
    return rows


def _head_rows(config: ViTConfig) -> list[Row]:
    rows, width = [], config.pooled_dim
    if config.representation_dim is not None:
        name = "projection" if config.representation_activation is None else "pre_logits.fc"
        rows += _dense_rows("representation", name, width, config.representation_dim)
        width = config.representation_dim
    if config.classes is not None:
        rows += _dense_rows("head", "head", width, config.classes)
        if config.distillation_token:
            rows += _dense_rows("distillation_head", "head_dist", width, config.classes)
    return rows


def _map_rows(d: int, hidden: int, m: int) -> list[Row]:
    return [
        plain_row("pooling/probe", "attn_pool.latent", (1, 1, d)),
        *_dense_rows("pooling/query", "attn_pool.q", d, d),
        *_dense_rows("pooling/key_value", "attn_pool.kv", d, 2 * d),
        *_dense_rows("pooling/out", "attn_pool.proj", d, d),
        *_norm_rows("pooling/norm", "attn_pool.norm", d),
        *_dense_rows("pooling/mlp/fc1", "attn_pool.mlp.fc1", d, hidden),
        *_dense_rows("pooling/mlp/fc2", "attn_pool.mlp.fc2", m, d),
    ]


def _is_gated(config: ViTConfig) -> bool:
    return config.activation == "swiglu"


def _rotary_order(config: ViTConfig, layout: RotaryLayout | None) -> np.ndarray | None:
    """Returns which of the file's rows of query, key and value each of ours is, (3 D,)."""
    d, size = config.hidden_dim, config.hidden_dim // config.num_heads
    if config.rotary_period is None or layout == "halves":
        return None
    pairs = np.arange(size // 2)
    if layout == "neighbours_columns_first":
        pairs = np.roll(pairs, size // 4)
    # The order of a head's channels is free, as long as query and key have the same. Ours is (pairs
    # by row, pairs by column) twice: the first of each pair, then the second.
    head = np.concatenate([2 * pairs, 2 * pairs + 1])
    heads = np.arange(0, 2 * d, size)[:, None] + head  # of the queries, then of the keys
    return np.concatenate([heads.ravel(), np.arange(2 * d, 3 * d)])


def _in_our_order(table: np.ndarray) -> np.ndarray:
    """Returns BEiT's table in our order (microsoft/unilm, beit/modeling_finetune.py)."""
    # BEiT counts from the asked patch to the asking one, and puts the other tokens' rows last.
    return np.concatenate([table[-BIAS_PREFIX:], table[-BIAS_PREFIX - 1 :: -1]])[None]


def _placed(
    token: StoredArray, arrays: dict[str, StoredArray], *, first: int, count: int
) -> StoredArray:
    """Returns tokens with their positions added, and takes these out of the table."""
    table, own = arrays["pos_embed"], slice(first, first + count)
    _, places, width = table.shape
    rest = (1, places - count, width)
    arrays["pos_embed"] = table.map(lambda value: np.delete(value, own, axis=1), rest)

    def read() -> np.ndarray:
        return token.read().astype(np.float32) + table.read()[:, own].astype(np.float32)

    return dataclasses.replace(token, read=read)


def _grid_of(count: int, grids: list[tuple[int, int]]) -> tuple[int, int] | None:
    return next((grid for grid in grids if grid[0] * grid[1] == count), square_grid(max(count, 0)))


def _patch_size(arrays: Arrays) -> int:
    _, _, *patch = _shape(arrays, "patch_embed.proj.weight", rank=4)
    if patch[0] != patch[1]:
        raise ValueError(f"The file has patches of {patch[0]}x{patch[1]} pixels, not square ones.")
    if not patch[0]:
        raise ValueError("The file has patches of no pixels.")
    return patch[0]


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


def _dense_rows(
    path: str, name: str, width: int, units: int, order: np.ndarray | None = None
) -> list[Row]:
    """A dense layer made of a linear one, whose rows may stand in another order."""

    def ordered(value: np.ndarray) -> np.ndarray:
        return value if order is None else value[order]

    kernel, bias = f"{name}.weight", f"{name}.bias"
    return [
        Row(f"{path}/kernel", (width, units), (kernel,), ((units, width),), lambda x: ordered(x).T),
        Row(f"{path}/bias", (units,), (bias,), ((units,),), ordered),
    ]
