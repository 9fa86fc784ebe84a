"""What lies beside the arrays of timm and Hugging Face transformers: what no array shows."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from keras_vit.config import ProblemType, ViTConfig
from keras_vit.limits import MAX_HEADS, MAX_SIDE, is_number, is_whole, naming, read_json, shown
from keras_vit.weights.torch_names import (
    ACTIVATIONS,
    HUGGING_FACE_TYPES,
    POOLINGS,
    TIMM_ARGUMENTS,
    TWO_TOWERS,
    RotaryLayout,
    find_architecture,
)

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
SETTINGS_FILES = (CONFIG, PREPROCESSOR)

# What an image processor of transformers multiplies pixels by unless its file says otherwise
# (image_processing_vit.py), and the original's mean and deviation, which are its defaults too.
_RESCALE_FACTOR = 1 / 255
# Widths of the space that CLIP's towers share, and the weights of timm whose publishers trained
# with quick_gelu, under whichever name of an architecture (timm/models/vision_transformer.py).
_PROJECTIONS = (512, 640, 768, 896, 1024, 1280)
_QUICK_GELU = r"openai|metaclip_(400m|2pt5b)|dfn"
_T = TypeVar("_T")
_PROBLEM_TYPES = {name: name for name in get_args(ProblemType)}
# Pillow's numbers of filters, which transformers writes.
_FILTERS = {"1": "lanczos", "2": "bilinear", "3": "bicubic"}
# Its processors to which one number is the short side, not both.
_SHORT_SIDE = r"(CLIP|Bit)(FeatureExtractor|ImageProcessor)"
# The words of transformers, then of timm, for sizes that arrays show.
_WORDS = {
    **{"hidden_size": "hidden_dim", "intermediate_size": "mlp_dim", "patch_size": "patch_size"},
    **{"num_hidden_layers": "num_layers", "num_channels": "channels"},
    **{"embed_dim": "hidden_dim", "depth": "num_layers", "in_chans": "channels"},
}
_IMAGES = "It takes images of"  # what a message says of a size
# timm's, where its file says nothing (timm/data/config.py, constants.py).
_TIMM_RESIZING = {"interpolation": "bicubic", "crop_pct": 0.875, "crop_mode": "center"}
_FIELDS = {field.name: field for field in dataclasses.fields(ViTConfig)}
_ASSUMED = {"activation": "gelu", "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is known of a model beside its arrays.

    Attributes:
        fields: ViTConfig fields in the files, among them "pooling" if it is there.
        assumed: the library's defaults of the fields that may be missing.
        sizes: (height, width) of images that they mention, the most likely first.
        is_of_size: whether the positions must be those of the first of them.
        stated: their words for what arrays show, the value, and the ViTConfig field or "channels".
        unsupported_reason: why the files do not say what the network computes, None where they do.
        hint: how the files would say what is assumed.
        rotary_layout: which channels rotary positions turn together, None if unknown.
        pools_prefix: whether attention pooling looks at the tokens before the patches' too.
        labels: (identifier, name) of each class that they name.
        projects: whether what has a classifier's name projects to the space of a text tower.
        names_note: what messages say of the arrays' names, where these are not the file's own.
        warning: what a user should know of the numbers, "" for nothing.
    """

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ()
    is_of_size: bool = False
    stated: tuple[tuple[str, Any, str], ...] = ()
    unsupported_reason: str | None = None
    hint: str = f"put the model's {CONFIG} beside it"
    rotary_layout: RotaryLayout | None = None
    pools_prefix: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    projects: bool = False
    names_note: str = ""
    warning: str = ""


def timm_settings(folder: Path) -> Settings:
    """Reads the config.json that timm writes.

    Raises:
        ValueError: the file is damaged, or says that the network is another one.
    """
    known = Settings(assumed={**_ASSUMED, "layer_norm_epsilon": 1e-6})
    with naming(folder / CONFIG):
        settings = _read_config(folder / CONFIG)
        return known if settings is None else _timm_settings(settings, known)


def hugging_face_settings(folder: Path) -> Settings:
    """Reads the config.json and preprocessor_config.json that transformers writes.

    Raises:
        ValueError: a file is damaged, or says that the network is another one.
    """
    with naming(folder / PREPROCESSOR):
        said = _read_config(folder / PREPROCESSOR) or {}
        known = Settings(
            fields={**_processor_pixels(said), **_processor_resizing(said)},
            assumed={**_ASSUMED, "layer_norm_epsilon": 1e-12},
            hint=f"put {CONFIG} beside it",
            names_note=", by timm's names,",
        )
    with naming(folder / CONFIG):
        settings = _read_config(folder / CONFIG)
        return known if settings is None else _hugging_face_settings(settings, known)


