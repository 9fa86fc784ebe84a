"""The published layouts: the variable of each array, and the settings that the arrays imply.

Shapes: D hidden_dim, M mlp_dim, H heads, K = D / H; in code d, m, h and d // h.
"""

import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from keras_vit.config import ASSUMED, ViTConfig
from keras_vit.limits import shown
from keras_vit.weights.arrays import MAX_ARRAYS, StoredArray, aligned_empty

Arrays = Mapping[str, StoredArray]

_POSITIONS = "Transformer/posembed_input/pos_embedding"
# Newer Flax numbers sub-modules per class; the published files number them per block.
_LINEN_NAMES = (
    ("LayerNorm_1", "LayerNorm_2"),
    ("MultiHeadDotProductAttention_0", "MultiHeadDotProductAttention_1"),
    ("MlpBlock_0", "MlpBlock_3"),
)
_ROOM = 130  # letters that a list of names takes in a message


@dataclasses.dataclass(frozen=True)
class Row:
    """One variable and the arrays it is made of.

    Attributes:
        path: the variable's path in the model.
        shape: the variable's shape.
        names: the arrays' names in the checkpoint.
        shapes: the arrays' shapes there.
        join: makes the variable's value from the arrays.
        split: makes the arrays from the variable's value.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    join: Callable[..., np.ndarray] = lambda value: value
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]] = lambda value: (value,)


def plain_row(path: str, name: str, shape: tuple[int, ...]) -> Row:
    """Returns the row of a variable that is an array as it stands."""
    return Row(path, shape, (name,), (shape,))


def norm_rows(path: str, name: str, width: int, *, scale: str = "/scale") -> list[Row]:
    """Returns the rows of a layer normalisation; `scale` is how its gamma's name ends."""
    return [
        plain_row(f"{path}/gamma", f"{name}{scale}", (width,)),
        plain_row(f"{path}/beta", f"{name}{scale[0]}bias", (width,)),
    ]


def check_published(config: ViTConfig) -> None:
    """Raises a ValueError for a network that the published layouts have no room for."""
    # A pooling has no weights, but "token_avg" makes those that follow twice as wide.
    held = () if config.pooling == "token_avg" else ("pooling",)
    check_held(config, held, "Layouts of checkpoints hold the published network alone")


def check_original(config: ViTConfig) -> None:
    """Raises a ValueError for a network that would be read from a published .npz as another one."""
    check_published(config)
    poolings = ["token" if config.class_token else "avg", "map"]
    is_scaled = config.rescaling == ViTConfig().rescaling
    is_read = {
        "activation": config.activation == ViTConfig.activation,
        "layer_norm_epsilon": config.layer_norm_epsilon == ViTConfig.layer_norm_epsilon,
        "image_mean": is_scaled,
        "image_std": is_scaled,
        "pooling": config.pooling in (poolings if config.classes else [*poolings, None]),
        "grid": config.grid[0] == config.grid[1],
    }
    others = [f"{name}={getattr(config, name)!r}" for name, same in is_read.items() if not same]
    if others:
        raise ValueError(
            f"An .npz of the published layout cannot say {', '.join(others)}; "
            'model.save("model.keras") writes a file that holds everything.'
        )


def check_held(config: ViTConfig, held: Collection[str], layout: str) -> None:
    """Raises a ValueError if the network departs from the published one in a field not held.

    Args:
        config: the network's.
        held: names of fields that may depart.
        layout: what the message says of the layout.
    """
    nonstandard = [name for name in config.nonstandard_fields if name not in held]
    if nonstandard:
        received = ", ".join(f"{name}={getattr(config, name)!r}" for name in nonstandard)
        raise ValueError(
            f"{layout}; save another with model.save and load it with keras.saving.load_model, or "
            f"use model.save_weights and model.load_weights. Received: {received}."
        )


