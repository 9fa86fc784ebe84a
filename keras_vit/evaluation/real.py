"""ImageNet ReaL: accuracy on labels that were looked over again, several to an image.

Source: Beyer et al., "Are we done with ImageNet?" (arXiv 2006.07159), and its real.json
(google-research/reassessed-imagenet).
"""

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np


def read_real_labels(path: str | os.PathLike[str]) -> tuple[frozenset[int], ...]:
    """Reads real.json: the classes that each validation image shows, in the order of their names.

    Returns:
        For each image the right classes; none for an image that shows none of the 1,000.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a list of lists of class numbers.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        return tuple(frozenset(_class_number(target) for target in row) for row in rows)
    except (TypeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} is not a list of lists of class numbers ({error}); fetch real.json of "
            "google-research/reassessed-imagenet."
        ) from error


def real_accuracy(scores: np.ndarray, labels: Sequence[Collection[int]]) -> float:
    """Returns the fraction of images whose likeliest class is among the right ones.

    Images without a right class do not count.

    Example:
        >>> scores = np.array([[0.9, 0.1, 0], [0.2, 0.7, 0.1], [0, 0, 1.0]])
        >>> real_accuracy(scores, [{0, 2}, {0}, set()])
        0.5

    Args:
        scores: (count, C) logits or probabilities.
        labels: the right classes of each image, as `read_real_labels` gives them.

    Raises:
        ValueError: the counts differ, or no image has a right class.
    """
    scores = np.asarray(scores)
    if scores.ndim != 2 or len(scores) != len(labels):
        raise ValueError(
            "real_accuracy takes scores (count, classes) and as many sets of labels. "
            f"Received: shape {scores.shape} and {len(labels)} sets."
        )
    predicted = scores.argmax(axis=1).tolist()
    right = [guess in allowed for guess, allowed in zip(predicted, labels, strict=True) if allowed]
    if not right:
        raise ValueError("No image has a right class; there is nothing to measure.")
    return sum(right) / len(right)


def _class_number(target: object) -> int:
    if not isinstance(target, int) or isinstance(target, bool) or target < 0:
        raise ValueError(f"found {target!r}")
    return target
