"""Checks one artefact in a process where Keras and keras_vit cannot be imported.

What is asked and what was found are files, in a folder that both processes know.
"""

import base64
import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import Limits, agreement, runners
from .agreement import Case, Check, Gate

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

Question = tuple[str, dict[str, np.ndarray]]  # a signature, and its input by name


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """The checks of one artefact.

    Attributes:
        format: the name of the format.
        runtime: what runs it, one of `runners.RUNNERS`.
        path: the artefact.
        parameter_bytes: bytes of the model's weights in float32.
        weight_bytes: bytes that they take in an ONNX or TFLite file.
        labels: a name for each class.
        cases: what to run.
        questions: what the artefact is to answer for the record.
        gate: what decides whether the artefact answers like the model; None to run the rest alone.
    """

    format: str
    runtime: str
    path: Path
    parameter_bytes: int = 0
    weight_bytes: int = 0
    labels: Sequence[str] = ()
    cases: Sequence[Case] = ()
    questions: Sequence[Question] = ()
    gate: Gate | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What the checks of a request found.

    Attributes:
        checks: the results.
        runtime: versions of what ran the artefact.
        answers: to each of the questions its signature, the name of the input, and the outputs that
            are numbers by name.
    """

    checks: list[Check]
    runtime: dict[str, str]
    answers: list[dict[str, Any]]


def run(folder: str) -> None:
    """Reads the request in a folder, checks its artefact, and writes the report into the folder."""
    request = read_request(Path(folder))
    runner = runners.RUNNERS[request.runtime](request.path)
    checks = [*runner.checks(request)] if request.cases else []
    if request.gate is not None:
        gate = functools.partial(runner.run, request.gate.signature)
        checks += agreement.run_gate(request.gate, gate)
    answers = []
    for signature, inputs in request.questions:
        outputs = runner.run(signature, inputs).items()
        numbers = {name: value for name, value in outputs if value.dtype == np.float32}
        answers.append({"signature": signature, "input": next(iter(inputs)), "outputs": numbers})
    write(Path(folder), Report(checks, runner.versions, answers))


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
    gate = fields["gate"]
    fields["path"] = Path(fields["path"])
    fields["cases"] = [Case(**case) for case in fields["cases"]]
    fields["gate"] = gate and Gate(**{**gate, "limits": Limits(**gate["limits"])})
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
