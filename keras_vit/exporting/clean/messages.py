"""Requests for checks and their results, as files of two processes, and the comparisons."""

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
    """A batch of inputs for one signature of an artefact, and the model's outputs for it.

    Attributes:
        signature: name of the signature; "" where a format has only one.
        inputs: the inputs by name, strings as an object array of bytes.
        expected: the outputs by name.
        alone: the outputs for the first image in a batch of one, where convolutions may sum in
            another order; empty to compare with the first row of `expected`.
        limit: the limit of the comparison.
        measure: "absolute", the largest difference; "relative", that difference over the largest
            expected value; "cosine", the lowest cosine of two rows; "top1", the share of rows with
            the same best class. The last two must not fall below the limit.
    """

    signature: str
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    limit: float
    measure: str = "absolute"
    alone: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def own_drift(self) -> float:
        """How far the model's own output for the first image changes with the batch."""
        changes = [
            np.abs(alone - self.expected[name][:1]).max() for name, alone in self.alone.items()
        ]
        return float(max(changes, default=0.0))

    def check_name(self, text: str) -> str:
        """Returns the name of a check of this case."""
        return f"{self.signature}: {text}".removeprefix(": ")


# The fields of a case that hold arrays by name.
_GROUPS = ("inputs", "expected", "alone")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """The checks of one artefact.

    Attributes:
        format: "savedmodel", "tflite", "tflite-fp16", "tflite-int8", "tflite-int8-full" or "onnx".
        path: the artefact.
        parameter_bytes: bytes of the model's weights in float32.
        batch_sizes: the batch sizes to run; the cases hold batches of the largest.
        labels: a name for each class.
        cases: what to run.
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
    """The result of one check: the measurement, its limit (None for no limit), the verdict."""

    name: str
    measured: float | int | str
    limit: float | int | str | None
    passed: bool


def write_request(folder: Path, request: Request) -> None:
    """Writes a request into an existing folder."""
    arrays: dict[str, np.ndarray] = {}

    def encode(value: Any) -> str | list[str]:
        if isinstance(value, Path):
            return str(value)
        if value.dtype == object:
            return [base64.b64encode(item).decode() for item in value]
        name = f"array_{len(arrays)}"
        arrays[name] = value
        return name

    text = json.dumps(dataclasses.asdict(request), default=encode)
    np.savez(folder / _ARRAYS, allow_pickle=False, **arrays)
    (folder / _REQUEST).write_text(text, encoding="utf-8")


def read_request(folder: Path) -> Request:
    """Reads a request that `write_request` wrote."""
    fields = json.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    with np.load(folder / _ARRAYS) as arrays:

        def decode(value: str | list[str]) -> np.ndarray:
            if isinstance(value, str):
                array: np.ndarray = arrays[value]
                return array
            strings = np.empty(len(value), object)
            strings[:] = [base64.b64decode(text) for text in value]
            return strings

        for case in fields["cases"]:
            for group in _GROUPS:
                case[group] = {name: decode(value) for name, value in case[group].items()}
    library = fields["library"]
    paths = {"path": Path(fields["path"]), "library": None if library is None else Path(library)}
    cases = tuple(Case(**case) for case in fields["cases"])
    tuples = {name: tuple(fields[name]) for name in ("batch_sizes", "labels")}
    return Request(**{**fields, **paths, **tuples, "cases": cases})


def write_report(folder: Path, checks: list[Check], runtime: dict[str, str]) -> None:
    """Writes the results, and the versions of the runtimes."""
    report = {"runtime": runtime, "checks": [dataclasses.asdict(check) for check in checks]}
    (folder / _REPORT).write_text(json.dumps(report), encoding="utf-8")


def read_report(folder: Path) -> tuple[list[Check], dict[str, str]]:
    """Reads a report that `write_report` wrote."""
    report = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
    return [Check(**check) for check in report["checks"]], report["runtime"]


Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

TIE = 1e-3  # rounding may exchange the two best logits if they are closer
LARGE = 20_000_000  # bytes of weights, beside which the rest of a file does not count


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
    """Returns the fraction of rows with the same best class, without the model's own ties."""
    if actual.shape != expected.shape:
        return 0.0
    agree = actual.argmax(axis=-1) == expected.argmax(axis=-1)
    if expected.shape[-1] > 1:
        logits = np.sort(expected, axis=-1)
        agree = agree[logits[:, -1] - logits[:, -2] > TIE]
    return float(agree.mean()) if agree.size else 1.0


# Of each measure: its function, its name in a check, and whether the limit is the least value.
_MEASURES: dict[str, tuple[Callable[[np.ndarray, np.ndarray], float], str, bool]] = {
    "absolute": (largest_difference, "absolute difference", False),
    "relative": (relative_difference, "relative difference", False),
    "cosine": (lowest_cosine, "cosine", True),
    "top1": (top1_agreement, "top-1 agreement", True),
}


def compare(case: Case, actual: dict[str, np.ndarray], *, rows: int) -> list[Check]:
    """Compares the outputs for the first rows of a case with the expected ones."""
    function, label, is_least = _MEASURES[case.measure]
    checks = []
    for name, expected in {**case.expected, **(case.alone if rows == 1 else {})}.items():
        measured = function(actual.get(name, np.empty(0)), expected[:rows])
        passed = measured >= case.limit if is_least else measured <= case.limit
        text = case.check_name(f"{name}, batch {rows}, {label}")
        checks.append(Check(name=text, measured=measured, limit=case.limit, passed=passed))
    return checks


def compare_top1(case: Case, actual: dict[str, np.ndarray]) -> list[Check]:
    """Compares the best class of each image; only float32 artefacts must agree on all."""
    if "logits" not in case.expected or "logits" not in actual or case.measure == "top1":
        return []
    agreement = top1_agreement(actual["logits"], case.expected["logits"])
    limit = 1.0 if case.measure == "absolute" else None
    passed = agreement >= (limit or 0.0)
    name = case.check_name("top-1 agreement")
    return [Check(name=name, measured=agreement, limit=limit, passed=passed)]


def check_batches(case: Case, run: Run, batch_sizes: tuple[int, ...]) -> list[Check]:
    """Compares a case with the model at every batch size, and the sizes with each other.

    Outputs may change with the batch as much as the model's own do.
    """
    checks, outputs = [], {}
    for size in batch_sizes:
        outputs[size] = run({name: value[:size] for name, value in case.inputs.items()})
        checks += compare(case, outputs[size], rows=size)
    whole = outputs[max(batch_sizes)]
    checks += compare_top1(case, whole)
    if len(batch_sizes) > 1:
        drift = max(
            largest_difference(outputs[size][name], whole[name][:size])
            for size in batch_sizes
            for name in case.expected
        )
        limit = case.limit + case.own_drift
        name = case.check_name("batch invariance")
        checks.append(Check(name=name, measured=drift, limit=limit, passed=drift <= limit))
    return checks


def size_check(size: int, parameter_bytes: int, *, share: float) -> Check:
    """Compares the size of a file with that of its weights, at `share` of their float32 bytes.

    A file that lacks weights is too small, one with a weight twice too large. Small models have no
    upper limit: their graph, and the weights that stay float32, count too much.
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
