"""The record of what decides a training's result: nothing of it may change when it is resumed."""

import json
from pathlib import Path
from typing import Any

from keras_vit.limits import read_json

MAX_TEXT = 2**24  # bytes of a run's JSON file; one with 21,843 labels has about 1 MB
_EPOCHS = "recipe.epochs"
# What a sentence advises where something is in the way.
REPLACE = 'replace it (--overwrite; in Python existing="overwrite") or choose another --out'
RESUME_OR_REPLACE = (
    "resume it (--resume), replace it (--overwrite) or choose another --out; in Python "
    'existing="resume" or "overwrite"'
)


def check_settings(file: Path, settings: dict[str, Any]) -> int | None:
    """Raises a ValueError unless a training or run was started with these settings.

    The number of epochs may be higher than it was.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "settings.json"
        >>> _ = file.write_text('{"recipe": {"epochs": 10}, "seed": 0}')
        >>> check_settings(file, {"recipe": {"epochs": 20}, "seed": 0})
        10
        >>> check_settings(file, {"recipe": {"epochs": 5}, "seed": 0})
        Traceback (most recent call last):
        ValueError: The training in ... was started with recipe.epochs=10, not 5; ...

    Args:
        file: settings.json of an unfinished training, or config.json of a run.
        settings: the present ones.

    Returns:
        The epochs of the record where the settings have more, otherwise None.
    """
    stored, present = _read(file), flat(json.loads(json.dumps(settings)))
    for name, value in present.items():
        before = stored.get(name)
        if before == value or _is_raised(name, before, value):
            continue
        advice = "resume it with the same settings, or delete the folder"
        if name.startswith("data."):
            advice = "put the images back as they were, or begin anew (--overwrite)"
        if name == _EPOCHS:
            advice = f"epochs (--epochs) may be raised, not lowered; {advice}"
        raise ValueError(
            f"The training in {str(file.parent)!r} was started with {name}={before!r}, "
            f"not {value!r}; {advice}."
        )
    before = stored.get(_EPOCHS)
    return before if _is_raised(_EPOCHS, before, present.get(_EPOCHS)) else None


def _is_raised(name: str, before: Any, now: Any) -> bool:
    is_number = isinstance(before, int) and isinstance(now, int)
    return name == _EPOCHS and is_number and now > before


def _read(file: Path) -> dict[str, Any]:
    try:
        return flat(read_json(file, limit=MAX_TEXT, finite=False))
    except ValueError as error:
        raise ValueError(
            f"{str(file)!r} is damaged, so the settings of the training are unknown; {REPLACE}."
        ) from error


def flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns {"a": {"b": 1}} into {"a.b": 1}."""
    pairs: dict[str, Any] = {}
    for name, value in fields.items():
        inner = isinstance(value, dict)
        pairs |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return pairs
