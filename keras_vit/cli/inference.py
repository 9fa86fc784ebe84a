"""The model that `predict` and `evaluate` run: its source, its precision, its views of an image."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from keras_vit.cli import flags, output

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
        "for it, slower on all others; an exported model has its own (default: float32)",
    )
    parser.add_argument(
        "--tta",
        action="store_true",
        help="test-time augmentation: average the probabilities of 7 views of each image, the "
        "whole and crops at two scales, or of 14 where the run's recipe mirrors images; it takes "
        "as many times the time (default: the whole image alone)",
    )


def open_model(arguments: argparse.Namespace) -> "OpenedModel":
    """Opens the model of the arguments in their precision, or an exported one."""
    from keras_vit import evaluation
    from keras_vit.model import VisionTransformer

    if flags.is_exported(arguments.source):
        return _open_exported(arguments)
    opened = flags.open_model(arguments.source)
    if arguments.precision == "bfloat16" and not isinstance(opened.model, VisionTransformer):
        raise ValueError(
            f"Only a VisionTransformer alone runs in bfloat16; leave --precision out. Received: "
            f"{opened.source}, a model with other layers."
        )
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


def _open_exported(arguments: argparse.Namespace) -> "OpenedModel":
    """Opens an exported model, whose precision and outputs are as they are."""
    if arguments.precision != "float32":
        raise ValueError(
            "An exported model computes in the precision that it was exported in; leave "
            f"--precision out. Received: {arguments.source}."
        )
    if getattr(arguments, "more", False):
        raise ValueError(
            "--more measures features beside the answers, which are of the run or the model; give "
            f"evaluate that one. Received: {arguments.source}, an exported model."
        )
    from keras_vit import preprocessing, training
    from keras_vit.exporting import opening

    opened = opening.open_artefact(Path(arguments.source))
    if not opened.is_recorded:
        output.say(
            f"keras-vit: {arguments.source} has no verification.json beside it: whether it is as "
            "it was exported is not known.",
            file=sys.stderr,
        )
    labels = identifiers = opened.about.labels
    if len(labels) in preprocessing.LABELLED:
        published = preprocessing.class_labels(len(labels))
        if labels == tuple(name for _, name in published):
            identifiers = tuple(identifier for identifier, _ in published)
    return training.OpenedModel(
        source=arguments.source,
        model=opened.model,
        labels=labels,
        identifiers=identifiers,
        states_labels=True,
        exported=True,
    )
