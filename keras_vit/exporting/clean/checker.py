"""Checks one artefact in a process where Keras and keras_vit cannot be imported.

What is asked and what was found are files, in a folder that both processes know.
"""

import base64
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from . import Limits, agreement, runners
from .agreement import Case, Check, Gate, Request

# What the process runs with the folder above this one and that of the request.
START = """
import sys
sys.modules.update(keras=None, keras_vit=None)
sys.path.insert(0, sys.argv[1])
import clean
del sys.path[0]
from clean.checker import run
run(sys.argv[2])
"""
_ARRAY, _STRINGS = "$array", "$strings"  # what stands for an array in JSON


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What the checks of a request found.

    Attributes:
        checks: the results.
        runtime: versions of what ran the artefact.
    """

    checks: list[Check]
    runtime: dict[str, str]


def run(folder: str) -> None:
    """Reads the request in a folder, checks its artefact, and writes the report into the folder."""
    request = read_request(Path(folder))
    runner = runners.RUNNERS[request.runtime](request.path)
    gate = functools.partial(runner.run, request.gate.signature)
    checks = [*runner.checks(request), *agreement.run_gate(request.gate, gate)]
    write(Path(folder), Report(checks, runner.versions))


def write(folder: Path, message: Request | Report) -> None:
    """Writes a message into an existing folder."""
    arrays: list[np.ndarray] = []

    def encode(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if value.dtype == object:
            return {_STRINGS: [base64.b64encode(item).decode() for item in value]}
        arrays.append(value)
        return {_ARRAY: f"arr_{len(arrays) - 1}"}  # the name that NumPy gives it

    stem = folder / type(message).__name__
    text = json.dumps(dataclasses.asdict(message), default=encode)
    np.savez(stem.with_suffix(".npz"), *arrays, allow_pickle=False)
    stem.with_suffix(".json").write_text(text, encoding="utf-8")


def read_request(folder: Path) -> Request:
    """Reads the request in a folder."""
    fields = _read(folder / Request.__name__)
    gate, limits = fields["gate"], fields["gate"]["limits"]
    fields["path"] = Path(fields["path"])
    fields["cases"] = [Case(**case) for case in fields["cases"]]
    fields["gate"] = Gate(**{**gate, "limits": Limits(**limits)})
    return Request(**fields)


def read_report(folder: Path) -> Report:
    """Reads the report in a folder."""
    fields = _read(folder / Report.__name__)
    return Report(**{**fields, "checks": [Check(**check) for check in fields["checks"]]})


def _read(stem: Path) -> dict[str, Any]:
    with np.load(stem.with_suffix(".npz")) as arrays:

        def decode(fields: dict[str, Any]) -> Any:
            if _ARRAY in fields:
                return arrays[fields[_ARRAY]]
            if _STRINGS not in fields:
                return fields
            return np.array([base64.b64decode(text) for text in fields[_STRINGS]], object)

        text = stem.with_suffix(".json").read_text(encoding="utf-8")
        fields: dict[str, Any] = json.loads(text, object_hook=decode)
        return fields
