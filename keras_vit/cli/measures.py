"""What `keras-vit evaluate --more` adds: calibration, features, the most confident mistakes."""

import argparse
import dataclasses
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_vit.data import ImageData
    from keras_vit.training import Run

PICTURE = "mistakes.png"


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--more`."""
    parser.add_argument(
        "--more",
        action="store_true",
        help="also print calibration error, few-shot and nearest-neighbour accuracy of the "
        f"features, and the most confident mistakes, drawn to {PICTURE} in --out (default: no)",
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
    for result in found["few_shot"]:
        print(
            f"{result['shots']} labelled images of each class: accuracy {result['mean']:.1%}, "
            f"spread {result['spread']:.1%} over {len(result['accuracies'])} draws"
        )
    if found["nearest_neighbors"] is not None:
        print(f"Nearest neighbours of the train images: accuracy {found['nearest_neighbors']:.2%}")
    for mistake in found["mistakes"]:
        print(
            f"{mistake['name']}: {mistake['label']} taken for {mistake['predicted']}, "
            f"{mistake['probability']:.1%}"
        )


def _measure(opened: "Run", data: "ImageData") -> dict[str, Any]:
    import numpy as np

    from keras_vit import evaluation

    probabilities = np.exp(evaluation.log_probabilities(opened.model, data.test))
    found: dict[str, Any] = {
        "calibration_error": evaluation.calibration(probabilities, data.test.targets).error,
        "few_shot": [],
        "nearest_neighbors": None,
    }
    if not len(data.train):
        return found
    fewest = int(np.bincount(data.train.targets, minlength=len(opened.labels)).min())
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
