"""TFLite files answer like the model in LiteRT, with built-in operators of rank 4 at most."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import LABELS, served_model

from keras_vit.exporting import VerificationError, export, samples, tflite
from keras_vit.exporting.description import describe
from keras_vit.exporting.rebuild import Exportable, rebuild

litert = pytest.importorskip("ai_edge_litert.interpreter")

LIMIT = 1e-5
PIXELS = np.random.default_rng(6).uniform(0, 255, (2, 32, 48, 3)).astype("float32")


def write(exportable: Exportable, files: dict[str, Path]) -> None:
    about = describe(exportable, name="pets", labels=LABELS)
    tflite.write_tflite(exportable, files, about=about)


def test_every_format_is_written_and_verified(tmp_path: Path) -> None:
    """float32, float16 and int8 files pass the export's own checks, and run by signature."""
    model = served_model()
    formats = ["tflite", "tflite-fp16", "tflite-int8"]
    made = export(model, tmp_path / "pets", formats=formats, labels=LABELS)
    assert [artefact.path.name for artefact in made] == [
        "pets.tflite", "pets-fp16.tflite", "pets-int8.tflite"
    ]  # fmt: skip
    names = {file.name for file in made[0].path.parent.iterdir()}
    assert names == {*(each.path.name for each in made), "labels.txt", "verification.json"}
    runner = litert.Interpreter(str(made[0].path)).get_signature_runner("serving_default")
    answer = runner(images=PIXELS[:1])
    np.testing.assert_allclose(answer["probabilities"], np.asarray(model(PIXELS[:1])), atol=LIMIT)
    exportable = rebuild(model)
    features = exportable.outputs()(exportable.from_original(PIXELS[:1]))["features"]
    np.testing.assert_allclose(answer["features"], features, atol=LIMIT)
    checks: dict[str, Any] = {check.name: check.measured for check in made[0].checks}
    assert checks["highest rank"] <= 4
    assert made[0].bytes > made[1].bytes > made[2].bytes


def test_the_operators_are_the_fast_ones(tmp_path: Path) -> None:
    """One GELU and one SOFTMAX a block; dense products fully connected; no squares."""
    file = tmp_path / "model.tflite"
    write(rebuild(served_model()), {"tflite": file})
    plain = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = litert.Interpreter(str(file), experimental_op_resolver_type=plain)
    operators = [details["op_name"] for details in interpreter._get_ops_details()]
    assert operators.count("GELU") == 3
    assert operators.count("SOFTMAX") == 3 + 1
    assert operators.count("BATCH_MATMUL") == 2 * 3
    assert operators.count("FULLY_CONNECTED") == 4 * 3 + 1
    assert not {"SQUARED_DIFFERENCE", "NEG", "POW"} & set(operators)


@pytest.mark.full
def test_float16_is_for_kernels_that_bear_it(tmp_path: Path) -> None:
    """Kernels are float16; the one that reads the image, norms and positions stay float32."""
    files = {"tflite": tmp_path / "whole.tflite", "tflite-fp16": tmp_path / "half.tflite"}
    model = served_model(hidden_dim=48, mlp_dim=96)
    write(rebuild(model), files)
    interpreter = litert.Interpreter(str(files["tflite-fp16"]))
    halved = [
        details["shape"].tolist()
        for details in interpreter.get_tensor_details()
        if details["dtype"] == np.float16
    ]
    assert sorted(halved) == sorted([[144, 48], [48, 48], [96, 48], [48, 96]] * 3)
    saved = files["tflite"].stat().st_size - files["tflite-fp16"].stat().st_size
    kernels = sum(np.prod(shape) for shape in halved)
    assert 2 * kernels - 8000 < saved <= 2 * kernels  # the added operators take some bytes


@pytest.mark.full
def test_a_batch_of_its_own_size(tmp_path: Path) -> None:
    """A file for batches of three takes three images, and is verified with eight."""
    made = export(served_model(), tmp_path / "pets", formats="tflite", tflite_batch_size=3)
    interpreter = litert.Interpreter(str(made[0].path))
    assert list(interpreter.get_input_details()[0]["shape"]) == [3, 32, 48, 3]


@pytest.mark.full
def test_int8_throughout_needs_images_and_passes_a_gate(tmp_path: Path) -> None:
    """Full int8 is calibrated on one half of the images and refused if the other half suffers."""
    images = [samples.draw_scene(seed, height=40, width=56) for seed in range(40)]
    with pytest.raises(ValueError, match="needs at least 16 images"):
        export(served_model(), tmp_path / "pets", formats="tflite-int8-full", images=images[:3])
    made = export(served_model(), tmp_path / "pets", formats="tflite-int8-full", images=images)
    limits = {check.name: check.limit for check in made[0].checks}
    assert limits["gate: error / spread"] == 0.2
    fragile = served_model()
    fragile.get_layer("block_1").attention_norm.gamma.assign(np.geomspace(1e-3, 300, 24))
    with pytest.raises(VerificationError, match="gate: error / spread"):
        export(fragile, tmp_path / "fragile", formats="tflite-int8-full", images=images)
    assert not (tmp_path / "fragile" / "tflite").exists()
