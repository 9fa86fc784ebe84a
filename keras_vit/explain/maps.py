"""Maps over the patches of one image, and what a page needs to show them over it."""

import base64
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit import pages
from keras_vit.explain import attention, pictures

SHOWN_CLASSES = 3  # whose relevance is shown; each costs a backward pass
# A larger picture is drawn smaller. A tiny one is drawn larger, each pixel a square.
_LONGEST, _TINY, _ENLARGED = 1024, 128, 256
_QUALITY = 85


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """What is explained.

    Attributes:
        model: a `VisionTransformer`, or any Keras model with one inside.
        image: (H, W, channels) pixels 0..255, as given but for its size, of at most 1024 pixels a
            side.
        inputs: (1, height, width, channels) as the model takes it.
        notes: what a reader should know of the sizes, in sentences.
    """

    model: keras.Model
    image: np.ndarray
    inputs: np.ndarray
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Overlay:
    """One map over the patches of an image.

    Attributes:
        name: what a control calls it.
        caption: what it shows, a sentence.
        unit: what its numbers count.
        values: (h, w).
    """

    name: str
    caption: str
    unit: str
    values: np.ndarray


def make_subject(model: keras.Model, image: np.ndarray) -> Subject:
    """Prepares an image for a model.

    Raises:
        ValueError: the image has another shape, or the model not one Vision Transformer.
    """
    image = np.asarray(image)
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(
            "An image has the shape (height, width, 3) or (height, width, 1). "
            f"Received: shape {image.shape}."
        )
    vit = attention.find_vit(model)
    size = attention.image_size(model) or image.shape[:2]
    inputs = attention.resample(image[None], size, antialias=vit.config.antialias)
    pixels = np.asarray(vit.preprocess_input(inputs)) if model is vit else inputs
    drawn = _drawn(image)
    return Subject(model, drawn, pixels, tuple(_notes(image, drawn, size)))


def head_attention(model: keras.Model, inputs: Any) -> list[np.ndarray]:
    """Returns what the class token of one image takes from each patch, by layer and head.

    Without a class token, what the average patch takes. With attention pooling, what it takes comes
    as one more layer at the end, which may have another number of heads.

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> from keras_vit.model import VisionTransformer
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=3, classes=5)
        >>> layers = head_attention(VisionTransformer(config), np.zeros((1, 16, 24, 3)))
        >>> [weights.shape for weights in layers]
        [(2, 2, 3), (2, 2, 3), (2, 2, 3)]

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        inputs: (1, H, W, channels) as that model takes it.

    Returns:
        Of each layer the attention weights (heads, h, w).
    """
    vit = attention.find_vit(model)
    config, first = vit.config, vit.config.num_prefix_tokens
    record = attention.record_attention(model, vit, inputs)
    layers = []
    for weights in record.blocks:  # (1, H, N, N), of which one row of each head is kept
        asking = weights[:, :, :1] if config.class_token else weights[:, :, first:]
        layers.append(attention.to_numpy(asking)[0].mean(axis=1))
    layers += [attention.to_numpy(weights)[0, :, 0] for weights in record.pooling]
    return [rows[:, first:].reshape(-1, *config.grid) for rows in layers]


def asker(model: keras.Model) -> str:
    """Returns whose attention `head_attention` returns, in words."""
    has_token = attention.find_vit(model).config.class_token
    return "the class token" if has_token else "the average patch"


def overlays(subject: Subject, targets: Sequence[int], names: Sequence[str]) -> Iterator[Overlay]:
    """Yields the maps of an image: relevance of classes, rollout, likeness of patches.

    Args:
        subject: the image and the model.
        targets: the classes whose relevance is shown.
        names: the name of each class.
    """
    model, inputs = subject.model, subject.inputs
    for target in targets:  # one by one: gradients of a large model fill the memory
        speaks = attention.class_relevance(model, inputs, target)[0]
        yield Overlay(
            f"Relevance for {names[target]}",
            f"Which patches speak for {names[target]}: attention weighted by its gradient.",
            "score",
            speaks,
        )
    rollout = attention.attention_rollout(model, inputs)[0]
    yield Overlay(
        "Attention rollout",
        "How much of each patch reaches the answer by way of attention, through all layers.",
        "share of the patch",
        rollout,
    )
    row, column = (int(place) for place in np.unravel_index(rollout.argmax(), rollout.shape))
    yield Overlay(
        f"Like patch ({row}, {column})",
        f"How like each patch's last token is to that of the patch in row {row}, column {column}, "
        "from which the rollout takes most.",
        "cosine similarity",
        pictures.token_similarity(model, inputs, token=(row, column))[0],
    )


