"""Tests of keras_vit.weights on models that depart from the published ones."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import variants_oracle
from conftest import FLOAT32, TINY
from test_model_variants import AVERAGE, CONFIGS, expected_logits, images_for, model_of

import keras_vit
from keras_vit.model import VisionTransformer
from keras_vit.weights.positions import Method

# One of the fields that a sentence about the variant has to name.
CHANGED = {
    "relative": "position_embedding",
    "all": "num_registers",
    "every block, shared": "position_placement",
}


# What no array shows, as it shows no GELU: a .weights.h5 file of these is that of another network.
UNSHOWN = (
    *("norm after pooling", "norm after pooling, average", "norm after attention pooling"),
    *("quick GELU", "rotary, square, average"),
)


def quick(*names: str, without: Collection[str] = ()) -> list[Any]:
    """Every variant; all but the named ones among the slow tests."""
    slow, variants = pytest.mark.full, [name for name in CONFIGS if name not in without]
    return [name if name in names else pytest.param(name, marks=slow) for name in variants]


@pytest.mark.parametrize("method", ["original", "bilinear"])
@pytest.mark.parametrize("name", quick("learned in 2-D", "relative", "all, every block"))
def test_resized_variant_is_the_same_network_on_another_grid(name: str, method: Method) -> None:
    """Tables of every kind are resampled, sines computed anew; every other weight is copied."""
    model = model_of(name)
    bigger = keras_vit.resize(model, (48, 40, 3), positions=method)
    assert bigger.config == dataclasses.replace(model.config, input_shape=(48, 40, 3))
    np.testing.assert_allclose(
        bigger(images_for(bigger.config)), expected_logits(bigger), rtol=0, atol=FLOAT32
    )
    (rows, columns), old = model.config.grid, variants_oracle.arrays(model)
    cells = {
        "position_embedding": (rows, columns),
        "position_x": (1, columns),
        "position_y": (rows, 1),
        "relative_bias": (2 * rows - 1, 2 * columns - 1),
    }
    for path, value in variants_oracle.arrays(bigger).items():
        kind = path.rsplit("/", 1)[-1]
        if kind not in cells:
            np.testing.assert_array_equal(value, old[path])
            continue
        first = old[path].shape[1] - cells[kind][0] * cells[kind][1]
        np.testing.assert_array_equal(value[:, :first], old[path][:, :first])
        smaller = old[path][0, first:].reshape(*cells[kind], -1)
        sides = {"position_x": (1, 5), "position_y": (6, 1), "relative_bias": (11, 9)}
        grid = value[0, first:].reshape(*sides.get(kind, (6, 5)), -1)
        if method == "original":  # corners stay corners, and the middle of offsets the middle
            for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
                np.testing.assert_allclose(grid[corner], smaller[corner], atol=FLOAT32)
        if kind == "relative_bias":
            middle = smaller[rows - 1, columns - 1]
            np.testing.assert_allclose(grid[5, 4], middle, atol=FLOAT32)


@pytest.mark.parametrize("name", CHANGED)
def test_layouts_that_have_no_room_refuse_a_variant(name: str, tmp_path: Path) -> None:
    """Reading and writing both name the fields and say what to do instead."""
    model = model_of(name)
    message = f"the published network alone; save another with model.save.*{CHANGED[name]}="
    with pytest.raises(ValueError, match=message):
        keras_vit.weights.save_npz(model, tmp_path / "model.npz")
    plain = VisionTransformer(dataclasses.replace(TINY, num_layers=2))
    plain.save_weights(tmp_path / "plain.weights.h5")
    with pytest.raises(ValueError, match=message):
        keras_vit.weights.load(model, tmp_path / "plain.weights.h5")
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=message):
        keras_vit.weights.load(plain, tmp_path / "model.keras")


@pytest.mark.parametrize("name", quick("none", "sines", "SwiGLU", without=UNSHOWN))
def test_weights_of_a_variant_are_not_taken_for_a_published_network(
    name: str, tmp_path: Path
) -> None:
    """The file alone does not say its config: other arrays must not fill a plain model."""
    model = model_of(name)
    file = tmp_path / "variant.weights.h5"
    model.save_weights(file)
    for fields in ({}, {"pooling": "avg"}, AVERAGE):
        plain = VisionTransformer(
            dataclasses.replace(TINY, num_layers=2, hidden_dim=model.config.hidden_dim, **fields)
        )
        with pytest.raises(ValueError, match=r"does not fit|does not say|holds no Vision"):
            keras_vit.weights.load(plain, file)
