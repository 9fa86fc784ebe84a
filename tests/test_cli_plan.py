"""Tests of keras_vit.cli.plan: what `keras-vit train` chooses, shows and keeps."""

import json
from pathlib import Path
from typing import Any

import cli_rig
import download_rig as rig
import image_files
import published
import pytest

from keras_vit import data, training
from keras_vit.cli import flags, output, plan, recipe_flags
from keras_vit.cli.main import make_parser
from keras_vit.training.train import make_engine
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
    """Published weights can be reached; the names that were asked for."""
    asked: list[str] = []

    def reach(weights: str, variant: str, **_: Any) -> str:
        asked.append(variant)
        return "network"

    monkeypatch.setattr("keras_vit.weights.sources.resolve_origin", reach)
    return asked


def decided(photos: Path, *argv: str) -> plan.Decision:
    """What `train` would train."""
    arguments = make_parser().parse_args(["train", "--data", str(photos), "--out", "run", *argv])
    execution = flags.execution(arguments)
    recipe = recipe_flags.override_recipe(training.RECIPES["scratch"], arguments)
    given = plan.Decision(recipe, execution, lambda: "the flags' model")
    config = training.MODELS["tiny"]
    return plan.decide(arguments, data.load_data(photos), config=config, given=given)


def test_flags_that_say_what_to_train_are_followed(
    photos: Path,
    reached: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is looked for, and nothing is said; several workers could each choose otherwise."""
    for argv in (
        *(["--model", "tiny"], ["--recipe", "scratch"], ["--set", "pooling=avg"]),
        *(["--patch-size", "4"], ["--teacher", "run"]),
    ):
        decision = decided(photos, *argv)
        assert decision.start() == "the flags' model"
        assert decision.execution == training.Execution()
        assert not capsys.readouterr().out
    assert decided(photos, "--weights", "none").start() == training.MODELS["tiny"]
    capsys.readouterr()
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    workers = {"TF_CONFIG": json.dumps(cluster), "KERAS_DISTRIBUTION_NUM_PROCESSES": "2"}
    for name, value in workers.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert decided(photos).start() == "the flags' model"
        assert "nothing is chosen, the flags decide" in capsys.readouterr().out
    assert not reached


def test_other_flags_change_what_is_chosen(photos: Path, reached: list[str]) -> None:
    """Single numbers, as of any recipe; precision and parts of the user's own stay."""
    decision = decided(photos, "--epochs", "3", "--no-flip", "--precision", "mixed_float16")
    assert reached == ["Ti/16"]
    assert (decision.recipe.epochs, decision.recipe.batch_size) == (3, 8)
    assert decision.recipe.learning_rate == training.RECIPES["fine-tune"].learning_rate
    assert not decision.recipe.augmentation.flip
    assert decision.execution.precision == "mixed_float16"


def test_plan_shows_and_writes_nothing(photos: Path, tmp_path: Path) -> None:
    """A line after that of the data, then the command."""
    given = ("--plan", "--out", "run", "--epochs", "2")
    shown = cli_rig.done("train", "--data", photos, *given, folder=tmp_path)
    assert not shown.errors
    _, choice, _ = shown.out.splitlines()
    assert choice.startswith("12 images of 2 classes, the largest 1.0 times the smallest")
    assert ": trains tiny from fresh weights, as published weights cannot be reached (" in choice
    assert "none. 64x64 pixels, 2 epochs in batches of 8, " in choice
    assert not list(tmp_path.iterdir())


def test_the_first_step_is_guarded_by_smaller_parts(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it exhausts memory, it is taken again in two parts, and the run has them."""
    engine = type(make_engine(training.Execution()))
    plain, failures = engine.step, [MemoryError()]

    def step(self: Any) -> Any:
        if failures:
            raise failures.pop()
        return plain(self)

    monkeypatch.setattr(engine, "step", step)
    flags = ("--weights", "none", "--steps", "1", "--batch-size", "8", "--image-size", "16")
    shown = cli_rig.done("train", "--data", photos, "--out", "run", *flags, folder=tmp_path)
    assert "Memory was exhausted at step 1: from step 1 on each batch is computed in 2" in shown.out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["execution"]["accumulate"], config["result"]["steps"]) == (2, 1)


def test_a_log_says_how_long_it_will_take(capsys: pytest.CaptureFixture[str]) -> None:
    """After twenty steps, if no epoch has said it before; a program reads it from the epochs."""
    for count, is_json, expected in ((30, False, 1), (30, True, 0), (19, False, 0)):
        display = output.TrainDisplay(json=is_json)
        for number in range(1, count + 1):
            display.show(
                training.StepDone(
                    step=number,
                    steps=600,
                    epoch=1,
                    loss=1.0,
                    gradient_norm=1.0,
                    images_per_second=9.0,
                    memory=1,
                    seconds_left=740.0 - number,
                )
            )
        assert capsys.readouterr().out.count("time left about 12:00") == expected


def test_classes_without_test_images_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image_files.write_classes(tmp_path, count=12, classes=("cat", "dog"))
    image_files.write_classes(tmp_path, count=1, classes=("owl",))
    images = flags.load_data(str(tmp_path), strict=False, json=False)
    assert images.counts["test"] == 2
    said = "Without test images, so that nothing is measured of them: 1 (owl)"
    assert said in capsys.readouterr().out


@pytest.mark.full
def test_a_folder_is_fine_tuned_and_resumed_as_it_was_chosen(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a server: the plan asks for a byte, the training for the file.

    It is interrupted, and goes on without the server, the cache, or a flag: what can be reached now
    would be another model.
    """
    file = published.write(tmp_path / "ti16.npz", ROW.config)
    out = tmp_path / "run"
    command = ("train", "--data", photos, "--out", out)

    def interrupt(display: object, event: training.Event) -> None:
        raise KeyboardInterrupt

    with rig.serving() as server, monkeypatch.context() as patched:
        server.files[f"/{ROW.name}.npz"] = file.read_bytes()
        patched.setenv("KERAS_VIT_MIRROR", server.url)
        small = (*command, "--image-size", "32")
        said = cli_rig.done(*small, "--plan").out
        assert "fine-tunes Ti/16 from imagenet21k (in the mirror)." in said
        assert len(server.requests) == 1
        assert not (tmp_path / "keras").exists()
        patched.setattr(output.TrainDisplay, "show", interrupt)
        assert cli_rig.run(*small, "--epochs", "2").code == 130
    settings = json.loads((tmp_path / "run.unfinished" / "settings.json").read_text())
    assert (settings["model"]["hidden_dim"], settings["recipe"]["epochs"]) == (192, 2)

    (tmp_path / "keras").rename(tmp_path / "elsewhere")
    cli_rig.done(*command, "--resume")
    run = training.Run.load(out)
    assert (run.model.config.hidden_dim, run.image_size) == (192, (32, 32))
    assert run.config["execution"]["precision"] == settings["execution"]["precision"]
    assert len(run.config["recipe"]) == len(settings["recipe"])
    assert "is a finished run" in cli_rig.done(*command, "--resume").out
