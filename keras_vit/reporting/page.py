"""Writes `report.html`: everything there is to say of a run, in a page that needs no other file."""

import csv
import dataclasses
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit import pages, version
from keras_vit.data import ImageData, naming_damaged
from keras_vit.evaluation import Answers, Calibration, Evaluation, calibration_of_answers
from keras_vit.limits import counted
from keras_vit.reporting import facts
from keras_vit.reporting.gallery import attention_views, make_gallery, short
from keras_vit.training import Run
from keras_vit.training.run import HISTORY, RECONSTRUCTIONS

# Up to so many classes the page has a confusion matrix, above it the most confused pairs.
_MATRIX = 30
_PAIRS, _CLASSES, _POINTS = 50, 1000, 500
_DRAWN = "test"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What a report is about.

    Attributes:
        name: what the page calls it, such as the path of the run.
        model: the model; it takes pixels 0..255.
        run: its run, if it is one's.
        data: the images that it was measured on; None for a run of `pretrain`.
        evaluations: evaluations with their answers, by the name of their split.
        command: the command line that measured it, as typed.
    """

    name: str
    model: keras.Model
    run: Run | None = None
    data: ImageData | None = None
    evaluations: Mapping[str, Evaluation] = dataclasses.field(default_factory=dict)
    command: str | None = None


def write_report_page(path: str | os.PathLike[str], subject: Subject) -> int:
    """Writes the report of a run, or of a model on images, and returns its size in bytes.

    Whatever the data, the page has less than 3 MB: it shows up to 160 images, the 1,000 classes
    with the lowest recall, and of more than 30 classes the pairs that are confused most.

    Args:
        path: the file to write or replace, whole or not at all.
        subject: what to report.

    Raises:
        ImportError: Jinja2 is not installed.
        OSError: the file cannot be written.
        ValueError: the run's files are damaged, or an image is gone.
    """
    content = _measured(subject)
    data = content.pop("data", {})
    data["curves"] = None if subject.run is None else read_curves(subject.run)
    return pages.write_page(
        path,
        "report.html",
        title=f"Report of {subject.name}",
        styles=("charts.css", "report.css"),
        scripts=("charts.js", "report.js"),
        data=data,
        reconstructions=_reconstructions(subject.run),
        facts=facts.summary(subject.model, subject.run, subject.data),
        tables=facts.tables(subject.model, subject.run),
        uses=facts.uses(subject.name, subject.model, subject.run),
        command=subject.command,
        trained_by=() if subject.run is None else facts.provenance(subject.run).commands,
        version=version.__version__,
        **content,
    )


def try_report(path: str | os.PathLike[str], subject: Subject) -> str | None:
    """Writes the report as `write_report_page`, and returns None, or why it could not be written.

    A report that cannot be written must not end what made its numbers.
    """
    try:
        write_report_page(path, subject)
    except Exception as error:  # whatever is wrong with a page, a template, an image
        reason = " ".join(str(error).split()) or type(error).__name__
        again = f"keras-vit evaluate {shlex.quote(subject.name)} --out FOLDER"
        return f"report.html was not written, all else is: {reason} Once that is mended: {again}"
    return None


def read_curves(run: Run) -> list[dict[str, Any]] | None:
    """Returns the charts of a run's history; None of a run without one.

    Of more than 500 epochs only some are drawn, the first and the last among them.

    Raises:
        ValueError: history.csv is damaged.
    """
    file = run.path / HISTORY
    if not file.is_file():
        return None
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            rows = [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(stream)]
        epochs = [int(row["epoch"] or 0) for row in rows]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{str(file)!r} is damaged: {error}; put back the run's own.") from error
    if not rows:
        return None
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _POINTS)).astype(int)).tolist()

    def series(name: str, column: str) -> dict[str, Any]:
        return {"name": name, "points": [[epochs[at], rows[at].get(column)] for at in places]}

    charts = []
    for title, column in (("Loss", "loss"), ("Accuracy", "accuracy")):
        if any(row.get(column) is not None for row in rows):
            pair = [series("training", column), series("validation", f"validation_{column}")]
            charts.append({"title": title, "series": pair, "isShare": column == "accuracy"})
    rate = [series("learning rate", "learning_rate")]
    charts.append({"title": "Learning rate", "series": rate, "isShare": False, "fromZero": True})
    kept = run.config.get("result", {}).get("best_epoch")
    return [{"x": "epoch", "mark": kept, **chart} for chart in charts]


def _number(text: str | None) -> float | None:
    value = float(text) if text else math.nan
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _reconstructions(run: Run | None) -> str | None:
    if run is None or not (run.path / RECONSTRUCTIONS).is_file():
        return None
    from PIL import Image

    with Image.open(run.path / RECONSTRUCTIONS) as picture:
        return pages.thumbnail(np.asarray(picture.convert("RGB")), side=1200, quality=85)


def _measured(subject: Subject) -> dict[str, Any]:
    """Returns what the page says of the measured split: the test images, or else the others."""
    name = _DRAWN if _DRAWN in subject.evaluations else next(iter(subject.evaluations), None)
    if name is None or subject.data is None:
        return {**_UNMEASURED, "verdict": facts.unmeasured(subject.run)}
    evaluation, split = subject.evaluations[name], subject.data.split(name)
    answers = evaluation.answers
    if answers is None:
        raise ValueError("A report needs the answers to the single images; evaluate the model.")
    labels = [short(label) for label in evaluation.labels]
    with naming_damaged(split):
        gallery = make_gallery(split, answers, source=subject.data.source)
        views, note = attention_views(subject.model, split, answers, labels)
    bins = calibration_of_answers(answers.confidence, answers.targets == answers.predicted)
    scores, pairs = _scores(evaluation, labels), _pairs(evaluation)
    is_matrix = len(labels) <= _MATRIX
    data = {
        "labels": labels,
        "matrix": evaluation.confusion.tolist() if is_matrix else None,
        "images": gallery.images,
        "cells": gallery.cells,
        "counts": _counts(evaluation, pairs, is_matrix=is_matrix),
        "calibration": _bins(bins),
    }
    numbers = {"split": name, "facts": _numbers(subject.evaluations)}
    return {
        "data": data,
        "measured": {**numbers, "calibration_error": f"{bins.error:.2%}"},
        "verdict": (
            f"{int(np.trace(evaluation.confusion)):,} of {evaluation.images:,} {name} images are "
            f"recognised: accuracy {evaluation.accuracy:.2%}."
        ),
        "notes": _notes(answers, evaluation),
        "shares": _shares(evaluation) if is_matrix else None,
        "pairs": pairs,
        "classes": scores[:_CLASSES],
        "hidden_classes": max(len(scores) - _CLASSES, 0),
        "mistakes": gallery.mistakes,
        "views": views,
        "attention_note": note,
    }


_UNMEASURED: dict[str, Any] = {"measured": None, "notes": []}


def _scores(evaluation: Evaluation, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the classes that have images or were named, the lowest recall first."""
    scores = [
        dataclasses.asdict(score) | {"label": label}
        for score, label in zip(evaluation.class_scores, labels, strict=True)
        if score.images or score.precision is not None
    ]
    return sorted(scores, key=lambda score: 2 if score["recall"] is None else score["recall"])


