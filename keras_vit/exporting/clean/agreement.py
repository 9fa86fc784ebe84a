"""The gate of an artefact: its errors beside what the model's answers vary by, and its decisions.

What all images share proves nothing: a bias of -10 makes every cosine 1, and an answer that no
image changes is close to them all if one logit is large. So an error is measured in *spreads*: the
standard deviation of the model's answers over the images, around each class's own mean. A constant
answer then has an error of 1, whatever the head's biases are.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

# A spread counts as at least this share of the largest answer: rounding grows with that.
LEAST_SPREAD = 1e-3
# One class's spread counts as at least this share of the spread of all.
LEAST_OF_ONE = 0.25
PROBABILITY = 0.02  # int8 throughout has 256 values
# A best class is clear if it leads by so many times the error that is allowed.
CLEAR = 6.0


# By name: the measurement, its limit, and whether that is the least value.
Measured = dict[str, tuple[float, float, bool]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a format may differ by; errors are in spreads.

    Attributes:
        error: the root mean square error of all answers.
        largest: the largest error of one answer.
        of_one: the root mean square error of one class, or feature, over its own spread.
        best: the least share of images with the model's best class. It is less where the model
            itself hardly decides: what errors of the allowed size leave.
        accuracy: the most that the accuracy on labelled images may fall.
    """

    error: float
    largest: float
    of_one: float
    best: float
    accuracy: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gate:
    """Images that decide about an artefact, and the model's answers for them.

    Attributes:
        signature: the signature of a SavedModel; "" where a format has only one.
        inputs: the images (B, H, W, C) by the name of the input.
        outputs: the names of the outputs to read: what is compared, "logits" or "features", and
            "probabilities", which must follow from the artefact's own logits.
        expected: the model's answers (B, classes) or (B, ...).
        limits: what the format may differ by.
        kind: "softmax", of which only differences of logits count; "sigmoid", whose classes are
            independent; "values", of features and others.
        targets: the true classes (B,), -1 where unknown; empty without any.
    """

    signature: str
    inputs: dict[str, np.ndarray]
    outputs: tuple[str, ...]
    expected: np.ndarray
    limits: Limits
    kind: str
    targets: np.ndarray


def measure(gate: Gate, answers: Mapping[str, np.ndarray]) -> Measured:
    """Returns the measurements, each with its limit and whether that is the least value.

    Example:
        >>> logits = np.array([[1.0, -1.0], [-1.0, 1.0]])
        >>> limits = Limits(error=0.1, largest=0.5, of_one=0.5, best=1.0, accuracy=0.0)
        >>> gate = Gate(signature="", inputs={}, outputs=("logits",), expected=logits,
        ...             limits=limits, kind="softmax", targets=np.array([0, 1]))
        >>> measure(gate, {"logits": logits + 5})["error / spread"]
        (0.0, 0.1, False)
        >>> measure(gate, {"logits": logits * 0})["error / spread"]
        (1.0, 0.1, False)
    """
    limits, expected = gate.limits, centred(gate, gate.expected)
    actual = answers[gate.outputs[0]]
    if actual.shape != gate.expected.shape or not np.isfinite(actual).all():
        actual = np.full(gate.expected.shape, np.inf)
        errors = np.full(expected.shape, np.inf)
    else:
        errors = centred(gate, actual) - expected
    spreads, spread = _spreads(gate, expected)
    with np.errstate(invalid="ignore"):
        of_each = np.sqrt(np.mean(np.square(errors), axis=0))
        results: Measured = {
            "error / spread": (_root_mean_square(errors) / spread, limits.error, False),
            "largest error / spread": (np.abs(errors).max() / spread, limits.largest, False),
            f"error / spread of the worst {_ONE[gate.kind]}": (
                (of_each / spreads).max(), limits.of_one, False
            ),
        }  # fmt: skip
        results |= _decisions(gate, actual, spread)
        if "probabilities" in gate.outputs:
            results |= _probabilities(gate, actual, answers["probabilities"])
    return {
        name: (float(np.nan_to_num(value, nan=np.inf, posinf=np.inf)), limit, is_least)
        for name, (value, limit, is_least) in results.items()
    }


def spread(gate: Gate) -> float:
    """Returns by how much the model's answers vary with the image."""
    return _spreads(gate, centred(gate, gate.expected))[1]


