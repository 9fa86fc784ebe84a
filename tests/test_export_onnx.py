"""ONNX files answer like the model in onnxruntime, whatever the network's parts."""

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import randomize
from exported import LABELS, SERVED, photo, served_model

from keras_vit.exporting import export
from keras_vit.exporting.description import describe
from keras_vit.exporting.rebuild import Exportable, rebuild
from keras_vit.model import VisionTransformer
from keras_vit.variants import variant

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from keras_vit.exporting import onnx_files, tflite  # noqa: E402

FORMATS = ["savedmodel", "onnx", "onnx-int8", "tflite", "tflite-fp16", "tflite-int8"]
# Full-size models. R+Ti/16 has the blocks of Ti/16 behind a stem; of B/16 there are the formats
# whose kernels are not TensorFlow's. KERAS_VIT_TEST_EXPORTS="B/16 B/32" takes all formats of these.
SIZES = {"R+Ti/16": FORMATS, "B/16": ["onnx", "onnx-int8", "tflite"]}
if "KERAS_VIT_TEST_EXPORTS" in os.environ:
    SIZES = dict.fromkeys(os.environ["KERAS_VIT_TEST_EXPORTS"].split(), FORMATS)
LIMIT = 1e-5  # onnxruntime's kernels sum in another order; measured up to 2e-6
PIXELS = np.random.default_rng(6).uniform(0, 255, (3, 32, 48, 3)).astype("float32")

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact GELU": {"activation": "gelu"},
    "normalized input, logits": {"include_preprocessing": False, "classifier_activation": None},
    "pixels of its own": {"image_mean": (0.4, 0.5, 0.6), "image_std": (0.2, 0.3, 0.25)},
    "normalized by its own": {
        "include_preprocessing": False, "image_mean": (0.4, 0.5, 0.6), "image_std": (0.2, 0.3, 0.25)
    },
    "sigmoid": {"classifier_activation": "sigmoid"},
    "average": {"pooling": "avg"},
    "average, no class token": {"pooling": "avg", "class_token": False},
    "map": {"pooling": "map", "class_token": False},
    "map with class token": {"pooling": "map"},
    "representation": {"representation_dim": 10},
    "features": {"classes": None, "classifier_activation": None},
    "features after representation": {
        "classes": None, "classifier_activation": None, "representation_dim": 10
    },
    "tokens": {"classes": None, "classifier_activation": None, "pooling": None},
    "one channel": {"input_shape": (32, 48, 1)},
    "epsilon": {"layer_norm_epsilon": 1e-2},
    "one block": {"num_layers": 1},
    "CLIP": {
        "embedding_norm": True, "activation": "quick_gelu", "classes": None, "num_heads": 4,
        "representation_dim": 10, "representation_activation": None, "classifier_activation": None
    },
    "DINOv2": {"num_registers": 3, "layer_scale": 0.5, "activation": "gelu"},
    "registers, average, norm after it": {
        "num_registers": 2, "class_token": False, "pooling": "avg", "norm_after_pooling": True,
        "position_embedding": "learned_2d"
    },
    "norm after the token, no positions": {
        "norm_after_pooling": True, "position_embedding": None, "layer_scale": 0.5
    },
    "tokens without norm, sines": {
        "classes": None, "classifier_activation": None, "pooling": None, "norm_after_pooling": True,
        "class_token": False, "position_embedding": "sincos_2d"
    },
    "norm after map, sines": {
        "pooling": "map", "norm_after_pooling": True, "position_embedding": "sincos_2d"
    },
    "a hybrid with registers": {"resnet_layers": (), "patch_size": 2, "num_registers": 1},
    "ResNet root": {"resnet_layers": (), "patch_size": 2},
    "ResNet stages": {"resnet_layers": (2, 1), "patch_size": 1},
}  # fmt: skip


