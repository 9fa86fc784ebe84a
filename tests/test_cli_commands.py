"""Tests of `keras-vit train`, `predict` and `evaluate` as a user runs them: processes and files."""

import json
import shutil
import signal
from pathlib import Path

import cli_rig
import image_files
import processes
import published
import pytest
from cli_rig import SMALL, Result

from keras_vit.training import Run

FILES = {
    *("README.md", "config.json", "confusion.png", "curves.png", "history.csv", "labels.txt"),
    *("metrics.json", "model.keras", "report.html", "splits.csv", "tensorboard"),
}
# Flags that are not those of the run, and the field that the sentence names with both values.
CHANGES: dict[str, str] = published.TABLES["changes"]
# A training that stops itself once its run is written beside its place; next it is measured.
STOPPING = """
import signal, sys
from keras_vit.cli import main
import keras_vit.training
def stop(*_):
    print("stopped", flush=True)
    signal.raise_signal(signal.SIGSTOP)
sys.modules["keras_vit.training.train"]._make_run = stop
sys.exit(main(sys.argv[1:]))
"""


def start(
    *argv: object, folder: Path, environment: dict[str, str] | None = None
) -> processes.Process:
    return processes.Process(["-m", "keras_vit", *map(str, argv)], environment, folder)


def finish(process: processes.Process) -> Result:
    out, errors = process.communicate(timeout=600)
    # TensorFlow speaks before the command line can silence it.
    said = [line for line in errors.splitlines() if line.startswith(("keras-vit", "Traceback"))]
    return Result(process.returncode, out, said)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder with images of all kinds, one of them damaged, and a run; what training said."""
    folder = tmp_path_factory.mktemp("cli")
    image_files.write_classes(folder / "images")
    image_files.damage(folder / "images" / "plain" / "001.png")
    command = ("train", "--data", "images", "--out", "run", *SMALL)
    return folder, finish(start(*command, folder=folder))


@pytest.fixture
def place(trained: tuple[Path, Result]) -> Path:
    return trained[0]


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_training_leaves_a_whole_run_and_says_what_happens(trained: tuple[Path, Result]) -> None:
    """One line per epoch, the damaged image named, the results, and every file in the run."""
    place, result = trained
    metrics = json.loads((place / "run" / "metrics.json").read_text())

    assert (result.code, result.errors) == (0, [])
    assert names(place / "run") == FILES
    for text in (
        "2 classes; images: 15 train, 2 validation, 2 test",
        "Left out because they cannot be decoded: 1 (",
        *("1 (plain/001.png)", "   1/2 ", "   2/2 "),
        f"Test accuracy: {metrics['test']['accuracy']:.2%} of 2 images",
    ):
        assert text in result.out
    assert result.out.splitlines()[-1] == "Next: keras-vit evaluate run"
    damaged = "Left out, damaged</th><td>1: plain/001.png<"
    assert damaged in (place / "run" / "report.html").read_text(encoding="utf-8")
    card = (place / "run" / "README.md").read_text(encoding="utf-8")
    assert f"| test | 2 | {metrics['test']['accuracy']:.2%} |" in card
    assert "\n# run\n" in card


def test_evaluating_agrees_with_the_training(place: Path, tmp_path: Path) -> None:
    """The numbers are exactly those of metrics.json, or it is said; another folder is measured."""
    copy = shutil.copytree(place / "run", tmp_path / "run")
    events = cli_rig.done("evaluate", copy, "--json").events
    written = {event.pop("split"): event for event in events if event.pop("event")}
    assert written == json.loads((copy / "metrics.json").read_text())
    assert (
        "The result matches the one recorded in metrics.json" in cli_rig.done("evaluate", copy).out
    )
    text = (copy / "metrics.json").read_text().replace('"images": 2', '"images": 3')
    (copy / "metrics.json").write_text(text)
    assert (
        "The result DIFFERS from the one recorded in metrics.json"
        in cli_rig.done("evaluate", copy).out
    )
    assert (copy / "metrics.json").read_text() == text

    image_files.write_classes(tmp_path / "more", count=3)
    more = ("--data", tmp_path / "more", "--out", tmp_path / "report")
    assert "test: 6 images, accuracy " in cli_rig.done("evaluate", copy, *more).out
    assert names(tmp_path / "report") == {"confusion.png", "metrics.json", "report.html"}


def wait_for(process: processes.Process, event: str) -> None:
    for line in process.stdout:
        if json.loads(line)["event"] == event:
            return
    raise AssertionError(f"the process ended before {event!r}")


@pytest.mark.full
def test_ctrl_c_leaves_a_whole_model_or_nothing(place: Path, tmp_path: Path) -> None:
    """What was learnt can be resumed, after an epoch used as well; exit code 130."""
    endless = ("--model", "digits", "--epochs", "100000", "--json")
    data = ("train", "--data", place / "images")
    late = start(*data, "--out", "late", *endless, folder=tmp_path)
    early = start(*data, "--out", "early", *endless, folder=tmp_path)
    wait_for(early, "data")
    early.send_signal(signal.SIGINT)
    wait_for(late, "epoch")
    late.send_signal(signal.SIGINT)
    kept, lost = finish(late), finish(early)

    assert (kept.code, lost.code) == (130, 130)
    assert len(kept.errors) == len(lost.errors) == 1
    late_run = tmp_path / "late.unfinished"
    assert "a checkpoint is in 'late.unfinished'" in kept.errors[0]
    assert "the best so far" in kept.errors[0]
    assert "nothing was saved" in lost.errors[0] or "early.unfinished" in lost.errors[0]
    assert {entry.name for entry in tmp_path.iterdir()} <= {late_run.name, "early.unfinished"}
    assert Run.load(late_run).config["result"]["finished"] is False
    cli_rig.done("evaluate", late_run)
    assert (late_run / "metrics.json").is_file()


@pytest.mark.full
def test_resuming_a_finished_run_says_so(place: Path) -> None:
    """Exit code 0 and nothing done; one that was not measured is measured, other flags refused."""
    again = shutil.copytree(place / "run", place / "again")
    metrics = (again / "metrics.json").read_bytes()
    before = {file: file.stat().st_mtime_ns for file in again.rglob("*")}
    command = ("train", "--data", "images", "--out", "again", *SMALL, "--resume")

    said = cli_rig.done(*command, folder=place).out
    assert "again was already finished with these settings" in said
    assert "val. loss" not in said  # no head of a table that does not come
    assert {file: file.stat().st_mtime_ns for file in again.rglob("*")} == before
    (again / "metrics.json").unlink()
    events = cli_rig.done(*command, "--json", folder=place).events
    assert [event["event"] for event in events] == ["data", "done"]
    assert (again / "metrics.json").read_bytes() == metrics
    for flags, change in CHANGES.items():
        refused = cli_rig.run(*command, *flags.split(), folder=place)
        assert refused.code == 1
        assert f"was started with {change}" in refused.errors[0]
        assert "val. loss" not in refused.out


@pytest.mark.full
def test_a_kill_while_a_run_is_measured_leaves_no_half_of_it(place: Path, tmp_path: Path) -> None:
    """The old run is there; resuming measures the new one without training, in the old one's place.

    JSON lines tell of it, and nothing is left beside it.
    """
    script = tmp_path / "stopping.py"
    script.write_text(STOPPING)
    out = shutil.copytree(place / "run", tmp_path / "out" / "run")
    (out / "sample.png").write_text("old")
    before = (out / "model.keras").read_bytes()
    command = ("train", "--data", str(place / "images"), "--out", str(out), *SMALL, "--seed", "1")
    killed = processes.Process([str(script), *command, "--overwrite"])
    assert "stopped\n" in killed.stdout
    killed.kill()
    killed.communicate()
    assert list(out.with_name("run.unfinished").glob(".staged-*/config.json"))
    assert ((out / "model.keras").read_bytes(), names(out)) == (before, {*FILES, "sample.png"})
    actual = cli_rig.done(*command, "--resume", "--json")

    assert actual.errors == []
    assert [event["event"] for event in actual.events] == ["data", "done"]
    assert actual.events[-1]["test"] == json.loads((out / "metrics.json").read_text())["test"]
    assert Run.load(out).config["seed"] == 1
    assert names(out) == FILES
    assert names(out.parent) == {"run"}


@pytest.mark.full
def test_two_workers_train_on_a_folder(place: Path) -> None:
    """The same command under each TF_CONFIG: one run, which the first writes and tells of."""
    command = ("train", "--data", "images", "--out", "together", *SMALL)
    environments = processes.cluster(2)
    workers = [start(*command, folder=place, environment=each) for each in environments]
    first, second = map(finish, workers)

    assert (first.code, first.errors, second.code, second.errors) == (0, [], 0, [])
    assert "Saved in together" in first.out
    assert "Saved in together" not in second.out
    assert Run.load(place / "together").config["result"]["finished"]
    assert not list(place.glob("together.unfinished*"))
