"""Tests of keras_vit.cli.values."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from keras_vit.cli import values

RIGHT: list[tuple[Callable[[str], Any], str, Any]] = [
    (values.count, "12", 12),
    (values.seed, "0", 0),
    (values.seed, str(2**32 - 1), 2**32 - 1),
    (values.positive, "1e-3", 0.001),
    (values.index, "0", 0),
    (values.fraction, "0.75", 0.75),
    (values.fraction, "1", 1.0),
    (values.not_negative, "0", 0.0),
    (values.not_negative, "1e-4", 0.0001),
    (values.share, "0.9999", 0.9999),
    (values.setting, "pooling=avg", ("pooling", "avg")),
    (values.setting, "class_token=False", ("class_token", False)),
    (values.setting, "position_embedding=none", ("position_embedding", None)),
    (values.setting, "num_registers=4", ("num_registers", 4)),
    (values.setting, "layer_scale=1e-4", ("layer_scale", 0.0001)),
    (values.setting, "resnet_layers=3,4,9", ("resnet_layers", (3, 4, 9))),
    (values.words(("qkv", "out")), "out,qkv", ("out", "qkv")),
    (values.size, "64", (64, 64)),
    (values.size, "48x64", (48, 64)),
]
WRONG: list[tuple[Callable[[str], Any], str]] = [
    (values.count, "0"),
    (values.count, "-1"),
    (values.count, "2.5"),
    (values.seed, "-1"),
    (values.seed, str(2**32)),
    (values.positive, "0"),
    (values.positive, "nan"),
    (values.positive, "inf"),
    (values.positive, "fast"),
    (values.index, "-1"),
    (values.fraction, "1.5"),
    (values.fraction, "0"),
    (values.not_negative, "-0.1"),
    (values.not_negative, "nan"),
    (values.not_negative, "much"),
    (values.share, "1"),
    (values.setting, "pooling"),
    (values.setting, "=avg"),
    (values.setting, "pooling="),
    (values.words(("qkv", "out")), "qkv,head"),
    (values.size, "0"),
    (values.size, "4x5x6"),
    (values.size, "x"),
]


@pytest.mark.parametrize(("read", "text", "expected"), RIGHT)
def test_right_values_are_read(read: Callable[[str], Any], text: str, expected: Any) -> None:
    """Each kind of value reads as documented."""
    assert read(text) == expected


@pytest.mark.parametrize(("read", "text"), WRONG)
def test_wrong_values_are_repeated_in_the_error(read: Callable[[str], Any], text: str) -> None:
    """The sentence shows what was received and says what is allowed."""
    with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is not a "):
        read(text)
