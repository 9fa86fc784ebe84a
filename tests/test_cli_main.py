"""Tests of keras_vit.cli.main and of the flags: help, values, and what they make of a recipe."""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable
from typing import Any, get_args

import cli_rig
import published
import pytest

from keras_vit import environment
from keras_vit.cli import flags, train
from keras_vit.cli.main import make_parser
from keras_vit.training import MODELS, RECIPES, Execution
from keras_vit.weights.positions import Method

# The flags of each command, in the order of its help. A number that few change is no flag, but a
# setting.
NAMES: dict[str, str] = published.TABLES["flags"]
RIGHT: list[tuple[Callable[[str], Any], dict[str, Any]]] = [
    (flags.whole(1), {"12": 12}),
    (flags.whole(0, 2**32 - 1), {"0": 0, str(2**32 - 1): 2**32 - 1}),
    (flags.setting, {"pooling=avg": ("pooling", "avg"), "layer_scale=1e-4": ("layer_scale", 1e-4)}),
    (flags.setting, {"class_token=False": ("class_token", False), "a=4": ("a", 4)}),
    (flags.setting, {"a=none": ("a", None), "a=3,4": ("a", (3, 4)), "a=no": ("a", False)}),
    (flags.setting, {"mesh=a=2,b=1": ("mesh", "a=2,b=1"), "strategy=none": ("strategy", "none")}),
    (flags.words(("qkv", "out")), {"out,qkv": ("out", "qkv")}),
    (flags.size, {"64": (64, 64), "48x64": (48, 64)}),
    (flags.matching("(?i).*\\.csv", "x"), {"a.CSV": "a.CSV"}),
]
WRONG: list[tuple[Callable[[str], Any], tuple[str, ...]]] = [
    (flags.whole(1), ("0", "-1", "2.5", "")),
    (flags.whole(0, 2**32 - 1), ("-1", str(2**32))),
    (flags.setting, ("pooling", "=avg", "pooling=")),
    (flags.words(("qkv", "out")), ("qkv,head",)),
    (flags.size, ("0", "4x5x6", "x")),
    (flags.SHA256, ("0" * 63, "g" * 64)),
]
RECIPE: dict[str, dict[str, Any]] = {
    "": {},
    "--epochs 7": {"epochs": 7},
    "--set steps=7": {"epochs": None, "steps": 7},
    "--batch-size 8 --set batch_size=9": {"batch_size": 9},
    "--set weight_decay=0 drop_path_rate=0.2": {"weight_decay": 0.0, "drop_path_rate": 0.2},
    "--set average=0.99 --set average=none": {"average": None},
    "--set patience=7": {"patience": 7},
    "--set balance=true sam_rho=0.05": {"balance": True, "sam_rho": 0.05},
    "--set mixup=0.8 cutmix=1": {"mixup": 0.8, "cutmix": 1.0},
    "--set layer_decay=0.7 betas=0.9,0.95": {"layer_decay": 0.7, "betas": (0.9, 0.95)},
    "--set flip=true": {
        "augmentation": dataclasses.replace(RECIPES["scratch"].augmentation, flip=True)
    },
    "--set dropout_rate=0.1": {"dropout_rate": 0.1},
    "--set pooling=avg class_token=false": {"model": {"pooling": "avg", "class_token": False}},
}


def test_help_shows_examples_and_every_default() -> None:
    """Each subcommand explains itself, gives examples, and no flag hides its default."""
    parsers: Any = make_parser()._subparsers
    for command in ("train", "pretrain", "predict", "evaluate", "push"):
        assert f"examples:\n  keras-vit {command} " in cli_rig.done(command, "--help").out
        for action in parsers._group_actions[0].choices[command]._actions:
            if action.option_strings and not action.required and action.dest != "help":
                assert "default" in str(action.help), (command, action.dest)


def test_flags_come_and_go_by_decision() -> None:
    """Each command has these, and no flag is taken by the first letters of its name."""
    parsers: Any = make_parser()._subparsers
    found = {
        command: {
            *(name for action in parser._actions for name in action.option_strings),
            *(str(action.metavar) for action in parser._actions if not action.option_strings),
        }
        for command, parser in parsers._group_actions[0].choices.items()
    }
    assert found == {name: {*text.split(), "-h", "--help"} for name, text in NAMES.items()}


