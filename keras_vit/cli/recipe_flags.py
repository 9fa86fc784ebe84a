"""The flags of `train` and `pretrain` that set single numbers of a recipe."""

import argparse
import dataclasses
from typing import TYPE_CHECKING

from keras_vit.cli import flags

if TYPE_CHECKING:
    from keras_vit.training import Recipe

# Flags that set the field of the same name of the recipe; --drop-path sets `drop_path_rate`.
_RECIPE_FLAGS = (
    *("batch_size", "learning_rate", "layer_decay", "weight_decay", "average", "sam_rho"),
    *("mixup", "cutmix", "balance", "patience"),
)
_MIXING = (
    (
        "mixup",
        flags.not_negative,
        "alpha of MixUp, which blends two images, such as 0.2; 0 for none",
    ),
    (
        "cutmix",
        flags.not_negative,
        "alpha of CutMix, which pastes a part of another image, such as 1; with --mixup each "
        "batch gets one of the two; 0 for none",
    ),
)


def add_schedule(
    group: argparse._ArgumentGroup,
    *,
    epochs: str,
    batch_size: str,
    learning_rate: str,
    patience: str = "0",
) -> None:
    """Adds `--steps`, `--epochs`, `--patience`, `--batch-size`, `--learning-rate` and others.

    Args:
        group: the group to add to.
        epochs: the default of `--epochs`, in words.
        batch_size: the default of `--batch-size`, in words.
        learning_rate: the default of `--learning-rate`, in words.
        patience: the default of `--patience`, in words.
    """
    _add_length(group, epochs=epochs, patience=patience)
    group.add_argument(
        "--batch-size",
        type=flags.count,
        metavar="N",
        help=f"images per step, over all devices (default: {batch_size})",
    )
    group.add_argument(
        "--learning-rate",
        type=flags.positive,
        metavar="X",
        help=f"peak learning rate, at the end of the warm-up (default: {learning_rate})",
    )
    group.add_argument(
        "--flip",
        action=argparse.BooleanOptionalAction,
        help="mirror half of the images left to right (default: yes, but not the digits); "
        "use --no-flip where left and right differ, as in writing",
    )
    group.add_argument(
        "--seed",
        type=flags.seed,
        default=0,
        metavar="N",
        help="random seed of fresh weights, and of the order and augmentation of images "
        "(default: 0)",
    )


def _add_length(group: argparse._ArgumentGroup, *, epochs: str, patience: str) -> None:
    """Adds how long the training is; the arguments are defaults, in words."""
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=flags.count,
        metavar="N",
        help="training steps in all, one batch each, instead of --epochs (default: by epochs)",
    )
    length.add_argument(
        "--epochs",
        type=flags.count,
        metavar="N",
        help="passes over the training images; with --resume, more than before continue the "
        f"training by the longer schedule (default: {epochs})",
    )
    group.add_argument(
        "--patience",
        type=flags.index,
        metavar="N",
        help="end the training early once the validation loss has not fallen for N epochs: the "
        "learning rate then falls to 0 within a third as many; 0 trains to the end (default: "
        f"{patience})",
    )


def add_regularization(group: argparse._ArgumentGroup, *, is_labelled: bool) -> None:
    """Adds `--weight-decay`, `--drop-path`, `--average`, `--sam-rho` and, of labels, the others.

    Args:
        group: the group to add to.
        is_labelled: whether there are targets that MixUp and CutMix can mix, and classes for
            `--balance`.
    """
    if is_labelled:
        group.add_argument(
            "--balance",
            action=argparse.BooleanOptionalAction,
            help="weigh the loss of each training image so that all classes count the same, for "
            "classes of very different size (default: the recipe's, which is no)",
        )
    rows = (
        (
            "weight-decay",
            flags.not_negative,
            "weight decay of the kernels, multiplied by the learning rate",
        ),
        (
            "drop-path",
            flags.share,
            "probability of skipping a branch of the last block (stochastic depth); it falls "
            "linearly to 0 at the first block",
        ),
        (
            "average",
            flags.share,
            "decay of a moving average of the weights, such as 0.9999; the average is evaluated "
            "and saved; 0 for none",
        ),
        (
            "sam-rho",
            flags.not_negative,
            "radius of sharpness-aware minimisation, such as 0.1, in twice the time; 0 for none",
        ),
        *(_MIXING if is_labelled else ()),
    )
    for name, kind, text in rows:
        group.add_argument(
            f"--{name}", type=kind, metavar="X", help=f"{text} (default: the recipe's)"
        )


def override_recipe(recipe: "Recipe", arguments: argparse.Namespace) -> "Recipe":
    """Returns the recipe with the fields that the flags set."""
    augmentation = recipe.augmentation
    if arguments.flip is not None:
        augmentation = dataclasses.replace(augmentation, flip=arguments.flip)
    if arguments.epochs or arguments.steps:
        recipe = dataclasses.replace(recipe, epochs=arguments.epochs, steps=arguments.steps)
    values = {name: getattr(arguments, name, None) for name in _RECIPE_FLAGS}
    values["drop_path_rate"] = arguments.drop_path
    fields = {name: value for name, value in values.items() if value is not None}
    for name in ("average", "patience"):
        if fields.get(name) == 0:
            fields[name] = None
    model = {**recipe.model, **dict(arguments.set)}
    if isinstance(model.get("dropout_rate"), int | float):
        fields["dropout_rate"] = model.pop("dropout_rate")
    return dataclasses.replace(recipe, augmentation=augmentation, model=model, **fields)