def original_rows(config: ViTConfig) -> list[Row]:
    """Returns the table of the published .npz layout for a model of this config."""
    d = config.hidden_dim
    size, channels = config.patch_size, config.patch_channels
    rows = _stem_rows(config) if config.resnet_layers is not None else []
    if config.class_token:
        rows.append(plain_row("patch_encoder/class_token", "cls", (1, 1, d)))
    shape = (1, config.num_tokens, d)
    rows.append(plain_row("patch_encoder/position_embedding", _POSITIONS, shape))
    kernel, flat = (size, size, channels, d), (size * size * channels, d)
    rows.append(_reshape_row("patch_encoder/projection/kernel", "embedding/kernel", kernel, flat))
    rows.append(plain_row("patch_encoder/projection/bias", "embedding/bias", (d,)))
    for index in range(config.num_layers):
        rows += _block_rows(config, f"block_{index}", f"Transformer/encoderblock_{index}")
    rows += norm_rows("encoder_norm", "Transformer/encoder_norm", d)
    if config.pooling == "map":
        rows += _map_rows(config)
    if config.representation_dim is not None:
        rows += _dense_rows("representation", "pre_logits", d, config.representation_dim)
        d = config.representation_dim
    if config.classes is not None:
        rows += _dense_rows("head", "head", d, config.classes)
    return rows


def published_names(arrays: Arrays) -> dict[str, StoredArray]:
    """Renames the arrays of any .npz that Flax code of this family writes to the published names.

    Takes prefixes (`params/`, `params/img/`, `opt/target/`) and what lies outside them away, splits
    blocks that were scanned, renames newer Flax's modules, gives group norms their plain shape, and
    a class token whose position was folded into it a position of zeros.
    """
    arrays = _without_prefix(arrays)
    arrays = _without_scan(arrays)
    blocks = re.compile(r"Transformer/encoderblock_\d+/", re.ASCII)
    if any(blocks.match(name) and "/MlpBlock_0/" in name for name in arrays):
        for linen, published in _LINEN_NAMES:
            arrays = renamed(
                (name.replace(f"/{linen}/", f"/{published}/") if blocks.match(name) else name, a)
                for name, a in arrays.items()
            )
    for name, array in arrays.items():
        is_norm = re.search(r"(^|/)gn(_root|_proj|\d)/(scale|bias)$", name)
        if is_norm and array.shape[:-1] == (1, 1, 1):
            arrays[name] = array.map(lambda value: value.reshape(-1), array.shape[3:])
    # big_vision keeps positions of the patches only, at the top level.
    table = arrays.pop("pos_embedding", None)
    if table is None or len(table.shape) != 3:
        return arrays
    if "cls" in arrays:
        _, patches, width = table.shape
        table = table.map(
            lambda value: np.concatenate([np.zeros_like(value[:, :1]), value], axis=1),
            (1, patches + 1, width),
        )
    return renamed([*arrays.items(), (_POSITIONS, table)])


def renamed(pairs: Iterable[tuple[str, StoredArray]]) -> dict[str, StoredArray]:
    """Returns the arrays by their new names.

    Raises:
        ValueError: two of them have the same.
    """
    arrays: dict[str, StoredArray] = {}
    for name, array in pairs:
        if name in arrays:
            raise ValueError(
                f"The file holds {shown(name)} twice, under names that mean the same; save it with "
                "one of them."
            )
        arrays[name] = array
    return arrays


def check_one_network(prefixes: Collection[str]) -> None:
    """Raises a ValueError if a file has several networks, by what is before each one's names."""
    if len(prefixes) > 1:
        count = "two" if len(prefixes) == 2 else len(prefixes)
        places = [
            f"below {shown(prefix)}" if prefix else "at its top" for prefix in sorted(prefixes)
        ]
        raise ValueError(
            f"The file holds {count} networks, one {' and one '.join(places[:4])}; save the one "
            "that is meant alone."
        )


def published_fields(arrays: Arrays) -> dict[str, Any]:
    """Returns the ViTConfig fields that the arrays of a published layout decide.

    The image's size is not among them: only the number of positions is known.

    Raises:
        ValueError: the arrays are not those of a Vision Transformer.
    """
    shapes = {name: array.shape for name, array in arrays.items()}
    try:
        query = shapes["Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"]
        hidden = shapes["Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"]
        kernel = shapes["embedding/kernel"]
        (hidden_dim, num_heads, _), (_, mlp_dim), (patch_size, _, _, _) = query, hidden, kernel
        classes, width = (shapes.get(f"{name}/bias", (None,))[0] for name in ("head", "pre_logits"))
    except (KeyError, ValueError, IndexError):
        raise ValueError(
            "The file does not hold a Vision Transformer in the published layout: its arrays are "
            f"{listed(shapes)}."
        ) from None
    has_map, has_token = "MAPHead_0/probe" in shapes, "cls" in shapes
    resnet_layers = None
    if "conv_root/kernel" in shapes:
        stages = range(1, 1 + numbered(shapes, r"block(\d+)/unit", first=1))
        units = [rf"block{stage}/unit(\d+)/" for stage in stages]
        resnet_layers = tuple(numbered(shapes, pattern, first=1) for pattern in units)
    return {
        "patch_size": patch_size,
        "hidden_dim": hidden_dim,
        "mlp_dim": mlp_dim,
        "num_heads": num_heads,
        "num_layers": numbered(shapes, r"Transformer/encoderblock_(\d+)/"),
        "classes": classes,
        "pooling": "map" if has_map else "token" if has_token else "avg",
        "class_token": has_token,
        "representation_dim": width,
        "resnet_layers": resnet_layers,
        # What it means without a word (vit_jax/models_vit.py, preprocess in its README).
        **{name: getattr(ViTConfig, name) for name in ASSUMED},
        "antialias": False,  # tf.image.resize without it: vit_jax/input_pipeline.py
    }


