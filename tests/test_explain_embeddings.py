"""Tests of what a model has learned about places and patches, in keras_vit.explain.pictures."""

import dataclasses
from pathlib import Path
from typing import Any

import explain_oracle
import keras
import numpy as np
import pytest
from conftest import FLOAT32, TINY
from test_explain_attention import CONFIGS, expected_pass, images_for, sharp

from keras_vit import explain
from keras_vit.model import VisionTransformer

POSITIONS = "Transformer/posembed_input/pos_embedding"


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


@pytest.mark.parametrize("name", CONFIGS)
def test_position_similarity_is_the_cosine_of_every_pair(name: str, tmp_path: Path) -> None:
    """Each entry is the cosine of two rows of the published table, class position left out."""
    config, model = CONFIGS[name], sharp(CONFIGS[name])
    table = explain_oracle.arrays(model, tmp_path)[POSITIONS][0, int(config.class_token) :]
    actual = explain.position_similarity(model)
    rows, columns = config.grid
    assert actual.shape == (rows, columns, rows, columns)
    for y, x, v, u in np.ndindex(actual.shape):
        expected = cosine(table[y * columns + x], table[v * columns + u])
        np.testing.assert_allclose(actual[y, x, v, u], expected, atol=FLOAT32)


def test_filters_are_the_eigenvectors_of_the_filters_covariance(tmp_path: Path) -> None:
    """Components and variance are those of `numpy.linalg.eigh`, up to the sign."""
    model = sharp(TINY)
    kernel = explain_oracle.arrays(model, tmp_path)["embedding/kernel"].reshape(-1, 24)
    values, vectors = np.linalg.eigh(np.cov(kernel))
    actual = explain.embedding_filters(model, count=5)
    np.testing.assert_allclose(actual.variance, values[::-1][:5] / values.sum(), rtol=1e-4)
    for component, expected in zip(actual.components, vectors.T[::-1], strict=False):
        assert component.shape == (8, 8, 3)
        np.testing.assert_allclose(abs(cosine(component.ravel(), expected)), 1, atol=1e-4)
        assert component.flat[np.abs(component).argmax()] > 0


def test_filters_show_a_pattern_that_was_put_in() -> None:
    """Filters that are multiples of one picture have that picture as first component."""
    model = VisionTransformer(TINY)
    picture = np.random.default_rng(0).standard_normal((8, 8, 3))
    kernel = model.get_layer("patch_encoder").projection.kernel
    kernel.assign(picture.reshape(-1, 1) * np.arange(24))
    actual = explain.embedding_filters(model)
    np.testing.assert_allclose(actual.variance[0], 1, atol=1e-5)
    np.testing.assert_allclose(abs(cosine(actual.components[0].ravel(), picture.ravel())), 1, 1e-5)
    assert len(actual.components) == 24  # no more than there are filters


@pytest.mark.parametrize("name", CONFIGS)
def test_token_similarity_is_the_cosine_of_the_tokens(name: str, tmp_path: Path) -> None:
    """After a block, each patch's cosine with the chosen patch is that of NumPy's tokens."""
    config, model, images = CONFIGS[name], sharp(CONFIGS[name]), images_for(CONFIGS[name])
    tokens = expected_pass(model, images, tmp_path).tokens[1]
    first, columns = int(config.class_token), config.grid[1]
    actual = explain.token_similarity(model, images, token=(1, 2), layer=1)
    chosen = tokens[:, first + columns + 2]
    for image, y, x in np.ndindex(actual.shape):
        expected = cosine(tokens[image, first + y * columns + x], chosen[image])
        np.testing.assert_allclose(actual[image, y, x], expected, atol=FLOAT32)


def test_token_similarity_of_the_class_token() -> None:
    """By default the chosen token is the class token after the last block, nested or not."""
    model, images = sharp(TINY), images_for(TINY)
    tokens = keras.ops.convert_to_numpy(model.features(images, ["block_2"])["block_2"])
    actual = explain.token_similarity(model, images)
    np.testing.assert_allclose(actual[1, 3, 5], cosine(tokens[1, 24], tokens[1, 0]), atol=1e-5)
    inputs = keras.Input((32, 48, 3))
    outer = keras.Model(inputs, model(keras.layers.Rescaling(0.5)(inputs)))
    np.testing.assert_allclose(explain.token_similarity(outer, 2 * images), actual, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({}, {"token": (4, 0)}, r"no patch \(4, 0\); the grid has 4 rows and 6 columns"),
        ({}, {"token": (0, -1)}, r"no patch \(0, -1\)"),
        ({}, {"token": "head"}, "no patch 'head'"),
        ({}, {"layer": 3}, "no layer 3"),
        ({"pooling": "avg", "class_token": False}, {}, "no class token.*4 rows and 6 columns"),
    ],
)
def test_a_token_that_does_not_exist_is_refused(
    fields: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    """The error says which there are."""
    with pytest.raises(ValueError, match=message):
        explain.token_similarity(
            sharp(dataclasses.replace(TINY, **fields)), images_for(TINY), **arguments
        )


def test_no_filters_are_refused() -> None:
    """A count below one is an error."""
    with pytest.raises(ValueError, match="count=0"):
        explain.embedding_filters(sharp(TINY), count=0)
