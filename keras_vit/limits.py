"""What is believed of values and files from outside, and how messages show them.

Knows no framework.
"""

import contextlib
import json
import math
import numbers
import reprlib
import stat
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

MAX_SIDE = 2**20  # pixels, or channels
# Of an image: what TensorFlow itself takes of a PNG, room for photos of 108 megapixels.
MAX_PIXELS = 2**27
# The most that a number may be: ten times that of any network we know of, so that a damaged file
# ends in a sentence and not in a network that no machine can hold.
MAX_HEADS, MAX_LAYERS, MAX_STAGES = 2**12, 1000, 8
_MAX_NUMBER = 1e9  # of what pixels and rates are
# Bytes of JSON; a settings file with the 21,843 labels of ImageNet-21k has 2 MB.
MAX_TEXT = 3 * 2**20
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 90, 90, 40


def shown(value: object) -> str:
    """Returns a value as Python writes it, cut to what a message has room for."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = f"a number of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


def short(text: str, most: int = 60) -> str:
    """Returns text of at most so many characters, cut in its middle."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def counted(count: int, one: str) -> str:
    """Returns a number of things as one says it."""
    return f"{count} {one}" if count == 1 else f"{count} {one}{'es' if one.endswith('s') else 's'}"


def is_line(value: object) -> bool:
    """Whether a value is one line of text that UTF-8 can write, as a label in a list of them."""
    return isinstance(value, str) and value.encode(errors="ignore").decode().splitlines() == [value]


def is_number(value: object) -> bool:
    """Whether a value is a number that pixels and rates can be, no NaN."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -_MAX_NUMBER < value < _MAX_NUMBER  # type: ignore[operator]


def is_real(value: object) -> bool:
    """Whether a value is a real number, of Python or NumPy."""
    return isinstance(value, numbers.Real)


def is_grid(value: object) -> bool:
    """Whether a value is (rows, columns) of a grid that images can have."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(is_whole(side, 1, MAX_SIDE) for side in value)  # type: ignore[attr-defined]


def is_whole(value: object, least: int, most: int) -> bool:
    """Whether a value is a whole number in this range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


class Allowed(NamedTuple):
    """What a value may be, and how a message says it."""

    fits: Callable[[Any], bool]
    text: str


def or_none(allowed: Allowed) -> Allowed:
    """Allows None, too."""
    kind, comma, rest = allowed.text.partition(", at most")
    text = f"{kind} or None{comma}{rest}"
    return Allowed(lambda value: value is None or allowed.fits(value), text)


def whole(most: int, least: int = 1) -> Allowed:
    """Allows integers from 1, or from 0."""
    text = "a positive integer" if least else "a whole number from 0"
    return Allowed(lambda value: is_whole(value, least, most), f"{text}, at most {most}")


def above(least: int) -> Allowed:
    """Allows finite numbers above one."""
    return Allowed(lambda value: is_number(value) and value > least, f"a number above {least}")


def one_of(names: Any, *others: None, elsewhere: str = "") -> Allowed:
    """Allows the values of a Literal, and others; `elsewhere` ends the message."""
    values = [*get_args(names), *others]
    # An array cannot be hashed, and compares element by element.
    return Allowed(
        lambda one: isinstance(one, Hashable) and one in values, f"one of {values}{elsewhere}"
    )


def is_shape(value: Any) -> bool:
    """Returns whether a value is (height, width, channels); of any size the first two are None."""
    if not isinstance(value, tuple) or len(value) != 3:
        return False
    sides = value[2:] if value[:2] == (None, None) else value
    are_sides = all(is_whole(side, 1, MAX_SIDE) for side in sides)
    return are_sides and math.prod(sides[:-1]) <= MAX_PIXELS


def is_stages(value: Any) -> bool:
    """Returns whether a value is a short tuple of small numbers from 1."""
    is_short = isinstance(value, tuple) and len(value) <= MAX_STAGES
    return is_short and all(is_whole(units, 1, MAX_LAYERS) for units in value)


SHAPE = Allowed(
    is_shape,
    f"three positive integers (height, width, channels), at most {MAX_SIDE} and "
    f"{MAX_PIXELS} pixels, or (None, None, channels)",
)
STAGES = or_none(
    Allowed(is_stages, f"a tuple of at most {MAX_STAGES} integers from 1 to {MAX_LAYERS}")
)


def check_fields(settings: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises a ValueError for a field of a dataclass that has another type, or is out of range."""
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if not _has_type(value, hint):
            raise ValueError(f"{name} must be {_named(hint)}. Received: {name}={shown(value)}.")
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise ValueError(
                f"{name} must lie between {low} and {high}. Received: {name}={value!r}."
            )


