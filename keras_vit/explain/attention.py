"""What attends to what, from one recorded pass, and what the model has learned about patches.

Shapes: B images, H and W pixels in (B, H, W, channels), L blocks, otherwise H heads, N tokens
(prefix tokens first, then patches in row order), D hidden_dim, (h, w) the grid of patches.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.data import resize_image
from keras_vit.figures import Filters
from keras_vit.layers import AttentionPooling
from keras_vit.layers.attention import Change, recording
from keras_vit.model import Backbone, VisionTransformer, backbone_of, output_shape, position_layer

BATCH_SIZE = 8


def find_vit(model: keras.Model) -> Backbone:
    """Returns the one Vision Transformer that a model is or contains, however deep.

    Raises:
        ValueError: the model contains none, or more than one, or one for images of any size.
    """
    backbone = backbone_of(model)
    _ = backbone.config.image_size  # patches are laid out on its grid
    return backbone


def image_batches(model: keras.Model, images: Any) -> list[np.ndarray]:
    """Returns images in small batches, resampled to the size that the model takes.

    Raises:
        ValueError: the images are not of shape (B, H, W, channels).
    """
    images = np.asarray(images)
    if images.ndim != 4 or not len(images):
        raise ValueError(
            "Images have the shape (batch, height, width, channels), at least one of them; add an "
            f"axis to a single image: image[None]. Received: shape {images.shape}."
        )
    size = image_size(model)
    if size is not None and images.shape[1:3] != size:
        warnings.warn(
            f"The images are {sides(images.shape[1:3])}; they were resampled to {sides(size)}, the "
            "size that the model takes.",
            stacklevel=3,
        )
        images = np.asarray(resize_image(images, find_vit(model).config.resizing(size)))
    return [images[start : start + BATCH_SIZE] for start in range(0, len(images), BATCH_SIZE)]


def sides(size: Sequence[int]) -> str:
    """Returns (height, width) in words, the width first, as people say it."""
    return f"{size[1]} pixels wide and {size[0]} high"


def image_size(model: keras.Model) -> tuple[int, int] | None:
    """Returns the (height, width) that a model takes, or None if it says nothing about them."""
    shape = getattr(model, "input_shape", None)
    if not isinstance(shape, tuple) or len(shape) != 4 or None in shape[1:3]:
        return None
    return shape[1], shape[2]


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """What a model computed in one forward pass, as tensors.

    Attributes:
        config: of the Vision Transformer.
        blocks: the attention weights (B, H, N, N) of each block.
        pooling: those of attention pooling, (B, H, 1, N); empty without it.
        tokens: (B, N, D) after the last block.
        outputs: those of the model; with gradients in float32, and of a `VisionTransformer` its
            logits.
        backpropagate: from the gradient of a score with respect to `outputs` to those with respect
            to each of `blocks` and `pooling`; None where gradients were not asked for.
    """

    config: ViTConfig
    blocks: Sequence[Any]
    pooling: Sequence[Any]
    tokens: Any
    outputs: Any
    backpropagate: Any = None


def records(
    model: keras.Model, batches: Iterable[np.ndarray], *, gradients: int = 0
) -> Iterator[Record]:
    """Runs a model once for each batch, eagerly, and yields what it computed.

    What takes records one by one should not keep them: each holds the attention weights of all
    layers, with gradients all else that the backward pass needs.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        batches: images (B, H, W, channels) as that model takes them.
        gradients: how often `Record.backpropagate` will be called, of a classifier: called once, it
            gives the memory of each layer back as it goes.

    Raises:
        ValueError: a layer was not called, or only inside a compiled function; or gradients are
            wanted and the backend has none.
    """
    (config, vit), backend = find_vit(model), keras.backend.backend()
    blocks = [vit.get_layer(f"block_{index}") for index in range(config.num_layers)]
    pooling = _attention_pooling(vit)
    layers = [*(block.attention for block in blocks), *pooling, blocks[-1]]
    if gradients and backend not in ("tensorflow", "jax"):
        raise ValueError(
            f"Class relevance differentiates with TensorFlow or JAX. Received: {backend!r}; set "
            "KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax."
        )
    logits = "logits" if config.distillation_token else "head"
    is_whole = isinstance(model, VisionTransformer)
    has_logits = gradients and is_whole and config.classes
    # The softmax of a sure classifier is flat: its logits have the gradient.
    scorer = model.feature_extractor([logits]) if has_logits else model

    def scores(batch: np.ndarray, change: Change | None = None) -> tuple[Any, list[Any]]:
        outputs, values = run(scorer, batch, layers, change=change)
        outputs = outputs[logits] if has_logits else outputs
        is_one = hasattr(outputs, "shape")  # a model of several outputs is no classifier
        return keras.ops.cast(outputs, "float32") if is_one else outputs, values

    def record(outputs: Any, values: list[Any], backpropagate: Any = None) -> Record:
        *weights, tokens = values
        blocks, pooling = weights[: config.num_layers], weights[config.num_layers :]
        return Record(config, blocks, pooling, tokens, outputs, backpropagate)

    for batch in batches:
        if gradients:
            yield record(*_differentiate(scores, batch, layers, is_repeated=gradients > 1))
        else:
            yield record(*run(model, batch, layers))


def run(
    model: keras.Model,
    images: Any,
    layers: Sequence[keras.layers.Layer],
    *,
    change: Change | None = None,
) -> tuple[Any, list[Any]]:
    """Runs a model once, eagerly; returns its outputs, and what each of these layers computed.

    The model is not changed: it is as fast as before, and other threads may call it meanwhile.

    Raises:
        ValueError: a layer was not called, or only inside a compiled function.
    """
    with recording(*layers, change=change) as computed:
        outputs = model(images, training=False)
    silent = [layer.path for layer, values in computed.items() if not values]
    if silent:
        raise ValueError(
            f"The model {model.name!r} did not run its layer {silent[0]!r} eagerly, so nothing can "
            "be read from it; call the Vision Transformer outside of tf.function, or give it alone."
        )
    return outputs, [computed[layer][0] for layer in layers]


def _differentiate(
    scores: Callable[..., tuple[Any, list[Any]]],
    batch: np.ndarray,
    layers: Sequence[keras.layers.Layer],
    *,
    is_repeated: bool,
) -> tuple[Any, list[Any], Callable[[Any], Sequence[Any]]]:
    """Returns outputs, values, and what makes of the outputs' gradient that of each value."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape(persistent=is_repeated) as tape:
            outputs, values = scores(batch)
        options = {"unconnected_gradients": "zero"}
        return outputs, values, lambda gradient: tape.gradient(outputs, values, gradient, **options)
    import jax

    # JAX differentiates with respect to arguments: here to what is added to the values.
    def changed(changes: Sequence[Any]) -> tuple[Any, list[Any]]:
        added = dict(zip(layers, changes, strict=True))
        return scores(batch, lambda layer, value: value + added[layer])

    _, shapes = jax.eval_shape(lambda: scores(batch, lambda layer, value: value))
    nothing = [keras.ops.zeros(each.shape, each.dtype) for each in shapes]
    outputs, pull, values = jax.vjp(changed, nothing, has_aux=True)
    return outputs, values, lambda gradient: pull(gradient)[0]


