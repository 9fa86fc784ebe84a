"""Tests of keras_vit.cli.flags."""

import argparse
from collections.abc import Callable
from typing import Any, get_args

import pytest

from keras_vit.cli import flags, train
from keras_vit.weights.positions import Method

RIGHT: list[tuple[Callable[[str], Any], str, Any]] = [
    (flags.count, "12", 12),
    (flags.seed, "0", 0),
    (flags.seed, str(2**32 - 1), 2**32 - 1),
    (flags.positive, "1e-3", 0.001),
    (flags.index, "0", 0),
    (flags.fraction, "0.75", 0.75),
    (flags.fraction, "1", 1.0),
    (flags.not_negative, "0", 0.0),
    (flags.not_negative, "1e-4", 0.0001),
    (flags.share, "0.9999", 0.9999),
    (flags.setting, "pooling=avg", ("pooling", "avg")),
    (flags.setting, "class_token=False", ("class_token", False)),
    (flags.setting, "position_embedding=none", ("position_embedding", None)),
    (flags.setting, "num_registers=4", ("num_registers", 4)),
    (flags.setting, "layer_scale=1e-4", ("layer_scale", 0.0001)),
    (flags.setting, "resnet_layers=3,4,9", ("resnet_layers", (3, 4, 9))),
    (flags.words(("qkv", "out")), "out,qkv", ("out", "qkv")),
    (flags.size, "64", (64, 64)),
    (flags.size, "48x64", (48, 64)),
]
WRONG: list[tuple[Callable[[str], Any], str]] = [
    (flags.count, "0"),
    (flags.count, "-1"),
    (flags.count, "2.5"),
    (flags.seed, "-1"),
    (flags.seed, str(2**32)),
    (flags.positive, "0"),
    (flags.positive, "nan"),
    (flags.positive, "inf"),
    (flags.positive, "fast"),
    (flags.index, "-1"),
    (flags.fraction, "1.5"),
    (flags.fraction, "0"),
    (flags.not_negative, "-0.1"),
    (flags.not_negative, "nan"),
    (flags.not_negative, "much"),
    (flags.share, "1"),
    (flags.setting, "pooling"),
    (flags.setting, "=avg"),
    (flags.setting, "pooling="),
    (flags.words(("qkv", "out")), "qkv,head"),
    (flags.size, "0"),
    (flags.size, "4x5x6"),
    (flags.size, "x"),
]


def test_every_way_of_resampling_is_a_choice() -> None:
    """The command line, which answers without NumPy, has a list of its own."""
    assert get_args(Method) == train.POSITIONS


@pytest.mark.parametrize(("read", "text", "expected"), RIGHT)
def test_right_values_are_read(read: Callable[[str], Any], text: str, expected: Any) -> None:
    """Each kind of value reads as documented."""
    assert read(text) == expected


@pytest.mark.parametrize(("read", "text"), WRONG)
def test_wrong_values_are_repeated_in_the_error(read: Callable[[str], Any], text: str) -> None:
    """The sentence shows what was received and says what is allowed."""
    with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is not a "):
        read(text)
