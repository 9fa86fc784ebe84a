"""Reads what the JSON files beside a PyTorch library's weights say of the model."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit.weights.architectures import (
    ACTIVATIONS,
    HUGGING_FACE_EPSILONS,
    POOLINGS,
    TIMM_ARGUMENTS,
    find_architecture,
)

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
SETTINGS_FILES = (CONFIG, PREPROCESSOR)

# What an image processor of transformers multiplies pixels by unless its file says otherwise
# (image_processing_vit.py), and the original's mean and deviation, which are its defaults too.
_RESCALE_FACTOR = 1 / 255
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
        said["num_heads"] = arguments["num_heads"]
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
    pixels = _processor_pixels(_read(folder / PREPROCESSOR))
    if settings is None:
        return TorchSettings(said=pixels, assumed=assumed, hint=f"put {CONFIG} beside it")
    kind = settings.get("model_type")
    if kind is not None and kind not in HUGGING_FACE_EPSILONS:
        raise ValueError(
            f"The file holds a model of type {kind!r} of transformers, which keras_vit does not "
            f"read yet; it reads {', '.join(HUGGING_FACE_EPSILONS)}."
        )
    if settings.get("pooler_act", "tanh") != "tanh":
        raise ValueError(
            f"The file's pooler_act is {settings['pooler_act']!r}; keras_vit has 'tanh'."
        )
    said: dict[str, Any] = {"activation": _activation(settings.get("hidden_act", "gelu")), **pixels}
    epsilon = settings.get("layer_norm_eps", HUGGING_FACE_EPSILONS.get(str(kind)))
    if epsilon is not None:
        if not isinstance(epsilon, int | float):
            raise ValueError(f"The file's layer_norm_eps is {epsilon!r}; a number is wanted.")
        said["layer_norm_epsilon"] = epsilon
    if "num_attention_heads" in settings:
        said["num_heads"] = settings["num_attention_heads"]
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
    told = [f"{name}={arguments[name]!r}" for name in others if arguments[name] is not None]
    if told:
        raise ValueError(
            f"The file's {CONFIG} makes the network with {', '.join(told)}, which keras_vit does "
            "not read yet."
        )


def _activation(name: object) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"The file's activation is {name!r}; keras_vit has {sorted(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def _pooling(name: object) -> str | None:
    if not isinstance(name, str) or name not in POOLINGS:
        raise ValueError(f"The file's pooling is {name!r}; keras_vit has {sorted(POOLINGS)}.")
    return POOLINGS[name]


def _unknown_name(name: object) -> str:
    if name is None:
        return f"its {CONFIG} names no timm architecture"
    return (
        f"activation, epsilon and heads of timm's {name!r} are not known to this version "
        "(keras_vit.weights.architectures has the names that are)"
    )


def _processor_pixels(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Mean and deviation in units of 1, with the factor that pixels are multiplied by before."""
    if settings is None:
        return {}
    if settings.get("rescale_offset") or settings.get("offset"):
        raise ValueError(
            f"The file's {PREPROCESSOR} subtracts an offset, which keras_vit does not read yet."
        )
    factor = settings.get("rescale_factor", _RESCALE_FACTOR)
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if not settings.get("do_normalize", True):
        mean, std = [0.0], [1.0]
    if not settings.get("do_rescale", True):
        factor = 1.0
    if not isinstance(factor, int | float) or not factor > 0:
        raise ValueError(f"The file's {PREPROCESSOR} has rescale_factor={factor!r}, not above 0.")
    unit = 1.0 if math.isclose(255 * factor, 1.0, rel_tol=1e-9) else 255 * factor
    return _pixels(mean, std, unit=unit)


def _pixels(mean: Any, std: Any, *, unit: float = 1.0) -> dict[str, Any]:
    if mean is None or std is None:
        return {}
    found = {}
    for name, value in (("image_mean", mean), ("image_std", std)):
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"The file's {name} is {value!r}; numbers are wanted.")
        found[name] = tuple(float(number) / unit for number in numbers)
    longest = max(map(len, found.values()))
    return {name: v * longest if len(v) == 1 else v for name, v in found.items()}


def _sizes(values: list[Any]) -> tuple[tuple[int, int], ...]:
    """The sizes among the values: a number stands for a square."""
    pairs = [(value, value) if isinstance(value, int) else value for value in values]
    return tuple(
        (pair[0], pair[1])
        for pair in pairs
        if isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(side, int) and side > 0 for side in pair)
    )


def _mapping(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"The file's {CONFIG} has {name}={value!r}, not a dictionary.")
    return value


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{path} is not a whole JSON file ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dictionary.")
    return content
