"""The layouts of timm and Hugging Face transformers, and the settings that lie beside them."""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.config import LIMITS, ViTConfig, is_number, shown
from keras_vit.weights.architectures import (
    ACTIVATIONS,
    HUGGING_FACE_EPSILONS,
    POOLINGS,
    TIMM_ARGUMENTS,
    find_architecture,
)
from keras_vit.weights.arrays import StoredArray, read_json
from keras_vit.weights.layouts import Row, listed, numbered, renamed

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
SETTINGS_FILES = (CONFIG, PREPROCESSOR)

# What an image processor of transformers multiplies pixels by unless its file says otherwise
# (image_processing_vit.py), and the original's mean and deviation, which are its defaults too.
_RESCALE_FACTOR = 1 / 255
_MAX_SIDE = 2**20  # pixels
_PIXELS = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """What is known of a model beside its arrays.

    Attributes:
        fields: ViTConfig fields in the files, among them "pooling" if it is there.
        assumed: the library's defaults of the fields that may be missing.
        sizes: (height, width) of images that they mention, the most likely first.
        unknown: why the files do not say what the network computes, None where they do.
        hint: how the files would say what is assumed.
    """

    fields: Mapping[str, Any]
    assumed: Mapping[str, Any]
    sizes: tuple[tuple[int, int], ...] = ()
    unknown: str | None = None
    hint: str = f"put the model's {CONFIG} beside it"


def timm_settings(folder: Path) -> TorchSettings:
    """Reads the config.json that timm writes.

    Raises:
        ValueError: the file is damaged, or says that the network is another one.
    """
    assumed = {"activation": "gelu", "layer_norm_epsilon": 1e-6, **_PIXELS}
    settings = _read_config(folder / CONFIG)
    if settings is None:
        return TorchSettings(fields={}, assumed=assumed)
    with _blaming(folder / CONFIG):
        return _timm_settings(settings, assumed)


def hugging_face_settings(folder: Path) -> TorchSettings:
    """Reads the config.json and preprocessor_config.json that transformers writes.

    Raises:
        ValueError: a file is damaged, or says that the network is another one.
    """
    settings = _read_config(folder / CONFIG)
    assumed = {"activation": "gelu", "layer_norm_epsilon": 1e-12, **_PIXELS}
    processor = _read_config(folder / PREPROCESSOR)
    with _blaming(folder / PREPROCESSOR):
        pixels = _processor_pixels(processor)
    if settings is None:
        return TorchSettings(fields=pixels, assumed=assumed, hint=f"put {CONFIG} beside it")
    with _blaming(folder / CONFIG):
        return _hugging_face_settings(settings, assumed, pixels)


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
                network = renamed(
                    (key.removeprefix(prefix), array) for key, array in arrays.items()
                )
                used = {k: v for k, v in network.items() if not k.startswith(names.left_aside)}
                return names, used
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


def _timm_settings(settings: Mapping[str, Any], assumed: Mapping[str, Any]) -> TorchSettings:
    name = settings.get("architecture")
    arguments = _mapping(settings, "model_args")
    # Before timm 0.9, what is now `pretrained_cfg` stood at the top.
    in_parts = "pretrained_cfg" in settings
    pretrained = _mapping(settings, "pretrained_cfg") if in_parts else settings
    _check_arguments(arguments)
    architecture = find_architecture(name) if isinstance(name, str) else None
    fields: dict[str, Any] = {}
    if architecture is not None:
        fields["num_heads"] = architecture.num_heads
        fields["activation"] = _activation(architecture.activation)
        fields["layer_norm_epsilon"] = architecture.layer_norm_epsilon
    if arguments.get("num_heads") is not None:
        fields["num_heads"] = _heads(arguments["num_heads"])
    if arguments.get("act_layer") is not None:
        fields["activation"] = _activation(arguments["act_layer"])
    pooling = arguments.get("global_pool", settings.get("global_pool"))
    if pooling is not None:
        fields["pooling"] = _pooling(pooling)
    fields |= _pixels(pretrained.get("mean"), pretrained.get("std"))
    shape = pretrained.get("input_size")  # channels first
    sizes = [arguments.get("img_size"), shape[-2:] if isinstance(shape, list) else None]
    return TorchSettings(
        fields=fields,
        assumed=assumed,
        sizes=_sizes(sizes),
        unknown=None if architecture is not None else _unknown_name(name),
        hint=f'write "mean" and "std" into the "pretrained_cfg" of its {CONFIG}',
    )


