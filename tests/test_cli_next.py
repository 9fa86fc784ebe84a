"""Tests of keras_vit.cli.next_command: the last line of every command is one that can be run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_rig
import image_files
import pytest
from cli_rig import Result

from keras_vit import reporting, training
from keras_vit.cli import next_command, output
from keras_vit.cli.main import make_parser
from keras_vit.exporting import artefacts

# One more than these is a command that nobody has tried here; test_demo.py and
# test_export_artefacts.py try demo and check.
COMMANDS = {
    *("train", "pretrain", "predict", "evaluate", "explain", "demo", "export", "push", "list"),
    "check",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, and runs with and without classifier, made without a training; all with spaces."""
    root = tmp_path_factory.mktemp("next command") / "it's here"
    photos = image_files.write_classes(root / "my photos", count=3)
    for name in ("my run", "features 1"):
        settings: dict[str, Any] = {
            "data": {"source": str(photos)},
            "result": {"validation_loss": 1.0, "best_epoch": 1, "validation_accuracy": None},
        }
        fields: dict[str, Any] = {}
        if name.startswith("features"):
            settings["objective"], fields = "masked-patches", cli_rig.FEATURES
        cli_rig.make_run(root / name, settings=settings, **fields)
        rows = [
            f"{split},{label},{label}/00{place}"
            for label in ("plain", "striped")
            for place, split in (("0.jpg", "train"), ("1.png", "validation"), ("2.bmp", "test"))
        ]
        (root / name / "splits.csv").write_text("\n".join(["split,label,path", *rows]) + "\n")
    return root


def checked(result: Result) -> list[str]:
    """The words of the last line; what they name is there."""
    arguments = vars(make_parser().parse_args(result.next))
    for name in ("source", "data", "weights", "image"):
        value = arguments.get(name)
        if value is not None and name in ("image", "data"):
            assert Path(value).exists() or value in ("photos", "digits"), result.next
        elif value is not None and " " in value:
            assert Path(value).exists(), result.next
    return result.next


@pytest.fixture
def said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a command in the folder, and returns the words of its last line."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KERAS_VIT_MIRROR", "nowhere")
    return lambda *argv: checked(cli_rig.done(*argv))


def test_a_plan_goes_on_to_its_training(said: Callable[..., list[str]]) -> None:
    """With its own flags; without --out to a folder with the name of the data."""
    expected = ["train", "--data", "my photos", "--weights", "none", "--epochs", "7"]
    assert said(*expected, "--plan") == [*expected, "--out", "my photos-run"]
    named = ["train", "--data", "my photos", "--out", "a run", "--model", "digits"]
    assert said(named[0], "--plan", *named[1:]) == named


@pytest.mark.full
def test_measuring_goes_on(said: Callable[..., list[str]], folder: Path) -> None:
    """With names that have spaces and quotes."""
    photo = str(Path("my photos", "plain", "001.png"))
    assert said("explain", "my run", photo, "--out", "seen a") == ["evaluate", "my run"]
    assert said("evaluate", "my run", "--out", "a report")[:2] == ["export", "my run"]
    assert said("evaluate", "features 1")[:3] == ["train", "--data", str(folder / "my photos")]


def test_predictions_and_lists_go_on(said: Callable[..., list[str]], folder: Path) -> None:
    """A name that a terminal would not show as it is, is not named; nothing where a program reads.

    A name that would be a flag is a path.
    """
    photo = folder / "my photos" / "plain" / "001.png"
    for name in ("-1.png", "a\tb.png", "a b.png"):
        shutil.copy(photo, folder / name)
    assert said("predict", "my run", "a b.png") == ["explain", "my run", "a b.png", "--out", "seen"]
    assert said("predict", "my run", "--", "-1.png")[2] == "./-1.png"
    assert said("predict", "my run", "a\tb.png") == ["evaluate", "my run"]
    assert "Next" not in cli_rig.done("predict", "my run", photo, "--json").out
    for flags in ("", "--variant Ti/16", "--variant B/16", "--variant g/14", "--family dinov2"):
        assert said("list", *flags.split())[0] in ("list", "train", "export")
    parsers: Any = make_parser()._subparsers
    assert set(parsers._group_actions[0].choices) == COMMANDS


def test_publishing_goes_on(
    said: Callable[..., list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What uploads and exports is tested elsewhere; so is what a demo says at its end."""
    published = reporting.Published(address="hf://a/b", url="x", commit="y", files=())
    artefact = artefacts.Artefact(format="onnx", path=folder / "onnx", bytes=9, checks=())
    monkeypatch.setattr(reporting, "push", lambda *_, **__: published)
    monkeypatch.setattr(artefacts, "export", lambda *_, **__: [artefact])
    assert said("push", "my run", "hf://a/b") == ["export", "hf://a/b", "--out", "export"]
    image_files.write_image(folder / "my run" / "sample.png")
    assert said("push", "my run", "hf://a/b") == ["predict", "hf://a/b", "my run/sample.png"]
    assert said("export", "my run", "--out", "x", "--formats", "onnx") == ["evaluate", "my run"]
    features = said("export", "features 1", "--out", "x", "--formats", "onnx")
    assert features[:2] == ["export", "features 1"]
    (folder / "my run" / "sample.png").unlink()


def test_trainings_go_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An image that was not trained on; a classifier after labels, a look inside without."""
    output.TrainDisplay(json=False).show_finished(training.Run.load(folder / "features 1"))
    words = checked(Result(0, capsys.readouterr().out, []))
    assert (words[0], words[-2:]) == ("train", ["--weights", str(folder / "features 1")])

    photos, out = str(folder / "my photos"), str(tmp_path)
    data: dict[str, Any] = {"data": {"source": photos}}
    pretraining = {**data, "objective": "masked-patches"}
    splits = (folder / "my run" / "splits.csv").read_text()
    image, sample = f"{photos}/plain/001.png", f"{out}/sample.png"
    for file, config, labels, expected in (
        ("none", data, ("a", "b"), ["evaluate", out]),
        ("none", pretraining, ("a", "b"), ["train", "--data", photos]),
        ("splits.csv", data, ("a", "b"), ["predict", out, image]),
        ("splits.csv", pretraining, (), ["explain", out, image, "--out", "seen"]),
        ("sample.png", data, ("a", "b"), ["predict", out, sample]),
    ):
        (tmp_path / file).write_text(splits)
        run: Any = training.Run(path=tmp_path, model=None, labels=labels, config=config)
        words = [str(word) for word in next_command.after_training(run)]
        assert words[: len(expected)] == expected
        make_parser().parse_args(words)
