"""Writes ONNX files: published networks node by node, all others through tf2onnx."""

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.backend.tensorflow import portable_forms
from keras_vit.config import ViTConfig
from keras_vit.exporting import description, onnx_rounding
from keras_vit.exporting.rebuild import Exportable, folded_arrays
from keras_vit.layers.resnet import GROUP_NORM_EPSILON, GROUPS

if TYPE_CHECKING:
    import onnx

FORMATS = ("onnx", *onnx_rounding.FORMATS)
# The file format of each opset that may be chosen; LayerNormalization came with the first.
IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10}
OPSET = 20  # the first with Gelu
CONVERTED_OPSET = 18  # the highest that tf2onnx 1.17 writes
LARGEST = 1_900_000_000  # bytes of weights in one file: Protocol buffers end at 2 GiB
ACTIVATIONS = {"softmax": "Softmax", "sigmoid": "Sigmoid"}


def make_onnx(exportable: Exportable, *, opset: int = OPSET) -> "onnx.ModelProto":
    """Makes the ONNX model of a Vision Transformer with nothing around it.

    Input `images` (batch, height, width, channels) float32, as the original model takes it.
    Outputs `logits` and `probabilities` (batch, classes) and the pooled `features` (batch, D), or
    `features` alone without classifier.
    """
    config = exportable.written_config
    if config is None:
        raise ValueError("Only a network like the published ones, alone, is written directly.")
    graph = _Graph(config, folded_arrays(exportable.network, config), opset=opset)
    x = "images"
    if exportable.takes == "pixels":
        scale, offset = exportable.rescaling
        x = graph.node("Mul", x, graph.weight("rescaling/scale", np.asarray(scale, np.float32)))
        x = graph.node("Add", x, graph.weight("rescaling/offset", np.asarray(offset, np.float32)))
    output = _forward(graph, x)
    if exportable.activation is not None:
        kind = ACTIVATIONS[exportable.activation.__name__]
        options = {"axis": -1} if kind == "Softmax" else {}
        graph.node(kind, output, name="probabilities", **options)
    return _model(graph, exportable)


