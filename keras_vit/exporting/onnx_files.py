"""Writes ONNX files: published networks node by node, all others through tf2onnx.

Rounds them to float16, to int8 with products of int8, or their kernels alone to int8.

Shapes: images (B, channels, rows, columns), tokens (B, N, D), as those of `forward`.
"""

import functools
import json
import logging.handlers
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.backend.tensorflow import portable_forms
from keras_vit.config import ViTConfig
from keras_vit.exporting.formats import DEFAULTS, FORMATS, MIN_ELEMENTS, Format, Options
from keras_vit.exporting.forward import constant_folded_tokens, forward
from keras_vit.exporting.rebuild import Description, Exportable
from keras_vit.layers.resnet import GROUP_NORM_EPSILON, GROUPS

if TYPE_CHECKING:
    import onnx

# The file format of each opset that may be chosen; LayerNormalization came with the first.
IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10}
OPSET = 20  # the first with Gelu
CONVERTED_OPSET = 18  # the highest that tf2onnx 1.17 writes
LARGEST = 1_900_000_000  # bytes of weights in one file: Protocol buffers end at 2 GiB

# Products on processors without VNNI add two of 16 bits: two of 8 bits would saturate there.
_REDUCED = True
_MOST = 127
# What stays float32 in float16: pixels of up to 255 and logits would lose what they differ by.
_FLOAT_WEIGHTS = ("rescaling/", "head/")
_FLOAT_OUTPUTS = ("probabilities",)
# ONNX Runtime's mark of a graph whose shapes were inferred, without which it warns.
_PREPARED = {"onnx.quant.pre_process": "onnxruntime.quant"}
# The names that the ONNX specification has for the range of an image's values, and its colours.
_RANGES = {(0.0, 255.0): "NominalRange_0_255", (-1.0, 1.0): "Normalized_1_1",
           (0.0, 1.0): "Normalized_0_1"}  # fmt: skip
_COLOURS = {"RGB": "Rgb8", "grey": "Gray8", "RGBA": "Rgba8"}


def make_onnx(exportable: Exportable, *, opset: int = OPSET) -> "onnx.ModelProto":
    """Makes the ONNX model of a Vision Transformer with nothing around it.

    Input `images` (batch, height, width, channels) float32, as the original model takes it.
    Outputs `logits` and `probabilities` (batch, classes) and the pooled `features` (batch, D), or
    `features` alone without classifier.
    """
    import onnx

    config = exportable.written_config
    if config is None:
        raise ValueError("Only a network like the published ones, alone, is written directly.")
    ops = OnnxOperations(config, constant_folded_tokens(exportable.network, config), opset=opset)
    x = "images"
    if exportable.takes == "pixels":
        scale, offset = exportable.rescaling
        x = ops.node("Mul", x, ops.weight("rescaling/scale", value=np.float32(scale)))
        x = ops.node("Add", x, ops.weight("rescaling/offset", value=np.float32(offset)))
    outputs = forward(ops, ops.transpose(x, (0, 3, 1, 2)))
    if exportable.activation is not None:
        ops.nodes[-1].output[0] = "logits"
        is_softmax = exportable.activation.__name__ == "softmax"
        kind, options = ("Softmax", {"axis": -1}) if is_softmax else ("Sigmoid", {})
        ops.node(kind, "logits", names=("probabilities",), **options)
    last = exportable.output_names[-1]
    ops.node("Identity", outputs[last], names=(last,))

    def tensor(name: str, shape: Sequence[Any]) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("batch", *shape))

    shapes = {name: each.shape[1:] for name, each in exportable.outputs().output.items()}
    shapes["probabilities"] = shapes.get("logits")
    graph = onnx.helper.make_graph(
        ops.nodes,
        exportable.network.name,
        [tensor("images", exportable.image_shape)],
        [tensor(name, shapes[name]) for name in exportable.output_names],
        [
            onnx.numpy_helper.from_array(np.ascontiguousarray(value), path)
            for path, value in ops.weights.items()
        ],
    )
    return onnx.helper.make_model(
        graph,
        opset_imports=[onnx.helper.make_opsetid("", opset)],
        ir_version=IR_VERSIONS[opset],
        producer_name="keras-vit",
    )


