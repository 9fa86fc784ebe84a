"""`keras-vit evaluate`: measures a run."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import opening, output

if TYPE_CHECKING:
    from keras_vit.data import ImageData
    from keras_vit.evaluation import Evaluation
    from keras_vit.training import Run


PICTURE = "mistakes.png"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--more` and `--real`."""
    parser.add_argument(
        "--more",
        action="store_true",
        help="also print calibration error, few-shot and nearest-neighbour accuracy of the "
        f"features, and the most confident mistakes, drawn to {PICTURE} in --out (default: no)",
    )
    parser.add_argument(
        "--real",
        metavar="FILE",
        help="also print the accuracy on the labels of ImageNet ReaL: real.json of "
        "google-research/reassessed-imagenet, where the test images are ImageNet's 50,000 "
        "validation images (default: no)",
    )


def show(opened: "Run", data: "ImageData", *, out: str | None, json: bool) -> None:
    """Measures on the test images and prints; the features only where there are train images."""
    from keras_vit import evaluation

    mistakes = evaluation.confident_mistakes(opened.model, data.test, labels=opened.labels)
    found = {
        **_measure(opened, data),
        "mistakes": [dataclasses.asdict(mistake) for mistake in mistakes],
    }
    if out is not None and mistakes:
        evaluation.plot_mistakes(mistakes, data.test, Path(out) / PICTURE)
    if json:
        output.print_json("more", **found)
        return
    print(f"Expected calibration error: {found['calibration_error']:.2%}")
    _print_features(found)
    for mistake in found["mistakes"]:
        output.say(
            f"{mistake['name']}: {mistake['label']} taken for {mistake['predicted']}, "
            f"{mistake['probability']:.1%}"
        )


def show_features(opened: "Run", data: "ImageData", *, json: bool) -> None:
    """Measures the features of a model without classifier, and prints."""
    found = _features(opened, data)
    if json:
        output.print_json("features", **found)
    else:
        _print_features(found)


