"""Writes TFLite files: float32, float16 weights, dynamic-range int8, or int8 throughout."""

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema
from tensorflow.lite.tools import flatbuffer_utils

from keras_vit.backend.tensorflow import portable_forms
from keras_vit.config import ViTConfig
from keras_vit.exporting.rebuild import Exportable, folded_arrays
from keras_vit.layers.resnet import GROUP_NORM_EPSILON, GROUPS

SMALLEST = 1024  # elements from which a tensor counts as large
_KERNELS = (schema.BuiltinOperator.CONV_2D, schema.BuiltinOperator.FULLY_CONNECTED)
_IMAGE_CHANNELS = 4  # a kernel of no more input channels reads the image
_FLOAT16_VERSION = 3  # of DEQUANTIZE


def store_as_float16(content: bytes) -> bytes:
    """Returns the TFLite file with the kernels of its dense products and convolutions halved."""
    model = flatbuffer_utils.convert_bytearray_to_object(bytearray(content))
    graph = model.subgraphs[0]
    opcode = len(model.operatorCodes)
    model.operatorCodes.append(_dequantize_code())
    kernels = {
        int(operator.inputs[1])
        for operator in graph.operators
        if _kind(model.operatorCodes[operator.opcodeIndex]) in _KERNELS
    }
    elsewhere = {
        tensor.buffer for index, tensor in enumerate(graph.tensors) if index not in kernels
    }
    added, halved = [], set()
    for index in sorted(kernels):
        tensor = graph.tensors[index]
        buffer = model.buffers[tensor.buffer]
        if buffer.data is None or tensor.buffer in elsewhere or not _is_large_kernel(tensor):
            continue
        if tensor.buffer not in halved:  # equal kernels may share one
            buffer.data = _halved(buffer.data)
            halved.add(tensor.buffer)
        stored = copy.copy(tensor)
        stored.type, stored.name = schema.TensorType.FLOAT16, tensor.name + b"_float16"
        tensor.buffer = 0  # the empty one: its values are computed from now on
        graph.tensors.append(stored)
        added.append(_operator(opcode, len(graph.tensors) - 1, index))
    graph.operators = added + list(graph.operators)
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