def published_channels(arrays: Arrays) -> int:
    """Returns the channels of the images that a published layout reads."""
    shape = arrays.get("conv_root/kernel", arrays["embedding/kernel"]).shape
    if len(shape) != 4:
        raise ValueError(f"The file's first kernel has shape {shape}, not one of 4 sides.")
    return shape[2]


def listed(names: Iterable[str]) -> str:
    """Returns the sorted names, cut after two or three with the number left out."""
    names = sorted(names)
    texts = [name if name.isprintable() else shown(name) for name in names]
    texts = [text if len(text) <= _ROOM else f"{text[:_ROOM]}..." for text in texts]
    ends = itertools.accumulate(len(text) + 2 for text in texts)
    count = max(1, sum(end <= _ROOM for end in ends))
    rest = len(texts) - count
    return ", ".join(texts[:count]) + (f", ... and {rest} more" if rest > 0 else "")


def numbered(names: Iterable[str], pattern: str, *, first: int = 0) -> int:
    """Returns how many numbers the pattern finds in the names, which run on from `first`.

    Raises:
        ValueError: one is missing: the largest number alone would say how many there are.
    """
    units = {match[1] for match in map(re.compile(pattern, re.ASCII).match, names) if match}
    missing = next((n for n in itertools.count(first) if str(n) not in units), first)
    if len(units) > missing - first:
        raise ValueError(
            f"The file lacks the block or unit {missing}, and has {listed(units - {str(missing)})}."
        )
    return len(units)


def _reshape_row(path: str, name: str, shape: tuple[int, ...], flat: tuple[int, ...]) -> Row:
    return Row(
        path,
        flat,
        (name,),
        (shape,),
        join=lambda value: value.reshape(flat),
        split=lambda value: (value.reshape(shape),),
    )


def _dense_rows(path: str, name: str, width: int, units: int) -> list[Row]:
    return [
        plain_row(f"{path}/kernel", f"{name}/kernel", (width, units)),
        plain_row(f"{path}/bias", f"{name}/bias", (units,)),
    ]


