"""What Keras' guides do with a model, and a ConvNeXt of `keras.applications` takes, ours takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import TINY, randomize

from keras_vit.applications import ViTTi16
from keras_vit.model import VisionTransformer
from keras_vit.training import Execution

CLASSES = 7
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
pytestmark = [
    pytest.mark.full,  # it is trained, saved and exported in every way
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method"),
    # Of TensorFlow's interpreter and tf2onnx; HDF5 files are legacy, as Keras says.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:In the future `np:FutureWarning"),
]


@pytest.fixture(scope="module")
def original() -> VisionTransformer:
    """Built once; an idiom that changes it takes a copy."""
    return randomize(VisionTransformer(TINY))


def images_for(count: int = 4) -> np.ndarray:
    images = np.random.default_rng(3).normal(size=(count, *TINY.input_shape))
    return images.astype(np.float32)


def labels_for(count: int = 4) -> np.ndarray:
    return np.arange(count) % CLASSES


def answer(model: Any, images: np.ndarray | None = None) -> np.ndarray:
    images = images_for() if images is None else images
    return np.asarray(keras.ops.convert_to_numpy(model(images, training=False)))


def same(left: keras.Model, right: keras.Model, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(answer(left), answer(right), atol=atol)


def copied(model: keras.Model) -> keras.Model:
    copy = type(model).from_config(model.get_config())
    copy.set_weights(model.get_weights())
    return copy


def save_whole(model: keras.Model, folder: Path) -> None:
    model.save(folder / "model.keras")
    same(keras.saving.load_model(folder / "model.keras"), model)


def save_compiled(model: keras.Model, folder: Path) -> None:
    model = copied(model)
    model.compile(keras.optimizers.SGD(1e-3), CROSS_ENTROPY, metrics=["accuracy"])
    model.fit(images_for(), labels_for(), verbose=0)
    model.save(folder / "compiled.keras")
    loaded = keras.saving.load_model(folder / "compiled.keras")
    expected = model.evaluate(images_for(), labels_for(), verbose=0)
    values = loaded.evaluate(images_for(), labels_for(), verbose=0)
    np.testing.assert_allclose(values, expected, 1e-4)


def save_h5(model: keras.Model, folder: Path) -> None:
    model.save(folder / "model.h5")
    # Keras' legacy format knows no registered names: it asks for each class that is not its own.
    builtin = ("keras.src.layers", "keras.src.models")
    classes = map(type, model._flatten_layers())
    custom_objects = {
        each.__name__: each for each in classes if not each.__module__.startswith(builtin)
    }
    same(keras.saving.load_model(folder / "model.h5", custom_objects=custom_objects), model)


def save_weights(model: keras.Model, folder: Path) -> None:
    model.save_weights(folder / "model.weights.h5")
    copy = type(model).from_config(model.get_config())
    copy.load_weights(folder / "model.weights.h5")
    same(copy, model)


def config_and_json(model: keras.Model, folder: Path) -> None:
    for copy in (
        type(model).from_config(model.get_config()),
        keras.models.model_from_json(model.to_json()),
    ):
        assert type(copy) is type(model)
        copy.set_weights(model.get_weights())
        same(copy, model)


def clone(model: keras.Model, folder: Path) -> None:
    copy = keras.models.clone_model(model)
    assert not {id(v) for v in copy.variables} & {id(v) for v in model.variables}
    copy.set_weights(model.get_weights())
    same(copy, model)


def look_inside(model: keras.Model, folder: Path) -> None:
    lines: list[str] = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    assert any("Total params" in line for line in lines)
    assert model.get_layer(model.layers[1].name) is model.layers[1]
    assert model.inputs[0].shape == (None, *TINY.input_shape)
    assert model.outputs[0].shape == (None, CLASSES)
    assert model.count_params() == sum(int(np.prod(v.shape)) for v in model.weights)


def extract_features(model: keras.Model, folder: Path) -> None:
    middle = model.layers[len(model.layers) // 2]
    features = keras.Model(model.input, [middle.output, model.output])
    np.testing.assert_allclose(answer_of(features)[1], answer(model), atol=1e-5)
    assert answer_of(features)[0].shape[1:] == middle.output.shape[1:]


def answer_of(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(each) for each in model(images_for(), training=False)]


def transfer(model: keras.Model, folder: Path) -> None:
    base = keras.Model(model.input, model.layers[-2].output)
    base.trainable = False
    inputs = keras.Input(TINY.input_shape)
    x = keras.layers.Flatten()(base(inputs, training=False))
    outputs = keras.layers.Dense(3)(keras.layers.Dropout(0.2)(x))
    tuned = keras.Model(inputs, outputs)
    assert len(tuned.trainable_variables) == 2
    before = base.get_weights()
    tuned.compile(keras.optimizers.Adam(1e-2), CROSS_ENTROPY)
    tuned.fit(images_for(), labels_for() % 3, verbose=0)
    assert all(map(np.array_equal, before, base.get_weights()))
    base.trainable = True
    assert len(tuned.trainable_variables) > 2
    tuned.save(folder / "tuned.keras")
    same(keras.saving.load_model(folder / "tuned.keras", compile=False), tuned)


def own_loop(model: keras.Model, folder: Path) -> None:
    model = copied(model)
    optimizer = keras.optimizers.SGD(1e-3)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = CROSS_ENTROPY(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        return loss

    before = model.get_weights()
    assert np.isfinite(step(images_for(), labels_for()))
    assert not all(map(np.array_equal, before, model.get_weights()))


def callbacks(model: keras.Model, folder: Path) -> None:
    model, epochs = copied(model), []

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            epochs.append((epoch, sorted(logs or {})))

    model.compile(keras.optimizers.SGD(1e-3), CROSS_ENTROPY, metrics=["accuracy"])
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((images_for(), labels_for())).batch(2),
        validation_data=(images_for(), labels_for()),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[
            Own(),
            keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True),
            keras.callbacks.EarlyStopping(patience=5),
            keras.callbacks.ReduceLROnPlateau(),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.BackupAndRestore(folder / "backup"),
        ],
    )
    names = ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert [(epoch, names) for epoch in (0, 1)] == [
        (epoch, [name for name in logs if name in names]) for epoch, logs in epochs
    ]
    assert len(history.history["val_loss"]) == 2
    assert (folder / "best.keras").is_file()


def quantise(model: keras.Model, folder: Path) -> None:
    model, before = copied(model), answer(model)
    model.quantize("int8")
    after = answer(model)
    assert (before * after).sum() / np.linalg.norm(before) / np.linalg.norm(after) > 0.99
    np.testing.assert_allclose(model.predict(images_for(), verbose=0), after, atol=1e-4)
    model.save(folder / "int8.keras")
    same(keras.saving.load_model(folder / "int8.keras"), model)


def export(model: keras.Model, folder: Path) -> None:
    model.export(folder / "saved", verbose=False)
    artefact = tf.saved_model.load(folder / "saved")
    np.testing.assert_allclose(artefact.serve(images_for()), answer(model), atol=1e-4)


def freeze_by_name(model: keras.Model, folder: Path) -> None:
    model = copied(model)
    for layer in model.layers[:-1]:
        layer.trainable = False
    assert model.trainable_variables
    assert {v.path for v in model.trainable_variables} == {
        v.path for v in model.layers[-1].trainable_variables
    }


def subclass(model: keras.Model, folder: Path) -> None:
    base = copied(model)

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.base = base

        def call(self, inputs: Any, training: bool = False) -> Any:
            return keras.ops.softmax(self.base(inputs, training=training))

    own = Own()
    own.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    own.fit(images_for(), labels_for(), verbose=0)
    np.testing.assert_allclose(answer(own).sum(axis=1), 1, atol=1e-5)
    own.save_weights(folder / "own.weights.h5")


def replicas(model: keras.Model, folder: Path) -> None:
    strategy = Execution(strategy="mirrored").make_strategy()  # one for all models of a process
    with strategy.scope():
        copy = type(model).from_config(model.get_config())
        copy.set_weights(model.get_weights())
        copy.compile(keras.optimizers.SGD(1e-3), CROSS_ENTROPY)
    losses = copy.fit(images_for(), labels_for(), batch_size=4, verbose=0).history["loss"]
    assert np.isfinite(losses).all()


IDIOMS: list[Callable[[keras.Model, Path], None]] = [
    save_whole, save_compiled, save_h5, save_weights, config_and_json, clone, look_inside,
    extract_features, transfer, own_loop, callbacks, quantise, export, freeze_by_name, subclass,
    replicas,
]  # fmt: skip


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_idiom(
    idiom: Callable[[keras.Model, Path], None], original: VisionTransformer, tmp_path: Path
) -> None:
    """It works on the model, as the guide says."""
    idiom(original, tmp_path)


@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_builders_pool_as_those_of_keras(pooling: Literal["avg", "max"]) -> None:
    """`include_top=False, pooling=...` gives a vector for each image."""
    model = ViTTi16(weights=None, include_top=False, input_shape=(32, 32, 3), pooling=pooling)
    assert len(model.output_shape) == 2


def test_a_compiled_model_is_cloned_compiled(original: VisionTransformer) -> None:
    """And answers the same."""
    model = copied(original)
    model.compile(keras.optimizers.SGD(1e-3), CROSS_ENTROPY)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert clone.compiled
    same(clone, model)