def view(subject: Subject, maps: Sequence[Overlay], layers: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns what `viewer.js` shows, as JSON takes it; maps are written in bytes.

    Args:
        subject: the image and the model.
        maps: the maps to choose among, the first shown first.
        layers: of each layer (heads, h, w), of `head_attention` for this image.
    """
    vit = attention.find_vit(subject.model)
    names = [f"layer {index}" for index in range(vit.config.num_layers)]
    names += ["pooling"] * (len(layers) - len(names))
    return {
        "image": _shown(subject.image),
        "grid": list(vit.config.grid),
        "maps": [
            {"name": each.name, "caption": each.caption, "unit": each.unit}
            | _packed(each.values[None])
            for each in maps
        ],
        "who": asker(subject.model),
        "layers": [
            {"name": name} | _packed(heads) for name, heads in zip(names, layers, strict=True)
        ],
    }


def class_scores(subject: Subject) -> np.ndarray | None:
    """Returns probabilities (C,), or None of a model that is not a classifier."""
    model = subject.model
    outputs = np.asarray(attention.to_numpy(model(subject.inputs, training=False))[0], np.float64)
    if outputs.ndim != 1 or (attention.find_vit(model) is model and model.config.classes is None):
        return None
    if outputs.min() >= 0 and abs(outputs.sum() - 1) < 1e-3:
        return outputs
    powers = np.exp(outputs - outputs.max())
    return np.asarray(powers / powers.sum())


def explained_classes(scores: np.ndarray, target: int | None = None) -> list[int]:
    """Returns the classes whose relevance is shown: the one asked for, then the likeliest.

    Example:
        >>> explained_classes(np.array([0.1, 0.2, 0.3, 0.4]), target=0)
        [0, 3, 2]

    Raises:
        ValueError: there is no such class.
    """
    if target is not None and not 0 <= target < len(scores):
        raise ValueError(
            f"There is no class {target}; the model has {len(scores)}, numbered from 0."
        )
    likeliest = [int(index) for index in np.argsort(-scores, kind="stable")]
    first = [] if target is None else [target]
    return [*first, *(index for index in likeliest if index != target)][:SHOWN_CLASSES]


def _notes(image: np.ndarray, drawn: np.ndarray, size: Sequence[int]) -> Iterator[str]:
    own = attention.sides(image.shape)
    if image.shape[:2] == tuple(size):
        yield f"The image is {own}, as the model takes it."
    else:
        taken = attention.sides(size)
        yield f"The image is {own}. It was resampled to {taken}, the size that the model takes."
    if image.shape != drawn.shape:
        yield f"It is drawn {attention.sides(drawn.shape)}."


def _drawn(image: np.ndarray) -> np.ndarray:
    """Returns an image of at most `_LONGEST` pixels a side."""
    longest = max(image.shape[:2])
    if longest <= _LONGEST:
        return image
    size = tuple(max(1, round(side * _LONGEST / longest)) for side in image.shape[:2])
    return np.asarray(attention.resample(image[None], size, antialias=True)[0])


def _shown(image: np.ndarray) -> dict[str, Any]:
    """Returns an image as the page shows it: at its own size, or larger if it is tiny."""
    pixels = image if image.shape[2] == 3 else image[..., 0]
    longest = max(image.shape[:2])
    factor = _ENLARGED // longest if longest < _TINY else 1
    return {
        "source": pages.thumbnail(pixels, side=_LONGEST, quality=_QUALITY),
        "width": factor * image.shape[1],
        "crisp": factor > 1,
    }


def _packed(maps: np.ndarray) -> dict[str, Any]:
    """Writes maps (n, h, w) in bytes, each from its least value to its most."""
    maps = np.nan_to_num(np.asarray(maps, np.float64))
    least, most = maps.min(axis=(1, 2)), maps.max(axis=(1, 2))
    extent = np.maximum(most - least, np.finfo(np.float32).tiny)[:, None, None]
    levels = np.rint(255 * (maps - least[:, None, None]) / extent).astype(np.uint8)
    return {
        "values": base64.b64encode(levels.tobytes()).decode(),
        "least": [float(f"{value:.6g}") for value in least],
        "most": [float(f"{value:.6g}") for value in most],
    }
