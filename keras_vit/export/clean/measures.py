"""Compares what an artefact answers with what the model answers."""

from collections.abc import Callable

import numpy as np

from .request import Case, Check

Run = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

# Below this distance between the two best logits, rounding may exchange them.
TIE = 1e-3


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

    Example:
        >>> lowest_cosine(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]]))
        0.0
    """
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return -1.0
    rows = np.asarray(actual, np.float64).reshape(len(actual), -1)
    others = np.asarray(expected, np.float64).reshape(len(expected), -1)
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(others, axis=1)
    return float(((rows * others).sum(axis=1) / np.maximum(lengths, 1e-30)).min())


def top1_agreement(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the fraction of rows with the same best class, leaving out the model's own ties."""
    best = np.sort(expected, axis=-1)
    clear = best[:, -1] - best[:, -2] > TIE if expected.shape[-1] > 1 else np.ones(len(expected))
    agree = actual.argmax(axis=-1) == expected.argmax(axis=-1)
    return float(agree[clear.astype(bool)].mean()) if clear.any() else 1.0


def compare(case: Case, actual: dict[str, np.ndarray], *, rows: int) -> list[Check]:
    """Holds the first rows of a case against an answer to them."""
    checks = []
    for name, expected in case.expected.items():
        where = f"{case.signature}: {name}, batch {rows}".removeprefix(": ")
        answer = actual.get(name, np.empty(0))
        checks.append(_verdict(case, where, answer, expected[:rows]))
    return checks


def compare_top1(case: Case, actual: dict[str, np.ndarray]) -> list[Check]:
    """Holds the best class of each image against the model's."""
    if "logits" not in case.expected or "logits" not in actual:
        return []
    agreement = top1_agreement(actual["logits"], case.expected["logits"])
    limit = None if case.measure == "cosine" else 1.0
    name = f"{case.signature}: top-1 agreement".removeprefix(": ")
    return [Check(name=name, measured=agreement, limit=limit, passed=agreement >= (limit or 0.0))]


def check_batches(case: Case, run: Run, batch_sizes: tuple[int, ...]) -> list[Check]:
    """Runs a case at every batch size: equal to the model, and to itself at other sizes."""
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
        checks.append(
            Check(name=name, measured=drift, limit=case.limit, passed=drift <= case.limit)
        )
    return checks


def _verdict(case: Case, name: str, actual: np.ndarray, expected: np.ndarray) -> Check:
    if case.measure == "cosine":
        measured = lowest_cosine(actual, expected)
        return Check(
            name=f"{name}, cosine", measured=measured, limit=case.limit,
            passed=measured >= case.limit,
        )  # fmt: skip
    function = relative_difference if case.measure == "relative" else largest_difference
    measured = function(actual, expected)
    return Check(
        name=f"{name}, {case.measure} difference",
        measured=measured,
        limit=case.limit,
        passed=measured <= case.limit,
    )
