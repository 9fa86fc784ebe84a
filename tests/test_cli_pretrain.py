"""Tests of `keras-vit pretrain`, and of what the flags of both trainings make of a run."""

import json
from pathlib import Path

import cli_rig
import image_files
import numpy as np
import pytest

import keras_vit
from keras_vit import evaluation
from keras_vit.data import load_folder
from keras_vit.training import RECIPES, Run

pytestmark = pytest.mark.full

SMALL = ("--model", "digits", "--batch-size", "8", "--set", "steps=1")
ALL = (
    *("--set", "weight_decay=0.2", "drop_path_rate=0.1", "average=0.9", "mixup=0.4", "cutmix=1"),
    *("remat=true", "xla=false", "pooling=avg", "class_token=false", "num_layers=2"),
    *("--set", "representation_dim=hidden_dim"),
)
FILES = {
    *("README.md", "config.json", "curves.png", "history.csv", "labels.txt", "model.keras"),
    *("reconstructions.png", "report.html", "splits.csv", "tensorboard"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pre-trainings on a folder with classes and on one without have said, by the folder."""
    folder = tmp_path_factory.mktemp("pretrain")
    image_files.write_classes(folder / "images")
    for index in range(10):
        image_files.write_image(folder / "flat" / f"{index}.png", seed=index)
    said = {}
    for name, target in (("images", "mean_color"), ("flat", "pixels")):
        flags = ("--data", folder / name, "--out", folder / f"{name}-run", "--target", target)
        said[str(folder / name)] = cli_rig.done("pretrain", *flags, *SMALL).out
    return said


@pytest.fixture
def place(said: dict[str, str]) -> Path:
    return Path(min(said)).parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images, and a run on them with every flag."""
    folder = tmp_path_factory.mktemp("flags")
    image_files.write_classes(folder / "images", count=6)
    flags = ("--data", folder / "images", "--out", folder / "run")
    cli_rig.done("train", *flags, *SMALL, *ALL)
    return folder


def test_a_run_is_whole_and_says_what_comes_next(said: dict[str, str], place: Path) -> None:
    """With class folders and without, with an accuracy and without."""
    for name, next_words, labels in (
        ("images", f"train --data {place / 'images'} ", ["plain", "striped"]),
        ("flat", f"export {place / 'flat-run'} --out export", []),
    ):
        run = place / f"{name}-run"
        assert {file.name for file in run.iterdir()} == FILES
        config = json.loads((run / "config.json").read_text())
        assert (config["objective"], config["labels"]) == ("masked-patches", labels)
        assert (config["result"]["validation_accuracy"] is None) == (name == "flat")
        report = (run / "report.html").read_text(encoding="utf-8")
        assert "What the model makes of images of which it sees a part" in report
        assert "keras-vit pretrain --data" in report
        assert f"Next: keras-vit {next_words}" in said[str(place / name)]
    assert "no classes; images: 9 train, 1 validation" in said[str(place / "flat")]
    assert f"--weights {place / 'images-run'}" in said[str(place / "images")]


def test_pretraining_takes_the_flags_that_mean_something(place: Path, tmp_path: Path) -> None:
    """Fields of the network and of the recipe; each line for machines is an event."""
    flags = ("--data", place / "flat", "--out", tmp_path / "run", *SMALL, "--json")
    given = ("--set", "num_layers=1", "layer_scale=0.1", "weight_decay=0.3", "average=0.9")
    more = ("drop_path_rate=0.1", "remat=true", "--target", "pixels")
    events = cli_rig.done("pretrain", *flags, *given, *more).events
    assert [event["event"] for event in events] == ["data", "epoch", "done"]
    assert events[1]["validation_accuracy"] is None
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    model, recipe = config["model"], config["recipe"]
    assert (model["num_layers"], model["layer_scale"]) == (1, 0.1)
    assert (model["remat"], model["drop_path_rate"]) == (True, 0.1)
    assert (recipe["weight_decay"], recipe["average"]) == (0.3, 0.9)


def test_evaluating_measures_the_features(place: Path) -> None:
    """On the run's images, or if it has no labels on others; the numbers are evaluation's."""
    run, images = Run.load(place / "images-run"), load_folder(place / "images")
    (own,) = cli_rig.done("evaluate", run.path, "--json").events
    expected = evaluation.few_shot(run.model, train=images.train, test=images.test, shots=(1, 5))
    actual = [each["accuracies"] for each in own["few_shot"]]
    assert actual == [list(each.accuracies) for each in expected]
    other = cli_rig.done("evaluate", place / "flat-run", "--data", place / "images")
    assert "1 labelled images of each class" in other.out


def test_training_goes_on_from_a_run(place: Path, tmp_path: Path) -> None:
    """With few parameters: the run has a plain merged model, and the adapter that made it."""
    flags = ("--data", place / "images", "--batch-size", "8", "--epochs", "1")
    start = (*flags, "--weights", place / "flat-run", "--learning-rate", "0.01")
    out = tmp_path / "lora"
    cli_rig.done("train", *start, "--out", out, "--lora", "2", "--lora-targets", "fc1")
    run, base = Run.load(out), Run.load(place / "flat-run")
    assert type(run.model) is keras_vit.VisionTransformer
    assert run.config["lora"] == {"rank": 2, "targets": ["fc1"], "alpha": None}
    adapted = keras_vit.load_adapter(base.classifier(run.labels), out / "adapter.safetensors")
    merged = keras_vit.merge_lora(adapted)
    for ours, theirs in zip(run.model.weights, merged.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert changed(run, base) == {f"block_{index}/mlp/fc1/kernel" for index in range(4)}


def changed(run: Run, base: Run) -> set[str]:
    """The variables without the classifier in which two runs differ."""
    pairs = zip(run.model.weights, base.model.weights, strict=False)
    return {new.path for new, old in pairs if not np.array_equal(new, old)}


def test_config_json_records_every_flag(trained: Path) -> None:
    """Recipe, model and execution say what was asked for, and the model is so."""
    run = Run.load(trained / "run")
    recipe, model = run.config["recipe"], run.model.config
    expected = {"weight_decay": 0.2, "drop_path_rate": 0.1, "average": 0.9}
    expected |= {"mixup": 0.4, "cutmix": 1.0}
    assert {name: recipe[name] for name in expected} == expected
    assert (run.config["execution"]["remat"], run.config["execution"]["xla"]) == (True, False)
    assert (model.pooling, model.class_token, model.num_layers) == ("avg", False, 2)
    assert (model.representation_dim, model.drop_path_rate, model.remat) == (64, 0.1, True)
    assert run.config["model"]["representation_dim"] == 64


def test_flags_go_over_those_of_a_model_that_has_weights(trained: Path) -> None:
    """What training does is the flags', the network the run's; the first block keeps its bits."""
    flags = ("--data", trained / "images", "--out", trained / "tuned", *SMALL[2:4])
    changes = ("--freeze", "1", "--set", "remat=false", "drop_path_rate=0.3", "layer_decay=0.5")
    cli_rig.done("train", *flags, "--epochs", "1", "--weights", trained / "run", *changes)
    run, base = Run.load(trained / "tuned"), Run.load(trained / "run")
    model = run.model.config

    assert (model.remat, model.drop_path_rate, model.pooling) == (False, 0.3, "avg")
    assert run.config["recipe"]["layer_decay"] == 0.5
    parts = {path.split("/")[0] for path in changed(run, base)}
    assert parts == {"block_1", "encoder_norm", "representation", "head"}


def test_a_student_is_made_for_the_recipe(trained: Path, tmp_path: Path) -> None:
    """The model that learns from a run has the recipe's fields too; LAMB and SAM train it."""
    flags = ("--data", trained / "images", "--out", tmp_path / "student", *SMALL)
    recipe = ("--recipe", "deit3-s16", "--image-size", "16")
    teacher = ("--teacher", trained / "run", "--set", "distillation=hard", "temperature=2")
    cli_rig.done("train", *flags, *recipe, *teacher, "sam_rho=0.05", "--learning-rate", "1e-3")
    run = Run.load(tmp_path / "student")

    assert (run.model.config.layer_scale, run.model.config.activation) == (1e-4, "gelu")
    assert run.model.config.drop_path_rate == RECIPES["deit3-s16"].drop_path_rate
    distillation = run.config["distillation"]
    assert (distillation["kind"], distillation["temperature"]) == ("hard", 2)
