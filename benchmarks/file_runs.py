"""Artefacts of keras_vit: the SavedModel in TensorFlow, the ONNX file in its runtimes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import keras_runs
from benchmarks.cases import Case

Run = Callable[[], Any]


def import_framework(name: str) -> None:
    """Imports the runtime of the artefact."""
    if name == "OpenVINO":
        import openvino  # noqa: F401
    elif name == "ONNX Runtime":
        import onnxruntime  # noqa: F401
    else:
        keras_runs.import_framework(name)


def version(name: str) -> str:
    """Returns the version of the runtime."""
    if name == "OpenVINO":
        import openvino

        return str(openvino.__version__)
    if name == "ONNX Runtime":
        import onnxruntime

        return str(onnxruntime.__version__)
    return keras_runs.version(name)


def make_run(name: str, case: Case, folder: Path) -> Run:
    """Exports the network and returns a function that runs the artefact once."""
    kind = "savedmodel" if name.endswith("SavedModel") else "onnx"
    keras_runs.import_framework("keras_vit")
    from keras_vit.exporting import export

    model = keras_runs.make_model("keras_vit", Case(**{**vars(case), "precision": "float32"}))
    artefact, *_ = export(model, folder / kind, formats=[kind], verify=False)
    images = keras_runs.images_of(case)
    runs = {"keras_vit SavedModel": _savedmodel, "OpenVINO": _openvino, "ONNX Runtime": _onnx}
    return runs[name](artefact.path, images, case.precision)


def _savedmodel(path: Path, images: np.ndarray, precision: str) -> Run:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    function = loaded.signatures["image_tensor"]
    (name,) = function.structured_input_signature[1]
    tensor = tf.cast((images + 1) * 127.5, function.structured_input_signature[1][name].dtype)
    return lambda: [value.numpy() for value in function(**{name: tensor}).values()]


def _openvino(path: Path, images: np.ndarray, precision: str) -> Run:
    import openvino

    names = {"float32": "f32", "bfloat16": "bf16"}
    settings = {"INFERENCE_PRECISION_HINT": names[precision], "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    return lambda: compiled(images)


def _onnx(path: Path, images: np.ndarray, precision: str) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    inputs = {session.get_inputs()[0].name: images}
    return lambda: session.run(["logits"], inputs)
