"""The most confident mistakes: where a model is wrong and sure, the data is worth a look."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.atomic import whole_file
from keras_vit.data import Split
from keras_vit.evaluation.outputs import log_probabilities


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One image that was taken for another class.

    Attributes:
        index: its place in the split.
        name: its path, or its number where the images are in memory.
        label: the class that it is filed under.
        predicted: the class that it was taken for.
        probability: of the class that it was taken for, 0..1.
    """

    index: int
    name: str
    label: str
    predicted: str
    probability: float


def confident_mistakes(
    model: keras.Model, split: Split, *, labels: Sequence[str], count: int = 16
) -> tuple[Mistake, ...]:
    """Returns the mistakes that a model is surest of, the surest first.

    Args:
        model: takes pixels 0..255, gives logits or probabilities of shape (batch, classes).
        split: the images and their targets.
        labels: the name of each class, in the order of the model's outputs.
        count: how many; fewer where fewer were made.

    Raises:
        ValueError: the split is empty, the model has another number of classes, or `count` is below
            one.
    """
    if count < 1 or model.output_shape[-1] != len(labels):
        raise ValueError(
            f"The model has {model.output_shape[-1]} classes, and count must be above 0. "
            f"Received: {len(labels)} labels, count={count!r}."
        )
    scores = log_probabilities(model, split)
    predicted = scores.argmax(axis=1)
    sure = scores.max(axis=1)
    wrong = np.flatnonzero(predicted != split.targets)
    ranked = wrong[np.argsort(-sure[wrong], kind="stable")][:count]
    return tuple(
        Mistake(
            index=int(index),
            name=split.name(int(index)),
            label=labels[split.targets[index]],
            predicted=labels[predicted[index]],
            probability=float(np.exp(sure[index])),
        )
        for index in ranked
    )


def plot_mistakes(mistakes: Sequence[Mistake], split: Split, file: str | os.PathLike[str]) -> None:
    """Draws mistakes with their images: what each is filed under, what it was taken for.

    Args:
        mistakes: from `confident_mistakes`.
        split: the images that they are about.
        file: the PNG file to write or replace, whole or not at all.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no mistakes to draw.
    """
    try:
        import matplotlib.figure
        import matplotlib.layout_engine
    except ImportError:
        raise ImportError(
            "Pictures are drawn by matplotlib, which is not installed; "
            'run: pip install "keras-vit[data]"'
        ) from None
    if not mistakes:
        raise ValueError("There are no mistakes to draw.")
    columns = min(len(mistakes), 4)
    rows = -(-len(mistakes) // columns)
    layout = matplotlib.layout_engine.ConstrainedLayoutEngine(h_pad=0.15)
    figure = matplotlib.figure.Figure(figsize=(2.6 * columns, 3.0 * rows), layout=layout)
    all_axes: Any = figure.subplots(rows, columns, squeeze=False)
    for axes, mistake in zip(all_axes.flat, mistakes, strict=False):
        axes.imshow(split.pixels(mistake.index))
        axes.set_title(
            f"{_short(mistake.label)}\ntaken for {_short(mistake.predicted)}, "
            f"{100 * mistake.probability:.1f} %",
            fontsize=9,
            parse_math=False,
        )
        axes.set_xlabel(_short(Path(mistake.name).name), fontsize=7, parse_math=False)
    for axes in all_axes.flat:
        axes.set(xticks=[], yticks=[])
    for axes in all_axes.flat[len(mistakes) :]:
        axes.set_axis_off()
    with whole_file(Path(file)) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def _short(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:19]}…"
