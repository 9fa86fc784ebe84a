"""Tests of rotary position embeddings: their angles, and what a network does with them."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import variants_oracle
from conftest import FLOAT32, TINY, answers, made
from test_model_variants import CONFIGS, answer_of, images_for, model_of

import keras_vit
from keras_vit.config import ViTConfig
from keras_vit.layers.attention import recording, rotary_angles
from keras_vit.model import VisionTransformer

ROTARY = ("rotary", "rotary, square, average", "rotary, counted")


def test_angles_run_over_rows_then_columns_from_fast_to_slow() -> None:
    """Written out for a grid of 2x3: half of the pairs turn by the row, half by the column."""
    angles = rotary_angles(
        grid=(2, 3), size=8, period=100.0, reference_grid=(4, 3), offset=0.5
    ).reshape(2, 3, 4)
    np.testing.assert_allclose(angles[1, 2], [3.0, 0.3, 2.5, 0.25])
    np.testing.assert_allclose(angles[0, 0], [1.0, 0.1, 0.5, 0.05])
    angles = rotary_angles(grid=(2, 4), size=8, period=100.0).reshape(2, 4, 4)
    circle = 2 * np.pi
    np.testing.assert_allclose(angles[0, 0] / circle, [-0.5, -0.05, -0.75, -0.075])
    np.testing.assert_allclose(angles[1, 2] / circle, [0.5, 0.05, 0.25, 0.025])


def test_only_distances_count() -> None:
    """Where every token has a place, the place of the first one changes nothing."""
    fields: dict[str, Any] = {**variants_oracle.COUNTED, "position_embedding": None}
    config = dataclasses.replace(TINY, pooling="avg", class_token=False, **fields)
    model = made(config)
    moved = model.copy(config=dataclasses.replace(config, rotary_offset=7.5))
    other = model.copy(config=dataclasses.replace(config, rotary_grid=(9, 9)))
    answer, same, different = (answers(each, images_for(config)) for each in (model, moved, other))
    np.testing.assert_allclose(same, answer, atol=FLOAT32)
    assert np.abs(different - answer).max() > 1e-3


@pytest.mark.parametrize("name", [*ROTARY, "rotary, relative", "modern"])
def test_recorded_attention_is_the_attention_of_the_answer(name: str) -> None:
    """The path that records weights answers as the fused one, and its weights are the oracle's."""
    model = model_of(name)
    images = images_for(model.config)
    layers = [model.get_layer(f"block_{index}").attention for index in range(2)]
    with recording(*layers) as records:
        answer = model(images)
    np.testing.assert_allclose(answer, answer_of(name), atol=FLOAT32)
    expected = variants_oracle.run(variants_oracle.arrays(model), images, model.config)
    for layer, weights in zip(layers, expected.weights, strict=True):
        np.testing.assert_allclose(records[layer][0], weights, atol=FLOAT32)


@pytest.mark.parametrize("side", [(48, 64, 3), (16, 16, 3)])
@pytest.mark.parametrize("name", [*ROTARY, "modern"])
def test_another_image_size_has_its_own_angles(name: str, side: tuple[int, int, int]) -> None:
    """A resized model is the NumPy network of the new grid, with the same rotary fields."""
    model = keras_vit.resize(model_of(name), side)
    assert model.config.rotary_grid == CONFIGS[name].rotary_grid
    assert model.config.rotary_period == CONFIGS[name].rotary_period
    arrays, images = variants_oracle.arrays(model), images_for(model.config)
    expected = variants_oracle.run(arrays, images, model.config).logits
    np.testing.assert_allclose(answers(model, images), expected, atol=FLOAT32)


@pytest.mark.parametrize("reference", [None, (2, 3)])
def test_a_finer_grid_has_its_places_between(reference: tuple[int, int] | None) -> None:
    """With twice the rows and columns, the mean of four patches' angles is that of the patch."""
    options: dict[str, Any] = {"size": 8, "period": 100.0, "reference_grid": reference}
    offset = 0.0 if reference is None else 0.5  # the middle of a patch
    coarse = rotary_angles(grid=(2, 3), offset=offset, **options).reshape(2, 3, 4)
    fine = rotary_angles(grid=(4, 6), offset=offset, **options).reshape(2, 2, 3, 2, 4)
    np.testing.assert_allclose(fine.mean(axis=(1, 3)), coarse, atol=1e-12)


def attention_of(config: ViTConfig) -> tuple[Any, Any]:
    """The first block's attention with rotary positions, and without, from the same weights."""
    turned = made(config)
    fields: dict[str, Any] = {"rotary_period": None, "rotary_grid": None, "rotary_offset": 0.0}
    still = VisionTransformer(dataclasses.replace(config, **fields))
    still.set_weights(turned.get_weights())
    return turned.get_layer("block_0").attention, still.get_layer("block_0").attention


def test_dropout_of_attention_leaves_rotation_in() -> None:
    """Where weights are dropped, they are those of turned queries: the mean comes near."""
    config = dataclasses.replace(CONFIGS["rotary"], num_layers=1, attention_dropout_rate=0.05)
    keras.utils.set_random_seed(0)
    turned, still = attention_of(config)
    tokens = np.random.default_rng(0).standard_normal((1, config.num_tokens, 24)) * 3
    exact, unturned = (np.asarray(each(tokens.astype(np.float32))) for each in (turned, still))
    many = np.repeat(tokens, 400, axis=0).astype(np.float32)
    mean = np.asarray(turned(many, training=True)).mean(axis=0)
    assert np.abs(mean - exact[0]).max() < 0.2 * np.abs(unturned - exact).max()


@pytest.mark.parametrize("name", ["rotary", "rotary, counted"])
def test_tokens_before_the_patches_are_not_turned(name: str) -> None:
    """Among themselves they weigh each other as without rotation, and the patches otherwise."""
    config = dataclasses.replace(CONFIGS[name], num_layers=1, num_registers=2)
    tokens = np.random.default_rng(0).standard_normal((1, config.num_tokens, 24))
    weights = []
    for attention in attention_of(config):
        with recording(attention) as records:
            attention(tokens.astype(np.float32))
        weights.append(keras.ops.convert_to_numpy(records[attention][0])[:, :, :3].astype(float))
    turned, still = (each[..., :3] / each[..., :3].sum(-1, keepdims=True) for each in weights)
    np.testing.assert_allclose(turned, still, rtol=1e-5)
    assert np.abs(weights[0] - weights[1])[..., 3:].max() > 1e-3
