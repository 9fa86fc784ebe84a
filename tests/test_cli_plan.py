"""Tests of keras_vit.cli.plan: what `keras-vit train` chooses, shows and keeps."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import download_rig as rig
import image_files
import published
import pytest

from keras_vit import data, training
from keras_vit.cli import flags, main, output, plan, recipe_flags
from keras_vit.cli.main import make_parser
from keras_vit.training import planning
from keras_vit.training.train import started_recipe
from keras_vit.weights import resolve

ROW = resolve("Ti/16", "imagenet21k")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six images of each of two classes."""
    return image_files.write_classes(tmp_path_factory.mktemp("cli-plan") / "photos", count=6)


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are in the cache, nor in the mirror."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "no-mirror"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Published weights can be reached; the names that were asked for. Nothing is measured."""
    asked: list[str] = []

    def reach(weights: str, variant: str, **_: Any) -> str:
        asked.append(variant)
        return "network"

    monkeypatch.setattr("keras_vit.weights.sources.reach", reach)
    monkeypatch.setattr(planning.TrainingPlan, "measured", lambda self, *_, **__: self)
    return asked


def decided(photos: Path, *argv: str) -> plan.Decision:
    """What `train` would train."""
    arguments = make_parser().parse_args(["train", "--data", str(photos), "--out", "run", *argv])
    execution = flags.execution(arguments)
    recipe = recipe_flags.override_recipe(training.RECIPES["scratch"], arguments)
    given = plan.Decision(recipe, execution, lambda: "the flags' model")
    config = training.MODELS["tiny"]
    return plan.decide(arguments, data.load_data(photos), config=config, given=given)


SAYING = (
    ["--model", "tiny"],
    ["--recipe", "scratch"],
    ["--set", "pooling=avg"],
    ["--patch-size", "4"],
    ["--teacher", "run"],
)


