"""Tests of keras_vit.cli.main and of the flags: help, values, and what they make of a recipe."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any, get_args

import cli_rig
import pytest

from keras_vit import environment
from keras_vit.cli import flags, recipe_flags, train
from keras_vit.cli.main import make_parser
from keras_vit.training import MODELS, RECIPES
from keras_vit.weights.positions import Method


def test_help_shows_examples_and_every_default() -> None:
    """Each subcommand explains itself, gives examples, and no flag hides its default."""
    parsers: Any = make_parser()._subparsers
    for command in ("train", "pretrain", "predict", "evaluate", "push"):
        assert f"examples:\n  keras-vit {command} " in cli_rig.done(command, "--help").out
        for action in parsers._group_actions[0].choices[command]._actions:
            if action.option_strings and not action.required and action.dest != "help":
                assert "default" in str(action.help), (command, action.dest)


def test_the_defaults_in_the_help_are_the_tables() -> None:
    """The numbers of the help text are those of the recipes and models."""
    shown = " ".join(cli_rig.done("train", "--help").out.split())
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


WORDS = flags.words(("qkv", "out"))
RIGHT: list[tuple[Callable[[str], Any], dict[str, Any]]] = [
    (flags.count, {"12": 12}),
    (flags.seed, {"0": 0, str(2**32 - 1): 2**32 - 1}),
    (flags.positive, {"1e-3": 0.001}),
    (flags.index, {"0": 0}),
    (flags.fraction, {"0.75": 0.75, "1": 1.0}),
    (flags.not_negative, {"0": 0.0, "1e-4": 0.0001}),
    (flags.share, {"0.9999": 0.9999}),
    (flags.setting, {"pooling=avg": ("pooling", "avg"), "layer_scale=1e-4": ("layer_scale", 1e-4)}),
    (flags.setting, {"class_token=False": ("class_token", False), "a=4": ("a", 4)}),
    (flags.setting, {"a=none": ("a", None), "a=3,4,9": ("a", (3, 4, 9))}),
    (WORDS, {"out,qkv": ("out", "qkv")}),
    (flags.size, {"64": (64, 64), "48x64": (48, 64)}),
]
WRONG: list[tuple[Callable[[str], Any], tuple[str, ...]]] = [
    (flags.count, ("0", "-1", "2.5")),
    (flags.seed, ("-1", str(2**32))),
    (flags.positive, ("0", "nan", "inf", "fast")),
    (flags.index, ("-1",)),
    (flags.fraction, ("1.5", "0")),
    (flags.not_negative, ("-0.1", "nan", "much")),
    (flags.share, ("1",)),
    (flags.setting, ("pooling", "=avg", "pooling=")),
    (WORDS, ("qkv,head",)),
    (flags.size, ("0", "4x5x6", "x")),
]


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


def parsed(argv: str, *, command: str = "train") -> argparse.Namespace:
    return make_parser().parse_args([command, "--data", "x", "--out", "y", *argv.split()])


FLAGS: dict[str, dict[str, Any]] = {
    "": {},
    "--weight-decay 0": {"weight_decay": 0.0},
    "--drop-path 0.2": {"drop_path_rate": 0.2},
    "--average 0.99": {"average": 0.99},
    "--average 0": {"average": None},
    "--patience 7": {"patience": 7},
    "--patience 0": {"patience": None},
    "--balance": {"balance": True},
    "--sam-rho 0.05": {"sam_rho": 0.05},
    "--mixup 0.8 --cutmix 1": {"mixup": 0.8, "cutmix": 1.0},
    "--layer-decay 0.7": {"layer_decay": 0.7},
    "--set dropout_rate=0.1": {"dropout_rate": 0.1},
    "--set pooling=avg --set class_token=false": {
        "model": {"pooling": "avg", "class_token": False}
    },
}


def test_flags_change_single_numbers_of_the_recipe() -> None:
    """Each flag its own field, and nothing else; of the model what is set, and no other field."""
    recipe = dataclasses.replace(RECIPES["scratch"], average=0.5)
    for argv, changes in FLAGS.items():
        actual = recipe_flags.override_recipe(recipe, parsed(argv))
        assert actual == dataclasses.replace(recipe, **changes), argv
    paper = RECIPES["plain-s16"]
    model = recipe_flags.override_recipe(paper, parsed("--set position_embedding=learned")).model
    assert model == {**paper.model, "position_embedding": "learned"}


def test_memory_and_xla_are_flags() -> None:
    """Of both commands that train."""
    cases = {"": (None, "auto"), "--remat --xla": (True, True), "--no-xla": (None, False)}
    for argv, expected in cases.items():
        for command in ("train", "pretrain"):
            execution = flags.execution(parsed(argv, command=command))
            assert (execution.remat, execution.xla) == expected, argv


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
