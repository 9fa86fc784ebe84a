"""Tests of keras_vit.cli.main: help, usage errors, and what errors look like."""

import argparse
import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keras_vit import environment
from keras_vit.cli import flags, main, recipe_flags, train
from keras_vit.cli.main import make_parser
from keras_vit.training import MODELS, RECIPES

COMMANDS = ("train", "pretrain", "predict", "evaluate", "push")
USAGE = [
    [],
    ["fly"],
    ["train"],
    ["train", "--data", "x"],
    ["train", "--data", "x", "--out", "y", "--epochs", "0"],
    ["train", "--data", "x", "--out", "y", "--image-size", "big"],
    ["predict", "run"],
    ["evaluate"],
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples_and_every_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each subcommand explains itself, gives examples, and no flag hides its default."""
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    shown = capsys.readouterr().out

    assert stopped.value.code == 0
    assert f"examples:\n  keras-vit {command} " in shown
    parsers: Any = make_parser()._subparsers
    parser = parsers._group_actions[0].choices[command]
    for action in parser._actions:
        if action.option_strings and not action.required and action.dest != "help":
            assert "default" in str(action.help), action.dest


def test_the_defaults_in_the_help_are_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers of the help text are those of the recipes and models."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    digits, scratch, tuned = (RECIPES[name] for name in ("digits", "scratch", "fine-tune"))

    for text in (
        f"{digits.epochs} for the digits, {scratch.epochs} for a folder, "
        f"{tuned.epochs} with --weights",
        f"images per step, over all devices (default: {scratch.batch_size})",
        f"{digits.learning_rate} for the digits, {scratch.learning_rate} for a folder, "
        f"{tuned.learning_rate} with --weights",
        f"{MODELS['digits'].input_shape[0]} for digits, {MODELS['tiny'].input_shape[0]} for tiny",
        f"{MODELS['digits'].patch_size} for digits, {MODELS['tiny'].patch_size} for tiny",
    ):
        assert text in shown
    assert digits.batch_size == scratch.batch_size == tuned.batch_size


@pytest.mark.parametrize("argv", USAGE)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed but one line that points to the help."""
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    shown = capsys.readouterr()

    assert stopped.value.code == 2
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "error: " in shown.err
    assert "--help" in shown.err


def run_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(train, "run", fail)
    return main(["train", "--data", "x", "--out", "y"])


ERRORS: list[tuple[BaseException, int, str]] = [
    (ValueError("Two\nlines."), 1, "keras-vit: error: Two lines.\n"),
    (FileNotFoundError("Gone."), 1, "keras-vit: error: Gone.\n"),
    (ImportError("pip install x"), 1, "keras-vit: error: pip install x\n"),
    (KeyboardInterrupt(), 130, "keras-vit: Interrupted: nothing was saved.\n"),
    (KeyboardInterrupt("Saved."), 130, "keras-vit: Saved.\n"),
]


@pytest.mark.parametrize(("error", "code", "line"), ERRORS)
def test_errors_are_one_line(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the user did wrong is told in one line on stderr, with the documented exit code."""
    assert run_with(monkeypatch, error) == code
    assert capsys.readouterr().err == line


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TypeError inside is a bug, and keeps its traceback."""
    with pytest.raises(TypeError):
        run_with(monkeypatch, TypeError("bug"))


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """Runs the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return main


WEIGHTS = [
    (["--weights", "x.npz"], "no model file 'x.npz'"),
    (["--weights", "imagenet21k"], "as a published name it needs --model"),
    (["--model", "Ti/16", "--weights", "x.npz", "--patch-size", "8"], "is the checkpoint's"),
    (["--model", "tiny", "--weights", "x.npz"], "no model 'tiny'; choose one of Ti/16"),
    (["--model", "Ti/16", "--weights", "gone.npz"], "gone.npz"),
]


@pytest.mark.parametrize(("argv", "message"), WEIGHTS)
def test_weights_that_do_not_fit_are_refused(
    argv: list[str],
    message: str,
    in_folder: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Flags that contradict a checkpoint are told, not ignored, and nothing is written."""
    assert in_folder(["train", "--data", "digits", "--out", "run", *argv]) == 1
    assert message in capsys.readouterr().err
    assert not Path("run").exists()


SETTINGS = [
    (["--set", "width=3"], "no field 'width' that a recipe may set"),
    (["--set", "classes=3"], "classes is decided by the data"),
    (["--set", "drop_path_rate=0.1"], "drop_path_rate is decided by the recipe's field of that"),
    (["--set", "dropout_rate=much"], "dropout_rate is decided by the recipe's field"),
    (["--set", "dropout_rate=2"], "dropout_rate must lie between 0 and 0.99"),
    (["--set", "remat=true"], "remat is decided by Execution (--remat)"),
    (["--set", "hidden_dim=65"], "hidden_dim must be a multiple of num_heads=4"),
    (["--set", "pooling=mean"], "pooling must be one of"),
    (["--set", "pooling=token"], 'pooling="token" needs class_token=True'),
    (["--model", "Ti/16", "--weights", "x.npz", "--set", "pooling=avg"], "for fresh weights"),
    (["--recipe", "plain-s32"], "no recipe 'plain-s32'; choose one of digits, "),
    (["--recipe", "deit3-s16", "--layer-decay", "0.7"], "LAMB"),
]


@pytest.mark.parametrize(("argv", "message"), SETTINGS)
def test_settings_that_do_not_fit_are_refused(
    argv: list[str],
    message: str,
    in_folder: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence, before an image is read, and nothing is written."""
    assert in_folder(["train", "--data", "digits", "--out", "run", *argv]) == 1
    assert message in capsys.readouterr().err
    assert not Path("run").exists()


FLAGS: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    (["--weight-decay", "0"], {"weight_decay": 0.0}),
    (["--drop-path", "0.2"], {"drop_path_rate": 0.2}),
    (["--average", "0.99"], {"average": 0.99}),
    (["--average", "0"], {"average": None}),
    (["--patience", "7"], {"patience": 7}),
    (["--patience", "0"], {"patience": None}),
    (["--balance"], {"balance": True}),
    (["--learning-rate", "sweep"], {}),
    (["--sam-rho", "0.05"], {"sam_rho": 0.05}),
    (["--mixup", "0.8", "--cutmix", "1"], {"mixup": 0.8, "cutmix": 1.0}),
    (["--layer-decay", "0.7"], {"layer_decay": 0.7}),
    (["--set", "dropout_rate=0.1"], {"dropout_rate": 0.1}),
    (
        ["--set", "pooling=avg", "--set", "class_token=false"],
        {"model": {"pooling": "avg", "class_token": False}},
    ),
]


@pytest.mark.parametrize(("argv", "changes"), FLAGS)
def test_flags_change_single_numbers_of_the_recipe(
    argv: list[str], changes: dict[str, Any]
) -> None:
    """Each flag its own field, and nothing else."""
    arguments = make_parser().parse_args(["train", "--data", "x", "--out", "y", *argv])
    recipe = dataclasses.replace(RECIPES["scratch"], average=0.5)

    actual = recipe_flags.override_recipe(recipe, arguments)
    assert actual == dataclasses.replace(recipe, **changes)


def test_settings_go_over_those_of_the_recipe() -> None:
    """What is set replaces one field of the recipe's model; the others stay."""
    argv = ["train", "--data", "x", "--out", "y", "--set", "position_embedding=learned"]
    arguments = make_parser().parse_args(argv)
    model = recipe_flags.override_recipe(RECIPES["plain-s16"], arguments).model

    assert model == {**RECIPES["plain-s16"].model, "position_embedding": "learned"}


@pytest.mark.parametrize(
    ("argv", "remat", "xla"),
    [([], None, "auto"), (["--remat", "--xla"], True, True), (["--no-xla"], None, False)],
)
def test_memory_and_xla_are_flags(argv: list[str], remat: object, xla: object) -> None:
    """Of both commands that train."""
    for command in ("train", "pretrain"):
        arguments = make_parser().parse_args([command, "--data", "x", "--out", "y", *argv])
        execution = flags.execution(arguments)
        assert (execution.remat, execution.xla) == (remat, xla)


def test_only_its_own_lines_reach_the_terminal(tmp_path: Path) -> None:
    """TensorFlow's remarks at its import do not, whatever the environment says of its log level.

    Nor does Keras import what it can do without.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TF_")}
    done = subprocess.run(
        [
            *(sys.executable, "-X", "importtime"),
            *("-m", "keras_vit", "predict", str(tmp_path / "gone"), "image.png"),
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    lines = done.stderr.splitlines()
    (line,) = (line for line in lines if not line.startswith("import time:"))
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert done.returncode == 1
    assert line.startswith("keras-vit: error: ")
    assert "keras.models" in imported
    assert not imported & {"matplotlib.colors", "sklearn.base"}


def test_what_keras_can_do_without_is_there_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was imported before stays too; a small module stands for matplotlib."""
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    monkeypatch.setattr(environment, "_KERAS_EXTRAS", ("wave", "json"))
    with environment.without_keras_extras():
        with pytest.raises(ImportError):
            importlib.import_module("wave")
        assert importlib.import_module("json") is sys.modules["json"]
    assert importlib.import_module("wave")


def test_what_is_no_remark_is_said_later(capfd: pytest.CaptureFixture[str]) -> None:
    """Also where the import fails; the error goes on."""

    @environment.without_log_lines()
    def import_framework() -> None:
        os.write(2, b"I0000 00:00:1795404080.989839   32505 port.cc:153] oneDNN is on.\n")
        print("A library of the system is missing.", file=sys.stderr)
        raise ImportError

    with pytest.raises(ImportError):
        import_framework()
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "A library of the system is missing.\nafter\n"