@pytest.mark.parametrize("argv", SAYING)
def test_flags_that_say_what_to_train_are_followed(
    argv: list[str], photos: Path, reached: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is looked for, and nothing is said."""
    decision = decided(photos, *argv)
    assert decision.start() == "the flags' model"
    assert decision.execution == training.Execution()
    assert not reached
    assert not capsys.readouterr().out


def test_other_flags_change_what_is_chosen(photos: Path, reached: list[str]) -> None:
    """Single numbers, as of any recipe; precision and parts of the user's own stay."""
    decision = decided(photos, "--epochs", "3", "--no-flip", "--precision", "mixed_float16")
    assert reached == ["Ti/16"]
    assert (decision.recipe.epochs, decision.recipe.batch_size) == (3, 8)
    assert decision.recipe.learning_rate == training.RECIPES["fine-tune"].learning_rate
    assert not decision.recipe.augmentation.flip
    assert decision.execution.precision == "mixed_float16"


def test_none_asks_nobody(photos: Path, reached: list[str]) -> None:
    decision = decided(photos, "--weights", "none")
    assert decision.start() == training.MODELS["tiny"]
    assert not reached


def test_a_training_older_than_patience_goes_on_without_it(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether flags say what is trained or nothing does; of a newer one nothing changes."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    recipe = training.RECIPES["scratch"].to_dict()
    config: dict[str, Any] = {"model": training.MODELS["tiny"].to_dict(), "recipe": recipe}
    for name, argv in (("patience", []), ("patience", ["--model", "tiny"]), ("", [])):
        config["recipe"] = {key: value for key, value in recipe.items() if key != name}
        Path("run", "config.json").write_text(json.dumps(config))
        expected = None if name else training.RECIPES["scratch"].patience
        assert decided(photos, "--resume", *argv).recipe.patience == expected
        images = data.load_data(photos)
        found = started_recipe(images, out=Path("run"), existing="resume")
        assert found.patience == expected
    assert decided(photos, "--resume", "--model", "tiny", "--patience", "3").recipe.patience == 3


@pytest.mark.parametrize("name", ["TF_CONFIG", "KERAS_DISTRIBUTION_NUM_PROCESSES"])
def test_several_workers_choose_nothing(
    name: str,
    photos: Path,
    reached: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They could choose otherwise, each for itself."""
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv(name, json.dumps(cluster) if name == "TF_CONFIG" else "2")
    assert decided(photos).start() == "the flags' model"
    assert not reached
    assert "nothing is chosen, the flags decide" in capsys.readouterr().out


def test_too_few_images_and_one_class_are_refused(
    tmp_path: Path, reached: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a sentence, before anything is looked for."""
    image_files.write_classes(tmp_path / "one", count=3, classes=("cat",))
    assert main(["train", "--data", str(tmp_path / "one"), "--plan"]) == 1
    assert "has one class, 'cat'; a classifier needs at least two" in capsys.readouterr().err
    image_files.write_classes(tmp_path / "few", count=1, classes=("cat", "dog", "owl"))
    assert main(["train", "--data", str(tmp_path / "few"), "--plan"]) == 1
    assert "too few for a validation split" in capsys.readouterr().err
    image_files.write_classes(tmp_path / "some", count=12, classes=("cat", "dog"))
    image_files.write_classes(tmp_path / "some", count=1, classes=("owl",))
    images = flags.load_data(str(tmp_path / "some"), strict=False, json=False)
    assert images.counts["test"] == 2
    assert "Without test images, so that nothing is measured of them: 1 (owl)" in (
        capsys.readouterr().out
    )
    assert not reached


def test_plan_shows_and_writes_nothing(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two lines after that of the data, then the command; --json has the same numbers."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--data", str(photos), "--plan", "--out", "run", "--epochs", "2"]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    _, choice, steps, _ = shown.out.splitlines()
    assert choice.startswith("12 images of 2 classes, the largest 1.0 times the smallest")
    assert ": trains tiny from fresh weights, as published weights cannot be reached (" in choice
    assert steps.startswith("64x64 pixels, 2 epochs in batches of 8, ")
    assert " images/s measured, " in steps
    assert not list(tmp_path.iterdir())


@pytest.fixture
def server() -> Iterator[rig.Server]:
    with rig.serving() as server:
        yield server


@pytest.mark.full
def test_a_folder_is_fine_tuned_and_resumed_as_it_was_chosen(
    photos: Path,
    server: rig.Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From a server: the plan asks for a byte, the training for the file.

    It is interrupted, and goes on without the server, the cache, or a flag: what can be reached now
    would be another model.
    """
    file = published.write(tmp_path / "ti16.npz", ROW.config)
    server.files[f"/{ROW.name}.npz"] = file.read_bytes()
    monkeypatch.setenv("KERAS_VIT_MIRROR", server.url)
    out = tmp_path / "run"
    command = ["train", "--data", str(photos), "--out", str(out), "--image-size", "32"]
    monkeypatch.setattr(planning.TrainingPlan, "measured", lambda self, *_, **__: self)
    assert main([*command, "--plan"]) == 0
    assert "fine-tunes Ti/16 from imagenet21k (in the mirror)." in capsys.readouterr().out
    assert len(server.requests) == 1
    assert not (tmp_path / "keras").exists()

    def interrupt(display: object, event: training.Event) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(output.TrainDisplay, "show", interrupt)
        assert main([*command, "--epochs", "2"]) == 130
    settings = json.loads((tmp_path / "run.unfinished" / "settings.json").read_text())
    assert (settings["model"]["hidden_dim"], settings["recipe"]["epochs"]) == (192, 2)

    (tmp_path / "keras").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "no-mirror"))
    assert main(["train", "--data", str(photos), "--out", str(out), "--resume"]) == 0
    run = training.Run.load(out)
    assert (run.model.config.hidden_dim, run.image_size) == (192, (32, 32))
    assert run.config["execution"]["precision"] == settings["execution"]["precision"]
    assert len(run.config["recipe"]) == len(settings["recipe"])
    capsys.readouterr()
    assert main(["train", "--data", str(photos), "--out", str(out), "--resume"]) == 0
    assert "is a finished run" in capsys.readouterr().out
