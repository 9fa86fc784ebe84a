"""Tests of keras_vit.training.progress: what is told of a training, and to whom."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from keras_vit.cli import main
from keras_vit.figures import plot_curves
from keras_vit.training import EpochDone, Event, Run, StepDone, Trackers, TrainingDone, progress
from keras_vit.training.progress import ProgressLogger, write_history
from keras_vit.training.run import unfinished_path

LOGS = {"accuracy": 0.5, "gradient_norm": 2.0}
SETTINGS = {"seed": 3, "recipe": {"batch_size": 8, "augmentation": {"flip": True}}}
FLAT = {"seed": 3, "recipe.batch_size": 8, "recipe.augmentation.flip": True}


def watch(epochs: list[tuple[float | None, float]], **fields: Any) -> ProgressLogger:
    """Feeds a logger two steps and one (accuracy, loss) of validation per epoch."""
    logger = ProgressLogger(epochs=len(epochs), steps=2 * len(epochs), batch_size=8, **fields)
    for number, (accuracy, loss) in enumerate(epochs, start=1):
        logger.end_step({**LOGS, "loss": 0.5 / number})
        logger.end_step({**LOGS, "loss": 1.5 / number})
        measured = {"loss": loss} if accuracy is None else {"loss": loss, "accuracy": accuracy}
        logger.report(logger.end_epoch(measured, learning_rate=0.125 / number))
    return logger


def told(epochs: list[tuple[float | None, float]]) -> list[Any]:
    events: list[Any] = []
    watch(epochs, on_event=events.append)
    return events


def test_the_best_epoch_is_the_one_of_least_validation_loss() -> None:
    """Whatever came after, and the first of equals.

    Or the last one is kept; on the way one in twenty is, in case of an interruption.
    """
    cases: list[tuple[list[tuple[float | None, float]], int]] = [
        ([(0.5, 1.0), (0.9, 2.0), (0.8, 0.1)], 3),
        ([(0.9, 0.5), (0.9, 0.4), (0.9, 0.6)], 2),
        ([(0.9, 0.5), (0.9, 0.5)], 1),
    ]
    for epochs, best in cases:
        logger = watch(epochs)
        assert logger.best is not None
        assert logger.best.epoch == best, epochs
    for count, kept in ((3, [1, 2, 3]), (50, [*range(2, 51, 2)])):
        logger = watch([(0.5, float(epoch)) for epoch in range(1, count + 1)], keep="last")
        assert logger.best is not None
        assert logger.best.epoch == count
        assert [done.epoch for done in logger.history if done.is_best] == kept


def test_events_come_in_order_and_are_complete() -> None:
    """Each step and each epoch is told once, with what is left to do."""
    events = told([(0.5, 1.0), (0.6, 0.9)])
    steps = [event for event in events if isinstance(event, StepDone)]
    epochs = [event for event in events if isinstance(event, EpochDone)]

    assert [type(event) for event in events] == [StepDone, StepDone, EpochDone] * 2
    assert [event.step for event in steps] == [1, 2, 3, 4]
    assert [event.epoch for event in steps] == [1, 1, 2, 2]
    assert (steps[0].seconds_left, steps[0].images_per_second) == (None, None)
    assert steps[3].seconds_left == 0
    assert steps[3].memory > 1e6
    assert [event.is_best for event in epochs] == [True, True]
    assert (epochs[1].loss, epochs[1].validation_accuracy) == (0.5, 0.6)


def test_a_loss_that_is_no_number_is_an_error() -> None:
    """The sentence says at which step; the step does not count."""
    logger = watch([(0.5, 1.0)])

    with pytest.raises(FloatingPointError, match=r"loss is nan at step 3 \(epoch 2\)"):
        logger.end_step({**LOGS, "loss": float("nan")})
    assert logger.step == 2


def history(epochs: int) -> list[EpochDone]:
    return watch([(1 - 0.7 / epoch, 1.5 / epoch) for epoch in range(1, epochs + 1)]).history


def test_the_table_has_a_row_per_epoch(tmp_path: Path) -> None:
    """history.csv reads back as the numbers that were written; of one and many there are curves."""
    write_history(history(3), tmp_path / "history.csv")
    with (tmp_path / "history.csv").open() as stream:
        rows = list(csv.DictReader(stream))

    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert float(rows[1]["validation_accuracy"]) == 1 - 0.7 / 2
    for epochs in (1, 30):
        plot_curves(history(epochs), best_epoch=1).savefig(tmp_path / "curves.png")
        image = Image.open(tmp_path / "curves.png").convert("L")
        assert image.width > 600
        assert np.asarray(image).min() < 100


STEP, _, EPOCH, _, _, SECOND = told([(None, 0.25), (None, 0.375)])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    unfinished_path(tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def done(tmp_path: Path) -> TrainingDone:
    """The end of a training whose metrics.json is in the folder."""
    metrics = {"test": {"images": 9, "accuracy": 0.875, "loss": 0.5, "classes": []}}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    return TrainingDone(run=Run(path=tmp_path, model=None, labels=("a", "b"), config={}))


def track(name: str, out: Path, *events: Event | BaseException) -> tuple[str, ...]:
    """A training with these events; returns the trackers that are left."""
    with Trackers([name], out=out, settings=SETTINGS) as tracked:
        for event in events:
            if isinstance(event, BaseException):
                raise event
            tracked(event)
        return tracked.names


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of an MLflow whose runs are in the folder."""
    import mlflow

    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    # A database needs more packages than mlflow-skinny brings.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient(uri)


