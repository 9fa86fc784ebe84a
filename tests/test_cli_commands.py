"""Tests of `keras-vit train`, `predict` and `evaluate` as a user runs them: processes and files."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import image_files
import processes
import pytest
from PIL import Image

import keras_vit
from keras_vit.cli import main
from keras_vit.training import Run

# The smallest model there is: most of the time goes into starting TensorFlow.
SMALL = ("--model", "digits", "--batch-size", "8", "--epochs", "2")
FILES = {
    "README.md",
    "config.json",
    "confusion.png",
    "curves.png",
    "history.csv",
    "labels.txt",
    "metrics.json",
    "model.keras",
    "report.html",
    "splits.csv",
    "tensorboard",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished process left."""

    code: int
    out: str
    errors: list[str]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON lines of stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


def start(*argv: object, folder: Path, **environment: str) -> processes.Process:
    """Starts a command, with its imports done."""
    return processes.Process(["-m", "keras_vit", *map(str, argv)], environment, folder)


def start_anew(*argv: object, folder: Path, first: str = "") -> subprocess.Popen[str]:
    """Starts a command as a shell does; `first` is a folder to import from before all others."""
    source = str(Path(keras_vit.__file__).parents[1])
    path = os.pathsep.join(filter(None, [first, source]))
    return subprocess.Popen(
        [sys.executable, "-m", "keras_vit", *map(str, argv)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: processes.Started) -> Result:
    out, errors = process.communicate(timeout=600)
    # TensorFlow speaks before the command line can silence it.
    return Result(
        process.returncode,
        out,
        [line for line in errors.splitlines() if line.startswith(("keras-vit", "Traceback"))],
    )


def run(*argv: object, folder: Path) -> Result:
    return finish(start(*argv, folder=folder))


def run_here(*argv: object, folder: Path) -> Result:
    """The same in this process, which has imported TensorFlow already."""
    out, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        code = main([*map(str, argv)])
    return Result(code, out.getvalue(), errors.getvalue().splitlines())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of all kinds, one of them damaged, and a run trained on them."""
    folder = tmp_path_factory.mktemp("cli")
    image_files.write_classes(folder / "images")
    image_files.damage(folder / "images" / "plain" / "001.png")
    command = ("train", "--data", "images", "--out", "run", *SMALL)
    result = finish(start_anew(*command, folder=folder))
    (folder / "result.json").write_text(json.dumps(dataclasses.asdict(result)))
    return folder


def test_training_leaves_a_whole_run_and_says_what_happens(place: Path) -> None:
    """One line per epoch, the damaged image named, the results, and every file in the run."""
    result = Result(**json.loads((place / "result.json").read_text()))
    metrics = json.loads((place / "run" / "metrics.json").read_text())

    assert (result.code, result.errors) == (0, [])
    assert {file.name for file in (place / "run").iterdir()} == FILES
    assert "2 classes; images: 15 train, 2 validation, 2 test" in result.out
    assert "Left out because they cannot be decoded: 1 (" in result.out
    assert "1 (plain/001.png)" in result.out
    assert "   1/2 " in result.out
    assert "   2/2 " in result.out
    assert f"Test accuracy: {metrics['test']['accuracy']:.2%} of 2 images" in result.out
    image = shlex.split(result.out.splitlines()[-1].removeprefix("Next: keras-vit predict run "))
    assert Path(*image).is_file()
    card = (place / "run" / "README.md").read_text(encoding="utf-8")
    assert f"| test | 2 | {metrics['test']['accuracy']:.2%} |" in card
    assert "\n# run\n" in card


def test_predicting_prints_a_table_and_json(place: Path) -> None:
    """Labels and probabilities that add up to one; an image that cannot be read costs no other."""
    images = [place / "images" / "striped" / name for name in ("000.jpg", "001.png")]
    bad = place / "run" / "labels.txt"
    process = start("predict", "run", images[0], bad, "gone.png", "--json", folder=place)
    table, lines = run_here("predict", "run", *images, folder=place), finish(process)

    assert table.code == 0
    assert table.out.count("striped ") == 2
    assert table.out.count("%") == 4
    assert lines.code == 1
    (event,) = lines.events
    assert event["image"] == str(images[0])
    assert {one["label"] for one in event["predictions"]} == {"plain", "striped"}
    assert sum(one["probability"] for one in event["predictions"]) == pytest.approx(1)
    assert [line.split(":")[1] for line in lines.errors] == [" error", " error"]
    assert "labels.txt" in lines.errors[0]
    assert "gone.png" in lines.errors[1]


@pytest.mark.full
def test_photos_are_predicted_upright(place: Path) -> None:
    """A photo of each orientation gets what its upright pixels get."""
    photos = [place / f"{turn}.png" for turn in range(1, 9)]
    upright = [place / f"upright-{turn}.png" for turn in range(1, 9)]
    for turn in range(1, 9):
        contents = image_files.photo(turn, "PNG")
        photos[turn - 1].write_bytes(contents)
        Image.fromarray(image_files.as_pillow(contents)).save(upright[turn - 1])

    result = run_here("predict", "run", *photos, *upright, "--json", folder=place)

    predictions = [event["predictions"] for event in result.events]
    assert result.code == 0
    assert predictions[:8] == predictions[8:]


def test_evaluating_agrees_with_the_training(place: Path) -> None:
    """The numbers are exactly those of metrics.json; another folder is measured and reported."""
    image_files.write_classes(place / "more", count=3)
    before = (place / "run" / "metrics.json").read_bytes()
    process = start("evaluate", "run", "--json", folder=place)
    other = run_here("evaluate", "run", "--data", "more", "--out", "report", folder=place)
    own = finish(process)
    written = {event.pop("split"): event for event in own.events if event.pop("event")}

    assert own.code == other.code == 0
    assert written == json.loads(before)
    assert (place / "run" / "metrics.json").read_bytes() == before
    assert "test: 6 images, accuracy " in other.out
    assert {file.name for file in (place / "report").iterdir()} == {
        "confusion.png",
        "metrics.json",
        "report.html",
    }


@pytest.mark.full
def test_numbers_that_do_not_agree_are_seen(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`evaluate` compares with metrics.json, says what came out, and leaves the file alone."""
    copy = shutil.copytree(place / "run", tmp_path / "run")
    assert main(["evaluate", str(copy)]) == 0
    assert "metrics.json holds the same numbers" in capsys.readouterr().out

    text = (copy / "metrics.json").read_text().replace('"images": 2', '"images": 3')
    (copy / "metrics.json").write_text(text)
    assert main(["evaluate", str(copy)]) == 0
    assert "metrics.json holds OTHER numbers" in capsys.readouterr().out
    assert (copy / "metrics.json").read_text() == text


# Arguments, and what the sentence says; run in `place`.
WRONG: dict[str, tuple[str, str]] = {
    "no folder": ("train --data gone --out new", "no folder 'gone'"),
    "empty folder": ("train --data empty --out new", "holds no class folders"),
    "one class": ("train --data one --out new", "has one class, 'only'"),
    "damaged": ("train --data images --out new --strict", "001.png"),
    "image and patch": ("train --data images --out new --image-size 60", "multiples of 8"),
    "unknown model": ("train --data images --out new --model vgg", "no model 'vgg'"),
    "run there": (
        "train --data images --out run",
        "already holds a run; resume it (--resume), replace it (--overwrite) or choose another "
        "--out",
    ),
    "other things there": ("train --data images --out images", "holds other things"),
    "predict no run": ("predict images a.png", "holds no checkpoint"),
    "evaluate no run": ("evaluate gone", "no run directory 'gone'"),
    "no scikit-learn": ("train --data digits --out new", "pip install scikit-learn"),
}


# What needs a process: a missing package; a wrong input besides, for its exit code.
ALONE = ("no scikit-learn", "damaged")


@pytest.fixture(scope="module")
def wrong(place: Path) -> dict[str, Result]:
    """All wrong inputs, two of them in processes of their own."""
    image_files.write_classes(place / "one", classes=("only",))
    (place / "empty").mkdir()
    # A module that cannot be imported stands for a package that is not installed.
    (place / "blocked").mkdir()
    (place / "blocked" / "sklearn.py").write_text("raise ModuleNotFoundError('No sklearn')")
    commands = {name: argv.split() for name, (argv, _) in WRONG.items()}
    blocked = str(place / "blocked")
    started = {name: start_anew(*commands[name], folder=place, first=blocked) for name in ALONE}
    here = {
        name: run_here(*argv, folder=place) for name, argv in commands.items() if name not in ALONE
    }
    return here | {name: finish(process) for name, process in started.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_sentence(name: str, wrong: dict[str, Result], place: Path) -> None:
    """One line on stderr, the documented exit code, nothing written, nothing lost."""
    result = wrong[name]

    assert result.code == 1
    assert len(result.errors) == 1
    assert WRONG[name][1] in result.errors[0]
    assert not (place / "new").exists()
    assert {file.name for file in (place / "run").iterdir()} == FILES


def wait_for(process: subprocess.Popen[str], event: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == event:
            return
    raise AssertionError(f"the process ended before {event!r}")


@pytest.mark.full
def test_ctrl_c_leaves_a_whole_model_or_nothing(place: Path, tmp_path: Path) -> None:
    """What was learnt can be resumed, after an epoch used as well; exit code 130."""
    endless = ("--model", "digits", "--epochs", "100000", "--json")
    data = ("train", "--data", place / "images")
    late = start_anew(*data, "--out", "late", *endless, folder=tmp_path)
    early = start_anew(*data, "--out", "early", *endless, folder=tmp_path)
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
    assert main(["evaluate", str(late_run)]) == 0
    assert (late_run / "metrics.json").is_file()


@pytest.mark.full
def test_overwriting_replaces_the_run_at_the_end(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --overwrite the new run is alone in the old one's place, and JSON lines tell of it."""
    out = tmp_path / "run"
    out.mkdir()
    for name in FILES - {"tensorboard"}:
        (out / name).write_text("old")
    images = ["--data", str(place / "images")]

    assert main(["train", *images, "--out", str(out), *SMALL, "--overwrite", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [event["event"] for event in events] == ["data", "epoch", "epoch", "done"]
    assert {file.name for file in out.iterdir()} == FILES
    assert all(file.read_bytes() != b"old" for file in out.iterdir() if file.is_file())
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert events[-1]["test"] == json.loads((out / "metrics.json").read_text())["test"]


@pytest.mark.full
def test_resuming_a_finished_run_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 and nothing done; one that was not measured is measured, other flags refused."""
    monkeypatch.chdir(place)
    shutil.copytree("run", "again")
    metrics = (place / "again" / "metrics.json").read_bytes()
    before = {file: file.stat().st_mtime_ns for file in (place / "again").rglob("*")}
    command = ["train", "--data", "images", "--out", "again", *SMALL, "--resume"]

    assert main(command) == 0
    said = capsys.readouterr().out
    assert "again is a finished run of these settings" in said
    assert "val. loss" not in said  # no head of a table that does not come
    assert {file: file.stat().st_mtime_ns for file in (place / "again").rglob("*")} == before
    (place / "again" / "metrics.json").unlink()
    assert main([*command, "--json"]) == 0
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["data", "done"]
    assert (place / "again" / "metrics.json").read_bytes() == metrics
    assert main([*command, "--seed", "1"]) == 1
    refused = capsys.readouterr()
    assert "was started with seed=0, not 1" in refused.err
    assert "val. loss" not in refused.out


# A training that stops itself once its run is written beside its place; next it is measured.
STOPPING = """
import signal, sys
from keras_vit.cli import main
from keras_vit.training import outcome
def stop(*_):
    print("stopped", flush=True)
    signal.raise_signal(signal.SIGSTOP)
outcome._make_run = stop
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
def test_a_kill_while_a_run_is_measured_leaves_no_half_of_it(place: Path) -> None:
    """The run is not there; resuming measures it without training, and it is whole."""
    (place / "stopping.py").write_text(STOPPING)
    command = ("train", "--data", "images", "--out", "killed", *SMALL)
    killed = processes.Process(["stopping.py", *command], folder=place)
    assert "stopped\n" in killed.stdout
    killed.kill()
    killed.communicate()
    assert list((place / "killed.unfinished").glob(".staged-*/config.json"))
    assert not (place / "killed").exists()
    actual = run_here(*command, "--resume", folder=place)

    assert (actual.code, actual.errors) == (0, [])
    assert "/2 " not in actual.out
    assert {file.name for file in (place / "killed").iterdir()} == FILES
    assert not list(place.glob("killed.*"))


@pytest.mark.full
def test_a_second_training_is_told_of_the_first(place: Path) -> None:
    """Started together, one trains and the other is refused in a sentence that names it."""
    command = ("train", "--data", "images", "--out", "both", *SMALL)
    pair = [start(*command, folder=place) for _ in range(2)]
    actual = sorted(map(finish, pair), key=lambda result: result.code)
    holder = [process.pid for process in pair if process.returncode == 0]

    assert [result.code for result in actual] == [0, 1]
    assert len(actual[1].errors) == 1
    # The second may have come to it when all was over.
    told = f"is at work: process {holder[0]} on ", "already holds a run"
    assert any(text in actual[1].errors[0] for text in told)
    assert {file.name for file in (place / "both").iterdir()} == FILES


@pytest.mark.full
def test_two_workers_train_on_a_folder(place: Path) -> None:
    """The same command under each TF_CONFIG: one run, written by the first, as one process's."""
    command = ("train", "--data", "images", "--out", "together", *SMALL)
    workers = [start(*command, folder=place, **each) for each in processes.cluster(2)]
    first, second = map(finish, workers)

    assert (first.code, first.errors, second.code, second.errors) == (0, [], 0, [])
    assert "Saved in together" in first.out
    assert "Saved in together" not in second.out
    alone, together = (
        list(csv.DictReader((place / name / "history.csv").read_text().splitlines()))
        for name in ("run", "together")
    )
    for expected, found in zip(alone, together, strict=True):
        for name in ("loss", "validation_loss", "validation_accuracy"):
            assert float(found[name]) == pytest.approx(float(expected[name]), rel=1e-3), name
    assert Run.load(place / "together").config["result"]["finished"]
    assert not list(place.glob("together.unfinished*"))
