"""Tests of keras_vit.evaluation.metrics, and of what predictions.py makes of a split."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import scipy.special
import sklearn.metrics
import variants_oracle
from conftest import TINY, randomize
from test_evaluation_report import SMALL

from keras_vit import VisionTransformer, evaluation
from keras_vit.data import Split
from keras_vit.evaluation import Evaluation, Predictions, evaluate, metrics, predictions

LABELS = tuple("abcdefg")
CONFIG = dataclasses.replace(SMALL, classes=7)
MISFITS: list[tuple[Any, np.ndarray, Any, str]] = [
    (metrics.real_accuracy, np.zeros((2, 3)), [{0}], r"\(2, 3\) and 1 sets"),
    (metrics.real_accuracy, np.zeros(3), [{0}] * 3, r"\(3,\)"),
    (metrics.real_accuracy, np.zeros((2, 3)), [set(), set()], "No image has a right class"),
]
# What departs from CONFIG, and the model's own name of what its classifier sees.
SEEN: list[tuple[dict[str, Any], str]] = [
    ({}, "pooling"),
    ({"representation_dim": 5, "classifier_activation": "softmax"}, "representation"),
    ({"pooling": "avg", "class_token": False}, "pooling"),
    ({"pooling": "map", "class_token": False}, "pooling"),
    ({"classes": None}, "pooling"),
    ({"norm_after_pooling": True, "pooling": "avg"}, "pooling_norm"),
    ({"norm_after_pooling": True, "pooling": "avg", "classes": None}, "pooling_norm"),
    (variants_oracle.MODERN, "pooling_norm"),
]


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return randomize(VisionTransformer(CONFIG))


def random_split(count: int = 60) -> Split:
    generator = np.random.default_rng(1)
    return Split(
        images=generator.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8),
        targets=generator.integers(0, 7, count, dtype=np.int32),
    )


def test_the_numbers_are_those_of_scikit_learn(model: VisionTransformer) -> None:
    """Accuracy, top-5, loss, confusion, recall and precision agree with another library."""
    split = random_split()
    actual = evaluate(model, split, labels=LABELS, batch_size=17)
    logits = np.asarray(model(split.images.astype(np.float32)), np.float64)
    probabilities = scipy.special.softmax(logits, axis=1)
    predicted = logits.argmax(axis=1)
    everything = range(7)

    assert actual.images == 60
    assert len(set(predicted)) > 2
    assert actual.accuracy == sklearn.metrics.accuracy_score(split.targets, predicted)
    assert actual.top5_accuracy == pytest.approx(
        sklearn.metrics.top_k_accuracy_score(split.targets, probabilities, k=5, labels=everything)
    )
    assert actual.loss == pytest.approx(
        sklearn.metrics.log_loss(split.targets, probabilities, labels=everything), rel=1e-4
    )
    assert np.array_equal(
        actual.confusion,
        sklearn.metrics.confusion_matrix(split.targets, predicted, labels=everything),
    )
    precision, recall, _, _ = sklearn.metrics.precision_recall_fscore_support(
        split.targets, predicted, labels=everything, zero_division=0
    )
    assert [score.recall or 0 for score in actual.class_scores] == pytest.approx(list(recall))
    assert [score.precision or 0 for score in actual.class_scores] == pytest.approx(list(precision))
    # The numbers of `keras-vit evaluate` can be compared with ==.
    assert evaluate(model, split, labels=LABELS, batch_size=17).to_dict() == actual.to_dict()


def test_a_class_without_images_has_no_score() -> None:
    """Nothing is divided by zero, and JSON gets null."""
    confusion = np.array([[2, 0, 0], [1, 0, 0], [0, 0, 0]])
    actual = Evaluation(labels=("a", "b", "c"), confusion=confusion, loss=1.0, top5_accuracy=None)

    assert [score.recall for score in actual.class_scores] == [1.0, 0.0, None]
    assert [score.precision for score in actual.class_scores] == [2 / 3, None, None]
    assert actual.accuracy == 2 / 3
    assert "top5_accuracy" not in actual.to_dict()
    assert json.loads(json.dumps(actual.to_dict()))["classes"][2]["recall"] is None


def test_what_cannot_be_measured_is_an_error(model: VisionTransformer) -> None:
    """No images, other classes, a damaged image by its name, answers that would print as nan%."""
    damaged = Split(
        images=np.array([b"no image"], object), targets=np.array([0]), names=np.array(["a.jpg"])
    )
    with pytest.raises(ValueError, match="no images to evaluate on"):
        evaluate(model, random_split(0), labels=LABELS)
    with pytest.raises(ValueError, match="7 classes, the data 2"):
        evaluate(model, random_split(), labels=("a", "b"))
    with pytest.raises(ValueError, match=r"1 of 1 images cannot be decoded, the first is 'a\.jpg'"):
        evaluate(model, damaged, labels=LABELS)
    ending = predictions.classifier_ending(model)
    extreme = np.array([[1000.0, 0.0], [-1000.0, 0.0]], np.float32)  # does not overflow
    assert predictions.log_scores(extreme, ending, model).tolist() == [[0, -1000], [-1000, 0]]
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match=r"no number .NaN or infinite.*weights are damaged"):
            predictions.log_scores(np.array([[0.0, wrong]], np.float32), ending, model)


@pytest.mark.parametrize("seed", range(3))
def test_the_error_is_that_of_a_walk_over_the_bins(seed: int) -> None:
    """It equals the paper's sum, bin by bin and image by image; a bin holds its upper edge."""
    generator = np.random.default_rng(seed)
    confidence = np.append(generator.uniform(0.2, 1, 198), [1.0, 0.2])
    right = generator.integers(0, 2, 200)
    actual = Predictions(targets=right, predicted=np.ones(200), confidence=confidence).calibration
    expected = 0.0
    for place in range(15):
        inside = [row for row in range(200) if place / 15 < confidence[row] <= (place + 1) / 15]
        assert actual.images[place] == len(inside)
        if inside:
            gap = np.mean([right[row] for row in inside]) - np.mean(confidence[inside])
            expected += abs(gap) * len(inside) / 200
    np.testing.assert_allclose(actual.error, expected, atol=1e-12)