@pytest.mark.filterwarnings("default")
def test_mlflow_has_the_numbers(client: Any, out: Path, done: TrainingDone) -> None:
    """Of a training that is interrupted: one run with both epochs, the settings and the result.

    A finished one begins none.
    """
    with pytest.raises(KeyboardInterrupt):
        track("mlflow", out, STEP, STEP, EPOCH, KeyboardInterrupt())
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("run", "FAILED")
    track("mlflow", out, SECOND, done)
    track("mlflow", out.with_name("other"), done)
    (run,) = client.search_runs(["0"])

    assert run.info.status == "FINISHED"
    assert run.data.params == {name: str(value) for name, value in FLAT.items()}
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in losses] == [(1, 1.0), (2, 0.5)]
    results = {"val_loss": 0.375, "learning_rate": 0.0625, "test_accuracy": 0.875}
    assert {name: run.data.metrics[name] for name in results} == results
    assert "val_accuracy" not in run.data.metrics


@pytest.mark.filterwarnings("default")
def test_a_tracker_that_fails_costs_no_training(
    client: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its beginning it is an error that says what to do, later a warning, once."""
    import mlflow

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("the network is gone")

    monkeypatch.setattr(mlflow, "log_metrics", fail)
    with pytest.warns(UserWarning, match="mlflow records nothing more .*network is gone") as warned:
        assert track("mlflow", out, STEP, EPOCH, SECOND) == ()
    assert sum("nothing more" in str(warning.message) for warning in warned) == 1
    mlflow.end_run()  # which stays as it is where nothing is recorded any more
    monkeypatch.setattr(mlflow, "start_run", fail)
    with pytest.raises(OSError, match=r"begin a run \(the network is gone\).*--log mlflow"):
        track("mlflow", out, STEP)


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_wandb_has_the_numbers(
    out: Path, done: TrainingDone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run of an interrupted training, offline: what its process answers if it is asked."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(out.parent))
    seen: list[dict[str, Any]] = []
    runs = set()
    for events in ((STEP, EPOCH), (SECOND, done)):
        with Trackers(["wandb"], out=out, settings=SETTINGS) as tracked:
            for event in events:
                tracked(event)
            run: Any = wandb.run
            runs.add((run.project, run.id))
            assert dict(run.config) == FLAT
            seen.append(dict(run.summary))

    assert [project for project, _ in runs] == ["keras-vit"]
    names = ("epoch/epoch", "epoch/loss", "epoch/learning_rate", "test_accuracy")
    assert [[each.get(name) for name in names] for each in seen] == [
        [1, 1.0, 0.125, None],
        [2, 0.5, 0.0625, 0.875],
    ]


def test_a_missing_package_is_told_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and no trace of a training."""
    for name in progress.TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
        argv = ["train", "--data", "digits", "--out", str(tmp_path / "run"), "--log", f"csv,{name}"]
        assert main(argv) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"which is not installed; run: pip install {name}")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no tracker 'tensorboard'; choose from mlflow, wandb"):
        Trackers(["tensorboard"], out=tmp_path)
