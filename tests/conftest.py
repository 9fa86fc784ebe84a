"""Fixtures that several test files share; two devices, so that strategies can be tested."""

# Before TensorFlow, which reads its settings when it is imported.
import keras_vit  # noqa: F401  # isort: skip

import dataclasses
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np
import pytest

from keras_vit import ExactModel, VisionTransformer, ViTConfig
from keras_vit.layers.random import skip_initialization

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
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

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
# They take longest: what follows them fills the other process's time.
FIRST = ("test_digits", "test_training_ways", "test_training_kills", "test_backend_trainer")


def randomize(model: Model, seed: int = 0) -> Model:
    """Gives every weight random values: new heads are zero and new norms fold away."""
    generator = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        values = generator.standard_normal(variable.shape) * 0.1
        variable.assign(values + (variable.name == "gamma"))
    return model


def made(config: ViTConfig, **options: Any) -> VisionTransformer:
    """A model with every weight random, as `randomize` makes one, and drawn but once."""
    with skip_initialization():
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


def assert_same_arrays(actual: Iterable[Any], expected: Iterable[Any], name: str = "") -> None:
    """All of them, to the bit."""
    for place, (one, other) in enumerate(zip(actual, expected, strict=True)):
        said = f"{name} {getattr(one, 'path', place)}"
        np.testing.assert_array_equal(one, other, err_msg=said)


def _with_head(vit: VisionTransformer, tokens: Any) -> keras.Model:
    return keras.Model(vit.input, keras.layers.Dense(3, activation="softmax")(tokens))


def _in_sequence(vit: VisionTransformer, *others: keras.layers.Layer) -> keras.Model:
    layers = [*others, keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential([keras.Input(vit.input_shape[1:]), *layers])


# How people put layers of their own onto those of a model of three blocks; "cut" has two of them.
OVER_TENSORS: dict[str, Callable[[VisionTransformer], keras.Model]] = {
    "output": lambda vit: _with_head(vit, vit.output),
    "head replaced": lambda vit: _with_head(vit, vit.get_layer("pooling").output),
    "cut": lambda vit: _with_head(vit, vit.get_layer("block_1").output[:, 0]),
    "Sequential": lambda vit: _in_sequence(vit, *vit.layers[1:-1]),
    "clone": lambda vit: _in_sequence(vit, keras.models.clone_model(vit)),
    "nested": lambda vit: _in_sequence(vit, _with_head(vit, vit.output)),
    "exact": lambda vit: ExactModel.from_model(_with_head(vit, vit.get_layer("pooling").output)),
}


def every_dropout(rate: float) -> dict[str, Any]:
    """The fields of all random parts that leave every token in."""
    return dict.fromkeys(("dropout_rate", "attention_dropout_rate", "drop_path_rate"), rate)


def images_for(config: ViTConfig, count: int = 2, *, seed: int = 1) -> np.ndarray:
    """Images that a model of this config takes, in [-1, 1]."""
    shape = (count, *config.input_shape)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def reloaded(model: keras.Model, folder: Path) -> Any:
    """The model that comes of its .keras file."""
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def weights_differ(left: keras.Model, right: keras.Model) -> bool:
    """Whether any bit does."""
    pairs = zip(left.get_weights(), right.get_weights(), strict=True)
    return not all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture(scope="session")
def strategy() -> Any:
    """Two replicas in this process, the strategy of all its tests."""
    from keras_vit.training import Execution

    return Execution(strategy="mirrored").make_strategy()


@pytest.fixture(scope="session")
def tiny() -> VisionTransformer:
    """A small model with every weight random; tests must not change it."""
    return made(TINY)


@pytest.fixture
def images() -> np.ndarray:
    return images_for(TINY)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest tests first; the others keep their order."""
    items.sort(key=lambda item: item.path.stem not in FIRST)