def _hugging_face_settings(
    settings: Mapping[str, Any], assumed: Mapping[str, Any], pixels: Mapping[str, Any]
) -> TorchSettings:
    kind = settings.get("model_type")
    if kind is not None and (not isinstance(kind, str) or kind not in HUGGING_FACE_EPSILONS):
        raise ValueError(
            f"The file holds a model of type {shown(kind)} of transformers, which keras_vit does "
            f"not read yet; it reads {', '.join(HUGGING_FACE_EPSILONS)}."
        )
    if settings.get("pooler_act", "tanh") != "tanh":
        raise ValueError(
            f"The file's pooler_act is {shown(settings['pooler_act'])}; keras_vit has 'tanh'."
        )
    activation = _activation(settings.get("hidden_act", "gelu"))
    fields: dict[str, Any] = {"activation": activation, **pixels}
    epsilon = settings.get("layer_norm_eps", HUGGING_FACE_EPSILONS.get(str(kind)))
    if epsilon is not None:
        if not is_number(epsilon) or not 0 < epsilon < 1:
            raise ValueError(
                f"The file's layer_norm_eps is {shown(epsilon)}; it must be a number in (0, 1)."
            )
        fields["layer_norm_epsilon"] = epsilon
    if "num_attention_heads" in settings:
        fields["num_heads"] = _heads(settings["num_attention_heads"])
    unknown = None if kind is not None else f"its {CONFIG} names no model_type"
    return TorchSettings(
        fields=fields,
        assumed=assumed,
        sizes=_sizes([settings.get("image_size")]),
        unknown=unknown,
        hint=f"put the model's {PREPROCESSOR} beside it",
    )


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    others = [name for name in arguments if name not in TIMM_ARGUMENTS]
    extras = [
        f"{name[:40]}={shown(arguments[name])}" for name in others if arguments[name] is not None
    ]
    if extras:
        raise ValueError(
            f"It makes the network with {', '.join(extras[:5])}, which keras_vit does not read yet."
        )


def _activation(name: object) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(
            f"The file's activation is {shown(name)}; keras_vit has {sorted(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]


def _pooling(name: object) -> str | None:
    if not isinstance(name, str) or name not in POOLINGS:
        raise ValueError(f"The file's pooling is {shown(name)}; keras_vit has {sorted(POOLINGS)}.")
    return POOLINGS[name]


def _heads(value: object) -> int:
    if not isinstance(value, int) or not 0 < value <= LIMITS["num_heads"]:
        raise ValueError(
            f"The file's number of heads is {shown(value)}; it must be from 1 to "
            f"{LIMITS['num_heads']}."
        )
    return value


def _unknown_name(name: object) -> str:
    if name is None:
        return f"its {CONFIG} names no timm architecture"
    return (
        f"activation, epsilon and heads of timm's {shown(name)} are not known to this version "
        "(keras_vit.weights.architectures has the names that are)"
    )


def _processor_pixels(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Mean and deviation in units of 1, with the factor that pixels are multiplied by before."""
    if settings is None:
        return {}
    if settings.get("rescale_offset") or settings.get("offset"):
        raise ValueError("It subtracts an offset, which keras_vit does not read yet.")
    factor = settings.get("rescale_factor", _RESCALE_FACTOR)
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if not settings.get("do_normalize", True):
        mean, std = [0.0], [1.0]
    if not settings.get("do_rescale", True):
        factor = 1.0
    if not is_number(factor) or not 1e-9 < factor < 1e9:
        raise ValueError(f"The file has rescale_factor={shown(factor)}, not above 0.")
    unit = 1.0 if math.isclose(255 * factor, 1.0, rel_tol=1e-9) else 255 * factor
    return _pixels(mean, std, unit=unit)


def _pixels(mean: Any, std: Any, *, unit: float = 1.0) -> dict[str, Any]:
    if mean is None or std is None:
        return {}
    statistics = {}
    for name, value in (("image_mean", mean), ("image_std", std)):
        numbers = value if isinstance(value, list) else [value]
        least = 0.0 if name == "image_std" else -math.inf
        if not numbers or not all(is_number(n) and n > least for n in numbers):
            raise ValueError(
                f"The file's {name} is {shown(value)}; it must be numbers, for image_std above 0."
            )
        statistics[name] = tuple(float(number) / unit for number in numbers)
    longest, *others = sorted({len(values) for values in statistics.values()}, reverse=True)
    if others not in ([], [1]):
        raise ValueError(
            f"The file has means and deviations of {longest} and {others[0]} channels."
        )
    return {name: v * longest if len(v) == 1 else v for name, v in statistics.items()}


def _sizes(values: list[Any]) -> tuple[tuple[int, int], ...]:
    """The sizes among the values: a number stands for a square."""
    pairs = [(value, value) if isinstance(value, int) else value for value in values]
    return tuple(
        (pair[0], pair[1])
        for pair in pairs
        if isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(side, int) and 0 < side < _MAX_SIDE for side in pair)
    )


def _mapping(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"The file has {name}={shown(value)}, not a dictionary.")
    return value


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Names the file that an error is about."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def _read_config(path: Path) -> dict[str, Any] | None:
    return read_json(path) if os.path.lexists(path) else None


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
