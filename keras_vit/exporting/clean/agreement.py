"""How far an artefact's outputs are from the model's: one by one, at each batch size, in its gate.

What all images share proves nothing: a bias of -10 makes every cosine 1, and an output that no
image changes is close to them all if one logit is large. So a gate measures errors in units of the
standard deviation of the model's outputs over the images, around each class's own mean. A
constant output then has an error of 1, whatever the head's biases are.

Shapes: B images; logits (B, classes) and features (B, ...), both (B, values) once they are centred.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import Limits

GATE_BATCH = 8  # images that a gate runs at once
# A deviation counts as at least this share of the largest output: rounding grows with that.
LEAST_DEVIATION = 1e-3
# One class's deviation counts as at least this share of the deviation of all.
LEAST_OF_ONE = 0.25
PROBABILITY = 0.02  # int8 throughout has 256 values
# A best class is clear if it leads by so many times the error that is allowed.
CLEAR = 6.0

Arrays = Mapping[str, np.ndarray]
Run = Callable[[dict[str, np.ndarray]], Arrays]  # a signature, from inputs to outputs by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check: the measurement, its limit (None for no limit), the verdict."""

    name: str
    measured: float | int | str
    limit: float | int | str | None
    passed: bool

    @classmethod
    def at_most(cls, name: str, measured: float, limit: float) -> "Check":
        """A check that passes up to a limit."""
        return cls(name=name, measured=measured, limit=limit, passed=measured <= limit)

    @classmethod
    def at_least(cls, name: str, measured: float, limit: float) -> "Check":
        """A check that passes from a limit on."""
        return cls(name=name, measured=measured, limit=limit, passed=measured >= limit)

    @classmethod
    def equal(cls, name: str, measured: int | str, limit: int | str) -> "Check":
        """A check that passes for one value alone, such as nothing found."""
        return cls(name=name, measured=measured, limit=limit, passed=measured == limit)


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
        batch_sizes: those to run, up to the number of images; 0 for a batch of no images.
    """

    signature: str
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    limit: float
    alone: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    batch_sizes: Sequence[int] = ()

    @property
    def limit_of_drift(self) -> float:
        """How far an output may change with the batch: as the model's own for the first image."""
        changes = [
            np.abs(alone - self.expected[name][:1]).max() for name, alone in self.alone.items()
        ]
        return self.limit + float(max(changes, default=0.0))

    def check_name(self, text: str) -> str:
        """Returns the name of a check of this case."""
        return f"{self.signature}: {text}".removeprefix(": ")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gate:
    """Images that decide about an artefact, and the model's outputs for them.

    Attributes:
        signature: the signature of a SavedModel; "" where a format has only one.
        images: (B, H, W, C), as the input takes them.
        outputs: the names of the outputs to read: what is compared, "logits" or "features", and
            "probabilities", which must follow from the artefact's own logits.
        expected: the model's outputs (B, classes) or (B, ...).
        limits: what the format may differ by.
        kind: "softmax", of which only differences of logits count; "sigmoid", whose classes are
            independent; "values", of features and others.
        targets: the true classes (B,), -1 where unknown; empty without any.
    """

    signature: str
    images: np.ndarray
    outputs: Sequence[str]
    expected: np.ndarray
    limits: Limits
    kind: str
    targets: np.ndarray


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
        gate: what decides whether the artefact agrees with the model.
    """

    format: str
    runtime: str
    path: Path
    parameter_bytes: int
    weight_bytes: int
    labels: Sequence[str]
    cases: Sequence[Case]
    gate: Gate


def largest_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest absolute difference; infinite for another shape, NaN or infinity."""
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    difference = np.abs(np.asarray(actual, np.float64) - expected)
    return float(difference.max(initial=0.0))


def compare(case: Case, actual: Arrays, *, rows: int) -> list[Check]:
    """Compares the outputs for the first rows of a case with the expected ones."""
    return [
        Check.at_most(
            case.check_name(f"{name}, batch {rows}, absolute difference"),
            largest_difference(actual.get(name, np.empty(0)), expected[:rows]),
            case.limit,
        )
        for name, expected in {**case.expected, **(case.alone if rows == 1 else {})}.items()
    ]


