"""Converts what a user has built around a Vision Transformer to ONNX, through tf2onnx."""

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_vit.backend.tensorflow import portable_forms
from keras_vit.export.rebuild import Exportable

if TYPE_CHECKING:
    import onnx

OPSET = 18  # the highest that tf2onnx 1.17 writes


def convert_to_onnx(exportable: Exportable) -> "onnx.ModelProto":
    """Converts a model op by op.

    tf2onnx logs ops that it cannot convert and writes an invalid file all the same: here they are
    an error. It lacks Erfc, which TensorFlow's exact GELU consists of (onnx/tensorflow-onnx#2347).

    Raises:
        ImportError: tf2onnx is not installed.
        ValueError: the model has an op that ONNX does not have.
    """
    try:
        import tf2onnx
    except ImportError:
        raise ImportError(
            "A model with layers around the Vision Transformer, or unlike the published ones, is "
            'converted by tf2onnx, which is not installed; run: pip install "keras-vit[onnx]"'
        ) from None

    spec = tf.TensorSpec((None, *exportable.image_shape), tf.float32, name="images")
    function = tf.function(exportable.answer, input_signature=[spec], autograph=False)
    with _collected_errors() as errors, portable_forms():
        converted, _ = tf2onnx.convert.from_function(
            function,
            input_signature=[spec],
            opset=OPSET,
            custom_op_handlers={"Erfc": (_erfc, [])},
        )
    model: onnx.ModelProto = converted
    domains = {node.domain for node in model.graph.node} - {"", "ai.onnx"}
    if errors or domains:
        raise ValueError(
            "The model cannot be converted to ONNX: "
            f"{errors[0] if errors else f'it needs operators of {sorted(domains)}'}."
        )
    _name_batch(model)
    return model


def _erfc(context: Any, node: Any, name: str, args: Any) -> Any:
    """Erfc(x) = 1 - Erf(x), in float32 to within its rounding of the GELU's values."""
    dtype = context.get_dtype(node.output[0])
    one = context.make_const(f"{name}_one", np.array(1, np.float32))
    node.type = "Erf"
    negative = context.insert_new_node_on_output("Neg", node.output[0], name=f"{name}_negative")
    terms = [negative.output[0], one.output[0]]
    result = context.insert_new_node_on_output(
        "Add", terms[0], name=f"{name}_complement", inputs=terms
    )
    context.set_dtype(result.output[0], dtype)
    return result


def _name_batch(model: "onnx.ModelProto") -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]  # still under the old, anonymous names


@contextlib.contextmanager
def _collected_errors() -> Iterator[list[str]]:
    """Collects what tf2onnx logs as errors."""
    errors: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    handler, logger = Collector(logging.ERROR), logging.getLogger("tf2onnx")
    logger.addHandler(handler)
    try:
        yield errors
    finally:
        logger.removeHandler(handler)
