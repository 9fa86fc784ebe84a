"""The forward pass in the form that TFLite runs best, with the network's own weights.

Measured against a conversion of the Keras layers (benchmarks/export.py): rank 4 at most, one
FULLY_CONNECTED for each dense product, one GELU, no NEG and SQUARED_DIFFERENCE in the norms, which
integer kernels lack. Letters: B batch, N tokens, D hidden width, H heads, K = D/H, C channels.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.export.arrays import folded_arrays
from keras_vit.export.rebuild import Exportable
from keras_vit.layers.resnet import GROUP_NORM_EPSILON, GROUPS


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
