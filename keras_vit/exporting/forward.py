"""The forward pass of exported files, written once over a set of operations.

ONNX and TFLite files hold the published networks and some departures from them: a field of
`ViTConfig` says by its metadata that it is held, and changes here what is computed.

Shapes: B images (B, rows, columns, channels), in the layout that the operations have; N tokens
(B, N, D); H heads of width K = D / H.
"""

from typing import Any, Protocol

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.layers import PatchEncoder
from keras_vit.layers.resnet import STANDARDIZATION_EPSILON


class Operations(Protocol):
    """What a file format computes with; a value is a tensor, or the name of one.

    By a path into `arrays`, `dense`, `convolve` (with "same" padding), `layer_norm` and
    `group_norm` take their weights, and `weight` one alone: repeated for each image of `like`. Of
    an image `flatten` makes tokens, and `max_pool` halves it by the largest of 3 x 3. In `reshape`
    0 leaves an axis as it is. `tokens` cuts some out, `concat` puts some before others, `mean` is
    over all, and `squeeze` makes (B, D) of one.

    Attributes:
        config: of the network.
        arrays: its weights, from `constant_folded_tokens`.
    """

    config: ViTConfig
    arrays: dict[str, Any]

    def weight(self, path: str, *, like: Any = None) -> Any: ...
    def dense(self, x: Any, path: str, /) -> Any: ...
    def layer_norm(self, x: Any, path: str, /) -> Any: ...
    def activate(self, x: Any, kind: str, /) -> Any: ...
    def add(self, x: Any, y: Any, /) -> Any: ...
    def matmul(self, x: Any, y: Any, /) -> Any: ...
    def softmax(self, x: Any, /) -> Any: ...
    def split(self, x: Any, count: int, /) -> Any: ...
    def transpose(self, x: Any, order: tuple[int, ...], /) -> Any: ...
    def reshape(self, x: Any, shape: tuple[int, ...], /) -> Any: ...
    def tokens(self, x: Any, start: int, stop: int, /) -> Any: ...
    def concat(self, x: Any, y: Any, /) -> Any: ...
    def mean(self, x: Any, /) -> Any: ...
    def squeeze(self, x: Any, /) -> Any: ...
    def convolve(self, x: Any, path: str, /, *, stride: int) -> Any: ...
    def max_pool(self, x: Any, /) -> Any: ...
    def group_norm(self, x: Any, path: str, /) -> Any: ...
    def flatten(self, x: Any, /) -> Any: ...


def forward(ops: Operations, x: Any) -> dict[str, Any]:
    """Computes the outputs of a network for normalised images: logits and features, or features."""
    config = ops.config
    if config.resnet_layers is not None:
        x = ops.group_norm(ops.convolve(x, "stem/root_conv", stride=2), "stem/root_norm")
        x = ops.max_pool(ops.activate(x, "relu"))
        for stage, units in enumerate(config.resnet_layers):
            for unit in range(units):
                stride = 2 if stage > 0 and unit == 0 else 1
                x = _unit(ops, x, f"stem/stage_{stage}_unit_{unit}", stride=stride)
    x = ops.flatten(ops.convolve(x, "patch_encoder/projection", stride=config.patch_size))
    if "patch_encoder/position_embedding" in ops.arrays:
        x = ops.add(x, ops.weight("patch_encoder/position_embedding"))
    if "patch_encoder/prefix" in ops.arrays:
        x = ops.concat(ops.weight("patch_encoder/prefix", like=x), x)
    if config.embedding_norm:
        x = ops.layer_norm(x, "embedding_norm")
    for index in range(config.num_layers):
        path = f"block_{index}"
        qkv = ops.dense(ops.layer_norm(x, f"{path}/attention_norm"), f"{path}/attention/qkv")
        query, key, value = ops.split(qkv, 3)
        if index == config.num_layers - 1 and config.pooling == "token":
            query, x = (ops.tokens(each, 0, 1) for each in (query, x))  # no other row is read
        x = ops.add(x, ops.dense(_attention(ops, query, key, value), f"{path}/attention/out"))
        x = ops.add(x, _mlp(ops, ops.layer_norm(x, f"{path}/mlp_norm"), f"{path}/mlp"))
    if not config.norm_after_pooling:
        x = ops.layer_norm(x, "encoder_norm")
    x = _pool(ops, x)  # (B, D), or (B, N, D) without pooling
    if config.norm_after_pooling and config.pooling is not None:
        x = ops.layer_norm(x, "pooling_norm")
    features = x
    if config.representation_dim is not None:
        x = ops.dense(x, "representation")
        if config.representation_activation is not None:
            x = ops.activate(x, config.representation_activation)
    if config.classes is None:
        return {"features": x}
    x = ops.dense(x, "head")
    has_classes = config.resolved_problem_type != "regression"
    return {"logits": x, "features": features} if has_classes else {"values": x}


