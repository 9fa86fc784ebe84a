"""The command that comes after another one, as words that `output.say_next` prints."""

import argparse
import contextlib
import csv
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_vit.training import Run

Words = tuple[object, ...]


def after_training(run: "Run") -> Words:
    """Returns what to do with a run: predict an image that it was not trained on, if there is one.

    A run without classifier goes on to one, or where there are no labels is explained.
    """
    image = _image_of(run)
    if run.config.get("objective") != "masked-patches":
        return ("evaluate", run.path) if image is None else ("predict", run.path, image)
    if run.labels or image is None:
        new = run.path.with_name(f"{run.path.name}-classifier")
        return "train", "--data", run.config["data"]["source"], "--out", new, "--weights", run.path
    return "explain", run.path, image, "--out", "seen"


def after_plan(arguments: argparse.Namespace) -> Words:
    """Returns the training of a plan: its own words, to a folder beside the data without one."""
    words = shlex.split(arguments.command)[1:]
    kept = [word for word in words if not ("--plan".startswith(word) and len(word) > len("--p"))]
    if arguments.out is None:
        name = Path(arguments.data.rpartition(":")[2]).resolve().name or "new"
        kept += ["--out", f"{name}-run"]
    return tuple(kept)


def is_typed(path: object) -> bool:
    """Whether a name can be typed as it is printed: it has no control or unknown characters."""
    return str(path).isprintable()


def _image_of(run: "Run") -> Path | None:
    """Returns an image that the run was not trained on, None if there is none in a file."""
    if (run.path / "sample.png").is_file():
        return run.path / "sample.png"
    with contextlib.suppress(OSError, csv.Error, KeyError):
        splits = (run.path / "splits.csv").open(encoding="utf-8", errors="surrogateescape")
        with splits as stream:
            unseen = (row for row in csv.DictReader(stream) if row["split"] != "train")
            files = (Path(run.config["data"]["source"], row["path"]) for row in unseen)
            return next(filter(is_typed, files), None)
    return None
