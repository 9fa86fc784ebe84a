"""Tests of keras_vit.explain on models that depart from the published ones."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import explain_oracle
import numpy as np
import pytest
import variants_oracle
from conftest import FLOAT32, TINY
from test_explain_attention import SHARP, images_for, sharp

from keras_vit import explain
from keras_vit.config import ViTConfig
from keras_vit.explain import maps, page

VARIANTS = {
    "relative": {**variants_oracle.ALL, "position_embedding": "relative"},
    "every block": {
        **variants_oracle.ALL, "position_embedding": "learned_2d",
        "position_placement": "every_block",
    },
    "average after registers": {
        "num_registers": 3, "pooling": "avg", "position_embedding": "sincos_2d",
        "position_placement": "every_block_shared",
    },
    "modern": variants_oracle.MODERN,
    "rotary after registers": {"num_registers": 2, **variants_oracle.COUNTED},
}  # fmt: skip
CONFIGS = {
    name: dataclasses.replace(TINY, num_layers=2, **fields) for name, fields in VARIANTS.items()
}


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_is_that_of_numpy(name: str) -> None:
    """Weights with bias and normalised queries, rollout and distance equal a NumPy walk."""
    config = CONFIGS[name]
    model, images = sharp(config), images_for(config)
    expected = variants_oracle.run(variants_oracle.arrays(model), images, config)
    weights = explain.attention_weights(model, images)
    np.testing.assert_allclose(weights, np.stack(expected.weights, axis=1), atol=SHARP)
    np.testing.assert_allclose(
        explain.attention_rollout(model, images),
        explain_oracle.rollout(expected, config),
        atol=SHARP,
    )
    np.testing.assert_allclose(
        explain.mean_attention_distance(model, images),
        explain_oracle.distance(expected, config),
        rtol=1e-5,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_positions_are_those_of_numpy(name: str) -> None:
    """A patch is found behind whatever stands before it, and so is its position."""
    config = CONFIGS[name]
    model, images = sharp(config), images_for(config)
    arrays = variants_oracle.arrays(model)
    tokens = variants_oracle.run(arrays, images, config).tokens[-1]
    patches = unit(tokens[:, variants_oracle.prefix_of(config) :])
    expected = np.einsum("bnd,bd->bn", patches, patches[:, 2 * 6 + 4]).reshape(2, 4, 6)
    actual = explain.token_similarity(model, images, token=(2, 4))
    np.testing.assert_allclose(actual, expected, atol=SHARP)
    if not config.adds_positions:
        kind = config.position_embedding
        with pytest.raises(ValueError, match=f"adds no position .*position_embedding={kind!r}"):
            explain.position_similarity(model)
        return
    places = {"input": "patch_encoder", "every_block": "positions_0"}
    layer = places.get(config.position_placement, "positions")
    table = variants_oracle.table(arrays, layer, config)[variants_oracle.prefix_of(config) :]
    similarity = explain.position_similarity(model).reshape(24, 24)
    np.testing.assert_allclose(similarity, unit(table) @ unit(table).T, atol=FLOAT32)


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_relevance_is_that_of_finite_differences(name: str) -> None:
    """The score is the mean of both classifiers, whose tokens answer in halves."""
    small: dict[str, Any] = {
        "input_shape": (16, 24, 3),
        "hidden_dim": 16,
        "mlp_dim": 24,
        "num_heads": 2,
    }
    config = dataclasses.replace(CONFIGS[name], **small)
    model, images, classes = sharp(config), images_for(config), [3, 6]
    arrays = variants_oracle.arrays(model)
    forward = functools.partial(forward_of, arrays, config)
    expected = np.stack(
        [
            explain_oracle.relevance(forward, image, config, target)
            for image, target in zip(images, classes, strict=True)
        ]
    )
    actual = explain.class_relevance(model, images, classes)
    assert expected.std() > 1e-4
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-6)


@pytest.mark.full
def test_the_page_leaves_out_what_there_is_not(tmp_path: Path) -> None:
    """A model with relative or rotary positions has no picture of position embeddings."""
    pytest.importorskip("matplotlib")
    names = {}
    for name in ("relative", "every block", "modern"):
        model = sharp(CONFIGS[name])
        images = ((images_for(CONFIGS[name])[0] + 1) * 127.5).astype(np.uint8)
        subject = maps.Subject(model, images, images_for(CONFIGS[name])[:1], ())
        names[name] = [made.name for made in page._charts(subject)]
    assert set(names["every block"]) - set(names["relative"]) == {"positions"}
    assert "positions" not in names["modern"]


def forward_of(
    arrays: variants_oracle.Arrays,
    config: ViTConfig,
    images: np.ndarray,
    deltas: list[np.ndarray] | None,
) -> explain_oracle.Pass:
    return variants_oracle.run(arrays, images, config, deltas)


def unit(vectors: np.ndarray) -> np.ndarray:
    directions: np.ndarray = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return directions
