"""Tests of keras_vit.training.recipe."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import keras_vit
from keras_vit.training import LAMB, RECIPES, AdamW, Recipe
from keras_vit.training.recipe import OptimizerName, Plan, make_optimizer

CONFIG = keras_vit.ViTConfig(
    input_shape=(8, 8, 3),
    patch_size=4,
    hidden_dim=8,
    mlp_dim=8,
    num_heads=2,
    num_layers=1,
    classes=3,
)
RECIPE = dataclasses.replace(RECIPES["scratch"], learning_rate=0.01, warmup=0.2)


def plan(recipe: Recipe, steps: int) -> Plan:
    return dataclasses.replace(recipe, epochs=None, steps=steps).plan(images=1000)


def learning_rates(recipe: Recipe, steps: int) -> list[float]:
    model = keras_vit.VisionTransformer(CONFIG)
    optimizer = make_optimizer(recipe, model=model, plan=plan(recipe, steps))
    rates = []
    for step in range(steps + 1):
        optimizer.iterations.assign(step)
        rates.append(float(optimizer.learning_rate))
    return rates


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    """20 steps of warm-up of 100, the peak, zero at the end: the closed form, step for step."""
    expected = [0.01 * step / 20 for step in range(20)]
    expected += [0.005 * (1 + math.cos(math.pi * step / 80)) for step in range(81)]

    assert learning_rates(RECIPE, 100) == pytest.approx(expected, abs=1e-8)


def test_without_warm_up_it_starts_at_the_top() -> None:
    """A warm-up of zero is none."""
    rates = learning_rates(dataclasses.replace(RECIPE, warmup=0), 10)

    assert rates[0] == pytest.approx(0.01)
    assert rates[-1] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("name", "kind"), [("adamw", AdamW), ("lamb", LAMB)])
def test_the_numbers_of_adam_are_the_recipes(name: OptimizerName, kind: type[Any]) -> None:
    """Epsilon is that of optax and torch, not Keras' 1e-7, and averages and decay are as asked."""
    recipe = dataclasses.replace(RECIPE, optimizer=name, betas=(0.8, 0.95), average=0.99)
    optimizer: Any = make_optimizer(
        recipe, model=keras_vit.VisionTransformer(CONFIG), plan=plan(recipe, 10)
    )

    assert type(optimizer) is kind
    assert (optimizer.epsilon, optimizer.beta_1, optimizer.beta_2) == (1e-8, 0.8, 0.95)
    assert (optimizer.weight_decay, optimizer.global_clipnorm) == (0.05, 1.0)
    assert (optimizer.use_ema, optimizer.ema_momentum) == (True, 0.99)


@pytest.mark.parametrize(("name", "kept"), [("adamw", 1 - 0.01 * 0.5), ("lamb", 1 - 0.01)])
def test_only_kernels_decay(name: OptimizerName, kept: float) -> None:
    """With gradients of zero, kernels shrink and biases, norms, token and positions stay.

    LAMB's step is as long as the rate says, whatever the decay.
    """
    model = keras_vit.VisionTransformer(CONFIG)
    for variable in model.trainable_variables:
        variable.assign(np.ones(variable.shape))
    recipe = dataclasses.replace(RECIPE, optimizer=name, warmup=0, weight_decay=0.5)
    optimizer = make_optimizer(recipe, model=model, plan=plan(recipe, 10))

    optimizer.apply(
        [np.zeros(variable.shape, np.float32) for variable in model.trainable_variables],
        model.trainable_variables,
    )

    decayed = {v.path for v in model.trainable_variables if not np.all(v.numpy() == 1)}
    assert decayed == {v.path for v in model.trainable_variables if v.name == "kernel"}
    assert len(decayed) > 5
    assert model.get_layer("head").kernel.numpy() == pytest.approx(kept)


def test_large_gradients_are_cut_to_the_norm() -> None:
    """A gradient ten times too large moves no other way than one of norm one."""

    def after(scale: float) -> list[np.ndarray]:
        model = keras_vit.VisionTransformer(CONFIG)
        for variable in model.trainable_variables:
            variable.assign(np.zeros(variable.shape))
        optimizer = make_optimizer(RECIPE, model=model, plan=plan(RECIPE, 10))
        optimizer.iterations.assign(5)
        gradients = [
            np.full(variable.shape, scale, np.float32) for variable in model.trainable_variables
        ]
        clipped = optimizer._clip_gradients(gradients)
        return [np.asarray(gradient) for gradient in clipped]

    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in after(10)))

    assert norm == pytest.approx(1, abs=1e-5)
    assert all(np.allclose(a, b) for a, b in zip(after(10), after(100), strict=True))
