"""Writes `report.html`: everything there is to say of a run, in a page that needs no other file."""

import csv
import dataclasses
import hashlib
import json
import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit import __version__, pages
from keras_vit.data import ImageData, naming_damaged, resizing_of
from keras_vit.data.source import DAMAGED, first_names
from keras_vit.evaluation import Calibration, Evaluation, Predictions, write_report
from keras_vit.limits import counted, short
from keras_vit.model import VisionTransformer
from keras_vit.reporting.gallery import attention_views, make_gallery
from keras_vit.training import Run
from keras_vit.training.run import HISTORY, MODEL, RECONSTRUCTIONS, REPORT, SPLITS, flat

Pairs = list[tuple[str, str]]

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
        evaluations: evaluations with their predictions, by the name of their split.
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
    content, run = _measured(subject), subject.run
    data = content.pop("data", {})
    data["curves"] = None if run is None else read_curves(run)
    reconstructions = None
    if run is not None and (run.path / RECONSTRUCTIONS).is_file():
        from PIL import Image

        with Image.open(run.path / RECONSTRUCTIONS) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        reconstructions = pages.thumbnail(pixels, side=1200, quality=85)
    return pages.write_page(
        path,
        "report.html",
        title=f"Report of {subject.name}",
        styles=("charts.css", "report.css"),
        scripts=("charts.js", "report.js"),
        data=data,
        reconstructions=reconstructions,
        facts=_summary(subject.model, run, subject.data),
        tables=_tables(subject.model, run),
        use=_use(subject.name, subject.model, run),
        command=subject.command,
        trained_by=() if run is None else run.provenance.commands,
        version=__version__,
        **content,
    )


def write_files(out: str | os.PathLike[str], subject: Subject) -> str | None:
    """Writes metrics.json, confusion.png and report.html, and returns why the last is missing.

    The first two are of its evaluations, where it has some. A report that cannot be written must
    not end what made its numbers.
    """
    if subject.evaluations:
        write_report(out, subject.evaluations)
    try:
        write_report_page(Path(out) / REPORT, subject)
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


def _measured(subject: Subject) -> dict[str, Any]:
    name = _DRAWN if _DRAWN in subject.evaluations else next(iter(subject.evaluations), None)
    if name is None or subject.data is None:
        verdict = "No images were measured."
        if subject.run is not None:
            loss = subject.run.config.get("result", {}).get("validation_loss")
            said = "" if loss is None else f" Its validation loss is {loss:.4f}."
            verdict = f"The model was trained without labels, and has no classifier.{said}"
        return {"measured": None, "notes": [], "verdict": verdict}
    evaluation, split = subject.evaluations[name], subject.data.split(name)
    predictions = evaluation.predictions
    if predictions is None:
        raise ValueError("A report needs the predictions for each image; evaluate the model.")
    labels = [short(label) for label in evaluation.labels]
    with naming_damaged(split):
        images, cells, mistakes = make_gallery(split, predictions, source=subject.data.source)
        views, note = attention_views(subject.model, split, predictions, labels)
    confusion, bins = evaluation.confusion, predictions.calibration
    pairs, is_matrix = _pairs(confusion), len(labels) <= _MATRIX
    scores = [
        dataclasses.asdict(score) | {"label": label}
        for score, label in zip(evaluation.class_scores, labels, strict=True)
        if score.images or score.precision is not None
    ]
    scores.sort(key=lambda score: 2 if score["recall"] is None else score["recall"])
    # Of the matrix, or of the pairs, each cell can be chosen.
    places = np.argwhere(confusion).tolist() if is_matrix else [pair[:2] for pair in pairs]
    # The shade of each cell of the matrix: 0 empty, 1 to 4 by its share of the row.
    totals = np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    shades = np.digitize(confusion / totals, [1e-12, 0.1, 0.4, 0.8]).tolist()
    data = {
        "labels": labels,
        "matrix": confusion.tolist() if is_matrix else None,
        "images": images,
        "cells": cells,
        "counts": {f"{row},{column}": int(confusion[row, column]) for row, column in places},
        "calibration": _bins(bins),
    }
    numbers = {"split": name, "facts": _numbers(subject.evaluations)}
    return {
        "data": data,
        "measured": {**numbers, "calibration_error": f"{bins.error:.2%}"},
        "verdict": (
            f"{int(np.trace(confusion)):,} of {evaluation.images:,} {name} images are correct: "
            f"accuracy {evaluation.accuracy:.2%}."
        ),
        "notes": _notes(predictions, evaluation, subject.evaluations.get("validation")),
        "shares": shades if is_matrix else None,
        "pairs": pairs,
        "classes": scores[:_CLASSES],
        "hidden_classes": max(len(scores) - _CLASSES, 0),
        "mistakes": mistakes,
        "views": views,
        "attention_note": note,
    }


