"""Writes TFLite files, and measures what rounding each kernel of a network to int8 costs.

Each file names its tensors, and has metadata that MediaPipe and LiteRT tools read: a flatbuffer of
the schema `metadata_schema.fbs` (MediaPipe, once TFLite Support) in a buffer of the model. The
labels and this package's description are a zip archive behind the model, which runtimes do not
read.

Shapes: images (B, rows, columns, channels), tokens (B, N, D), as those of `forward`.
"""

import contextlib
import dataclasses
import functools
import io
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

from keras_vit.backend.tensorflow import portable_forms
from keras_vit.config import ViTConfig
from keras_vit.exporting import savedmodel
from keras_vit.exporting.clean import agreement, runners
from keras_vit.exporting.clean.agreement import Check, Gate
from keras_vit.exporting.formats import DEFAULTS, FORMATS, MIN_ELEMENTS, Format, Options
from keras_vit.exporting.forward import constant_folded_tokens, forward
from keras_vit.exporting.rebuild import Description, Exportable
from keras_vit.layers.resnet import GROUP_NORM_EPSILON, GROUPS

_PRODUCTS = {
    schema.BuiltinOperator.CONV_2D: "CONV_2D",
    schema.BuiltinOperator.FULLY_CONNECTED: "FULLY_CONNECTED",
}
_IMAGE_CHANNELS = 4  # a convolution of at most so many input channels reads the image

METADATA, IDENTIFIER = b"TFLITE_METADATA", b"M001"
_LABELS = "labels.txt"
_PARSER_VERSION = "1.0.0"  # the first that reads what is written here
_MADE = (1980, 1, 1, 0, 0, 0)  # so that a file is the same whenever it is written
# metadata_schema.fbs: AssociatedFileType, ColorSpaceType, and the members of two unions.
_AXIS_LABELS = 2
_COLOURS = {"RGB": 1, "grey": 2}
_FEATURE, _IMAGE, _NORMALIZATION = 1, 2, 1

ATTEMPTS = 4  # to write a file again with more kernels in float32
# Images to measure on, at least and at most, where that takes no more multiplications than so many.
COUNTS, WORK = (2, 8), 4e12
AIM = 0.8  # of a limit, as the errors of the parts do not quite add up to those of the whole
_LEVELS, _ONNX_LEVELS = 127, 64  # of half the range of a kernel's values; in products of ONNX


