"""Measures a classifier on labelled images: accuracy, loss, and which class is taken for which."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.data import Split, antialias_of, evaluation_batches, naming_damaged
from keras_vit.evaluation.precision import sensible_batch_size

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
    """

    labels: tuple[str, ...]
    confusion: np.ndarray
    loss: float
    top5_accuracy: float | None

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
        shown, taken = self.confusion.sum(axis=1).tolist(), self.confusion.sum(axis=0).tolist()
        return tuple(
            ClassScore(
                label=label,
                images=shown[place],
                recall=right[place] / shown[place] if shown[place] else None,
                precision=right[place] / taken[place] if taken[place] else None,
            )
            for place, label in enumerate(self.labels)
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as plain values that JSON can carry."""
        top5 = {} if self.top5_accuracy is None else {"top5_accuracy": self.top5_accuracy}
        return {
            "images": self.images,
            "accuracy": self.accuracy,
            **top5,
            "loss": self.loss,
            "classes": [dataclasses.asdict(score) for score in self.class_scores],
        }


def evaluate(
    model: keras.Model, split: Split, *, labels: Sequence[str], batch_size: int | None = None
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
    image_size = tuple(model.input_shape[1:3])
    batch_size = batch_size or sensible_batch_size(model)
    batches = evaluation_batches(
        split, image_size=image_size, batch_size=batch_size, antialias=antialias_of(model)
    )
    with naming_damaged(split):
        outputs = model.predict(batches.map(lambda images, targets: images), verbose=0)
    log_probabilities = log_softmax(outputs, model=model)
    return _measure(log_probabilities, split.targets, labels=tuple(labels))


def log_softmax(outputs: np.ndarray, *, model: keras.Model) -> np.ndarray:
    """Turns a classifier's outputs, logits or probabilities, into log-probabilities in float64."""
    if not np.isfinite(outputs).all():
        raise ValueError(
            f"The model {model.name!r} answers with what is no number (NaN or infinite): its "
            "weights are damaged, or its training went astray; use another."
        )
    outputs = outputs.astype(np.float64)
    config = getattr(model, "config", None)
    if config is not None and config.classifier_activation == "softmax":
        outputs = np.log(np.maximum(outputs, np.finfo(np.float32).tiny))
    shifted = outputs - outputs.max(axis=-1, keepdims=True)
    normalised: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def _measure(
    log_probabilities: np.ndarray, targets: np.ndarray, *, labels: tuple[str, ...]
) -> Evaluation:
    classes = len(labels)
    predicted = log_probabilities.argmax(axis=-1)
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (targets, predicted), 1)
    of_target = log_probabilities[np.arange(len(targets)), targets]
    likelier = (log_probabilities > of_target[:, None]).sum(axis=-1)
    return Evaluation(
        labels=labels,
        confusion=confusion,
        loss=float(-of_target.mean()),
        top5_accuracy=float((likelier < TOP).mean()) if classes > TOP else None,
    )