class EdgeForward(tf.Module):
    """Answers like the original model, for batches of one fixed size.

    Args:
        exportable: a Vision Transformer with nothing around it.
        batch_size: images in a batch.
    """

    def __init__(self, exportable: Exportable, *, config: ViTConfig, batch_size: int) -> None:
        super().__init__(name="edge")
        self._exportable = exportable
        self._config = config
        self._batch = batch_size
        arrays = folded_arrays(exportable.network, config)
        shaped = _reshaped(arrays, config, batch_size=batch_size)
        self._weights = {path: tf.Variable(value) for path, value in shaped.items()}
        self.call = tf.function(
            self._answer,
            autograph=False,
            input_signature=[
                tf.TensorSpec((batch_size, *exportable.image_shape), tf.float32, name="images")
            ],
        )

    def _answer(self, images: Any) -> dict[str, Any]:
        return self._exportable.named(self._network(self._exportable.from_original(images)))

    def _network(self, x: Any) -> Any:
        config = self._config
        if config.resnet_layers is not None:
            x = self._stem(x)
        x = self._tokens(x)  # (B, N, D)
        for index in range(config.num_layers):
            is_last = index == config.num_layers - 1
            x = self._block(x, f"block_{index}", only_first=is_last and config.pooling == "token")
        x = self._layer_norm(x, "encoder_norm")
        x = self._pool(x)
        if config.representation_dim is not None:
            x = tf.tanh(self._dense(x, "representation"))
        return x if config.classes is None else self._dense(x, "head")

    def _tokens(self, x: Any) -> Any:
        config, size = self._config, self._config.patch_size
        x = tf.nn.conv2d(x, self._weights["patch_encoder/projection/kernel"], size, "VALID")
        x = x + self._weights["patch_encoder/projection/bias"]
        x = tf.reshape(x, (self._batch, -1, config.hidden_dim))
        x = x + self._weights["patch_encoder/position_embedding"]
        if not config.class_token:
            return x
        return tf.concat([self._weights["patch_encoder/class_token"], x], axis=1)

    def _block(self, x: Any, path: str, *, only_first: bool) -> Any:
        """One encoder block; of the last one only the class token's row may be wanted."""
        qkv = self._dense(self._layer_norm(x, f"{path}/attention_norm"), f"{path}/attention/qkv")
        query, key, value = tf.split(qkv, 3, axis=-1)  # (B, N, D) each
        if only_first:
            query, x = query[:, :1], x[:, :1]
        x = x + self._dense(self._attention(query, key, value), f"{path}/attention/out")
        return x + self._mlp(self._layer_norm(x, f"{path}/mlp_norm"), f"{path}/mlp")

    def _attention(self, query: Any, key: Any, value: Any) -> Any:
        """Attention of queries that carry the scale already."""
        query, key, value = map(self._split_heads, (query, key, value))
        weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True))  # (B, H, N, N)
        x = tf.transpose(tf.matmul(weights, value), (0, 2, 1, 3))  # (B, N, H, K)
        return tf.reshape(x, (self._batch, -1, self._config.hidden_dim))

    def _split_heads(self, x: Any) -> Any:
        heads, width = self._config.num_heads, self._config.hidden_dim
        x = tf.reshape(x, (self._batch, x.shape[1], heads, width // heads))
        return tf.transpose(x, (0, 2, 1, 3))  # (B, H, N, K)

    def _pool(self, x: Any) -> Any:
        config = self._config
        if config.pooling == "token":
            return tf.reshape(x, (self._batch, config.hidden_dim))
        if config.pooling == "avg":
            return tf.reduce_mean(x[:, config.num_prefix_tokens :], axis=1)
        if config.pooling == "map":
            key, value = tf.split(self._dense(x, "pooling/key_value"), 2, axis=-1)
            x = self._attention(self._weights["pooling/query"], key, value)  # (B, 1, D)
            x = self._dense(x, "pooling/out")
            x = x + self._mlp(self._layer_norm(x, "pooling/norm"), "pooling/mlp")
            return tf.reshape(x, (self._batch, config.hidden_dim))
        return x

    def _mlp(self, x: Any, path: str) -> Any:
        is_tanh = self._config.activation == "gelu_tanh"
        return self._dense(tf.nn.gelu(self._dense(x, f"{path}/fc1"), is_tanh), f"{path}/fc2")

    def _dense(self, x: Any, path: str) -> Any:
        kernel, bias = self._weights[f"{path}/kernel"], self._weights[f"{path}/bias"]
        rows = tf.matmul(tf.reshape(x, (-1, x.shape[-1])), kernel) + bias
        return tf.reshape(rows, (*x.shape[:-1], kernel.shape[-1]))

    def _layer_norm(self, x: Any, path: str) -> Any:
        centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.pow(centred, 2.0), axis=-1, keepdims=True)
        x = centred / tf.sqrt(variance + self._config.layer_norm_epsilon)
        return x * self._weights[f"{path}/gamma"] + self._weights[f"{path}/beta"]

    def _stem(self, x: Any) -> Any:
        x = self._group_norm(self._convolution(x, "stem/root_conv", stride=2), "stem/root_norm")
        x = tf.nn.max_pool2d(tf.nn.relu(x), 3, 2, "SAME")
        for stage, units in enumerate(self._config.resnet_layers or ()):
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                x = self._unit(x, f"stem/stage_{stage}_unit_{unit}", stride=stride)
        return x

    def _unit(self, x: Any, path: str, *, stride: int) -> Any:
        shortcut = x
        if f"{path}/projection/kernel" in self._weights:
            shortcut = self._convolution(x, f"{path}/projection", stride=stride)
            shortcut = self._group_norm(shortcut, f"{path}/projection_norm")
        for place, step in ((1, 1), (2, stride), (3, 1)):
            x = self._convolution(x, f"{path}/conv{place}", stride=step)
            x = self._group_norm(x, f"{path}/norm{place}")
            if place < 3:
                x = tf.nn.relu(x)
        return tf.nn.relu(shortcut + x)

    def _convolution(self, x: Any, path: str, *, stride: int) -> Any:
        return tf.nn.conv2d(x, self._weights[f"{path}/kernel"], stride, "SAME")

    def _group_norm(self, x: Any, path: str) -> Any:
        _, height, width, channels = x.shape
        grouped = tf.reshape(x, (self._batch, height * width, GROUPS, channels // GROUPS))
        centred = grouped - tf.reduce_mean(grouped, axis=(1, 3), keepdims=True)
        variance = tf.reduce_mean(tf.pow(centred, 2.0), axis=(1, 3), keepdims=True)
        normed = tf.reshape(centred / tf.sqrt(variance + GROUP_NORM_EPSILON), x.shape)
        return normed * self._weights[f"{path}/gamma"] + self._weights[f"{path}/beta"]


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
            file.write_bytes(store_as_float16(content) if name == "tflite-fp16" else content)


def _halved(data: Any) -> np.ndarray:
    floats = np.frombuffer(np.asarray(data, np.uint8).tobytes(), np.float32)
    return np.frombuffer(floats.astype(np.float16).tobytes(), np.uint8)


def _is_large_kernel(tensor: Any) -> bool:
    reads_image = len(tensor.shape) == 4 and tensor.shape[-1] <= _IMAGE_CHANNELS
    is_large = int(np.prod(tensor.shape)) >= SMALLEST
    return tensor.type == schema.TensorType.FLOAT32 and is_large and not reads_image


def _kind(code: Any) -> int:
    # Operators below 127 stand in the older, narrow field too.
    return max(int(code.builtinCode), int(code.deprecatedBuiltinCode))


def _dequantize_code() -> Any:
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
    code.version = _FLOAT16_VERSION
    return code


def _operator(opcode: int, source: int, target: int) -> Any:
    operator = schema.OperatorT()
    operator.opcodeIndex, operator.inputs, operator.outputs = opcode, [source], [target]
    operator.builtinOptionsType = schema.BuiltinOptions.DequantizeOptions
    operator.builtinOptions = schema.DequantizeOptionsT()
    return operator


def _reshaped(
    arrays: dict[str, np.ndarray], config: ViTConfig, *, batch_size: int
) -> dict[str, np.ndarray]:
    """The arrays in the shapes of this form: a convolution's patches, fixed tokens per image."""
    size, positions = config.patch_size, arrays["patch_encoder/position_embedding"]
    made = dict(arrays)
    kernel = made["patch_encoder/projection/kernel"]
    made["patch_encoder/projection/kernel"] = kernel.reshape(size, size, -1, config.hidden_dim)
    if config.class_token:
        first = made["patch_encoder/class_token"] + positions[:, :1]
        made["patch_encoder/class_token"] = np.repeat(first, batch_size, axis=0)
        made["patch_encoder/position_embedding"] = positions[:, 1:]
    if config.pooling == "map":
        query = made.pop("pooling/probe").astype(np.float64) @ made.pop("pooling/query/kernel")
        query = (query + made.pop("pooling/query/bias")).astype(np.float32)
        made["pooling/query"] = np.repeat(query, batch_size, axis=0)
    return made


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
