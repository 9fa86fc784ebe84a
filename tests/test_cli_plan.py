"""Tests of the command line: what `train` chooses, shows and keeps, and what comes next."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_rig
import download_rig as rig
import image_files
import published
import pytest

from keras_vit import data, reporting, training
from keras_vit.cli import flags, output, train
from keras_vit.cli.main import make_parser
from keras_vit.exporting import artefacts
from keras_vit.training import planning
from keras_vit.training.train import make_engine
from keras_vit.weights import resolve

nowhere = cli_rig.nowhere_fixture
ROW = resolve("Ti/16", "imagenet21k")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_files.write_classes(tmp_path_factory.mktemp("cli-plan") / "photos", count=6)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Published weights can be reached; the names that were asked for."""
    asked: list[str] = []

    def reach(weights: str, variant: str, **_: Any) -> str:
        asked.append(variant)
        return "network"

    monkeypatch.setattr("keras_vit.weights.sources.resolve_origin", reach)
    return asked


def decided(photos: Path, *argv: str) -> tuple[training.TrainingPlan, object]:
    """What `train` would train, and its model."""
    arguments = make_parser().parse_args(["train", "--data", str(photos), "--out", "run", *argv])
    settings = flags.Settings.of(arguments, flags.TEACHING)
    given = training.TrainingPlan(
        data=data.load_data(photos),
        model="tiny",
        config=training.MODELS["tiny"],
        recipe=settings.change(training.RECIPES["scratch"]),
        execution=training.Execution(**settings.execution),
    )
    plan, make_model = train.decide(arguments, settings, given, lambda: "the flags' model")
    return plan, make_model()


