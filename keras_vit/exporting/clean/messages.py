"""What is to be checked and what came out, as files of two processes, and how answers compare."""

import base64
import dataclasses
import json
from collections.abc import Callable
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


Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

# Below this distance between the two best logits, rounding may exchange them.
TIE = 1e-3

# From this many bytes of weights on, what a file holds besides them does not count.
LARGE = 20_000_000


def largest_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest absolute difference; infinite for another shape, NaN or infinity.

    Example:
        >>> largest_difference(np.array([1.0, 2.5]), np.array([1.0, 2.0]))
        0.5
        >>> largest_difference(np.array([np.nan]), np.array([0.0]))
        inf
    """
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    difference = np.abs(np.asarray(actual, np.float64) - expected)
    return float(difference.max(initial=0.0))


def relative_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference divided by the largest expected value."""
    return largest_difference(actual, expected) / max(float(np.abs(expected).max()), 1e-30)


def lowest_cosine(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the lowest cosine between the rows of two arrays; -1 for another shape or NaN.

    Rows that are both zero are equal.

    Example:
        >>> lowest_cosine(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]]))
        0.0
    """
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return -1.0
    rows = np.asarray(actual, np.float64).reshape(len(actual), -1)
    others = np.asarray(expected, np.float64).reshape(len(expected), -1)
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(others, axis=1)
    cosines = (rows * others).sum(axis=1) / np.maximum(lengths, 1e-30)
    return float(np.where((rows == others).all(axis=1), 1.0, cosines).min())


def top1_agreement(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the fraction of rows with the same best class, leaving out the model's own ties."""
    if actual.shape != expected.shape:
        return 0.0
    best = np.sort(expected, axis=-1)
    clear = best[:, -1] - best[:, -2] > TIE if expected.shape[-1] > 1 else np.ones(len(expected))
    agree = actual.argmax(axis=-1) == expected.argmax(axis=-1)
    return float(agree[clear.astype(bool)].mean()) if clear.any() else 1.0


def compare(case: Case, actual: dict[str, np.ndarray], *, rows: int) -> list[Check]:
    """Holds the first rows of a case against an answer to them."""
    checks = []
    for name, expected in {**case.expected, **(case.alone if rows == 1 else {})}.items():
        where = f"{case.signature}: {name}, batch {rows}".removeprefix(": ")
        answer = actual.get(name, np.empty(0))
        checks.append(_verdict(case, where, answer, expected[:rows]))
    return checks


def compare_top1(case: Case, actual: dict[str, np.ndarray]) -> list[Check]:
    """Holds the best class of each image against the model's; int8 may err within its measure."""
    if "logits" not in case.expected or "logits" not in actual or case.measure == "top1":
        return []
    agreement = top1_agreement(actual["logits"], case.expected["logits"])
    limit = 1.0 if case.measure == "absolute" else None
    name = f"{case.signature}: top-1 agreement".removeprefix(": ")
    return [Check(name=name, measured=agreement, limit=limit, passed=agreement >= (limit or 0.0))]


def check_batches(case: Case, run: Run, batch_sizes: tuple[int, ...]) -> list[Check]:
    """Runs a case at every batch size: equal to the model, and to itself at other sizes.

    Where the model's own answers change with the batch, the artefact's may as much.
    """
    checks, answers = [], {}
    for size in batch_sizes:
        answers[size] = run({name: value[:size] for name, value in case.inputs.items()})
        checks += compare(case, answers[size], rows=size)
    whole = answers[max(batch_sizes)]
    checks += compare_top1(case, whole)
    if len(batch_sizes) > 1:
        drift = max(
            largest_difference(answers[size][name], whole[name][:size])
            for size in batch_sizes
            for name in case.expected
        )
        name = f"{case.signature}: batch invariance".removeprefix(": ")
        limit = case.limit + case.own_drift
        checks.append(Check(name=name, measured=drift, limit=limit, passed=drift <= limit))
    return checks


def size_check(size: int, parameter_bytes: int, *, share: float) -> Check:
    """Holds the bytes of a file against those of the weights that it must hold.

    A file without weights is too small, one with a weight twice too large. The graph's own bytes
    and what stays in float32 matter only in small models, whose upper limit is left open.
    """
    ratio = size / (parameter_bytes * share)
    upper = 1.05 if share == 1.0 else 1.2
    is_large = parameter_bytes >= LARGE
    return Check(
        name=f"bytes of the file / bytes of the parameters at {4 * share:g} bytes each",
        measured=round(ratio, 4),
        limit=f"0.95..{upper if is_large else ''}",
        passed=ratio >= 0.95 and (not is_large or ratio <= upper),
    )


def _verdict(case: Case, name: str, actual: np.ndarray, expected: np.ndarray) -> Check:
    if case.measure in ("cosine", "top1"):
        function = lowest_cosine if case.measure == "cosine" else top1_agreement
        measured = function(actual, expected)
        passed = measured >= case.limit
        what = "cosine" if case.measure == "cosine" else "top-1 agreement"
    else:
        function = relative_difference if case.measure == "relative" else largest_difference
        measured = function(actual, expected)
        passed = measured <= case.limit
        what = f"{case.measure} difference"
    return Check(name=f"{name}, {what}", measured=measured, limit=case.limit, passed=passed)
