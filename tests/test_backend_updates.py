"""Tests of keras_vit.backend.tensorflow_steps: one kernel for each variable, the same numbers."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import backend
from keras_vit.optimizers import AdamW, MomentumSGD
from keras_vit.training import Execution

OPTIMIZERS = {
    "adam": functools.partial(AdamW, 0.1, weight_decay=0.3),
    "momentum": functools.partial(MomentumSGD, 0.1, accumulator_dtype="float32", weight_decay=0.3),
}
FUSED = {"adam": "ResourceApplyAdam", "momentum": "ResourceApplyMomentum"}


def make_step(name: str, *, dtype: str = "float32", devices: int = 1) -> tuple[Any, list[Any]]:
    """Returns a compiled step, and the weight and state that it changes."""
    strategy = tf.distribute.get_strategy()
    if devices > 1:
        strategy = Execution(strategy="mirrored").make_strategy()
    with strategy.scope():
        weight = keras.Variable(np.ones((4, 3)), dtype=dtype, name="kernel")
        optimizer = OPTIMIZERS[name]()
        optimizer.build([weight])

    @tf.function(autograph=False)
    def step(gradient: Any) -> None:
        strategy.run(lambda g: optimizer.apply([g / devices], [weight]), args=(gradient,))

    return step, [weight, *optimizer.variables]


def trained(name: str, gradients: Any, **options: Any) -> list[np.ndarray]:
    """Returns the weight and the optimizer's state after a step for each gradient."""
    step, variables = make_step(name, **options)
    for gradient in gradients:
        step(gradient)
    return [variable.numpy() for variable in variables]


def drawn(dtype: str = "float32") -> list[tf.Tensor]:
    values = np.random.default_rng(0).standard_normal((10, 4, 3))
    return list(tf.unstack(tf.constant(values, dtype)))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("dtype", "devices", "far"), [("float32", 1, 1), ("float32", 2, 1), ("bfloat16", 1, 0)]
)
def test_ten_steps_give_the_same_numbers(
    name: str, dtype: str, devices: int, far: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and all state, with decay, on one device and on two.

    Weights of half precision take the optimizer's own passes: the kernels want one type for all
    arrays, and the rate would lose its digits.
    """
    actual = trained(name, drawn(dtype), dtype=dtype, devices=devices)
    for step in ("adam_step", "momentum_step"):  # as on other backends
        monkeypatch.setattr(backend, step, lambda *_, **__: False)
    for ours, expected in zip(actual, trained(name, drawn(dtype), dtype=dtype), strict=True):
        wanted = np.float32(expected)
        np.testing.assert_allclose(np.float32(ours), wanted, rtol=far * 1e-4, atol=far * 3e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_kernel_makes_the_step(name: str) -> None:
    """Else it would be right and slow."""
    step, _ = make_step(name)
    graph = step.get_concrete_function(drawn()[0]).graph

    assert [node.type for node in graph.get_operations()].count(FUSED[name]) == 1


@pytest.mark.parametrize("optimizer_class", [AdamW, functools.partial(MomentumSGD, momentum=0.5)])
def test_a_gradient_of_some_rows_is_one_of_all(optimizer_class: Any) -> None:
    """What an embedding around the model has: the other rows move by their momentum alone."""
    rows = tf.IndexedSlices(tf.ones((2, 3)), tf.constant([1, 3]), tf.constant([4, 3]))
    weights = []
    for gradient in (rows, tf.convert_to_tensor(rows)):
        weights.append(keras.Variable(np.ones((4, 3)), name="kernel"))
        optimizer_class(0.1).apply([gradient], [weights[-1]])

    np.testing.assert_allclose(weights[0].numpy(), weights[1].numpy(), rtol=1e-4)


def test_another_adam_is_keras_own() -> None:
    """AMSGrad has a third state, which the kernel does not know."""
    weights = []
    for optimizer_class in (AdamW, keras.optimizers.AdamW):
        weights.append(keras.Variable(np.ones(3), name="kernel"))
        optimizer = optimizer_class(0.1, amsgrad=True)
        for gradient in ([1.0, 2.0, 3.0], [0.0, -1.0, 0.5]):
            optimizer.apply([tf.constant(gradient)], [weights[-1]])

    np.testing.assert_array_equal(weights[0].numpy(), weights[1].numpy())
