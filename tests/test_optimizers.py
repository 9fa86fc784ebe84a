"""Tests of keras_vit.optimizers and of keras_vit.losses."""

import dataclasses
import functools
from typing import Any, get_args

import keras
import ml_dtypes
import numpy as np
import published
import pytest
from conftest import FLOAT32, TINY
from scipy.special import expit, softmax

from keras_vit import VisionTransformer
from keras_vit.config import PositionPlacement
from keras_vit.losses import LossName, make_loss
from keras_vit.optimizers import LAMB, AdamW, Decay, MomentumSGD, WarmupDecay, decayed_rates

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


@pytest.mark.parametrize("optimizer_class", [MomentumSGD, functools.partial(AdamW, epsilon=1e-9)])
def test_each_layer_has_its_rate(optimizer_class: Any) -> None:
    """A factor scales the step and the decay of its variable, and of no other."""

    def step(factor: float) -> np.ndarray:
        weight = variable(2.0)
        optimizer = optimizer_class(0.1, layer_rates={weight.path: factor}, weight_decay=0.5)
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


@pytest.mark.parametrize(
    "saved",
    [
        MomentumSGD(0.1, layer_rates={"a/kernel": 0.5}, weight_decay=0.1),
        AdamW(0.1, layer_rates={"a/kernel": 0.5}, weight_decay=0.1),
        LAMB(0.01, weight_decay=0.05, epsilon=1e-6),
        WarmupDecay(0.3, steps=40, warmup_steps=4, decay="linear"),
    ],
    ids=lambda saved: type(saved).__name__,
)
def test_it_is_serialized(saved: Any) -> None:
    """A saved optimizer comes back with its factors and its schedule."""
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(saved))

    assert type(again) is type(saved)
    assert again.get_config() == saved.get_config()


def test_rates_fall_from_the_head_to_the_patches() -> None:
    """One factor for each block, as BEiT counts them; every variable has one.

    The norm of the embedding counts with the patches, that after pooling with the head.
    """
    model = VisionTransformer(dataclasses.replace(TINY, num_layers=3))
    rates = decayed_rates(model, model.config, 0.5)

    assert set(rates) == {variable.path for variable in model.trainable_variables}
    assert rates["head/kernel"] == rates["encoder_norm/gamma"] == 1
    assert [rates[f"block_{index}/mlp/fc1/kernel"] for index in range(3)] == [0.125, 0.25, 0.5]
    assert rates["patch_encoder/position_embedding"] == 0.0625
    config = dataclasses.replace(TINY, embedding_norm=True, norm_after_pooling=True)
    normed = decayed_rates(VisionTransformer(config), config, 0.5)
    assert normed["embedding_norm/gamma"] == normed["patch_encoder/class_token"] == 0.0625
    assert normed["pooling_norm/gamma"] == 1
    placements: list[tuple[PositionPlacement, str, float]] = [
        ("every_block", "positions_1", 0.25), ("every_block_shared", "positions", 0.0625)
    ]  # fmt: skip
    for placement, name, expected in placements:
        model = VisionTransformer(dataclasses.replace(model.config, position_placement=placement))
        rates = decayed_rates(model, model.config, 0.5)
        assert rates[f"{name}/position_embedding"] == expected


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


RATE, DECAY, EPSILON = 0.01, 0.05, 1e-6


def reference(
    values: np.ndarray, gradients: list[np.ndarray], *, decay: float, betas: tuple[float, float]
) -> np.ndarray:
    """What NVIDIA's multi_tensor_lamb.cu computes, in double precision."""
    value = values.astype(np.float64)
    first = second = np.zeros_like(value)
    for count, gradient in enumerate(gradients, 1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        unbiased = second / (1 - betas[1] ** count)
        step = first / (1 - betas[0] ** count) / (np.sqrt(unbiased) + EPSILON) + decay * value
        size, length = np.linalg.norm(value), np.linalg.norm(step)
        is_scaled = decay and size and length
        value = value - RATE * (size / length if is_scaled else 1.0) * step
    return value


@pytest.mark.parametrize("start", [1.0, 0.0])
def test_steps_are_those_of_the_source(start: float) -> None:
    """Of a kernel, from random values and from zeros, and of a bias, which takes Adam's step."""
    drawn = np.random.default_rng(0)
    values = [drawn.normal(size=(5, 3)) * start, drawn.normal(size=3)]
    gradients = [[drawn.normal(size=value.shape) for value in values] for _ in range(6)]
    kernel, bias = (keras.Variable(value) for value in values)
    optimizer = LAMB(RATE, weight_decay=DECAY, epsilon=EPSILON, beta_1=0.8, beta_2=0.99)
    optimizer.exclude_from_weight_decay(var_list=[bias])
    for pair in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(g, "float32") for g in pair], [kernel, bias])

    for variable, place, decay in ((kernel, 0, DECAY), (bias, 1, 0.0)):
        own = [pair[place] for pair in gradients]
        expected = reference(values[place], own, decay=decay, betas=(0.8, 0.99))
        assert np.abs(variable.numpy() - expected).max() < FLOAT32
    other = reference(values[1], [pair[1] for pair in gradients], decay=DECAY, betas=(0.8, 0.99))
    assert np.abs(bias.numpy() - other).max() > 1e-3  # the comparison can fail


def test_each_loss_takes_logits_and_probabilities() -> None:
    """The closed forms on soft targets: sigmoid's is the sum over classes, the mean over images."""
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((4, 5)).astype(np.float32)
    targets = softmax(generator.standard_normal((4, 5)).astype(np.float32), axis=1)
    chances = {"softmax": softmax(logits, axis=1), "sigmoid": expit(logits)}
    others = {"softmax": 0, "sigmoid": (1 - targets) * np.log(1 - chances["sigmoid"])}
    for name in get_args(LossName):
        expected = -(targets * np.log(chances[name]) + others[name]).sum(axis=1).mean()
        loss = make_loss(name, from_logits=False)
        again = type(loss).from_config(loss.get_config())
        for each, outputs in ((make_loss(name), logits), (again, chances[name])):
            assert float(each(targets, outputs)) == pytest.approx(expected, rel=1e-5)
