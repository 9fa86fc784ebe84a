"""Compares what an artefact answers with what the model answers."""

from collections.abc import Callable

import numpy as np

from .request import Case, Check

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
