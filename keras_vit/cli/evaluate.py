"""`keras-vit evaluate`: how well a model names images."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import flags, inference, output

if TYPE_CHECKING:
    import keras

    from keras_vit.data import ImageData
    from keras_vit.evaluation import Answers, Evaluation
    from keras_vit.training import OpenedModel


_MISTAKES = "mistakes.png"
_DESCRIPTION = """\
Measures a model: accuracy, loss, and the recall and precision of each class.

Without --data it evaluates on the validation and test images that training set aside; the numbers
equal those in the run's metrics.json, unless --tta or --precision changes them. With --data it
evaluates on another folder with the same classes: on its test/ if it has splits, otherwise on all
of its images. A model that is no run's needs --data. Folders have the names of its classes, or
their identifiers such as n02123045.

Of a model without classifier, as keras-vit pretrain makes it, it measures the features: accuracy
with few labelled images of each class, and of nearest neighbours. If it has no labels, give --data
with class folders.

examples:
  keras-vit evaluate digits-run
  keras-vit evaluate photos-run --data more-photos --out more-photos-report
  keras-vit evaluate photos-run --more --out report
  keras-vit evaluate photos-run --tta
  keras-vit evaluate pretrained-run
  keras-vit evaluate imagenet-run --data imagenet/val --real real.json
  keras-vit evaluate photos-run --json
  keras-vit evaluate hf://timm/deit_base_patch16_224.fb_in1k --data imagenet/val
  keras-vit evaluate export/photos/tflite/1/photos-int8.tflite --data photos
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(
        commands,
        "evaluate",
        run,
        summary="measure a model",
        description=_DESCRIPTION,
    )
    flags.add_source(parser, takes_exports=True)
    parser.add_argument(
        "--data", metavar="PATH", help="a folder of other images (default: the run's own)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write metrics.json, confusion.png and report.html to this folder (default: "
        "none; the run's if it lacks them after an interruption)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="with --data, stop at damaged images (default: leave them out)",
    )
    inference.add_inference(parser)
    parser.add_argument(
        "--more",
        action="store_true",
        help="also print the calibration error, the few-shot and nearest-neighbour accuracy of the "
        f"features, and the most confident mistakes, drawn to {_MISTAKES} in --out (default: no)",
    )
    parser.add_argument(
        "--real",
        metavar="FILE",
        help="also print the accuracy on the labels of ImageNet ReaL: real.json of "
        "google-research/reassessed-imagenet; the test images must be ImageNet's 50,000 "
        "validation images (default: no)",
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluates, prints, and writes the report to `--out`."""
    from keras_vit import evaluation, reporting

    opened = inference.open_model(arguments)
    if not opened.has_classifier:
        _evaluate_features(opened, arguments)
        return 0
    recorded, unmeasured = _recorded(opened, arguments)
    model, data = opened.model, _labelled_data(opened, arguments)
    views = inference.views(opened, arguments)
    evaluations = {
        name: evaluation.evaluate(model, data.split(name), labels=data.labels, tta=views)
        for name in ("validation", "test")
        if len(data.split(name))
    }
    if not evaluations:
        raise ValueError(f"{data.source!r} holds no validation or test images to evaluate on.")
    out, written = Path(arguments.out) if arguments.out else unmeasured, []
    if out is not None:
        written = _write(out, opened, data, evaluations, arguments)
        if opened.run is not None and out == unmeasured:
            reporting.write_card(opened.run)
    output.show_evaluations(evaluations, json=arguments.json)
    if arguments.more:
        _show_more(model, data, evaluations, out=arguments.out, json=arguments.json)
    if arguments.real is not None:
        _show_real(data, evaluations, file=arguments.real, json=arguments.json)
    if not arguments.json:
        if views is not None:
            print(f"With test-time augmentation: the mean of {views.count} views of each image.")
        _show_recorded(evaluations, recorded=recorded)
        if out is not None:
            output.say(f"Written to {out}: {', '.join(written)}")
        if opened.exported:
            output.say_next("check", arguments.source)
        else:
            output.say_next("export", arguments.source, "--out", "export")
    return 0


def _write(
    out: Path,
    opened: "OpenedModel",
    data: "ImageData",
    evaluations: "dict[str, Evaluation]",
    arguments: argparse.Namespace,
) -> list[str]:
    """Writes the files of an evaluation to a folder, and returns their names."""
    from keras_vit import evaluation, reporting, training

    out.mkdir(parents=True, exist_ok=True)
    evaluation.write_report(out, evaluations)
    subject = reporting.Subject(
        name=arguments.source,
        model=opened.model,
        run=opened.run,
        data=data,
        evaluations=evaluations,
        command=arguments.command,
    )
    warning = reporting.try_report(out / training.run.REPORT, subject)
    output.warn(warning)
    names = [evaluation.METRICS, training.run.CONFUSION]
    return names if warning else [*names, training.run.REPORT]


def _recorded(
    opened: "OpenedModel", arguments: argparse.Namespace
) -> tuple[dict[str, Any] | None, Path | None]:
    """Returns the numbers in a run's metrics.json, or the folder of a run that lacks it."""
    from keras_vit import evaluation, training

    is_other = arguments.data is not None or arguments.precision != "float32" or arguments.tta
    if opened.run is None or is_other:
        return None, None
    file = opened.run.path / evaluation.METRICS
    return (training.read_fields(file), None) if file.is_file() else (None, opened.run.path)


def _labelled_data(opened: "OpenedModel", arguments: argparse.Namespace) -> "ImageData":
    """Returns the images of the run, or those of `--data` with the model's classes."""
    if arguments.data is not None:
        return flags.load_data(
            arguments.data,
            strict=arguments.strict,
            json=arguments.json,
            labels=opened.folder_labels(_folder_names(arguments.data)),
        )
    if opened.run is None:
        raise ValueError(
            f"{opened.source} has no images of its own; give --data with a folder that has one "
            "sub-folder of images for each class."
        )
    return opened.run.data()


def _folder_names(path: str) -> list[str]:
    """Returns the names of the sub-folders of a folder and of its test/."""
    folders = [folder for folder in (Path(path), Path(path, "test")) if folder.is_dir()]
    return sorted({entry.name for folder in folders for entry in folder.iterdir()})


def _evaluate_features(opened: "OpenedModel", arguments: argparse.Namespace) -> None:
    """Measures the features of a model without classifier, and prints."""
    if arguments.real is not None:
        raise ValueError(f"{opened.source!r} has no classifier; --real measures one.")
    if arguments.data is not None:
        data = flags.load_data(arguments.data, strict=arguments.strict, json=arguments.json)
    elif opened.run is not None and opened.labels:
        data = opened.run.data()
    else:
        raise ValueError(
            f"{opened.source!r} has no labelled images of its own; give --data with one sub-folder "
            "per class to measure its features on."
        )
    measures = _measure_features(opened.model, data)
    if arguments.json:
        output.print_json("features", **measures)
    else:
        _print_features(measures)
        if opened.exported:
            output.say_next("check", arguments.source)
            return
        name = opened.run.path.name if opened.run is not None else "features"
        new = ("--out", f"{name}-classifier", "--weights", arguments.source)
        output.say_next("train", "--data", data.source, *new)


def _measure_features(model: "keras.Model", data: "ImageData") -> dict[str, Any]:
    """Returns few-shot and nearest-neighbour accuracy, as far as there are train images."""
    import numpy as np

    from keras_vit import evaluation
    from keras_vit.evaluation.metrics import both_features

    measures: dict[str, Any] = {"few_shot": [], "nearest_neighbors": None}
    if not len(data.train):
        return measures
    splits: dict[str, Any] = {"train": data.train, "test": data.test}
    features = both_features(model, **splits)
    smallest = int(np.bincount(data.train.targets, minlength=len(data.labels)).min())
    shots = [count for count in evaluation.SHOTS if count <= smallest]
    if shots:
        results = evaluation.few_shot(model, **splits, shots=shots, features=features)
        measures["few_shot"] = [
            {**dataclasses.asdict(result), "mean": result.mean, "spread": result.spread}
            for result in results
        ]
    neighbors = min(evaluation.NEIGHBORS, len(data.train))
    measures["nearest_neighbors"] = evaluation.nearest_neighbors(
        model, **splits, neighbors=neighbors, features=features
    )
    return measures


def _print_features(measures: dict[str, Any]) -> None:
    for result in measures["few_shot"]:
        print(
            f"{result['shots']} labelled images of each class: accuracy {result['mean']:.1%}, "
            f"spread {result['spread']:.1%} over {len(result['accuracies'])} draws"
        )
    if measures["nearest_neighbors"] is not None:
        accuracy = measures["nearest_neighbors"]
        print(f"Nearest neighbours of the train images: accuracy {accuracy:.2%}")


def _on_test(
    evaluations: "dict[str, Evaluation]", data: "ImageData"
) -> "tuple[Evaluation, Answers]":
    """Returns what was measured on the test images, and the answers to them."""
    measured = evaluations.get("test")
    if measured is None or measured.answers is None:
        raise ValueError(f"{data.source!r} holds no test images, which --more and --real measure.")
    return measured, measured.answers


def _show_more(
    model: "keras.Model",
    data: "ImageData",
    evaluations: "dict[str, Evaluation]",
    *,
    out: str | None,
    json: bool,
) -> None:
    """Prints calibration error, features and mistakes on the test images."""
    from keras_vit import evaluation
    from keras_vit.atomic import whole_file

    measured, answers = _on_test(evaluations, data)
    error = answers.calibration.error
    mistakes = evaluation.confident_mistakes(measured, data.test)
    features = _measure_features(model, data)
    if out is not None and mistakes:
        images = [data.test.pixels(mistake.index) for mistake in mistakes]
        with whole_file(Path(out) / _MISTAKES) as file:
            evaluation.plot_mistakes(mistakes, images).savefig(file, dpi=120, format="png")
    if json:
        rows = [dataclasses.asdict(mistake) for mistake in mistakes]
        output.print_json("more", calibration_error=error, **features, mistakes=rows)
        return
    print(f"Expected calibration error: {error:.2%}")
    _print_features(features)
    for mistake in mistakes:
        output.say(
            f"{mistake.name}: {mistake.label} taken for {mistake.predicted}, "
            f"{mistake.probability:.1%}"
        )


def _show_real(
    data: "ImageData", evaluations: "dict[str, Evaluation]", *, file: str, json: bool
) -> None:
    """Prints the accuracy on the labels of ImageNet ReaL, which are in order of the file names."""
    import numpy as np

    from keras_vit import evaluation

    labels = evaluation.read_real_labels(file)
    names = [Path(data.test.name(place)).name for place in range(len(data.test))]
    order = sorted(range(len(names)), key=names.__getitem__)
    predicted = _on_test(evaluations, data)[1].predicted[order]
    scores = predicted[:, None] == np.arange(len(data.labels))  # 1 for the class that was named
    accuracy = evaluation.real_accuracy(scores, labels)
    if json:
        output.print_json("real", accuracy=accuracy)
    else:
        print(f"Accuracy on the labels of ReaL: {accuracy:.2%}")


def _show_recorded(
    evaluations: "dict[str, Evaluation]", *, recorded: dict[str, Any] | None
) -> None:
    """Compares with the run's metrics.json."""
    if recorded is not None:
        numbers = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
        verdict = "the same numbers" if numbers == recorded else "OTHER numbers"
        print(f"The run's metrics.json holds {verdict}.")
