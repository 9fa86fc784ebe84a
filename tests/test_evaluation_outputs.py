"""Tests of keras_vit.evaluation.outputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import variants_oracle
from conftest import TINY, randomize

from keras_vit.data import Split, load_digits
from keras_vit.evaluation import outputs
from keras_vit.model import VisionTransformer

SMALL = dataclasses.replace(
    TINY, input_shape=(8, 8, 3), patch_size=4, num_layers=1, classes=10, include_preprocessing=True
)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "pooling"),
        ({"representation_dim": 5, "classifier_activation": "softmax"}, "representation"),
        ({"pooling": "avg", "class_token": False}, "pooling"),
        ({"pooling": "map", "class_token": False}, "pooling"),
        ({"classes": None}, "pooling"),
        ({"norm_after_pooling": True, "pooling": "avg"}, "pooling_norm"),
        ({"norm_after_pooling": True, "pooling": "avg", "classes": None}, "pooling_norm"),
        (variants_oracle.MODERN, "pooling_norm"),
    ],
)
def test_features_are_what_the_classifier_would_see(fields: dict[str, Any], name: str) -> None:
    """They are the model's own named result before the head, over every batch."""
    model = randomize(VisionTransformer(dataclasses.replace(SMALL, **fields)))
    data = load_digits().validation
    actual = outputs.frozen_features(model, data, batch_size=50)
    expected = model.features(data.images.astype(np.float32), [name])[name]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_log_probabilities_are_the_log_softmax() -> None:
    """Logits and softmax outputs give the same."""
    data = load_digits().validation
    logits = randomize(VisionTransformer(SMALL))
    softmax = VisionTransformer(dataclasses.replace(SMALL, classifier_activation="softmax"))
    softmax.set_weights(logits.get_weights())
    actual = outputs.log_probabilities(logits, data)
    expected = keras.ops.log_softmax(logits(data.images.astype(np.float32)))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(outputs.log_probabilities(softmax, data), actual, atol=1e-4)


def test_tokens_are_no_features() -> None:
    """A model without pooling is refused: a vector is asked for."""
    model = VisionTransformer(dataclasses.replace(SMALL, classes=None, pooling=None))
    with pytest.raises(ValueError, match="with pooling"):
        outputs.frozen_features(model, load_digits().test)


@pytest.mark.parametrize("function", [outputs.frozen_features, outputs.log_probabilities])
def test_no_images_are_refused(function: Callable[..., Any]) -> None:
    """An empty split is an error."""
    empty = Split(images=np.zeros((0, 8, 8, 3), np.uint8), targets=np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="no images"):
        function(VisionTransformer(SMALL), empty)
