"""`keras-vit predict` and `keras-vit evaluate`: what a run's model says of images, and how well."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import flags, output

if TYPE_CHECKING:
    from keras_vit.data import ImageData
    from keras_vit.evaluation import Evaluation
    from keras_vit.training import Run


_MISTAKES = "mistakes.png"
_PREDICT_DESCRIPTION = """\
Classifies images with the model of a run.

Prints the most probable classes of each image and their probabilities. An image that cannot be read
gives an error; the others are predicted, and the exit code is 1.

examples:
  keras-vit predict digits-run digits-run/sample.png
  keras-vit predict photos-run *.jpg --top 1
  keras-vit predict photos-run holiday.jpg --json
"""
_EVALUATE_DESCRIPTION = """\
Measures the model of a run: accuracy, loss, and the recall and precision of each class.

Without --data it evaluates on the validation and test images that training set aside; the numbers
equal those in the run's metrics.json. With --data it evaluates on another folder with the same
classes: on its test/ if it has splits, otherwise on all of its images.

For a run of keras-vit pretrain it measures the features: accuracy with few labelled images of each
class, and of nearest neighbours. If the run has no labels, give --data with class folders.

examples:
  keras-vit evaluate digits-run
  keras-vit evaluate photos-run --data more-photos --out more-photos-report
  keras-vit evaluate photos-run --more --out report
  keras-vit evaluate pretrained-run
  keras-vit evaluate imagenet-run --data imagenet/val --real real.json
  keras-vit evaluate photos-run --json
"""


def add_predict_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `predict`."""
    parser = flags.add_command(
        commands, "predict", predict, summary="classify images", description=_PREDICT_DESCRIPTION
    )
    _add_run(parser)
    parser.add_argument(
        "images", metavar="IMAGE", nargs="+", help="JPEG, PNG, WebP, BMP or GIF files"
    )
    parser.add_argument(
        "--top",
        type=flags.count,
        default=5,
        metavar="N",
        help="number of classes to print for each image (default: 5)",
    )
    _add_precision(parser)
    flags.add_json(parser)


def add_evaluate_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `evaluate`."""
    parser = flags.add_command(
        commands,
        "evaluate",
        evaluate,
        summary="measure the model of a run",
        description=_EVALUATE_DESCRIPTION,
    )
    _add_run(parser)
    parser.add_argument(
        "--data", metavar="PATH", help="a folder of other images (default: the run's own)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write metrics.json and confusion.png to this folder (default: none; RUN if it lacks "
        "them after an interruption)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="with --data, stop at damaged images (default: leave them out)",
    )
    _add_precision(parser)
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


def predict(arguments: argparse.Namespace) -> int:
    """Reads the images, predicts, prints."""
    from keras_vit import data, evaluation

    run = _open_run(arguments)
    images, messages = {}, []
    for path in arguments.images:
        try:
            images[path] = data.read_image(path)
        except (ValueError, OSError) as error:
            messages.append(f"keras-vit: error: {error}")
    predictions = evaluation.predict(
        run.model, list(images.values()), labels=run.labels, top=arguments.top
    )
    output.show_predictions(dict(zip(images, predictions, strict=True)), json=arguments.json)
    for message in messages:
        output.say(message, file=sys.stderr)
    return 1 if messages else 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluates, prints, and writes the report to `--out`."""
    from keras_vit import evaluation, training

    run = _open_run(arguments)
    if run.model.config.classes is None:
        _evaluate_features(run, arguments)
        return 0
    is_own = arguments.data is None and arguments.precision == "float32"
    file = run.path / evaluation.METRICS
    recorded = training.read_fields(file) if is_own and file.is_file() else None
    data = run.data() if arguments.data is None else _load_data(arguments, labels=run.labels)
    evaluations = {
        name: evaluation.evaluate(run.model, data.split(name), labels=run.labels)
        for name in ("validation", "test")
        if len(data.split(name))
    }
    if not evaluations:
        raise ValueError(f"{data.source!r} holds no validation or test images to evaluate on.")
    is_first = is_own and recorded is None
    out = Path(arguments.out) if arguments.out else run.path if is_first else None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        evaluation.write_report(out, evaluations)
    output.show_evaluations(evaluations, json=arguments.json)
    if arguments.more:
        _show_more(run, data, out=arguments.out, json=arguments.json)
    if arguments.real is not None:
        _show_real(run, data, file=arguments.real, json=arguments.json)
    if not arguments.json:
        _show_files(evaluations, recorded=recorded, out=out)
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="RUN", help="a run directory, the --out of a training")