def choose(selection: int | Sequence[int] | None, count: int, *, word: str) -> list[int]:
    """Returns the indices asked for: one, several, or None for all; -1 is the last.

    Raises:
        ValueError: there is no such layer or head.
    """
    if selection is None:
        return list(range(count))
    indices = [selection] if isinstance(selection, int) else list(selection)
    wrong = [index for index in indices if not -count <= index < count]
    if wrong or not indices:
        raise ValueError(
            f"There is no {word} {wrong[0] if wrong else indices!r}; the model has {count}, "
            f"numbered 0 to {count - 1}, or -1 for the last."
        )
    return [index % count for index in indices]


def to_numpy(tensor: Any) -> np.ndarray:
    """Returns a tensor of any precision as a float32 array."""
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32")))


def attention_weights(
    model: keras.Model,
    images: Any,
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
) -> np.ndarray:
    """Returns the attention weights of any layers and heads, from the model's own forward pass.

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=3, classes=5)
        >>> weights = attention_weights(VisionTransformer(config), np.zeros((1, 16, 24, 3)),
        ...                             layers=-1)
        >>> weights.shape
        (1, 1, 2, 7, 7)

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        images: (B, H, W, channels) as that model takes them; of another size they are resampled,
            with a warning.
        layers: which blocks, 0 the first, -1 the last; None for all.
        heads: which heads; None for all.

    Returns:
        (B, L, H, N, N): how much each token (second to last axis) takes from each (last axis); they
        sum to 1. The last tokens are the patches in row order; before them may stand, in this
        order, the class token, the distillation token and registers.

    Raises:
        ValueError: there is no such layer or head, or not one Vision Transformer in the model.
    """
    config = find_vit(model).config
    rows = choose(layers, config.num_layers, word="layer")
    columns = choose(heads, config.num_heads, word="head")

    def chosen(record: Record) -> np.ndarray:
        return np.stack([to_numpy(record.blocks[row]) for row in rows], axis=1)[:, :, columns]

    return np.concatenate(list(map(chosen, records(model, image_batches(model, images)))))