def check_sizes(settings: Settings, sizes: Mapping[str, Any], grid: tuple[int, int] | None) -> None:
    """Raises a ValueError if settings say other sizes than arrays have, or other heads than fit.

    The `sizes` are the ViTConfig fields that the arrays decide, and their "channels"; the `grid` is
    the one that their positions are for, None for none among the settings' sizes and no square.
    """
    says, other = f"Its {CONFIG} says", "one of the two is of another model."
    for name, value, field in settings.stated:
        shows = sizes[field]
        if value not in (shows, [shows, shows]) or isinstance(value, bool):
            raise ValueError(f"{says} {name}={shown(value)}, and its arrays {shows}; {other}")
    heads = settings.fields.get("num_heads", 1)
    if sizes["hidden_dim"] % heads:
        raise ValueError(
            f"{says} {heads} heads, which do not divide the width, {sizes['hidden_dim']}; {other}"
        )
    grids = [tuple(side // sizes["patch_size"] for side in size) for size in settings.sizes]
    if settings.is_of_size and grid not in grids:
        raise ValueError(
            f"{says} a grid of {grids[0]} patches, and its positions are for "
            f"{grid or 'no such one'}; {other}"
        )


def with_settings(fields: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Returns the fields of arrays and settings together, having held the ones against the others.

    Raises:
        ValueError: they contradict each other, or need a network that is not there.
    """
    said = dict(settings.fields)
    said["pooling"] = _checked_pooling(fields, said.get("pooling", fields["pooling"]), settings)
    if said.get("pooling_heads") is not None and said["pooling"] != "map":
        said["pooling_heads"] = None
    is_gated = fields.get("activation") == "swiglu"
    if "activation" in said and (said["activation"] == "swiglu") != is_gated:
        raise ValueError(
            f"The file's settings say activation={said['activation']!r}, and its arrays have "
            f"{'a' if is_gated else 'no'} gate in the MLP."
        )
    if fields["position_embedding"] is None and said.get("rotary_period", 1) is None:
        raise ValueError(
            "The file lacks the positions (pos_embed), and its settings name no network without."
        )
    return {**fields, **said}


def _timm_settings(settings: Mapping[str, Any], known: Settings) -> Settings:
    name = settings.get("architecture")
    arguments = _mapping(settings, "model_args")
    # Before timm 0.9, what is now `pretrained_cfg` stood at the top.
    in_parts = "pretrained_cfg" in settings
    pretrained = _mapping(settings, "pretrained_cfg") if in_parts else settings
    _check_arguments(arguments)
    architecture = find_architecture(name) if isinstance(name, str) else None
    fields: dict[str, Any] = {}
    unsupported_reason = None
    if architecture is not None:
        fields = {name: value for name, value in vars(architecture).items() if name in _FIELDS}
        fields["activation"] = ACTIVATIONS[architecture.activation]
    elif name is None:
        unsupported_reason = f"its {CONFIG} names no timm architecture"
    else:
        unsupported_reason = (
            f"activation, epsilon and heads of timm's {shown(name)} are not known to this version "
            "(keras_vit.weights.torch_names has the names that are)"
        )
    if arguments.get("num_heads") is not None:
        fields["num_heads"] = _heads(arguments["num_heads"])
    if arguments.get("act_layer") is not None:
        fields["activation"] = _translated("activation", arguments["act_layer"], ACTIVATIONS)
    pooling = arguments.get("global_pool", settings.get("global_pool"))
    if pooling is not None:
        fields["pooling"] = _translated("pooling", pooling, POOLINGS)
    fields |= _pixels(pretrained.get("mean"), pretrained.get("std"))
    fields |= _timm_resizing(pretrained)
    shape = pretrained.get("input_size")  # channels first
    sizes = [arguments.get("img_size"), shape[-2:] if isinstance(shape, list) else shape]
    # The classes' names stand at the top, or are those of the pretrained weights.
    named = next((part for part in (settings, pretrained) if part.get("label_names")), {})
    labels = _labels(named.get("label_names"), described=named.get("label_descriptions"))
    tag = str(pretrained.get("tag"))
    # A head without labels is the projection of a tower that saw images and texts.
    is_tower = re.search(r"_(clip|pe_core)_", str(name)) is not None and "_ft_" not in tag
    width = settings.get("num_classes", pretrained.get("num_classes"))
    return dataclasses.replace(
        known,
        fields=fields,
        sizes=tuple(_sides(size, _IMAGES) for size in sizes if size is not None),
        stated=_stated(arguments),
        unsupported_reason=unsupported_reason,
        hint=f'write "mean" and "std" into the "pretrained_cfg" of its {CONFIG}',
        rotary_layout=None if architecture is None else architecture.rotary_layout,
        pools_prefix=architecture is not None and architecture.pools_prefix,
        labels=labels,
        projects=not labels and is_tower and width in _PROJECTIONS,
        warning=_warning(str(name), tag),
    )


def _warning(name: str, tag: str) -> str:
    is_other = "_clip_" in name and "quickgelu" not in name
    if not (is_other and re.match(_QUICK_GELU, tag)) or "_ft_" in tag:
        return ""
    return (
        f"timm's {name} computes the exact GELU, and so does this model, but its weights ({tag}) "
        f"were trained with quick_gelu. Write {name.replace('_clip_', '_clip_quickgelu_')!r} as "
        f'"architecture" into {CONFIG} for that.'
    )


def _hugging_face_settings(settings: Mapping[str, Any], known: Settings) -> Settings:
    labels, ending = _labels(settings.get("id2label")), {}
    if settings.get("problem_type") is not None:
        said = _translated("problem_type", settings["problem_type"], _PROBLEM_TYPES)
        ending = {"problem_type": said}
    settings, kind = _image_tower(settings)
    size = settings.get("image_size")
    if settings.get("pooler_act", "tanh") != "tanh":
        raise ValueError(
            f"The file's pooler_act is {shown(settings['pooler_act'])}; keras_vit has 'tanh'."
        )
    return dataclasses.replace(
        known,
        fields={**_hugging_face_fields(settings, kind), **known.fields, **ending},
        sizes=() if size is None else (_sides(size, _IMAGES),),
        is_of_size=size is not None,
        stated=_stated(settings),
        unsupported_reason=None if kind is not None else f"its {CONFIG} names no model_type",
        hint=f"put the model's {PREPROCESSOR} beside it",
        rotary_layout="halves",
        labels=labels,
    )


def _image_tower(settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    kind = settings.get("model_type")
    if isinstance(kind, str) and kind in TWO_TOWERS:
        kind = TWO_TOWERS[kind]
        heads = HUGGING_FACE_TYPES[kind].num_heads
        tower = _mapping(settings, "vision_config")
        settings = {"model_type": kind, "num_attention_heads": heads, **tower}
        kind = settings["model_type"]
    if kind is not None and (not isinstance(kind, str) or kind not in HUGGING_FACE_TYPES):
        raise ValueError(
            f"The file holds a model of type {shown(kind)} of transformers, which keras_vit does "
            f"not read yet; it reads {', '.join([*HUGGING_FACE_TYPES, *TWO_TOWERS])}."
        )
    return settings, kind


def _hugging_face_fields(settings: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    known = HUGGING_FACE_TYPES.get(str(kind))
    # The gated MLP of DINOv2 has its own activation, whatever hidden_act says.
    has_own = kind in ("dinov2", "dinov2_with_registers") and settings.get("use_swiglu_ffn", False)
    default = "gelu" if known is None else known.activation
    activation = "silu" if has_own else settings.get("hidden_act", default)
    fields: dict[str, Any] = {"activation": _translated("activation", activation, ACTIVATIONS)}
    epsilon = settings.get("layer_norm_eps", None if known is None else known.epsilon)
    if epsilon is not None:
        fields["layer_norm_epsilon"] = _number(epsilon, "layer_norm_eps", most=1.0)
    if "num_attention_heads" in settings:
        fields["num_heads"] = _heads(settings["num_attention_heads"])
    if kind is None:
        return fields
    if kind in ("beit", "data2vec-vision"):
        fields["pooling"] = "avg" if settings.get("use_mean_pooling", True) else "token"
    period = None
    if kind == "dinov3_vit":
        period = _number(settings.get("rope_theta", 100.0), "rope_theta", least=1.0)
    rotary = {"rotary_period": period, "rotary_grid": None, "rotary_offset": 0.0}
    return {**fields, **rotary, "pooling_heads": None}


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    others = [name for name in arguments if name not in TIMM_ARGUMENTS]
    extras = [
        f"{name[:40]}={shown(arguments[name])}" for name in others if arguments[name] is not None
    ]
    if extras:
        raise ValueError(
            f"It makes the network with {', '.join(extras[:5])}, which keras_vit does not read yet."
        )


def _stated(settings: Mapping[str, Any]) -> tuple[tuple[str, Any, str], ...]:
    values = {name: settings.get(name) for name in _WORDS}
    return tuple((name, v, _WORDS[name]) for name, v in values.items() if v is not None)


def _translated(what: str, name: object, ours: Mapping[str, _T]) -> _T:
    if not isinstance(name, str) or name not in ours:
        raise ValueError(f"The file's {what} is {shown(name)}; keras_vit has {sorted(ours)}.")
    return ours[name]


def _number(value: Any, name: str, *, least: float = 0.0, most: float = math.inf) -> float:
    if not is_number(value) or not least < value < most:
        raise ValueError(
            f"The file's {name} is {shown(value)}; it must be a number in ({least:g}, {most:g})."
        )
    return float(value)


def _heads(value: Any) -> int:
    if not is_whole(value, 1, MAX_HEADS):
        raise ValueError(
            f"The file's number of heads is {shown(value)}; it must be from 1 to {MAX_HEADS}."
        )
    return int(value)


def _timm_resizing(settings: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: settings.get(name) or usual for name, usual in _TIMM_RESIZING.items()}
    for name, value in said.items():
        allowed = _FIELDS[name].metadata["allowed"]
        if not allowed.fits(value):
            raise ValueError(
                f"The file's {name} is {shown(value)}; keras_vit takes {allowed.text}."
            )
    return said


def _processor_resizing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The filter, and what is cut out of the resized image, as a fraction."""
    if settings.get("size") is None or not settings.get("do_resize", True):
        return {}
    interpolation = _translated("resample", str(settings.get("resample", 2)), _FILTERS)
    size, cut = settings["size"], settings.get("crop_size")
    if not settings.get("do_center_crop", cut is not None):
        cut = None
    kind = str(settings.get("image_processor_type", settings.get("feature_extractor_type")))
    is_short = re.match(_SHORT_SIDE, kind) is not None
    if isinstance(size, dict):
        is_short = size.get("shortest_edge") is not None
    sides, seen = _sides(size), _sides(size if cut is None else cut)
    crop_pct = min(map(_fraction, seen, sides))
    is_read = crop_pct <= 1 and all(p // crop_pct == s for p, s in zip(seen, sides, strict=True))
    if not is_read or (is_short and (cut is None or seen[0] != seen[1])):
        raise ValueError(
            f"It resizes images to {shown(size)} and cuts {shown(cut) if cut else 'nothing'} out, "
            "which keras_vit does not read yet."
        )
    fields = {"crop_mode": "center" if is_short else "squash", "crop_offset": "floor"}
    return {"interpolation": interpolation, "crop_pct": crop_pct, **(fields if cut else {})}


def _sides(size: Any, says: str = "It resizes images to") -> tuple[int, int]:
    """Returns (height, width) of a size as transformers writes it; of a short side it is both."""
    pair = size if isinstance(size, list) else [size, size]
    if isinstance(size, dict):
        said = sorted(name for name, value in size.items() if value is not None)
        known = {("shortest_edge",): ("shortest_edge",) * 2, ("height", "width"): said}
        pair = [size[name] for name in known.get(tuple(said), ())]
    if len(pair) != 2 or not all(is_whole(side, 1, MAX_SIDE) for side in pair):
        raise ValueError(f"{says} {shown(size)}, which keras_vit does not read yet.")
    return pair[0], pair[1]


def _fraction(part: int, side: int) -> float:
    """Returns part / side, rounded so that `part` divided by it is at least the side."""
    fraction = part / side
    while part // fraction < side:
        fraction = math.nextafter(fraction, 0)
    return fraction


def _processor_pixels(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and deviation in units of 1, with the factor that pixels are multiplied by before."""
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


def _labels(names: Any, *, described: Any = None) -> tuple[tuple[str, str], ...]:
    """Returns (identifier, name) of each class; () for what are no names, as LABEL_0."""
    if isinstance(names, dict):
        names = [names.get(str(place)) for place in range(len(names))]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    if all(re.fullmatch(r"LABEL_\d+", name) for name in names):  # transformers', for want of names
        return ()
    meanings = described if isinstance(described, dict) else {}
    pairs = [(_line(name), _line(meanings.get(name)) or _line(name)) for name in names]
    return tuple(pairs) if all(identifier for identifier, _ in pairs) else ()


def _line(text: object) -> str:
    return " ".join(text.encode(errors="replace").decode().split()) if isinstance(text, str) else ""


def _mapping(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"The file has {name}={shown(value)}, not a dictionary.")
    return value


def _read_config(path: Path) -> dict[str, Any] | None:
    return read_json(path) if os.path.lexists(path) else None


def _checked_pooling(fields: Mapping[str, Any], pooling: Any, settings: Settings) -> Any:
    has_map, has_token = fields["pooling"] == "map", fields["class_token"]
    if has_map and (has_token or fields["num_registers"]) and not settings.pools_prefix:
        raise ValueError(
            "The file needs attention pooling that leaves the class token out, or registers, which "
            "keras_vit does not have."
        )
    if fields["representation_dim"] is not None and not has_token:
        raise ValueError(
            "The file needs a pooler on the first patch, without class token, which keras_vit does "
            "not have."
        )
    if (pooling == "map") != has_map or (pooling == "token" and not has_token):
        raise ValueError(
            f"The file's settings say pooling={pooling!r}, and its arrays have "
            f"{'' if has_map else 'no '}attention pooling and {'a' if has_token else 'no'} class "
            "token."
        )
    return pooling
