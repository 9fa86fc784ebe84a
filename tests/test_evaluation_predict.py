"""Tests of keras_vit.evaluation.outputs."""

import numpy as np
import pytest

import keras_vit
from keras_vit.data import resize_image
from keras_vit.evaluation import predict

LABELS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def model() -> keras_vit.VisionTransformer:
    """A model with random weights."""
    config = keras_vit.ViTConfig(
        input_shape=(8, 12, 3),
        patch_size=4,
        hidden_dim=8,
        mlp_dim=8,
        num_heads=2,
        num_layers=1,
        classes=3,
        include_preprocessing=True,
    )
    model = keras_vit.VisionTransformer(config)
    generator = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(size=variable.shape))
    return model


def pictures() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    sizes = [(8, 12), (30, 20), (5, 5)]
    return [generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def test_probabilities_are_the_softmax_of_the_logits(model: keras_vit.VisionTransformer) -> None:
    """Images of any size are resized as in evaluation, and sorted by probability."""
    for image, actual in zip(pictures(), predict(model, pictures(), labels=LABELS), strict=True):
        logits = np.asarray(model(resize_image(image, size=(8, 12))[None]), np.float64)[0]
        expected = np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-expected)
        assert [prediction.label for prediction in actual] == [LABELS[place] for place in order]
        assert [p.probability for p in actual] == pytest.approx(expected[order])


def test_top_limits_the_classes(model: keras_vit.VisionTransformer) -> None:
    """One class on demand, all of them if more are asked for."""
    assert [len(p) for p in predict(model, pictures(), labels=LABELS, top=1)] == [1, 1, 1]
    assert [len(p) for p in predict(model, pictures(), labels=LABELS, top=9)] == [3, 3, 3]
    assert predict(model, [], labels=LABELS) == []


def test_what_does_not_fit_is_an_error(model: keras_vit.VisionTransformer) -> None:
    """Too few labels and an image without channels are told."""
    with pytest.raises(ValueError, match=r"3 classes. Received: 2 labels"):
        predict(model, pictures(), labels=LABELS[:2])
    with pytest.raises(ValueError, match=r"Received: an array of shape \(8, 12\)"):
        predict(model, [np.zeros((8, 12))], labels=LABELS)