def check_batches(case: Case, run: Run) -> Iterator[Check]:
    """Compares a case with the model at every batch size, and the sizes with each other.

    Outputs may change with the batch as much as the model's own do.
    """
    outputs = {}
    sizes = sorted(filter(None, case.batch_sizes))
    for size in sizes:
        outputs[size] = run({name: value[:size] for name, value in case.inputs.items()})
        yield from compare(case, outputs[size], rows=size)
    if len(sizes) > 1:
        whole = outputs[sizes[-1]]
        drift = max(
            largest_difference(outputs[size][name], whole[name][:size])
            for size in sizes
            for name in case.expected
        )
        yield Check.at_most(case.check_name("batch invariance"), drift, case.limit_of_drift)
    if 0 in case.batch_sizes:
        try:
            none = run({name: value[:0] for name, value in case.inputs.items()})
            fault = ", ".join(
                name
                for name, value in case.expected.items()
                if none.get(name, np.empty(())).shape != (0, *value.shape[1:])
            )
        except Exception as error:  # each runtime has errors of its own
            fault = str(error).splitlines()[0] or type(error).__name__
        yield Check.equal(case.check_name("batch 0"), fault, "")


def run_gate(gate: Gate, run: Run) -> list[Check]:
    """Runs the images of a gate in batches of eight, and holds the outputs to its limits."""
    starts = range(0, len(gate.images), GATE_BATCH)
    parts = [run({"images": gate.images[start : start + GATE_BATCH]}) for start in starts]
    outputs = {}
    for name in gate.outputs:
        arrays = [part[name] for part in parts if name in part]
        is_whole = len(arrays) == len(parts) and len({array.ndim for array in arrays}) == 1
        outputs[name] = np.concatenate(arrays) if is_whole else np.empty(0)
    count = Check(name="gate: images", measured=len(gate.expected), limit=None, passed=True)
    return [count, *measure(gate, outputs)]


def measure(gate: Gate, outputs: Arrays) -> list[Check]:
    """Measures the outputs for the images of a gate."""
    limits, expected = gate.limits, centred(gate, gate.expected)
    actual = outputs[gate.outputs[0]]
    if actual.shape != gate.expected.shape or not np.isfinite(actual).all():
        # What is no number fails every limit; it does not raise.
        actual = np.full(gate.expected.shape, np.inf)
        errors = np.full(expected.shape, np.inf)
    else:
        errors = centred(gate, actual) - expected
    deviations, deviation = _deviations(gate, expected)
    one = "value" if gate.kind == "values" else "class"
    with np.errstate(invalid="ignore"):
        of_each = np.sqrt(np.mean(np.square(errors), axis=0)) / deviations
        checks = [
            _at_most("error / std", _root_mean_square(errors) / deviation, limits.error),
            _at_most("largest error / std", np.abs(errors).max() / deviation, limits.largest),
            _at_most(f"error / std of the worst {one}", of_each.max(), limits.of_one),
            *_decisions(gate, actual, limits.error * deviation),
        ]
        if "probabilities" in gate.outputs:
            if gate.kind == "softmax":
                powers = np.exp(actual - actual.max(axis=1, keepdims=True))
                # Of its own logits, whose errors are measured above: here the activation's are.
                own = powers / powers.sum(axis=1, keepdims=True)
            else:
                own = 1 / (1 + np.exp(-actual))
            is_same = outputs["probabilities"].shape == own.shape  # NaN is told by the difference
            difference = np.abs(outputs["probabilities"] - own).max() if is_same else np.inf
            checks.append(_at_most("probabilities beside its own logits'", difference, PROBABILITY))
    return checks


def deviation(gate: Gate) -> float:
    """Returns by how much the model's outputs vary with the image."""
    return _deviations(gate, centred(gate, gate.expected))[1]


