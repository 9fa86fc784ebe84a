"""Writes down an evaluation: its numbers as JSON, its confusions as a picture."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit import atomic
from keras_vit.evaluation.metrics import Evaluation

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
        drawn: the one to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    directory = Path(directory)
    numbers = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
    with atomic.whole_file(directory / CONFUSION) as file:
        plot_confusion(evaluations[drawn], file)
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
    try:
        import matplotlib.colors
        import matplotlib.figure
    except ImportError:
        raise ImportError(
            "Pictures are drawn by matplotlib, which is not installed; "
            'run: pip install "keras-vit[data]"'
        ) from None
    classes = len(evaluation.labels)
    side = min(max(3.5 + 0.45 * classes, 4.5), 14)
    figure = matplotlib.figure.Figure(figsize=(side + 0.8, side), layout="constrained")
    axes = figure.subplots()
    shown = evaluation.confusion.sum(axis=1, keepdims=True)
    share = 100 * evaluation.confusion / np.maximum(shown, 1)
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