def pooling_attention(model: keras.Model, images: Any) -> np.ndarray:
    """Returns how much attention pooling takes from each token: (B, H, N), each head sums to 1.

    Raises:
        ValueError: the model does not pool by attention.
    """
    config, vit = find_vit(model)
    if not _attention_pooling(vit):
        pooling = None if config.pooling == "map" else config.pooling  # cut before it
        raise ValueError(
            'Only models with pooling="map" pool by attention. '
            f"Received: a model with pooling={pooling!r}."
        )
    passes = records(model, image_batches(model, images))
    return np.concatenate([to_numpy(each.pooling[0])[:, :, 0] for each in passes])


def attention_rollout(model: keras.Model, images: Any) -> np.ndarray:
    """Returns how much of each patch reaches the model's answer by way of attention.

    The weights are averaged over heads, mixed in halves with the identity for the residual
    connection, and multiplied through all layers (arXiv 2005.00928; arXiv 2010.11929, Figure 6).

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=3, classes=5)
        >>> attention_rollout(VisionTransformer(config), np.zeros((1, 16, 24, 3))).shape
        (1, 2, 3)

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        images: (B, H, W, channels) as that model takes them.

    Returns:
        (B, h, w) shares in [0, 1]. With the shares of the tokens before the patches they make 1.
    """
    return np.concatenate(list(map(rollout, records(model, image_batches(model, images)))))


def rollout(record: Record) -> np.ndarray:
    """Returns the `attention_rollout` (B, h, w)."""
    blocks = [to_numpy(weights).mean(axis=1) for weights in record.blocks]
    identity = np.eye(record.config.num_tokens)
    shares = np.broadcast_to(identity, blocks[0].shape)
    for weights in blocks:
        mixed = weights + identity
        shares = mixed / mixed.sum(axis=-1, keepdims=True) @ shares
    pooling = to_numpy(record.pooling[0]).mean(axis=1) if record.pooling else None
    return on_grid(record.config, answer_row(record.config, pooling, shares))


def class_relevance(
    model: keras.Model, images: Any, classes: int | Sequence[int] | None = None
) -> np.ndarray:
    """Returns how much each patch speaks for a class.

    In each layer attention is weighted by the gradient of the class's score, what is negative is
    dropped, heads are averaged, and the result A is added up through the layers as R + A R
    (Chefer et al., arXiv 2103.15679, Equations 5 and 6).

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> from keras_vit.model import VisionTransformer
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=2, classes=5)
        >>> class_relevance(VisionTransformer(config), np.zeros((2, 16, 24, 3)), [0, 4]).shape
        (2, 2, 3)

    Args:
        model: a classifier: a `VisionTransformer`, or any Keras model with one inside and outputs
            (B, C).
        images: (B, H, W, channels) as that model takes them.
        classes: the class to explain: one, one for each image, or None for the top-1 class of each.

    Returns:
        (B, h, w), not negative, in units of the model's score. The score is the logit where the
        model is a `VisionTransformer`, softmax or not, and the model's output otherwise.

    Raises:
        ValueError: the model is not a classifier, or has no such class.
    """
    count, shape = len(np.asarray(images)), output_shape(model)
    if shape is None or len(shape) != 2:
        raise ValueError(
            "Class relevance needs a classifier with outputs of shape (batch, classes). Received: "
            f"a model with outputs of shape {getattr(model, 'output_shape', 'that are not known')}."
        )
    chunks: Iterable[Any] = itertools.repeat(None)
    if classes is not None:
        targets = np.asarray(classes, np.int64)
        if targets.shape not in ((), (count,)):
            raise ValueError(
                f"classes must be one class, or one for each of the {count} images. "
                f"Received: classes={classes!r}."
            )
        wrong = targets[(targets < 0) | (targets >= shape[1])]
        if wrong.size:
            raise ValueError(
                f"There is no class {wrong.flat[0]}; the model has {shape[1]}, numbered from 0."
            )
        each = np.broadcast_to(targets, (count,))
        chunks = (each[start : start + BATCH_SIZE] for start in range(0, count, BATCH_SIZE))
    passes = records(model, image_batches(model, images), gradients=1)
    return np.concatenate(list(map(relevance, passes, chunks)))


