"""Tests of keras_vit.training.progress."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from keras_vit.training import EpochDone
from keras_vit.training.progress import plot_curves, write_history


def history(epochs: int) -> list[EpochDone]:
    return [
        EpochDone(
            epoch=epoch,
            epochs=epochs,
            loss=2 / epoch,
            accuracy=1 - 0.8 / epoch,
            validation_loss=1.5 / epoch,
            validation_accuracy=1 - 0.7 / epoch,
            learning_rate=0.001,
            seconds=1.5,
            seconds_left=3.0,
            is_best=True,
        )
        for epoch in range(1, epochs + 1)
    ]


def test_the_table_has_a_row_per_epoch(tmp_path: Path) -> None:
    """history.csv reads back as the numbers that were written."""
    write_history(history(3), tmp_path / "history.csv")
    with (tmp_path / "history.csv").open() as stream:
        rows = list(csv.DictReader(stream))

    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert float(rows[1]["validation_accuracy"]) == 1 - 0.7 / 2


@pytest.mark.parametrize("epochs", [1, 30])
def test_the_curves_are_a_picture_with_ink(tmp_path: Path, epochs: int) -> None:
    """One epoch draws as well as many, and the picture is not blank."""
    plot_curves(history(epochs), tmp_path / "curves.png", best_epoch=1)
    image = Image.open(tmp_path / "curves.png").convert("L")

    assert image.width > 600
    assert np.asarray(image).min() < 100


def test_without_matplotlib_the_pip_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to run."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        plot_curves(history(1), tmp_path / "curves.png", best_epoch=1)
