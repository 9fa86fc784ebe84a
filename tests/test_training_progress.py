"""Tests of keras_vit.training.progress."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from keras_vit.training import EpochDone, StepDone
from keras_vit.training.progress import Watcher, plot_curves, write_history

LOGS = {"loss": 1.0, "accuracy": 0.5, "gradient_norm": 2.0}


def watch(epochs: list[tuple[float, float]], **fields: Any) -> Watcher:
    """Feeds a watcher two steps and one (accuracy, loss) of validation per epoch."""
    watcher = Watcher(epochs=len(epochs), steps=2 * len(epochs), batch_size=8, **fields)
    for accuracy, loss in epochs:
        watcher.end_step(LOGS)
        watcher.end_step({**LOGS, "loss": 3.0})
        watcher.report(watcher.end_epoch({"accuracy": accuracy, "loss": loss}, learning_rate=0.1))
    return watcher


def test_the_best_epoch_is_the_one_of_least_validation_loss() -> None:
    """Whatever came after, and the first of equals."""
    for epochs, best in (
        ([(0.5, 1.0), (0.9, 2.0), (0.8, 0.1)], 3),
        ([(0.9, 0.5), (0.9, 0.4), (0.9, 0.6)], 2),
        ([(0.9, 0.5), (0.9, 0.5)], 1),
    ):
        watcher = watch(epochs)
        assert watcher.best is not None
        assert watcher.best.epoch == best, epochs


def test_the_last_epoch_can_be_the_one_that_is_kept() -> None:
    """Whatever its loss; on the way one epoch in twenty is, in case of an interruption."""
    for count, kept in ((3, [1, 2, 3]), (50, [*range(2, 51, 2)])):
        watcher = watch([(0.5, float(epoch)) for epoch in range(1, count + 1)], keep="last")
        assert watcher.best is not None
        assert watcher.best.epoch == count
        assert [done.epoch for done in watcher.history if done.is_best] == kept


def test_events_come_in_order_and_are_complete() -> None:
    """Each step and each epoch is told once, with what is left to do."""
    events: list[Any] = []
    watch([(0.5, 1.0), (0.6, 0.9)], on_event=events.append)
    steps = [event for event in events if isinstance(event, StepDone)]
    epochs = [event for event in events if isinstance(event, EpochDone)]

    assert [type(event) for event in events] == [StepDone, StepDone, EpochDone] * 2
    assert [event.step for event in steps] == [1, 2, 3, 4]
    assert [event.epoch for event in steps] == [1, 1, 2, 2]
    assert (steps[0].seconds_left, steps[0].images_per_second) == (None, None)
    assert steps[3].seconds_left == 0
    assert steps[3].memory > 1e6
    assert [event.is_best for event in epochs] == [True, True]
    assert (epochs[1].loss, epochs[1].validation_accuracy) == (2.0, 0.6)


def test_a_loss_that_is_no_number_is_an_error() -> None:
    """The sentence says at which step; the step does not count."""
    watcher = watch([(0.5, 1.0)])

    with pytest.raises(FloatingPointError, match=r"loss is nan at step 3 \(epoch 2\)"):
        watcher.end_step({**LOGS, "loss": float("nan")})
    assert watcher.step == 2


def test_it_goes_on_where_it_was() -> None:
    """In the middle of an epoch, after JSON: the rest of the epoch has the same mean."""
    events: list[Any] = []
    watcher = watch([(0.5, 1.0)])
    watcher.end_step({**LOGS, "loss": 1 / 3})
    again = Watcher(epochs=2, steps=4, batch_size=8, on_event=events.append)
    again.resume(json.loads(json.dumps(watcher.to_dict())))
    for either in (watcher, again):
        either.end_step(LOGS)
        either.end_epoch({"accuracy": 0.4, "loss": 2.0}, learning_rate=0.0)

    assert again.history[1].loss == watcher.history[1].loss == (1 / 3 + 1) / 2
    assert again.best == watcher.best == again.history[0]
    assert [event.step for event in events] == [4]


def test_an_interruption_by_whoever_watches_is_kept_for_later() -> None:
    """The step that is over stays counted."""

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    watcher = Watcher(epochs=1, steps=2, batch_size=8, on_event=interrupt)
    watcher.end_step(LOGS)

    assert watcher.stop_requested
    assert watcher.step == 1


def history(epochs: int) -> list[EpochDone]:
    return watch([(1 - 0.7 / epoch, 1.5 / epoch) for epoch in range(1, epochs + 1)]).history


def test_the_table_has_a_row_per_epoch(tmp_path: Path) -> None:
    """history.csv reads back as the numbers that were written."""
    write_history(history(3), tmp_path / "history.csv")
    with (tmp_path / "history.csv").open() as stream:
        rows = list(csv.DictReader(stream))

    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert float(rows[1]["validation_accuracy"]) == 1 - 0.7 / 2


def test_the_curves_are_a_picture_with_ink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One epoch draws as well as many; without matplotlib the error says what to run."""
    for epochs in (1, 30):
        plot_curves(history(epochs), tmp_path / "curves.png", best_epoch=1)
        image = Image.open(tmp_path / "curves.png").convert("L")
        assert image.width > 600
        assert np.asarray(image).min() < 100
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        plot_curves(history(1), tmp_path / "curves.png", best_epoch=1)