class _Graph:
    """The nodes and weights that were added, and the arrays to take weights from."""

    def __init__(self, config: ViTConfig, arrays: dict[str, np.ndarray], *, opset: int) -> None:
        self.config = config
        self.opset = opset
        self.arrays = arrays
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def node(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Adds a node with one output and returns that output's name."""
        return self.nodes_of(kind, *inputs, names=(name,), **attributes)[0]

    def nodes_of(
        self, kind: str, *inputs: str, names: Sequence[str | None], **attributes: Any
    ) -> list[str]:
        """Adds a node and returns the names of its outputs."""
        import onnx

        stem = f"{kind}_{len(self.nodes)}"
        outputs = [name or f"{stem}_{place}" for place, name in enumerate(names)]
        self.nodes.append(onnx.helper.make_node(kind, inputs, outputs, name=stem, **attributes))
        return outputs

    def split(self, x: str, count: int) -> list[str]:
        """Splits the last axis into equal parts; up to opset 17 the outputs alone say how many."""
        options = {} if self.opset < 18 else {"num_outputs": count}
        return self.nodes_of("Split", x, names=(None,) * count, axis=-1, **options)

    def mean(self, x: str) -> str:
        """Takes the mean over the tokens; up to opset 17 the axis is an attribute."""
        if self.opset < 18:
            return self.node("ReduceMean", x, axes=[1], keepdims=0)
        return self.node("ReduceMean", x, self.constant([1]), keepdims=0)

    def gelu(self, x: str) -> str:
        """Adds a GELU; up to opset 19 of the operators that runtimes recognise as one."""
        is_tanh = self.config.activation == "gelu_tanh"
        if self.opset >= 20:
            return self.node("Gelu", x, approximate="tanh" if is_tanh else "none")
        one, half = self.scalar("gelu_one", 1.0), self.scalar("gelu_half", 0.5)
        if is_tanh:
            cube = self.node("Mul", self.node("Mul", x, x), x)
            cube = self.node("Mul", cube, self.scalar("gelu_cubic", 0.044715))
            inner = self.scalar("gelu_inner", (2 / np.pi) ** 0.5)
            curve = self.node("Tanh", self.node("Mul", self.node("Add", x, cube), inner))
        else:
            curve = self.node("Erf", self.node("Div", x, self.scalar("gelu_root", 2**0.5)))
        return self.node("Mul", self.node("Mul", x, self.node("Add", curve, one)), half)

    def scalar(self, name: str, value: float) -> str:
        """Adds a number."""
        return self.weight(name, np.array(value, np.float32))

    def weight(self, path: str, value: np.ndarray | None = None) -> str:
        """Adds a weight, once, and returns its name."""
        if path not in self.weights:
            self.weights[path] = self.arrays[path] if value is None else value
        return path

    def constant(self, values: Sequence[int]) -> str:
        """Adds a list of integers, such as a shape."""
        label = "_".join(map(str, values)).replace("-", "minus")
        return self.weight(f"constant_int64_{label}", np.array(values, np.int64))

    def dense(self, x: str, path: str, *, name: str | None = None) -> str:
        x = self.node("MatMul", x, self.weight(f"{path}/kernel"))
        return self.node("Add", x, self.weight(f"{path}/bias"), name=name)

    def layer_norm(self, x: str, path: str) -> str:
        gamma, beta = self.weight(f"{path}/gamma"), self.weight(f"{path}/beta")
        epsilon = self.config.layer_norm_epsilon
        return self.node("LayerNormalization", x, gamma, beta, axis=-1, epsilon=epsilon)

    def mlp(self, x: str, path: str) -> str:
        x = self.dense(x, f"{path}/fc1")
        if self.config.activation == "quick_gelu":
            factor = self.scalar("quick_gelu_factor", 1.702)
            x = self.node("Mul", x, self.node("Sigmoid", self.node("Mul", x, factor)))
        else:
            x = self.gelu(x)
        return self.dense(x, f"{path}/fc2")

    def kernel(self, path: str) -> str:
        """Adds the kernel of a convolution in the layout of ONNX."""
        name = f"{path}/kernel"
        return self.weight(name, self.arrays[name].transpose(3, 2, 0, 1))

    def repeat(self, path: str, *, like: str) -> str:
        """Repeats a weight (1, N, D) for each image of the batch of `like`."""
        batch = self.node("Shape", like, start=0, end=1)
        shape = self.node("Concat", batch, self.constant(self.arrays[path].shape[1:]), axis=0)
        return self.node("Expand", self.weight(path), shape)

    def first_token(self, x: str) -> str:
        return self.node("Slice", x, *map(self.constant, ([0], [1], [1])))  # (B, 1, D)


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
    with _collected_errors() as errors, portable_forms():
        converted, _ = tf2onnx.convert.from_function(
            function,
            input_signature=[spec],
            opset=opset,
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
    outputs = {value.name: value for value in model.graph.output}
    del model.graph.output[:]
    model.graph.output.extend(outputs[name] for name in exportable.output_names)
    return model


def to_onnx(exportable: Exportable, *, opset: int | None = None) -> "onnx.ModelProto":
    """Returns an ONNX model: written node by node where it can be, otherwise converted."""
    if _is_written(exportable):
        return make_onnx(exportable, opset=opset or OPSET)
    return convert_to_onnx(exportable, opset=opset or CONVERTED_OPSET)


def check_opset(exportable: Exportable, opset: int) -> None:
    """Raises a ValueError for an opset that a model cannot be written in."""
    highest = max(IR_VERSIONS) if _is_written(exportable) else CONVERTED_OPSET
    lowest = min(IR_VERSIONS)
    if not lowest <= opset <= highest:
        why = "" if highest == max(IR_VERSIONS) else ", as tf2onnx has to convert it"
        raise ValueError(
            f"The opset of this model's ONNX file is {lowest} to {highest}{why}. "
            f"Received: opset={opset!r}."
        )


def _is_written(exportable: Exportable) -> bool:
    activation = exportable.activation
    has_node = activation is None or activation.__name__ in ACTIVATIONS
    return exportable.written_config is not None and has_node


def write_onnx(
    exportable: Exportable,
    files: Mapping[str, Path],
    *,
    about: description.Description,
    opset: int | None = None,
    floats: Mapping[str, Collection[str]] | None = None,
    largest: int = LARGEST,
) -> dict[str, int]:
    """Writes ONNX files, and `<name>.data` beside one whose weights exceed `largest` bytes.

    Args:
        exportable: the rebuilt model.
        files: where each of `FORMATS` goes.
        about: what the files say of themselves, in their `metadata_props`.
        opset: the version of the operators, a key of `IR_VERSIONS`; None for the writer's own.
        floats: the kernels that stay float32 in a format that rounds them.
        largest: bytes of weights that stay within the file.

    Returns:
        The bytes of each file's weights.
    """
    import onnx

    model, sizes = to_onnx(exportable, opset=opset), {}
    # Saving may move the model's own weights to their file, so that is last.
    for name, file in sorted(files.items(), key=lambda item: item[0] == "onnx"):
        stays = (floats or {}).get(name, ())
        sizes[name] = onnx_rounding.weight_bytes(model, name, floats=stays)
        made = model if name == "onnx" else onnx_rounding.rounded(model, name, floats=stays)
        description.describe_onnx(made, about)
        onnx.save_model(
            made,
            str(file),
            save_as_external_data=sizes[name] > largest,
            location=f"{file.name}.data",
        )
    return sizes


def _forward(graph: _Graph, images: str) -> str:
    config = graph.config
    x = graph.node("Transpose", images, perm=(0, 3, 1, 2))  # (B, C, height, width)
    if config.resnet_layers is not None:
        x = _stem(graph, x)
    x = _tokens(graph, x)  # (B, N, D)
    for index in range(config.num_layers):
        is_last = index == config.num_layers - 1
        x = _block(graph, x, f"block_{index}", only_first=is_last and config.pooling == "token")
    if not config.norm_after_pooling:
        x = graph.layer_norm(x, "encoder_norm")
    x = _pool(graph, x)  # (B, D), or (B, N, D) without pooling
    if config.norm_after_pooling and config.pooling is not None:
        x = graph.layer_norm(x, "pooling_norm")
    if config.classes is not None:
        x = graph.node("Identity", x, name="features")
    if config.representation_dim is not None:
        x = graph.dense(x, "representation")
        if config.representation_activation is not None:
            x = graph.node("Tanh", x)
    if config.classes is None:
        return graph.node("Identity", x, name="features")
    return graph.dense(x, "head", name="logits")


def _tokens(graph: _Graph, x: str) -> str:
    config, size = graph.config, graph.config.patch_size
    kernel = graph.kernel("patch_encoder/projection")
    bias = graph.weight("patch_encoder/projection/bias")
    x = graph.node("Conv", x, kernel, bias, kernel_shape=(size, size), strides=(size, size))
    patches = config.grid[0] * config.grid[1]  # spelt out: -1 has no answer for an empty batch
    x = graph.node("Reshape", x, graph.constant([0, config.hidden_dim, patches]))
    x = graph.node("Transpose", x, perm=(0, 2, 1))  # (B, patches, D)
    if "patch_encoder/position_embedding" in graph.arrays:
        x = graph.node("Add", x, graph.weight("patch_encoder/position_embedding"))
    if "patch_encoder/prefix" in graph.arrays:
        x = graph.node("Concat", graph.repeat("patch_encoder/prefix", like=x), x, axis=1)
    return graph.layer_norm(x, "embedding_norm") if config.embedding_norm else x  # (B, N, D)


def _block(graph: _Graph, x: str, path: str, *, only_first: bool) -> str:
    """One encoder block; with `only_first` it computes the class token's row alone."""
    normed = graph.layer_norm(x, f"{path}/attention_norm")
    qkv = graph.dense(normed, f"{path}/attention/qkv")
    query, key, value = graph.split(qkv, 3)
    if only_first:
        query, x = graph.first_token(query), graph.first_token(x)
    attended = graph.dense(_attention(graph, query, key, value), f"{path}/attention/out")
    x = graph.node("Add", x, attended)
    hidden = graph.mlp(graph.layer_norm(x, f"{path}/mlp_norm"), f"{path}/mlp")
    return graph.node("Add", x, hidden)


def _attention(graph: _Graph, query: str, key: str, value: str) -> str:
    """Attention of queries that include the scale."""
    heads, width = graph.config.num_heads, graph.config.hidden_dim
    shape = graph.constant([0, 0, heads, width // heads])

    def split(x: str, perm: tuple[int, ...]) -> str:
        return graph.node("Transpose", graph.node("Reshape", x, shape), perm=perm)

    logits = graph.node("MatMul", split(query, (0, 2, 1, 3)), split(key, (0, 2, 3, 1)))
    weights = graph.node("Softmax", logits, axis=-1)  # (B, H, N, N)
    x = graph.node("MatMul", weights, split(value, (0, 2, 1, 3)))
    x = graph.node("Transpose", x, perm=(0, 2, 1, 3))
    return graph.node("Reshape", x, graph.constant([0, 0, width]))  # (B, N, D)


def _pool(graph: _Graph, x: str) -> str:
    config = graph.config
    if config.pooling is None:
        return x
    if config.pooling == "map":
        x = _attention_pooling(graph, x)
    elif config.pooling == "avg":
        if config.num_prefix_tokens:
            ends = ([config.num_prefix_tokens], [config.num_tokens], [1])
            x = graph.node("Slice", x, *map(graph.constant, ends))
        return graph.mean(x)
    return graph.node("Squeeze", x, graph.constant([1]))  # (B, 1, D) to (B, D)


def _attention_pooling(graph: _Graph, x: str) -> str:
    query = graph.repeat("pooling/query", like=x)
    pairs = graph.dense(x, "pooling/key_value")
    key, value = graph.split(pairs, 2)
    x = graph.dense(_attention(graph, query, key, value), "pooling/out")
    hidden = graph.mlp(graph.layer_norm(x, "pooling/norm"), "pooling/mlp")
    return graph.node("Add", x, hidden)  # (B, 1, D)


def _stem(graph: _Graph, x: str) -> str:
    height, width, _ = graph.config.input_shape
    x, size = _convolution(graph, x, "stem/root_conv", size=(height, width), stride=2)
    x = graph.node("Relu", _group_norm(graph, x, "stem/root_norm", size))
    pads = _same_padding(size, kernel=3, stride=2)
    x = graph.node("MaxPool", x, kernel_shape=(3, 3), strides=(2, 2), pads=pads)
    size = (-(-size[0] // 2), -(-size[1] // 2))
    for stage, units in enumerate(graph.config.resnet_layers or ()):
        for unit in range(units):
            stride = 2 if stage > 0 and unit == 0 else 1
            path = f"stem/stage_{stage}_unit_{unit}"
            x, size = _unit(graph, x, path, size=size, stride=stride)
    return x


def _unit(
    graph: _Graph, x: str, path: str, *, size: tuple[int, int], stride: int
) -> tuple[str, tuple[int, int]]:
    shortcut = x
    if f"{path}/projection/kernel" in graph.arrays:
        shortcut, after = _convolution(graph, x, f"{path}/projection", size=size, stride=stride)
        shortcut = _group_norm(graph, shortcut, f"{path}/projection_norm", after)
    for place, step in ((1, 1), (2, stride), (3, 1)):
        x, size = _convolution(graph, x, f"{path}/conv{place}", size=size, stride=step)
        x = _group_norm(graph, x, f"{path}/norm{place}", size)
        if place < 3:
            x = graph.node("Relu", x)
    return graph.node("Relu", graph.node("Add", shortcut, x)), size


def _convolution(
    graph: _Graph, x: str, path: str, *, size: tuple[int, int], stride: int
) -> tuple[str, tuple[int, int]]:
    shape, strides = graph.arrays[f"{path}/kernel"].shape[:2], (stride, stride)
    pads = _same_padding(size, kernel=shape[0], stride=stride)
    x = graph.node("Conv", x, graph.kernel(path), kernel_shape=shape, strides=strides, pads=pads)
    return x, (-(-size[0] // stride), -(-size[1] // stride))


def _same_padding(size: tuple[int, int], *, kernel: int, stride: int) -> list[int]:
    """Returns what "same" padding adds: top, left, bottom, right.

    Example:
        >>> _same_padding((224, 224), kernel=7, stride=2)
        [2, 2, 3, 3]
    """
    totals = [max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in size]
    return [total // 2 for total in totals] + [total - total // 2 for total in totals]


def _group_norm(graph: _Graph, x: str, path: str, size: tuple[int, int]) -> str:
    # GroupNormalization needs opset 21; InstanceNormalization of groups computes the same.
    gamma, beta = graph.arrays[f"{path}/gamma"], graph.arrays[f"{path}/beta"]
    ones = graph.weight("group_ones", np.ones(GROUPS, np.float32))
    zeros = graph.weight("group_zeros", np.zeros(GROUPS, np.float32))
    cells = len(gamma) // GROUPS * size[0] * size[1]
    x = graph.node("Reshape", x, graph.constant([0, GROUPS, cells]))
    x = graph.node("InstanceNormalization", x, ones, zeros, epsilon=GROUP_NORM_EPSILON)
    x = graph.node("Reshape", x, graph.constant([0, len(gamma), *size]))
    x = graph.node("Mul", x, graph.weight(f"{path}/gamma", gamma[:, None, None]))
    return graph.node("Add", x, graph.weight(f"{path}/beta", beta[:, None, None]))


def _model(graph: _Graph, exportable: Exportable) -> "onnx.ModelProto":
    import onnx

    def tensor(name: str, shape: Sequence[Any]) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("batch", *shape))

    shapes = {name: tensor.shape[1:] for name, tensor in exportable.outputs().output.items()}
    shapes["probabilities"] = shapes.get("logits")
    graph_proto = onnx.helper.make_graph(
        graph.nodes,
        exportable.network.name,
        [tensor("images", exportable.image_shape)],
        [tensor(name, shapes[name]) for name in exportable.output_names],
        [
            onnx.numpy_helper.from_array(np.ascontiguousarray(value), path)
            for path, value in graph.weights.items()
        ],
    )
    return onnx.helper.make_model(
        graph_proto,
        opset_imports=[onnx.helper.make_opsetid("", graph.opset)],
        ir_version=IR_VERSIONS[graph.opset],
        producer_name="keras-vit",
    )


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


def _name_batch(model: "onnx.ModelProto") -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]  # has the old, anonymous dimension


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