def test_the_defaults_in_the_help_are_the_tables() -> None:
    """The numbers of the help text are those of the recipes and models."""
    shown = " ".join(cli_rig.done("train", "--help").out.split())
    digits, scratch, tuned = (RECIPES[name] for name in ("digits", "scratch", "fine-tune"))

    for text in (
        f"{digits.epochs} for the digits, {scratch.epochs} for a folder, "
        f"{tuned.epochs} with --weights, or as many as 200 steps take; "
        f"{RECIPES['masked-patches'].epochs} in pretrain",
        f"images per step, over all devices (default: {scratch.batch_size}; with --weights",
        f"{digits.learning_rate} for the digits, {scratch.learning_rate} for a folder, "
        f"{tuned.learning_rate} with --weights, of few images 0.0003; "
        f"{RECIPES['masked-patches'].learning_rate} in pretrain",
        f"{MODELS['digits'].input_shape[0]} for digits, {MODELS['tiny'].input_shape[0]} for tiny",
        f"{MODELS['digits'].patch_size} for digits, {MODELS['tiny'].patch_size} for tiny",
    ):
        assert text in shown
    assert digits.batch_size == scratch.batch_size == tuned.batch_size


def test_values_are_read_or_repeated_in_the_error() -> None:
    """Each kind reads as documented; the sentence shows what was received and what is allowed."""
    for read, values in RIGHT:
        assert {text: read(text) for text in values} == values
    for read, texts in WRONG:
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is not a "):
                read(text)
    # The command line, which answers without NumPy, has a list of its own.
    assert get_args(Method) == train.POSITIONS


def settings(argv: str, command: str = "train", objective: Any = flags.TEACHING) -> flags.Settings:
    words = [command, "--data", "x", "--out", "y", *argv.split()]
    return flags.Settings.of(make_parser().parse_args(words), objective)


def test_settings_change_single_numbers_of_the_recipe() -> None:
    """Each its own field, and nothing else; of the model what is set, and no other field."""
    recipe = dataclasses.replace(RECIPES["scratch"], average=0.5)
    for argv, changes in RECIPE.items():
        found = settings(argv)
        actual = found.change(recipe)
        assert actual == dataclasses.replace(recipe, **changes), argv
    with pytest.raises(ValueError, match="no field 'augmentation' that a recipe may set"):
        recipe.changed(augmentation=recipe.augmentation)
    paper = RECIPES["plain-s16"]
    model = paper.changed(position_embedding="learned").model
    assert model == {**paper.model, "position_embedding": "learned"}


def test_settings_go_to_what_takes_them() -> None:
    """The execution's, the teacher's and those of a new model; the recipe has none of them."""
    found = settings("--set remat=true xla=false temperature=2 distillation_weight=1 patch_size=4")
    assert Execution(**found.execution) == Execution(remat=True, xla=False)
    assert (found.objective, found.model) == ({"temperature": 2, "weight": 1}, {"patch_size": 4})
    assert found.change(RECIPES["scratch"]) == RECIPES["scratch"]
    found = settings("--gradient-accumulation-steps 2 --precision mixed_float16", "pretrain")
    assert Execution(**found.execution) == Execution(
        gradient_accumulation_steps=2, precision="mixed_float16"
    )


def test_the_settings_of_the_help_are_settings() -> None:
    """Each that the help shows, with the value that it shows."""
    for command, objective in (("train", flags.TEACHING), ("pretrain", flags.MASKING)):
        text = cli_rig.done(command, "--help").out.partition("\nsettings, ")[2]
        shown = re.findall(r"^  (\w+=.*?)(?:  |$)", text, re.MULTILINE)
        assert len(shown) > 12
        for words in shown:
            found = settings(f"--set {words}", command, objective)
            assert found.change(RECIPES["scratch"]).config(MODELS["tiny"])
            assert Execution(**found.execution)
            assert len(found.objective) + len(found.recipe) + len(found.execution) in (0, 1)


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
