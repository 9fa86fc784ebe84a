"""What `keras-vit evaluate` measures on demand: calibration, features, mistakes, ReaL."""

import argparse
import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import output

if TYPE_CHECKING:
    from keras_vit.data import ImageData
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
        print(json_format.dumps({"event": "more", **found}), flush=True)
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
        print(json_format.dumps({"event": "features", **found}), flush=True)
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
        print(json_format.dumps({"event": "real", "accuracy": accuracy}), flush=True)
    else:
        print(f"Accuracy on the labels of ReaL: {accuracy:.2%}")


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
