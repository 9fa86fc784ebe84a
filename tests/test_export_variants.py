"""Networks that depart from the published ones are exported to every format, and verified."""

from pathlib import Path

import numpy as np
import pytest
import variants_oracle
from exported import served_model

from keras_vit.exporting import export, onnx_files, tflite
from keras_vit.exporting.rebuild import rebuild

LIMIT = 1e-5
PIXELS = np.random.default_rng(6).uniform(0, 255, (1, 32, 48, 3)).astype("float32")
ALL = {"num_layers": 2, **variants_oracle.ALL}
VARIANTS = {
    "relative": {**ALL, "position_embedding": "relative"},
    "every block": {
        **ALL, "position_embedding": "learned_2d", "position_placement": "every_block"
    },
    "modern": {"num_layers": 2, **variants_oracle.MODERN},
    "counted": {"num_layers": 1, "norm_after_pooling": True, **variants_oracle.COUNTED},
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_every_format_is_written_and_verified(name: str, tmp_path: Path) -> None:
    """What no writer knows by heart is converted, passes the checks, and answers like the model."""
    pytest.importorskip("tf2onnx")
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = served_model(**VARIANTS[name])
    formats = ["savedmodel", "tflite", "tflite-fp16", "tflite-int8", "onnx"]
    made = {each.format: each for each in export(model, tmp_path / "v", formats=formats)}
    assert list(made) == formats
    expected = np.asarray(model(PIXELS))
    runner = litert.Interpreter(str(made["tflite"].path)).get_signature_runner("serving_default")
    np.testing.assert_allclose(runner(images=PIXELS)["probabilities"], expected, atol=LIMIT)
    session = onnxruntime.InferenceSession(made["onnx"].path)
    answer = session.run(["probabilities"], {"images": PIXELS})[0]
    np.testing.assert_allclose(answer, expected, atol=LIMIT)


def test_a_hybrid_that_tflite_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    """The sentence names the fields and the formats that are left; nothing is written."""
    model = served_model(resnet_layers=(), patch_size=2, num_layers=1, query_key_norm=True)
    message = "savedmodel or onnx. Received: a hybrid with query_key_norm set"
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "v", formats=["onnx", "tflite-int8"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_writers_by_hand_leave_variants_alone(name: str) -> None:
    """No variant reaches a forward pass that was written for networks without its fields."""
    exportable = rebuild(served_model(**VARIANTS[name]))
    assert exportable.written_config is None
    assert type(tflite._module(exportable, batch_size=1)).__name__ == "Module"
    with pytest.raises(ValueError, match="Only a network like the published"):
        onnx_files.make_onnx(exportable)
    assert rebuild(served_model()).written_config is not None
