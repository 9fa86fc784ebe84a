"""Tests of keras_vit.losses."""

import keras
import numpy as np
import pytest

from keras_vit.losses import make_loss
from keras_vit.training import SigmoidCrossEntropy


def test_sigmoid_is_the_sum_over_classes_and_the_mean_over_images() -> None:
    """The closed form, on logits and soft targets."""
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((4, 5)).astype(np.float32)
    targets = generator.uniform(0, 1, (4, 5)).astype(np.float32)
    chances = 1 / (1 + np.exp(-logits))
    expected = -(targets * np.log(chances) + (1 - targets) * np.log(1 - chances)).sum(1).mean()

    assert float(SigmoidCrossEntropy()(targets, logits)) == pytest.approx(expected, rel=1e-5)


def test_softmax_takes_logits_and_probabilities() -> None:
    """Both give the same number."""
    logits, targets = np.array([[1.0, 2.0, 0.5]], np.float32), np.array([[0.2, 0.8, 0.0]])
    chances = keras.ops.softmax(logits)

    assert float(make_loss("softmax")(targets, logits)) == pytest.approx(
        float(make_loss("softmax", from_logits=False)(targets, chances)), rel=1e-5
    )


def test_sigmoid_needs_logits() -> None:
    """The sentence says how the model is made."""
    with pytest.raises(ValueError, match="classifier_activation=None"):
        make_loss("sigmoid", from_logits=False)
