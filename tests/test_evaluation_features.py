"""Tests of what frozen features are worth, in keras_vit.evaluation.metrics."""

import dataclasses
import sys
from typing import Any

import keras
import numpy as np
import pytest
from conftest import assert_same_arrays, randomize
from sklearn.neighbors import KNeighborsClassifier
from test_evaluation_report import SMALL

from keras_vit.data import load_digits
from keras_vit.evaluation import FewShot, few_shot, nearest_neighbors
from keras_vit.evaluation.metrics import draw_shots, fit_linear, neighbor_classifier
from keras_vit.model import VisionTransformer

FLAT = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten()])
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (few_shot, {"shots": (1, 500)}, "fewer than the 500 shots asked for"),
    (few_shot, {"shots": ()}, r"shots=\(\)"),
    (few_shot, {"shots": (0,)}, r"shots=\(0,\)"),
    (few_shot, {"seeds": 0}, "seeds=0"),
    (few_shot, {"regularization": 0.0}, "regularization=0.0"),
    (nearest_neighbors, {"neighbors": 0}, "neighbors=0"),
    (nearest_neighbors, {"neighbors": 2000}, "1 to the 1259 train images"),
    (nearest_neighbors, {"temperature": 0.0}, "temperature=0.0"),
]


def sample(rows: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Classes with different means, of features with very different scales."""
    generator = np.random.default_rng(seed)
    targets = np.concatenate([np.arange(4), generator.integers(0, 4, rows - 4)])
    means = np.random.default_rng(9).standard_normal((4, width))
    x = means[targets] + 0.5 * generator.standard_normal((rows, width))
    return (x * 10.0 ** np.linspace(-2, 2, width)).astype(np.float32), targets


def expected_scores(
    x: np.ndarray, targets: np.ndarray, asked: np.ndarray, strength: float
) -> np.ndarray:
    """The regularised regression as one plain least-squares problem with rows added."""
    x, asked = x.astype(np.float64), asked.astype(np.float64)
    mean, deviation = x.mean(axis=0), x.std(axis=0) + 1e-5
    x, asked = ((each - mean) / deviation for each in (x, asked))
    x, asked = (np.hstack([each, np.full((len(each), 1), 100.0)]) for each in (x, asked))
    y = np.where(targets[:, None] == np.arange(4), 1.0, -1.0)
    stacked = np.vstack([x, np.sqrt(strength) * np.eye(x.shape[1])])
    zeros = np.zeros((x.shape[1], 4))
    scores: np.ndarray = asked @ np.linalg.lstsq(stacked, np.vstack([y, zeros]), rcond=None)[0]
    return scores


@pytest.mark.parametrize("strength", [1e-3, 1.0, 2.0**10])
@pytest.mark.parametrize(("rows", "width"), [(60, 12), (12, 60), (13, 12)])
def test_the_closed_form_is_least_squares(rows: int, width: int, strength: float) -> None:
    """With more rows than features or fewer, the scores are those of `numpy.linalg.lstsq`."""
    x, targets = sample(rows, width)
    asked, _ = sample(30, width, seed=1)
    actual = fit_linear(x, targets, regularization=strength).decision_function(asked)
    np.testing.assert_allclose(actual, expected_scores(x, targets, asked, strength), atol=1e-7)


def test_the_comparison_sees_another_strength() -> None:
    """It fails for a regularisation that is a tenth off."""
    x, targets = sample(60, 12)
    actual = fit_linear(x, targets, regularization=11.0).decision_function(x)
    assert np.abs(actual - expected_scores(x, targets, x, 10.0)).max() > 1e-4


def test_shots_are_nested_and_seeded() -> None:
    """Each class gives as many as asked; more shots hold the fewer; a seed decides everything."""
    targets = np.random.default_rng(0).permutation(np.repeat(np.arange(3), 30))
    drawn = draw_shots(targets, shots=(1, 5, 25), seed=4)
    for count, chosen in drawn.items():
        assert np.bincount(targets[chosen]).tolist() == [count] * 3
    assert set(drawn[1]) < set(drawn[5]) < set(drawn[25])
    again = draw_shots(targets, shots=(5,), seed=4)[5]
    np.testing.assert_array_equal(again, drawn[5])
    assert set(draw_shots(targets, shots=(5,), seed=5)[5]) != set(again)


def test_pixels_of_digits_are_learned_from_few() -> None:
    """On raw pixels the accuracy rises with the shots to what ridge regression gives."""
    data = load_digits()
    results = few_shot(
        FLAT, train=data.train, test=data.test, shots=(1, 5, 25), seeds=3, regularization=1.0
    )
    assert [result.shots for result in results] == [1, 5, 25]
    one, five, many = (result.mean for result in results)
    assert one < five < many
    assert 0.4 < one < 0.7
    assert 0.85 < many < 0.97
    assert all(len(result.accuracies) == 3 for result in results)
    expected = np.std(results[0].accuracies) * np.sqrt(3 / 2)
    np.testing.assert_allclose(results[0].std, expected)
    assert FewShot(1, (0.5,)).std == 0


def test_a_vit_is_measured_by_its_frozen_features() -> None:
    """The classifier has no part in it, the weights stay, and the same call gives the same."""
    data = load_digits()
    model = randomize(VisionTransformer(SMALL))
    arguments: dict[str, Any] = {"train": data.train, "test": data.test, "shots": (5,), "seeds": 2}
    first = few_shot(model, **arguments)
    model.get_layer("head").kernel.assign(np.zeros((24, 10)))
    before = model.get_weights()
    assert few_shot(model, **arguments) == first
    assert_same_arrays(model.get_weights(), before)
    headless = VisionTransformer(dataclasses.replace(SMALL, classes=None))
    headless.set_weights(before[:-2])
    assert few_shot(headless, **arguments) == first


@pytest.mark.parametrize(("count", "temperature"), [(1, 0.07), (5, 0.5), (20, 0.07)])
def test_votes_are_weighted_by_similarity(count: int, temperature: float) -> None:
    """Shares of the votes are those of a walk over the neighbours in NumPy."""
    generator = np.random.default_rng(0)
    known, asked = generator.standard_normal((50, 6)), generator.standard_normal((20, 6))
    targets = generator.integers(0, 4, 50)
    actual = neighbor_classifier(count, temperature).fit(known, targets).predict_proba(asked)
    for row, query in zip(actual, asked, strict=True):
        cosines = known @ query / np.linalg.norm(known, axis=1) / np.linalg.norm(query)
        votes = np.zeros(4)
        for place in sorted(range(50), key=lambda place: -cosines[place])[:count]:
            votes[targets[place]] += np.exp(cosines[place] / temperature)
        np.testing.assert_allclose(row, votes / votes.sum(), atol=1e-9)


def test_digits_are_told_apart_by_their_pixels() -> None:
    """On raw pixels the accuracy is scikit-learn's; at a low temperature weights stay finite."""
    data = load_digits()
    actual = nearest_neighbors(FLAT, train=data.train, test=data.test, neighbors=1)
    known, asked = (split.images.reshape(len(split), -1) for split in (data.train, data.test))
    reference = KNeighborsClassifier(1, metric="cosine").fit(known, data.train.targets)
    assert actual == pytest.approx(reference.score(asked, data.test.targets), abs=1e-9)
    assert actual > 0.95
    known = np.eye(3)
    votes = neighbor_classifier(2, 1e-4).fit(known, np.arange(3)).predict_proba(known)
    np.testing.assert_allclose(votes, np.eye(3), atol=1e-12)


def test_bad_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what there is, of a class never shown too, and what is not installed."""
    data = load_digits()
    for measure, arguments, message in WRONG:
        with pytest.raises(ValueError, match=message):
            measure(FLAT, train=data.train, test=data.test, **arguments)
    train = data.train.take(np.flatnonzero(data.train.targets != 7))
    with pytest.raises(ValueError, match="test images show class 7"):
        few_shot(FLAT, train=train, test=data.test, shots=(1,))
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for measure in (few_shot, nearest_neighbors):
        with pytest.raises(ImportError, match="pip install scikit-learn"):
            measure(FLAT, train=data.train, test=data.test)