def _pairs(confusion: np.ndarray) -> list[tuple[int, int, int, float]]:
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_PAIRS]
    totals = confusion.sum(axis=1)
    places = (divmod(int(place), len(wrong)) for place in order)
    return [
        (truth, taken, int(wrong[truth, taken]), float(wrong[truth, taken] / totals[truth]))
        for truth, taken in places
        if wrong[truth, taken]
    ]


def _bins(bins: Calibration) -> list[dict[str, float]]:
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


def _notes(
    predictions: Predictions, evaluation: Evaluation, validation: Evaluation | None
) -> list[str]:
    notes, is_one = [], len(predictions.targets) == 1
    if (count := len(predictions.targets)) < 100:
        notes.append(
            f"{counted(count, 'image')} {'is' if is_one else 'are'} few: one image more or less "
            f"changes the accuracy by {1 / count:.1%}."
        )
    if validation is not None and validation.accuracy > evaluation.accuracy:
        notes.append(
            f"Validation accuracy is higher, {validation.accuracy:.2%}, as these images chose the "
            "epoch. Of new images expect the accuracy of the test images."
        )
    largest = np.bincount(predictions.targets).max() / len(predictions.targets)
    if len(evaluation.labels) > 1 and largest > evaluation.accuracy:
        notes.append(
            f"The largest class has {largest:.1%} of the images: always naming it would be right "
            "more often than this model."
        )
    return notes


def _summary(model: keras.Model, run: Run | None, data: ImageData | None) -> Pairs:
    height, width = resizing_of(model).size
    pairs = [("Model", _model_name(model))]
    if not _is_exported(model):
        pairs.append(("Parameters", f"{model.count_params():,}"))
    pairs.append(("Takes images of", f"{height}x{width} pixels (height x width)"))
    if run is not None:
        pairs += _training(run)
    labels = data.labels if data is not None else (run.labels if run is not None else ())
    if labels:
        listed = ", ".join(short(label, 30) for label in labels[:12])
        more = f" and {len(labels) - 12:,} more" if len(labels) > 12 else ""
        pairs.append(("Classes", f"{len(labels):,}: {listed}{more}"))
    if data is not None and (run is None or data.source != run.config["data"]["source"]):
        counts = ", ".join(f"{n:,} {name}" for name, n in data.counts.items() if n)
        pairs.append(("Measured on", f"{short(data.source, 200)}: {counts} images"))
        pairs += _skipped(first_names(data.reasons), data.source)
    return pairs


def _skipped(skipped: Mapping[str, Any], source: str, verb: str = "Left out") -> Pairs:
    pairs = []
    for reason, files in skipped.items():
        names = [short(str(name).removeprefix(f"{source}{os.sep}")) for name in files["names"]]
        more = f" and {rest} more" if (rest := files["count"] - len(names)) else ""
        head, why = (f"{verb}, damaged", "") if reason == DAMAGED else (verb, f", as they {reason}")
        pairs.append((head, f"{files['count']}{why}: {', '.join(names)}{more}"))
    return pairs


