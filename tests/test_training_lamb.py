"""Tests of keras_vit.training.lamb."""

import keras
import numpy as np
import pytest

from keras_vit.training import LAMB

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
        assert np.abs(variable.numpy() - expected).max() < 2e-6
    other = reference(values[1], [pair[1] for pair in gradients], decay=DECAY, betas=(0.8, 0.99))
    assert np.abs(bias.numpy() - other).max() > 1e-3  # the comparison can fail


def test_it_survives_its_config() -> None:
    """What Keras saves of it makes an equal one."""
    optimizer = LAMB(RATE, weight_decay=DECAY, epsilon=EPSILON)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))

    assert isinstance(again, LAMB)
    assert again.get_config() == optimizer.get_config()
