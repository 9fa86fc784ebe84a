"""Tests of keras_vit.evaluation.metrics."""

import json
from pathlib import Path

import numpy as np
import pytest

from keras_vit.evaluation import metrics


def test_accuracy_counts_any_right_class() -> None:
    """It is the paper's sum, walked image by image; images without labels do not count."""
    generator = np.random.default_rng(0)
    scores = generator.standard_normal((300, 6))
    labels = [set(generator.choice(6, generator.integers(0, 4), replace=False)) for _ in scores]
    kept = [row for row in range(300) if labels[row]]
    assert 0 < len(kept) < 300
    expected = sum(int(np.argmax(scores[row])) in labels[row] for row in kept) / len(kept)
    assert metrics.real_accuracy(scores, labels) == pytest.approx(expected, abs=1e-12)


def test_one_label_each_is_plain_accuracy() -> None:
    """With exactly one right class it is the usual accuracy."""
    generator = np.random.default_rng(1)
    scores, targets = generator.standard_normal((100, 4)), generator.integers(0, 4, 100)
    actual = metrics.real_accuracy(scores, [{int(target)} for target in targets])
    assert actual == (scores.argmax(axis=1) == targets).mean()


def test_the_file_is_read(tmp_path: Path) -> None:
    """A list of lists becomes a tuple of sets, the empty ones kept in place."""
    (tmp_path / "real.json").write_text(json.dumps([[65], [], [970, 795]]))
    actual = metrics.read_real_labels(tmp_path / "real.json")
    assert actual == (frozenset({65}), frozenset(), frozenset({970, 795}))


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[["cat"]]', "[[1.5]]", "[[-1]]", "[[true]]", "7", "\udcff"]
)
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    """The error names the file and what to fetch."""
    (tmp_path / "real.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"real\.json.*reassessed-imagenet"):
        metrics.read_real_labels(tmp_path / "real.json")


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    """It is a FileNotFoundError."""
    with pytest.raises(FileNotFoundError, match="nothing"):
        metrics.read_real_labels(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        (np.zeros((2, 3)), [{0}], r"\(2, 3\) and 1 sets"),
        (np.zeros(3), [{0}] * 3, r"\(3,\)"),
        (np.zeros((2, 3)), [set(), set()], "No image has a right class"),
    ],
)
def test_what_does_not_fit_is_refused(
    scores: np.ndarray, labels: list[set[int]], message: str
) -> None:
    """The error says what was received."""
    with pytest.raises(ValueError, match=message):
        metrics.real_accuracy(scores, labels)
