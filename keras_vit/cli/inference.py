"""The model that `predict` and `evaluate` run: its source, its precision, its views of an image."""

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from keras_vit.cli import flags

if TYPE_CHECKING:
    from keras_vit.data import Views
    from keras_vit.training import OpenedModel


def add_inference(parser: argparse.ArgumentParser) -> None:
    """Adds `--precision` and `--tta`."""
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype that the model computes in; bfloat16 is faster on processors that have units "
        "for it, slower on all others (default: float32)",
    )
    parser.add_argument(
        "--tta",
        action="store_true",
        help="test-time augmentation: average the probabilities of 7 views of each image, the "
        "whole and crops at two scales, or of 14 where the run's recipe mirrors images; it takes "
        "as many times the time (default: the whole image alone)",
    )


def open_model(arguments: argparse.Namespace) -> "OpenedModel":
    """Opens the model of the arguments in their precision."""
    from keras_vit import evaluation

    opened = flags.open_model(arguments.source)
    if arguments.precision == "bfloat16" and not evaluation.has_bfloat16_units():
        print(
            "keras-vit: this processor has no units for bfloat16; float32 is faster on it.",
            file=sys.stderr,
        )
    model = evaluation.in_precision(opened.model, arguments.precision)
    return dataclasses.replace(opened, model=model)


def views(opened: "OpenedModel", arguments: argparse.Namespace) -> "Views | None":
    """Returns the views of `--tta`; they are mirrored where the run's training mirrored images."""
    from keras_vit.data import Views

    if not arguments.tta:
        return None
    augmentation = opened.recipe.get("augmentation")
    return Views(flip=isinstance(augmentation, dict) and augmentation.get("flip") is True)
