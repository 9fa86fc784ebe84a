"""Everything there is to see about a model and one image: maps over its patches, charts, a page."""

import base64
import dataclasses
import functools
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_vit import figures, pages
from keras_vit.atomic import whole_file
from keras_vit.config import Ending, Resizing, ending_of
from keras_vit.data.images import placement, resize_image
from keras_vit.explain import attention
from keras_vit.model import VisionTransformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "index.html"
TOP = 5
SHOWN_CLASSES = 3  # whose relevance is shown; each costs a backward pass
_DPI = 160
_PIXELS_PER_INCH = 96  # in the page, so that its letters are as large as drawn
# A larger picture is drawn smaller, a small one larger; of a tiny one each pixel is a square.
_LONGEST, _TINY, _ENLARGED = 1024, 128, 512
_QUALITY = 85


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """What is explained.

    Attributes:
        model: a `VisionTransformer`, or any Keras model with one inside.
        image: (H, W, channels) pixels 0..255, as given but for its size, of at most 1024 pixels a
            side.
        record: what the model computed of the image, with gradients if it may be a classifier.
        scores: (C,) probabilities of the classes; None of a model that is not a classifier.
        notes: what a reader should know of the sizes, in sentences.
    """

    model: keras.Model
    image: np.ndarray
    record: attention.Record
    scores: np.ndarray | None
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Picture:
    name: str
    draw: "Callable[[], Figure]"
    caption: str = ""


def write_explanation(
    model: keras.Model,
    image: np.ndarray,
    out: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
    target: int | None = None,
    title: str = "image",
) -> tuple[Path, ...]:
    """Writes pictures of what a model sees in an image, and `index.html`, which shows it all.

    The page needs no other file and no network. It shows the maps over the image, with a control
    for the layer and the head, and charts of the model.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside. One that scales pixels
            itself, or stands in a user's model, gets them as they are, 0..255.
        image: (H, W, 3) or (H, W, 1) pixels 0..255; of another size than the model's it is
            resampled, as the page says.
        out: the folder to write to; made if need be.
        labels: the name of each class, in the order of the model's outputs.
        target: the class whose relevance is shown first; None for the top-1 class.
        title: what the page calls the image, for instance its file name.

    Returns:
        The files written, the page last.

    Raises:
        ImportError: matplotlib or Jinja2 is not installed.
        ValueError: the image has another shape, or there is no such class.
    """
    subject = make_subject(model, image)
    scores = np.empty(0) if subject.scores is None else subject.scores
    if len(scores) and labels is not None and len(labels) != len(scores):
        raise ValueError(f"The model has {len(scores)} classes. Received: {len(labels)} labels.")
    names = list(labels or (f"class {index}" for index in range(len(scores))))
    maps = overlays(subject, names, target)
    layers = attention.head_attention(subject.record)
    panels, charts = list(_panels(subject, maps, layers)), list(_charts(subject))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    files = {each.name: out / f"{each.name}.png" for each in (*panels, *charts)}
    for each in (*panels, *charts):
        with whole_file(files[each.name]) as temporary:
            each.draw().savefig(temporary, dpi=_DPI)
    best = np.argsort(-scores, kind="stable")[:TOP]
    notes = [] if len(scores) else ["The model has no classifier."]
    pages.write_page(
        out / PAGE,
        "explain.html",
        title=f"What the model sees in {title}",
        styles=("viewer.css",),
        scripts=("viewer.js",),
        notes=[*subject.notes, *notes],
        classes=[(names[index], float(scores[index])) for index in best],
        view=view(subject, maps, layers),
        charts=[_written(chart, files[chart.name]) for chart in charts],
    )
    return (*files.values(), out / PAGE)


