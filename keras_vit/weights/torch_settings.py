"""Reads what the JSON files beside a PyTorch library's weights say of the model."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keras_vit.config import LIMITS, is_number, shown
from keras_vit.weights.architectures import (
    ACTIVATIONS,
    HUGGING_FACE_EPSILONS,
    POOLINGS,
    TIMM_ARGUMENTS,
    find_architecture,
)
from keras_vit.weights.arrays import read_json

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
        said: ViTConfig fields that the files say, among them "pooling" where they say it.
        assumed: the library's usual values of what they might have said.
        sizes: (height, width) of images that they mention, the most likely first.
        unknown: why the files do not say what the network computes, None where they do.
        hint: how the files would say what is assumed.
    """

    said: Mapping[str, Any]
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
    settings = _read(folder / CONFIG)
    if settings is None:
        return TorchSettings(said={}, assumed=assumed)
    with _blaming(folder / CONFIG):
        return _timm_settings(settings, assumed)


def _timm_settings(settings: Mapping[str, Any], assumed: Mapping[str, Any]) -> TorchSettings:
    name = settings.get("architecture")
    arguments = _mapping(settings, "model_args")
    # Before timm 0.9, what is now `pretrained_cfg` stood at the top.
    in_parts = "pretrained_cfg" in settings
    pretrained = _mapping(settings, "pretrained_cfg") if in_parts else settings
    _check_arguments(arguments)
    architecture = find_architecture(name) if isinstance(name, str) else None
    said: dict[str, Any] = {}
    if architecture is not None:
        said["num_heads"] = architecture.num_heads
        said["activation"] = _activation(architecture.activation)
        said["layer_norm_epsilon"] = architecture.layer_norm_epsilon
    if arguments.get("num_heads") is not None:
        said["num_heads"] = _heads(arguments["num_heads"])
    if arguments.get("act_layer") is not None:
        said["activation"] = _activation(arguments["act_layer"])
    pooling = arguments.get("global_pool", settings.get("global_pool"))
    if pooling is not None:
        said["pooling"] = _pooling(pooling)
    said |= _pixels(pretrained.get("mean"), pretrained.get("std"))
    shape = pretrained.get("input_size")  # channels first
    sizes = [arguments.get("img_size"), shape[-2:] if isinstance(shape, list) else None]
    return TorchSettings(
        said=said,
        assumed=assumed,
        sizes=_sizes(sizes),
        unknown=None if architecture is not None else _unknown_name(name),
        hint=f'write "mean" and "std" into the "pretrained_cfg" of its {CONFIG}',
    )


def hugging_face_settings(folder: Path) -> TorchSettings:
    """Reads the config.json and preprocessor_config.json that transformers writes.

    Raises:
        ValueError: a file is damaged, or says that the network is another one.
    """
    settings = _read(folder / CONFIG)
    assumed = {"activation": "gelu", "layer_norm_epsilon": 1e-12, **_PIXELS}
    processor = _read(folder / PREPROCESSOR)
    with _blaming(folder / PREPROCESSOR):
        pixels = _processor_pixels(processor)
    if settings is None:
        return TorchSettings(said=pixels, assumed=assumed, hint=f"put {CONFIG} beside it")
    with _blaming(folder / CONFIG):
        return _hugging_face_settings(settings, assumed, pixels)


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
    said: dict[str, Any] = {"activation": _activation(settings.get("hidden_act", "gelu")), **pixels}
    epsilon = settings.get("layer_norm_eps", HUGGING_FACE_EPSILONS.get(str(kind)))
    if epsilon is not None:
        if not is_number(epsilon) or not 0 < epsilon < 1:
            raise ValueError(
                f"The file's layer_norm_eps is {shown(epsilon)}; a number in (0, 1) is wanted."
            )
        said["layer_norm_epsilon"] = epsilon
    if "num_attention_heads" in settings:
        said["num_heads"] = _heads(settings["num_attention_heads"])
    unknown = None if kind is not None else f"its {CONFIG} names no model_type"
    return TorchSettings(
        said=said,
        assumed=assumed,
        sizes=_sizes([settings.get("image_size")]),
        unknown=unknown,
        hint=f"put the model's {PREPROCESSOR} beside it",
    )


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    others = [name for name in arguments if name not in TIMM_ARGUMENTS]
    told = [
        f"{name[:40]}={shown(arguments[name])}" for name in others if arguments[name] is not None
    ]
    if told:
        raise ValueError(
            f"It makes the network with {', '.join(told[:5])}, which keras_vit does not read yet."
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
        raise ValueError(f"The file's number of heads is {shown(value)}; a count is wanted.")
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
    found = {}
    for name, value in (("image_mean", mean), ("image_std", std)):
        numbers = value if isinstance(value, list) else [value]
        least = 0.0 if name == "image_std" else -math.inf
        if not numbers or not all(is_number(n) and n > least for n in numbers):
            raise ValueError(
                f"The file's {name} is {shown(value)}; numbers are wanted, "
                "those of image_std above 0."
            )
        found[name] = tuple(float(number) / unit for number in numbers)
    longest, *others = sorted({len(values) for values in found.values()}, reverse=True)
    if others not in ([], [1]):
        raise ValueError(
            f"The file has means and deviations of {longest} and {others[0]} channels."
        )
    return {name: v * longest if len(v) == 1 else v for name, v in found.items()}


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


def _read(path: Path) -> dict[str, Any] | None:
    return read_json(path) if os.path.lexists(path) else None
