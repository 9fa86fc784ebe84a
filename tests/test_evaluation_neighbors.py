"""Tests of keras_vit.evaluation.features."""

from typing import Any

import keras
import numpy as np
import pytest
import sklearn.neighbors

from keras_vit.data import load_digits
from keras_vit.evaluation import features

FLAT = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten()])


@pytest.mark.parametrize(("count", "temperature"), [(1, 0.07), (5, 0.5), (20, 0.07)])
def test_votes_are_scikit_learns(
    count: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of the votes are those of scikit-learn's classifier with the same weights."""
    monkeypatch.setattr(features, "_ROWS", 7)  # several blocks of rows
    generator = np.random.default_rng(0)
    known, asked = generator.standard_normal((50, 6)), generator.standard_normal((20, 6))
    targets = generator.integers(0, 4, 50)
    votes = features.neighbor_votes(known, targets, asked, neighbors=count, temperature=temperature)
    reference = sklearn.neighbors.KNeighborsClassifier(
        count,
        metric="cosine",
        algorithm="brute",
        weights=lambda distance: np.exp((1 - distance) / temperature),
    ).fit(known, targets)
    shares = votes / votes.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, reference.predict_proba(asked), atol=1e-9)


def test_digits_are_told_apart_by_their_pixels() -> None:
    """On raw pixels the accuracy is scikit-learn's."""
    data = load_digits()
    actual = features.nearest_neighbors(FLAT, train=data.train, test=data.test, neighbors=1)
    flat = [split.images.reshape(len(split), -1) for split in (data.train, data.test)]
    reference = sklearn.neighbors.KNeighborsClassifier(1, metric="cosine")
    reference.fit(flat[0], data.train.targets)
    assert actual == pytest.approx(reference.score(flat[1], data.test.targets), abs=1e-9)
    assert actual > 0.95


def test_a_low_temperature_does_not_overflow() -> None:
    """Weights stay finite where the exponent alone would not."""
    known = np.eye(3)
    votes = features.neighbor_votes(known, np.arange(3), known, neighbors=2, temperature=1e-4)
    np.testing.assert_allclose(votes, np.eye(3), atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"neighbors": 0}, "neighbors=0"),
        ({"neighbors": 2000}, "1 to the 1259 train images"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_bad_numbers_are_refused(arguments: dict[str, Any], message: str) -> None:
    """The error says what is allowed."""
    data = load_digits()
    with pytest.raises(ValueError, match=message):
        features.nearest_neighbors(FLAT, train=data.train, test=data.test, **arguments)