def _add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype that the model computes in; bfloat16 is faster on processors that have units "
        "for it, slower on all others (default: float32)",
    )


def _open_run(arguments: argparse.Namespace) -> "Run":
    """Opens the run of the arguments, with its model in their precision."""
    from keras_vit import evaluation, training

    run = training.Run.load(arguments.directory)
    if arguments.precision == "bfloat16" and not evaluation.has_bfloat16_units():
        print(
            "keras-vit: this processor has no units for bfloat16; float32 is faster on it.",
            file=sys.stderr,
        )
    return dataclasses.replace(run, model=evaluation.in_precision(run.model, arguments.precision))


def _load_data(
    arguments: argparse.Namespace, *, labels: tuple[str, ...] | None = None
) -> "ImageData":
    return flags.load_data(
        arguments.data, strict=arguments.strict, json=arguments.json, labels=labels
    )


def _evaluate_features(run: "Run", arguments: argparse.Namespace) -> None:
    """Measures the features of a model without classifier, and prints."""
    if arguments.real is not None:
        raise ValueError(f"The run {arguments.directory!r} has no classifier; --real measures one.")
    if arguments.data is not None:
        data = _load_data(arguments)
    elif run.labels:
        data = run.data()
    else:
        raise ValueError(
            f"The run {arguments.directory!r} was made without labels; give --data with one "
            "sub-folder per class to measure its features on."
        )
    measures = _measure_features(run, data)
    if arguments.json:
        output.print_json("features", **measures)
    else:
        _print_features(measures)


def _measure_features(run: "Run", data: "ImageData") -> dict[str, Any]:
    """Returns few-shot and nearest-neighbour accuracy, as far as there are train images."""
    import numpy as np

    from keras_vit import evaluation

    measures: dict[str, Any] = {"few_shot": [], "nearest_neighbors": None}
    if not len(data.train):
        return measures
    smallest = int(np.bincount(data.train.targets, minlength=len(data.labels)).min())
    shots = [count for count in evaluation.SHOTS if count <= smallest]
    if shots:
        results = evaluation.few_shot(run.model, train=data.train, test=data.test, shots=shots)
        measures["few_shot"] = [
            {**dataclasses.asdict(result), "mean": result.mean, "spread": result.spread}
            for result in results
        ]
    neighbors = min(evaluation.NEIGHBORS, len(data.train))
    measures["nearest_neighbors"] = evaluation.nearest_neighbors(
        run.model, train=data.train, test=data.test, neighbors=neighbors
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


def _show_more(run: "Run", data: "ImageData", *, out: str | None, json: bool) -> None:
    """Prints calibration error, features and mistakes on the test images."""
    import numpy as np

    from keras_vit import evaluation

    mistakes = evaluation.confident_mistakes(run.model, data.test, labels=run.labels)
    probabilities = np.exp(evaluation.log_probabilities(run.model, data.test))
    error = evaluation.calibration(probabilities, data.test.targets).error
    features = _measure_features(run, data)
    if out is not None and mistakes:
        evaluation.plot_mistakes(mistakes, data.test, Path(out) / _MISTAKES)
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


def _show_real(run: "Run", data: "ImageData", *, file: str, json: bool) -> None:
    """Prints the accuracy on the labels of ImageNet ReaL, which are in order of the file names."""
    from keras_vit import evaluation

    labels = evaluation.read_real_labels(file)
    names = [Path(data.test.name(place)).name for place in range(len(data.test))]
    order = sorted(range(len(names)), key=names.__getitem__)
    scores = evaluation.log_probabilities(run.model, data.test)[order]
    accuracy = evaluation.real_accuracy(scores, labels)
    if json:
        output.print_json("real", accuracy=accuracy)
    else:
        print(f"Accuracy on the labels of ReaL: {accuracy:.2%}")


def _show_files(
    evaluations: "dict[str, Evaluation]", *, recorded: dict[str, Any] | None, out: Path | None
) -> None:
    """Compares with the run's metrics.json, and names the files that were written."""
    if recorded is not None:
        numbers = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
        verdict = "the same numbers" if numbers == recorded else "OTHER numbers"
        print(f"The run's metrics.json holds {verdict}.")
    if out is not None:
        output.say(f"Written: {out / 'metrics.json'} and {out / 'confusion.png'}")
