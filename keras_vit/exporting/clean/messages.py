"""Requests for checks and their results, as files of two processes, and the comparisons."""

import base64
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .agreement import Gate, Limits, measure

_REQUEST, _ARRAYS = "request.json", "arrays.npz"
_REPORT, _ANSWERS = "report.json", "answers.npz"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A batch of inputs for one signature of an artefact, and the model's outputs for it.

    Attributes:
        signature: name of the signature; "" where a format has only one.
        inputs: the inputs by name, strings as an object array of bytes.
        expected: the outputs by name.
        alone: the outputs for the first image in a batch of one, where convolutions may sum in
            another order; empty to compare with the first row of `expected`.
        limit: the largest difference that passes.
        measure: "absolute", the largest difference, or "spread", over the range of the expected.
    """

    signature: str
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    limit: float
    measure: str = "absolute"
    alone: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many images there are."""
        (value, *_) = self.inputs.values()
        return len(value)

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
        format: the name of the format, which begins with what runs it, see `runners.family`.
        path: the artefact.
        parameter_bytes: bytes of the model's weights in float32.
        weight_bytes: bytes that they take in an ONNX or TFLite file, or a page.
        batch_sizes: the batch sizes to run; the cases hold batches of the largest.
        labels: a name for each class.
        cases: what to run.
        references: what the artefact is to answer for the record; `expected` holds what it answered
            before, nothing the first time.
        gate: what decides whether the artefact answers like the model; None to run the rest alone.
        library: folder of another libtensorflow_cc for the SavedModel; None for the installed one.
    """

    format: str
    path: Path
    parameter_bytes: int
    batch_sizes: tuple[int, ...]
    labels: tuple[str, ...]
    cases: tuple[Case, ...]
    references: tuple[Case, ...] = ()
    gate: Gate | None = None
    library: Path | None = None
    weight_bytes: int = 0


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

        for case in (*fields["cases"], *fields["references"]):
            for group in _GROUPS:
                case[group] = {name: decode(value) for name, value in case[group].items()}
        gate = fields["gate"]
        if gate is not None:
            gate["inputs"] = {name: decode(value) for name, value in gate["inputs"].items()}
            gate |= {name: decode(gate[name]) for name in ("expected", "targets")}
            gate["outputs"] = tuple(gate["outputs"])
            fields["gate"] = Gate(**{**gate, "limits": Limits(**gate["limits"])})
    library = fields["library"]
    paths = {"path": Path(fields["path"]), "library": None if library is None else Path(library)}
    cases = {name: tuple(Case(**case) for case in fields[name]) for name in ("cases", "references")}
    tuples = {name: tuple(fields[name]) for name in ("batch_sizes", "labels")}
    return Request(**{**fields, **paths, **tuples, **cases})


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What the checks of a request found.

    Attributes:
        checks: the results.
        runtime: versions of what ran the artefact.
        answers: its numbers for each of the references, by name.
    """

    checks: list[Check]
    runtime: dict[str, str]
    answers: tuple[dict[str, np.ndarray], ...] = ()


def write_report(folder: Path, report: Report) -> None:
    """Writes a report into the folder of its request."""
    arrays, names = {}, []
    for place, answer in enumerate(report.answers):
        numbers = {name: value for name, value in answer.items() if value.dtype == np.float32}
        arrays.update({f"{place}_{name}": value for name, value in numbers.items()})
        names.append(list(numbers))
    np.savez(folder / _ANSWERS, allow_pickle=False, **arrays)
    fields = {
        "runtime": report.runtime,
        "checks": [dataclasses.asdict(check) for check in report.checks],
        "answers": names,
    }
    (folder / _REPORT).write_text(json.dumps(fields), encoding="utf-8")


def read_report(folder: Path) -> Report:
    """Reads a report that `write_report` wrote."""
    fields = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
    with np.load(folder / _ANSWERS) as arrays:
        answers = tuple(
            {name: arrays[f"{place}_{name}"] for name in names}
            for place, names in enumerate(fields["answers"])
        )
    return Report([Check(**check) for check in fields["checks"]], fields["runtime"], answers)


Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