def test_flags_that_say_what_to_train_are_followed(
    photos: Path,
    reached: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is looked for, and nothing is said; several workers could each choose otherwise."""
    for argv in (
        *(["--model", "tiny"], ["--recipe", "scratch"], ["--set", "pooling=avg"]),
        *(["--set", "patch_size=4"], ["--teacher", "run"]),
    ):
        plan, model = decided(photos, *argv)
        assert model == "the flags' model"
        assert plan.execution == training.Execution()
        assert not capsys.readouterr().out
    assert decided(photos, "--weights", "none")[1] == training.MODELS["tiny"]
    capsys.readouterr()
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    workers = {"TF_CONFIG": json.dumps(cluster), "KERAS_DISTRIBUTION_NUM_PROCESSES": "2"}
    for name, value in workers.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert decided(photos)[1] == "the flags' model"
        assert "nothing is chosen, the flags decide" in capsys.readouterr().out
    assert not reached


def test_other_flags_change_what_is_chosen(
    photos: Path, reached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single numbers, as of any recipe; precision and parts of the user's own stay."""
    monkeypatch.setattr(training.TrainingPlan, "make_model", lambda plan: plan.model)
    argv = ("--epochs", "3", "--set", "flip=false", "--precision", "mixed_float16")
    plan, model = decided(photos, *argv)
    assert (reached, model) == (["Ti/16"], "Ti/16")
    assert (plan.recipe.epochs, plan.recipe.batch_size) == (3, 8)
    assert (plan.recipe.learning_rate, plan.recipe.layer_decay) == (3e-4, 0.75)
    assert not plan.recipe.augmentation.flip
    assert plan.execution.precision == "mixed_float16"


def test_plan_shows_and_writes_nothing(photos: Path, tmp_path: Path) -> None:
    """A line after that of the data, then the command."""
    given = ("--plan", "--out", "run", "--epochs", "2")
    shown = cli_rig.done("train", "--data", photos, *given, folder=tmp_path)
    assert not shown.errors
    _, choice, _ = shown.out.splitlines()
    assert choice.startswith("12 images of 2 classes, the largest 1.0 times the smallest")
    assert ": trains tiny from random weights, as published weights cannot be reached (" in choice
    assert "none. 64x64 pixels, 2 epochs in batches of 8, " in choice
    assert not list(tmp_path.iterdir())


def test_the_first_step_is_guarded_by_smaller_parts(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it exhausts memory, it is taken again in two micro-batches, and the run has them."""
    engine = type(make_engine(training.Execution()))
    plain, failures = engine.step, [MemoryError()]

    def step(self: Any) -> Any:
        if failures:
            raise failures.pop()
        return plain(self)

    monkeypatch.setattr(engine, "step", step)
    small = ("--weights", "none", "--set", "steps=1", "batch_size=8", "--image-size", "16")
    shown = cli_rig.done("train", "--data", photos, "--out", "run", *small, folder=tmp_path)
    assert "Memory was exhausted at step 1: from step 1 on each batch is computed in 2" in shown.out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["execution"]["gradient_accumulation_steps"], config["result"]["steps"]) == (2, 1)


def test_a_log_says_how_long_it_will_take(capsys: pytest.CaptureFixture[str]) -> None:
    """After twenty steps, if no epoch has said it before; a program reads it from the epochs."""
    numbers = {"loss": 1.0, "gradient_norm": 1.0, "images_per_second": 9.0, "memory": 1}
    for count, is_json, expected in ((30, False, 1), (30, True, 0), (19, False, 0)):
        display = output.TrainDisplay(json=is_json)
        for step in range(1, count + 1):
            left: Any = {**numbers, "seconds_left": 740.0 - step}
            display.show(training.StepDone(step=step, steps=600, epoch=1, **left))
        assert capsys.readouterr().out.count("time left about 12:00") == expected


def test_classes_without_test_images_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image_files.write_classes(tmp_path, count=12, classes=("cat", "dog"))
    image_files.write_classes(tmp_path, count=1, classes=("owl",))
    images = flags.load_data(argparse.Namespace(data=str(tmp_path), strict=False, json=False))
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
    assert "was already finished" in cli_rig.done(*command, "--resume").out


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
        files = ("train,plain,plain/000.jpg", "test,plain,plain/001.png")
        (root / name / "splits.csv").write_text("\n".join(["split,label,path", *files]) + "\n")
    return root


def checked(result: cli_rig.Result) -> list[str]:
    """The words of the last line; what they name is there."""
    arguments = vars(make_parser().parse_args(result.next))
    named = [arguments.get(name) for name in ("data", "image")]
    named += [arguments.get(name, "") for name in ("source", "weights")]
    for name in filter(None, named):
        is_address = name not in named[:2] and " " not in name
        assert is_address or name in ("photos", "digits") or Path(name).exists(), result.next
    return result.next


@pytest.fixture
def said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a command in the folder, and returns the words of its last line."""
    monkeypatch.chdir(folder)
    return lambda *argv: checked(cli_rig.done(*argv))


def test_a_plan_goes_on_to_its_training(said: Callable[..., list[str]]) -> None:
    """With its own flags; without --out to a folder with the name of the data."""
    expected = ["train", "--data", "my photos", "--weights", "none", "--epochs", "7"]
    assert said(*expected, "--plan") == [*expected, "--out", "my photos-run"]
    named = ["train", "--data", "my photos", "--out", "a run", "--model", "digits"]
    assert said(named[0], "--plan", *named[1:]) == named


def test_a_start_from_weights_is_planned_by_what_they_have_seen(
    said: Callable[..., list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No labels in a run of `pretrain`, as its folder or its file; a recipe by name is itself."""
    cli_rig.make_run(folder / "tuned", recipe="fine-tune")
    asked, fine_tuning = [], planning.fine_tuning

    def listening(images: data.ImageData, **given: Any) -> training.Recipe:
        asked.append(given)
        return fine_tuning(images, **given)

    monkeypatch.setattr(planning, "fine_tuning", listening)
    for argv, given in (
        (["features 1"], {"anew": True}),
        (["features 1/model.keras"], {"anew": True}),
        (["my run"], {"anew": True}),
        (["my run", "--batch-size", "4"], {"anew": True, "batch_size": 4}),
        (["my run", "--lora", "2"], {"anew": True, "layer_decay": 1.0}),
        (["tuned"], {"anew": False}),
        (["my run", "--recipe", "fine-tune"], None),
    ):
        assert said("train", "--data", "my photos", "--plan", "--weights", *argv)[0] == "train"
        assert asked == ([] if given is None else [given])
        asked.clear()


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
    for words in ("", "--variant Ti/16", "--variant B/16", "--variant g/14", "--family dinov2"):
        assert said("list", *words.split())[0] in ("list", "train", "export")


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
    assert said("export", "my run", "--out", "x y", "--formats", "onnx") == ["check", "x y"]
    (folder / "my run" / "sample.png").unlink()


def test_trainings_go_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample beside the run, or a measurement; a classifier after labels, a file without."""
    output.TrainDisplay(json=False).show_finished(training.Run.load(folder / "features 1"))
    words = checked(cli_rig.Result(0, capsys.readouterr().out, []))
    assert (words[0], words[-2:]) == ("train", ["--weights", str(folder / "features 1")])

    out, data = str(tmp_path), {"source": str(folder / "my photos")}
    pretraining: dict[str, Any] = {"data": data, "objective": "masked-patches"}
    for file, config, labels, expected in (
        ("none", {"data": data}, ("a", "b"), ["evaluate", out]),
        ("none", pretraining, ("a", "b"), ["train", "--data", data["source"]]),
        ("none", pretraining, (), ["export", out, "--out", "export"]),
        ("sample.png", {"data": data}, ("a", "b"), ["predict", out, f"{out}/sample.png"]),
    ):
        (tmp_path / file).write_text("")
        run: Any = training.Run(path=tmp_path, model=None, labels=labels, config=config)
        words = [str(word) for word in output.after_training(run)]
        assert words[: len(expected)] == expected
        make_parser().parse_args(words)
