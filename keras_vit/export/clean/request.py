"""What is to be checked and what came out, as files that two processes share."""

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

_REQUEST, _ARRAYS, _REPORT = "request.json", "arrays.npz", "report.json"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One way into an artefact: inputs of one batch, and what the model makes of them.

    Attributes:
        signature: name of the signature; "" where a format has but one.
        inputs: the input of each name, strings as an object array of bytes.
        expected: the output of each name.
        alone: the outputs for the first image in a batch of its own, where convolutions may sum in
            another order; empty where that is not told apart.
        limit: what the comparison `measure` may reach.
        measure: "absolute", the largest difference; "relative", the same over the largest expected
            value; "cosine", the lowest cosine of two rows; "top1", the share of rows with the same
            best class. The last two must not fall below the limit.
    """

    signature: str
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    limit: float
    measure: str = "absolute"
    alone: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def own_drift(self) -> float:
        """How far the model's own answer to the first image changes with the batch it is in."""
        changes = [
            np.abs(alone - self.expected[name][:1]).max() for name, alone in self.alone.items()
        ]
        return float(max(changes, default=0.0))


# The arrays of a case by name.
_GROUPS = ("inputs", "expected", "alone")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """The checks of one artefact.

    Attributes:
        format: "savedmodel", "tflite", "tflite-fp16", "tflite-int8", "tflite-int8-full" or "onnx".
        path: the artefact.
        parameter_bytes: bytes of the model's weights in float32.
        batch_sizes: the sizes to run; the cases hold the largest.
        labels: a name for each class.
        cases: the ways in.
        library: folder of another libtensorflow_cc for the SavedModel; None for the installed one.
    """

    format: str
    path: Path
    parameter_bytes: int
    batch_sizes: tuple[int, ...]
    labels: tuple[str, ...]
    cases: tuple[Case, ...]
    library: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One result: what was measured, the limit it is held to (None: told only), the verdict."""

    name: str
    measured: float | int | str
    limit: float | int | str | None
    passed: bool


def write_request(folder: Path, request: Request) -> None:
    """Writes a request into an existing folder."""
    arrays: dict[str, np.ndarray] = {}

    def stored(value: np.ndarray) -> Any:
        if value.dtype == object:
            return [base64.b64encode(item).decode() for item in value]
        arrays[f"array_{len(arrays)}"] = value
        return f"array_{len(arrays) - 1}"

    fields = {
        **{field.name: getattr(request, field.name) for field in dataclasses.fields(request)},
        "path": str(request.path),
        "library": None if request.library is None else str(request.library),
        "cases": [
            {
                **dataclasses.asdict(case),
                **{
                    group: {name: stored(value) for name, value in getattr(case, group).items()}
                    for group in _GROUPS
                },
            }
            for case in request.cases
        ],
    }
    np.savez(folder / _ARRAYS, allow_pickle=False, **arrays)
    (folder / _REQUEST).write_text(json.dumps(fields), encoding="utf-8")


def read_request(folder: Path) -> Request:
    """Reads what `write_request` wrote."""
    fields = json.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    with np.load(folder / _ARRAYS) as arrays:

        def loaded(value: Any) -> np.ndarray:
            return arrays[value] if isinstance(value, str) else strings(value)

        cases = tuple(
            Case(
                **{
                    **case,
                    **{
                        group: {name: loaded(value) for name, value in case[group].items()}
                        for group in _GROUPS
                    },
                }
            )
            for case in fields["cases"]
        )
    return Request(
        **{
            **fields,
            "path": Path(fields["path"]),
            "library": None if fields["library"] is None else Path(fields["library"]),
            "batch_sizes": tuple(fields["batch_sizes"]),
            "labels": tuple(fields["labels"]),
            "cases": cases,
        }
    )


def strings(encoded: list[str]) -> np.ndarray:
    """Decodes a list of base64 texts into an object array of bytes."""
    values = np.empty(len(encoded), object)
    values[:] = [base64.b64decode(text) for text in encoded]
    return values


def write_report(folder: Path, checks: list[Check], runtime: dict[str, str]) -> None:
    """Writes the results, and the versions of what ran."""
    report = {"runtime": runtime, "checks": [dataclasses.asdict(check) for check in checks]}
    (folder / _REPORT).write_text(json.dumps(report), encoding="utf-8")


def read_report(folder: Path) -> tuple[list[Check], dict[str, str]]:
    """Reads what `write_report` wrote."""
    report = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
    return [Check(**check) for check in report["checks"]], report["runtime"]
