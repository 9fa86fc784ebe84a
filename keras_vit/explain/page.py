"""Writes everything there is to see about a model and one image as PNG files and one page."""

import base64
import dataclasses
import html
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np

from keras_vit.atomic import whole_file
from keras_vit.explain import attention, pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "index.html"
TOP = 5


@dataclasses.dataclass(frozen=True, eq=False)
class _Picture:
    """One figure of the page: a file name, the drawing, and what it shows."""

    name: str
    figure: "Figure"
    caption: str


@dataclasses.dataclass(frozen=True, eq=False)
class _Subject:
    """What is explained: a model, an image (H, W, channels) in pixels, the same as an input."""

    model: keras.Model
    image: np.ndarray
    inputs: np.ndarray


def write_explanation(
    model: keras.Model,
    image: np.ndarray,
    out: str | os.PathLike[str],
    *,
    labels: Sequence[str] | None = None,
    target: int | None = None,
    title: str = "image",
) -> tuple[Path, ...]:
    """Writes pictures of what a model sees in an image, and `index.html`, which holds them all.

    The page needs no other file and no network.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside. One that scales pixels
            itself, or stands in a user's model, gets them as they are, 0..255.
        image: (H, W, channels) pixels 0..255; of another size than the model's it is resampled, as
            the page says.
        out: the folder to write to; made if need be.
        labels: the name of each class, in the order of the model's outputs.
        target: the class whose relevance is shown; None for the likeliest.
        title: what the page calls the image, for instance its file name.

    Returns:
        The files written, the page last.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the image has another shape, or there is no such class.
    """
    subject, note = _subject(model, image)
    scores = _scores(model, subject.inputs)
    names = _names(labels, scores)
    if scores is not None and target is None:
        target = int(scores.argmax())
    panels = list(_pictures(subject, None if scores is None else target, names))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for picture in panels:
        files.append(out / f"{picture.name}.png")
        with whole_file(files[-1]) as temporary:
            picture.figure.savefig(temporary, dpi=110)
    text = _page(title, [note, _verdict(scores, names)], panels, files)
    with whole_file(out / PAGE) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return (*files, out / PAGE)


def _subject(model: keras.Model, image: np.ndarray) -> tuple[_Subject, str]:
    image = np.asarray(image)
    if image.ndim != 3:
        raise ValueError(
            f"An image has the shape (height, width, channels). Received: shape {image.shape}."
        )
    vit = attention.find_vit(model)
    size = attention.image_size(model) or image.shape[:2]
    note = f"The image has {image.shape[0]}x{image.shape[1]} pixels, as the model takes it."
    if image.shape[:2] != size:
        note = (
            f"The image of {image.shape[0]}x{image.shape[1]} pixels was resampled to "
            f"{size[0]}x{size[1]}, the size that the model takes."
        )
    inputs = attention.resample(image[None], size, antialias=vit.config.antialias)
    pixels = np.asarray(vit.preprocess_input(inputs)) if model is vit else inputs
    return _Subject(model, inputs[0], pixels), note


def _scores(model: keras.Model, inputs: np.ndarray) -> np.ndarray | None:
    """Returns probabilities (C,), or None of a model that is not a classifier."""
    outputs = np.asarray(attention.to_numpy(model(inputs, training=False))[0], np.float64)
    if outputs.ndim != 1 or (attention.find_vit(model) is model and model.config.classes is None):
        return None
    if outputs.min() >= 0 and abs(outputs.sum() - 1) < 1e-3:
        return outputs
    powers = np.exp(outputs - outputs.max())
    return np.asarray(powers / powers.sum())


def _names(labels: Sequence[str] | None, scores: np.ndarray | None) -> list[str]:
    if scores is None:
        return []
    if labels is not None and len(labels) != len(scores):
        raise ValueError(f"The model has {len(scores)} classes. Received: {len(labels)} labels.")
    return list(labels or (f"class {index}" for index in range(len(scores))))


