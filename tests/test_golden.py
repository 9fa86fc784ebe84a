"""The original's own logits, reproduced from weights in the published layout."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
from conftest import TINY, answers

import keras_vit
from keras_vit.layers.random import skip_initialization

# Float noise stays below 2e-5; the exact GELU moves these logits by 5e-4 to 9e-4.
TOLERANCE = 5e-5
LARGE = 30e6  # parameters; larger models are slow tests

GAP = {"pooling": "avg", "class_token": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT-Ti_16": ("Ti/16", {}),
    "ViT-S_16": ("S/16", {}),
    "ViT-S_32": ("S/32", {}),
    "ViT-B_32": ("B/32", {}),
    "ViT-B_16": ("B/16", {}),
    "ViT-B_32-gap-norep": ("B/32", GAP),
    "R+ViT-Ti_16": ("R+Ti/16", {}),
    "R26+ViT-S_32": ("R26+S/32", {}),
    "R50+ViT-B_16": ("R50+B/16", {}),
    "ViT-B_32 with pre_logits 768": ("B/32", {"representation_dim": 768}),
    "ViT-Ti_16 at 160x256": ("Ti/16", {"input_shape": (160, 256, 3)}),
    "ViT-Ti_16 token features": ("Ti/16", {"classes": None}),
}
LOGITS = np.load(published.GOLDEN / "logits.npz")

# Small models of big_vision's own code (google-research/big_vision, commit 0127fb6b, models/vit.py)
# on weights and images by the same rule, under the names that it gives them.
BIG_VISION_LOGITS = np.load(published.GOLDEN / "big_vision.npz")
BIG_VISION = dataclasses.replace(
    TINY, hidden_dim=48, mlp_dim=80, num_heads=4, num_layers=2, classes=10
)
BIG_VISION_MODELS: dict[str, dict[str, Any]] = {
    "map": {"pooling": "map", "class_token": False},
    "gap": GAP,
    "tok, representation": {"representation_dim": 40},
}


def config_of(name: str, **fields: Any) -> keras_vit.ViTConfig:
    variant, changes = MODELS[name]
    return dataclasses.replace(keras_vit.variant(variant), **changes, **fields)


def empty(config: keras_vit.ViTConfig) -> keras_vit.VisionTransformer:
    """A model whose weights are not drawn, as all of them are loaded."""
    with skip_initialization():
        return keras_vit.VisionTransformer(config)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full)
        if keras_vit.parameter_count(config_of(name)) > LARGE
        else name
        for name in MODELS
    ],
)
def test_logits_are_the_originals(name: str, tmp_path: Path) -> None:
    """Full-size models give the original's logits in float32; no array of it is left out."""
    config = config_of(name)
    model = empty(config)
    keras_vit.weights.load_weights(model, published.write(tmp_path / "weights.npz", config))
    actual = answers(model, published.images(config))
    np.testing.assert_allclose(actual, LOGITS[name], rtol=0, atol=TOLERANCE)
    assert set(LOGITS.files) == set(MODELS)


def test_the_tolerance_tells_the_exact_gelu_apart(tmp_path: Path) -> None:
    """The comparison fails on the smallest mistake it is there to find."""
    right, wrong = (
        empty(config_of("ViT-Ti_16", activation=activation)) for activation in ("gelu_tanh", "gelu")
    )
    keras_vit.weights.load_weights(right, published.write(tmp_path / "weights.npz", right.config))
    wrong.set_weights(right.get_weights())  # keras_vit.weights.load_weights refuses this
    mistaken = answers(wrong, published.images(right.config))
    assert np.abs(mistaken - LOGITS["ViT-Ti_16"]).max() > 5 * TOLERANCE


@pytest.mark.parametrize("name", BIG_VISION_MODELS)
def test_logits_are_big_visions(name: str, tmp_path: Path) -> None:
    """Attention pooling, average pooling and a folded class position give big_vision's logits."""
    config = dataclasses.replace(BIG_VISION, **BIG_VISION_MODELS[name])
    shapes = {n: a.shape for n, a in published.arrays(config).items()}
    positions = shapes.pop("Transformer/posembed_input/pos_embedding")
    shapes["pos_embedding"] = (1, config.grid[0] * config.grid[1], positions[2])  # of patches only
    arrays: dict[str, Any] = {
        n: published.array(n, shape) for n, shape in published.linen(shapes).items()
    }
    np.savez(tmp_path / "weights.npz", **arrays)
    model = empty(config)
    keras_vit.weights.load_weights(model, tmp_path / "weights.npz")
    actual = answers(model, published.images(config))
    np.testing.assert_allclose(actual, BIG_VISION_LOGITS[name], rtol=0, atol=TOLERANCE)
    assert set(BIG_VISION_LOGITS.files) == set(BIG_VISION_MODELS)
