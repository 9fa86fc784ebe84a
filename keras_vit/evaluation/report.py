"""Writes down an evaluation: numbers as JSON, confusions and confident mistakes as pictures."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit import atomic, environment
from keras_vit.atomic import whole_file
from keras_vit.data import Split, Views
from keras_vit.evaluation.metrics import Evaluation
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
    model: keras.Model,
    split: Split,
    *,
    labels: Sequence[str],
    count: int = 16,
    tta: Views | None = None,
) -> tuple[Mistake, ...]:
    """Returns the mistakes that a model is surest of, the surest first.

    Args:
        model: takes pixels 0..255, gives logits or probabilities of shape (batch, classes).
        split: the images and their targets.
        labels: the name of each class, in the order of the model's outputs.
        count: how many; fewer where fewer were made.
        tta: the views of test-time augmentation; None for none.

    Raises:
        ValueError: the split is empty, the model has another number of classes, or `count` is below
            one.
    """
    if count < 1 or model.output_shape[-1] != len(labels):
        raise ValueError(
            f"The model has {model.output_shape[-1]} classes, and count must be above 0. "
            f"Received: {len(labels)} labels, count={count!r}."
        )
    scores = log_probabilities(model, split, tta=tta)
    predicted = scores.argmax(axis=1)
    sure = scores.max(axis=1)
    wrong = np.flatnonzero(predicted != split.targets)
    order = wrong[np.argsort(-sure[wrong], kind="stable")][:count]
    return tuple(
        Mistake(
            index=int(index),
            name=split.name(int(index)),
            label=labels[split.targets[index]],
            predicted=labels[predicted[index]],
            probability=float(np.exp(sure[index])),
        )
        for index in order
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
    with environment.pictures():
        import matplotlib.figure
        import matplotlib.layout_engine
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


METRICS, CONFUSION = "metrics.json", "confusion.png"

# Up to so many classes each cell shows its number and each row its label.
_NUMBERED, _LABELLED = 20, 100


def write_report(
    directory: str | os.PathLike[str], evaluations: Mapping[str, Evaluation], *, drawn: str = "test"
) -> None:
    """Writes `metrics.json` with every evaluation and `confusion.png` with one.

    Example:
        >>> import tempfile
        >>> evaluation = Evaluation(labels=("cat", "dog"), confusion=np.array([[3, 1], [0, 4]]),
        ...                         loss=0.5, top5_accuracy=None)
        >>> folder = tempfile.mkdtemp()
        >>> write_report(folder, {"test": evaluation})
        >>> sorted(os.listdir(folder))
        ['confusion.png', 'metrics.json']

    Args:
        directory: where to write; it must exist.
        evaluations: evaluations by the name of their split.
        drawn: the one to draw; where there is none of that name, the last is.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no evaluation.
    """
    directory = Path(directory)
    numbers = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
    if not evaluations:
        raise ValueError("A report needs the evaluation of a split; give one or more.")
    name = drawn if drawn in evaluations else list(evaluations)[-1]
    with atomic.whole_file(directory / CONFUSION) as file:
        plot_confusion(evaluations[name], file)
    with atomic.whole_file(directory / METRICS) as file:
        file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def plot_confusion(evaluation: Evaluation, file: Path) -> None:
    """Draws which class (row) was taken for which (column), each row in per cent of its images.

    Args:
        evaluation: what to draw.
        file: the picture to write, in a format that its ending names.

    Raises:
        ImportError: matplotlib is not installed.
    """
    with environment.pictures():
        import matplotlib.colors
        import matplotlib.figure
    classes = len(evaluation.labels)
    side = min(max(3.5 + 0.45 * classes, 4.5), 14)
    figure = matplotlib.figure.Figure(figsize=(side + 0.8, side), layout="constrained")
    axes = figure.subplots()
    image_counts = evaluation.confusion.sum(axis=1, keepdims=True)
    share = 100 * evaluation.confusion / np.maximum(image_counts, 1)
    # The square root lets one image in a hundred be seen.
    scale = matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=100)
    picture = axes.imshow(share, cmap="Greys", norm=scale)
    figure.colorbar(picture, ax=axes, label="per cent of the class", shrink=0.8)
    axes.set(
        xlabel="predicted class",
        ylabel="true class",
        title=f"{evaluation.images} images, {100 * evaluation.accuracy:.2f} % right",
    )
    _label_axes(axes, evaluation.labels)
    if classes <= _NUMBERED:
        _number_cells(axes, evaluation.confusion, share)
    figure.savefig(file, dpi=120)


def _short(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:19]}…"


def _label_axes(axes: Any, labels: tuple[str, ...]) -> None:
    every = -(-len(labels) // _LABELLED)  # of very many classes each second, each third, ...
    places = range(0, len(labels), every)
    short = [
        labels[place] if len(labels[place]) <= 20 else f"{labels[place][:19]}…" for place in places
    ]
    size = 10 if len(labels) <= _NUMBERED else 7 if len(labels) <= 50 else 5
    turn = 90 if max(map(len, short)) > 2 else 0
    axes.set_xticks(places, short, rotation=turn, fontsize=size, parse_math=False)
    axes.set_yticks(places, short, fontsize=size, parse_math=False)


def _number_cells(axes: Any, confusion: np.ndarray, share: np.ndarray) -> None:
    for (row, column), count in np.ndenumerate(confusion):
        if count:
            color = "white" if share[row, column] > 25 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=color)