def _pairs(evaluation: Evaluation) -> list[tuple[int, int, int, float]]:
    """Returns (true class, predicted class, images, share of the class) of the worst pairs."""
    wrong = evaluation.confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_PAIRS]
    totals = evaluation.confusion.sum(axis=1)
    places = (divmod(int(place), len(wrong)) for place in order)
    return [
        (truth, taken, int(wrong[truth, taken]), float(wrong[truth, taken] / totals[truth]))
        for truth, taken in places
        if wrong[truth, taken]
    ]


def _counts(
    evaluation: Evaluation, pairs: list[tuple[int, int, int, float]], *, is_matrix: bool
) -> dict[str, int]:
    """Returns the number of images in each cell that can be chosen."""
    if is_matrix:
        places = [(int(row), int(column)) for row, column in np.argwhere(evaluation.confusion)]
    else:
        places = [(truth, taken) for truth, taken, *_ in pairs]
    return {f"{row},{column}": int(evaluation.confusion[row, column]) for row, column in places}


def _shares(evaluation: Evaluation) -> list[list[int]]:
    """Returns the shade of each cell of the matrix: 0 empty, 1 to 4 by its share of the row."""
    totals = np.maximum(evaluation.confusion.sum(axis=1, keepdims=True), 1)
    shades = np.digitize(evaluation.confusion / totals, [1e-12, 0.1, 0.4, 0.8])
    return [[int(shade) for shade in row] for row in shades]


def _bins(bins: Calibration) -> list[dict[str, float]]:
    """Returns the bins of the reliability diagram that have images."""
    count = len(bins.images)
    return [
        {
            "from": place / count,
            "to": (place + 1) / count,
            "images": int(bins.images[place]),
            "confidence": round(float(bins.confidence[place]), 5),
            "accuracy": round(float(bins.accuracy[place]), 5),
        }
        for place in range(count)
        if bins.images[place]
    ]


def _numbers(evaluations: Mapping[str, Evaluation]) -> list[tuple[str, str]]:
    rows = []
    for name, evaluation in evaluations.items():
        top5 = evaluation.top5_accuracy
        rows += [
            (f"{name} images", f"{evaluation.images:,}"),
            (f"{name} accuracy", f"{evaluation.accuracy:.2%}"),
            *([] if top5 is None else [(f"{name} top-5 accuracy", f"{top5:.2%}")]),
            (f"{name} loss", f"{evaluation.loss:.4f}"),
        ]
    return rows


def _notes(answers: Answers, evaluation: Evaluation) -> list[str]:
    """Returns what a reader should be warned of."""
    notes, is_one = [], len(answers.targets) == 1
    if len(answers.targets) < 100:
        notes.append(
            f"{counted(len(answers.targets), 'image')} {'is' if is_one else 'are'} few: one image "
            f"more or less changes the accuracy by {1 / len(answers.targets):.1%}."
        )
    largest = np.bincount(answers.targets).max() / len(answers.targets)
    if len(evaluation.labels) > 1 and largest > evaluation.accuracy:
        notes.append(
            f"The largest class has {largest:.1%} of the images: always naming it would be right "
            "more often than this model."
        )
    return notes