def _training(run: Run) -> Pairs:
    config = run.config
    data, result, recipe = config["data"], config.get("result", {}), config.get("recipe", {})
    images = data.get("images", {})
    pairs = [("Images from", short(data["source"], 200))]
    if isinstance(images, Mapping) and images:
        pairs.append(("Images", ", ".join(f"{n:,} {name}" for name, n in images.items())))
    # A run from before the others were recorded has the damaged files alone.
    damaged = first_names({DAMAGED: data.get("damaged") or ()})
    pairs += _skipped(config.get("skipped", damaged), data["source"])
    replaced = first_names({DAMAGED: result.get("replaced") or ()})
    pairs += _skipped(replaced, data["source"], "Replaced")
    epochs, best = result.get("epochs"), result.get("best_epoch")
    if epochs:
        pairs.append(
            (
                "Trained for",
                f"{counted(epochs, 'epoch')}, {counted(result.get('steps'), 'step')} of "
                f"{counted(recipe.get('batch_size'), 'image')}; epoch {best} was kept",
            )
        )
    origin = run.provenance
    if origin.weights is not None:
        licence = f", licence {origin.licence}" if origin.licence else ""
        pairs.append(("Started from", short(f"{origin.weights}{licence}", 200)))
    if origin.teacher is not None:
        licence = f", licence {origin.teacher_licence}" if origin.teacher_licence else ""
        pairs.append(("Distilled from", short(f"{origin.teacher}{licence}", 200)))
    if origin.restrictions:
        pairs.append(("Their terms", origin.restrictions))
    if not result.get("finished", True):
        pairs.append(("Interrupted", "this training has not run to its end"))
    if config.get("objective"):
        pairs.append(("Objective", _shown(config["objective"])))
    pairs.append(("Trained at", str(config.get("made", "unknown"))))
    return pairs


def _tables(model: keras.Model, run: Run | None) -> list[tuple[str, Pairs]]:
    config = model.config if isinstance(model, VisionTransformer) else None
    named: list[tuple[str, Mapping[str, Any]]]
    if run is None:
        fields = {} if config is None else config.to_dict()
        versions = {"keras_vit": __version__, "keras": keras.__version__}
        named = [("Model", fields), ("Versions", versions)]
    else:
        read = run.config
        names = ("seed", "objective", "trained_parameters")
        others: dict[str, Any] = {name: read[name] for name in names if name in read}
        hashes = {}
        for name in (MODEL, SPLITS):
            if (run.path / name).is_file():
                with (run.path / name).open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                hashes[f"SHA-256 of {name}"] = digest
        if state := read.get("result", {}).get("state_sha256"):
            hashes["state of the training"] = state
        named = [
            ("Recipe", dict(read.get("recipe", {})) | others),
            ("Model", read.get("model", {})),
            ("Execution", read.get("execution", {})),
            ("Versions", read.get("versions", {})),
            ("Hashes", hashes),
        ]
    pairs = {name: flat(dict(one)).items() for name, one in named if one}
    return [(name, [(k, _shown(v)) for k, v in each]) for name, each in pairs.items()]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return short(text, 200)


def _use(name: str, model: keras.Model, run: Run | None) -> dict[str, Any]:
    """Returns what decides how the page says to use the model."""
    source = "photos" if run is None else run.config["data"]["source"]
    has_classes = not isinstance(model, VisionTransformer) or model.config.classes is not None
    own = {"name": repr(name), "path": shlex.quote(name), "source": shlex.quote(source)}
    kind = {"is_exported": _is_exported(model), "is_run": run is not None}
    return {**own, **kind, "has_classes": has_classes}


def _is_exported(model: keras.Model) -> bool:
    return not model.count_params()


def _model_name(model: keras.Model) -> str:
    if _is_exported(model):
        return f"{short(model.name)}, exported"
    if not isinstance(model, VisionTransformer):
        return f"{type(model).__name__} {short(model.name)}"
    config = model.config
    patch = config.patch_size
    return (
        f"Vision Transformer, {config.num_layers} layers of width {config.hidden_dim}, "
        f"{config.num_heads} heads, patches of {patch}"
    )
