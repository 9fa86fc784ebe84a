"""The flag `--log` of `train` and `pretrain`: where else the numbers of a training go."""

import argparse
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from keras_vit.cli import flags

if TYPE_CHECKING:
    from keras_vit.training import Event, Recipe

_ALWAYS = ("tensorboard", "csv")
_LOGS = (*_ALWAYS, "mlflow", "wandb")


def add_log(group: argparse._ArgumentGroup) -> None:
    """Adds `--log`."""
    group.add_argument(
        "--log",
        type=flags.words(_LOGS),
        default=_ALWAYS,
        metavar="LIST",
        help="where the numbers of each epoch go, with commas between: tensorboard and csv, which "
        "are always written, mlflow, wandb; the last two take their usual environment variables, "
        "such as MLFLOW_TRACKING_URI and WANDB_MODE (default: tensorboard,csv)",
    )


def trackers(
    arguments: argparse.Namespace, recipe: "Recipe"
) -> "contextlib.AbstractContextManager[Callable[[Event], None]]":
    """Returns what takes the events of the training of the arguments."""
    from keras_vit import training

    names = [name for name in arguments.log if name not in _ALWAYS and training.is_first_worker()]
    settings = {
        "data": arguments.data,
        "model": arguments.model,
        "seed": arguments.seed,
        "recipe": recipe.to_dict(),
    }
    return training.Trackers(names, out=arguments.out, settings=settings)
