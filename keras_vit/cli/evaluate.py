"""`keras-vit predict` and `keras-vit evaluate`: what a model says of images, and how well."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import flags, output

if TYPE_CHECKING:
    import keras

    from keras_vit.data import ImageData
    from keras_vit.evaluation import Evaluation
    from keras_vit.training import OpenedModel


_MISTAKES = "mistakes.png"
_PREDICT_DESCRIPTION = """\
Classifies images with the model of a run or of another source, such as a file or hf://owner/name.

Prints the most probable classes of each image and their probabilities. An image that cannot be read
gives an error; the others are predicted, and the exit code is 1.

examples:
  keras-vit predict digits-run digits-run/sample.png
  keras-vit predict photos-run *.jpg --top 1
  keras-vit predict photos-run holiday.jpg --json
  keras-vit predict hf://google/vit-base-patch16-224 holiday.jpg
"""
_EVALUATE_DESCRIPTION = """\
Measures a model: accuracy, loss, and the recall and precision of each class.

Without --data it evaluates on the validation and test images that training set aside; the numbers
equal those in the run's metrics.json. With --data it evaluates on another folder with the same
classes: on its test/ if it has splits, otherwise on all of its images. A model that is no run's
needs --data. Folders have the names of its classes, or their identifiers such as n02123045.

Of a model without classifier, as keras-vit pretrain makes it, it measures the features: accuracy
with few labelled images of each class, and of nearest neighbours. If it has no labels, give --data
with class folders.

examples:
  keras-vit evaluate digits-run
  keras-vit evaluate photos-run --data more-photos --out more-photos-report
  keras-vit evaluate photos-run --more --out report
  keras-vit evaluate pretrained-run
  keras-vit evaluate imagenet-run --data imagenet/val --real real.json
  keras-vit evaluate photos-run --json
  keras-vit evaluate hf://timm/deit_base_patch16_224.fb_in1k --data imagenet/val
"""


def add_predict_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `predict`."""
    parser = flags.add_command(
        commands, "predict", predict, summary="classify images", description=_PREDICT_DESCRIPTION
    )
    flags.add_source(parser)
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
        summary="measure a model",
        description=_EVALUATE_DESCRIPTION,
    )
    flags.add_source(parser)
    parser.add_argument(
        "--data", metavar="PATH", help="a folder of other images (default: the run's own)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write metrics.json and confusion.png to this folder (default: none; the run's if it "
        "lacks them after an interruption)",
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

    opened = _open_model(arguments)
    if not opened.has_classifier:
        raise ValueError(
            f"{opened.source} has no classifier, so that it names no class; train one on images of "
            f"yours with keras-vit train --data FOLDER --out RUN --weights {opened.source}."
        )
    images, messages = {}, []
    for path in arguments.images:
        try:
            images[path] = data.read_image(path)
        except (ValueError, OSError) as error:
            messages.append(f"keras-vit: error: {error}")
    predictions = evaluation.predict(
        opened.model, list(images.values()), labels=opened.labels, top=arguments.top
    )
    output.show_predictions(dict(zip(images, predictions, strict=True)), json=arguments.json)
    for message in messages:
        output.say(message, file=sys.stderr)
    return 1 if messages else 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluates, prints, and writes the report to `--out`."""
    from keras_vit import evaluation

    opened = _open_model(arguments)
    if not opened.has_classifier:
        _evaluate_features(opened, arguments)
        return 0
    recorded, unmeasured = _recorded(opened, arguments)
    model, data = opened.model, _labelled_data(opened, arguments)
    evaluations = {
        name: evaluation.evaluate(model, data.split(name), labels=data.labels)
        for name in ("validation", "test")
        if len(data.split(name))
    }
    if not evaluations:
        raise ValueError(f"{data.source!r} holds no validation or test images to evaluate on.")
    out = Path(arguments.out) if arguments.out else unmeasured
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        evaluation.write_report(out, evaluations)
    output.show_evaluations(evaluations, json=arguments.json)
    if arguments.more:
        _show_more(model, data, out=arguments.out, json=arguments.json)
    if arguments.real is not None:
        _show_real(model, data, file=arguments.real, json=arguments.json)
    if not arguments.json:
        _show_files(evaluations, recorded=recorded, out=out)
    return 0


def _recorded(
    opened: "OpenedModel", arguments: argparse.Namespace
) -> tuple[dict[str, Any] | None, Path | None]:
    """Returns the numbers in a run's metrics.json, or the folder of a run that lacks it."""
    from keras_vit import evaluation, training

    if opened.run is None or arguments.data is not None or arguments.precision != "float32":
        return None, None
    file = opened.run.path / evaluation.METRICS
    return (training.read_fields(file), None) if file.is_file() else (None, opened.run.path)


def _add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype that the model computes in; bfloat16 is faster on processors that have units "
        "for it, slower on all others (default: float32)",
    )


def _open_model(arguments: argparse.Namespace) -> "OpenedModel":
    """Opens the model of the arguments in their precision."""
    from keras_vit import evaluation

    opened = flags.open_model(arguments.source)
    if arguments.precision == "bfloat16" and not evaluation.has_bfloat16_units():
        print(
            "keras-vit: this processor has no units for bfloat16; float32 is faster on it.",
            file=sys.stderr,
        )
    model = evaluation.in_precision(opened.model, arguments.precision)
    return dataclasses.replace(opened, model=model)


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


def _measure_features(model: "keras.Model", data: "ImageData") -> dict[str, Any]:
    """Returns few-shot and nearest-neighbour accuracy, as far as there are train images."""
    import numpy as np

    from keras_vit import evaluation

    measures: dict[str, Any] = {"few_shot": [], "nearest_neighbors": None}
    if not len(data.train):
        return measures
    smallest = int(np.bincount(data.train.targets, minlength=len(data.labels)).min())
    shots = [count for count in evaluation.SHOTS if count <= smallest]
    if shots:
        results = evaluation.few_shot(model, train=data.train, test=data.test, shots=shots)
        measures["few_shot"] = [
            {**dataclasses.asdict(result), "mean": result.mean, "spread": result.spread}
            for result in results
        ]
    neighbors = min(evaluation.NEIGHBORS, len(data.train))
    measures["nearest_neighbors"] = evaluation.nearest_neighbors(
        model, train=data.train, test=data.test, neighbors=neighbors
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


def _show_more(model: "keras.Model", data: "ImageData", *, out: str | None, json: bool) -> None:
    """Prints calibration error, features and mistakes on the test images."""
    import numpy as np

    from keras_vit import evaluation

    mistakes = evaluation.confident_mistakes(model, data.test, labels=data.labels)
    probabilities = np.exp(evaluation.log_probabilities(model, data.test))
    error = evaluation.calibration(probabilities, data.test.targets).error
    features = _measure_features(model, data)
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


def _show_real(model: "keras.Model", data: "ImageData", *, file: str, json: bool) -> None:
    """Prints the accuracy on the labels of ImageNet ReaL, which are in order of the file names."""
    from keras_vit import evaluation

    labels = evaluation.read_real_labels(file)
    names = [Path(data.test.name(place)).name for place in range(len(data.test))]
    order = sorted(range(len(names)), key=names.__getitem__)
    scores = evaluation.log_probabilities(model, data.test)[order]
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