def show_real(opened: "Run", data: "ImageData", *, file: str, json: bool) -> None:
    """Measures on the labels of ImageNet ReaL, which go by the names of the images, and prints."""
    from keras_vit import evaluation

    labels = evaluation.read_real_labels(file)
    names = [Path(data.test.name(place)).name for place in range(len(data.test))]
    order = sorted(range(len(names)), key=names.__getitem__)
    scores = evaluation.log_probabilities(opened.model, data.test)[order]
    accuracy = evaluation.real_accuracy(scores, labels)
    if json:
        output.print_json("real", accuracy=accuracy)
    else:
        print(f"Accuracy on the labels of ReaL: {accuracy:.2%}")


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--precision`."""
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what the model computes in: bfloat16 is faster on processors that have units for it, "
        "slower on all others (default: float32)",
    )


_DESCRIPTION = """\
Measures the model of a run: accuracy, loss, and how each class fares.

Without --data on the run's own validation and test images, the same that training set aside; the
numbers are those of the run's metrics.json. With --data on another folder with the same classes:
on its test/ if it has splits, otherwise on all of its images.

Of a run of keras-vit pretrain the features are measured, by few labelled images of each class and
by nearest neighbours; if it was made without labels, give --data with class folders.

examples:
  keras-vit evaluate digits-run
  keras-vit evaluate photos-run --data more-photos --out more-photos-report
  keras-vit evaluate photos-run --more --out report
  keras-vit evaluate pretrained-run
  keras-vit evaluate imagenet-run --data imagenet/val --real real.json
  keras-vit evaluate photos-run --json
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "evaluate",
        help="measure the model of a run",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="RUN", help="a run directory, the --out of a training")
    parser.add_argument(
        "--data", metavar="PATH", help="a folder of other images (default: the run's own)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write metrics.json and confusion.png there (default: nowhere; to RUN, "
        "if it lacks them after an interruption)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="with --data, stop at damaged images (default: leave them out)",
    )
    add_flag(parser)
    add_flags(parser)
    output.add_json_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluates, prints, and writes where asked."""
    from keras_vit import evaluation

    opened = opening.open_run(arguments)
    if opened.model.config.classes is None:
        _show_features(opened, arguments)
        return 0
    is_own = arguments.data is None and arguments.precision == "float32"
    recorded = _recorded(opened.path) if is_own else None
    data = _data(arguments, opened)
    evaluations = {
        name: evaluation.evaluate(opened.model, data.split(name), labels=opened.labels)
        for name in ("validation", "test")
        if len(data.split(name))
    }
    if not evaluations:
        raise ValueError(f"{data.source!r} holds no validation or test images to measure on.")
    is_first = is_own and recorded is None
    out = Path(arguments.out) if arguments.out else opened.path
    if arguments.out or is_first:
        out.mkdir(parents=True, exist_ok=True)
        evaluation.write_report(out, evaluations)
    output.show_evaluations(evaluations, json=arguments.json)
    if arguments.more:
        show(opened, data, out=arguments.out, json=arguments.json)
    if arguments.real is not None:
        show_real(opened, data, file=arguments.real, json=arguments.json)
    if not arguments.json:
        _say_more(evaluations, recorded=recorded, out=out if arguments.out or is_first else None)
    return 0


def _print_features(found: dict[str, Any]) -> None:
    for result in found["few_shot"]:
        print(
            f"{result['shots']} labelled images of each class: accuracy {result['mean']:.1%}, "
            f"spread {result['spread']:.1%} over {len(result['accuracies'])} draws"
        )
    if found["nearest_neighbors"] is not None:
        print(f"Nearest neighbours of the train images: accuracy {found['nearest_neighbors']:.2%}")


def _measure(opened: "Run", data: "ImageData") -> dict[str, Any]:
    import numpy as np

    from keras_vit import evaluation

    probabilities = np.exp(evaluation.log_probabilities(opened.model, data.test))
    error = evaluation.calibration(probabilities, data.test.targets).error
    return {"calibration_error": error, **_features(opened, data)}


def _features(opened: "Run", data: "ImageData") -> dict[str, Any]:
    import numpy as np

    from keras_vit import evaluation

    found: dict[str, Any] = {"few_shot": [], "nearest_neighbors": None}
    if not len(data.train):
        return found
    fewest = int(np.bincount(data.train.targets, minlength=len(data.labels)).min())
    shots = [count for count in evaluation.SHOTS if count <= fewest]
    if shots:
        results = evaluation.few_shot(opened.model, train=data.train, test=data.test, shots=shots)
        found["few_shot"] = [
            {**dataclasses.asdict(result), "mean": result.mean, "spread": result.spread}
            for result in results
        ]
    neighbors = min(evaluation.NEIGHBORS, len(data.train))
    found["nearest_neighbors"] = evaluation.nearest_neighbors(
        opened.model, train=data.train, test=data.test, neighbors=neighbors
    )
    return found


def _show_features(opened: "Run", arguments: argparse.Namespace) -> None:
    if arguments.real is not None:
        raise ValueError(f"The run {arguments.directory!r} has no classifier; --real measures one.")
    if arguments.data is not None:
        data = opening.load_data(arguments.data, strict=arguments.strict, json=arguments.json)
    elif opened.labels:
        data = opened.data()
    else:
        raise ValueError(
            f"The run {arguments.directory!r} was made without labels; give --data with one "
            "sub-folder per class to measure its features on."
        )
    show_features(opened, data, json=arguments.json)


def _data(arguments: argparse.Namespace, opened: "Run") -> "ImageData":

    if arguments.data is None:
        return opened.data()
    return opening.load_data(
        arguments.data, strict=arguments.strict, json=arguments.json, labels=opened.labels
    )


def _recorded(directory: Path) -> dict[str, Any] | None:
    from keras_vit import training

    file = directory / "metrics.json"
    return training.read_fields(file) if file.is_file() else None


def _say_more(
    evaluations: "dict[str, Evaluation]", *, recorded: dict[str, Any] | None, out: Path | None
) -> None:
    if recorded is not None:
        numbers = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
        verdict = "the same numbers" if numbers == recorded else "OTHER numbers"
        print(f"The run's metrics.json holds {verdict}.")
    if out is not None:
        output.say(f"Written: {out / 'metrics.json'} and {out / 'confusion.png'}")
