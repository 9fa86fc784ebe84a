"""Reads the values of flags, and says in one sentence what a wrong one should have been."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any


def count(text: str) -> int:
    """Reads a whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def index(text: str) -> int:
    """Reads a whole number from zero."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def seed(text: str) -> int:
    """Reads a seed: NumPy takes 32 bits."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def sha256(text: str) -> str:
    """Reads a SHA-256."""
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 64 hexadecimal digits")
    return text.lower()


def positive(text: str) -> float:
    """Reads a number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def not_negative(text: str) -> float:
    """Reads a number from zero."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number


def share(text: str) -> float:
    """Reads a number from zero, below one."""
    if not_negative(text) >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0, below 1")
    return float(text)


def fraction(text: str) -> float:
    """Reads a number above zero, at most one."""
    if positive(text) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most 1")
    return float(text)


def words(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns what reads some of these words, with commas between."""

    def read(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(allowed):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list such as {','.join(allowed[:2])}, of {', '.join(allowed)}"
            )
        return found

    return read


def setting(text: str) -> tuple[str, Any]:
    """Reads "name=value": true, false, none, a number, a word, or several with commas between."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting such as pooling=avg")
    parts = tuple(map(_plain, value.split(",")))
    return name, parts if len(parts) > 1 else parts[0]


def size(text: str) -> tuple[int, int]:
    """Reads "64" or "48x64" as (height, width) in pixels."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64 or 48x64")
    return int(sides[0]), int(sides[-1])


def _plain(text: str) -> bool | int | float | str | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
