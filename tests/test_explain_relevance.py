"""Tests of keras_vit.explain.attention."""

import dataclasses
from pathlib import Path
from typing import Any

import explain_oracle
import keras
import numpy as np
import pytest
from conftest import TINY
from test_explain_attention import images_for, sharp

from keras_vit import explain
from keras_vit.config import ViTConfig
from keras_vit.model import VisionTransformer

# So small that every single attention weight can be nudged up and down.
SMALL = dataclasses.replace(
    TINY, input_shape=(16, 24, 3), hidden_dim=12, mlp_dim=24, num_heads=2, num_layers=2
)
CONFIGS = {
    "token": SMALL,
    "token, square": dataclasses.replace(SMALL, input_shape=(16, 16, 3)),
    "avg": dataclasses.replace(SMALL, pooling="avg", class_token=False),
    "map": dataclasses.replace(SMALL, pooling="map", class_token=False),
    "hybrid": dataclasses.replace(SMALL, input_shape=(32, 48, 3), patch_size=4, resnet_layers=()),
}


def expected_relevance(
    model: VisionTransformer, images: np.ndarray, classes: list[int], folder: Path
) -> np.ndarray:
    arrays = explain_oracle.arrays(model, folder)
    if model.config.resnet_layers is not None:
        images = explain_oracle.tokens_before(model, images)

    def forward(images: np.ndarray, deltas: list[np.ndarray] | None) -> explain_oracle.Pass:
        return explain_oracle.run(arrays, images, str(model.config.pooling), deltas)

    return np.stack(
        [
            explain_oracle.relevance(forward, image, model.config, target)
            for image, target in zip(images, classes, strict=True)
        ]
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_relevance_is_that_of_finite_differences(name: str, tmp_path: Path) -> None:
    """With every gradient found by nudging a weight in NumPy, the relevance is the same."""
    config = CONFIGS[name]
    model, images, classes = sharp(config), images_for(config), [3, 6]
    expected = expected_relevance(model, images, classes, tmp_path)
    actual = explain.class_relevance(model, images, classes)
    assert expected.std() > 1e-3
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-5)


def test_the_comparison_tells_classes_apart(tmp_path: Path) -> None:
    """Another class has another relevance, by far more than the tolerance."""
    model, images = sharp(SMALL), images_for(SMALL)
    one, other = (explain.class_relevance(model, images, target) for target in (3, 6))
    assert np.abs(one - other).max() > 20 * 2e-5


def test_without_a_class_the_likeliest_counts() -> None:
    """None asks for each image's own likeliest class."""
    model, images = sharp(SMALL), images_for(SMALL, 10)
    likeliest = keras.ops.convert_to_numpy(model(images)).argmax(axis=-1)
    assert len(set(likeliest.tolist())) > 1
    np.testing.assert_allclose(
        explain.class_relevance(model, images),
        explain.class_relevance(model, images, likeliest.tolist()),
        atol=1e-7,
    )


def test_softmax_does_not_change_the_relevance() -> None:
    """The gradient is that of the logit, also where the model ends in softmax."""
    logits, images = sharp(SMALL), images_for(SMALL)
    softmax = VisionTransformer(dataclasses.replace(SMALL, classifier_activation="softmax"))
    softmax.set_weights(logits.get_weights())
    np.testing.assert_allclose(
        explain.class_relevance(softmax, images, 2),
        explain.class_relevance(logits, images, 2),
        atol=1e-7,
    )


def test_a_users_classifier_is_asked_for_its_own_classes() -> None:
    """Through the user's head the relevance is that of a model with that head built in."""
    config = dataclasses.replace(SMALL, classes=None)
    features, images = sharp(config), images_for(SMALL)
    whole = VisionTransformer(dataclasses.replace(SMALL, classes=4))
    kernel = np.random.default_rng(3).standard_normal((12, 4)).astype(np.float32)
    whole.set_weights([*features.get_weights(), kernel, np.zeros(4)])
    inputs = keras.Input(SMALL.input_shape)
    head = keras.layers.Dense(4, kernel_initializer=keras.initializers.Constant(kernel))
    mine = keras.Model(inputs, head(features(keras.layers.Rescaling(2.0)(inputs))))
    np.testing.assert_allclose(
        explain.class_relevance(mine, images / 2, [1, 3]),
        explain.class_relevance(whole, images, [1, 3]),
        rtol=1e-4,
        atol=1e-6,
    )


def test_mixed_precision_is_near() -> None:
    """bfloat16 gives nearly the float32 relevance."""
    plain, images = sharp(SMALL), images_for(SMALL)
    mixed = VisionTransformer(SMALL, dtype="mixed_bfloat16")
    mixed.set_weights(plain.get_weights())
    expected = explain.class_relevance(plain, images, 1)
    actual = explain.class_relevance(mixed, images, 1)
    assert actual.dtype.kind == "f"
    np.testing.assert_allclose(actual, expected, atol=0.1 * float(expected.max()))


@pytest.mark.parametrize(
    ("config", "classes", "message"),
    [
        (SMALL, 7, "no class 7; the model has 7, numbered from 0"),
        (SMALL, [1, -1], "no class -1"),
        (SMALL, [1, 2, 3], "one for each of the 2 images"),
        (dataclasses.replace(SMALL, classes=None, pooling=None), 0, r"shape \(None, 7, 12\)"),
    ],
)
def test_a_class_that_does_not_exist_is_refused(
    config: ViTConfig, classes: Any, message: str
) -> None:
    """The error says which classes there are."""
    with pytest.raises(ValueError, match=message):
        explain.class_relevance(sharp(config), images_for(SMALL), classes)
