"""Tests of keras_vit.evaluation.outputs."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import variants_oracle
from conftest import TINY, randomize

from keras_vit import evaluation
from keras_vit.data import load_digits
from keras_vit.evaluation import outputs
from keras_vit.model import VisionTransformer

SMALL = dataclasses.replace(
    TINY, input_shape=(8, 8, 3), patch_size=4, num_layers=1, classes=10, include_preprocessing=True
)


# What departs from `SMALL`, and the model's own name of what its classifier sees.
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


@pytest.mark.parametrize(("fields", "name"), SEEN)
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


def test_tokens_and_no_images_are_no_features() -> None:
    """A model without pooling is refused: a vector is asked for. So is an empty split."""
    model = VisionTransformer(dataclasses.replace(SMALL, classes=None, pooling=None))
    data = load_digits().test
    with pytest.raises(ValueError, match="with pooling"):
        outputs.frozen_features(model, data)
    for function in (outputs.frozen_features, outputs.log_probabilities):
        with pytest.raises(ValueError, match="no images"):
            function(VisionTransformer(SMALL), data.take([]))


def test_bfloat16_is_near_and_float32_the_model_itself(
    tiny: VisionTransformer, images: np.ndarray
) -> None:
    """Answers differ by bfloat16's rounding, and do differ; the original is left as it is."""
    copy = evaluation.in_precision(tiny, "bfloat16")
    expected, actual = (np.asarray(model(images), np.float32) for model in (tiny, copy))
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < 2e-2
    assert tiny.get_layer("block_0").dtype == "float32"
    assert evaluation.in_precision(tiny, "float32") is tiny


def test_what_cannot_be_converted_is_an_error(tiny: VisionTransformer) -> None:
    """Another precision, another kind of model and an adapter are told."""
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
        assert evaluation.sensible_batch_size(VisionTransformer(config)) == expected
    assert evaluation.sensible_batch_size(keras.Sequential()) == 128
