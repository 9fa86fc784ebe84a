"""Tests of `ExactModel`: what people build around a Vision Transformer trains as exactly."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import TINY, randomize, reloaded

import keras_vit
from keras_vit import ExactModel, VisionTransformer

CONFIG = dataclasses.replace(TINY, num_layers=1, classes=3)
IMAGES = np.random.default_rng(0).uniform(-1, 1, (4, 32, 48, 3)).astype(np.float32)


def wrapped(**fields: Any) -> tuple[Any, Any]:
    """Inputs and outputs of two heads on one Vision Transformer, as dictionaries."""
    base = VisionTransformer(dataclasses.replace(CONFIG, classes=None, **fields))
    images = keras.Input((32, 48, 3), name="photo")
    features = base(images)
    heads = {name: keras.layers.Dense(2, name=name)(features) for name in ("kind", "color")}
    return {"photo": images}, heads


def test_it_is_a_keras_model_in_all_else(tmp_path: Path) -> None:
    """The same predictions as `keras.Model`, before and after saving."""
    inputs, outputs = wrapped()
    plain, exact = keras.Model(inputs, outputs), ExactModel(inputs, outputs)
    randomize(exact)
    again = reloaded(exact, tmp_path)

    assert isinstance(again, ExactModel)
    for name in ("kind", "color"):
        expected = plain.predict({"photo": IMAGES}, verbose=0)[name]
        np.testing.assert_array_equal(exact.predict({"photo": IMAGES}, verbose=0)[name], expected)
        np.testing.assert_array_equal(again.predict({"photo": IMAGES}, verbose=0)[name], expected)


def test_an_existing_model_is_made_exact_in_one_line() -> None:
    """Its layers, weights, name and structure; a sequential model too, but none without inputs."""
    plain = keras.Model(*wrapped(), name="mine")
    exact = ExactModel.from_model(plain)
    sequential = keras.Sequential([keras.Input((32, 48, 3)), VisionTransformer(CONFIG)])

    assert exact.name == "mine"
    assert set(exact.output) == {"kind", "color"}
    assert [id(v) for v in exact.weights] == [id(v) for v in plain.weights]
    assert ExactModel.from_model(sequential).output_shape == (None, 3)

    class Called(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    with pytest.raises(TypeError, match=r"keras_vit.ExactTrainer its first base. Received: Called"):
        ExactModel.from_model(Called())
    with pytest.raises(ValueError, match="is not built; call it on a batch"):
        ExactModel.from_model(keras.Sequential([keras.layers.Dense(2)]))


def test_half_precision_inside_is_scaled() -> None:
    """Keras looks at the wrapper's own policy alone, and trains with gradients that vanish."""
    base = VisionTransformer(dataclasses.replace(CONFIG, classes=None), dtype="mixed_float16")
    images = keras.Input((32, 48, 3))
    wrapper = ExactModel(images, keras.layers.Dense(2, dtype="float32")(base(images)))
    for model in (base, wrapper):
        model.compile("sgd", "mse")
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_a_clone_of_a_compiled_model_trains_exactly() -> None:
    """With its own options, and the same predictions once it has the weights."""
    model = randomize(VisionTransformer(CONFIG))
    model.compile("adam", "mse", gradient_accumulation_steps=2)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())

    assert isinstance(clone, ExactModel)
    compiled = clone.get_compile_config()
    assert compiled is not None
    assert compiled["gradient_accumulation_steps"] == 2
    np.testing.assert_array_equal(clone(IMAGES), model(IMAGES))
    assert isinstance(keras_vit.lora(model, rank=1), VisionTransformer)


def test_training_by_keras_own_step_on_replicas_warns(strategy: tf.distribute.Strategy) -> None:
    """One warning names the class; evaluation, and the exact model, do not warn."""
    with strategy.scope():
        images = keras.Input((32, 48, 3))
        outputs = keras.layers.Dense(2)(VisionTransformer(CONFIG)(images))
        plain, exact = keras.Model(images, outputs), ExactModel(images, outputs)
    ones = tf.ones((2, 32, 48, 3))

    with pytest.warns(UserWarning, match=r"Functional 'functional.*' trains by Keras' own step"):
        strategy.run(lambda: plain(ones, training=True))
    strategy.run(lambda: plain(ones, training=False))
    strategy.run(lambda: exact(ones, training=True))


def test_a_loss_divided_in_part_is_refused(strategy: tf.distribute.Strategy) -> None:
    """What a loss object gives, Keras has divided by the replicas; a mean of ops it has not."""

    def compute_loss(self: Any, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        return keras.losses.MeanSquaredError()(y, y_pred) + keras.ops.mean(y_pred**2)

    mixed = type("Mixed", (VisionTransformer,), {"compute_loss": compute_loss})
    with strategy.scope():
        model = randomize(mixed(CONFIG))
        model.compile("sgd")
    with pytest.raises(ValueError, match=r"compute_loss of Mixed adds .* divide by the 2 replicas"):
        model.fit(IMAGES, np.ones((4, 3)), batch_size=4, verbose=0)
