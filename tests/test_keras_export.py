"""Tests of `keras.Model.export` on models with a Vision Transformer: files answer as the model."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import variants_oracle
from conftest import FLOAT32, TINY, VARIED, randomize

from keras_vit.model import VisionTransformer

pytestmark = [
    # Keras' own, of tf2onnx and of TensorFlow's interpreter.
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
