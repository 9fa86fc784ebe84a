"""Flags that several commands share, and the values they take."""

import argparse
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_vit import ViTConfig
    from keras_vit.training import Execution, Recipe


def count(text: str) -> int:
    """Reads a whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def index(text: str) -> int:
    """Reads a whole number from zero."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def seed(text: str) -> int:
    """Reads a seed: NumPy takes 32 bits."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def sha256(text: str) -> str:
    """Reads a SHA-256."""
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 64 hexadecimal digits")
    return text.lower()


def positive(text: str) -> float:
    """Reads a number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def not_negative(text: str) -> float:
    """Reads a number from zero."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number


def share(text: str) -> float:
    """Reads a number from zero, below one."""
    if not_negative(text) >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0, below 1")
    return float(text)


def fraction(text: str) -> float:
    """Reads a number above zero, at most one."""
    if positive(text) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most 1")
    return float(text)


def words(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns what reads some of these words, with commas between."""

    def read(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(allowed):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list such as {','.join(allowed[:2])}, of {', '.join(allowed)}"
            )
        return found

    return read


def setting(text: str) -> tuple[str, Any]:
    """Reads "name=value": true, false, none, a number, a word, or several with commas between."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting such as pooling=avg")
    parts = tuple(map(_plain, value.split(",")))
    return name, parts if len(parts) > 1 else parts[0]


def size(text: str) -> tuple[int, int]:
    """Reads "64" or "48x64" as (height, width) in pixels."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64 or 48x64")
    return int(sides[0]), int(sides[-1])


# What a flag is called here, and the field of the recipe that it changes.
_FIELDS = {
    "batch_size": "batch_size",
    "learning_rate": "learning_rate",
    "layer_decay": "layer_decay",
    "weight_decay": "weight_decay",
    "drop_path": "drop_path_rate",
    "average": "average",
    "sam_rho": "sam_rho",
    "mixup": "mixup",
    "cutmix": "cutmix",
}


def add_needed(parser: argparse.ArgumentParser) -> None:
    """Adds `--data` and `--out`."""
    group = parser.add_argument_group("needed")
    group.add_argument(
        "--data", required=True, metavar="PATH", help='a folder, "tfds:NAME" or "digits"'
    )
    group.add_argument("--out", required=True, metavar="RUN", help="the run directory to write")


def add_sizes(group: argparse._ArgumentGroup) -> None:
    """Adds `--model`, `--image-size`, `--patch-size` and `--set`."""
    group.add_argument(
        "--model",
        metavar="NAME",
        help='"tiny", "digits", "digits-hybrid", or a published variant such as Ti/16, S/16, B/16 '
        "(default: for the digits digits-hybrid, or digits without labels; otherwise tiny)",
    )
    group.add_argument(
        "--image-size",
        type=size,
        metavar="N or HxW",
        help="size that images are brought to, in pixels (default: the recipe's; otherwise 16 for "
        "digits, 64 for tiny, 224 for the variants)",
    )
    group.add_argument(
        "--patch-size",
        type=count,
        metavar="N",
        help="side of a patch in pixels, in a hybrid of the cells that its convolutions leave; "
        "must divide the image (default: the model's own, 4 for digits, 8 for tiny)",
    )
    group.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of ViTConfig for fresh weights, such as pooling=avg, class_token=false, "
        "position_embedding=sincos_2d or layer_scale=1e-4; may be repeated (default: the recipe's, "
        "otherwise the model's own)",
    )


def add_length(group: argparse._ArgumentGroup, *, epochs: str) -> None:
    """Adds `--steps` and `--epochs`.

    Args:
        group: where to.
        epochs: the default of `--epochs`, in words.
    """
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=count,
        metavar="N",
        help="batches in all, instead of --epochs (default: by epochs)",
    )
    length.add_argument(
        "--epochs",
        type=count,
        metavar="N",
        help=f"passes over the training images (default: {epochs})",
    )


def add_numbers(group: argparse._ArgumentGroup, *, batch: str, rate: str) -> None:
    """Adds `--batch-size`, `--learning-rate`, `--flip` and `--seed`.

    Args:
        group: where to.
        batch: the default of `--batch-size`, in words.
        rate: that of `--learning-rate`.
    """
    group.add_argument(
        "--batch-size",
        type=count,
        metavar="N",
        help=f"images in a step (default: {batch})",
    )
    group.add_argument(
        "--learning-rate",
        type=positive,
        metavar="X",
        help=f"the highest learning rate, after the warm-up (default: {rate})",
    )
    group.add_argument(
        "--flip",
        action=argparse.BooleanOptionalAction,
        help="mirror half of the images left to right (default: yes, but not the digits); "
        "use --no-flip where left and right differ, as in writing",
    )
    group.add_argument(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="decides fresh weights, order and variation of the images (default: 0)",
    )


