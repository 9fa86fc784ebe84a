"""Tests of keras_vit.training.trackers, with the trackers themselves."""

import dataclasses
import json
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from keras_vit.cli import main
from keras_vit.training import EpochDone, Run, StepDone, Trackers, TrainingDone, trackers
from keras_vit.training.run import unfinished_path

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


def done(folder: Path) -> TrainingDone:
    """The end of a training whose metrics.json is in the folder."""
    metrics = {"test": {"images": 9, "accuracy": 0.875, "loss": 0.5, "classes": []}}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return TrainingDone(run=Run(path=folder, model=None, labels=("a", "b"), config={}))


class Fake(trackers._Tracker):
    """Notes what it is told; fails where it is asked to."""

    told: list[Any]
    fails_in = ""

    def begin(self, name: str, settings: Mapping[str, Any], identity: str | None) -> str:
        self.note("begin", name, dict(settings), identity)
        return identity or "new"

    def record(self, epoch: EpochDone) -> None:
        self.note("record", epoch.epoch)

    def summarise(self, results: Mapping[str, float]) -> None:
        self.note("summarise", dict(results))

    def end(self, *, failed: bool) -> None:
        self.note("end", failed)

    def note(self, *words: object) -> None:
        self.told.append(words)
        if words[0] == self.fails_in:
            raise ConnectionError("the network is gone")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr(Fake, "told", [], raising=False)
    monkeypatch.setattr(Fake, "fails_in", "")
    monkeypatch.setitem(trackers._KINDS, "mlflow", Fake)
    return Fake


@pytest.fixture
def out(tmp_path: Path) -> Path:
    unfinished_path(tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_resumed_training_goes_on_with_its_run(fake: type[Fake], out: Path) -> None:
    """Its identity is kept beside the checkpoints; a finished one begins none."""
    flat = {"seed": 3, "recipe.batch_size": 8, "recipe.augmentation.flip": True}
    with Trackers(["mlflow"], out=out, settings=SETTINGS) as track:
        for event in (STEP, STEP, EPOCH):
            track(event)
    track = Trackers(["mlflow"], out=out)
    track(SECOND)
    track(done(out.parent))
    track.__exit__(KeyboardInterrupt)
    with Trackers(["mlflow"], out=out) as track:
        track(done(out.parent))

    results = {"test_accuracy": 0.875, "test_loss": 0.5}
    assert fake.told == [
        *(("begin", "run", flat, None), ("record", 1), ("end", False)),
        *(("begin", "run", {}, "new"), ("record", 2), ("summarise", results), ("end", True)),
        ("end", False),
    ]


def test_a_tracker_that_fails_costs_no_training(fake: type[Fake], out: Path) -> None:
    """At its beginning it is an error that says what to do, later a warning, once."""
    fake.fails_in = "record"
    with Trackers(["mlflow"], out=out) as track:
        track(STEP)
        with pytest.warns(UserWarning, match="mlflow records nothing more .*network is gone"):
            track(EPOCH)
        track(SECOND)
        assert track.names == ()
    assert [words[0] for words in fake.told] == ["begin", "record"]
    fake.fails_in = "begin"
    with (
        pytest.raises(OSError, match=r"cannot begin a run \(the network is gone\).*--log mlflow"),
        Trackers(["mlflow"], out=out) as track,
    ):
        track(STEP)


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_missing_package_is_told_before_the_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and no trace of a training."""
    monkeypatch.setitem(sys.modules, name, None)
    argv = ["train", "--data", "digits", "--out", str(tmp_path / "run"), "--log", f"csv,{name}"]
    assert main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"which is not installed; run: pip install {name}")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no tracker 'tensorboard'; choose from mlflow, wandb"):
        Trackers(["tensorboard"], out=tmp_path)


def record(name: str, out: Path) -> None:
    """A training of two epochs that is interrupted after the first."""
    with Trackers([name], out=out, settings=SETTINGS) as track:
        track(STEP)
        track(EPOCH)
    with Trackers([name], out=out, settings=SETTINGS) as track:
        track(SECOND)
        track(done(out.parent))


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_mlflow_has_the_numbers(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run in a store of its own, with both epochs, the settings and the result."""
    import mlflow

    uri = (out.parent / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    # A database needs more packages than mlflow-skinny brings.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(uri)
    record("mlflow", out)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs(["0"])

    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "seed": "3",
        "recipe.batch_size": "8",
        "recipe.augmentation.flip": "True",
    }
    history = [
        (each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")
    ]
    assert history == [(1, 0.5), (2, 0.375)]
    assert run.data.metrics["val_loss"] == 0.25
    assert run.data.metrics["learning_rate"] == 0.0625
    assert run.data.metrics["test_accuracy"] == 0.875
    assert "val_accuracy" not in run.data.metrics


def records(content: bytes) -> Iterator[bytes]:
    """What a .wandb file holds: LevelDB's log format, after a header of seven bytes."""
    block, place, record = 2**15, 7, b""
    while place < len(content):
        if block - place % block < 7:  # the end of a block is filled up
            place += block - place % block
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_wandb_has_the_numbers(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two offline files of one run, with the numbers of the epochs."""
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(out.parent))
    record("wandb", out)
    rows: list[dict[str, Any]] = []
    identities = set()
    for file in sorted(out.parent.rglob("*.wandb"), key=lambda file: file.stat().st_mtime):
        for data in records(file.read_bytes()):
            entry = wandb_internal_pb2.Record()
            entry.ParseFromString(data)
            if entry.WhichOneof("record_type") == "run":
                identities.add((entry.run.project, entry.run.run_id))
            if entry.WhichOneof("record_type") == "history":
                items = [
                    ("/".join(i.nested_key) or i.key, i.value_json) for i in entry.history.item
                ]
                rows.append({key: json.loads(value) for key, value in items})

    assert [project for project, _ in identities] == ["keras-vit"]
    assert [row["epoch/loss"] for row in rows] == [0.5, 0.375]
    assert [row["epoch/learning_rate"] for row in rows] == [0.125, 0.0625]
    assert [row["epoch/epoch"] for row in rows] == [1, 2]
