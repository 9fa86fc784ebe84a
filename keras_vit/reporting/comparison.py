"""Compares runs: the settings that differ, their curves, their numbers, and whether they differ."""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_vit import pages, version
from keras_vit.data import ImageData
from keras_vit.evaluation import METRICS, Answers, Evaluation, calibration_of_answers, evaluate
from keras_vit.reporting import facts, statistics
from keras_vit.reporting.gallery import short
from keras_vit.reporting.page import read_curves
from keras_vit.training import Run
from keras_vit.training.run import read_fields

MOST = 8
_PARTS = ("objective", "model", "recipe", "seed", "data", "execution", "versions")
_SURE = 0.05
_NOTHING = "\N{EN DASH}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """One run and what it makes of its test images.

    Attributes:
        name: the run's path, as given.
        config: the content of its config.json.
        curves: charts of its history, see `page.read_curves`.
        parameters: number of the model's parameters.
        seconds: wall time of its epochs; None where its history does not say.
        numbers: images, accuracy and loss with 95% intervals, calibration error; empty of a run
            without classifier.
        right: whether the answer to each test image, by what identifies it, is right; empty where
            the images are gone.
    """

    name: str
    config: dict[str, Any]
    curves: list[dict[str, Any]]
    parameters: int
    seconds: float | None
    numbers: dict[str, Any]
    right: Mapping[str, bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs on the same test images.

    Attributes:
        first: name of the one.
        second: name of the other.
        images: how many images both were tested on.
        first_alone: images that the first alone gets right.
        second_alone: images that the second alone gets right.
        p: of McNemar's exact test.
        p_corrected: the same, corrected for the number of pairs (Holm).
    """

    first: str
    second: str
    images: int
    first_alone: int
    second_alone: int
    p: float
    p_corrected: float

    @property
    def verdict(self) -> str:
        """What the test says, as a sentence."""
        if self.p_corrected >= _SURE:
            return "These images do not show that one is better than the other."
        better = self.first if self.first_alone > self.second_alone else self.second
        return f"{better} is better: so uneven a division is hardly chance."


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Several runs side by side.

    Attributes:
        runs: the runs, in the order given.
        settings: the value in each run of every setting that is not the same in all.
        pairs: the pairs of runs that have test images in common.
        notes: what could not be compared, in sentences.
    """

    runs: tuple[Measured, ...]
    settings: dict[str, tuple[Any, ...]]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]


def compare(paths: Sequence[str | os.PathLike[str]]) -> Comparison:
    """Evaluates runs on their test images and compares them.

    Example:
        >>> compare(["one-run"])
        Traceback (most recent call last):
        ValueError: A comparison takes 2 to 8 different runs. Received: 'one-run'.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: fewer than two runs or more than eight, the same run twice, a damaged run, or
            runs with and without classifier.
    """
    names = [os.fsdecode(path) for path in paths]
    if not 2 <= len({os.path.realpath(name) for name in names}) == len(names) <= MOST:
        raise ValueError(
            f"A comparison takes 2 to {MOST} different runs. "
            f"Received: {', '.join(map(repr, names)) or 'none'}."
        )
    notes: list[str] = []
    runs = tuple(_measure(name, notes) for name in names)
    kinds = {run.config.get("objective", "classification") for run in runs}
    if len(kinds) > 1:
        raise ValueError(
            f"Runs of different objectives ({', '.join(sorted(kinds))}) have no number in common; "
            "compare runs of train with each other, or those of pretrain."
        )
    pairs = _pairs(runs, notes) if all(run.numbers for run in runs) else ()
    return Comparison(runs=runs, settings=_differing(runs), pairs=pairs, notes=tuple(notes))


def write_comparison(path: str | os.PathLike[str], comparison: Comparison) -> int:
    """Writes the page of a comparison, which needs no other file; returns its size in bytes.

    Raises:
        ImportError: Jinja2 is not installed.
        OSError: the file cannot be written.
    """
    names = [short(run.name) for run in comparison.runs]
    settings = [
        (name, [facts.shown(value) for value in values])
        for name, values in comparison.settings.items()
    ]
    return pages.write_page(
        path,
        "compare.html",
        title=f"Comparison of {len(names)} runs",
        styles=("charts.css", "report.css"),
        scripts=("charts.js", "compare.js"),
        names=names,
        numbers=_rows(comparison.runs),
        settings=settings,
        pairs=comparison.pairs,
        notes=comparison.notes,
        data={"curves": _curves(comparison.runs)},
        version=version.__version__,
    )


def _measure(name: str, notes: list[str]) -> Measured:
    run = Run.load(name)
    fields: dict[str, Any] = {
        "name": name,
        "config": run.config,
        "curves": read_curves(run) or [],
        "parameters": run.model.count_params(),
        "seconds": _seconds(run),
    }
    if run.config.get("objective", "classification") != "classification":
        return Measured(**fields, numbers={})
    try:
        data = run.data()
        evaluation = evaluate(run.model, data.test, labels=data.labels)
    except (FileNotFoundError, ValueError) as error:
        if not (run.path / METRICS).is_file():
            raise
        notes.append(f"{name} was not measured again, its metrics.json is shown: {error}")
        return Measured(**fields, numbers=_recorded(read_fields(run.path / METRICS)["test"]))
    answers = _answers(evaluation)
    right = (answers.targets == answers.predicted).tolist()
    return Measured(
        **fields,
        numbers=_numbers(evaluation, answers),
        right=dict(zip(_keys(data), right, strict=True)),
    )


def _answers(evaluation: Evaluation) -> Answers:
    if evaluation.answers is None:
        raise ValueError("A comparison needs the answers to the single images.")
    return evaluation.answers


def _seconds(run: Run) -> float | None:
    import csv

    file = run.path / "history.csv"
    if not file.is_file():
        return None
    with file.open(encoding="utf-8", newline="") as stream:
        return sum(float(row.get("seconds") or 0) for row in csv.DictReader(stream))


def _keys(data: ImageData) -> list[str]:
    """Returns what tells each test image from all others, and the name of its class."""
    test = data.test
    return [
        f"{data.source}\0{test.name(place) if test.in_files else place}\0{data.labels[target]}"
        for place, target in enumerate(test.targets.tolist())
    ]


def _numbers(evaluation: Evaluation, answers: Answers) -> dict[str, Any]:
    right = answers.targets == answers.predicted
    return {
        "images": evaluation.images,
        "accuracy": evaluation.accuracy,
        "accuracy_interval": statistics.wilson(int(right.sum()), len(right)),
        "top5_accuracy": evaluation.top5_accuracy,
        "loss": evaluation.loss,
        "loss_interval": statistics.bootstrap(answers.losses),
        "calibration_error": calibration_of_answers(answers.confidence, right).error,
    }


def _recorded(metrics: Mapping[str, Any]) -> dict[str, Any]:
    count = int(metrics["images"])
    return {
        "images": count,
        "accuracy": metrics["accuracy"],
        "accuracy_interval": statistics.wilson(round(metrics["accuracy"] * count), count),
        "top5_accuracy": metrics.get("top5_accuracy"),
        "loss": metrics["loss"],
        "loss_interval": None,
        "calibration_error": None,
    }


def _pairs(runs: Sequence[Measured], notes: list[str]) -> tuple[Pair, ...]:
    """Returns the test of each pair of runs with common images; notes where there are none."""
    results = []
    for first, second in itertools.combinations(runs, 2):
        common = sorted(first.right.keys() & second.right.keys())
        if not common:
            notes.append(
                f"{first.name} and {second.name} have no test image in common, of the same class: "
                "their accuracies are of different images, and no test of the pair is made."
            )
            continue
        if len(common) < max(len(first.right), len(second.right)):
            notes.append(
                f"{first.name} and {second.name} have {len(common)} test images in common; the "
                "test of the pair is about these alone."
            )
        answers = [np.array([run.right[key] for key in common]) for run in (first, second)]
        results.append((first.name, second.name, len(common), statistics.mcnemar(*answers)))
    corrected = statistics.holm([result.p for *_, result in results])
    return tuple(
        Pair(
            first=first,
            second=second,
            images=images,
            first_alone=result.first,
            second_alone=result.second,
            p=result.p,
            p_corrected=p,
        )
        for (first, second, images, result), p in zip(results, corrected, strict=True)
    )


def _differing(runs: Sequence[Measured]) -> dict[str, tuple[Any, ...]]:
    """Returns the values of every setting that is not the same in all runs, by dotted name."""
    each = []
    for run in runs:
        parts = {name: run.config[name] for name in _PARTS if name in run.config}
        each.append(dict(facts.flat({**parts, "classes": run.config["labels"]})))
    names = dict.fromkeys(name for settings in each for name in settings)
    rows = {name: tuple(settings.get(name) for settings in each) for name in names}
    return {name: values for name, values in rows.items() if any(v != values[0] for v in values)}


def _rows(runs: Sequence[Measured]) -> list[tuple[str, list[str]]]:
    """Returns the numbers as text, one row for each, one value for each run."""

    def rate(run: Measured, name: str) -> str:
        value = run.numbers.get(name)
        if value is None:
            return _NOTHING
        ends = run.numbers.get(f"{name}_interval")
        share = name != "loss"
        one = "{:.2%}" if share else "{:.4f}"
        said = one.format(value)
        return said if ends is None else f"{said} ({one.format(ends[0])} to {one.format(ends[1])})"

    rows = [
        (
            "test images",
            [f"{run.numbers['images']:,}" if run.numbers else _NOTHING for run in runs],
        ),
        ("accuracy (95% interval)", [rate(run, "accuracy") for run in runs]),
        ("top-5 accuracy", [rate(run, "top5_accuracy") for run in runs]),
        ("loss (95% interval)", [rate(run, "loss") for run in runs]),
        ("calibration error", [rate(run, "calibration_error") for run in runs]),
    ]
    rows = [row for row in rows if set(row[1]) != {_NOTHING}]
    results = [run.config.get("result", {}) for run in runs]
    return [
        *rows,
        ("parameters", [f"{run.parameters:,}" for run in runs]),
        ("epochs, the one kept", [f"{r.get('epochs')}, {r.get('best_epoch')}" for r in results]),
        (
            "time of the epochs",
            [_NOTHING if r.seconds is None else f"{r.seconds:,.0f} s" for r in runs],
        ),
    ]


def _curves(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """Returns the curves of all runs over each other: one chart for each number."""
    charts: dict[str, dict[str, Any]] = {}
    for run in runs:
        for chart in run.curves:
            for series in chart["series"]:
                title = (
                    series["name"]
                    if len(chart["series"]) == 1
                    else (f"{series['name']} {chart['title'].lower()}")
                )
                title = title.capitalize()
                made = charts.setdefault(
                    title, {**chart, "title": title, "mark": None, "series": []}
                )
                made["series"].append({**series, "name": short(run.name, 40)})
    order = ("Validation accuracy", "Validation loss", "Training accuracy", "Training loss")
    return sorted(
        charts.values(), key=lambda c: order.index(c["title"]) if c["title"] in order else 9
    )
