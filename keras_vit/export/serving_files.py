"""Writes what stands beside a served model: warm-up requests, server settings, how to run it."""

import importlib.resources
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from keras_vit import atomic
from keras_vit.export import signatures
from keras_vit.export.clean import wire
from keras_vit.export.rebuild import Exportable

# The batch sizes to which the server pads; each is warmed up.
BATCH_SIZES = (1, 2, 4, 8, 16)
_TEMPLATES = (
    "batching_parameters.txt",
    "models.config",
    "monitoring.config",
    "serve.sh",
    "README.md",
)
_GREY = 127


def write_server_files(directory: Path, *, exportable: Exportable, labels: tuple[str, ...]) -> None:
    """Writes the settings, the labels, the docker command and a README beside the versions."""
    height, width, _ = exportable.image_shape
    values = {
        "name": directory.name,
        "sizes": ", ".join(map(str, BATCH_SIZES)),
        "largest": BATCH_SIZES[-1],
        "height": height,
        "width": width,
        "values": pixel_values(exportable),
    }
    folder = importlib.resources.files("keras_vit.export") / "templates"
    for name in _TEMPLATES:
        template = string.Template((folder / name).read_text(encoding="utf-8"))
        with atomic.whole_file(directory / name) as file:
            file.write_text(template.substitute(values), encoding="utf-8")
            file.chmod(0o755 if name.endswith(".sh") else 0o644)
    if labels:
        with atomic.whole_file(directory / "labels.txt") as file:
            write_labels(file, labels)


def pixel_values(exportable: Exportable) -> str:
    """Says which values the signature `pixels` takes."""
    mean, std = (
        f"{values[0]:g}" if len(set(values)) == 1 else f"({', '.join(f'{v:g}' for v in values)})"
        for values in (exportable.pixels.image_mean, exportable.pixels.image_std)
    )
    is_original = mean == std == "0.5"
    return "in [-1, 1]" if is_original else f"(0..255 / 255 - {mean}) / {std}"


def write_labels(file: Path, labels: Iterable[str]) -> None:
    """Writes one label a line."""
    file.write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")


def write_warm_up(
    file: Path, exportable: Exportable, functions: Mapping[str, Any], *, model_name: str
) -> None:
    """Writes a request for every signature and batch size, which the server runs as it loads.

    A tensor of one repeated value is stored as that value, so the requests take few bytes.
    """
    with tf.io.TFRecordWriter(str(file)) as writer:
        for signature, function in functions.items():
            (spec,), _ = function.structured_input_signature
            for batch_size in BATCH_SIZES:
                tensor = _grey_tensor(spec, exportable, signature, batch_size)
                writer.write(_prediction_log(model_name, signature, {spec.name: tensor}))


def _grey_tensor(
    spec: tf.TensorSpec, exportable: Exportable, signature: str, batch_size: int
) -> bytes:
    shape = tf.TensorShape((batch_size, *spec.shape[1:])).as_proto()
    tensor = tensor_pb2.TensorProto(dtype=spec.dtype.as_datatype_enum, tensor_shape=shape)
    if spec.dtype == tf.uint8:
        tensor.int_val.append(_GREY)
    elif spec.dtype == tf.float32:
        tensor.float_val.append(0.0)
    else:
        content = _grey_file(exportable)
        if signature == "classify":
            content = example(content)
        tensor.string_val.extend([content] * batch_size)
    return bytes(tensor.SerializeToString())


def example(content: bytes) -> bytes:
    """Wraps the bytes of an image file in a serialised tf.Example."""
    values = tf.train.Feature(bytes_list=tf.train.BytesList(value=[content]))
    features = tf.train.Features(feature={signatures.EXAMPLE_FEATURE: values})
    return bytes(tf.train.Example(features=features).SerializeToString())


def _grey_file(exportable: Exportable) -> bytes:
    pixels = np.full((*exportable.image_shape[:2], 3), _GREY, np.uint8)
    return bytes(tf.io.encode_jpeg(pixels).numpy())


def _prediction_log(model_name: str, signature: str, inputs: Mapping[str, bytes]) -> bytes:
    # tensorflow_serving/apis: PredictionLog.predict_log = 6, PredictLog.request = 1;
    # PredictRequest: model_spec = 1 (ModelSpec: name = 1, signature_name = 3), inputs = 2.
    model = wire.field(1, model_name.encode()) + wire.field(3, signature.encode())
    request = wire.field(1, model)
    for name, tensor in inputs.items():
        request += wire.field(2, wire.field(1, name.encode()) + wire.field(2, tensor))
    return wire.field(6, wire.field(1, request))
