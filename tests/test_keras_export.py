"""What Keras' guides do with a model, ours takes, where no other file of these tests does it."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf
import variants_oracle
from conftest import CROSS_ENTROPY, FLOAT32, TINY, VARIED, answers, randomize

from keras_vit import ExactTrainer, VisionTransformer
from keras_vit.applications import ViTTi16

pytestmark = [
    # Keras' own, also of HDF5 files, of tf2onnx and of TensorFlow's interpreter.
    pytest.mark.filterwarnings("ignore:In the future `np:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CONFIGS = {
    "gelu_tanh": dataclasses.replace(TINY, num_layers=1),
    "gelu": dataclasses.replace(TINY, num_layers=1, activation="gelu"),
    "varied": VARIED,
    "modern": dataclasses.replace(TINY, num_layers=1, **variants_oracle.MODERN),
    "counted": dataclasses.replace(TINY, num_layers=1, **variants_oracle.COUNTED),
    "max": dataclasses.replace(TINY, num_layers=1, pooling="max"),
    "map, pixels": dataclasses.replace(
        TINY, num_layers=1, pooling="map", class_token=False, include_preprocessing=True
    ),
    "hybrid": dataclasses.replace(
        TINY, input_shape=(32, 32, 3), patch_size=2, resnet_layers=(1,), num_layers=1
    ),
}
IMAGES = np.random.default_rng(3).normal(size=(4, *TINY.input_shape)).astype(np.float32)
LABELS = np.arange(4) % 7


def functional(vit: VisionTransformer) -> keras.Model:
    inputs = keras.Input(vit.input_shape[1:])
    return keras.Model(inputs, keras.layers.Dense(3)(vit(inputs)))


def sequential(vit: VisionTransformer) -> keras.Model:
    return keras.Sequential([keras.Input(vit.input_shape[1:]), vit, keras.layers.Dense(3)])


WRAPPERS = {"alone": lambda vit: vit, "functional": functional, "sequential": sequential}


def saved_model(path: Path, images: np.ndarray) -> Any:
    artefact = tf.saved_model.load(path)
    return artefact.serve(images)


def onnx(path: Path, images: np.ndarray) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: images})[0]


def litert(path: Path, images: np.ndarray) -> Any:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path))
    place = interpreter.get_input_details()[0]["index"]
    interpreter.resize_tensor_input(place, images.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(place, images)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


# Format, the ending of its file, what runs it.
FORMATS = {
    "tf_saved_model": ("", saved_model),
    "onnx": (".onnx", onnx),
    "litert": (".tflite", litert),
}
CASES = [
    pytest.param(*case, marks=[] if is_fast else [pytest.mark.full])
    for case, is_fast in [
        *(((form, "gelu", "sequential"), form == "onnx") for form in FORMATS),
        *((("onnx", config, "alone"), config == "gelu_tanh") for config in CONFIGS),
        (("onnx", "gelu_tanh", "functional"), False),
        *((("litert", config, "alone"), False) for config in CONFIGS),
        (("tf_saved_model", "varied", "functional"), False),
    ]
]


@pytest.mark.parametrize(("form", "config", "wrapper"), CASES)
def test_the_file_answers_as_the_model(
    form: str, config: str, wrapper: str, tmp_path: Path
) -> None:
    """In each format, alone and inside a user's model, another batch than the one traced."""
    model = randomize(WRAPPERS[wrapper](randomize(VisionTransformer(CONFIGS[config]))))
    shape = CONFIGS[config].input_shape
    images = np.random.default_rng(2).normal(size=(3, *shape)).astype(np.float32)
    images = np.abs(images) * 80 if CONFIGS[config].include_preprocessing else images
    expected = np.asarray(model(images))
    ending, run = FORMATS[form]
    path = tmp_path / f"model{ending}"
    model.export(path, format=form, verbose=False)
    np.testing.assert_allclose(run(path, images), expected, atol=FLOAT32)
    assert np.abs(run(path, images[::-1]) - expected).max() > 100 * FLOAT32


def test_prediction_stays_fused_after_an_export(tmp_path: Path) -> None:
    """Only what is traced for ONNX has the portable forms."""
    model = VisionTransformer(CONFIGS["gelu"])
    model(np.zeros((1, *TINY.input_shape)))
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    function = tf.function(lambda x: model(x, training=False))
    graph = function.get_concrete_function(tf.TensorSpec((None, *TINY.input_shape))).graph
    kinds = {op.type for op in graph.get_operations()}
    assert "FusedBatchNormV3" in kinds or tf.config.list_physical_devices("GPU")


@pytest.fixture
def model(tiny: VisionTransformer) -> VisionTransformer:
    """A copy to change."""
    return tiny.copy()


def test_saved_as_hdf5(tiny: VisionTransformer, tmp_path: Path) -> None:
    """Keras' legacy format knows no registered names: it asks for each class not its own."""
    tiny.save(tmp_path / "model.h5")
    builtin = ("keras.src.layers", "keras.src.models")
    classes = map(type, tiny._flatten_layers())
    custom_objects = {
        each.__name__: each for each in classes if not each.__module__.startswith(builtin)
    }
    loaded = keras.saving.load_model(tmp_path / "model.h5", custom_objects=custom_objects)
    np.testing.assert_allclose(answers(loaded, IMAGES), answers(tiny, IMAGES), atol=FLOAT32)


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
    np.testing.assert_allclose(logits, answers(tiny, IMAGES), atol=FLOAT32)
    assert features.shape[1:] == middle.output.shape[1:]


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

    class Own(ExactTrainer, keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.base = model

        def call(self, inputs: Any, training: bool = False) -> Any:
            return keras.ops.softmax(self.base(inputs, training=training))

    own = Own()
    own.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    own.fit(IMAGES, LABELS, verbose=0)
    np.testing.assert_allclose(answers(own, IMAGES).sum(axis=1), 1, atol=1e-5)
    own.save_weights(tmp_path / "own.weights.h5")


@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_builders_pool_as_those_of_keras(pooling: Literal["avg", "max"]) -> None:
    """`include_top=False, pooling=...` gives a vector for each image."""
    model = ViTTi16(weights=None, include_top=False, input_shape=(32, 32, 3), pooling=pooling)
    assert len(model.output_shape) == 2
