"""Writes TFLite files: float32, float16 weights, dynamic-range int8, or int8 throughout."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.backend.tensorflow import portable_forms
from keras_vit.export import half
from keras_vit.export.edge_forward import EdgeForward
from keras_vit.export.rebuild import Exportable

FORMATS = ("tflite", "tflite-fp16", "tflite-int8", "tflite-int8-full")
SIGNATURE = "serving_default"


def write_tflite(
    exportable: Exportable,
    files: dict[str, Path],
    *,
    batch_size: int = 1,
    calibration: Sequence[np.ndarray] = (),
) -> None:
    """Writes a model in one or more TFLite formats, with built-in operators only.

    Args:
        exportable: the rebuilt model.
        files: where each of `FORMATS` goes.
        batch_size: the fixed number of images in a batch; delegates want it fixed.
        calibration: images (H, W, C) as the original model takes them, for "tflite-int8-full".
    """
    module = _module(exportable, batch_size=batch_size)
    with tempfile.TemporaryDirectory(prefix="keras-vit-") as folder, portable_forms():
        options = tf.saved_model.SaveOptions(
            save_debug_info=False, experimental_custom_gradients=False
        )
        signatures = {SIGNATURE: module.call}
        tf.saved_model.save(module, folder, signatures=signatures, options=options)
        plain = b""
        for name, file in files.items():
            is_float = name in ("tflite", "tflite-fp16")
            content = plain if is_float else b""
            if not content:
                converter = tf.lite.TFLiteConverter.from_saved_model(folder, [SIGNATURE])
                _configure(converter, name, batch_size=batch_size, calibration=calibration)
                content = converter.convert()
            if is_float:
                plain = content
            file.write_bytes(half.store_as_float16(content) if name == "tflite-fp16" else content)


def _module(exportable: Exportable, *, batch_size: int) -> Any:
    if exportable.written_config is not None:
        return EdgeForward(exportable, config=exportable.written_config, batch_size=batch_size)
    # Not from_concrete_functions: it loses the weights, or the signature.
    module = tf.Module(name="edge")
    module.weights = [weight.value for weight in exportable.network.weights]
    spec = tf.TensorSpec((batch_size, *exportable.image_shape), tf.float32, name="images")
    module.call = tf.function(exportable.answer, autograph=False, input_signature=[spec])
    return module


def _configure(
    converter: Any, name: str, *, batch_size: int, calibration: Sequence[np.ndarray]
) -> None:
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    if name.startswith("tflite-int8"):
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if name == "tflite-int8-full":
        whole = len(calibration) // batch_size * batch_size
        batches = np.stack(calibration[:whole]).reshape(-1, batch_size, *calibration[0].shape)
        converter.representative_dataset = lambda: ([batch] for batch in batches)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