class OnnxOperations:
    """Operations that add nodes to an ONNX graph; a value is the name of a node's output.

    Images are (B, channels, rows, columns).

    Attributes:
        config: of the network.
        arrays: to take weights from.
        opset: the version of the operators.
        nodes: those that were added.
        weights: those that were taken.
    """

    def __init__(self, config: ViTConfig, arrays: dict[str, Any], *, opset: int) -> None:
        self.config = config
        self.arrays = arrays
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self._sizes = {"images": config.image_size}  # (rows, columns), which few nodes change

    def node(
        self, kind: str, *inputs: str, names: Sequence[str | None] = (None,), **attributes: Any
    ) -> Any:
        """Adds a node, and returns the name of its output, or of all if they are several."""
        import onnx

        stem = f"{kind}_{len(self.nodes)}"
        outputs = [name or f"{stem}_{place}" for place, name in enumerate(names)]
        self.nodes.append(onnx.helper.make_node(kind, inputs, outputs, name=stem, **attributes))
        if inputs[0] in self._sizes:
            self._sizes[outputs[0]] = self._sizes[inputs[0]]
        return outputs[0] if len(outputs) == 1 else outputs

    add = functools.partialmethod(node, "Add")
    matmul = functools.partialmethod(node, "MatMul")
    softmax = functools.partialmethod(node, "Softmax", axis=-1)
    concat = functools.partialmethod(node, "Concat", axis=1)

    def weight(self, path: str, *, like: Any = None, value: Any = None) -> str:
        """As `Operations.weight`; with `value` also one that is not among the arrays."""
        self.weights.setdefault(path, self.arrays[path] if value is None else value)
        if like is None:
            return path
        batch = self.node("Shape", like, start=0, end=1)
        shape = self.node("Concat", batch, self._integers(self.arrays[path].shape[1:]), axis=0)
        return str(self.node("Expand", path, shape))

    def dense(self, x: Any, path: str) -> Any:
        x = self.matmul(x, self.weight(f"{path}/kernel"))
        return self.add(x, self.weight(f"{path}/bias"))

    def layer_norm(self, x: Any, path: str) -> Any:
        gamma, beta = self.weight(f"{path}/gamma"), self.weight(f"{path}/beta")
        epsilon = self.config.layer_norm_epsilon
        return self.node("LayerNormalization", x, gamma, beta, axis=-1, epsilon=epsilon)

    def activate(self, x: Any, kind: str) -> Any:
        if kind == "quick_gelu":
            slope = self.node("Mul", x, self._number("quick_gelu_factor", 1.702))
            return self.node("Mul", x, self.node("Sigmoid", slope))
        return self._gelu(x, kind) if "gelu" in kind else self.node(kind.capitalize(), x)

    def _gelu(self, x: str, kind: str) -> Any:
        """Adds a GELU; up to opset 19 of the operators that runtimes recognise as one."""
        if self.opset >= 20:
            return self.node("Gelu", x, approximate="tanh" if kind == "gelu_tanh" else "none")
        one, half = self._number("gelu_one", 1.0), self._number("gelu_half", 0.5)
        if kind == "gelu_tanh":
            cube = self.node("Mul", self.node("Mul", x, x), x)
            cube = self.node("Mul", cube, self._number("gelu_cubic", 0.044715))
            inner = self._number("gelu_inner", (2 / np.pi) ** 0.5)
            curve = self.node("Tanh", self.node("Mul", self.add(x, cube), inner))
        else:
            curve = self.node("Erf", self.node("Div", x, self._number("gelu_root", 2**0.5)))
        return self.node("Mul", self.node("Mul", x, self.add(curve, one)), half)

    def split(self, x: Any, count: int) -> Any:
        # Up to opset 17 the outputs alone say how many.
        options = {} if self.opset < 18 else {"num_outputs": count}
        return self.node("Split", x, names=(None,) * count, axis=-1, **options)

    def transpose(self, x: Any, order: tuple[int, ...]) -> Any:
        return self.node("Transpose", x, perm=order)

    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        return self.node("Reshape", x, self._integers(shape))

    def tokens(self, x: Any, start: int, stop: int) -> Any:
        return self.node("Slice", x, *map(self._integers, ([start], [stop], [1])))

    def mean(self, x: Any) -> Any:
        if self.opset < 18:  # the axis is an attribute
            return self.node("ReduceMean", x, axes=[1], keepdims=0)
        return self.node("ReduceMean", x, self._integers([1]), keepdims=0)

    def squeeze(self, x: Any) -> Any:
        return self.node("Squeeze", x, self._integers([1]))

    def convolve(self, x: Any, path: str, *, stride: int) -> Any:
        kernel = self.arrays[f"{path}/kernel"].transpose(3, 2, 0, 1)
        weights = [self.weight(f"{path}/kernel", value=kernel)]
        if f"{path}/bias" in self.arrays:
            weights.append(self.weight(f"{path}/bias"))
        return self._slide("Conv", x, *weights, kernel=kernel.shape[2:], stride=stride)

    def max_pool(self, x: Any) -> Any:
        return self._slide("MaxPool", x, kernel=(3, 3), stride=2)

    def _slide(self, kind: str, *inputs: str, kernel: Sequence[int], stride: int) -> Any:
        """Adds a node that slides a kernel over an image with "same" padding."""
        size = self._sizes[inputs[0]]
        totals = [max((-(-side // stride) - 1) * stride + kernel[0] - side, 0) for side in size]
        pads = [total // 2 for total in totals] + [total - total // 2 for total in totals]
        x = self.node(kind, *inputs, kernel_shape=kernel, strides=(stride, stride), pads=pads)
        self._sizes[x] = (-(-size[0] // stride), -(-size[1] // stride))
        return x

    def group_norm(self, x: Any, path: str) -> Any:
        # GroupNormalization needs opset 21; InstanceNormalization of groups computes the same.
        gamma, beta = (self.arrays[f"{path}/{name}"][:, None, None] for name in ("gamma", "beta"))
        ones = self.weight("group_ones", value=np.ones(GROUPS, np.float32))
        zeros = self.weight("group_zeros", value=np.zeros(GROUPS, np.float32))
        rows, columns = self._sizes[x]
        x = self.reshape(x, (0, GROUPS, len(gamma) // GROUPS * rows * columns))
        x = self.node("InstanceNormalization", x, ones, zeros, epsilon=GROUP_NORM_EPSILON)
        x = self.reshape(x, (0, len(gamma), rows, columns))
        x = self.node("Mul", x, self.weight(f"{path}/gamma", value=gamma))
        return self.node("Add", x, self.weight(f"{path}/beta", value=beta))

    def flatten(self, x: Any) -> Any:
        rows, columns = self._sizes[x]  # spelt out: -1 has no answer for an empty batch
        return self.transpose(self.reshape(x, (0, 0, rows * columns)), (0, 2, 1))

    def _number(self, name: str, value: float) -> str:
        return self.weight(name, value=np.float32(value))

    def _integers(self, values: Sequence[int]) -> str:
        label = "_".join(map(str, values))
        return self.weight(f"constant_int64_{label}", value=np.array(values, np.int64))


def convert_to_onnx(exportable: Exportable, *, opset: int = CONVERTED_OPSET) -> "onnx.ModelProto":
    """Converts a model operation by operation.

    tf2onnx only logs operations that it cannot convert, and writes an invalid file; here they are
    an error. It lacks Erfc, which TensorFlow's exact GELU uses (onnx/tensorflow-onnx#2347).

    Raises:
        ImportError: tf2onnx is not installed.
        ValueError: the model has an operation that ONNX lacks.
    """
    with environment.installed(
        "A model with layers around the Vision Transformer, or unlike the published ones, is "
        "converted by tf2onnx",
        "tf2onnx",
    ):
        import tf2onnx

    spec = tf.TensorSpec((None, *exportable.image_shape), tf.float32, name="images")
    function = tf.function(exportable.answer, input_signature=[spec], autograph=False)
    errors, logger = logging.handlers.BufferingHandler(1000), logging.getLogger("tf2onnx")
    errors.setLevel(logging.ERROR)
    logger.addHandler(errors)
    try:
        with portable_forms():
            converted, _ = tf2onnx.convert.from_function(
                function,
                input_signature=[spec],
                opset=opset,
                custom_op_handlers={"Erfc": (_erfc, [])},
            )
    finally:
        logger.removeHandler(errors)
    model: onnx.ModelProto = converted
    reasons = [record.getMessage() for record in errors.buffer]
    domains = {node.domain for node in model.graph.node} - {"", "ai.onnx"}
    reasons += [f"it needs operators of {sorted(domains)}"] * bool(domains)
    if reasons:
        raise ValueError(f"The model cannot be converted to ONNX: {reasons[0]}.")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]  # has the old, anonymous dimension
    outputs = {value.name: value for value in model.graph.output}
    del model.graph.output[:]
    model.graph.output.extend(outputs[name] for name in exportable.output_names)
    return model


def check(exportable: Exportable, options: Options) -> None:
    """Raises a ValueError for an opset that a model cannot be written in."""
    if options.opset is None:
        return
    highest = max(IR_VERSIONS) if exportable.written_config else CONVERTED_OPSET
    lowest = min(IR_VERSIONS)
    if not lowest <= options.opset <= highest:
        why = "" if highest == max(IR_VERSIONS) else ", as tf2onnx has to convert it"
        raise ValueError(
            f"The opset of this model's ONNX file is {lowest} to {highest}{why}. "
            f"Received: opset={options.opset!r}."
        )


def write(
    exportable: Exportable,
    files: Mapping[str, Path],
    *,
    about: Description,
    options: Options = DEFAULTS,
    float32: Collection[str] = (),
    largest: int = LARGEST,
) -> dict[str, int]:
    """Writes ONNX files, and `<name>.data` beside one whose weights exceed `largest` bytes."""
    import onnx

    if exportable.written_config is not None:
        model = make_onnx(exportable, opset=options.opset or OPSET)
    else:
        model = convert_to_onnx(exportable, opset=options.opset or CONVERTED_OPSET)
    sizes = {}
    # Saving may move the model's own weights to their file, so that is last.
    for name, file in sorted(files.items(), key=lambda item: item[0] == "onnx"):
        row = FORMATS[name]
        sizes[name] = weight_bytes(model, row, float32=float32)
        made = model if row.weights == "float32" else rounded(model, row, float32=float32)
        _describe(made, about)
        onnx.save_model(
            made,
            str(file),
            save_as_external_data=sizes[name] > largest,
            location=f"{file.name}.data",
        )
    return sizes


def _erfc(context: Any, node: Any, name: str, args: Any) -> Any:
    """Replaces Erfc(x) by 1 - Erf(x): the GELU changes by no more than float32 rounding."""
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


def rounded(
    model: "onnx.ModelProto", row: Format, *, float32: Collection[str] = ()
) -> "onnx.ModelProto":
    """Returns a rounded copy of a model, whose operators are those of ONNX."""
    if row.weights == "float16":
        made = _half(model)
    else:
        made = (_int8 if row.products == "int8" else _int8_weights)(model, float32)
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


def weight_bytes(model: "onnx.ModelProto", row: Format, *, float32: Collection[str] = ()) -> int:
    """Returns the bytes of all weights in a file of a format."""
    numbers = sum(int(np.prod(each.dims)) for each in model.graph.initializer)
    if row.weights != "int8":
        return int(4 * row.share * numbers)
    return 4 * numbers - 3 * sum(
        count for kernel, (_, count) in kernels(model).items() if kernel not in float32
    )


def _half(model: "onnx.ModelProto") -> "onnx.ModelProto":
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


def _int8(model: "onnx.ModelProto", float32: Collection[str]) -> "onnx.ModelProto":
    """Multiplies in int8: kernels by channel, inputs by what they range over, as they come."""
    import onnx
    from onnxruntime import quantization

    nodes = [node for kernel, (node, _) in kernels(model).items() if kernel not in float32]
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


def _int8_weights(model: "onnx.ModelProto", float32: Collection[str]) -> "onnx.ModelProto":
    import onnx
    from onnx import helper, numpy_helper

    made = onnx.ModelProto()
    made.CopyFrom(model)
    chosen = kernels(made).keys() - set(float32)
    nodes: list[Any] = []
    for weight in [each for each in made.graph.initializer if each.name in chosen]:
        name = weight.name
        values, scales = quantized(numpy_helper.to_array(weight))
        weight.CopyFrom(numpy_helper.from_array(values, f"{name}_int8"))
        made.graph.initializer.append(numpy_helper.from_array(scales, f"{name}_scale"))
        float_name = f"{name}_float"
        nodes += [
            # Not DequantizeLinear, which ONNX Runtime leaves in the graph and repeats for each
            # image: Cast and Mul of constants are computed once, when the file is loaded.
            helper.make_node("Cast", [weight.name], [float_name], to=1, name=f"{name}_cast"),
            helper.make_node("Mul", [float_name, f"{name}_scale"], [name], name=f"{name}_rescale"),
        ]
    nodes += made.graph.node
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    return made


def quantized(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a kernel to int8, each output channel by a scale of its own.

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
    import onnx

    file, copy = Path(folder) / "float.onnx", onnx.ModelProto()
    copy.CopyFrom(model)  # saving moves its weights to a file of their own
    onnx.helper.set_model_props(copy, dict(properties or {}))
    onnx.save_model(copy, str(file), save_as_external_data=True, location="weights")
    return file


def _describe(model: "onnx.ModelProto", about: Description) -> None:
    """Writes a description into an ONNX model: each field as JSON, under its name."""
    import onnx

    fields = {name: json.dumps(value) for name, value in about.to_dict().items()}
    for key, value in (
        # Keys of the ONNX specification (docs/MetadataProps.md, "Optional metadata").
        ("Image.BitmapPixelFormat", _COLOURS.get(about.colours)),
        ("Image.NominalPixelRange", _RANGES.get(about.input_range)),
    ):
        if value is not None:
            fields[key] = value
    onnx.helper.set_model_props(model, fields)
    model.producer_name, model.producer_version = "keras-vit", about.keras_vit
    (height, width, _), (low, high) = about.image_shape, about.input_range
    what = f"{len(about.labels)} classes" if about.labels else "features"
    model.doc_string = (
        f"{about.name}: images {width} pixels wide and {height} high, "
        f"{about.colours or 'channels'} last, values {low:g} to {high:g}; {what}. "
        f"Written by keras-vit {about.keras_vit}."
    )
