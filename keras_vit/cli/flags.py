"""The flags that `train` and `pretrain` share, and what they mean."""

import argparse
import dataclasses
from typing import TYPE_CHECKING

from keras_vit.cli import values

if TYPE_CHECKING:
    from keras_vit import ViTConfig
    from keras_vit.training import Execution, Recipe


def add_needed(parser: argparse.ArgumentParser) -> None:
    """Adds `--data` and `--out`."""
    group = parser.add_argument_group("needed")
    group.add_argument(
        "--data", required=True, metavar="PATH", help='a folder, "tfds:NAME" or "digits"'
    )
    group.add_argument("--out", required=True, metavar="RUN", help="the run directory to write")


def add_sizes(group: argparse._ArgumentGroup) -> None:
    """Adds `--model`, `--image-size` and `--patch-size`."""
    group.add_argument(
        "--model",
        metavar="NAME",
        help='"tiny", "digits", or a published variant such as Ti/16, S/16, B/16 '
        "(default: digits for the digits, otherwise tiny)",
    )
    group.add_argument(
        "--image-size",
        type=values.size,
        metavar="N or HxW",
        help="size that images are brought to, in pixels (default: the recipe's; otherwise 16 for "
        "digits, 64 for tiny, 224 for the variants)",
    )
    group.add_argument(
        "--patch-size",
        type=values.count,
        metavar="N",
        help="side of a patch in pixels; must divide the image (default: 4 for digits, 8 for tiny, "
        "the variant's own)",
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
        type=values.count,
        metavar="N",
        help="batches in all, instead of --epochs (default: by epochs)",
    )
    length.add_argument(
        "--epochs",
        type=values.count,
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
        type=values.count,
        metavar="N",
        help=f"images in a step (default: {batch})",
    )
    group.add_argument(
        "--learning-rate",
        type=values.positive,
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
        type=values.seed,
        default=0,
        metavar="N",
        help="decides fresh weights, order and variation of the images (default: 0)",
    )


def add_execution(group: argparse._ArgumentGroup) -> None:
    """Adds `--strategy`, `--precision`, `--accumulate` and `--checkpoint-steps`."""
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
        type=values.count,
        default=1,
        metavar="N",
        help="cut each batch into N parts, one after another, to save memory (default: 1)",
    )
    group.add_argument(
        "--checkpoint-steps",
        type=values.count,
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
        checkpoint_steps=arguments.checkpoint_steps,
    )


def model_config(
    arguments: argparse.Namespace, *, image_size: tuple[int, int] | None
) -> "ViTConfig":
    """Returns the config that the flags of `add_sizes` name, for images of this size."""
    from keras_vit import training

    name = arguments.model or ("digits" if arguments.data == "digits" else "tiny")
    return training.model_config(name, image_size=image_size, patch_size=arguments.patch_size)


def changed(recipe: "Recipe", arguments: argparse.Namespace) -> "Recipe":
    """Returns a recipe with the numbers that the flags give."""
    augmentation = recipe.augmentation
    if arguments.flip is not None:
        augmentation = dataclasses.replace(augmentation, flip=arguments.flip)
    if arguments.epochs or arguments.steps:
        recipe = dataclasses.replace(recipe, epochs=arguments.epochs, steps=arguments.steps)
    asked = {
        name: getattr(arguments, name, None)
        for name in ("batch_size", "learning_rate", "layer_decay")
    }
    return dataclasses.replace(
        recipe,
        augmentation=augmentation,
        **{name: value for name, value in asked.items() if value is not None},
    )