GATE_BATCH = 8  # images that a gate runs at once
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


def spread_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference divided by the range of the expected values.

    Example:
        >>> spread_difference(np.array([-10.0, -9.5]), np.array([-10.0, -9.0]))
        0.5
    """
    spread = float(np.ptp(expected)) if expected.size else 0.0
    return largest_difference(actual, expected) / max(spread, 1e-6)


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


# Of each measure of a case: its function, and its name in a check.
_MEASURES: dict[str, tuple[Callable[[np.ndarray, np.ndarray], float], str]] = {
    "absolute": (largest_difference, "absolute difference"),
    "spread": (spread_difference, "difference over the spread"),
}


def compare(case: Case, actual: dict[str, np.ndarray], *, rows: int) -> list[Check]:
    """Compares the outputs for the first rows of a case with the expected ones."""
    function, label = _MEASURES[case.measure]
    checks = []
    for name, expected in {**case.expected, **(case.alone if rows == 1 else {})}.items():
        measured = function(actual.get(name, np.empty(0)), expected[:rows])
        text = case.check_name(f"{name}, batch {rows}, {label}")
        passed = measured <= case.limit
        checks.append(Check(name=text, measured=measured, limit=case.limit, passed=passed))
    return checks


def check_batches(case: Case, run: Run, batch_sizes: tuple[int, ...]) -> list[Check]:
    """Compares a case with the model at every batch size, and the sizes with each other.

    Outputs may change with the batch as much as the model's own do.
    """
    checks, outputs = [], {}
    for size in batch_sizes:
        outputs[size] = run({name: value[:size] for name, value in case.inputs.items()})
        checks += compare(case, outputs[size], rows=size)
    whole = outputs[max(batch_sizes)]
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


def check_empty(case: Case, run: Run) -> Check:
    """Checks that no images get no answers, of the right shape."""
    try:
        outputs = run({name: value[:0] for name, value in case.inputs.items()})
        wrong = [
            name
            for name, value in case.expected.items()
            if name not in outputs or outputs[name].shape != (0, *value.shape[1:])
        ]
        found = ", ".join(wrong)
    except Exception as error:  # each runtime has errors of its own
        found = str(error).splitlines()[0] or type(error).__name__
    return Check(name=case.check_name("batch 0"), measured=found, limit="", passed=not found)


def run_gate(gate: Gate, run: Run) -> list[Check]:
    """Runs the images of a gate in batches of eight, and holds the answers to its limits."""
    ((name, images),) = gate.inputs.items()
    starts = range(0, len(images), GATE_BATCH)
    parts = [run({name: images[start : start + GATE_BATCH]}) for start in starts]
    answers = {name: _joined([part.get(name) for part in parts]) for name in gate.outputs}
    checks = [Check(name="gate: images", measured=len(gate.expected), limit=None, passed=True)]
    for name, (measured, limit, is_least) in measure(gate, answers).items():
        passed = measured >= limit if is_least else measured <= limit
        checks.append(Check(name=f"gate: {name}", measured=measured, limit=limit, passed=passed))
    return checks


def _joined(parts: list[np.ndarray | None]) -> np.ndarray:
    arrays = [part for part in parts if part is not None]
    ranks = {array.ndim for array in arrays}
    return np.concatenate(arrays) if len(arrays) == len(parts) and len(ranks) == 1 else np.empty(0)


def size_check(size: int, weight_bytes: int, *, is_rounded: bool) -> Check:
    """Compares the size of a file with that of the weights that it should hold.

    A file that lacks weights is too small, one with a weight twice too large. Small models have no
    upper limit: their graph, and the scales of rounded weights, count too much.
    """
    ratio = size / weight_bytes
    upper = 1.2 if is_rounded else 1.05
    is_large = weight_bytes >= LARGE
    return Check(
        name="bytes of the file / bytes of its weights",
        measured=round(ratio, 4),
        limit=f"0.95..{upper if is_large else ''}",
        passed=ratio >= 0.95 and (not is_large or ratio <= upper),
    )
