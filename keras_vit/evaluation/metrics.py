"""Measures a model: accuracy, confusions, mistakes, calibration, and its frozen features.

Shapes: count images, C classes, D width of the features.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit import environment
from keras_vit.atomic import whole_file
from keras_vit.data import Split, Views
from keras_vit.evaluation.predictions import classifier_ending, frozen_features, log_probabilities
from keras_vit.figures import plot_confusion
from keras_vit.limits import check_file

METRICS, CONFUSION = "metrics.json", "confusion.png"
TOP = 5
# Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599, Section 5).
BINS = 15
# facebookresearch/dino, eval_knn.py (arXiv 2104.14294, Section 4.1).
NEIGHBORS, TEMPERATURE = 20, 0.07
# google-research/big_vision, evaluators/fewshot_lsr.py.
SHOTS, REGULARIZATION = (1, 5, 10, 25), 2.0**10
# A constant feature stands for the bias: so large that regularisation hardly sees it.
BIAS_FEATURE = 100.0
# Added to the standard deviation before features are divided by it.
DEVIATION_EPSILON = 1e-5
_SKLEARN = ("Features are measured by scikit-learn", "scikit-learn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassScore:
    """How one class fared.

    Attributes:
        label: its name.
        images: how many images show it.
        recall: fraction of those that are predicted as it; None without any.
        precision: fraction of the images predicted as it that show it; None if none was.
    """

    label: str
    images: int
    recall: float | None
    precision: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """What a model predicts for each image of a split, each of shape (count,).

    Example:
        >>> predictions = Predictions(targets=np.array([0, 1, 1]), predicted=np.array([0, 1, 0]),
        ...                   confidence=np.array([0.9, 0.8, 0.7]))
        >>> predictions.mistakes.tolist(), round(predictions.calibration.error, 3)
        ([2], 0.333)

    Attributes:
        targets: the right class.
        predicted: the top-1 class.
        confidence: its probability.
    """

    targets: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """Whether the top-1 class is the right one, of each image."""
        return np.asarray(self.predicted == self.targets)

    @property
    def mistakes(self) -> np.ndarray:
        """Positions of the images with another top-1 class, the surest first."""
        surest = np.argsort(-self.confidence, kind="stable")
        return np.asarray(surest[~self.right[surest]])

    @property
    def calibration(self) -> "Calibration":
        """How sure the model is, and how often it is right."""
        # A bin holds its upper edge, as in the paper: ((m - 1) / M, m / M].
        place = np.clip(np.ceil(self.confidence * BINS).astype(int) - 1, 0, BINS - 1)
        images = np.bincount(place, minlength=BINS)
        with np.errstate(invalid="ignore"):
            return Calibration(
                images,
                np.bincount(place, weights=self.confidence, minlength=BINS) / images,
                np.bincount(place, weights=self.right, minlength=BINS) / images,
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What a model makes of labelled images.

    Example:
        >>> evaluation = Evaluation(labels=("cat", "dog"), confusion=np.array([[3, 1], [0, 4]]),
        ...                         loss=0.5, top5_accuracy=None)
        >>> evaluation.accuracy, evaluation.class_scores[0].recall
        (0.875, 0.75)

    Attributes:
        labels: the name of each class.
        confusion: number of images of each class (row) predicted as each class (column).
        loss: mean cross-entropy; of independent classes the sum of that of each.
        top5_accuracy: fraction with the right class among the top five; None up to 5 classes.
        predictions: those for the single images; None where only the counts are known.
        test_time_augmentation: the views of it, as `Views.to_dict` gives them; None for none.
    """

    labels: tuple[str, ...]
    confusion: np.ndarray
    loss: float
    top5_accuracy: float | None
    predictions: Predictions | None = None
    test_time_augmentation: Mapping[str, Any] | None = None

    @property
    def images(self) -> int:
        """Number of images."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Fraction of the images whose top-1 class is the right one."""
        return float(np.trace(self.confusion)) / self.images

    @property
    def class_scores(self) -> tuple[ClassScore, ...]:
        """Recall and precision of each class."""
        right = np.diag(self.confusion).tolist()
        actual, predicted = self.confusion.sum(axis=1).tolist(), self.confusion.sum(axis=0).tolist()
        return tuple(
            ClassScore(
                label=label,
                images=actual[place],
                recall=right[place] / actual[place] if actual[place] else None,
                precision=right[place] / predicted[place] if predicted[place] else None,
            )
            for place, label in enumerate(self.labels)
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as plain values that JSON can carry."""
        names = ("top5_accuracy", "test_time_augmentation")
        stated = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {
            "images": self.images,
            "accuracy": self.accuracy,
            **stated,
            "loss": self.loss,
            "classes": [dataclasses.asdict(score) for score in self.class_scores],
        }


def evaluate(
    model: keras.Model,
    split: Split,
    *,
    labels: Sequence[str],
    batch_size: int | None = None,
    tta: Views | None = None,
) -> Evaluation:
    """Measures a model on the images of a split.

    Example:
        >>> import keras_vit
        >>> from keras_vit.data import load_digits
        >>> config = keras_vit.ViTConfig(
        ...     input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8, num_heads=1,
        ...     num_layers=1, classes=10)
        >>> model, data = keras_vit.VisionTransformer(config), load_digits()
        >>> evaluation = evaluate(model, data.test, labels=data.labels)
        >>> round(evaluation.loss, 4)  # new heads are zero: all classes are equally likely
        2.3026

    Args:
        model: takes pixels 0..255 of shape (batch, height, width, 3), gives logits or
            probabilities of shape (batch, classes).
        split: the images and their targets.
        labels: the name of each class, in the order of the model's outputs.
        batch_size: images in a batch; None for `default_batch_size`.
        tta: the views of test-time augmentation, whose probabilities are averaged; None for none.

    Raises:
        ValueError: the split is empty, or the model has another number of classes, or answers with
            numbers or features.
    """
    ending = classifier_ending(model)
    if model.output_shape[-1] != len(labels):
        raise ValueError(
            f"The model has {model.output_shape[-1]} classes, the data {len(labels)}; "
            "evaluate on the classes that it was trained for."
        )
    scores = log_probabilities(model, split, batch_size=batch_size, tta=tta)
    targets = split.targets
    predicted = scores.argmax(axis=-1)
    confusion = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(confusion, (targets, predicted), 1)
    of_target = scores[np.arange(len(targets)), targets]
    likelier = (scores > of_target[:, None]).sum(axis=-1)
    losses = -of_target
    if ending.activation == "sigmoid":  # each class counts, by itself
        against = np.log(np.maximum(-np.expm1(scores), np.finfo(np.float32).tiny))
        against[np.arange(len(targets)), targets] = 0
        losses = losses - against.sum(axis=-1)
    return Evaluation(
        labels=tuple(labels),
        confusion=confusion,
        loss=float(losses.mean()),
        top5_accuracy=float((likelier < TOP).mean()) if len(labels) > TOP else None,
        predictions=Predictions(
            targets=np.asarray(targets), predicted=predicted, confidence=np.exp(scores.max(axis=-1))
        ),
        test_time_augmentation=None if tta is None else tta.to_dict(),
    )


def write_report(
    directory: str | os.PathLike[str], evaluations: Mapping[str, Evaluation], *, drawn: str = "test"
) -> None:
    """Writes `metrics.json` with every evaluation and `confusion.png` with one.

    Example:
        >>> import tempfile
        >>> evaluation = Evaluation(labels=("cat", "dog"), confusion=np.array([[3, 1], [0, 4]]),
        ...                         loss=0.5, top5_accuracy=None)
        >>> folder = tempfile.mkdtemp()
        >>> write_report(folder, {"test": evaluation})
        >>> sorted(os.listdir(folder))
        ['confusion.png', 'metrics.json']

    Args:
        directory: where to write; it must exist.
        evaluations: evaluations by the name of their split.
        drawn: the one to draw; where there is none of that name, the last is.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no evaluation.
    """
    directory = Path(directory)
    numbers = {name: evaluation.to_dict() for name, evaluation in evaluations.items()}
    if not evaluations:
        raise ValueError("A report needs the evaluation of a split; give one or more.")
    name = drawn if drawn in evaluations else list(evaluations)[-1]
    figure = plot_confusion(evaluations[name].confusion, evaluations[name].labels)
    with whole_file(directory / CONFUSION) as file:
        figure.savefig(file, dpi=120)
    with whole_file(directory / METRICS) as file:
        file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One image that was predicted as another class.

    Attributes:
        index: its place in the split.
        name: its path, or its number where the images are in memory.
        label: the class that it is filed under.
        predicted: the class that it was predicted as.
        probability: of the predicted class, 0..1.
    """

    index: int
    name: str
    label: str
    predicted: str
    probability: float


def confident_mistakes(
    evaluation: Evaluation, split: Split, *, count: int = 16
) -> tuple[Mistake, ...]:
    """Returns the mistakes that a model is surest of, the surest first.

    Args:
        evaluation: of the model on the split, by `evaluate`.
        split: the images and their targets.
        count: how many; fewer where fewer were made.

    Raises:
        ValueError: the evaluation has no predictions for this split, or `count` is below 1.
    """
    predictions = evaluation.predictions
    if count < 1 or predictions is None or not np.array_equal(predictions.targets, split.targets):
        raise ValueError(
            "confident_mistakes takes an evaluation with its predictions, the split that it is of, "
            "and a count above 0. Received: "
            f"{0 if predictions is None else len(predictions.targets)} predictions, "
            f"{len(split)} images, count={count!r}."
        )
    return tuple(
        Mistake(
            index=int(index),
            name=split.name(int(index)),
            label=evaluation.labels[predictions.targets[index]],
            predicted=evaluation.labels[predictions.predicted[index]],
            probability=float(predictions.confidence[index]),
        )
        for index in predictions.mistakes[:count]
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """How sure a model is, and how often it is right, in bins of equal width.

    Attributes:
        images: (bins,) how many images fall into each.
        confidence: (bins,) mean probability of the top-1 class; NaN in an empty bin.
        accuracy: (bins,) fraction of them that are right; NaN in an empty bin.
    """

    images: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray

    @property
    def error(self) -> float:
        """The expected calibration error: the mean gap of the bins, weighted by their images."""
        gap = np.abs(self.accuracy - self.confidence)
        return float(np.nansum(self.images * gap) / self.images.sum())


def read_real_labels(path: str | os.PathLike[str]) -> tuple[frozenset[int], ...]:
    """Reads real.json: the classes that each validation image shows, in the order of their names.

    Returns:
        For each image the right classes; none for an image that shows none of the 1,000.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a list of lists of class numbers.
    """
    check_file(Path(path))
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        for target in (target for row in rows for target in row):
            if not isinstance(target, int) or isinstance(target, bool) or target < 0:
                raise ValueError(f"found {target!r}")
        return tuple(map(frozenset, rows))
    except (TypeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} is not a list of lists of class numbers ({error}); fetch real.json of "
            "google-research/reassessed-imagenet."
        ) from error


def real_accuracy(scores: np.ndarray, labels: Sequence[Collection[int]]) -> float:
    """Returns the fraction of images whose top-1 class is among the right ones.

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
    def std(self) -> float:
        """The standard deviation over seeds (of the sample); 0 with one seed."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else 0.0


def few_shot(
    model: keras.Model,
    *,
    train: Split,
    test: Split,
    shots: Sequence[int] = SHOTS,
    seeds: int = 5,
    regularization: float = REGULARIZATION,
    features: tuple[np.ndarray, np.ndarray] | None = None,
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
        features: those of `train` and `test`, by `frozen_features`; None to compute them.

    Returns:
        One result for each number of shots, in that order.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: a class of `train` has fewer images than shots, or a number is out of range.
    """
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
    train_features, test_features = features or both_features(model, train, test)
    accuracies: dict[int, list[float]] = {count: [] for count in shots}
    for seed in range(seeds):
        for count, indices in draw_shots(train.targets, shots=shots, seed=seed).items():
            shown, targets = train_features[indices], train.targets[indices]
            classifier = fit_linear(shown, targets, regularization=regularization)
            accuracies[count].append(float(classifier.score(test_features, test.targets)))
    return tuple(FewShot(count, tuple(values)) for count, values in accuracies.items())


def nearest_neighbors(
    model: keras.Model,
    *,
    train: Split,
    test: Split,
    neighbors: int = NEIGHBORS,
    temperature: float = TEMPERATURE,
    features: tuple[np.ndarray, np.ndarray] | None = None,
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
        features: as in `few_shot`.

    Returns:
        The fraction of test images named rightly.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: there are fewer train images than neighbours, or a number is out of range.
    """
    if not 1 <= neighbors <= len(train) or temperature <= 0:
        raise ValueError(
            f"neighbors must be from 1 to the {len(train)} train images, temperature above 0. "
            f"Received: neighbors={neighbors!r}, temperature={temperature!r}."
        )
    references, queries = features or both_features(model, train, test)
    classifier = neighbor_classifier(neighbors, temperature)
    return float(classifier.fit(references, train.targets).score(queries, test.targets))


def both_features(model: keras.Model, train: Split, test: Split) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `frozen_features` of two splits, for what scikit-learn measures of them."""
    with environment.installed(*_SKLEARN):  # features can take hours: it must be there
        import sklearn  # noqa: F401
    return frozen_features(model, train), frozen_features(model, test)


def neighbor_classifier(neighbors: int, temperature: float) -> Any:
    """Returns scikit-learn's classifier in which the most similar features vote."""
    with environment.installed(*_SKLEARN):
        import sklearn.neighbors
        import sklearn.pipeline
        import sklearn.preprocessing

    def weights(distances: np.ndarray) -> np.ndarray:
        # Of unit vectors the squared distance is 2 - 2 cos. The most similar counts 1: the exponent
        # cannot overflow, and the order stays.
        nearest = distances.min(axis=1, keepdims=True)
        return np.asarray(np.exp((nearest - distances) / (2 * temperature)))

    voters = sklearn.neighbors.KNeighborsClassifier(
        neighbors, metric="sqeuclidean", algorithm="brute", weights=weights
    )
    return sklearn.pipeline.make_pipeline(sklearn.preprocessing.Normalizer(), voters)


def draw_shots(targets: np.ndarray, *, shots: Sequence[int], seed: int) -> dict[int, np.ndarray]:
    """Draws so many images of each class: their positions, by the number of shots."""
    generator = np.random.default_rng(seed)
    orders = [
        generator.permutation(np.flatnonzero(targets == target)) for target in np.unique(targets)
    ]
    return {count: np.concatenate([order[:count] for order in orders]) for count in shots}


def fit_linear(features: np.ndarray, targets: np.ndarray, *, regularization: float) -> Any:
    """Fits scikit-learn's least-squares classifier onto {-1, 1} to whitened features (count, D)."""
    with environment.installed(*_SKLEARN):
        import sklearn.linear_model
        import sklearn.pipeline
        import sklearn.preprocessing

    mean = features.mean(axis=0, dtype=np.float64)
    deviation = features.std(axis=0, dtype=np.float64) + DEVIATION_EPSILON

    def whiten(features: np.ndarray) -> np.ndarray:
        whitened = (features.astype(np.float64) - mean) / deviation
        return np.pad(whitened, ((0, 0), (0, 1)), constant_values=BIAS_FEATURE)

    ridge = sklearn.linear_model.RidgeClassifier(
        alpha=regularization, fit_intercept=False, solver="cholesky"
    )
    whitening = sklearn.preprocessing.FunctionTransformer(whiten)
    return sklearn.pipeline.make_pipeline(whitening, ridge).fit(features, targets)
