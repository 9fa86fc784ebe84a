"""Tests of keras_vit.evaluation.metrics."""

import numpy as np
import pytest
import scipy.special

from keras_vit.evaluation import calibration


def cases(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    probabilities = scipy.special.softmax(3 * generator.standard_normal((count, 5)), axis=1)
    return probabilities, generator.integers(0, 5, count)


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("seed", range(3))
def test_the_error_is_that_of_a_walk_over_the_bins(bins: int, seed: int) -> None:
    """Error and largest gap equal the paper's sums, bin by bin and image by image."""
    probabilities, targets = cases(200, seed)
    gaps, weights = [], []
    for place in range(bins):
        inside = [
            row
            for row in range(200)
            if place / bins < max(probabilities[row]) <= (place + 1) / bins
        ]
        if inside:
            right = np.mean([np.argmax(probabilities[row]) == targets[row] for row in inside])
            gaps.append(abs(right - np.mean([max(probabilities[row]) for row in inside])))
            weights.append(len(inside) / 200)
    actual = calibration(probabilities, targets, bins=bins)
    np.testing.assert_allclose(actual.error, np.dot(weights, gaps), atol=1e-12)
    np.testing.assert_allclose(actual.largest_gap, max(gaps), atol=1e-12)
    assert actual.images.sum() == 200


def test_a_sharpened_model_is_worse_calibrated() -> None:
    """Targets drawn from the probabilities are calibrated; the same made surer are not."""
    generator = np.random.default_rng(0)
    probabilities, _ = cases(20000, 1)
    drawn = (probabilities.cumsum(axis=1) > generator.uniform(size=(20000, 1))).argmax(axis=1)
    sharp = probabilities**3 / (probabilities**3).sum(axis=1, keepdims=True)
    assert calibration(probabilities, drawn).error < 0.02
    assert calibration(sharp, drawn).error > 0.1


def test_the_edges_belong_to_a_bin() -> None:
    """Full confidence falls into the last bin, and a bin holds its upper edge."""
    actual = calibration(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([0, 0]), bins=2)
    assert actual.images.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("probabilities", "targets", "message"),
    [
        (np.ones((2, 3)), np.zeros(2), "apply softmax"),
        (np.ones((2, 3)), np.zeros(3), r"\(2, 3\) and \(3,\)"),
        (np.ones(3), np.zeros(3), r"\(3,\)"),
        (np.ones((0, 3)), np.zeros(0), "at least one row"),
    ],
)
def test_what_are_no_probabilities_is_refused(
    probabilities: np.ndarray, targets: np.ndarray, message: str
) -> None:
    """Logits, other counts and nothing at all are errors."""
    with pytest.raises(ValueError, match=message):
        calibration(probabilities, targets)
