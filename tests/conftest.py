"""Fixtures that several test files share; two devices, so that strategies can be tested."""

# Before TensorFlow, which reads its settings when it is imported.
import keras_vit  # noqa: F401  # isort: skip

import dataclasses
import gc
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import numpy as np
import pytest

from keras_vit.config import ViTConfig
from keras_vit.layers.random import overwritten_weights
from keras_vit.model import VisionTransformer

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from tensorflow.python.data.ops.dataset_ops import DatasetV2

    from keras_vit.data.source import untuned

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )

    # All iterators call it as they are made, those of Keras' own adapters too.
    DatasetV2._apply_debug_options = untuned

# Python would look through all that was imported, a million objects, again and again: 7 % of the
# time of the tests.
gc.freeze()
gc.set_threshold(50_000, 20, 50)

Model = TypeVar("Model", bound=keras.Model)

# How far two forward passes in float32 may be apart: each sums some hundreds of numbers of order 1,
# and every processor in an order of its own. Up to 2e-6 is measured; the wrong GELU, or an epsilon
# of 1e-5 for 1e-6, moves the logits of `TINY` by 1.3e-4.
FLOAT32 = 1e-5

CLASSES = 7
TINY = ViTConfig(
    input_shape=(32, 48, 3),
    patch_size=8,
    hidden_dim=24,
    mlp_dim=48,
    num_heads=3,
    num_layers=3,
    classes=CLASSES,
)


# All that may depart from the published networks at once.
VARIED = dataclasses.replace(
    TINY,
    num_layers=2,
    position_embedding="relative",
    num_registers=1,
    layer_scale=0.1,
    query_key_norm=True,
    activation="swiglu",
    distillation_token=True,
)


def randomize(model: Model, seed: int = 0) -> Model:
    """Gives every weight random values: fresh heads are zero and fresh norms fold away."""
    generator = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        values = generator.standard_normal(variable.shape) * 0.1
        variable.assign(values + (variable.name == "gamma"))
    return model


def made(config: ViTConfig, **options: Any) -> VisionTransformer:
    """A model with every weight random, as `randomize` makes one, and drawn but once."""
    with overwritten_weights():
        model = VisionTransformer(config, **options)
    assert model.trainable_weights == model.weights  # those are what `randomize` assigns
    return randomize(model)


def answers(model: keras.Model, images: np.ndarray) -> np.ndarray:
    """What a model answers: on JAX compiled as a whole, where eager it compiles each operation."""
    if keras.backend.backend() == "jax":
        return np.asarray(model.predict_on_batch(images))
    return np.asarray(keras.ops.convert_to_numpy(model(images)))


def whole(model: keras.Model | keras.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
    """Any other call of a model or layer, compiled as a whole on JAX; its random states move on."""
    if keras.backend.backend() != "jax":
        return call
    import jax

    variables = model.variables

    @jax.jit
    def compiled(values: list[Any], *arguments: Any) -> tuple[Any, list[Any]]:
        with keras.StatelessScope(zip(variables, values, strict=True)) as scope:
            results = call(*arguments)
        return results, [scope.get_current_value(variable) for variable in variables]

    def run(*arguments: Any) -> Any:
        results, values = compiled([variable.value for variable in variables], *arguments)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return results

    return run


def assert_same_steps(actual: Any, expected: Any, name: str = "") -> None:
    """Numbers of each step of two trainings that are one but for the order of their sums.

    Their noise grows: a relative 3e-7 is measured in the first four steps, 1.4e-5 by the ninth. A
    wrong factor shows in the first or second.
    """
    np.testing.assert_allclose(actual[:4], expected[:4], rtol=5e-6, err_msg=name)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, err_msg=name)


def weights_differ(left: keras.Model, right: keras.Model) -> bool:
    """Whether any bit does."""
    pairs = zip(left.get_weights(), right.get_weights(), strict=True)
    return not all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture(scope="session")
def tiny() -> VisionTransformer:
    """A small model with every weight random; tests must not change it."""
    return made(TINY)


@pytest.fixture
def images() -> np.ndarray:
    """Two images for `tiny`, in [-1, 1]."""
    return np.random.default_rng(1).uniform(-1, 1, (2, 32, 48, 3)).astype(np.float32)


# They take longest: what follows them fills the other process's time.
FIRST = ("test_digits", "test_training_ways", "test_training_kills", "test_backend_trainer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest tests first; the others keep their order."""
    items.sort(key=lambda item: item.path.stem not in FIRST)