def relevance(record: Record, targets: Any = None) -> np.ndarray:
    """Returns the `class_relevance` of one class for each image; None for its top-1 class."""
    outputs, config = record.outputs, record.config
    if targets is None:
        targets = keras.ops.argmax(outputs, axis=-1)
    # No image sees another, so the gradients of all images' scores stay apart.
    gradients = record.backpropagate(keras.ops.one_hot(targets, outputs.shape[-1], dtype="float32"))
    weights = [*record.blocks, *record.pooling]
    positive = [
        np.maximum(to_numpy(weight) * to_numpy(gradient), 0).mean(axis=1)  # (B, N, N)
        for weight, gradient in zip(weights, gradients, strict=False)
    ]
    pooling = positive.pop() if record.pooling else None
    total = np.broadcast_to(np.eye(config.num_tokens), (len(outputs), *(config.num_tokens,) * 2))
    for each in positive:
        total = total + each @ total
    return on_grid(config, answer_row(config, pooling, total))


def mean_attention_distance(model: keras.Model, images: Any) -> np.ndarray:
    """Returns how far each head of each layer looks, in pixels (arXiv 2010.11929, Figure 7 right).

    The distance between the centres of the asking patch and each patch, weighted by attention and
    averaged over asking patches and images. Other tokens are left out on both sides, and what is
    left of each patch's attention counts as 1.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        images: (B, H, W, channels) as that model takes them; the paper averages over 128.

    Returns:
        (L, H) distances in pixels of the Vision Transformer's input.
    """
    batches = image_batches(model, images)
    totals = map(total_distance, records(model, batches))
    return np.asarray(sum(totals) / sum(map(len, batches)))


def total_distance(record: Record) -> np.ndarray:
    """Returns the sum of the images' `mean_attention_distance`, (L, H)."""
    config, first = record.config, record.config.num_prefix_tokens
    rows, columns = np.indices(config.grid).reshape(2, -1) * config.stride
    distances = np.hypot(rows[:, None] - rows, columns[:, None] - columns)  # of any two patches
    totals = []
    for weights in record.blocks:
        patches = to_numpy(weights)[:, :, first:, first:].astype(np.float64)
        patches /= patches.sum(axis=-1, keepdims=True)
        totals.append((patches * distances).sum(axis=-1).mean(axis=-1).sum(axis=0))
    return np.stack(totals)


def head_attention(record: Record) -> list[np.ndarray]:
    """Returns what the class token of one image takes from each patch, by layer and head.

    Without a class token, what the average patch takes. With attention pooling, what it takes comes
    as one more layer at the end, which may have another number of heads.

    Args:
        record: of one image.

    Returns:
        Of each layer the attention weights (heads, h, w).
    """
    config, first = record.config, record.config.num_prefix_tokens
    layers = []
    for weights in record.blocks:  # (1, H, N, N), of which one row of each head is kept
        asking = weights[:, :, :1] if config.class_token else weights[:, :, first:]
        layers.append(to_numpy(asking)[0].mean(axis=1))
    layers += [to_numpy(weights)[0, :, 0] for weights in record.pooling]
    return [rows[:, first:].reshape(-1, *config.grid) for rows in layers]


def token_similarity(
    model: keras.Model,
    images: Any,
    *,
    token: tuple[int, int] | Literal["class"] = "class",
    layer: int = -1,
) -> np.ndarray:
    """Returns how like each patch's token is to one chosen token, after any block.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        images: (B, H, W, channels) as that model takes them.
        token: (row, column) of a patch in the grid, or "class" for the class token.
        layer: after which block, 0 the first, -1 the last.

    Returns:
        (B, h, w) cosine similarities from -1 to 1.

    Raises:
        ValueError: there is no such token or layer.
    """
    config, vit = find_vit(model)
    (index,) = choose(layer, config.num_layers, word="layer")
    rows, columns = config.grid
    if token == "class":
        if not config.class_token:
            raise ValueError(
                "The model has no class token; choose a patch by its (row, column) in the grid of "
                f"{rows} rows and {columns} columns of patches."
            )
        place = 0
    elif isinstance(token, str) or not (0 <= token[0] < rows and 0 <= token[1] < columns):
        raise ValueError(
            f"There is no patch {token!r}; the grid has {rows} rows and {columns} columns, "
            'numbered from 0. Give (row, column), or "class".'
        )
    else:
        place = token[0] * columns + token[1] + config.num_prefix_tokens
    block = vit.get_layer(f"block_{index}")
    parts = []
    for batch in image_batches(model, images):
        _, (tokens,) = run(model, batch, [block])
        parts.append(similarity(config, tokens, place))
    return np.concatenate(parts)


