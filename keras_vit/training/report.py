"""Writes down how a training went: the table of epochs, and the picture of its curves."""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from keras_vit.training.progress import EpochDone

_COLUMNS = (
    "epoch",
    "loss",
    "accuracy",
    "validation_loss",
    "validation_accuracy",
    "learning_rate",
    "seconds",
)


def write_history(history: Sequence[EpochDone], file: Path) -> None:
    """Writes one row per epoch as CSV."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(_COLUMNS)
        for done in history:
            fields = dataclasses.asdict(done)
            writer.writerow([fields[name] for name in _COLUMNS])


def plot_curves(history: Sequence[EpochDone], file: Path, *, best_epoch: int) -> None:
    """Draws loss and accuracy of each epoch, told apart by their strokes and not by colour alone.

    Where there is no accuracy, the loss alone.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib.figure
    import matplotlib.ticker

    names = ("loss", "accuracy") if history[0].accuracy is not None else ("loss",)
    figure = matplotlib.figure.Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    panels = zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True)
    epochs = [done.epoch for done in history]
    marker = "o" if len(history) == 1 else None  # a line needs two points
    for axes, name in panels:
        training = [getattr(done, name) for done in history]
        validation = [getattr(done, f"validation_{name}") for done in history]
        axes.plot(epochs, training, "--", color="0.45", marker=marker, label="training (varied)")
        axes.plot(epochs, validation, "-", color="tab:blue", marker=marker, label="validation")
        axes.axvline(best_epoch, color="black", linestyle=":", linewidth=1, label="epoch kept")
        axes.set(xlabel="epoch", ylabel=name)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.axes[0].set_ylabel("cross-entropy loss" if len(names) > 1 else "mean squared error")
    figure.axes[0].set_ylim(bottom=0)
    for axes in figure.axes[1:]:
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    figure.savefig(file, dpi=120)


def check_matplotlib() -> None:
    """Raises an ImportError that says what to install, unless matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "Pictures are drawn by matplotlib, which is not installed; "
            'run: pip install "keras-vit[data]"'
        ) from None