def _verdict(scores: np.ndarray | None, names: list[str]) -> str:
    if scores is None:
        return "The model has no classifier."
    best = np.argsort(-scores, kind="stable")[:TOP]
    listed = ", ".join(f"{names[index]} {scores[index]:.1%}" for index in best)
    return f"The model's likeliest classes: {listed}."


def _pictures(subject: _Subject, target: int | None, names: list[str]) -> Iterator[_Picture]:
    model, inputs = subject.model, subject.inputs
    rollout = attention.attention_rollout(model, inputs)[0]
    yield _Picture(
        "rollout",
        pictures.plot_heatmap(
            subject.image, rollout, title="attention rollout", unit="share of the patch"
        ),
        "How much of each patch reaches the answer by way of attention, through all layers.",
    )
    if target is not None:
        speaks = attention.class_relevance(model, inputs, target)[0]
        yield _Picture(
            "relevance",
            pictures.plot_heatmap(
                subject.image, speaks, title=f"relevance for {names[target]}", unit="score"
            ),
            f"Which patches speak for {names[target]}: attention weighted by its gradient.",
        )
    yield _heads(model, inputs)
    yield _similarity(subject, rollout)
    yield _Picture(
        "distance",
        pictures.plot_attention_distance(attention.mean_attention_distance(model, inputs)),
        "How far each head looks, in this image alone; the paper averages over 128 images.",
    )
    if attention.find_vit(model).config.adds_positions:
        yield _Picture(
            "positions",
            pictures.plot_position_similarity(pictures.position_similarity(model)),
            "Which places are alike in the model's position embeddings, whatever the image.",
        )
    filters = pictures.embedding_filters(model)
    if filters.components.shape[-1] in (1, 3):
        yield _Picture(
            "filters",
            pictures.plot_filters(filters),
            "What the patch embedding looks for in a patch, whatever the image.",
        )


def _heads(model: keras.Model, inputs: np.ndarray) -> _Picture:
    config = attention.find_vit(model).config
    last = config.num_layers - 1
    if config.pooling == "map":
        row = attention.pooling_attention(model, inputs)[0]
        title = "what attention pooling takes from each patch"
    else:
        weights = attention.attention_weights(model, inputs, layers=-1)[0, 0]
        row, who = (weights[:, 0], "the class token")
        if not config.class_token:
            row = weights[:, config.num_prefix_tokens :].mean(axis=1)
            who = "the average patch"
        title = f"what {who} takes from each patch in layer {last}"
    figure = pictures.plot_heads(
        attention.on_grid(config, row), title=title, unit="attention weight"
    )
    return _Picture("heads", figure, f"{title[0].upper()}{title[1:]}, head by head.")


def _similarity(subject: _Subject, rollout: np.ndarray) -> _Picture:
    row, column = (int(place) for place in np.unravel_index(rollout.argmax(), rollout.shape))
    alike = pictures.token_similarity(subject.model, subject.inputs, token=(row, column))[0]
    figure = pictures.plot_heatmap(
        subject.image, alike, title=f"like patch ({row}, {column})", unit="cosine similarity"
    )
    return _Picture(
        "similarity",
        figure,
        f"How like each patch's last token is to that of the patch in row {row}, column {column}, "
        "from which the rollout takes most.",
    )


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
figure { margin: 2rem 0; }
img { max-width: 100%; height: auto; border: 1px solid #ccc; }
figcaption { color: #444; }
"""


def _page(title: str, notes: list[str], panels: list[_Picture], files: list[Path]) -> str:
    figures = "\n".join(_figure(*pair) for pair in zip(panels, files, strict=True))
    paragraphs = "\n".join(f"<p>{html.escape(note)}</p>" for note in notes)
    name = html.escape(title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>What the model sees in {name}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>What the model sees in {name}</h1>
{paragraphs}
{figures}
</body>
</html>
"""


def _figure(picture: _Picture, file: Path) -> str:
    content = base64.b64encode(file.read_bytes()).decode()
    caption = html.escape(picture.caption)
    return (
        f'<figure id="{picture.name}"><img src="data:image/png;base64,{content}" alt="{caption}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
