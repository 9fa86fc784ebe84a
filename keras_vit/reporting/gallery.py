"""The images of a report: which are shown, small copies of them, and what a model attends to."""

import io
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_vit import explain, pages
from keras_vit.data import Split, evaluation_batches, resizing_of
from keras_vit.evaluation import Predictions
from keras_vit.explain.attention import find_vit
from keras_vit.limits import short
from keras_vit.model import VisionTransformer

MISTAKES = 24
_IMAGES, _SIDE, _BYTES = 160, 160, 1_700_000
# So many images of each pair of classes, and so many of the correct ones.
_OF_PAIR, _OF_CLASS = 8, 3
_VIEWS, _VIEW_SIDE = 6, 320
_LARGEST_ATTENTION = 2**30  # bytes of the attention weights of one image


def choose_images(predictions: Predictions, *, limit: int = _IMAGES) -> list[int]:
    """Returns positions of images to show: confident mistakes, then some of each confused pair.

    Args:
        predictions: those of the model to all images.
        limit: how many.
    """
    unsure = np.argsort(-predictions.confidence, kind="stable")[::-1]
    correct = unsure[predictions.right[unsure]]
    chosen = dict.fromkeys(predictions.mistakes[:MISTAKES].tolist())
    for order, most in ((predictions.mistakes, _OF_PAIR), (correct, _OF_CLASS)):
        cells: dict[tuple[int, int], list[int]] = {}  # those of the confusion matrix
        for place in order.tolist():
            cell = predictions.targets[place], predictions.predicted[place]
            cells.setdefault(cell, []).append(place)
        largest = sorted(cells.values(), key=len, reverse=True)
        for turn in range(most):  # one image of each, then a second of each, and so on
            chosen |= dict.fromkeys(places[turn] for places in largest if turn < len(places))
    return list(chosen)[:limit]


def make_gallery(
    split: Split, predictions: Predictions, *, source: str
) -> tuple[list[dict[str, Any]], dict[str, list[int]], list[int]]:
    """Returns small copies of the images that `choose_images` chooses, within 1.7 MB.

    Args:
        split: the images.
        predictions: those of the model to them.
        source: the folder of the images; names are shown without it.

    Returns:
        What the page shows of each image; their places by "true class,predicted class"; the places
        of the most confident mistakes, the surest first.
    """
    chosen = choose_images(predictions)
    order = sorted(chosen)
    part = split.take(order)
    loader = part.loader()
    decoded = part.items().map(lambda *item: loader.pixels(item, None), num_parallel_calls=2)
    pairs = zip(order, decoded.as_numpy_iterator(), strict=True)
    thumbnails = {
        place: (pages.thumbnail(pixels, side=_SIDE), max(pixels.shape[:2]) < _SIDE // 2)
        for place, pixels in pairs
    }
    images: list[dict[str, Any]] = []
    cells: dict[str, list[int]] = {}
    mistakes: list[int] = []
    used = 0
    for turn, place in enumerate(chosen):
        address, crisp = thumbnails[place]
        if used + len(address) > _BYTES:
            continue
        used += len(address)
        truth, taken = int(predictions.targets[place]), int(predictions.predicted[place])
        cells.setdefault(f"{truth},{taken}", []).append(len(images))
        if truth != taken and turn < MISTAKES:
            mistakes.append(len(images))
        images.append(
            {
                "source": address,
                "name": short(split.name(place).removeprefix(f"{source}{os.sep}"), 120),
                "truth": truth,
                "taken": taken,
                "confidence": round(float(predictions.confidence[place]), 5),
                "crisp": crisp,
            }
        )
    return images, cells, mistakes


def attention_views(
    model: keras.Model, split: Split, predictions: Predictions, labels: Sequence[str]
) -> tuple[list[dict[str, Any]], str]:
    """Returns a few images with the attention that reaches the answer, and a sentence on them.

    Two of them are the surest mistakes. A model without attention, or with too much of it for one
    image, has none, and the sentence says so.
    """
    try:
        config = find_vit(model).config
    except ValueError:
        return [], "This model has no attention of a Vision Transformer that could be shown."
    rows, columns = config.grid
    size = 4 * config.num_layers * config.num_heads * (rows * columns + 2) ** 2
    if size > _LARGEST_ATTENTION:
        return [], "One image has too many patches for its attention to be shown here."
    mistakes, correct = predictions.mistakes[:2].tolist(), np.flatnonzero(predictions.right)
    count = min(_VIEWS - len(mistakes), len(correct))
    spread = np.linspace(0, max(len(correct) - 1, 0), count).astype(int)
    places = [*correct[spread].tolist(), *mistakes]
    order = sorted(places)
    batches = evaluation_batches(split.take(order), resizing=resizing_of(model), batch_size=1)
    images = {place: np.asarray(one) for place, (one, _) in zip(order, batches, strict=True)}
    is_vit, views = isinstance(model, VisionTransformer), []
    for place in places:
        image = images[place]
        inputs = np.asarray(model.preprocess_input(image)) if is_vit else image
        share = explain.attention_rollout(model, inputs)[0]
        truth, taken = labels[predictions.targets[place]], labels[predictions.predicted[place]]
        said = truth if truth == taken else f"{truth} predicted as {taken}"
        caption = f"{said}, {predictions.confidence[place]:.1%} sure"
        views.append(
            {
                "image": pages.thumbnail(image[0], side=_VIEW_SIDE),
                "heat": _shade(share),
                "crisp": max(image.shape[1:3]) < _VIEW_SIDE // 2,
                "rows": share.shape[0],
                "columns": share.shape[1],
                "caption": caption,
            }
        )
    return views, f"The model cuts an image into {rows} rows of {columns} patches."


def _shade(share: np.ndarray) -> str:
    from PIL import Image

    most = float(share.max()) or 1.0
    alpha = np.rint(255 * (1 - share / most)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.stack([np.zeros_like(alpha), alpha], axis=-1), "LA").save(file, "PNG")
    return pages.data_uri(file.getvalue())
