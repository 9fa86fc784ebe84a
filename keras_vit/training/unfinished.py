"""The folder of a training that goes on: what it needs to be resumed, and what one looks at."""

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
from keras_vit.training.checkpoints import Checkpoints
from keras_vit.training.progress import EpochDone

SETTINGS = "settings.json"
SECONDS_BETWEEN_CURVES = 30
_BEST = "best-{epoch:05d}.keras"
_BEST_PATTERN = re.compile(r"best-\d{5,}\.keras")


class Unfinished:
    """`OUT.unfinished`, beside the run directory that it becomes; one for each worker.

    Args:
        out: the run directory that will be made.
        worker: which of the workers this is, from 0.
        keep: how many checkpoints are kept.
    """

    def __init__(self, out: Path, *, worker: int = 0, keep: int = 3) -> None:
        suffix = f"-{worker}" if worker else ""
        self.path = out.with_name(f"{out.name}.unfinished{suffix}")
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
        """Raises a FileExistsError if there is a training to resume and nobody asked."""
        if existing == "refuse" and self.exists():
            raise FileExistsError(
                f"{str(self.path)!r} holds an unfinished training; resume it, overwrite it, or "
                "choose another place."
            )

    def start(self, settings: dict[str, Any]) -> None:
        """Makes the folder anew for a training with these settings."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        with atomic.whole_file(self.path / SETTINGS) as temporary:
            temporary.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")

    def check(self, settings: dict[str, Any]) -> None:
        """Raises a ValueError unless the folder holds a training with these settings."""
        found = json.loads((self.path / SETTINGS).read_text("utf-8"))
        wanted = json.loads(json.dumps(settings))
        for name, value in _flat(wanted).items():
            old = _flat(found).get(name)
            if old != value:
                raise ValueError(
                    f"The training in {str(self.path)!r} was started with {name}={old!r}, not "
                    f"{value!r}; resume it with the same settings, or delete the folder."
                )

    def remove_remains(self) -> None:
        """Removes what a process was writing when it was killed; nobody may write there now."""
        for entry in self.path.glob(".*"):
            shutil.rmtree(entry, ignore_errors=True)

    def best_model(self, epoch: int) -> Path:
        """Returns the file of the model of an epoch that was the best."""
        return self.path / _BEST.format(epoch=epoch)

    def save_best(self, model: keras.Model, *, epoch: int) -> None:
        """Saves the model of the best epoch; the one before goes with `remove_old`."""
        with atomic.whole_file(self.best_model(epoch)) as temporary:
            model.save(temporary)

    def remove_old(self, *, best_epoch: int) -> None:
        """Removes models of epochs that are no longer the best, once no checkpoint means them."""
        for file in self.path.iterdir():
            if _BEST_PATTERN.fullmatch(file.name) and file != self.best_model(best_epoch):
                file.unlink(missing_ok=True)

    def show(self, history: list[EpochDone], *, best_epoch: int, is_last: bool) -> None:
        """Brings the table up to date, and the curves, which take longer, every half minute."""
        with atomic.whole_file(self.path / run.HISTORY) as temporary:
            report.write_history(history, temporary)
        now = time.monotonic()
        if now < self._drawn + SECONDS_BETWEEN_CURVES and not is_last:
            return
        self._drawn = now
        with atomic.whole_file(self.path / run.CURVES) as temporary:
            report.plot_curves(history, temporary, best_epoch=best_epoch)

    def remove(self) -> None:
        """Removes the folder, after its run is complete."""
        shutil.rmtree(self.path, ignore_errors=True)


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, so that a difference has a name."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
