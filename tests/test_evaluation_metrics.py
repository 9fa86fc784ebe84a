"""Tests of keras_vit.evaluation.metrics."""

import dataclasses
import json
from typing import Any

import keras
import numpy as np
import pytest
import sklearn.metrics

import keras_vit
from keras_vit.data import Split
from keras_vit.evaluation import Evaluation, evaluate
from keras_vit.evaluation.outputs import log_softmax

LABELS = tuple("abcdefg")
CONFIG = keras_vit.ViTConfig(
    input_shape=(8, 8, 3),
    patch_size=4,
    hidden_dim=8,
    mlp_dim=8,
    num_heads=2,
    num_layers=1,
    classes=7,
    include_preprocessing=True,
)


def random_model(**fields: Any) -> keras_vit.VisionTransformer:
    model = keras_vit.VisionTransformer(dataclasses.replace(CONFIG, **fields))
    generator = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(size=variable.shape))
    return model


def random_split(count: int = 60) -> Split:
    generator = np.random.default_rng(1)
    return Split(
        images=generator.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8),
        targets=generator.integers(0, 7, count, dtype=np.int32),
    )


def test_the_numbers_are_those_of_scikit_learn() -> None:
    """Accuracy, top-5, loss, confusion, recall and precision agree with another library."""
    model, split = random_model(), random_split()
    actual = evaluate(model, split, labels=LABELS, batch_size=17)
    logits = np.asarray(model(split.images.astype(np.float32)), np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    predicted = logits.argmax(axis=1)
    everything = range(7)

    assert actual.images == 60
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


def test_logits_and_probabilities_measure_the_same() -> None:
    """A model with softmax gives the numbers of the same model without."""
    plain, soft = random_model(), random_model(classifier_activation="softmax")
    left = evaluate(plain, random_split(), labels=LABELS)
    right = evaluate(soft, random_split(), labels=LABELS)

    assert np.array_equal(left.confusion, right.confusion)
    assert left.loss == pytest.approx(right.loss, rel=1e-4)


def test_measuring_twice_gives_the_same_bits() -> None:
    """The numbers of `keras-vit evaluate` can be compared with ==."""
    model = random_model()

    assert (
        evaluate(model, random_split(), labels=LABELS).to_dict()
        == evaluate(model, random_split(), labels=LABELS).to_dict()
    )


def test_extreme_logits_do_not_overflow() -> None:
    """The loss of logits of a thousand is finite and right."""
    logits = np.array([[1000.0, 0.0], [-1000.0, 0.0]], np.float32)

    assert log_softmax(logits, model=keras.Sequential()).tolist() == [[0, -1000], [-1000, 0]]


def test_a_class_without_images_has_no_score() -> None:
    """Nothing is divided by zero, and JSON gets null."""
    confusion = np.array([[2, 0, 0], [1, 0, 0], [0, 0, 0]])
    actual = Evaluation(labels=("a", "b", "c"), confusion=confusion, loss=1.0, top5_accuracy=None)

    assert [score.recall for score in actual.class_scores] == [1.0, 0.0, None]
    assert [score.precision for score in actual.class_scores] == [2 / 3, None, None]
    assert actual.accuracy == 2 / 3
    assert "top5_accuracy" not in actual.to_dict()
    assert json.loads(json.dumps(actual.to_dict()))["classes"][2]["recall"] is None


def test_what_cannot_be_measured_is_an_error() -> None:
    """No images, and another number of classes, are told."""
    with pytest.raises(ValueError, match="no images to evaluate on"):
        evaluate(random_model(), random_split(0), labels=LABELS)
    with pytest.raises(ValueError, match="7 classes, the data 2"):
        evaluate(random_model(), random_split(), labels=("a", "b"))


def test_a_damaged_image_is_named() -> None:
    """Not TensorFlow's error, which names none."""
    split = Split(
        images=np.array([b"no image"], object), targets=np.array([0]), names=np.array(["a.jpg"])
    )
    with pytest.raises(ValueError, match=r"1 of 1 images cannot be decoded, the first is 'a\.jpg'"):
        evaluate(random_model(), split, labels=LABELS)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_answers_that_are_no_numbers_are_an_error(wrong: float) -> None:
    """They would be printed as "nan%"."""
    with pytest.raises(ValueError, match=r"no number .NaN or infinite.*weights are damaged"):
        log_softmax(np.array([[0.0, wrong]], np.float32), model=random_model())
