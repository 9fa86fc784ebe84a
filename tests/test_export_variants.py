"""Models of every kind are exported to every format, verified, and answer like the model."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import variants_oracle
from conftest import FLOAT32
from exported import served_model
from test_export_rebuild import base, dense, sequential

import keras_vit
from keras_vit.exporting import export, onnx_files, onnx_rounding, tflite
from keras_vit.exporting.clean import runners
from keras_vit.exporting.rebuild import rebuild

ALL = {"num_layers": 2, **variants_oracle.ALL}
VARIANTS: dict[str, dict[str, Any]] = {
    "relative": {**ALL, "position_embedding": "relative"},
    "every block": {
        **ALL, "position_embedding": "learned_2d", "position_placement": "every_block"
    },
    "modern": {"num_layers": 2, **variants_oracle.MODERN},
    "counted": {"num_layers": 1, "norm_after_pooling": True, **variants_oracle.COUNTED},
}  # fmt: skip


def quantised() -> keras.Model:
    """A grey hybrid; of one block: of random ones int8 loses more than its gate lets pass."""
    fields: dict[str, Any] = {"resnet_layers": (1,), "patch_size": 2, "num_layers": 1}
    model = served_model(input_shape=(32, 48, 1), **fields)
    model.quantize("int8")
    return model


def adapted() -> keras.Model:
    return sequential(keras_vit.lora(base(), rank=2), dense(None, "softmax"))


def made(**fields: Any) -> Callable[[], keras.Model]:
    return functools.partial(served_model, **fields)


FORMATS = ("savedmodel", "tflite", "tflite-fp16", "tflite-int8", "onnx")
TFLITE, SAVED = FORMATS[1:4], FORMATS[:1]
ROUNDED = (*onnx_rounding.FORMATS, "tflite-int8-weights")
BARE = {"classes": None, "classifier_activation": None}
KINDS: dict[str, tuple[Callable[[], keras.Model], tuple[str, ...]]] = {
    # What no writer knows by heart is converted.
    **{name: (made(**fields), FORMATS) for name, fields in VARIANTS.items()},
    "quantised": (quantised, FORMATS),
    "adapted": (adapted, FORMATS),
    "swiglu": (made(hidden_dim=48, mlp_dim=96, num_layers=2, activation="swiglu"), ROUNDED),
    "hybrid": (made(resnet_layers=(1, 1), patch_size=1, num_registers=1), TFLITE),
    # Other signatures.
    "features": (made(**BARE), SAVED),
    "tokens": (made(**BARE, pooling=None), SAVED),
    "sigmoid": (made(include_preprocessing=False, classifier_activation="sigmoid"), SAVED),
    "map": (made(pooling="map", class_token=False, representation_dim=12), SAVED),
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize("name", KINDS)
def test_every_format_is_written_and_verified(name: str, tmp_path: Path) -> None:
    """The files hold the export's checks, and LiteRT and ONNX Runtime answer like the model."""
    pytest.importorskip("tf2onnx")
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    make, formats = KINDS[name]
    model = make()
    artefacts = export(model, tmp_path / "v", formats=formats)
    assert tuple(each.format for each in artefacts) == formats
    assert all(check.passed for each in artefacts for check in each.checks)
    shape = (1, *model.input_shape[1:])
    images = np.random.default_rng(6).uniform(0, 255, shape).astype("float32")
    expected = np.asarray(model(images, training=False))
    for each in artefacts if formats != SAVED else ():
        if each.format == "savedmodel":
            continue
        answer = runners.open_runner(each.format, each.path).run("", {"images": images})
        is_exact = each.format in ("tflite", "onnx") and name != "quantised"
        print(name, each.format, np.abs(answer["probabilities"] - expected).max())
        np.testing.assert_allclose(
            answer["probabilities"], expected, atol=FLOAT32 if is_exact else 0.02
        )
        # With and without XNNPACK, on one thread and on two.
        resolvers = litert.OpResolverType
        for resolver in (resolvers.AUTO, resolvers.BUILTIN_WITHOUT_DEFAULT_DELEGATES):
            for threads in (1, 2) if each.format == "tflite-int8" else ():
                interpreter = litert.Interpreter(
                    str(each.path), num_threads=threads, experimental_op_resolver_type=resolver
                )
                runner = interpreter.get_signature_runner(runners.SIGNATURE)
                answered = runner(images=images)["probabilities"]
                np.testing.assert_allclose(answered, expected, atol=0.02)


def test_a_hybrid_that_tflite_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    """The sentence names the fields and the formats that are left; nothing is written."""
    model = served_model(resnet_layers=(), patch_size=2, num_layers=1, query_key_norm=True)
    message = "savedmodel or onnx. Received: a hybrid with query_key_norm set"
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "v", formats=["onnx", "tflite-int8"])
    assert not list(tmp_path.iterdir())


def test_the_writers_by_hand_leave_variants_alone() -> None:
    """No variant reaches a forward pass that was written for networks without its fields."""
    for fields in VARIANTS.values():
        exportable = rebuild(served_model(**fields))
        assert exportable.written_config is None
        assert type(tflite._module(exportable, batch_size=1)).__name__ == "Module"
        with pytest.raises(ValueError, match="Only a network like the published"):
            onnx_files.make_onnx(exportable)
    assert rebuild(served_model()).written_config is not None
