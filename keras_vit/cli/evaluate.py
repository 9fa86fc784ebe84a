"""`keras-vit evaluate`: how well a model names images."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import flags, output

if TYPE_CHECKING:
    import keras

    from keras_vit.data import ImageData
    from keras_vit.evaluation import Evaluation, Predictions
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
    parser = flags.add_command(commands, "evaluate", run, "measure a model", _DESCRIPTION)
    flags.add_source(parser, takes_exports=True)
    flags.add(
        parser,
        f"""
  --data PATH  a folder of other images (default: the run's own)
  --out DIR  write metrics.json, confusion.png and report.html to this folder (default: none; the
      run's if it lacks them after an interruption)
  --strict  with --data, stop at damaged images (default: leave them out)
  --more  also print the calibration error, the few-shot and nearest-neighbour accuracy of the
      features, and the most confident mistakes, drawn to {_MISTAKES} in --out (default: no)
  --real FILE  also print the accuracy on the labels of ImageNet ReaL: real.json of
      google-research/reassessed-imagenet; the test images must be ImageNet's 50,000 validation
      images (default: no)
{flags.JSON}""",
    )
    flags.add_inference(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluates, prints, and writes the report to `--out`."""
    from keras_vit import evaluation, reporting, training

    if arguments.more and flags.is_exported(arguments.source):
        raise ValueError(
            "--more measures features, which an exported model does not have; give evaluate the "
            f"run or model. Received: {arguments.source}, an exported model."
        )
    opened = flags.open_to_run(arguments)
    if not opened.has_classifier:
        _evaluate_features(opened, arguments)
        return 0
    real = None if arguments.real is None else evaluation.read_real_labels(arguments.real)
    is_other = arguments.data is not None or arguments.precision != "float32" or arguments.tta
    run = None if is_other else opened.run  # the numbers are those of its metrics.json
    metrics = None if run is None else run.path / training.run.METRICS
    recorded = training.read_fields(metrics) if metrics is not None and metrics.is_file() else None
    data, views = _labelled_data(opened, arguments), flags.views(opened, arguments)
    evaluations = {
        name: evaluation.evaluate(opened.model, data.split(name), labels=data.labels, tta=views)
        for name in ("validation", "test")
        if len(data.split(name))
    }
    if not evaluations:
        raise ValueError(f"{data.source!r} holds no validation or test images to evaluate on.")
    out, written = arguments.out, []
    if out is None and run is not None and recorded is None:
        out = run.path
    if out is not None:
        written = _write(Path(out), opened, data, evaluations, arguments)
    if run is not None and out is not None and Path(out) == run.path:
        reporting.write_card(run)
    output.show_evaluations(evaluations, json=arguments.json)
    if arguments.more:
        _show_more(opened.model, data, evaluations, out=arguments.out, json=arguments.json)
    if real is not None:
        _show_real(data, evaluations, real, json=arguments.json)
    if arguments.json:
        return 0
    if views is not None:
        print(f"With test-time augmentation: the mean of {views.count} views of each image.")
    if recorded is not None:
        is_same = recorded == {name: each.to_dict() for name, each in evaluations.items()}
        verb = "matches" if is_same else "DIFFERS from"
        print(f"The result {verb} the one recorded in metrics.json.")
    if out is not None:
        output.say(f"Written to {out}: {', '.join(written)}")
    output.say_next(*output.after_looking(opened, is_measured=True))
    return 0


def _write(
    out: Path,
    opened: "OpenedModel",
    data: "ImageData",
    evaluations: "dict[str, Evaluation]",
    arguments: argparse.Namespace,
) -> list[str]:
    from keras_vit import reporting, training

    out.mkdir(parents=True, exist_ok=True)
    subject = reporting.Subject(
        name=arguments.source,
        model=opened.model,
        run=opened.run,
        data=data,
        evaluations=evaluations,
        command=arguments.command,
    )
    warning = reporting.write_files(out, subject)
    output.warn(warning)
    names = [training.run.METRICS, training.run.CONFUSION]
    return names if warning else [*names, training.run.REPORT]


def _labelled_data(opened: "OpenedModel", arguments: argparse.Namespace) -> "ImageData":
    if arguments.data is not None:
        return flags.load_data(arguments, labels=opened.folder_labels)
    if opened.run is None:
        raise ValueError(
            f"{opened.source} has no images of its own; give --data with a folder that has one "
            "sub-folder of images for each class."
        )
    return opened.run.data()


def _evaluate_features(opened: "OpenedModel", arguments: argparse.Namespace) -> None:
    if arguments.real is not None:
        raise ValueError(f"{opened.source!r} has no classifier; --real measures one.")
    if arguments.data is not None:
        data = flags.load_data(arguments)
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
        return
    _print_features(measures)
    if opened.exported:
        output.say_next("check", arguments.source)
    else:
        name = opened.run.path.name if opened.run is not None else "features"
        new = ("--out", f"{name}-classifier", "--weights", arguments.source)
        output.say_next("train", "--data", data.source, *new)


def _measure_features(model: "keras.Model", data: "ImageData") -> dict[str, Any]:
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
            {**dataclasses.asdict(result), "mean": result.mean, "std": result.std}
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
            f"standard deviation {result['std']:.1%} over {len(result['accuracies'])} draws"
        )
    if (accuracy := measures["nearest_neighbors"]) is not None:
        print(f"Nearest neighbours of the train images: accuracy {accuracy:.2%}")


def _on_test(
    evaluations: "dict[str, Evaluation]", data: "ImageData"
) -> "tuple[Evaluation, Predictions]":
    measured = evaluations.get("test")
    if measured is None or measured.predictions is None:
        raise ValueError(f"{data.source!r} holds no test images, which --more and --real measure.")
    return measured, measured.predictions


def _show_more(
    model: "keras.Model",
    data: "ImageData",
    evaluations: "dict[str, Evaluation]",
    *,
    out: str | None,
    json: bool,
) -> None:
    from keras_vit import evaluation
    from keras_vit.atomic import whole_file

    measured, predictions = _on_test(evaluations, data)
    error = predictions.calibration.error
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
            f"{mistake.name}: {mistake.label} predicted as {mistake.predicted}, "
            f"{mistake.probability:.1%}"
        )


def _show_real(
    data: "ImageData",
    evaluations: "dict[str, Evaluation]",
    labels: "tuple[frozenset[int], ...]",
    *,
    json: bool,
) -> None:
    """Prints the accuracy on the labels of ImageNet ReaL, which are in order of the file names."""
    import numpy as np

    from keras_vit import evaluation

    names = [Path(data.test.name(place)).name for place in range(len(data.test))]
    order = sorted(range(len(names)), key=names.__getitem__)
    predicted = _on_test(evaluations, data)[1].predicted[order]
    scores = predicted[:, None] == np.arange(len(data.labels))  # 1 for the class that was named
    accuracy = evaluation.real_accuracy(scores, labels)
    if json:
        output.print_json("real", accuracy=accuracy)
    else:
        print(f"Accuracy on the labels of ReaL: {accuracy:.2%}")