def centred(gate: Gate, outputs: np.ndarray) -> np.ndarray:
    """Returns outputs as (B, values), without what a softmax does not see."""
    rows = np.asarray(outputs, np.float64).reshape(len(outputs), -1)
    if gate.kind == "softmax":  # a number added to all logits of an image changes no probability
        rows = rows - rows.mean(axis=1, keepdims=True)
    return rows


def _deviations(gate: Gate, expected: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the deviation of each class or feature (values,), and that of all."""
    of_each = expected.std(axis=0)
    least = LEAST_DEVIATION * float(np.abs(gate.expected).max(initial=0.0))
    deviation = max(_root_mean_square(of_each), least, 1e-12)
    return np.maximum(of_each, LEAST_OF_ONE * deviation), deviation


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _decisions(gate: Gate, actual: np.ndarray, error: float) -> list[Check]:
    if gate.kind == "values":
        return [_own_nearest(gate, actual, error)]
    checks = []
    if gate.kind == "sigmoid":
        same, margins = (actual > 0) == (gate.expected > 0), np.abs(gate.expected)
        checks += _shares("decision at zero", same, margins > CLEAR * error, gate.limits.best)
    if gate.expected.shape[1] > 1:
        logits = np.sort(gate.expected, axis=1)
        same = actual.argmax(axis=1) == gate.expected.argmax(axis=1)
        same &= np.isfinite(actual).all(axis=1)
        margins = logits[:, -1] - logits[:, -2]
        # The two best logits err independently, so that their difference errs by sqrt(2) as much.
        flips = np.array([0.5 * math.erfc(margin / (2 * error)) for margin in margins])
        # Three standard deviations: an artefact of this error fails by chance in one case of 700.
        deviation = math.sqrt(np.sum(flips * (1 - flips))) / len(flips)
        limit = min(gate.limits.best, float(1 - flips.mean() - 3 * deviation))
        checks += _shares("best class", same, margins > CLEAR * error, limit)
        is_known = gate.targets >= 0
        if is_known.any():
            targets = gate.targets[is_known]
            ours, theirs = (
                float(np.mean(each[is_known].argmax(axis=1) == targets))
                for each in (gate.expected, actual)
            )
            # Fewer images than 1 / limit cannot resolve it: one of them may change.
            limit = max(gate.limits.accuracy, 1 / len(targets))
            checks.append(Check.at_least("gate: accuracy", theirs, ours - limit))
    return checks


def _own_nearest(gate: Gate, actual: np.ndarray, error: float) -> Check:
    """Checks that each image's output is nearest to the model's for the same image."""
    ours, theirs = (each.reshape(len(each), -1) for each in (gate.expected, actual))
    others = np.array([np.linalg.norm(ours - row, axis=1) for row in ours])
    np.fill_diagonal(others, np.inf)
    # A distance over n values errs by sqrt(n) times the error of one.
    is_clear = others.min(axis=1) > CLEAR * error * np.sqrt(ours.shape[1])
    nearest = np.array([np.linalg.norm(ours - row, axis=1).argmin() for row in theirs])
    # Images that the model itself hardly tells from others decide nothing.
    same = (nearest == np.arange(len(ours))) & np.isfinite(theirs).all(axis=1)
    share = float(same[is_clear].mean()) if is_clear.any() else 1.0
    return Check.at_least("gate: nearest to the model's own, where that is clear", share, 1.0)


def _shares(name: str, same: np.ndarray, is_clear: np.ndarray, limit: float) -> list[Check]:
    clear = float(same[is_clear].mean()) if is_clear.any() else 1.0
    return [
        Check.at_least(f"gate: {name}, where the model's is clear", clear, 1.0),
        Check.at_least(f"gate: {name}", float(same.mean()), limit),
    ]


def _at_most(name: str, measured: Any, limit: float) -> Check:
    number = float(np.nan_to_num(measured, nan=np.inf, posinf=np.inf))
    return Check.at_most(f"gate: {name}", number, limit)