def run(model: Any, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """What onnxruntime answers."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def assert_answers(
    made: Any, model: keras.Model, exportable: Exportable, images: np.ndarray
) -> None:
    onnx.checker.check_model(made, full_check=True)
    answer = run(made, images=images)
    expected = np.asarray(model(images, training=False))
    np.testing.assert_allclose(answer[exportable.answers], expected, atol=LIMIT)
    assert list(answer) == (
        ["features"] if exportable.activation is None else ["logits", "probabilities", "features"]
    )
    features = exportable.outputs()(exportable.from_original(images))["features"]
    np.testing.assert_allclose(answer["features"], features, atol=LIMIT)
    single = run(made, images=images[:1])
    np.testing.assert_allclose(single[exportable.answers], expected[:1], atol=LIMIT)
    empty = run(made, images=images[:0])
    assert {name: value.shape for name, value in empty.items()} == {
        name: (0, *value.shape[1:]) for name, value in answer.items()
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_part_of_the_family_is_written(name: str) -> None:
    """The graph passes the full checker and equals the model, as the form for TFLite does."""
    model = served_model(**CONFIGS[name])
    config = model.config
    images = PIXELS[..., : model.input_shape[-1]]
    if not config.include_preprocessing:
        images = images / np.float32(127.5) - 1
    exportable = rebuild(model)
    made = onnx_files.make_onnx(exportable)
    assert_answers(made, model, exportable, images)
    (images_in,) = made.graph.input
    assert images_in.type.tensor_type.shape.dim[0].dim_param == "batch"
    kinds = [node.op_type for node in made.graph.node]
    blocks = config.num_layers + (config.pooling == "map")
    assert kinds.count("Gelu") == (0 if config.activation == "quick_gelu" else blocks)
    lacks_last = config.norm_after_pooling and config.pooling is None
    norms = config.num_layers + blocks + config.embedding_norm + (not lacks_last)
    assert kinds.count("LayerNormalization") == norms

    assert exportable.config is not None
    edge = tflite.EdgeForward(exportable, config=exportable.config, batch_size=len(images))
    answer = edge.call(images)[exportable.answers]
    np.testing.assert_allclose(answer, np.asarray(model(images)), atol=LIMIT)


@pytest.mark.parametrize("name", ["plain", "exact GELU", "average", "map"])
def test_another_opset_is_written(name: str) -> None:
    """The same numbers in every opset that may be chosen; the file says which it is."""
    model = served_model(num_layers=1, **CONFIGS[name])
    exportable = rebuild(model)
    for opset in (17, 18, 19, 21, 22):
        made = onnx_files.make_onnx(exportable, opset=opset)
        assert [each.version for each in made.opset_import] == [opset]
        assert_answers(made, model, exportable, PIXELS)


def test_an_opset_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """One sentence says which can, and a format without operators of ONNX has none."""
    for opset, name, message in (
        (16, "onnx", "is 17 to 22. Received: opset=16"),
        (23, "onnx", "is 17 to 22. Received: opset=23"),
        (20, "tflite", "opset is that of an ONNX file"),
    ):
        with pytest.raises(ValueError, match=message):
            export(served_model(), tmp_path / "pets", formats=[name], opset=opset)
    converted = rebuild(served_model(activation="swiglu", num_layers=1))
    with pytest.raises(ValueError, match="17 to 18, as tf2onnx has to convert it"):
        onnx_files.check_opset(converted, 20)


@pytest.mark.full
@pytest.mark.parametrize("name", ["exact GELU", "ResNet root"])
def test_tf2onnx_agrees_with_the_writer(name: str) -> None:
    """Two independent ways to ONNX give the same numbers, exact GELU included."""
    pytest.importorskip("tf2onnx")
    model = served_model(**CONFIGS[name])
    exportable = rebuild(model)
    made = onnx_files.convert_to_onnx(exportable)
    assert_answers(made, model, exportable, PIXELS)
    (images_in,) = made.graph.input
    assert images_in.type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.full
def test_an_op_that_onnx_lacks_is_an_error(tmp_path: Path) -> None:
    """tf2onnx only logs what it cannot convert; here nothing is written and the op is named."""
    pytest.importorskip("tf2onnx")

    @keras.saving.register_keras_serializable(package="test")
    class Digamma(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tf.math.digamma(inputs + 3.0)

    inner = served_model(classes=None, classifier_activation=None)
    images = keras.Input((32, 48, 3))
    model = keras.Model(images, keras.layers.Dense(2)(Digamma()(inner(images))))
    with pytest.raises(ValueError, match=r"cannot be converted to ONNX.*Digamma"):
        export(model, tmp_path / "odd", formats=["onnx"])
    assert not (tmp_path / "odd" / "onnx").exists()


def test_large_weights_go_to_a_file_of_their_own(tmp_path: Path) -> None:
    """Above the limit the weights lie beside the graph, which is checked and runs as well."""
    model = served_model()
    exportable = rebuild(model)
    file = tmp_path / "big.onnx"
    about = describe(exportable, name="big", labels=LABELS)
    onnx_files.write_onnx(exportable, {"onnx": file}, about=about, largest=10_000)
    assert (tmp_path / "big.onnx.data").stat().st_size > 70_000 > file.stat().st_size
    onnx.checker.check_model(str(file), full_check=True)
    answer = onnxruntime.InferenceSession(file).run(["probabilities"], {"images": PIXELS})[0]
    np.testing.assert_allclose(answer, np.asarray(model(PIXELS)), atol=LIMIT)


def test_a_mixed_precision_model_is_exported_and_verified(tmp_path: Path) -> None:
    """One call writes the file with labels and a record; version 2 follows version 1."""
    model = randomize(VisionTransformer(SERVED, dtype="mixed_bfloat16"))
    image = tmp_path / "photo.png"
    image.write_bytes(photo())
    for version in ("1", "2"):
        made = export(
            model,
            tmp_path / "pets",
            formats=["onnx"],
            labels=LABELS,
            images=[tmp_path / "photo.png"],
        )
        assert made[0].path == tmp_path / "pets/onnx" / version / "pets.onnx"
    names = {check.name for check in made[0].checks}
    assert {"onnx.checker, full", "batch invariance", "gate: best class"} <= names
    folder = made[0].path.parent
    assert {file.name for file in folder.iterdir()} == {
        "pets.onnx", "labels.txt", "verification.json"
    }  # fmt: skip
    assert not list((tmp_path / "pets").glob("[0-9]*"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without onnx the message says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install onnx"):
        export(served_model(), tmp_path / "pets", formats=["onnx"])


@pytest.mark.full
@pytest.mark.parametrize("name", SIZES)
def test_full_size_models_in_every_format(name: str, tmp_path: Path) -> None:
    """The files of full-size models hold every limit of the export."""
    config = dataclasses.replace(variant(name), include_preprocessing=True)
    model = randomize_as_published(VisionTransformer(config))
    limits = {
        "savedmodel": 1e-5,
        "onnx": 1e-4,
        "tflite": 1e-4,
        "tflite-fp16": 5e-3,
        "tflite-int8": 0.25,  # measured 0.0023 and 0.11
        "onnx-int8": 0.25,
    }
    for artefact in export(model, tmp_path / "full", formats=SIZES[name]):
        for check in artefact.checks:
            print(name, artefact.format, check.name, check.measured, check.limit)
            assert check.passed
            # The export's own limits grow with the logits; these do not.
            if check.name.endswith("absolute difference"):
                assert float(check.measured) <= limits[artefact.format]


def randomize_as_published(model: VisionTransformer) -> VisionTransformer:
    """Every weight random, of the scale that keeps signals of order 1 through many layers."""
    generator = np.random.default_rng(8)
    for variable in model.trainable_variables:
        normal = generator.standard_normal(variable.shape, dtype=np.float32)
        if variable.name == "kernel":
            variable.assign(normal / np.sqrt(np.prod(variable.shape[:-1])))
        else:
            variable.assign((variable.name == "gamma") + np.float32(0.1) * normal)
    return model
