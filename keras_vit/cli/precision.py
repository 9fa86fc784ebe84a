"""The flag `--precision`, and the run whose model computes so."""

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_vit.training import Run


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--precision`."""
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what the model computes in: bfloat16 is faster on processors that have units for it, "
        "slower on all others (default: float32)",
    )


def load_run(arguments: argparse.Namespace) -> "Run":
    """Opens the run, its model in the precision asked for."""
    from keras_vit import evaluation, training

    opened = training.load_run(arguments.directory)
    if arguments.precision == "bfloat16" and not evaluation.has_bfloat16_units():
        print(
            "keras-vit: this processor has no units for bfloat16; float32 is faster on it.",
            file=sys.stderr,
        )
    model = evaluation.in_precision(opened.model, arguments.precision)
    return dataclasses.replace(opened, model=model)