def _has_type(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind in (Union, types.UnionType):
        return any(_has_type(value, part) for part in parts)
    if kind is tuple:
        is_long = isinstance(value, tuple) and len(value) == len(parts)
        return is_long and all(map(_has_type, value, parts))
    if hint is float:  # its range is checked elsewhere
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind or hint) and (hint is bool) == isinstance(value, bool)


def _named(hint: Any) -> str:
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return f"one of {list(parts)}"
    if kind in (Union, types.UnionType):
        return " or ".join(map(_named, parts))
    if kind is tuple:
        return f"a tuple of {len(parts)} numbers"
    names = {bool: "one of [False, True]", int: "a whole number", float: "a number"}
    return names.get(hint) or ("None" if hint is types.NoneType else f"a {hint.__name__}")


class FileError(ValueError):
    """A file is not what it should be.

    Attributes:
        path: the file's; the text is a sentence that has it.
    """

    def __init__(self, text: str, path: Path) -> None:
        super().__init__(text, path)
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts a file's path before a sentence that names no file."""
    try:
        yield
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"{path}: {error}", path) from error


def check_file(path: Path) -> None:
    """Raises an error unless the path is that of a file, no folder, pipe or device.

    Raises:
        FileNotFoundError: nothing is there, or a link to nothing.
        OSError: the system does not let us look.
        FileError: something else is there.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            path.open("rb").close()
            return
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {str(path)!r}; check the path.") from None
    except OSError as error:
        problem = error.strerror or "unknown"
        raise type(error)(f"{path} cannot be opened: {problem}; check its permissions.") from None
    raise FileError(f"{path} is a folder, a pipe or a device; give the path of a file.", path)


def parse_json(
    content: bytes, path: Path, *, inside: str = "", limit: int = MAX_TEXT, finite: bool = True
) -> dict[str, Any]:
    """Returns the dictionary in a JSON text, whose keys differ.

    Args:
        content: the text, in UTF-8.
        path: of the file, for errors.
        inside: what errors say after it of a text within the file.
        limit: how many bytes it may have.
        finite: whether its numbers must be finite, as JSON's are and Python's need not be.

    Raises:
        FileError: it is too long, no JSON, or no dictionary.
    """
    number = _finite if finite else None
    try:
        if len(content) > limit:
            raise ValueError(f"it has {len(content)} bytes of text; at most {limit} are read")
        settings = json.loads(
            content.decode(), parse_constant=number, parse_float=number, object_pairs_hook=_unique
        )
        if isinstance(settings, dict):
            return settings
        reason = f"it holds a {type(settings).__name__}, not a dictionary"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = shown(str(error))
    raise FileError(f"{path}{inside} is not a whole JSON file: {reason}.", path)


def read_json(path: Path, *, limit: int = MAX_TEXT, finite: bool = True) -> dict[str, Any]:
    """Returns the dictionary in a JSON file, see `parse_json`.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be opened.
        FileError: it is no file, too long, no JSON, or no dictionary.
    """
    check_file(path)
    with path.open("rb") as file:
        return parse_json(file.read(limit + 1), path, limit=limit, finite=finite)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text}, which is not a finite number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        raise ValueError("it has a key twice")
    return items
