"""k-nearest-neighbour evaluation: images are named by what their likest neighbours show."""

import keras
import numpy as np

from keras_vit.data import Split
from keras_vit.evaluation.outputs import frozen_features

# facebookresearch/dino, eval_knn.py (arXiv 2104.14294, Section 4.1).
NEIGHBORS = 20
TEMPERATURE = 0.07
_ROWS = 1024


def nearest_neighbors(
    model: keras.Model,
    *,
    train: Split,
    test: Split,
    neighbors: int = NEIGHBORS,
    temperature: float = TEMPERATURE,
) -> float:
    """Measures a frozen model by k nearest neighbours: no training, nothing to tune.

    The `neighbors` train images of highest cosine similarity vote, each with the weight
    exp(similarity / temperature).

    Args:
        model: as `frozen_features` takes it.
        train: images that vote.
        test: images to measure on.
        neighbors: how many vote.
        temperature: how much more the likest count.

    Returns:
        The fraction of test images named rightly.

    Raises:
        ValueError: there are fewer train images than neighbours, or a number is out of range.
    """
    if not 1 <= neighbors <= len(train) or temperature <= 0:
        raise ValueError(
            f"neighbors must be from 1 to the {len(train)} train images, temperature above 0. "
            f"Received: neighbors={neighbors!r}, temperature={temperature!r}."
        )
    known, asked = (frozen_features(model, split) for split in (train, test))
    votes = neighbor_votes(
        known, train.targets, asked, neighbors=neighbors, temperature=temperature
    )
    return float((votes.argmax(axis=1) == test.targets).mean())


def neighbor_votes(
    known: np.ndarray,
    targets: np.ndarray,
    asked: np.ndarray,
    *,
    neighbors: int = NEIGHBORS,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """Returns the votes (count, C) for each class of each asked feature.

    Args:
        known: (images, D) features of labelled images.
        targets: (images,) their classes.
        asked: (count, D) features.
        neighbors: how many vote.
        temperature: how much more the likest count.
    """
    known, asked = _unit(known), _unit(asked)
    classes = np.eye(int(targets.max()) + 1)[targets]
    votes = []
    for start in range(0, len(asked), _ROWS):
        similarity = asked[start : start + _ROWS] @ known.T
        nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :neighbors]
        # The likest counts 1: the exponent cannot overflow, and the order stays.
        ranked = np.take_along_axis(similarity, nearest, axis=1)
        weights = np.exp((ranked - ranked[:, :1]) / temperature)
        votes.append((weights[..., None] * classes[nearest]).sum(axis=1))
    return np.concatenate(votes)


def _unit(features: np.ndarray) -> np.ndarray:
    features = features.astype(np.float64)
    length = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(features / np.maximum(length, np.finfo(np.float64).tiny))
