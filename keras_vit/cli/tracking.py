"""The flag `--log` of `train` and `pretrain`: where else the numbers of a training go."""

import argparse
from typing import TYPE_CHECKING

from keras_vit.cli import flags

if TYPE_CHECKING:
    from keras_vit.training import Recipe, Trackers

_ALWAYS = ("tensorboard", "csv")


def add_log(group: argparse._ArgumentGroup) -> None:
    """Adds `--log`."""
    help = (
        "where the numbers of each epoch go, with commas between: tensorboard and csv, which are "
        "always written, mlflow, wandb; the last two take their usual environment variables, such "
        "as MLFLOW_TRACKING_URI and WANDB_MODE (default: tensorboard,csv)"
    )
    kind = flags.words((*_ALWAYS, "mlflow", "wandb"))
    group.add_argument("--log", type=kind, default=_ALWAYS, metavar="LIST", help=help)


def trackers(arguments: argparse.Namespace, recipe: "Recipe") -> "Trackers":
    """Returns what takes the events of the training of the arguments."""
    from keras_vit import training

    names = [name for name in arguments.log if name not in _ALWAYS and training.is_first_worker()]
    settings = {name: getattr(arguments, name) for name in ("data", "model", "seed")}
    settings["recipe"] = recipe.to_dict()
    return training.Trackers(names, out=arguments.out, settings=settings)