def centred(gate: Gate, answers: np.ndarray) -> np.ndarray:
    """Returns answers as (B, values), without what a softmax does not see."""
    rows = np.asarray(answers, np.float64).reshape(len(answers), -1)
    if gate.kind == "softmax":
        rows = rows - rows.mean(axis=1, keepdims=True)
    return rows


_ONE = {"softmax": "class", "sigmoid": "class", "values": "value"}


def _spreads(gate: Gate, expected: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the spread of each class or feature (values,), and that of all."""
    of_each = expected.std(axis=0)
    least = LEAST_SPREAD * float(np.abs(gate.expected).max(initial=0.0))
    spread = max(_root_mean_square(of_each), least, 1e-12)
    return np.maximum(of_each, LEAST_OF_ONE * spread), spread


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _decisions(gate: Gate, actual: np.ndarray, spread: float) -> Measured:
    error = gate.limits.error * spread
    if gate.kind == "values":
        return _own_nearest(gate, actual, error)
    results: Measured = {}
    if gate.kind == "sigmoid":
        same, margins = (actual > 0) == (gate.expected > 0), np.abs(gate.expected)
        results |= _shares("decision at zero", same, margins > CLEAR * error, gate.limits.best)
    if gate.expected.shape[1] > 1:
        logits = np.sort(gate.expected, axis=1)
        same = actual.argmax(axis=1) == gate.expected.argmax(axis=1)
        same &= np.isfinite(actual).all(axis=1)
        margins = logits[:, -1] - logits[:, -2]
        limit = min(gate.limits.best, _expected_share(margins, error))
        results |= _shares("best class", same, margins > CLEAR * error, limit)
        results |= _accuracy(gate, actual)
    return results


def _expected_share(margins: np.ndarray, error: float) -> float:
    """Returns the share of best classes that errors of this deviation leave, less three of its own.

    The two best logits err independently, so their difference errs by sqrt(2) as much.
    """
    flips = np.array([0.5 * math.erfc(margin / (2 * error)) for margin in margins])
    deviation = math.sqrt(np.sum(flips * (1 - flips))) / len(flips)
    return float(1 - flips.mean() - 3 * deviation)


def _shares(name: str, same: np.ndarray, is_clear: np.ndarray, limit: float) -> Measured:
    return {
        f"{name}, where the model's is clear": (_share(same, is_clear), 1.0, True),
        name: (float(same.mean()), limit, True),
    }


def _accuracy(gate: Gate, actual: np.ndarray) -> Measured:
    is_known = gate.targets >= 0
    if not is_known.any():
        return {}
    targets = gate.targets[is_known]
    ours, theirs = (
        float(np.mean(each[is_known].argmax(axis=1) == targets)) for each in (gate.expected, actual)
    )
    # Fewer images than 1 / limit cannot resolve it: one of them may change.
    limit = max(gate.limits.accuracy, 1 / len(targets))
    return {"accuracy": (theirs, ours - limit, True)}


def _own_nearest(gate: Gate, actual: np.ndarray, error: float) -> Measured:
    """Returns the share of images whose answer is nearest to the model's for the same image.

    Only images count that the model itself tells from all others by more than the errors.
    """
    ours, theirs = (each.reshape(len(each), -1) for each in (gate.expected, actual))
    others = np.array([np.linalg.norm(ours - row, axis=1) for row in ours])
    np.fill_diagonal(others, np.inf)
    is_clear = others.min(axis=1) > CLEAR * error * np.sqrt(ours.shape[1])
    nearest = np.array([np.linalg.norm(ours - row, axis=1).argmin() for row in theirs])
    same = (nearest == np.arange(len(ours))) & np.isfinite(theirs).all(axis=1)
    return {"nearest to the model's own, where that is clear": (_share(same, is_clear), 1.0, True)}


def _probabilities(gate: Gate, logits: np.ndarray, probabilities: np.ndarray) -> Measured:
    if gate.kind == "softmax":
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        own = powers / powers.sum(axis=1, keepdims=True)
    else:
        own = 1 / (1 + np.exp(-logits))
    is_same = probabilities.shape == own.shape and np.isfinite(probabilities).all()
    difference = np.abs(probabilities - own).max() if is_same else np.inf
    return {"probabilities beside its own logits'": (difference, PROBABILITY, False)}


def _share(same: np.ndarray, is_clear: np.ndarray) -> float:
    return float(same[is_clear].mean()) if is_clear.any() else 1.0