def make_subject(model: keras.Model, image: np.ndarray) -> Subject:
    """Prepares an image for a model, and runs the model on it once.

    Raises:
        ValueError: the image has another shape, or the model not one Vision Transformer.
    """
    image = np.asarray(image)
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(
            "An image has the shape (height, width, 3) or (height, width, 1). "
            f"Received: shape {image.shape}."
        )
    config, size = attention.find_vit(model).config, attention.image_size(model)
    resizing = config.resizing(size) if size else Resizing(image.shape[:2])
    inputs = np.asarray(resize_image(image[None], resizing))
    is_whole = isinstance(model, VisionTransformer)
    pixels = np.asarray(model.preprocess_input(inputs)) if is_whole else inputs
    has_classes = not (is_whole and config.classes is None)
    gradients = SHOWN_CLASSES if has_classes else 0
    (record,) = attention.records(model, [pixels], gradients=gradients)
    is_row = has_classes and len(getattr(record.outputs, "shape", ())) == 2
    ending, scores = ending_of(model) if is_row else Ending(None), None
    if ending.activation is not None:
        # Of a `VisionTransformer` the record has the logits.
        is_logits = is_whole or not ending.is_probabilities
        convert = keras.activations.get(ending.activation if is_logits else "linear")
        scores = np.asarray(attention.to_numpy(convert(record.outputs))[0], np.float64)
    drawn, notes = image[_seen_part(image.shape, resizing)], [how_taken(image.shape, resizing)]
    longest = max(drawn.shape[:2])
    if longest > _LONGEST:
        height, width = (max(1, round(side * _LONGEST / longest)) for side in drawn.shape[:2])
        drawn = np.asarray(resize_image(drawn, Resizing((height, width))))
        notes.append(f"What is seen of it is drawn {attention.sides(drawn.shape)}.")
    return Subject(model, drawn, record, scores, tuple(notes))


def how_taken(shape: tuple[int, ...], resizing: Resizing) -> str:
    """Says what of an image of a shape (height, width, ...) a model takes."""
    own, (rows, columns) = attention.sides(shape), _seen_part(shape, resizing)
    is_whole = (rows.stop - rows.start, columns.stop - columns.start) == shape[:2]
    if is_whole and shape[:2] == resizing.size:
        return f"The image is {own}, as the model takes it."
    what, taken = "It" if is_whole else "Its middle", attention.sides(resizing.size)
    return f"The image is {own}. {what} was resampled to {taken}, the size that the model takes."


def overlays(subject: Subject, names: Sequence[str], target: int | None = None) -> list[Overlay]:
    """Returns the maps of an image: relevance of classes, rollout, similarity of patches.

    Args:
        subject: the image and the model.
        names: the name of each class.
        target: the class whose relevance is shown first; None for the top-1 class.

    Raises:
        ValueError: there is no such class, or the model's answer has no one way back to patches.
    """
    record, maps = subject.record, []
    for each in [] if subject.scores is None else explained_classes(subject.scores, target):
        caption = f"Class relevance for {names[each]}: how much each patch raises its score."
        relevance = attention.relevance(record, [each])[0]  # gradients of one class at a time
        shares = 100 * relevance / (relevance.sum() or 1)
        maps.append(Overlay(f"Relevance for {names[each]}", caption, "% of the relevance", shares))
    rollout = attention.rollout(record)[0]
    caption = "How much of each patch reaches the answer by way of attention, through all layers."
    maps.append(Overlay("Attention rollout", caption, "% of the answer", 100 * rollout))
    row, column = (int(place) for place in np.unravel_index(rollout.argmax(), rollout.shape))
    place = record.config.num_prefix_tokens + row * rollout.shape[1] + column
    similarity = attention.similarity(record.config, record.tokens, place)[0]
    name = f"Similarity to patch ({row}, {column})"
    caption = (
        f"Cosine similarity of each patch's last token to that of the patch in row {row}, column "
        f"{column}, from which the rollout takes most."
    )
    maps.append(Overlay(name, caption, "cosine similarity", similarity))
    return maps


