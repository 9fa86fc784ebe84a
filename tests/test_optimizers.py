"""Tests of keras_vit.optimizers."""

import dataclasses
from typing import Any

import keras
import ml_dtypes
import numpy as np
import published
import pytest
from conftest import TINY

from keras_vit import VisionTransformer
from keras_vit.config import PositionPlacement
from keras_vit.optimizers import Decay
from keras_vit.training import AdamW, MomentumSGD, WarmupDecay, decayed_rates

OPTIMIZERS = [MomentumSGD, AdamW]
GOLDEN = np.load(published.GOLDEN / "finetune.npz")


def variable(value: float) -> keras.Variable:
    return keras.Variable(np.full(3, value, np.float32), name="kernel")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_momentum_is_optaxs(dtype: str) -> None:
    """m = g + 0.9 m with the product and m rounded to the accumulator's dtype, w = w - rate m."""
    rates = [0.5, 0.1, 1.0, 0.0, 0.3]
    gradients = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    rounded = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    weight, optimizer = variable(1.0), MomentumSGD(0.0, accumulator_dtype=dtype)
    expected, momentum = np.ones(3, np.float32), np.zeros(3, rounded)
    for rate, gradient in zip(rates, gradients, strict=True):
        optimizer.learning_rate = rate
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [weight])
        kept = (momentum * rounded(0.9)).astype(np.float32)
        moved = gradient + kept
        momentum = moved.astype(rounded)
        expected = expected - np.float32(rate) * moved

    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)
    np.testing.assert_array_equal(optimizer.variables[-1].numpy(), momentum)


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_each_layer_has_its_rate(optimizer_class: Any) -> None:
    """A factor scales the step and the decay of its variable, and of no other."""

    def step(factor: float) -> np.ndarray:
        weight = variable(2.0)
        optimizer = (
            optimizer_class(0.1, layer_rates={weight.path: factor}, weight_decay=0.5, epsilon=1e-9)
            if optimizer_class is AdamW
            else optimizer_class(0.1, layer_rates={weight.path: factor}, weight_decay=0.5)
        )
        optimizer.apply([keras.ops.ones(3)], [weight])
        return np.asarray(weight.numpy() - 2.0)

    # A step of 0.1 along the gradient, and a decay of 0.1 * 0.5 * 2.
    np.testing.assert_allclose(step(1.0), -0.2, rtol=1e-5)
    np.testing.assert_allclose(step(0.25), -0.05, rtol=1e-5)


def test_without_factors_it_is_keras_adamw() -> None:
    """Ten steps with decay, clipping and averaging: 1 - beta is rounded elsewhere, no more."""
    arguments: dict[str, Any] = {
        "learning_rate": 0.1,
        "weight_decay": 0.3,
        "global_clipnorm": 1.0,
        "use_ema": True,
    }
    ours, theirs = variable(1.0), variable(1.0)
    pairs = [(AdamW(**arguments), ours), (keras.optimizers.AdamW(**arguments), theirs)]
    gradients = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)
    for optimizer, weight in pairs:
        for gradient in gradients:
            optimizer.apply([keras.ops.convert_to_tensor(gradient)], [weight])

    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5)


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_it_is_serialized(optimizer_class: Any) -> None:
    """A saved optimizer comes back with its factors."""
    optimizer = optimizer_class(0.1, layer_rates={"a/kernel": 0.5}, weight_decay=0.1)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))

    assert isinstance(again, optimizer_class)
    assert again.get_config() == optimizer.get_config()


def test_rates_fall_from_the_head_to_the_patches() -> None:
    """One factor for each block, as BEiT counts them; every variable has one."""
    model = VisionTransformer(dataclasses.replace(TINY, num_layers=3))
    rates = decayed_rates(model, model.config, 0.5)

    assert set(rates) == {variable.path for variable in model.trainable_variables}
    assert rates["head/kernel"] == rates["encoder_norm/gamma"] == 1
    assert [rates[f"block_{index}/mlp/fc1/kernel"] for index in range(3)] == [0.125, 0.25, 0.5]
    assert rates["patch_encoder/position_embedding"] == 0.0625
    placements: list[tuple[PositionPlacement, str, float]] = [
        ("every_block", "positions_1", 0.25), ("every_block_shared", "positions", 0.0625)
    ]  # fmt: skip
    for placement, name, expected in placements:
        model = VisionTransformer(dataclasses.replace(model.config, position_placement=placement))
        rates = decayed_rates(model, model.config, 0.5)
        assert rates[f"{name}/position_embedding"] == expected


def test_norms_fall_with_what_they_follow() -> None:
    """That of the embedding counts with the patches, that after pooling with the head."""
    config = dataclasses.replace(TINY, embedding_norm=True, norm_after_pooling=True)
    rates = decayed_rates(VisionTransformer(config), config, 0.5)

    assert rates["embedding_norm/gamma"] == rates["patch_encoder/class_token"] == 0.0625
    assert rates["pooling_norm/gamma"] == 1


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_learning_rates_are_the_originals(decay: Decay) -> None:
    """All forty of the original's run, to 1e-7."""
    schedule = WarmupDecay(0.3, steps=40, warmup_steps=4, decay=decay)
    rates = [float(schedule(step)) for step in range(40)]

    np.testing.assert_allclose(rates, GOLDEN[decay], rtol=0, atol=1e-7)


def test_a_constant_stays() -> None:
    """After the warm-up nothing changes any more."""
    schedule = WarmupDecay(0.5, steps=10, warmup_steps=2, decay="constant")

    assert [float(schedule(step)) for step in (0, 1, 2, 9, 20)] == [0, 0.25, 0.5, 0.5, 0.5]


def test_a_schedule_is_serialized() -> None:
    """A saved optimizer comes back with its schedule."""
    schedule = WarmupDecay(0.3, steps=40, warmup_steps=4, decay="linear")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))

    assert again.get_config() == schedule.get_config()
