"""Tests of keras_vit.optimizers."""

import keras
import numpy as np
import pytest
from conftest import FLOAT32, randomize

import keras_vit
from keras_vit.training import LAMB, Execution

CONFIG = keras_vit.ViTConfig(
    input_shape=(16, 16, 3),
    patch_size=8,
    hidden_dim=8,
    mlp_dim=16,
    num_heads=2,
    num_layers=1,
    classes=3,
    include_preprocessing=True,
)
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


@pytest.mark.full
def test_two_replicas_take_the_steps_of_one() -> None:
    """The ratio is that of whole variables and of the summed gradient."""
    drawn = np.random.default_rng(1)
    images = drawn.uniform(0, 255, (8, 16, 16, 3)).astype(np.float32)
    targets = np.eye(3, dtype=np.float32)[drawn.integers(0, 3, 8)]
    after = []
    for strategy in (Execution(strategy=name).make_strategy() for name in ("none", "mirrored")):
        with strategy.scope():
            model = keras_vit.VisionTransformer(CONFIG)
            randomize(model)
            before = model.get_weights()
            optimizer = LAMB(RATE, weight_decay=DECAY, global_clipnorm=1.0)
            optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
            model.compile(optimizer, keras.losses.CategoricalCrossentropy(from_logits=True))
        model.fit(images, targets, batch_size=8, epochs=3, shuffle=False, verbose=0)
        after.append(model.get_weights())

    for one, two in zip(*after, strict=True):
        assert np.abs(one - two).max() < 1e-4
    assert any(np.abs(old - one).max() > 1e-2 for old, one in zip(before, after[0], strict=True))


def test_it_survives_its_config() -> None:
    """What Keras saves of it makes an equal one."""
    optimizer = LAMB(RATE, weight_decay=DECAY, epsilon=EPSILON)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))

    assert isinstance(again, LAMB)
    assert again.get_config() == optimizer.get_config()
