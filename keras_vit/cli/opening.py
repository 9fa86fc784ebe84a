"""Opens what the commands are given: images, a run directory, the file of a model."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich.progress

from keras_vit.cli import output

if TYPE_CHECKING:
    import keras

    from keras_vit.data import ImageData
    from keras_vit.training import Run


def load_data(
    path: str,
    *,
    strict: bool,
    json: bool,
    labels: Sequence[str] | None = None,
    labelled: bool = True,
) -> "ImageData":
    """Loads the digits or a folder, and prints what is in it.

    Args:
        path: "digits", "tfds:NAME", or a folder.
        strict: whether damaged images are an error.
        json: whether machines read.
        labels: the known classes, to load a folder as test images alone.
        labelled: whether a folder must have class folders.
    """
    from keras_vit import data

    is_hidden = json or not output.is_terminal()
    with rich.progress.Progress(transient=True, disable=is_hidden) as bar:
        task = bar.add_task("looking at the images", total=None)

        def on_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if labels is None:
            images = data.load_data(path, labelled=labelled, strict=strict, on_progress=on_progress)
        else:
            images = data.load_test_folder(
                path, labels=labels, strict=strict, on_progress=on_progress
            )
    output.show_data(images, json=json)
    return images


def open_model(path: str) -> "tuple[keras.Model, Run | None]":
    """Opens the model of a run directory, with its run, or that of a .keras file, without."""
    from keras_vit import training

    if path.endswith(".keras") and not Path(path).is_dir():
        return training.open_model(path), None
    run = training.Run.load(path)
    return run.model, run


def open_run(arguments: argparse.Namespace) -> "Run":
    """Opens the run of the arguments, its model in their precision."""
    from keras_vit import evaluation, training

    run = training.Run.load(arguments.directory)
    if arguments.precision == "bfloat16" and not evaluation.has_bfloat16_units():
        print(
            "keras-vit: this processor has no units for bfloat16; float32 is faster on it.",
            file=sys.stderr,
        )
    return dataclasses.replace(run, model=evaluation.in_precision(run.model, arguments.precision))