def _heads_rows(config: ViTConfig, path: str, name: str, parts: tuple[str, ...]) -> list[Row]:
    """Products into heads: kernels (D, H, K) and biases (H, K) side by side in one dense layer."""
    d, h = config.hidden_dim, config.num_heads
    count = len(parts)

    def join(*values: np.ndarray) -> np.ndarray:
        parts = [value.reshape(*value.shape[:-2], d) for value in values]
        rows = aligned_empty((*parts[0].shape[:-1], count * d), parts[0].dtype)
        return np.concatenate(parts, axis=-1, out=rows)

    def split(value: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(
            np.ascontiguousarray(part.reshape(*part.shape[:-1], h, d // h))
            for part in np.split(value, count, axis=-1)
        )

    kernels = tuple(f"{name}/{part}/kernel" for part in parts)
    biases = tuple(f"{name}/{part}/bias" for part in parts)
    return [
        Row(f"{path}/kernel", (d, count * d), kernels, ((d, h, d // h),) * count, join, split),
        Row(f"{path}/bias", (count * d,), biases, ((h, d // h),) * count, join, split),
    ]


def _out_rows(config: ViTConfig, path: str, name: str) -> list[Row]:
    d, h = config.hidden_dim, config.num_heads
    return [
        _reshape_row(f"{path}/kernel", f"{name}/kernel", (h, d // h, d), (d, d)),
        plain_row(f"{path}/bias", f"{name}/bias", (d,)),
    ]


def _block_rows(config: ViTConfig, path: str, name: str) -> list[Row]:
    d, m = config.hidden_dim, config.mlp_dim
    attention = f"{name}/MultiHeadDotProductAttention_1"
    return [
        *norm_rows(f"{path}/attention_norm", f"{name}/LayerNorm_0", d),
        *_heads_rows(config, f"{path}/attention/qkv", attention, ("query", "key", "value")),
        *_out_rows(config, f"{path}/attention/out", f"{attention}/out"),
        *norm_rows(f"{path}/mlp_norm", f"{name}/LayerNorm_2", d),
        *_dense_rows(f"{path}/mlp/fc1", f"{name}/MlpBlock_3/Dense_0", d, m),
        *_dense_rows(f"{path}/mlp/fc2", f"{name}/MlpBlock_3/Dense_1", m, d),
    ]


def _map_rows(config: ViTConfig) -> list[Row]:
    """The MAP head as big_vision names it (models/vit.py, MAPHead)."""
    d, m, attention = config.hidden_dim, config.mlp_dim, "MAPHead_0/MultiHeadDotProductAttention_0"
    return [
        plain_row("pooling/probe", "MAPHead_0/probe", (1, 1, d)),
        *_heads_rows(config, "pooling/query", attention, ("query",)),
        *_heads_rows(config, "pooling/key_value", attention, ("key", "value")),
        *_out_rows(config, "pooling/out", f"{attention}/out"),
        *norm_rows("pooling/norm", "MAPHead_0/LayerNorm_0", d),
        *_dense_rows("pooling/mlp/fc1", "MAPHead_0/MlpBlock_0/Dense_0", d, m),
        *_dense_rows("pooling/mlp/fc2", "MAPHead_0/MlpBlock_0/Dense_1", m, d),
    ]


def _stem_rows(config: ViTConfig) -> list[Row]:
    channels = config.input_shape[2]
    rows = [plain_row("stem/root_conv/kernel", "conv_root/kernel", (7, 7, channels, 64))]
    rows += norm_rows("stem/root_norm", "gn_root", 64)
    inside = 64
    for stage, units in enumerate(config.resnet_layers or ()):
        width = 64 * 2**stage
        for unit in range(units):
            path, name = f"stem/stage_{stage}_unit_{unit}", f"block{stage + 1}/unit{unit + 1}"
            kernels = ((1, 1, inside, width), (3, 3, width, width), (1, 1, width, 4 * width))
            for n, shape in enumerate(kernels, 1):
                rows.append(plain_row(f"{path}/conv{n}/kernel", f"{name}/conv{n}/kernel", shape))
                rows += norm_rows(f"{path}/norm{n}", f"{name}/gn{n}", shape[-1])
            if unit == 0:
                kernel = (1, 1, inside, 4 * width)
                rows.append(
                    plain_row(f"{path}/projection/kernel", f"{name}/conv_proj/kernel", kernel)
                )
                rows += norm_rows(f"{path}/projection_norm", f"{name}/gn_proj", 4 * width)
            inside = 4 * width
    return rows


def _without_prefix(arrays: Arrays) -> dict[str, StoredArray]:
    anchors = [
        name[: -len("embedding/kernel")] for name in arrays if name.endswith("embedding/kernel")
    ]
    roots = {name.partition("Transformer/")[0] for name in arrays if "Transformer/" in name}
    towers = [prefix for prefix in anchors if prefix in roots]
    if not towers:
        return dict(arrays)
    # An optimizer keeps averages of every array, under the arrays' own names.
    prefix = min(towers, key=lambda tower: (tower.startswith("opt"), len(tower)))
    others = [tower for tower in towers if not tower.startswith(("opt", prefix))]
    beside = [""] if prefix and any(f"{prefix}{name}" in arrays for name in arrays) else []
    check_one_network([prefix, *others, *beside])
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def _without_scan(arrays: Arrays) -> dict[str, StoredArray]:
    start = "Transformer/encoderblock/"
    stacked = [array for name, array in arrays.items() if name.startswith(start) and array.shape]
    count = sum(array.shape[0] for array in stacked)
    if count > MAX_ARRAYS:
        raise ValueError(
            f"The file's arrays below {start} are of {count} blocks together, more than any "
            "network has."
        )
    split: list[tuple[str, StoredArray]] = []
    for name, array in arrays.items():
        if not name.startswith(start) or not array.shape:
            split.append((name, array))
            continue
        for index in range(array.shape[0]):
            part = array.map(operator.itemgetter(index), array.shape[1:])
            split.append((f"Transformer/encoderblock_{index}/{name[len(start) :]}", part))
    return renamed(split)
