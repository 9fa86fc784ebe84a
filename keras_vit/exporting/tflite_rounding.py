"""Stores the kernels of a TFLite file in float16 or int8; the runtime computes in float32."""

import copy
from collections.abc import Collection
from typing import Any

import numpy as np
from tensorflow.lite.python import schema_py_generated as schema

from keras_vit.exporting import onnx_rounding

FORMATS = ("tflite-fp16", "tflite-int8-weights")
MIN_ELEMENTS = onnx_rounding.MIN_ELEMENTS  # smaller kernels stay float32

_KERNEL_OPERATORS = (schema.BuiltinOperator.CONV_2D, schema.BuiltinOperator.FULLY_CONNECTED)
_IMAGE_CHANNELS = 4  # a convolution of at most so many input channels reads the image
# The first versions of DEQUANTIZE that take float16, and int8 with a scale for each channel.
_DEQUANTIZE_VERSIONS = {"tflite-fp16": 3, "tflite-int8-weights": 5}


def rounded(content: bytes, name: str, *, floats: Collection[int] = ()) -> Any:
    """Returns an object of a TFLite file with rounded kernels of products and convolutions.

    Each kernel becomes a tensor of another type, from which a DEQUANTIZE computes the float32
    tensor.

    Args:
        content: the file in float32.
        name: one of `FORMATS`.
        floats: which of the products and convolutions, counted from 0, stay float32.
    """
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    graph = model.subgraphs[0]
    opcode = len(model.operatorCodes)
    model.operatorCodes.append(_dequantize_code(_DEQUANTIZE_VERSIONS[name]))
    products = _products(model)
    stay = {products[place] for place in floats}
    kernels = set(products) - stay
    other_buffers = {
        tensor.buffer for index, tensor in enumerate(graph.tensors) if index not in kernels
    }
    dequantizers: list[Any] = []
    stored: dict[int, Any] = {}  # by buffer, which equal kernels may share
    for index in sorted(kernels):
        tensor = graph.tensors[index]
        buffer = model.buffers[tensor.buffer]
        if tensor.buffer not in stored:
            if buffer.data is None or tensor.buffer in other_buffers or not _is_convertible(tensor):
                continue
            stored[tensor.buffer] = _store(buffer, tensor, name)
        small = copy.copy(tensor)
        small.name = tensor.name + b"_rounded"
        small.type, small.quantization = stored[tensor.buffer]
        tensor.buffer = 0  # the empty buffer, as DEQUANTIZE now computes the tensor
        graph.tensors.append(small)
        dequantizers.append(_dequantizer(opcode, len(graph.tensors) - 1, index))
    graph.operators = dequantizers + list(graph.operators)
    return model


def restored(
    content: bytes | bytearray, whole: bytes | bytearray, *, places: Collection[int]
) -> Any:
    """Returns an object of a file with products of int8 in which some are of float32 again.

    Args:
        content: the file.
        whole: the same network in float32, whose operators are the same in the same order.
        places: which of the products and convolutions, counted from 0, are of float32.

    Raises:
        ValueError: the files are not of one network.
    """
    model, source = (schema.ModelT.InitFromPackedBuf(each, 0) for each in (content, whole))
    tensors, originals = (
        [each.subgraphs[0].tensors[index] for index in _products(each)] for each in (model, source)
    )
    shapes, others = ([list(each.shape) for each in list_] for list_ in (tensors, originals))
    if shapes != others:
        raise ValueError(f"The files have other products: {shapes} and {others}.")
    for place in places:
        tensor, original = tensors[place], originals[place]
        model.buffers.append(source.buffers[original.buffer])
        tensor.buffer, tensor.type = len(model.buffers) - 1, original.type
        tensor.quantization = original.quantization
    used = {tensor.buffer for tensor in model.subgraphs[0].tensors}
    used.update(each.buffer for each in model.metadata or ())
    for index, buffer in enumerate(model.buffers):
        if index not in used:
            buffer.data = None  # the kernels in int8
    return model


def _products(model: Any) -> list[int]:
    """Returns the tensor of the kernel of each dense product and convolution, in order."""
    return [
        int(operator.inputs[1])
        for operator in model.subgraphs[0].operators
        if _builtin_operator(model.operatorCodes[operator.opcodeIndex]) in _KERNEL_OPERATORS
    ]


def _store(buffer: Any, tensor: Any, name: str) -> tuple[int, Any]:
    """Rounds the values in a buffer, and returns their type and scales."""
    floats = np.ascontiguousarray(buffer.data).view(np.float32)
    if name == "tflite-fp16":
        buffer.data = np.frombuffer(floats.astype(np.float16).tobytes(), np.uint8)
        return schema.TensorType.FLOAT16, tensor.quantization
    channels = int(tensor.shape[0])
    values, scales = onnx_rounding.quantized(floats.reshape(channels, -1).T)
    buffer.data = np.frombuffer(np.ascontiguousarray(values.T).tobytes(), np.uint8)
    quantization = schema.QuantizationParametersT()
    quantization.scale, quantization.quantizedDimension = scales, 0
    quantization.zeroPoint = np.zeros(channels, np.int64)
    return schema.TensorType.INT8, quantization


def _is_convertible(tensor: Any) -> bool:
    # Rounding the kernel that reads the image costs the most accuracy.
    reads_image = len(tensor.shape) == 4 and tensor.shape[-1] <= _IMAGE_CHANNELS
    is_large = int(np.prod(tensor.shape)) >= MIN_ELEMENTS
    return tensor.type == schema.TensorType.FLOAT32 and is_large and not reads_image


def _builtin_operator(code: Any) -> int:
    # Operators below 127 may be in the deprecated, narrower field.
    return max(int(code.builtinCode), int(code.deprecatedBuiltinCode))


def _dequantize_code(version: int) -> Any:
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
    code.version = version
    return code


def _dequantizer(opcode: int, source: int, target: int) -> Any:
    operator = schema.OperatorT()
    operator.opcodeIndex, operator.inputs, operator.outputs = opcode, [source], [target]
    operator.builtinOptionsType = schema.BuiltinOptions.DequantizeOptions
    operator.builtinOptions = schema.DequantizeOptionsT()
    return operator