class EdgeForward(tf.Module):
    """Operations of TensorFlow that become few in TFLite, and what they compute for batches.

    Args:
        exportable: a Vision Transformer with nothing around it.
        config: its config.
        batch_size: images in a batch, which is fixed.

    Attributes:
        config: that of the network.
        arrays: its weights as variables.
        products: the elements of each kernel, in the order of the products and convolutions.
    """

    add = staticmethod(tf.add)
    matmul = staticmethod(tf.matmul)
    softmax = staticmethod(tf.nn.softmax)
    transpose = staticmethod(tf.transpose)
    split = staticmethod(functools.partial(tf.split, axis=-1))
    mean = staticmethod(functools.partial(tf.reduce_mean, axis=1))
    max_pool = staticmethod(functools.partial(tf.nn.max_pool2d, ksize=3, strides=2, padding="SAME"))

    def __init__(self, exportable: Exportable, *, config: ViTConfig, batch_size: int) -> None:
        super().__init__(name="edge")
        self.config = config
        self.products: dict[str, int] = {}
        arrays = constant_folded_tokens(exportable.network, config)
        for path in {"patch_encoder/prefix", "pooling/query"} & set(arrays):
            # The batch is fixed: no operator needs to repeat them at run time.
            arrays[path] = np.repeat(arrays[path], batch_size, axis=0)
        self.arrays: dict[str, Any] = {path: tf.Variable(value) for path, value in arrays.items()}
        self.call = tf.function(
            lambda images: exportable.named(
                forward(self, exportable.to_network(images, exportable.takes))
            ),
            autograph=False,
            input_signature=[
                tf.TensorSpec((batch_size, *exportable.image_shape), tf.float32, name="images")
            ],
        )

    def weight(self, path: str, *, like: Any = None) -> Any:
        return self.arrays[path]

    def dense(self, x: Any, path: str) -> Any:
        # As rows, whose product becomes FULLY_CONNECTED, the operator whose kernels are rounded.
        rows = self.product(tf.matmul, tf.reshape(x, (-1, x.shape[-1])), path)
        rows = rows + self.arrays[f"{path}/bias"]
        return tf.reshape(rows, (*x.shape[:-1], rows.shape[-1]))

    def product(self, multiply: Callable[[Any, Any], Any], x: Any, path: str) -> Any:
        """Multiplies by a kernel."""
        kernel = self.arrays[f"{path}/kernel"]
        self.products[f"{path}/kernel"] = int(np.prod(kernel.shape))
        return multiply(x, kernel)

    def layer_norm(self, x: Any, path: str) -> Any:
        x = _standardized(x, (-1,), self.config.layer_norm_epsilon)
        return x * self.arrays[f"{path}/gamma"] + self.arrays[f"{path}/beta"]

    def activate(self, x: Any, kind: str) -> Any:
        if kind == "quick_gelu":
            return x * tf.sigmoid(1.702 * x)
        if kind in ("gelu", "gelu_tanh"):
            return tf.nn.gelu(x, kind == "gelu_tanh")
        return {"relu": tf.nn.relu, "tanh": tf.tanh}[kind](x)

    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        return tf.reshape(x, [size or x.shape[axis] for axis, size in enumerate(shape)])

    def tokens(self, x: Any, start: int, stop: int) -> Any:
        return x[:, start:stop]

    def concat(self, x: Any, y: Any) -> Any:
        return tf.concat([x, y], axis=1)

    def squeeze(self, x: Any) -> Any:
        return tf.reshape(x, (x.shape[0], x.shape[-1]))

    def convolve(self, x: Any, path: str, *, stride: int) -> Any:
        # Patches need no padding, and without it the converter takes the rescaling into the kernel.
        is_patch = stride == self.arrays[f"{path}/kernel"].shape[0]
        options = {"strides": stride, "padding": "VALID" if is_patch else "SAME"}
        x = self.product(functools.partial(tf.nn.conv2d, **options), x, path)
        bias = self.arrays.get(f"{path}/bias")
        return x if bias is None else x + bias

    def group_norm(self, x: Any, path: str) -> Any:
        batch, height, width, channels = x.shape
        # Rank 4: not every delegate takes more.
        grouped = tf.reshape(x, (batch, height * width, GROUPS, channels // GROUPS))
        normed = tf.reshape(_standardized(grouped, (1, 3), GROUP_NORM_EPSILON), x.shape)
        return normed * self.arrays[f"{path}/gamma"] + self.arrays[f"{path}/beta"]

    def flatten(self, x: Any) -> Any:
        return tf.reshape(x, (x.shape[0], -1, x.shape[-1]))


def check(exportable: Exportable, options: Options) -> None:
    """Raises a ValueError for a network that no TFLite file can hold."""
    config = exportable.config
    if config is None or config.resnet_layers is None or not config.unwritten_fields:
        return
    # The conversion gives a group normalisation rank 5.
    raise ValueError(
        "TFLite files hold only hybrids as published; export this one as savedmodel or "
        f"onnx. Received: a hybrid with {', '.join(config.unwritten_fields)} set."
    )


def write(
    exportable: Exportable,
    files: Mapping[str, Path],
    *,
    about: Description,
    options: Options = DEFAULTS,
    float32: Collection[str] = (),
) -> dict[str, int]:
    """Writes a model in one or more TFLite formats, with built-in operators only."""
    sizes = {}
    with tempfile.TemporaryDirectory(prefix="keras-vit-") as folder, portable_forms():
        products = _save(exportable, folder, batch_size=options.batch_size)
        convert = functools.cache(functools.partial(_convert, folder, options))
        places = [place for place, path in enumerate(products) if path in float32]
        stays = sum(products[path] for path in products if path in float32)
        for name, file in files.items():
            row = FORMATS[name]
            if row.weights == "float32" or row.needs_images:
                content = convert(calibrates=row.needs_images)
                model = schema.ModelT.InitFromPackedBuf(content, 0)
            else:
                model = rounded(convert(calibrates=False), row, float32=places)
            _write_file(file, model, about)
            more = 4 * (1 - row.share) * stays
            sizes[name] = int(row.share * exportable.parameter_bytes + more)
    return sizes


def rounded(content: bytes, row: Format, *, float32: Collection[int] = ()) -> Any:
    """Returns an object of a file with rounded kernels of products and convolutions.

    Args:
        content: the file in float32.
        row: the format.
        float32: which of the products and convolutions, counted from 0, stay float32.
    """
    from ai_edge_quantizer import qtyping, quantizer

    bits, kind = (16, "FLOAT") if row.weights == "float16" else (8, "INT")
    precision = "INTEGER" if row.products == "int8" else "FLOAT"
    options = qtyping.OpQuantizationConfig(
        weight_tensor_config=qtyping.TensorQuantizationConfig(
            num_bits=bits, dtype=kind, granularity=qtyping.QuantGranularity.CHANNELWISE
        ),
        compute_precision=precision,
        explicit_dequantize=precision == "FLOAT",
    )
    method = "float_casting" if kind == "FLOAT" else "min_max_uniform_quantize"
    work = quantizer.Quantizer(content)
    for place, (scope, operation, shape) in enumerate(_products(content)):
        # Rounding the kernel that reads the image costs the most accuracy, unless inputs are too.
        reads_image = len(shape) == 4 and shape[-1] <= _IMAGE_CHANNELS and precision == "FLOAT"
        if np.prod(shape) >= MIN_ELEMENTS and place not in float32 and not reads_image:
            work.update_quantization_recipe(f"^{re.escape(scope)};?$", operation, options, method)
    if work.get_quantization_recipe():
        with contextlib.redirect_stderr(io.StringIO()):  # one of its bars heeds no argument
            content = work.quantize(enable_progress_report=False).quantized_model
    model = schema.ModelT.InitFromPackedBuf(content, 0)
    for buffer in model.buffers:
        if buffer.offset:  # above 256 KiB they stand behind the model, where old runtimes miss them
            buffer.data = np.frombuffer(content, np.uint8, buffer.size, buffer.offset)
            buffer.offset = buffer.size = 0
    for operator in model.subgraphs[0].operators:
        # Without XNNPACK inputs would have but 127 values on one side of 0.
        if isinstance(operator.builtinOptions, schema.FullyConnectedOptionsT):
            operator.builtinOptions.asymmetricQuantizeInputs = precision == "INTEGER"
    return model


def _products(content: bytes) -> Iterator[tuple[str, str, list[int]]]:
    model = schema.Model.GetRootAs(content)
    graph = model.Subgraphs(0)
    for place in range(graph.OperatorsLength()):
        operator = graph.Operators(place)
        code = model.OperatorCodes(operator.OpcodeIndex())
        # Operators below 127 may be in the deprecated, narrower field.
        kind = _PRODUCTS.get(max(code.BuiltinCode(), code.DeprecatedBuiltinCode()))
        if kind is not None:
            output, kernel = (
                graph.Tensors(index) for index in (operator.Outputs(0), operator.Inputs(1))
            )
            yield output.Name().decode(), kind, kernel.ShapeAsNumpy().tolist()


def _save(exportable: Exportable, folder: str, *, batch_size: int) -> dict[str, int]:
    """Saves what is to be converted, and returns the elements of each kernel, in order."""
    # Made here, so that its weights are gone when the converter makes copies of its own.
    module = make_module(exportable, batch_size=batch_size)
    savedmodel.save_module(module, folder, {runners.SIGNATURE: module.call})
    return dict(getattr(module, "products", {}))


def make_module(exportable: Exportable, *, batch_size: int) -> Any:
    """Returns a module whose `call` is converted: the network by hand, or as Keras has it."""
    if exportable.written_config is not None:
        return EdgeForward(exportable, config=exportable.written_config, batch_size=batch_size)
    module = tf.Module(name="edge")
    module.weights = [weight.value for weight in exportable.network.weights]
    spec = tf.TensorSpec((batch_size, *exportable.image_shape), tf.float32, name="images")
    module.call = tf.function(exportable.answer, autograph=False, input_signature=[spec])
    return module


def _convert(folder: str, options: Options, *, calibrates: bool) -> bytes:
    # The converter's from_concrete_functions loses the weights or the signature.
    converter = tf.lite.TFLiteConverter.from_saved_model(folder, [runners.SIGNATURE])
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    converter.exclude_conversion_metadata = True  # which would pack the whole file once more
    if calibrates:
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        images, size = options.calibration, options.batch_size
        batches = images[: len(images) // size * size].reshape(-1, size, *images.shape[1:])
        converter.representative_dataset = lambda: ([batch] for batch in batches)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    content: bytes = converter.convert()
    return content


def _standardized(x: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    centred = x - tf.reduce_mean(x, axis=axes, keepdims=True)
    # Keras' form becomes SQUARED_DIFFERENCE, which int8 throughout leaves in float32, between a
    # DEQUANTIZE and a QUANTIZE.
    variance = tf.reduce_mean(tf.pow(centred, 2.0), axis=axes, keepdims=True)
    return centred / tf.sqrt(variance + epsilon)


def _write_file(file: Path, model: Any, about: Description) -> None:
    (graph,), (signature,) = model.subgraphs, model.signatureDefs
    tensors = {
        each.name.decode(): each.tensorIndex for each in (*signature.inputs, *signature.outputs)
    }
    for name, index in tensors.items():
        graph.tensors[index].name = name.encode()
    graph.outputs = [tensors[name] for name in about.outputs]
    model.description = f"{about.name}, written by keras-vit {about.keras_vit}".encode()
    buffer, field = schema.BufferT(), schema.MetadataT()
    buffer.data = np.frombuffer(make_metadata(about), np.uint8)
    field.name, field.buffer = METADATA, len(model.buffers)
    model.buffers.append(buffer)
    model.metadata = [*(model.metadata or ()), field]
    weights = sum(len(each.data) for each in model.buffers if each.data is not None)
    builder = flatbuffers.Builder(2**20 + weights + weights // 100)  # it need not grow
    builder.Finish(model.Pack(builder), b"TFL3")
    with file.open("wb") as stream:
        stream.write(memoryview(builder.Bytes)[builder.Head() :])
    texts = {runners.DESCRIPTION: json.dumps(about.to_dict(), indent=1)}
    if about.labels:
        texts[_LABELS] = "".join(f"{label}\n" for label in about.labels)
    with zipfile.ZipFile(file, "a") as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name, _MADE), text)


def make_metadata(about: Description) -> bytes:
    """Makes the metadata: of the image its colours, size and scaling, of each output its labels.

    The mean and deviation are those of the schema, (pixel - mean) / deviation of pixels 0..255.
    """
    low, high = about.input_range
    is_pixels = about.takes == "pixels"
    mean = [0.0 if is_pixels else 255 * value for value in about.image_mean]
    deviation = [1.0 if is_pixels else 255 * value for value in about.image_std]
    height, width, _ = about.image_shape
    size = {0: ("Uint32", width), 1: ("Uint32", height)}
    colours = ("Int8", _COLOURS.get(about.colours, 0))
    smooths = " that smooths where they shrink" * about.antialias
    seen = f"crop_pct={about.crop_pct:g}, crop_mode={about.crop_mode!r}"
    image = {
        0: "images",
        1: f"{about.colours} images, resized by a {about.interpolation} filter{smooths}; {seen}.",
        3: {0: ("Uint8", _IMAGE), 1: {0: colours, 1: size}},
        4: [{0: ("Uint8", _NORMALIZATION), 1: {0: mean, 1: deviation}}],
        5: {0: [high], 1: [low]},
    }
    texts = {
        "logits": "the classifier's output",
        "probabilities": f"{about.activation} of the logits",
        "features": "what the network makes of an image before its classifier",
        "values": "the model's numbers",
    }
    labels = [{0: _LABELS, 1: "one class a line", 2: ("Int8", _AXIS_LABELS)}]
    outputs: list[dict[int, Any]] = [
        {0: name, 1: texts[name], 3: {0: ("Uint8", _FEATURE), 1: {}}}
        | ({6: labels} if about.labels and name != "features" else {})
        for name in about.outputs
    ]
    root: dict[int, Any] = {
        0: about.name,
        1: f"A Vision Transformer, written by keras-vit {about.keras_vit}.",
        2: about.weights_sha256,
        3: [{2: [image], 3: outputs}],
        6: [{0: runners.DESCRIPTION, 1: "all of this, and the source, as JSON"}],
        7: _PARSER_VERSION,
    }
    builder = flatbuffers.Builder(1024)
    builder.Finish(_pack(builder, root), IDENTIFIER)
    return bytes(builder.Output())


def _pack(builder: Any, value: Any) -> int:
    """Writes text, floats, a table by numbers of fields, or tables; returns the offset."""
    if isinstance(value, str):
        return int(builder.CreateString(value))
    if isinstance(value, list) and isinstance(value[0], float):
        return int(builder.CreateNumpyVector(np.array(value, np.float32)))
    if isinstance(value, list):
        offsets = [_pack(builder, each) for each in value]
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        return int(builder.EndVector())
    inside = {
        number: each if isinstance(each, tuple) else ("UOffsetTRelative", _pack(builder, each))
        for number, each in value.items()
    }
    builder.StartObject(max(inside, default=-1) + 1)
    for number, (kind, each) in inside.items():
        getattr(builder, f"Prepend{kind}Slot")(number, each, 0)
    return int(builder.EndObject())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What rounding one kernel costs.

    Attributes:
        kernel: its path.
        error: the mean square error of the answers with this kernel alone rounded.
        size: its elements, of which each takes three bytes more in float32.
    """

    kernel: str
    error: float
    size: int


def measure(exportable: Exportable, row: Format, gate: Gate) -> list[Cost]:
    """Measures the cost of each kernel of the dense products.

    The errors of several kernels nearly add up, as they have little to do with each other. Of the
    gate the first images are taken.

    Raises:
        ValueError: the kernels have no names.
    """
    config = exportable.written_config
    if config is None:
        raise ValueError("Only the kernels of a network like the published ones have names.")
    products = sum(weight.path.endswith("/kernel") for weight in exportable.network.weights)
    work = products * config.num_tokens * exportable.parameter_bytes / 4
    images = gate.images[: int(np.clip(WORK / work, *COUNTS))]
    module = _Rounding(exportable, row, config=config, batch_size=len(images))

    def answer(place: int = -1) -> np.ndarray:
        module.chosen.assign(place)
        return agreement.centred(gate, np.asarray(module.call(images)[gate.outputs[0]]))

    plain = answer()
    return [
        Cost(kernel=kernel, error=float(np.mean(np.square(answer(place) - plain))), size=size)
        for place, (kernel, size) in enumerate(module.sizes.items())
    ]


def choose(costs: Sequence[Cost], *, share: float) -> tuple[str, ...]:
    """Returns the kernels to keep in float32, so that a share of the mean square error is left.

    It takes first what costs the most for its size, and gives back what later ones make up for.
    """
    left = sum(cost.error for cost in costs)
    most, kept = share * left, []
    for cost in sorted(costs, key=lambda each: each.error / each.size, reverse=True):
        if left <= most:
            break
        kept.append(cost)
        left -= cost.error
    for cost in sorted(kept, key=lambda each: each.error):
        if left + cost.error <= most:  # what came later makes up for it
            kept.remove(cost)
            left += cost.error
    return tuple(cost.kernel for cost in kept)


def excess(checks: Iterable[Check]) -> float:
    """Returns by how many times the worst failed check exceeds its limit; 1 if none failed.

    Infinite where no rounding is at fault: an answer that is no number, or a check of another kind.
    """
    worst = 1.0
    for check in checks:
        if check.passed:
            continue
        if not isinstance(check.measured, float) or not isinstance(check.limit, float):
            return float("inf")
        # Shares of images say only that it is too much.
        ratio = check.measured / check.limit if check.measured > check.limit else 1 / AIM
        worst = max(worst, ratio)
    return worst


class _Rounding(EdgeForward):
    """The forward pass, in which the `chosen` one of the kernels in `sizes` is rounded."""

    def __init__(
        self, exportable: Exportable, row: Format, *, config: ViTConfig, batch_size: int
    ) -> None:
        super().__init__(exportable, config=config, batch_size=batch_size)
        self._row, self.chosen = row, tf.Variable(-1)
        rounds_images = row.runtime == "tflite" and row.products == "int8"
        self.sizes = {
            path: int(np.prod(value.shape))
            for path, value in self.arrays.items()
            if path.endswith("/kernel")
            and np.prod(value.shape) >= MIN_ELEMENTS
            and (len(value.shape) == 2 or rounds_images)
        }
        if row.runtime == "tflite":
            self._fold_norms()

    def _fold_norms(self) -> None:
        """Takes the factor of a normalisation into the next kernel, as TFLite's converter does."""
        for norm, path in (("attention_norm", "attention/qkv"), ("mlp_norm", "mlp/fc1")):
            for block in (f"block_{index}" for index in range(self.config.num_layers)):
                gamma, beta = (self.arrays[f"{block}/{norm}/{n}"] for n in ("gamma", "beta"))
                kernel = self.arrays[f"{block}/{path}/kernel"]
                bias = self.arrays[f"{block}/{path}/bias"]
                bias.assign_add(tf.linalg.matvec(kernel, beta, transpose_a=True))
                kernel.assign(kernel * gamma[:, None])
                gamma.assign(tf.ones_like(gamma))
                beta.assign(tf.zeros_like(beta))

    def product(self, multiply: Callable[[Any, Any], Any], x: Any, path: str) -> Any:
        kernel, kernels = self.arrays[f"{path}/kernel"], list(self.sizes)
        if f"{path}/kernel" in kernels:  # in one graph: operation by operation is slower
            x, kernel = tf.cond(
                self.chosen == kernels.index(f"{path}/kernel"),
                lambda: self._rounded(x, kernel),
                lambda: (x, tf.convert_to_tensor(kernel)),
            )
        return multiply(x, kernel)

    def _rounded(self, x: Any, kernel: Any) -> tuple[Any, Any]:
        rounds_inputs, is_onnx = self._row.products == "int8", self._row.runtime == "onnx"
        axes = list(range(len(kernel.shape) - 1))
        most = tf.reduce_max(tf.abs(kernel), axis=axes, keepdims=True)
        kernel = _round(kernel, most / (_ONNX_LEVELS if rounds_inputs and is_onnx else _LEVELS))
        if rounds_inputs:
            # One scale for all in ONNX Runtime, in LiteRT for each row, or image.
            rows = None if is_onnx else range(1, len(x.shape))
            low = tf.minimum(tf.reduce_min(x, axis=rows, keepdims=True), 0.0)
            high = tf.maximum(tf.reduce_max(x, axis=rows, keepdims=True), 0.0)
            x = _round(x, (high - low) / 255)
        return x, kernel


def _round(values: Any, scale: Any) -> Any:
    return tf.round(tf.math.divide_no_nan(values, scale)) * scale
