"""Assembles the run directory of a training and puts it into its place."""

import datetime
import json
import platform
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit import version
from keras_vit.data import ImageData, record
from keras_vit.model import VisionTransformer
from keras_vit.training import report, run
from keras_vit.training.progress import Watcher
from keras_vit.training.recipe import Recipe


class TrainingInterrupted(KeyboardInterrupt):
    """Raised after an interruption; its text says what was saved.

    Attributes:
        path: the directory of the run that was saved, or None.
    """

    def __init__(self, message: str, *, path: Path | None) -> None:
        super().__init__(message)
        self.path = path


def describe(
    model: VisionTransformer,
    data: ImageData,
    *,
    recipe: Recipe,
    seed: int,
    watcher: Watcher,
) -> dict[str, Any]:
    """Returns what config.json holds: all that made the model, and how it came out."""
    best = watcher.best
    return {
        "model": model.config.to_dict(),
        "recipe": recipe.to_dict(),
        "seed": seed,
        "data": {"source": data.source, "images": data.counts, "damaged": list(data.damaged)},
        "labels": list(data.labels),
        "result": {
            "epochs": len(watcher.history),
            "finished": len(watcher.history) == recipe.epochs,
            "best_epoch": best.epoch if best else None,
            "validation_accuracy": best.validation_accuracy if best else None,
        },
        "versions": {
            "keras_vit": version.__version__,
            "keras": keras.__version__,
            "tensorflow": tf.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write(
    stage: Path,
    model: VisionTransformer,
    data: ImageData,
    *,
    config: dict[str, Any],
    watcher: Watcher,
) -> None:
    """Writes the files of a run into a directory."""
    model.save(stage / run.MODEL)
    (stage / run.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (stage / run.LABELS).write_text("".join(f"{label}\n" for label in data.labels), "utf-8")
    report.write_history(watcher.history, stage / run.HISTORY)
    report.plot_curves(
        watcher.history, stage / run.CURVES, best_epoch=config["result"]["best_epoch"]
    )
    if not data.train.in_memory:
        record.write_splits(data, stage / run.SPLITS)
    elif len(data.test):
        png = tf.io.encode_png(data.test.images[0]).numpy()
        (stage / run.SAMPLE).write_bytes(png)


def publish(
    stage: Path, out: Path, *, model: VisionTransformer, config: dict[str, Any], finished: bool
) -> run.Run:
    """Puts the assembled run into its place: beside a whole one, if this one was interrupted.

    Raises:
        TrainingInterrupted: it was interrupted; the text says where it is.
    """
    interrupted_beside = not finished and run.is_run(out)
    place = out.with_name(f"{out.name}.interrupted") if interrupted_beside else out
    run.check_free(place, overwrite=True)
    run.publish(stage, place)
    if not finished:
        result = config["result"]
        raise TrainingInterrupted(
            f"Interrupted after epoch {result['epochs']} of {config['recipe']['epochs']}: "
            f"{str(place)!r} holds the model of epoch {result['best_epoch']}, the best so far.",
            path=place,
        )
    return run.Run(path=out, model=model, labels=tuple(config["labels"]), config=config)
