"""The run directory: everything that one training leaves behind, there whole or not at all."""

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Literal

import keras

from keras_vit import atomic
from keras_vit.data import ImageData, load_data, record

# What a run directory may hold, in the order of writing; the last two are evaluation's.
MODEL, CONFIG, LABELS, SPLITS = "model.keras", "config.json", "labels.txt", "splits.csv"
HISTORY, CURVES, SAMPLE = "history.csv", "curves.png", "sample.png"
RECONSTRUCTIONS, ADAPTER = "reconstructions.png", "adapter.safetensors"
METRICS, CONFUSION, EVENTS = "metrics.json", "confusion.png", "tensorboard"
_TRAINED = (MODEL, CONFIG, LABELS, SPLITS, HISTORY, CURVES, SAMPLE, RECONSTRUCTIONS, ADAPTER)
FILES = (*_TRAINED, EVENTS, METRICS, CONFUSION)

# What to do where a run or an unfinished training is already.
Existing = Literal["refuse", "overwrite", "resume"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A finished run.

    Attributes:
        path: the run directory.
        model: the model of the best epoch.
        labels: the name of each class, in the order of the model's outputs; of a run without
            labels, of what the images show, or none.
        config: what made the run: model, recipe, data, seed, versions, and its result.
    """

    path: Path
    model: keras.Model
    labels: tuple[str, ...]
    config: dict[str, Any]

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels that the model takes."""
        return tuple(self.model.input_shape[1:3])


def load_run(path: str | os.PathLike[str]) -> Run:
    """Opens a run directory.

    Example:
        >>> load_run("no-such-run")
        Traceback (most recent call last):
        FileNotFoundError: There is no run directory 'no-such-run'; check the path.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: the directory does not hold a run.
    """
    directory = Path(path)
    if not directory.exists() and atomic.was_cut_off(unfinished_path(directory), directory):
        with hold(directory):
            restore(directory)
    if not directory.exists():
        raise FileNotFoundError(f"There is no run directory {str(path)!r}; check the path.")
    if not is_run(directory):
        raise ValueError(
            f"{str(path)!r} is not a run directory: it lacks {MODEL} or {CONFIG}; "
            "give the --out of a training."
        )
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    return Run(
        path=directory,
        model=keras.saving.load_model(directory / MODEL, compile=False),
        labels=tuple(config["labels"]),
        config=config,
    )


def load_run_data(run: Run) -> ImageData:
    """Returns the images that a run was made of, in the splits that it was made with.

    Raises:
        FileNotFoundError: images have gone.
        ImportError: the run is one of the digits, and scikit-learn is not installed.
        ValueError: the images were in memory alone.
    """
    source = run.config["data"]["source"]
    if (run.path / SPLITS).is_file():
        return record.read_splits(run.path / SPLITS, root=source, labels=run.labels)
    if source != "digits" and not source.startswith("tfds:"):
        raise ValueError(
            f"The images of the run {str(run.path)!r} were in memory and are gone; "
            "name a folder to evaluate on."
        )
    return load_data(source)


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return (path / MODEL).is_file() and (path / CONFIG).is_file()


def check_free(out: str | os.PathLike[str], *, existing: Existing) -> None:
    """Raises an error unless a run may be written to `out` without losing anything.

    Example:
        >>> check_free("new-run", existing="refuse")

    Raises:
        FileExistsError: something is there that may not be replaced.
    """
    out = Path(out)
    if out.is_mount():
        raise FileExistsError(
            f"A file system is mounted at {str(out)!r}, so that nothing can be renamed to it; give "
            "a folder inside it."
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise FileExistsError(f"{str(out)!r} is not a folder; choose another place for the run.")
    if not out.exists() or not any(out.iterdir()):
        return
    foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in FILES)
    if foreign or not is_run(out):
        found = foreign[0] if foreign else "no whole run"
        raise FileExistsError(
            f"The folder {str(out)!r} holds other things than a run ({found!r}); "
            "choose another place for the run."
        )
    if existing != "overwrite":
        raise FileExistsError(
            f"{str(out)!r} already holds a run; choose another place, or ask to overwrite it."
        )


def unfinished_path(out: Path, *, worker: int = 0) -> Path:
    """Returns the folder beside a run directory in which a worker trains towards it."""
    return out.with_name(f"{out.name}.unfinished" + (f"-{worker}" if worker else ""))


def hold(out: Path, *, worker: int = 0) -> contextlib.AbstractContextManager[None]:
    """Keeps every other training away from a run directory and its unfinished folder.

    Raises:
        FileExistsError: another one is at work there; the text says who.
    """
    return atomic.hold(_lock(out, worker), what=_what(out))


def check_unheld(out: Path, *, worker: int = 0) -> None:
    """Raises a FileExistsError if a training to this run directory is at work."""
    atomic.check_unheld(_lock(out, worker), what=_what(out))


def restore(out: Path) -> None:
    """Puts back the run that was there before one that was killed while it took its place."""
    atomic.restore(unfinished_path(out), out)


def _lock(out: Path, worker: int) -> Path:
    folder = unfinished_path(out, worker=worker)
    return folder.with_name(f"{folder.name}.lock")


def _what(out: Path) -> str:
    return f"training to {str(out)!r}"
