"""Rounds an ONNX model: to float16, to int8 with products of int8, or its kernels alone to int8."""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

FORMATS = ("onnx-fp16", "onnx-int8", "onnx-int8-weights")
MIN_ELEMENTS = 1024  # smaller kernels stay float32
# Products on processors without VNNI add two of 16 bits: two of 8 bits would saturate there.
_REDUCED = True
_MOST = 127
# What stays float32 in float16: pixels of up to 255 and logits would lose what they differ by.
_FLOAT_WEIGHTS = ("rescaling/", "head/")
_FLOAT_OUTPUTS = ("probabilities",)
# ONNX Runtime's mark of a graph whose shapes were inferred, without which it warns.
_PREPARED = {"onnx.quant.pre_process": "onnxruntime.quant"}


def rounded(
    model: "onnx.ModelProto", name: str, *, floats: Collection[str] = ()
) -> "onnx.ModelProto":
    """Returns a rounded copy of a model, whose operators are those of ONNX.

    Args:
        model: in float32.
        name: one of `FORMATS`.
        floats: kernels that stay float32, of those that `kernels` names; not for float16.
    """
    if name == "onnx-fp16":
        made = _half(model)
    elif name == "onnx-int8":
        made = _int8(model, floats)
    else:
        made = _int8_weights(model, floats)
    del made.graph.value_info[:]
    for domain in [each for each in made.opset_import if each.domain not in ("", "ai.onnx")]:
        made.opset_import.remove(domain)
    return made


def kernels(model: "onnx.ModelProto") -> dict[str, tuple[str, int]]:
    """Returns each kernel of a dense product with the name of that product, and its elements.

    The convolution that reads the image is none: to round its kernel costs the most accuracy.
    """
    weights = {each.name: each for each in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        kernel = weights.get(node.input[1]) if node.op_type == "MatMul" else None
        if kernel is not None and len(kernel.dims) == 2:
            count = int(np.prod(kernel.dims))
            if count >= MIN_ELEMENTS:
                found[kernel.name] = (node.name, count)
    return found


def weight_bytes(model: "onnx.ModelProto", name: str, *, floats: Collection[str] = ()) -> int:
    """Returns the bytes of all weights in a file of a format."""
    numbers = sum(int(np.prod(each.dims)) for each in model.graph.initializer)
    if name == "onnx-fp16":
        return 2 * numbers
    saved = {"onnx": 0}.get(name, 3)
    return 4 * numbers - saved * sum(
        count for kernel, (_, count) in kernels(model).items() if kernel not in floats
    )


def _half(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Computes in float16, with inputs and outputs in float32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    stays = [
        node.name
        for node in model.graph.node
        if any(name.startswith(_FLOAT_WEIGHTS) for name in node.input)
        or node.output[0] in _FLOAT_OUTPUTS
    ]
    made: onnx.ModelProto
    with tempfile.TemporaryDirectory(prefix="keras-vit-") as folder:
        made = convert_float_to_float16(
            str(_saved(model, folder)), keep_io_types=True, node_block_list=stays
        )
    OnnxModel(made).topological_sort()
    return made


def _int8(model: "onnx.ModelProto", floats: Collection[str]) -> "onnx.ModelProto":
    """Multiplies in int8: kernels by channel, inputs by what they range over, as they come."""
    import onnx
    from onnxruntime import quantization

    nodes = [node for kernel, (node, _) in kernels(model).items() if kernel not in floats]
    if not nodes:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        return copy
    with tempfile.TemporaryDirectory(prefix="keras-vit-") as folder:
        made = Path(folder) / "int8.onnx"
        quantization.quantize_dynamic(
            _saved(model, folder, properties=_PREPARED),
            made,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=nodes,
            per_channel=True,
            reduce_range=_REDUCED,
            weight_type=quantization.QuantType.QInt8,
        )
        rounded_model: onnx.ModelProto = onnx.load(str(made))
        return rounded_model


def _int8_weights(model: "onnx.ModelProto", floats: Collection[str]) -> "onnx.ModelProto":
    """Stores kernels in int8, from which runtimes make float32 when they load the file.

    By Cast and Mul, which every runtime computes at once where they are constant. ONNX Runtime
    leaves a DequantizeLinear in the graph, and repeats it for each image.
    """
    import onnx
    from onnx import helper, numpy_helper

    made = onnx.ModelProto()
    made.CopyFrom(model)
    chosen = kernels(made).keys() - set(floats)
    nodes: list[Any] = []
    for weight in [each for each in made.graph.initializer if each.name in chosen]:
        name = weight.name
        values, scales = quantized(numpy_helper.to_array(weight))
        weight.CopyFrom(numpy_helper.from_array(values, f"{name}_int8"))
        made.graph.initializer.append(numpy_helper.from_array(scales, f"{name}_scale"))
        float_name = f"{name}_float"
        nodes += [
            helper.make_node("Cast", [weight.name], [float_name], to=1, name=f"{name}_cast"),
            helper.make_node("Mul", [float_name, f"{name}_scale"], [name], name=f"{name}_rescale"),
        ]
    nodes += made.graph.node
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made


def quantized(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a kernel to int8, each output channel by a scale of its own.

    Example:
        >>> values, scales = quantized(np.array([[0.5, 2.0], [1.0, -4.0]], np.float32))
        >>> values.tolist(), (127 * scales).tolist()
        ([[64, 64], [127, -127]], [1.0, 4.0])

    Args:
        kernel: float32 (inputs, outputs).

    Returns:
        The kernel in int8, and the scales (outputs,).
    """
    largest = np.abs(kernel).max(axis=0)
    scales = np.where(largest > 0, largest / _MOST, 1.0).astype(np.float32)
    return np.round(kernel / scales).astype(np.int8), scales


def _saved(
    model: "onnx.ModelProto", folder: str, *, properties: Mapping[str, str] | None = None
) -> Path:
    """Saves a model of any size to read it again, with properties."""
    import onnx

    file, copy = Path(folder) / "float.onnx", onnx.ModelProto()
    copy.CopyFrom(model)  # saving moves its weights to a file of their own
    onnx.helper.set_model_props(copy, dict(properties or {}))
    onnx.save_model(copy, str(file), save_as_external_data=True, location="weights")
    return file
