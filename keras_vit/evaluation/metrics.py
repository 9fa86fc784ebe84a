"""Measures a classifier: accuracy, loss, confusions, calibration, and ImageNet ReaL."""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_vit.data import Split, Views
from keras_vit.evaluation.outputs import log_probabilities

# Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599, Section 5).
BINS = 15


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """How sure a model is, and how often it is right, in bins of equal width.

    Attributes:
        images: (bins,) how many images fall into each.
        confidence: (bins,) mean probability of the likeliest class; NaN in an empty bin.
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

    @property
    def largest_gap(self) -> float:
        """The maximum calibration error: the gap of the worst bin."""
        return float(np.nanmax(np.abs(self.accuracy - self.confidence)))


def calibration(probabilities: np.ndarray, targets: np.ndarray, *, bins: int = BINS) -> Calibration:
    """Compares how sure a classifier is with how often it is right.

    Example:
        >>> sure = calibration(np.array([[0.9, 0.1]] * 10), np.array([0] * 7 + [1] * 3))
        >>> round(sure.error, 3)  # sure by 0.9, right in 0.7
        0.2

    Args:
        probabilities: (count, C), each row with sum 1.
        targets: (count,) the right classes.
        bins: how many equal parts of 0..1.

    Raises:
        ValueError: the rows are not probabilities, or the counts differ.
    """
    probabilities = np.asarray(probabilities, np.float64)
    targets = np.asarray(targets)
    if probabilities.ndim != 2 or probabilities.shape[:1] != targets.shape or bins < 1:
        raise ValueError(
            "calibration takes probabilities (count, classes), targets (count,), bins above 0. "
            f"Received: shapes {probabilities.shape} and {targets.shape}, bins={bins!r}."
        )
    if not len(targets) or np.abs(probabilities.sum(axis=1) - 1).max() > 1e-3:
        raise ValueError(
            "Each row must be probabilities with sum 1; apply softmax to logits first, and give at "
            f"least one row. Received: {len(targets)} rows."
        )
    return calibration_of_answers(
        probabilities.max(axis=1), probabilities.argmax(axis=1) == targets, bins=bins
    )


def calibration_of_answers(
    confidence: np.ndarray, right: np.ndarray, *, bins: int = BINS
) -> Calibration:
    """Returns the `calibration` of likeliest classes alone.

    Example:
        >>> answers = calibration_of_answers(np.full(10, 0.9), np.arange(10) < 7)
        >>> round(answers.error, 3)
        0.2

    Args:
        confidence: (count,) probability of the likeliest class.
        right: (count,) whether it is the right one.
        bins: how many equal parts of 0..1.
    """
    # A bin holds its upper edge, as in the paper: ((m - 1) / M, m / M].
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    images = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        return Calibration(
            images,
            np.bincount(place, weights=confidence, minlength=bins) / images,
            np.bincount(place, weights=right, minlength=bins) / images,
        )


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


TOP = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassScore:
    """How one class fared.

    Attributes:
        label: its name.
        images: how many images show it.
        recall: fraction of those that were recognised; None without any.
        precision: fraction of the images taken for it that show it; None if none was.
    """

    label: str
    images: int
    recall: float | None
    precision: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """What a model answers to each image of a split, each of shape (count,).

    Attributes:
        targets: the right class.
        predicted: the likeliest class.
        confidence: its probability.
    """

    targets: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray


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
        confusion: number of images of each class (row) taken for each class (column).
        loss: mean cross-entropy.
        top5_accuracy: fraction with the right class among the five likeliest; None up to 5 classes.
        answers: those to the single images; None where only the counts are known.
        test_time_augmentation: the views of it, as `Views.to_dict` gives them; None for none.
    """

    labels: tuple[str, ...]
    confusion: np.ndarray
    loss: float
    top5_accuracy: float | None
    answers: Answers | None = None
    test_time_augmentation: Mapping[str, Any] | None = None

    @property
    def images(self) -> int:
        """Number of images."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Fraction of the images whose likeliest class is the right one."""
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
        >>> round(evaluation.loss, 4)  # fresh heads are zero: all classes are equally likely
        2.3026

    Args:
        model: takes pixels 0..255 of shape (batch, height, width, 3), gives logits or
            probabilities of shape (batch, classes).
        split: the images and their targets.
        labels: the name of each class, in the order of the model's outputs.
        batch_size: images in a batch; None for `sensible_batch_size`.
        tta: the views of test-time augmentation, whose probabilities are averaged; None for none.

    Raises:
        ValueError: the split is empty, or the model has another number of classes.
    """
    if not len(split):
        raise ValueError("There are no images to evaluate on; give a split that has some.")
    if model.output_shape[-1] != len(labels):
        raise ValueError(
            f"The model has {model.output_shape[-1]} classes, the data {len(labels)}; "
            "evaluate on the classes that it was trained for."
        )
    scores = log_probabilities(model, split, batch_size=batch_size, tta=tta)
    return _measure(scores, split.targets, labels=tuple(labels), tta=tta)


def _class_number(target: object) -> int:
    if not isinstance(target, int) or isinstance(target, bool) or target < 0:
        raise ValueError(f"found {target!r}")
    return target


def _measure(
    scores: np.ndarray, targets: np.ndarray, *, labels: tuple[str, ...], tta: Views | None
) -> Evaluation:
    classes = len(labels)
    predicted = scores.argmax(axis=-1)
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (targets, predicted), 1)
    of_target = scores[np.arange(len(targets)), targets]
    likelier = (scores > of_target[:, None]).sum(axis=-1)
    return Evaluation(
        labels=labels,
        confusion=confusion,
        loss=float(-of_target.mean()),
        top5_accuracy=float((likelier < TOP).mean()) if classes > TOP else None,
        answers=Answers(
            targets=np.asarray(targets),
            predicted=predicted,
            confidence=np.exp(scores.max(axis=-1)),
        ),
        test_time_augmentation=None if tta is None else tta.to_dict(),
    )