def add_regularization(group: argparse._ArgumentGroup, *, is_labelled: bool) -> None:
    """Adds `--weight-decay`, `--drop-path`, `--average`, `--sam-rho`, `--mixup` and `--cutmix`.

    Args:
        group: where to.
        is_labelled: whether there are targets that the last two can mix.
    """
    rows: list[tuple[str, Callable[[str], float], str]] = [
        ("weight-decay", not_negative, "decay of the kernels, times the learning rate"),
        ("drop-path", share, "probability that the last block is left out of a step"),
        (
            "average",
            share,
            "decay of a moving average of the weights, such as 0.9999, that is measured and saved "
            "in their place; 0 for none",
        ),
        (
            "sam-rho",
            not_negative,
            "radius of sharpness-aware minimisation, such as 0.1, which takes twice the time; 0 "
            "for none",
        ),
    ]
    if is_labelled:
        rows += [
            ("mixup", not_negative, "alpha of blending two images, such as 0.2; 0 for none"),
            (
                "cutmix",
                not_negative,
                "alpha of pasting a part of another image, such as 1; with --mixup one or the "
                "other; 0 for none",
            ),
        ]
    for name, kind, text in rows:
        group.add_argument(
            f"--{name}", type=kind, metavar="X", help=f"{text} (default: the recipe's)"
        )


def add_execution(group: argparse._ArgumentGroup) -> None:
    """Adds `--strategy`, `--precision`, what saves memory or time, and `--checkpoint-steps`."""
    group.add_argument(
        "--strategy",
        choices=("auto", "none", "mirrored", "multi_worker", "tpu"),
        default="auto",
        help="devices: one, all of this machine, the machines of TF_CONFIG, a TPU; the same is "
        "learnt on all of them (default: auto, whichever is there)",
    )
    group.add_argument(
        "--precision",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
        default="float32",
        help="what the layers compute in; weights stay float32 (default: float32)",
    )
    group.add_argument(
        "--accumulate",
        type=count,
        default=1,
        metavar="N",
        help="cut each batch into N parts, one after another, to save memory (default: 1)",
    )
    group.add_argument(
        "--remat",
        action=argparse.BooleanOptionalAction,
        help="compute the blocks anew for the gradient, to save memory; the same numbers, a fifth "
        "more time (default: as the model says, a fresh one no)",
    )
    group.add_argument(
        "--xla",
        action=argparse.BooleanOptionalAction,
        help="compile forward and backward pass with XLA (default: on GPUs)",
    )
    group.add_argument(
        "--checkpoint-steps",
        type=count,
        default=1000,
        metavar="N",
        help="steps between checkpoints, besides one after each epoch (default: 1000)",
    )


def add_existing(parser: argparse.ArgumentParser) -> None:
    """Adds `--strict`, `--overwrite` and `--resume`."""
    parser.add_argument(
        "--strict", action="store_true", help="stop at damaged images (default: leave them out)"
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--overwrite",
        dest="existing",
        action="store_const",
        const="overwrite",
        default="refuse",
        help="replace the run at --out, once the new one is complete (default: refuse)",
    )
    existing.add_argument(
        "--resume",
        dest="existing",
        action="store_const",
        const="resume",
        help="go on with the unfinished training of this --out; start it if there is none "
        "(default: refuse)",
    )


def execution(arguments: argparse.Namespace) -> "Execution":
    """Returns what the flags of `add_execution` say."""
    from keras_vit import training

    return training.Execution(
        strategy=arguments.strategy,
        precision=arguments.precision,
        accumulate=arguments.accumulate,
        remat=arguments.remat,
        xla="auto" if arguments.xla is None else arguments.xla,
        checkpoint_steps=arguments.checkpoint_steps,
    )


def model_config(
    arguments: argparse.Namespace, *, image_size: tuple[int, int] | None, default: str
) -> "ViTConfig":
    """Returns the config that the flags of `add_sizes` name, for images of this size.

    Args:
        arguments: the command line's.
        image_size: (height, width) in pixels; None for the model's own.
        default: the model for the digits, where none is named.
    """
    from keras_vit import training

    name = arguments.model or (default if arguments.data == "digits" else "tiny")
    return training.model_config(name, image_size=image_size, patch_size=arguments.patch_size)


def changed(recipe: "Recipe", arguments: argparse.Namespace) -> "Recipe":
    """Returns a recipe with the numbers that the flags give."""
    augmentation = recipe.augmentation
    if arguments.flip is not None:
        augmentation = dataclasses.replace(augmentation, flip=arguments.flip)
    if arguments.epochs or arguments.steps:
        recipe = dataclasses.replace(recipe, epochs=arguments.epochs, steps=arguments.steps)
    asked = {field: getattr(arguments, flag, None) for flag, field in _FIELDS.items()}
    given = {field: value for field, value in asked.items() if value is not None}
    if given.get("average") == 0:
        given["average"] = None
    model = {**recipe.model, **dict(arguments.set)}
    if isinstance(model.get("dropout_rate"), int | float):
        given["dropout_rate"] = model.pop("dropout_rate")
    return dataclasses.replace(recipe, augmentation=augmentation, model=model, **given)


def _plain(text: str) -> bool | int | float | str | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
