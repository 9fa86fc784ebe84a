"""`Sweep`: the short trainings that choose a learning rate, with their table and picture."""

import csv
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_vit import atomic
from keras_vit.training import progress, run
from keras_vit.training.checkpoints import SWEEP
from keras_vit.training.recipe import Recipe
from keras_vit.training.settings import check_settings

_RECORD, _FIELD = "sweep.json", "sweep"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A short training with one learning rate.

    Attributes:
        learning_rate: the highest of its schedule.
        validation_loss: at its end; None where the loss was not finite.
        validation_accuracy: at its end; None likewise.
    """

    learning_rate: float
    validation_loss: float | None
    validation_accuracy: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialDone:
    """A trial of a sweep is complete.

    Attributes:
        trial: the trial.
        number: its number, from 1.
        count: trials in all.
        steps: steps of each.
    """

    trial: Trial
    number: int
    count: int
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """What `sweep_learning_rate` found.

    Example:
        >>> losses = {0.001: 0.7, 0.003: 0.5, 0.01: 0.6, 0.03: None}
        >>> sweep = Sweep(steps=100, trials=tuple(
        ...     Trial(learning_rate=rate, validation_loss=loss, validation_accuracy=None)
        ...     for rate, loss in losses.items()))
        >>> sweep.learning_rate, sweep.is_at_edge
        (0.003, False)

    Attributes:
        steps: steps of each trial.
        trials: in ascending order of their learning rates.
    """

    steps: int
    trials: tuple[Trial, ...]

    @property
    def learning_rate(self) -> float:
        """The learning rate of lowest validation loss, of equal ones the lowest.

        Raises:
            FloatingPointError: there is none: no trial ended with a finite loss.
        """
        finite = [trial for trial in self.trials if trial.validation_loss is not None]
        if not finite:
            rates = ", ".join(f"{trial.learning_rate:g}" for trial in self.trials)
            raise FloatingPointError(
                f"The loss was not finite with any learning rate of the sweep ({rates}); try "
                "smaller ones."
            )
        best = min(finite, key=lambda trial: (trial.validation_loss, trial.learning_rate))
        return best.learning_rate

    @property
    def is_at_edge(self) -> bool:
        """Whether the chosen rate is the lowest or highest one, so that others may be better."""
        edges = {self.trials[0].learning_rate, self.trials[-1].learning_rate}
        return self.learning_rate in edges

    def recipe(self, recipe: Recipe) -> Recipe:
        """Returns the recipe with the chosen learning rate."""
        return dataclasses.replace(recipe, learning_rate=self.learning_rate)

    def to_dict(self) -> dict[str, Any]:
        """Returns what config.json records."""
        trials = [dataclasses.asdict(trial) for trial in self.trials]
        return {"learning_rate": self.learning_rate, "steps": self.steps, "trials": trials}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Sweep":
        """Rebuilds a sweep from `to_dict`."""
        trials = tuple(Trial(**trial) for trial in fields["trials"])
        return cls(steps=fields["steps"], trials=trials)

    def write(self, folder: Path) -> None:
        """Writes the table and the picture of a run."""
        with (folder / run.TRIALS).open("w", encoding="utf-8", newline="") as stream:
            names = [field.name for field in dataclasses.fields(Trial)]
            writer = csv.DictWriter(stream, names)
            writer.writeheader()
            writer.writerows(map(dataclasses.asdict, self.trials))
        plot_sweep(self, folder / run.SWEEP)


class Record:
    """The file of a sweep: the settings that it is for, and the trials so far.

    Args:
        training: the folder of the unfinished training.
    """

    def __init__(self, training: Path) -> None:
        self.folder = training / SWEEP
        self.file = self.folder / _RECORD

    def exists(self) -> bool:
        """Whether a sweep was begun."""
        return self.file.is_file()

    def write(self, settings: Mapping[str, Any], sweep: Sweep) -> None:
        """Replaces the file, in one atomic step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        trials = [dataclasses.asdict(trial) for trial in sweep.trials]
        fields = {**settings, _FIELD: {"steps": sweep.steps, "trials": trials}}
        with atomic.whole_file(self.file, kept="the sweep is kept", again="resume") as temporary:
            temporary.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")

    def read(self, settings: dict[str, Any]) -> Sweep:
        """Returns the sweep so far.

        Raises:
            ValueError: it is for other settings, or the file is damaged.
        """
        check_settings(self.file, settings)
        return Sweep.from_dict(run.read_fields(self.file)[_FIELD])

    def adopted(self, settings: Mapping[str, Any]) -> Sweep | None:
        """Returns the sweep that chose the learning rate of a training with these settings."""
        if not self.exists():
            return None
        recipe = settings["recipe"]
        rate = run.read_fields(self.file)["recipe"]["learning_rate"]
        before = {**settings, "recipe": {**recipe, "learning_rate": rate}}
        try:
            sweep = self.read(before)
        except ValueError:
            return None
        return sweep if sweep.trials and sweep.learning_rate == recipe["learning_rate"] else None


def plot_sweep(sweep: Sweep, file: Path) -> None:
    """Plots validation loss, and accuracy where there is one, over the learning rate.

    Raises:
        ImportError: matplotlib is not installed.
    """
    progress.check_matplotlib()
    import matplotlib.figure
    import matplotlib.ticker

    finite = [trial for trial in sweep.trials if trial.validation_loss is not None]
    has_accuracy = all(trial.validation_accuracy is not None for trial in finite)
    names = ("loss", "accuracy") if has_accuracy else ("loss",)
    figure = matplotlib.figure.Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    panels = zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True)
    for axes, name in panels:
        values = [getattr(trial, f"validation_{name}") for trial in finite]
        axes.plot([trial.learning_rate for trial in finite], values, "o-", color="tab:blue")
        axes.axvline(sweep.learning_rate, color="black", linestyle=":", linewidth=1, label="chosen")
        for trial in sweep.trials:
            if trial.validation_loss is None:
                axes.axvline(trial.learning_rate, color="tab:red", linestyle="--", label="diverged")
        axes.set(xscale="log", xlabel="learning rate", ylabel=f"validation {name}")
        axes.set_xticks([trial.learning_rate for trial in sweep.trials])
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.grid(alpha=0.3)
        axes.legend()
    for axes in figure.axes[1:]:
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    figure.suptitle(f"Sweep: trainings of {sweep.steps} steps")
    figure.savefig(file, dpi=120)


def finite(number: float | None) -> float | None:
    """Returns the number, or None where it is not finite: JSON has no such numbers."""
    return None if number is None or not math.isfinite(number) else number