def test_accuracy_counts_any_right_class() -> None:
    """It is the paper's sum, walked image by image; images without labels do not count."""
    generator = np.random.default_rng(0)
    scores = generator.standard_normal((300, 6))
    labels = [set(generator.choice(6, generator.integers(0, 4), replace=False)) for _ in scores]
    kept = [row for row in range(300) if labels[row]]
    assert 0 < len(kept) < 300
    expected = sum(int(np.argmax(scores[row])) in labels[row] for row in kept) / len(kept)
    assert metrics.real_accuracy(scores, labels) == pytest.approx(expected, abs=1e-12)


def test_the_labels_of_imagenet_real_are_read(tmp_path: Path) -> None:
    """A list of lists becomes a tuple of sets; of another file the error says what to fetch."""
    file = tmp_path / "real.json"
    file.write_text(json.dumps([[65], [], [970, 795]]))
    assert metrics.read_real_labels(file) == (frozenset({65}), frozenset(), frozenset({970, 795}))
    for text in ("{", "[1]", '[["cat"]]', "[[1.5]]", "[[-1]]", "[[true]]", "7", "\udcff"):
        file.write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match=r"real\.json.*reassessed-imagenet"):
            metrics.read_real_labels(file)
    with pytest.raises(FileNotFoundError, match="nothing"):
        metrics.read_real_labels(tmp_path / "nothing.json")


def test_what_does_not_fit_is_refused() -> None:
    """Logits, other counts and nothing at all: the error says what was received."""
    for measure, scores, targets, message in MISFITS:
        with pytest.raises(ValueError, match=message):
            measure(scores, targets)


@pytest.mark.parametrize(("fields", "name"), SEEN)
def test_features_are_what_the_classifier_would_see(fields: dict[str, Any], name: str) -> None:
    """They are the model's own named result before the head, over every batch."""
    model = randomize(VisionTransformer(dataclasses.replace(CONFIG, **fields)))
    data = random_split()
    actual = predictions.frozen_features(model, data, batch_size=25)
    expected = model.features(data.images.astype(np.float32), [name])[name]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_tokens_and_no_images_are_no_features() -> None:
    """A model without pooling is refused: a vector is asked for. So is an empty split."""
    model = VisionTransformer(dataclasses.replace(CONFIG, classes=None, pooling=None))
    data = random_split()
    with pytest.raises(ValueError, match="with pooling"):
        predictions.frozen_features(model, data)
    for function in (predictions.frozen_features, predictions.log_probabilities):
        with pytest.raises(ValueError, match="no images"):
            function(VisionTransformer(CONFIG), data.take([]))


def test_bfloat16_is_near_and_float32_the_model_itself(
    tiny: VisionTransformer, images: np.ndarray
) -> None:
    """Answers differ by bfloat16's rounding, and do differ; the original is left as it is.

    Another precision, another kind of model and an adapter are told.
    """
    copy = evaluation.in_precision(tiny, "bfloat16")
    expected, actual = (np.asarray(model(images), np.float32) for model in (tiny, copy))
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < 2e-2
    assert tiny.get_layer("block_0").dtype == "float32"
    assert evaluation.in_precision(tiny, "float32") is tiny
    with pytest.raises(ValueError, match=r"precision must be one of.*'float16'"):
        evaluation.in_precision(tiny, "float16")
    with pytest.raises(TypeError, match=r"Only a VisionTransformer.*Received: Sequential"):
        evaluation.in_precision(keras.Sequential(), "bfloat16")
    adapted = randomize(VisionTransformer(TINY))
    adapted.get_layer("block_0").mlp.fc1.enable_lora(2)
    with pytest.raises(ValueError, match="Merge the adapter first"):
        evaluation.in_precision(adapted, "bfloat16")


def test_batches_are_smaller_where_there_are_many_tokens() -> None:
    """Usual models run 128 images at once, as do those without patches; more tokens, fewer."""
    for side, patch, expected in ((32, 8, 128), (224, 16, 128), (384, 8, 8)):
        config = dataclasses.replace(
            TINY, input_shape=(side, side, 3), patch_size=patch, num_layers=1
        )
        assert evaluation.default_batch_size(VisionTransformer(config)) == expected
    assert evaluation.default_batch_size(keras.Sequential()) == 128