def similarity(config: ViTConfig, tokens: Any, place: int) -> np.ndarray:
    """Returns the cosine similarity (B, h, w) of each patch's token (B, N, D) to one of them."""
    directions = _unit(to_numpy(tokens))
    return on_grid(config, (directions @ directions[:, place, :, None])[..., 0])


def position_similarity(model: keras.Model) -> np.ndarray:
    """Returns the cosine similarity of the position embeddings (arXiv 2010.11929, Figure 7 centre).

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> from keras_vit.model import VisionTransformer
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=5)
        >>> position_similarity(VisionTransformer(config)).shape
        (2, 3, 2, 3)

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.

    Returns:
        (h, w, h, w): of the patch in a row and column with every other, from -1 to 1. Where
        every block has a table, of the first block's.

    Raises:
        ValueError: the model adds no position embeddings to its tokens.
    """
    config, vit = find_vit(model)
    if not config.adds_positions:
        raise ValueError(
            "The model adds no position embeddings to its tokens. Received: a model with "
            f"position_embedding={config.position_embedding!r}."
        )
    layer = vit.get_layer(position_layer(config, 0) or "patch_encoder")
    directions = _unit(to_numpy(layer.position_table())[0, config.num_prefix_tokens :])
    return np.asarray((directions @ directions.T).reshape(*config.grid, *config.grid))


def embedding_filters(model: keras.Model, *, count: int = 28) -> Filters:
    """Returns the principal components of the patch embedding (arXiv 2010.11929, Figure 7 left).

    The signs are arbitrary; each component's largest value is made positive.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        count: how many; the paper shows 28. Fewer where there are fewer.

    Raises:
        ValueError: `count` is not positive.
    """
    if count < 1:
        raise ValueError(f"count must be a positive integer. Received: count={count!r}.")
    config, vit = find_vit(model)
    kernel = to_numpy(vit.get_layer("patch_encoder").projection.kernel)  # (P*P*C, D)
    filters = kernel.T - kernel.mean(axis=1)
    _, strength, components = np.linalg.svd(filters, full_matrices=False)
    largest = np.take_along_axis(
        components, np.abs(components).argmax(axis=1, keepdims=True), axis=1
    )
    size, channels = config.patch_size, config.patch_channels
    components = (components * np.sign(largest)).reshape(-1, size, size, channels)
    total = max(float((strength**2).sum()), np.finfo(np.float32).tiny)
    return Filters(components[:count], strength[:count] ** 2 / total)


def answer_row(config: ViTConfig, pooling: np.ndarray | None, tokens: np.ndarray) -> np.ndarray:
    """Follows the pooling from tokens (B, N, N) to the answer: (B, N).

    A distillation token and the class token answer in halves, as do class token and average.

    Raises:
        ValueError: each channel comes from a patch of its own.
    """
    if config.pooling == "max":
        raise ValueError(
            'With pooling="max" each channel of the answer comes from another patch, so there is '
            "no one way back to the patches; attention_weights and mean_attention_distance work."
        )
    if pooling is not None:
        return np.asarray((pooling @ tokens)[:, 0])
    if config.pooling == "token" or (config.pooling is None and config.class_token):
        return np.asarray(tokens[:, : 1 + config.distillation_token].mean(axis=1))
    average = np.asarray(tokens[:, config.num_prefix_tokens :].mean(axis=1))
    return (tokens[:, 0] + average) / 2 if config.pooling == "token_avg" else average


def on_grid(config: ViTConfig, row: np.ndarray) -> np.ndarray:
    """Lays the patches' part of (B, N) out as (B, h, w)."""
    return np.asarray(row[:, config.num_prefix_tokens :].reshape(-1, *config.grid))


def _attention_pooling(vit: keras.Model) -> list[AttentionPooling]:
    return [each for each in vit.layers if isinstance(each, AttentionPooling)]


def _unit(vectors: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, np.finfo(np.float32).tiny))
