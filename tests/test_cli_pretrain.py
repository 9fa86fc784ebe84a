"""Tests of `keras-vit pretrain`, and of what `train` and `evaluate` make of its runs."""

import contextlib
import io
import json
from pathlib import Path

import image_files
import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import evaluation
from keras_vit.cli.main import main
from keras_vit.data import load_folder
from keras_vit.training import Run

SMALL = ("--model", "digits", "--batch-size", "8", "--epochs", "1")
FILES = {
    "README.md",
    "config.json",
    "curves.png",
    "history.csv",
    "labels.txt",
    "model.keras",
    "reconstructions.png",
    "report.html",
    "splits.csv",
    "tensorboard",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with class folders, one without, and a run pre-trained on each."""
    folder = tmp_path_factory.mktemp("pretrain")
    image_files.write_classes(folder / "images")
    for index in range(10):
        image_files.write_image(folder / "flat" / f"{index}.png", seed=index)
    for name, target in (("images", "mean_color"), ("flat", "pixels")):
        data = ["--data", str(folder / name), "--out", str(folder / f"{name}-run")]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert main(["pretrain", *data, *SMALL, "--target", target]) == 0
        (folder / f"{name}.txt").write_text(output.getvalue())
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", ["images", "flat"])
def test_a_run_is_whole(place: Path, name: str) -> None:
    """With class folders and without, with an accuracy and without."""
    run = place / f"{name}-run"
    assert {file.name for file in run.iterdir()} == FILES
    config = json.loads((run / "config.json").read_text())
    assert config["objective"] == "masked-patches"
    assert (config["result"]["validation_accuracy"] is None) == (name == "flat")
    assert config["labels"] == (["plain", "striped"] if name == "images" else [])
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "What the model makes of images of which it sees a part" in report
    assert "keras-vit pretrain --data" in report


@pytest.mark.full
def test_it_prints_lines_for_people_and_json(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes next is said; each JSON line is an event."""
    flags = ["--data", str(place / "flat"), *SMALL, "--target", "pixels"]
    said = (place / "flat.txt").read_text()
    assert "no classes; images: 9 train, 1 validation" in said
    assert f"Next: keras-vit explain {place / 'flat-run'} {place / 'flat'}" in said
    with_labels = (place / "images.txt").read_text()
    assert f"Next: keras-vit train --data {place / 'images'} " in with_labels
    assert f"--weights {place / 'images-run'}" in with_labels
    assert main(["pretrain", *flags, "--out", str(tmp_path / "other"), "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["data", "epoch", "done"]
    assert events[1]["validation_accuracy"] is None
    one, other = (
        Run.load(path).config["result"] for path in (place / "flat-run", tmp_path / "other")
    )
    assert one["state_sha256"] == other["state_sha256"]


@pytest.mark.full
def test_evaluating_measures_the_features(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the run's images, or if it has no labels on others; the numbers are evaluation's."""
    run, images = Run.load(place / "images-run"), load_folder(place / "images")
    assert main(["evaluate", str(run.path), "--json"]) == 0
    (own,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = evaluation.few_shot(run.model, train=images.train, test=images.test, shots=(1, 5))
    actual = [each["accuracies"] for each in own["few_shot"]]
    assert actual == [list(each.accuracies) for each in expected]
    other = ["evaluate", str(place / "flat-run")]
    assert main([*other, "--data", str(place / "images")]) == 0
    assert "1 labelled images of each class" in capsys.readouterr().out
    assert main(other) == 1
    assert "has no labelled images of its own; give --data" in capsys.readouterr().err
    assert main([*other, "--data", str(place / "images"), "--real", "real.json"]) == 1
    assert "has no classifier; --real measures one" in capsys.readouterr().err


@pytest.mark.full
def test_training_goes_on_from_a_run(place: Path, tmp_path: Path) -> None:
    """With few parameters: the run has a plain merged model, and the adapter that made it."""
    flags = ["--data", str(place / "images"), "--batch-size", "8", "--epochs", "1"]
    start = [*flags, "--weights", str(place / "flat-run"), "--learning-rate", "0.01"]
    out = tmp_path / "lora"
    assert main(["train", *start, "--out", str(out), "--lora", "2", "--lora-targets", "fc1"]) == 0
    run, base = Run.load(out), Run.load(place / "flat-run").model
    assert type(run.model) is keras_vit.VisionTransformer
    assert run.config["lora"] == {"rank": 2, "targets": ["fc1"], "alpha": None}
    classifier = Run.load(place / "flat-run").classifier(run.labels)
    adapted = keras_vit.load_adapter(classifier, out / "adapter.safetensors")
    merged = keras_vit.merge_lora(adapted)
    for ours, theirs in zip(run.model.weights, merged.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    changed = {
        variable.path
        for variable, old in zip(run.model.weights, base.weights, strict=False)
        if not np.array_equal(variable, old)
    }
    assert changed == {f"block_{index}/mlp/fc1/kernel" for index in range(4)}


@pytest.mark.full
def test_frozen_blocks_and_decayed_rates(place: Path, tmp_path: Path) -> None:
    """The first blocks keep their bits, the recipe has the decay."""
    flags = ["--data", str(place / "images"), "--batch-size", "8", "--epochs", "1"]
    start = [*flags, "--weights", str(place / "images-run"), "--freeze", "3"]
    out = tmp_path / "frozen"
    assert main(["train", *start, "--layer-decay", "0.5", "--out", str(out)]) == 0
    run, base = Run.load(out), Run.load(place / "images-run").model
    assert run.config["recipe"]["layer_decay"] == 0.5
    pairs = zip(run.model.weights, base.weights, strict=False)
    changed = {new.path.split("/")[0] for new, old in pairs if not np.array_equal(new, old)}
    assert changed == {"block_3", "encoder_norm"}


@pytest.mark.full
def test_a_teacher_is_a_run_or_a_file(place: Path, tmp_path: Path) -> None:
    """A run's student learns from another run, and from a Keras file of any kind."""
    flags = ["train", "--data", str(place / "images"), *SMALL]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main([*flags, "--out", first]) == 0
    assert main([*flags, "--out", second, "--teacher", first, "--distillation", "hard"]) == 0
    assert Run.load(second).config["distillation"]["kind"] == "hard"
    layers = [
        keras.Input((32, 32, 3)),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(2, activation="softmax"),
    ]
    keras.Sequential(layers).save(tmp_path / "teacher.keras")
    chosen = ["--teacher", str(tmp_path / "teacher.keras"), "--temperature", "2"]
    assert main([*flags, "--out", second, "--overwrite", *chosen]) == 0
    assert Run.load(second).config["distillation"]["temperature"] == 2


# Arguments of `train`, after --data and --out, and what the sentence says.
WRONG = {
    "--freeze 1": "--freeze needs --weights",
    "--lora 2": "--lora needs --weights",
    "--positions bicubic": "--positions needs --weights",
    "--weights x --model Ti/16 --lora 2 --freeze 1": "leave out --freeze",
    "--temperature 2": "--temperature needs --teacher",
    "--distillation-weight 0.5": "--distillation-weight needs --teacher",
    "--weights x": "as a published name it needs --model",
    "--weights . --model Ti/16": "holds no checkpoint",
    "--weights .": "holds no checkpoint",
    "--teacher gone.keras": "no model file 'gone.keras'",
    "--teacher gone": "no run directory 'gone'",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_flags_are_one_sentence(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not go together is told, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--data", "digits", "--out", "run", *flags.split()]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert WRONG[flags] in errors[0]
    assert not any(tmp_path.iterdir())


def test_wrong_images_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder cannot be pre-trained on; a target that does not fit the patches is told."""
    flags = ["pretrain", "--out", str(tmp_path / "run"), "--data"]
    assert main([*flags, str(tmp_path)]) == 1
    assert "too few images to train and validate on" in capsys.readouterr().err
    small = ["--target", "small_patch", "--patch-size", "2", "--image-size", "16"]
    assert main([*flags, "digits", *small]) == 1
    assert "a multiple of 4 pixels. Received: 2" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
