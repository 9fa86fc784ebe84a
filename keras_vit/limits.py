"""What numbers a network may have, and how messages show other values.

Knows no framework.
"""

import reprlib

# What a number may be at most: ten times that of any network we know of, so that a damaged file
# ends in a sentence and not in a network that no machine can hold.
LIMITS = {
    "patch_size": 4096,
    "hidden_dim": 2**17,
    "mlp_dim": 2**20,
    "num_heads": 2**12,
    "num_layers": 1000,
    "classes": 10**8,
    "representation_dim": 2**17,
    "num_registers": 2**12,
    "pooling_heads": 2**12,
}
MAX_SIDE = 2**20  # pixels, or channels
_MAX_NUMBER = 1e9  # of what pixels and rates are


def shown(value: object) -> str:
    """Returns a value as Python writes it, cut to what a message has room for.

    Example:
        >>> len(shown("x" * 10_000)) < 100
        True
    """
    try:
        text = _REPR.repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = f"a number of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


def counted(count: int, one: str) -> str:
    """Returns a number of things as one says it.

    Example:
        >>> counted(1, "epoch"), counted(2000, "step"), counted(3, "class")
        ('1 epoch', '2000 steps', '3 classes')
    """
    return f"{count} {one}" if count == 1 else f"{count} {one}{'es' if one.endswith('s') else 's'}"


def is_number(value: object) -> bool:
    """Whether a value is a number that pixels and rates can be, no NaN."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -_MAX_NUMBER < value < _MAX_NUMBER  # type: ignore[operator]


def is_grid(value: object) -> bool:
    """Whether a value is (rows, columns) of a grid that images can have."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(is_whole(side, 1, MAX_SIDE) for side in value)  # type: ignore[attr-defined]


def is_whole(value: object, least: int, most: int) -> bool:
    """Whether a value is a whole number in this range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 90, 90, 40
