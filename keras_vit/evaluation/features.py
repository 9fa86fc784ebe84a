"""Evaluates frozen features: a linear classifier of few labels, and the nearest neighbours."""

import dataclasses
from collections.abc import Sequence

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
        temperature: a lower one favours the most similar images.

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
    references, queries = (frozen_features(model, split) for split in (train, test))
    votes = neighbor_votes(
        references, train.targets, queries, neighbors=neighbors, temperature=temperature
    )
    return float((votes.argmax(axis=1) == test.targets).mean())


def neighbor_votes(
    references: np.ndarray,
    targets: np.ndarray,
    queries: np.ndarray,
    *,
    neighbors: int = NEIGHBORS,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """Returns the votes (count, C) for each class of each query.

    Args:
        references: (images, D) features of labelled images.
        targets: (images,) their classes.
        queries: (count, D) features to classify.
        neighbors: how many vote.
        temperature: a lower one favours the most similar images.
    """
    references, queries = _unit(references), _unit(queries)
    classes = np.eye(int(targets.max()) + 1)[targets]
    votes = []
    for start in range(0, len(queries), _ROWS):
        similarity = queries[start : start + _ROWS] @ references.T
        nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :neighbors]
        # The most similar counts 1: the exponent cannot overflow, and the order stays.
        similarities = np.take_along_axis(similarity, nearest, axis=1)
        weights = np.exp((similarities - similarities[:, :1]) / temperature)
        votes.append((weights[..., None] * classes[nearest]).sum(axis=1))
    return np.concatenate(votes)


SHOTS = (1, 5, 10, 25)
REGULARIZATION = 2.0**10

# A constant feature stands for the bias: so large that regularisation hardly sees it.
BIAS_FEATURE = 100.0

# Added to the standard deviation before features are divided by it.
DEVIATION_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class FewShot:
    """The accuracy with some number of labelled images of each class.

    Attributes:
        shots: labelled images of each class.
        accuracies: fraction of test images named rightly, for each seed.
    """

    shots: int
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.accuracies))

    @property
    def spread(self) -> float:
        """The standard deviation over seeds (of the sample); 0 with one seed."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class LinearClassifier:
    """A linear classifier on whitened features.

    Attributes:
        mean: (D,) of the features that it was fitted to.
        deviation: (D,) their standard deviation.
        weights: (D + 1, C); the last row belongs to the constant feature.
    """

    mean: np.ndarray
    deviation: np.ndarray
    weights: np.ndarray

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Returns (count, C): near 1 for the class, near -1 for the others."""
        return np.asarray(_whiten(features, self.mean, self.deviation) @ self.weights)


def few_shot(
    model: keras.Model,
    *,
    train: Split,
    test: Split,
    shots: Sequence[int] = SHOTS,
    seeds: int = 5,
    regularization: float = REGULARIZATION,
) -> tuple[FewShot, ...]:
    """Measures a frozen model by linear classifiers fitted to a few images of each class.

    A regularised least-squares regression onto targets in {-1, 1}, in closed form (arXiv
    2010.11929, Section 4.1). Every seed draws other images; a larger number of shots holds the
    images of the smaller.

    Example:
        >>> import keras_vit
        >>> from keras_vit.data import load_digits
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8, num_heads=1,
        ...     num_layers=1, classes=None, include_preprocessing=True)
        >>> model, data = keras_vit.VisionTransformer(config), load_digits()
        >>> results = few_shot(model, train=data.train, test=data.test, shots=(1, 5))
        >>> [(result.shots, len(result.accuracies)) for result in results]
        [(1, 5), (5, 5)]

    Args:
        model: as `frozen_features` takes it.
        train: images to draw the labelled ones from.
        test: images to measure on.
        shots: labelled images of each class.
        seeds: how many draws; number `seed` is a function of it and of the targets alone.
        regularization: the weight of the squared weights, as in big_vision.

    Returns:
        One result for each number of shots, in that order.

    Raises:
        ValueError: a class of `train` has fewer images than shots, or a number is out of range.
    """
    _check(train, test, shots=shots, seeds=seeds, regularization=regularization)
    train_features, test_features = (frozen_features(model, split) for split in (train, test))
    accuracies: dict[int, list[float]] = {count: [] for count in shots}
    for seed in range(seeds):
        for count, indices in draw_shots(train.targets, shots=shots, seed=seed).items():
            classifier = fit_linear(
                train_features[indices], train.targets[indices], regularization=regularization
            )
            predicted = classifier.scores(test_features).argmax(axis=1)
            accuracies[count].append(float((predicted == test.targets).mean()))
    return tuple(FewShot(count, tuple(values)) for count, values in accuracies.items())


def draw_shots(targets: np.ndarray, *, shots: Sequence[int], seed: int) -> dict[int, np.ndarray]:
    """Draws so many images of each class: their positions, by the number of shots."""
    generator = np.random.default_rng(seed)
    orders = [
        generator.permutation(np.flatnonzero(targets == target)) for target in np.unique(targets)
    ]
    return {count: np.concatenate([order[:count] for order in orders]) for count in shots}


def fit_linear(
    features: np.ndarray, targets: np.ndarray, *, regularization: float = REGULARIZATION
) -> LinearClassifier:
    """Fits a linear classifier by regularised least squares onto {-1, 1}.

    With X the whitened features and a constant one, and Y the targets, the weights are
    (X'X + l I)^-1 X'Y, or X' (XX' + l I)^-1 Y, the same for less where X has few rows.

    Args:
        features: (count, D).
        targets: (count,) classes, numbered from 0.
        regularization: l.
    """
    features = features.astype(np.float64)
    mean, deviation = features.mean(axis=0), features.std(axis=0) + DEVIATION_EPSILON
    x = _whiten(features, mean, deviation)
    y = 2.0 * np.eye(int(targets.max()) + 1)[targets] - 1.0
    rows, width = x.shape
    if rows >= width:
        weights = np.linalg.solve(x.T @ x + regularization * np.eye(width), x.T @ y)
    else:
        weights = x.T @ np.linalg.solve(x @ x.T + regularization * np.eye(rows), y)
    return LinearClassifier(mean, deviation, weights)


def _unit(features: np.ndarray) -> np.ndarray:
    features = features.astype(np.float64)
    length = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(features / np.maximum(length, np.finfo(np.float64).tiny))


def _whiten(features: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    standardized = (features.astype(np.float64) - mean) / deviation
    return np.pad(standardized, ((0, 0), (0, 1)), constant_values=BIAS_FEATURE)


def _check(
    train: Split, test: Split, *, shots: Sequence[int], seeds: int, regularization: float
) -> None:
    if not shots or min(shots) < 1 or seeds < 1 or regularization <= 0:
        raise ValueError(
            "shots, seeds and regularization must be above 0. "
            f"Received: shots={tuple(shots)}, seeds={seeds}, regularization={regularization}."
        )
    classes, counts = np.unique(train.targets, return_counts=True)
    if len(counts) and counts.min() < max(shots):
        raise ValueError(
            f"Class {classes[counts.argmin()]} has {counts.min()} images to draw from, fewer than "
            f"the {max(shots)} shots asked for; ask for fewer, or bring more images."
        )
    unknown = sorted(set(test.targets.tolist()) - set(classes.tolist()))
    if unknown:
        raise ValueError(f"The test images show class {unknown[0]}, the images to draw from not.")
