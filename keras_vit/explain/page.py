"""Writes everything there is to see about a model and one image as PNG files and one page."""

import dataclasses
import functools
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_vit import pages
from keras_vit.atomic import whole_file
from keras_vit.explain import attention, maps, pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "index.html"
TOP = 5
_DPI = 160
_PIXELS_PER_INCH = 96  # in the page, so that its letters are as large as drawn


@dataclasses.dataclass(frozen=True, eq=False)
class _Picture:
    """One figure: a file name, what draws it, and what it shows."""

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
        target: the class whose relevance is shown first; None for the likeliest.
        title: what the page calls the image, for instance its file name.

    Returns:
        The files written, the page last.

    Raises:
        ImportError: matplotlib or Jinja2 is not installed.
        ValueError: the image has another shape, or there is no such class.
    """
    subject = maps.make_subject(model, image)
    scores = maps.class_scores(subject)
    names = _names(labels, scores)
    targets = [] if scores is None else maps.explained_classes(scores, target)
    overlays = list(maps.overlays(subject, targets, names))
    layers = maps.head_attention(model, subject.inputs)
    view = maps.view(subject, overlays, layers)
    panels, charts = list(_panels(subject, overlays, layers)), list(_charts(subject))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    files = {each.name: out / f"{each.name}.png" for each in (*panels, *charts)}
    for each in (*panels, *charts):
        with whole_file(files[each.name]) as temporary:
            each.draw().savefig(temporary, dpi=_DPI)
    pages.write_page(
        out / PAGE,
        "explain.html",
        title=f"What the model sees in {title}",
        styles=("viewer.css",),
        scripts=("viewer.js",),
        notes=[*subject.notes, *([] if scores is not None else ["The model has no classifier."])],
        classes=_likeliest(scores, names),
        view=view,
        charts=[_written(chart, files[chart.name]) for chart in charts],
    )
    return (*files.values(), out / PAGE)


def _names(labels: Sequence[str] | None, scores: np.ndarray | None) -> list[str]:
    if scores is None:
        return []
    if labels is not None and len(labels) != len(scores):
        raise ValueError(f"The model has {len(scores)} classes. Received: {len(labels)} labels.")
    return list(labels or (f"class {index}" for index in range(len(scores))))


def _likeliest(scores: np.ndarray | None, names: list[str]) -> list[tuple[str, float]]:
    if scores is None:
        return []
    best = np.argsort(-scores, kind="stable")[:TOP]
    return [(names[index], float(scores[index])) for index in best]


def _panels(
    subject: maps.Subject, overlays: Sequence[maps.Overlay], layers: Sequence[np.ndarray]
) -> Iterator[_Picture]:
    """Yields the pictures of what the page shows over the image, for use elsewhere."""
    *relevance, rollout, similarity = overlays
    named = {"rollout": rollout, "similarity": similarity}
    if relevance:
        named["relevance"] = relevance[0]
    for name, overlay in named.items():
        title = f"{overlay.name[0].lower()}{overlay.name[1:]}"
        draw = functools.partial(
            pictures.plot_heatmap, subject.image, overlay.values, title=title, unit=overlay.unit
        )
        yield _Picture(name, draw)
    config = attention.find_vit(subject.model).config
    title = f"what {maps.asker(subject.model)} takes from each patch in layer {len(layers) - 1}"
    if config.pooling == "map":
        title = "what attention pooling takes from each patch"
    draw = functools.partial(pictures.plot_heads, layers[-1], title=title, unit="attention weight")
    yield _Picture("heads", draw)


def _charts(subject: maps.Subject) -> Iterator[_Picture]:
    """Yields what is drawn beside the image: of the model, or of all its layers."""
    model = subject.model
    distances = attention.mean_attention_distance(model, subject.inputs)
    yield _Picture(
        "distance",
        functools.partial(pictures.plot_attention_distance, distances),
        "How far each head looks, in this image alone; the paper averages over 128 images.",
    )
    if attention.find_vit(model).config.adds_positions:
        yield _Picture(
            "positions",
            functools.partial(
                pictures.plot_position_similarity, pictures.position_similarity(model)
            ),
            "Which places are alike in the model's position embeddings, whatever the image.",
        )
    filters = pictures.embedding_filters(model)
    if filters.components.shape[-1] in (1, 3):
        yield _Picture(
            "filters",
            functools.partial(pictures.plot_filters, filters),
            "What the patch embedding looks for in a patch, whatever the image.",
        )


def _written(chart: _Picture, file: Path) -> dict[str, Any]:
    """Returns a chart for the page, in its light and in its dark scheme."""
    dark = io.BytesIO()
    with pictures.light_on_dark():
        figure = chart.draw()
        figure.savefig(dark, dpi=_DPI, transparent=True)
    return {
        "name": chart.name,
        "caption": chart.caption,
        "day": pages.data_uri(file.read_bytes()),
        "night": pages.data_uri(dark.getvalue()),
        "width": round(_PIXELS_PER_INCH * figure.get_figwidth()),
    }
