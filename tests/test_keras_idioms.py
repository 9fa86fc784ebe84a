"""What Keras' guides do with a model, ours takes, where no other file of these tests does it."""

from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import FLOAT32, TINY

from keras_vit.applications import ViTTi16
from keras_vit.model import VisionTransformer

CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IMAGES = np.random.default_rng(3).normal(size=(4, *TINY.input_shape)).astype(np.float32)
LABELS = np.arange(4) % 7


@pytest.fixture
def model(tiny: VisionTransformer) -> VisionTransformer:
    """A copy to change."""
    return tiny.copy()


def answer(model: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(model(IMAGES, training=False)))


def same(left: keras.Model, right: keras.Model) -> None:
    np.testing.assert_allclose(answer(left), answer(right), atol=FLOAT32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # HDF5 files are legacy, as Keras says
def test_saved_as_hdf5(tiny: VisionTransformer, tmp_path: Path) -> None:
    """Keras' legacy format knows no registered names: it asks for each class not its own."""
    tiny.save(tmp_path / "model.h5")
    builtin = ("keras.src.layers", "keras.src.models")
    classes = map(type, tiny._flatten_layers())
    custom_objects = {
        each.__name__: each for each in classes if not each.__module__.startswith(builtin)
    }
    same(keras.saving.load_model(tmp_path / "model.h5", custom_objects=custom_objects), tiny)


def test_copied_by_json_and_by_cloning(tiny: VisionTransformer) -> None:
    """Neither shares a variable, and both answer the same with the weights; JSON has the class."""
    of_json, clone = keras.models.model_from_json(tiny.to_json()), keras.models.clone_model(tiny)
    assert type(of_json) is type(tiny)
    for copy in (of_json, clone):
        assert not {id(v) for v in copy.variables} & {id(v) for v in tiny.variables}
        copy.set_weights(tiny.get_weights())
        same(copy, tiny)


def test_looked_into(tiny: VisionTransformer) -> None:
    """Its summary, layers, shapes and counts; and the output of a layer in the middle."""
    lines: list[str] = []
    tiny.summary(print_fn=lambda line, **_: lines.append(line))
    assert any("Total params" in line for line in lines)
    assert tiny.get_layer(tiny.layers[1].name) is tiny.layers[1]
    assert tiny.inputs[0].shape == (None, *TINY.input_shape)
    assert tiny.outputs[0].shape == (None, 7)
    assert tiny.count_params() == sum(int(np.prod(v.shape)) for v in tiny.weights)
    middle = tiny.layers[len(tiny.layers) // 2]
    features, logits = keras.Model(tiny.input, [middle.output, tiny.output])(IMAGES)
    np.testing.assert_allclose(logits, answer(tiny), atol=FLOAT32)
    assert features.shape[1:] == middle.output.shape[1:]


@pytest.mark.full
def test_a_frozen_base_with_a_head_of_the_users(model: VisionTransformer, tmp_path: Path) -> None:
    """Only the head trains, until the base is thawed; the whole is saved and loaded."""
    base = keras.Model(model.input, model.layers[-2].output)
    base.trainable = False
    inputs = keras.Input(TINY.input_shape)
    x = keras.layers.Flatten()(base(inputs, training=False))
    outputs = keras.layers.Dense(3)(keras.layers.Dropout(0.2)(x))
    tuned = keras.Model(inputs, outputs)
    assert len(tuned.trainable_variables) == 2
    before = base.get_weights()
    tuned.compile(keras.optimizers.Adam(1e-2), CROSS_ENTROPY)
    tuned.fit(IMAGES, LABELS % 3, verbose=0)
    assert all(map(np.array_equal, before, base.get_weights()))
    base.trainable = True
    assert len(tuned.trainable_variables) > 2
    tuned.save(tmp_path / "tuned.keras")
    same(keras.saving.load_model(tmp_path / "tuned.keras", compile=False), tuned)


@pytest.mark.full
def test_a_loop_of_the_users_own(model: VisionTransformer) -> None:
    """By a GradientTape and an optimizer."""
    optimizer = keras.optimizers.SGD(1e-3)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = CROSS_ENTROPY(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        return loss

    before = model.get_weights()
    assert np.isfinite(step(IMAGES, LABELS))
    assert not all(map(np.array_equal, before, model.get_weights()))


@pytest.mark.full
def test_fit_with_the_callbacks_of_keras(model: VisionTransformer, tmp_path: Path) -> None:
    """Each hears of both epochs; the best model is loaded, and evaluates as it did."""
    epochs: list[tuple[int, list[str]]] = []

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            epochs.append((epoch, sorted(logs or {})))

    model.compile(keras.optimizers.SGD(1e-3), CROSS_ENTROPY, metrics=["accuracy"])
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(2),
        validation_data=(IMAGES, LABELS),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[
            Own(),
            keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True),
            keras.callbacks.EarlyStopping(patience=5),
            keras.callbacks.ReduceLROnPlateau(),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        ],
    )
    assert [epoch for epoch, _ in epochs] == [0, 1]
    assert all({"accuracy", "loss", "val_accuracy", "val_loss"} <= {*logs} for _, logs in epochs)
    best = keras.saving.load_model(tmp_path / "best.keras")
    loss, accuracy = best.evaluate(IMAGES, LABELS, verbose=0)
    assert loss == pytest.approx(min(history.history["val_loss"]), rel=1e-4)
    assert accuracy in history.history["val_accuracy"]


@pytest.mark.full
def test_inside_a_subclassed_model(model: VisionTransformer, tmp_path: Path) -> None:
    """It trains, answers probabilities, and its weights are saved."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.base = model

        def call(self, inputs: Any, training: bool = False) -> Any:
            return keras.ops.softmax(self.base(inputs, training=training))

    own = Own()
    own.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    own.fit(IMAGES, LABELS, verbose=0)
    np.testing.assert_allclose(answer(own).sum(axis=1), 1, atol=1e-5)
    own.save_weights(tmp_path / "own.weights.h5")


@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_builders_pool_as_those_of_keras(pooling: Literal["avg", "max"]) -> None:
    """`include_top=False, pooling=...` gives a vector for each image."""
    model = ViTTi16(weights=None, include_top=False, input_shape=(32, 32, 3), pooling=pooling)
    assert len(model.output_shape) == 2
