"""The run directory: everything that one training leaves behind, there whole or not at all."""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterator
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


@contextlib.contextmanager
def staging_directory(out: Path) -> Iterator[Path]:
    """Makes a hidden directory beside `out` to assemble a run in; it is removed at the end.

    Beside, because only within one file system a directory can be renamed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    stage = _hidden_beside(out)
    stage.mkdir()
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def publish(stage: Path, out: Path) -> None:
    """Renames an assembled run into place; a run that is there goes after, never before.

    Everything is on the disk before the first rename.
    """
    atomic.sync_tree(stage)
    if not out.exists():
        stage.rename(out)
    else:
        old = _hidden_beside(out)
        try:
            out.rename(old)
            stage.rename(out)
        except BaseException:
            if not out.exists():
                old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    atomic.sync_folder(out.parent)


def _hidden_beside(out: Path) -> Path:
    # Not `tempfile`, whose directories none but their owner may enter.
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}")