def view(subject: Subject, maps: Sequence[Overlay], layers: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns what `viewer.js` shows, as JSON takes it; maps are written in bytes.

    Args:
        subject: the image and the model.
        maps: the maps to choose among, the first shown first.
        layers: of each layer (heads, h, w), of `head_attention` for this image.
    """
    config = subject.record.config
    names = [f"layer {index}" for index in range(config.num_layers)]
    names += ["pooling"] * (len(layers) - len(names))
    return {
        "image": _shown(subject.image),
        "grid": list(config.grid),
        "maps": [
            {"name": each.name, "caption": each.caption, "unit": each.unit}
            | _packed(each.values[None])
            for each in maps
        ],
        "who": _query_token_name(subject),
        "uniform": {"range": figures.LEAST_RANGE, "text": figures.UNIFORM},
        "layers": [
            {"name": name} | _packed(heads) for name, heads in zip(names, layers, strict=True)
        ],
    }


def explained_classes(scores: np.ndarray, target: int | None = None) -> list[int]:
    """Returns the classes whose relevance is shown: the one asked for, then the most probable.

    Raises:
        ValueError: there is no such class.
    """
    if target is not None and not 0 <= target < len(scores):
        raise ValueError(
            f"There is no class {target}; the model has {len(scores)}, numbered from 0."
        )
    ranked = np.argsort(-scores, kind="stable").tolist()
    return list(dict.fromkeys(ranked if target is None else [target, *ranked]))[:SHOWN_CLASSES]


def _query_token_name(subject: Subject) -> str:
    return "the class token" if subject.record.config.class_token else "the average patch"


def _panels(
    subject: Subject, maps: Sequence[Overlay], layers: Sequence[np.ndarray]
) -> Iterator[_Picture]:
    *relevance, rollout, similarity = maps
    named = {"rollout": rollout, "similarity": similarity}
    if relevance:
        named["relevance"] = relevance[0]
    for name, overlay in named.items():
        title = f"{overlay.name[0].lower()}{overlay.name[1:]}"
        draw = functools.partial(
            figures.plot_heatmap, subject.image, overlay.values, title=title, unit=overlay.unit
        )
        yield _Picture(name, draw)
    title = f"what {_query_token_name(subject)} takes from each patch in layer {len(layers) - 1}"
    if subject.record.config.pooling == "map":
        title = "what attention pooling takes from each patch"
    draw = functools.partial(figures.plot_heads, layers[-1], title=title, unit="attention weight")
    yield _Picture("heads", draw)


def _charts(subject: Subject) -> Iterator[_Picture]:
    distances = attention.total_distance(subject.record)
    draw = functools.partial(figures.plot_attention_distance, distances)
    caption = "How far each head looks, in this image alone; the paper averages over 128 images."
    yield _Picture("distance", draw, caption)
    if subject.record.config.adds_positions:
        similarity = attention.position_similarity(subject.model)
        draw = functools.partial(figures.plot_position_similarity, similarity)
        caption = "Which places are alike in the model's position embeddings, whatever the image."
        yield _Picture("positions", draw, caption)
    filters = attention.embedding_filters(subject.model)
    if filters.components.shape[-1] in (1, 3):
        draw = functools.partial(figures.plot_filters, filters)
        caption = "What the patch embedding looks for in a patch, whatever the image."
        yield _Picture("filters", draw, caption)


def _written(chart: _Picture, file: Path) -> dict[str, Any]:
    dark = io.BytesIO()
    with figures.light_on_dark():
        figure = chart.draw()
        figure.savefig(dark, dpi=_DPI, transparent=True)
    return {
        "name": chart.name,
        "caption": chart.caption,
        "day": pages.data_uri(file.read_bytes()),
        "night": pages.data_uri(dark.getvalue()),
        "width": round(_PIXELS_PER_INCH * figure.get_figwidth()),
    }


def _seen_part(shape: tuple[int, ...], resizing: Resizing) -> tuple[slice, slice]:
    """Returns the rows and columns of an image (height, width, ...) that the model sees."""
    resized, offset = map(np.asarray, placement(shape[:2], resizing))
    pixels = np.array(shape[:2]) / resized
    first = np.floor(offset * pixels).astype(int)
    last = np.ceil((offset + resizing.size) * pixels).astype(int)
    return slice(first[0], last[0]), slice(first[1], last[1])


def _shown(image: np.ndarray) -> dict[str, Any]:
    pixels = image if image.shape[2] == 3 else image[..., 0]
    longest = max(image.shape[:2])
    factor = _ENLARGED // longest if longest < _TINY else max(1, _ENLARGED / longest)
    return {
        "source": pages.thumbnail(pixels, side=_LONGEST, quality=_QUALITY),
        "width": round(factor * image.shape[1]),
        "crisp": longest < _TINY,
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
