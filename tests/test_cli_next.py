"""Tests of keras_vit.cli.next_command: the last line of every command is one that can be run."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_files
import pytest
from conftest import TINY, made

from keras_vit import demo, publishing, training
from keras_vit.cli import main, output
from keras_vit.cli.main import make_parser
from keras_vit.exporting import artefacts
from keras_vit.training import RECIPES, planning

SMALL = ("--model", "digits", "--set", "num_layers=1", "--image-size", "16", "--epochs", "1")
# One more than these is a command that nobody has tried here; test_export_check.py tries check.
COMMANDS = {
    *("train", "pretrain", "predict", "evaluate", "compare", "explain", "demo", "export", "push"),
    *("list", "check"),
}


def parsed(out: str) -> list[str]:
    """The words of the last line, which the parser takes; what it names is there."""
    line = out.splitlines()[-1]
    assert line.startswith("Next: keras-vit "), line
    words = shlex.split(line)[2:]
    arguments = vars(make_parser().parse_args(words))
    for name in ("source", "data", "weights", "image"):
        value = arguments.get(name)
        if value is not None and name in ("image", "data"):
            assert Path(value).exists() or value in ("photos", "digits"), line
        elif value is not None and " " in value:
            assert Path(value).exists(), line
    return words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, and runs with and without classifier, made without a training; all with spaces."""
    root = tmp_path_factory.mktemp("next command") / "it's here"
    photos = image_files.write_classes(root / "my photos", count=3)
    config = TINY.from_dict(
        {**TINY.to_dict(), "input_shape": (16, 16, 3), "include_preprocessing": True}
    )
    for name, classes in (
        ("my run", 2),
        ("other run", 2),
        ("features 1", None),
        ("features 2", None),
    ):
        fields: dict[str, Any] = {**config.to_dict(), "classes": classes}
        if classes is None:
            fields |= {"pooling": "avg", "class_token": False}
        settings = {
            "model": fields,
            "recipe": RECIPES["scratch"].to_dict(),
            "data": {"source": str(photos)},
            "labels": ["plain", "striped"],
            "result": {
                "validation_loss": 1.0 if name.endswith("1") else 0.5,
                "best_epoch": 1,
                "validation_accuracy": None,
            },
            **({} if classes else {"objective": "masked-patches"}),
        }
        (root / name).mkdir()
        made(config.from_dict(fields)).save(root / name / "model.keras")
        (root / name / "config.json").write_text(json.dumps(settings))
        rows = [
            f"{split},{label},{label}/00{place}"
            for label in ("plain", "striped")
            for place, split in (("0.jpg", "train"), ("1.png", "validation"), ("2.bmp", "test"))
        ]
        (root / name / "splits.csv").write_text("\n".join(["split,label,path", *rows]) + "\n")
    return root


@pytest.fixture
def said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Runs a command in the folder, and returns the words of its last line."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KERAS_VIT_MIRROR", "nowhere")

    def run(*argv: str) -> list[str]:
        assert main([*argv]) == 0, capsys.readouterr().err
        return parsed(capsys.readouterr().out)

    return run


def test_no_command_is_left_out() -> None:
    parsers: Any = make_parser()._subparsers
    assert set(parsers._group_actions[0].choices) == COMMANDS


def test_a_plan_goes_on_to_its_training(
    said: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own flags; without --out to a folder with the name of the data."""
    monkeypatch.setattr(planning.TrainingPlan, "measured", lambda self, *_, **__: self)
    flags = ["--weights", "none", "--epochs", "7"]
    expected = ["train", "--data", "my photos", *flags]
    assert said(*expected, "--plan") == [*expected, "--out", "my photos-run"]
    named = ["train", "--data", "my photos", "--out", "a run", *SMALL]
    assert said(named[0], "--plan", *named[1:]) == named


@pytest.mark.full
def test_measuring_goes_on(said: Callable[..., list[str]], folder: Path) -> None:
    """With names that have spaces and quotes."""
    photo = str(Path("my photos", "plain", "001.png"))
    assert said("predict", "my run", photo) == ["explain", "my run", photo, "--out", "seen"]
    assert said("explain", "my run", photo, "--out", "seen a") == ["evaluate", "my run"]
    assert said("evaluate", "my run", "--out", "a report")[:2] == ["export", "my run"]
    trains = ["train", "--data", str(folder / "my photos")]
    assert said("evaluate", "features 1")[:3] == trains
    assert said("compare", "my run", "other run")[0] == "export"
    assert said("compare", "features 1", "features 2", "--out", "a page.html") == [
        *(*trains, "--out", "features 2-classifier", "--weights", "features 2"),
    ]


def test_a_name_that_cannot_be_typed_is_not_named(
    said: Callable[..., list[str]], folder: Path
) -> None:
    """What a terminal would not show as it is."""
    shutil.copy(folder / "my photos" / "plain" / "001.png", folder / "-1.png")
    assert said("predict", "my run", "--", "-1.png")[2] == "./-1.png"
    photo = folder / "a\tb.png"
    shutil.copy(folder / "my photos" / "plain" / "001.png", photo)
    assert said("predict", "my run", photo.name) == ["evaluate", "my run"]


def test_publishing_goes_on(
    said: Callable[..., list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What serves, uploads and exports is tested elsewhere."""

    class Server:
        def run(self, sockets: object) -> None:
            raise KeyboardInterrupt

    published = publishing.Published(address="hf://a/b", url="x", commit="y", files=())
    artefact = artefacts.Artefact(format="onnx", path=folder / "onnx", bytes=9, checks=())
    monkeypatch.setattr(demo, "make_server", lambda app: Server())
    monkeypatch.setattr(publishing, "push", lambda *_, **__: published)
    monkeypatch.setattr(artefacts, "export", lambda *_, **__: [artefact])
    assert said("demo", "my run", "--no-browser", "--port", "0")[:2] == ["export", "my run"]
    assert said("push", "my run", "hf://a/b") == ["export", "hf://a/b", "--out", "export"]
    image_files.write_image(folder / "my run" / "sample.png")
    assert said("push", "my run", "hf://a/b") == ["predict", "hf://a/b", "my run/sample.png"]
    assert said("export", "my run", "--out", "x", "--formats", "onnx") == ["evaluate", "my run"]
    assert said("export", "features 1", "--out", "x", "--formats", "onnx")[:2] == [
        *("export", "features 1")
    ]


@pytest.mark.parametrize("argv", [[], ["--variant", "Ti/16"], ["--family", "dinov2"]])
def test_lists_go_on(argv: list[str], said: Callable[..., list[str]]) -> None:
    assert said("list", *argv)


def test_trainings_go_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A classifier to an image that it has not seen; a model without one to a classifier."""
    for name, words in (("my run", ["predict"]), ("features 1", ["train", "--data"])):
        output.TrainDisplay(json=False).show_finished(training.Run.load(folder / name))
        found = parsed(capsys.readouterr().out)
        assert found[: len(words)] == words
    assert found[-2:] == ["--weights", str(folder / "features 1")]
