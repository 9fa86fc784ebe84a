"""Tests of keras_vit.evaluation.outputs."""

import dataclasses

import keras
import numpy as np
import pytest
from conftest import TINY, randomize

import keras_vit
from keras_vit import evaluation


def test_bfloat16_is_near_and_float32_the_model_itself(
    tiny: keras_vit.VisionTransformer, images: np.ndarray
) -> None:
    """Answers differ by bfloat16's rounding, and do differ; the original is left as it is."""
    copy = evaluation.in_precision(tiny, "bfloat16")
    expected, actual = (np.asarray(model(images), np.float32) for model in (tiny, copy))
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert 1e-5 < error < 2e-2
    assert tiny.get_layer("block_0").dtype == "float32"
    assert evaluation.in_precision(tiny, "float32") is tiny


def test_what_cannot_be_converted_is_an_error(tiny: keras_vit.VisionTransformer) -> None:
    """Another precision, another kind of model and an adapter are told."""
    with pytest.raises(ValueError, match=r"precision must be one of.*'float16'"):
        evaluation.in_precision(tiny, "float16")
    with pytest.raises(TypeError, match=r"Only a VisionTransformer.*Received: Sequential"):
        evaluation.in_precision(keras.Sequential(), "bfloat16")
    adapted = randomize(keras_vit.VisionTransformer(TINY))
    adapted.get_layer("block_0").mlp.fc1.enable_lora(2)
    with pytest.raises(ValueError, match="Merge the adapter first"):
        evaluation.in_precision(adapted, "bfloat16")


@pytest.mark.parametrize(("side", "patch", "expected"), [(32, 8, 128), (224, 16, 128), (384, 8, 8)])
def test_batches_are_smaller_where_there_are_many_tokens(
    side: int, patch: int, expected: int
) -> None:
    """Usual models run 128 images at once; more tokens, fewer images."""
    config = dataclasses.replace(TINY, input_shape=(side, side, 3), patch_size=patch, num_layers=1)
    assert evaluation.sensible_batch_size(keras_vit.VisionTransformer(config)) == expected


def test_other_models_run_as_many_as_ever() -> None:
    """A model without a grid of patches has the largest batch."""
    assert evaluation.sensible_batch_size(keras.Sequential()) == 128
