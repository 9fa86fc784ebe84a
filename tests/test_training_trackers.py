"""Tests of keras_vit.training.trackers, with the trackers themselves."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from keras_vit.cli import main
from keras_vit.training import EpochDone, Event, Run, StepDone, Trackers, TrainingDone, trackers
from keras_vit.training.run import unfinished_path

pytestmark = pytest.mark.filterwarnings("default")  # theirs
STEP = StepDone(
    step=1,
    steps=9,
    epoch=1,
    loss=1.0,
    gradient_norm=1.0,
    images_per_second=None,
    memory=0,
    seconds_left=None,
)
EPOCH = EpochDone(
    epoch=1,
    epochs=3,
    loss=0.5,
    accuracy=0.75,
    validation_loss=0.25,
    validation_accuracy=None,
    learning_rate=0.125,
    seconds=1.0,
    seconds_left=2.0,
    is_best=True,
)
SECOND = dataclasses.replace(EPOCH, epoch=2, loss=0.375, learning_rate=0.0625)
SETTINGS = {"seed": 3, "recipe": {"batch_size": 8, "augmentation": {"flip": True}}}
FLAT = {"seed": 3, "recipe.batch_size": 8, "recipe.augmentation.flip": True}


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
    assert [(each.step, each.value) for each in losses] == [(1, 0.5), (2, 0.375)]
    results = {"val_loss": 0.25, "learning_rate": 0.0625, "test_accuracy": 0.875}
    assert {name: run.data.metrics[name] for name in results} == results
    assert "val_accuracy" not in run.data.metrics


def test_a_tracker_that_fails_costs_no_training(
    client: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its beginning it is an error that says what to do, later a warning, once."""
    import mlflow.keras

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("the network is gone")

    monkeypatch.setattr(mlflow.keras.MlflowCallback, "on_epoch_end", fail)
    with pytest.warns(UserWarning, match="mlflow records nothing more .*network is gone") as warned:
        assert track("mlflow", out, STEP, EPOCH, SECOND) == ()
    assert sum("nothing more" in str(warning.message) for warning in warned) == 1
    mlflow.end_run()  # which stays as it is where nothing is recorded any more
    monkeypatch.setattr(mlflow, "start_run", fail)
    with pytest.raises(OSError, match=r"begin a run \(the network is gone\).*--log mlflow"):
        track("mlflow", out, STEP)


@pytest.mark.full
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
            runs.add((wandb.run.project, wandb.run.id))
            assert dict(wandb.run.config) == FLAT
            seen.append(dict(wandb.run.summary))

    assert [project for project, _ in runs] == ["keras-vit"]
    names = ("epoch/epoch", "epoch/loss", "epoch/learning_rate", "test_accuracy")
    assert [[each.get(name) for name in names] for each in seen] == [
        [1, 0.5, 0.125, None],
        [2, 0.375, 0.0625, 0.875],
    ]


def test_a_missing_package_is_told_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and no trace of a training."""
    for name in trackers.TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
        argv = ["train", "--data", "digits", "--out", str(tmp_path / "run"), "--log", f"csv,{name}"]
        assert main(argv) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"which is not installed; run: pip install {name}")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no tracker 'tensorboard'; choose from mlflow, wandb"):
        Trackers(["tensorboard"], out=tmp_path)