def _attention(ops: Operations, query: Any, key: Any, value: Any) -> Any:
    """Attention of queries that include the scale."""
    heads, width = ops.config.num_heads, ops.config.hidden_dim

    def split(x: Any, order: tuple[int, ...]) -> Any:
        return ops.transpose(ops.reshape(x, (0, 0, heads, width // heads)), order)

    logits = ops.matmul(split(query, (0, 2, 1, 3)), split(key, (0, 2, 3, 1)))  # (B, H, N, N)
    x = ops.matmul(ops.softmax(logits), split(value, (0, 2, 1, 3)))
    return ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (0, 0, width))


def _mlp(ops: Operations, x: Any, path: str) -> Any:
    x = ops.activate(ops.dense(x, f"{path}/fc1"), ops.config.activation)
    return ops.dense(x, f"{path}/fc2")


def _pool(ops: Operations, x: Any) -> Any:
    config = ops.config
    if config.pooling is None:
        return x
    if config.pooling == "avg":
        prefix = config.num_prefix_tokens
        return ops.mean(ops.tokens(x, prefix, config.num_tokens) if prefix else x)
    if config.pooling == "map":
        query = ops.weight("pooling/query", like=x)
        key, value = ops.split(ops.dense(x, "pooling/key_value"), 2)
        x = ops.dense(_attention(ops, query, key, value), "pooling/out")
        x = ops.add(x, _mlp(ops, ops.layer_norm(x, "pooling/norm"), "pooling/mlp"))
    return ops.squeeze(x)


def _unit(ops: Operations, x: Any, path: str, *, stride: int) -> Any:
    shortcut = x
    if f"{path}/projection/kernel" in ops.arrays:
        shortcut = ops.convolve(x, f"{path}/projection", stride=stride)
        shortcut = ops.group_norm(shortcut, f"{path}/projection_norm")
    for place, step in ((1, 1), (2, stride), (3, 1)):
        x = ops.group_norm(
            ops.convolve(x, f"{path}/conv{place}", stride=step), f"{path}/norm{place}"
        )
        if place < 3:
            x = ops.activate(x, "relu")
    return ops.activate(ops.add(shortcut, x), "relu")


def constant_folded_tokens(network: keras.Model, config: ViTConfig) -> dict[str, np.ndarray]:
    """Returns the float32 weights by path, with constant computations folded into them.

    The attention scale 1/sqrt(K) is in the query's kernel and bias, layer scale in the last kernel
    and bias of its branch, and the stem's kernels are standardised. `patch_encoder/prefix` holds
    the tokens before the patches with their positions, (1, count, D), and
    `patch_encoder/position_embedding` the patches' positions (1, N, D). `pooling/query` (1, 1, D)
    replaces the probe and its projection. The patch kernel is that of a convolution, (P, P, C, D).
    """
    arrays = {
        weight.path: np.asarray(keras.ops.convert_to_numpy(weight), np.float32)
        for weight in network.weights
    }
    width, patch = config.hidden_dim, "patch_encoder/projection/kernel"
    scale = np.float32((width // config.num_heads) ** -0.5)
    for path, value in arrays.items():
        layer, _, name = path.rpartition("/")
        if layer.endswith("attention/qkv"):
            parts = value[..., :width] * scale, value[..., width:]
            arrays[path] = np.concatenate(parts, axis=-1)
        elif layer == "pooling/query":
            arrays[path] = value * scale
        elif layer.startswith("stem/") and name == "kernel":
            # Folded constants are computed in float64 and rounded once, to float32.
            wide = value.astype(np.float64)
            deviation = wide.std(axis=(0, 1, 2)) + STANDARDIZATION_EPSILON
            arrays[path] = ((wide - wide.mean(axis=(0, 1, 2))) / deviation).astype(np.float32)
    arrays[patch] = arrays[patch].reshape(config.patch_size, config.patch_size, -1, width)
    for index in range(config.num_layers if config.layer_scale is not None else 0):
        for branch, last in (("attention", "out"), ("mlp", "fc2")):
            factor = arrays.pop(f"block_{index}/{branch}_scale")
            for name in ("kernel", "bias"):
                arrays[f"block_{index}/{branch}/{last}/{name}"] *= factor
    _fold_positions(arrays, network.get_layer("patch_encoder"))
    if config.pooling == "map":
        probe = arrays.pop("pooling/probe").astype(np.float64)
        query = probe @ arrays.pop("pooling/query/kernel") + arrays.pop("pooling/query/bias")
        arrays["pooling/query"] = query.astype(np.float32)
    return arrays


def _fold_positions(arrays: dict[str, np.ndarray], encoder: PatchEncoder) -> None:
    """Folds what the patch encoder adds to its tokens into two arrays."""
    path = encoder.path
    tokens = [arrays.pop(f"{path}/{name}") for name, count in encoder.prefix if count]
    count = sum(each.shape[1] for each in tokens)
    for name in [name for name in arrays if name.startswith(f"{path}/position_")]:
        arrays.pop(name)
    if encoder.position_kind is not None:
        table = np.asarray(keras.ops.convert_to_numpy(encoder.position_table()), np.float32)
        tokens = [np.concatenate(tokens, axis=1) + table[:, :count]] if tokens else []
        arrays[f"{path}/position_embedding"] = table[:, count:]
    if tokens:
        arrays[f"{path}/prefix"] = np.concatenate(tokens, axis=1)
