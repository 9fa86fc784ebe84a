"""The folder of a training that goes on: what it needs to be resumed, and what one looks at."""

import contextlib
import json
import math
import re
import shutil
import time
from pathlib import Path
from typing import Any

import keras

from keras_vit import atomic
from keras_vit.training import report, run
from keras_vit.training.checkpoints import Checkpoints, DamagedError, check_archive
from keras_vit.training.progress import EpochDone

SETTINGS = "settings.json"
SECONDS_BETWEEN_CURVES = 30
_BEST = "best-{epoch:05d}.keras"
_BEST_PATTERN = re.compile(r"best-\d{5,}\.keras")
_OURS = re.compile(
    rf"\..*|checkpoint-\d+\.npz|{_BEST_PATTERN.pattern}|"
    + "|".join(map(re.escape, (SETTINGS, *run.FILES)))
)
# What an error of the disk leaves here.
_KEPT = {"kept": "the checkpoints are kept", "again": "resume"}


class Unfinished:
    """`OUT.unfinished`, beside the run directory that it becomes; one for each worker.

    Args:
        out: the run directory that will be made.
        worker: which of the workers this is, from 0.
        keep: how many checkpoints are kept.
    """

    def __init__(self, out: Path, *, worker: int = 0, keep: int = 3) -> None:
        self.path = run.unfinished_path(out, worker=worker)
        self._keep = keep
        self._drawn = -math.inf

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in the folder, which must be there."""
        return Checkpoints(self.path, keep=self._keep)

    def exists(self) -> bool:
        """Whether there is a training to resume."""
        return (self.path / SETTINGS).is_file() and bool(self.checkpoints.steps())

    def check_free(self, *, existing: run.Existing) -> None:
        """Raises a FileExistsError where something would be lost that nobody gave up."""
        found = sorted(self.path.iterdir()) if self.path.is_dir() else []
        foreign = [entry.name for entry in found if not _OURS.fullmatch(entry.name)]
        if foreign or self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise FileExistsError(
                f"{str(self.path)!r} holds other things than a training "
                f"({(foreign or ['no folder'])[0]!r}); choose another place for the run."
            )
        if existing == "refuse" and self.exists():
            raise FileExistsError(
                f"{str(self.path)!r} holds an unfinished training; resume it, overwrite it, or "
                "choose another place."
            )

    def start(self, settings: dict[str, Any]) -> None:
        """Makes the folder anew for a training with these settings."""
        self.retire()
        shutil.rmtree(self.path, ignore_errors=True)
        with atomic.telling(self.path, kept="nothing was begun"):
            self.path.mkdir(parents=True, exist_ok=True)
        with atomic.whole_file(self.path / SETTINGS, kept="nothing was begun") as temporary:
            temporary.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")

    def check(self, settings: dict[str, Any]) -> None:
        """Raises a ValueError unless the folder holds a training with these settings."""
        check_settings(self.path / SETTINGS, settings)

    def remove_remains(self) -> None:
        """Removes what a process was writing when it was killed; nobody may write there now."""
        for entry in self.path.glob(".*"):
            shutil.rmtree(entry, ignore_errors=True)

    def best_model(self, epoch: int) -> Path:
        """Returns the file of the model of an epoch that was the best."""
        return self.path / _BEST.format(epoch=epoch)

    def save_best(self, model: keras.Model, *, epoch: int) -> None:
        """Saves the model of the best epoch; the one before goes with `remove_old`."""
        with atomic.whole_file(self.best_model(epoch), **_KEPT) as temporary:
            model.save(temporary)

    def has_best(self, epoch: int) -> bool:
        """Whether the model of an epoch that was the best is there and whole."""
        try:
            check_archive(self.best_model(epoch))
        except DamagedError:
            return False
        return True

    def remove_old(self, *, best_epochs: set[int]) -> None:
        """Removes models of epochs that were the best for none of the checkpoints."""
        kept = set(map(self.best_model, best_epochs))
        for file in self.path.iterdir():
            if _BEST_PATTERN.fullmatch(file.name) and file not in kept:
                file.unlink(missing_ok=True)

    def show(self, history: list[EpochDone], *, best_epoch: int, is_last: bool) -> None:
        """Brings the table up to date, and the curves, which take longer, every half minute."""
        with atomic.whole_file(self.path / run.HISTORY, **_KEPT) as temporary:
            report.write_history(history, temporary)
        now = time.monotonic()
        if now < self._drawn + SECONDS_BETWEEN_CURVES and not is_last:
            return
        self._drawn = now
        with atomic.whole_file(self.path / run.CURVES, **_KEPT) as temporary:
            report.plot_curves(history, temporary, best_epoch=best_epoch)

    def retire(self) -> None:
        """Takes away what makes the folder a training that can be resumed; in one step."""
        with contextlib.suppress(OSError):
            (self.path / SETTINGS).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder, after its run is complete."""
        self.retire()
        shutil.rmtree(self.path, ignore_errors=True)


def check_settings(file: Path, settings: dict[str, Any]) -> None:
    """Raises a ValueError unless a training or run was started with these settings.

    Args:
        file: `SETTINGS` of an unfinished training, or config.json of a run.
        settings: what is asked for now.
    """
    try:
        found = _flat(dict(json.loads(file.read_text("utf-8"))))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{str(file)!r} is damaged, so that nobody knows what was trained; overwrite it, or "
            "choose another place."
        ) from error
    for name, value in _flat(json.loads(json.dumps(settings))).items():
        if found.get(name) != value:
            raise ValueError(
                f"The training in {str(file.parent)!r} was started with {name}={found.get(name)!r},"
                f" not {value!r}; resume it with the same settings, or delete the folder."
            )


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, so that a difference has a name."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
