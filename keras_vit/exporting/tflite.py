"""Writes TFLite files: float32, small weights, products of int8, or int8 throughout."""

import functools
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

from keras_vit.backend.tensorflow import portable_forms
from keras_vit.config import ViTConfig
from keras_vit.exporting import description, savedmodel, tflite_metadata, tflite_rounding
from keras_vit.exporting.rebuild import Exportable, folded_arrays
from keras_vit.layers.resnet import GROUP_NORM_EPSILON, GROUPS

FORMATS = ("tflite", *tflite_rounding.FORMATS, "tflite-int8", "tflite-int8-full")
SIGNATURE = "serving_default"

# Bytes of a weight over the four that it has in float32.
_SHARES = {"tflite": 1.0, "tflite-fp16": 0.5}
_INT8_SHARE = 0.25


class EdgeForward(tf.Module):
    """Computes the original model's outputs for batches of a fixed size.

    Args:
        exportable: a Vision Transformer with nothing around it.
        config: its config.
        batch_size: images in a batch.

    Attributes:
        products: the elements of each kernel, in the order of the products and convolutions.
    """

    def __init__(self, exportable: Exportable, *, config: ViTConfig, batch_size: int) -> None:
        super().__init__(name="edge")
        self._exportable = exportable
        self._config = config
        self._batch = batch_size
        self.products: dict[str, int] = {}
        arrays = folded_arrays(exportable.network, config)
        for path in {"patch_encoder/prefix", "pooling/query"} & set(arrays):
            arrays[path] = np.repeat(arrays[path], batch_size, axis=0)
        self._weights = {path: tf.Variable(value) for path, value in arrays.items()}
        self.call = tf.function(
            self._outputs,
            autograph=False,
            input_signature=[
                tf.TensorSpec((batch_size, *exportable.image_shape), tf.float32, name="images")
            ],
        )

    def _outputs(self, images: Any) -> dict[str, Any]:
        exportable = self._exportable
        features, output = self._network(exportable.from_original(images))
        if exportable.activation is None:
            return exportable.named({"features": output})
        return exportable.named({"logits": output, "features": features})

    def _network(self, x: Any) -> tuple[Any, Any]:
        """Returns the pooled tokens, and the network's output."""
        config = self._config
        if config.resnet_layers is not None:
            x = self._stem(x)
        x = self._tokens(x)  # (B, N, D)
        for index in range(config.num_layers):
            is_last = index == config.num_layers - 1
            x = self._block(x, f"block_{index}", only_first=is_last and config.pooling == "token")
        if not config.norm_after_pooling:
            x = self._layer_norm(x, "encoder_norm")
        x = self._pool(x)
        if config.norm_after_pooling and config.pooling is not None:
            x = self._layer_norm(x, "pooling_norm")
        features = x
        if config.representation_dim is not None:
            x = self._dense(x, "representation")
            x = x if config.representation_activation is None else tf.tanh(x)
        return features, x if config.classes is None else self._dense(x, "head")

    def _tokens(self, x: Any) -> Any:
        config, size = self._config, self._config.patch_size
        x = self._convolve(x, "patch_encoder/projection", stride=size, padding="VALID")
        x = x + self._weights["patch_encoder/projection/bias"]
        x = tf.reshape(x, (self._batch, -1, config.hidden_dim))
        if "patch_encoder/position_embedding" in self._weights:
            x = x + self._weights["patch_encoder/position_embedding"]
        if "patch_encoder/prefix" in self._weights:
            x = tf.concat([self._weights["patch_encoder/prefix"], x], axis=1)
        return self._layer_norm(x, "embedding_norm") if config.embedding_norm else x

    def _block(self, x: Any, path: str, *, only_first: bool) -> Any:
        """One encoder block; with `only_first` it computes the class token's row alone."""
        qkv = self._dense(self._layer_norm(x, f"{path}/attention_norm"), f"{path}/attention/qkv")
        query, key, value = tf.split(qkv, 3, axis=-1)  # (B, N, D) each
        if only_first:
            query, x = query[:, :1], x[:, :1]
        x = x + self._dense(self._attention(query, key, value), f"{path}/attention/out")
        return x + self._mlp(self._layer_norm(x, f"{path}/mlp_norm"), f"{path}/mlp")

    def _attention(self, query: Any, key: Any, value: Any) -> Any:
        """Attention of queries that include the scale."""
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
        x = self._dense(x, f"{path}/fc1")
        if self._config.activation == "quick_gelu":
            x = x * tf.sigmoid(1.702 * x)
        else:
            x = tf.nn.gelu(x, self._config.activation == "gelu_tanh")
        return self._dense(x, f"{path}/fc2")

    def _dense(self, x: Any, path: str) -> Any:
        kernel, bias = self._weights[f"{path}/kernel"], self._weights[f"{path}/bias"]
        self.products[f"{path}/kernel"] = int(np.prod(kernel.shape))
        rows = tf.matmul(tf.reshape(x, (-1, x.shape[-1])), kernel) + bias
        return tf.reshape(rows, (*x.shape[:-1], kernel.shape[-1]))

    def _layer_norm(self, x: Any, path: str) -> Any:
        centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.pow(centred, 2.0), axis=-1, keepdims=True)
        x = centred / tf.sqrt(variance + self._config.layer_norm_epsilon)
        return x * self._weights[f"{path}/gamma"] + self._weights[f"{path}/beta"]

    def _stem(self, x: Any) -> Any:
        x = self._group_norm(self._convolve(x, "stem/root_conv", stride=2), "stem/root_norm")
        x = tf.nn.max_pool2d(tf.nn.relu(x), 3, 2, "SAME")
        for stage, units in enumerate(self._config.resnet_layers or ()):
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                x = self._unit(x, f"stem/stage_{stage}_unit_{unit}", stride=stride)
        return x

    def _unit(self, x: Any, path: str, *, stride: int) -> Any:
        shortcut = x
        if f"{path}/projection/kernel" in self._weights:
            shortcut = self._convolve(x, f"{path}/projection", stride=stride)
            shortcut = self._group_norm(shortcut, f"{path}/projection_norm")
        for place, step in ((1, 1), (2, stride), (3, 1)):
            x = self._convolve(x, f"{path}/conv{place}", stride=step)
            x = self._group_norm(x, f"{path}/norm{place}")
            if place < 3:
                x = tf.nn.relu(x)
        return tf.nn.relu(shortcut + x)

    def _convolve(self, x: Any, path: str, *, stride: int, padding: str = "SAME") -> Any:
        kernel = self._weights[f"{path}/kernel"]
        self.products[f"{path}/kernel"] = int(np.prod(kernel.shape))
        return tf.nn.conv2d(x, kernel, stride, padding)

    def _group_norm(self, x: Any, path: str) -> Any:
        _, height, width, channels = x.shape
        grouped = tf.reshape(x, (self._batch, height * width, GROUPS, channels // GROUPS))
        centred = grouped - tf.reduce_mean(grouped, axis=(1, 3), keepdims=True)
        variance = tf.reduce_mean(tf.pow(centred, 2.0), axis=(1, 3), keepdims=True)
        normed = tf.reshape(centred / tf.sqrt(variance + GROUP_NORM_EPSILON), x.shape)
        return normed * self._weights[f"{path}/gamma"] + self._weights[f"{path}/beta"]


def write_tflite(
    exportable: Exportable,
    files: dict[str, Path],
    *,
    about: description.Description,
    batch_size: int = 1,
    calibration: Sequence[np.ndarray] = (),
    floats: Mapping[str, Collection[str]] | None = None,
) -> dict[str, int]:
    """Writes a model in one or more TFLite formats, with built-in operators only.

    Args:
        exportable: the rebuilt model.
        files: where each of `FORMATS` goes.
        about: what the files say of themselves, in their metadata.
        batch_size: the fixed number of images in a batch; delegates want it fixed.
        calibration: images (H, W, C) as the original model takes them, for "tflite-int8-full".
        floats: the kernels that stay float32 in a format that rounds them to int8.

    Returns:
        The bytes of each file's weights.
    """
    sizes = {}
    with tempfile.TemporaryDirectory(prefix="keras-vit-") as folder, portable_forms():
        products = _save(exportable, folder, batch_size=batch_size)

        @functools.cache
        def convert(name: str) -> bytes:
            converter = tf.lite.TFLiteConverter.from_saved_model(folder, [SIGNATURE])
            _configure(converter, name, batch_size=batch_size, calibration=calibration)
            content: bytes = converter.convert()
            return content

        for name, file in files.items():
            stays = (floats or {}).get(name, ())
            places = [place for place, path in enumerate(products) if path in stays]
            if name in tflite_rounding.FORMATS:
                model = tflite_rounding.rounded(convert("tflite"), name, floats=places)
            elif places:
                whole = convert("tflite")
                model = tflite_rounding.restored(convert(name), whole, places=places)
            else:
                model = schema.ModelT.InitFromPackedBuf(convert(name), 0)
            tflite_metadata.write(file, model, about)
            share = _SHARES.get(name, _INT8_SHARE)
            more = 4 * (1 - share) * sum(products[path] for path in stays)
            sizes[name] = int(share * exportable.parameter_bytes + more)
    return sizes


def _save(exportable: Exportable, folder: str, *, batch_size: int) -> dict[str, int]:
    """Saves what is to be converted, and returns the elements of each kernel, in their order.

    The module and its weights are gone when the converter makes copies of its own.
    """
    module = _module(exportable, batch_size=batch_size)
    savedmodel.save_module(module, folder, {SIGNATURE: module.call})
    return dict(getattr(module, "products", {}))


def _module(exportable: Exportable, *, batch_size: int) -> Any:
    if exportable.written_config is not None:
        return EdgeForward(exportable, config=exportable.written_config, batch_size=batch_size)
    # The converter's from_concrete_functions loses the weights or the signature.
    module = tf.Module(name="edge")
    module.weights = [weight.value for weight in exportable.network.weights]
    spec = tf.TensorSpec((batch_size, *exportable.image_shape), tf.float32, name="images")
    module.call = tf.function(exportable.answer, autograph=False, input_signature=[spec])
    return module


def _configure(
    converter: Any, name: str, *, batch_size: int, calibration: Sequence[np.ndarray]
) -> None:
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
    converter.exclude_conversion_metadata = True  # which would pack the whole file once more
    if name.startswith("tflite-int8"):
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if name == "tflite-int8-full":
        count = len(calibration) // batch_size * batch_size
        batches = np.stack(calibration[:count]).reshape(-1, batch_size, *calibration[0].shape)
        converter.representative_dataset = lambda: ([batch] for batch in batches)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
