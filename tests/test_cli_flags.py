"""Tests of keras_vit.cli.flags: what the flags of `train` and `pretrain` make of a run."""

import json
from pathlib import Path

import image_files
import numpy as np
import pytest

from keras_vit.cli.main import main
from keras_vit.training import RECIPES, Run
from keras_vit.training.checkpoints import Checkpoints

SMALL = ("--model", "digits", "--batch-size", "8", "--steps", "1")
ALL = (
    *("--weight-decay", "0.2", "--drop-path", "0.1", "--average", "0.9"),
    *("--mixup", "0.4", "--cutmix", "1", "--remat", "--no-xla"),
    *("--set", "pooling=avg", "--set", "class_token=false", "--set", "num_layers=1"),
    *("--set", "representation_dim=hidden_dim"),
)

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images, and a run on them with every flag."""
    folder = tmp_path_factory.mktemp("flags")
    image_files.write_classes(folder / "images", count=6)
    argv = ["train", "--data", str(folder / "images"), "--out", str(folder / "run")]
    assert main([*argv, *SMALL, *ALL]) == 0
    return folder


def test_config_json_records_every_flag(place: Path) -> None:
    """Recipe, model and execution say what was asked for, and the model is so."""
    run = Run.load(place / "run")
    config = json.loads((place / "run" / "config.json").read_text())
    recipe, model = config["recipe"], run.model.config

    assert [recipe[name] for name in ("weight_decay", "drop_path_rate", "average")] == [
        0.2,
        0.1,
        0.9,
    ]
    assert [recipe[name] for name in ("mixup", "cutmix")] == [0.4, 1.0]
    assert (config["execution"]["remat"], config["execution"]["xla"]) == (True, False)
    assert (model.pooling, model.class_token, model.num_layers) == ("avg", False, 1)
    assert (model.representation_dim, model.drop_path_rate, model.remat) == (64, 0.1, True)
    assert config["model"]["representation_dim"] == 64


CHANGES = [
    (("--mixup", "0.2"), "recipe.mixup=0.4, not 0.2"),
    (("--average", "0"), "recipe.average=0.9, not None"),
    (("--no-remat",), "model.remat=True, not False"),
    (("--set", "num_layers=2"), "num_layers=1, not 2"),
]


@pytest.mark.parametrize(("argv", "message"), CHANGES)
def test_resuming_with_another_flag_is_refused(
    argv: tuple[str, ...], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence names the field and both values."""
    config = json.loads((place / "run" / "config.json").read_text())
    unfinished = place / "other.unfinished"
    unfinished.mkdir(exist_ok=True)
    Checkpoints(unfinished, keep=1).save(1, {}, progress={})
    for name in ("result", "versions", "made", "execution"):
        del config[name]
    (unfinished / "settings.json").write_text(json.dumps(config))
    command = ["train", "--data", str(place / "images"), "--out", str(place / "other"), "--resume"]
    assert main([*command, *SMALL, *ALL, *argv]) == 1
    assert message in capsys.readouterr().err


def test_remat_and_drop_path_reach_a_model_that_has_weights(place: Path) -> None:
    """The weights are the run's, what training does is the flags'; an own recipe's model is not."""
    data, out = str(place / "images"), place / "tuned"
    argv = ["train", "--data", data, "--out", str(out), "--weights", str(place / "run")]
    argv += ["--no-remat", "--drop-path", "0.3", *SMALL[2:]]
    assert main([*argv, "--learning-rate", "1e-12"]) == 0
    before, after = Run.load(place / "run").model, Run.load(out).model

    assert (after.config.remat, after.config.drop_path_rate) == (False, 0.3)
    assert after.config.pooling == "avg"
    for old, new in zip(before.get_weights(), after.get_weights(), strict=True):
        assert np.allclose(old, new, atol=1e-6)


def test_pretraining_takes_the_flags_that_mean_something(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fields of the network and of the recipe; those of a classifier are refused in a sentence."""
    argv = ["pretrain", "--data", str(place / "images"), "--out", str(tmp_path / "run"), *SMALL]
    given = ("--set", "num_layers=1", "--set", "layer_scale=0.1", "--weight-decay", "0.3")
    assert main([*argv, "--set", "representation_dim=8"]) == 1
    assert "belongs to a classifier" in capsys.readouterr().err
    assert main([*argv, *given, "--average", "0.9", "--drop-path", "0.1", "--remat"]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())

    assert (config["model"]["num_layers"], config["model"]["layer_scale"]) == (1, 0.1)
    assert (config["model"]["remat"], config["model"]["drop_path_rate"]) == (True, 0.1)
    assert (config["recipe"]["weight_decay"], config["recipe"]["average"]) == (0.3, 0.9)


@pytest.mark.parametrize("flag", ["weights", "teacher"])
def test_sha256_of_a_run(
    flag: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with another SHA-256 is refused before it is read; the flag alone means nothing."""
    argv = ["train", "--data", str(place / "images"), "--out", str(tmp_path / "run")]
    argv += ["--steps", "1", f"--{flag}-sha256", "0" * 64]
    assert main(argv) == 1
    assert f"needs --{flag}" in capsys.readouterr().err
    assert main([*argv, f"--{flag}", str(place / "run")]) == 1
    error = capsys.readouterr().err
    assert "model.keras has the SHA-256" in error
    assert f"{'0' * 64} was asked for" in error
    assert not (tmp_path / "run").exists()


def test_sam_and_remat_are_refused_together(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks that are computed anew get no gradient where SAM moved the weights."""
    argv = ["train", "--data", str(place / "images"), "--out", str(tmp_path / "run"), *SMALL]
    assert main([*argv, "--sam-rho", "0.05", "--remat"]) == 1
    assert "sam_rho=0.05 and remat=True do not go together" in capsys.readouterr().err


def test_a_student_is_made_for_the_recipe(place: Path, tmp_path: Path) -> None:
    """The model that learns from a teacher has the recipe's fields too; LAMB and SAM train it."""
    data = ["--data", str(place / "images"), "--out", str(tmp_path / "student")]
    recipe = ["--recipe", "deit3-s16", "--image-size", "16"]
    teacher = ["--teacher", str(place / "run"), "--distillation", "hard"]
    teacher += ["--sam-rho", "0.05", "--learning-rate", "1e-3"]
    assert main(["train", *data, *SMALL, *recipe, *teacher]) == 0
    config = Run.load(tmp_path / "student").model.config

    assert (config.layer_scale, config.activation) == (1e-4, "gelu")
    assert config.drop_path_rate == RECIPES["deit3-s16"].drop_path_rate
