"""Trains a student on the outputs of a teacher: soft and hard distillation, as in DeiT.

Source: arXiv 2012.12877, Section 4; facebookresearch/deit, losses.py.

Shapes: B images, C classes.
"""

import types
from typing import Any, Literal, get_args

import keras

from keras_vit import backend
from keras_vit.config import LINEAR, Ending, ViTConfig, ending_of
from keras_vit.limits import is_real
from keras_vit.model import VisionTransformer

Distillation = Literal["soft", "hard"]

# arXiv 2012.12877, Section 5.3; the weight is the default of --distillation-alpha in its code.
TEMPERATURE, WEIGHT = 3.0, 0.5
_MIN_PROBABILITY = 1e-7  # smaller ones are raised to it before the logarithm


def distillation_loss(
    teacher: Any, student: Any, *, distillation: Distillation, temperature: float
) -> Any:
    """Returns the distance of a student's logits (B, C) from a teacher's, (B,).

    See `DistillationModel` for the two kinds.
    """
    if distillation == "hard":
        targets = keras.ops.argmax(teacher, axis=-1)
        return keras.ops.sparse_categorical_crossentropy(targets, student, from_logits=True)
    taught, said = (
        keras.ops.log_softmax(logits / temperature, axis=-1) for logits in (teacher, student)
    )
    return temperature**2 * keras.ops.sum(keras.ops.exp(taught) * (taught - said), axis=-1)


class DistillationModel(backend.ExactTrainer, keras.Model):
    """A Vision Transformer that learns from labels and from a teacher's outputs for its images.

    `compile` it with an optimizer and the loss for the labels, and `fit` it; `student` is then an
    ordinary model. The loss is `(1 - weight)` times that of the labels plus `weight` times that of
    the teacher. An image whose targets are all zero has no label, and learns from the teacher
    alone. Evaluation uses only the student and the labels.

    Example:
        >>> import numpy as np
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=3)
        >>> student, teacher = VisionTransformer(config), VisionTransformer(config)
        >>> model = DistillationModel(student, teacher, distillation="hard")
        >>> model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True))
        >>> history = model.fit(np.zeros((4, 16, 24, 3)), np.eye(3)[[0, 1, 2, 0]], verbose=0)
        >>> sorted(history.history)
        ['accuracy', 'loss']

    Args:
        student: a Vision Transformer with logits as outputs.
        teacher: any classifier of the same classes, with probabilities or logits as outputs. It
            takes the same images as the student, resized to its own size. It is neither trained nor
            saved.
        distillation: "soft" for the teacher's probabilities: the Kullback-Leibler divergence at a
            temperature, times its square; "hard" for the teacher's most likely class.
        temperature: divides the logits; for "soft" only.
        weight: of the teacher's loss, from 0 to 1; the loss of the labels gets the rest.
        name: name of the model.

    Raises:
        ValueError: teacher and student do not fit each other, or a number is out of range.
    """

    def __init__(
        self,
        student: VisionTransformer,
        teacher: keras.Model,
        *,
        distillation: Distillation = "soft",
        temperature: float = TEMPERATURE,
        weight: float = WEIGHT,
        name: str | None = "distillation",
    ) -> None:
        super().__init__(name=name)
        if distillation not in get_args(Distillation):
            raise ValueError(
                f"distillation must be one of {list(get_args(Distillation))}. "
                f"Received: distillation={distillation!r}."
            )
        if not is_real(temperature) or not 0 < temperature < float("inf"):
            raise ValueError(f"temperature must be above 0. Received: temperature={temperature!r}.")
        if not is_real(weight) or not 0 <= weight <= 1:
            raise ValueError(f"weight must be from 0 to 1. Received: weight={weight!r}.")
        ending = _check_fit(student, teacher)
        self.student, self.weight = student, weight
        self.distillation, self.temperature = distillation, temperature
        names = [name for name in ("head", "distillation_head") if name in student.feature_names]
        # In a namespace Keras does not find these models, and neither trains nor saves them.
        self._untracked = types.SimpleNamespace(
            teacher=teacher, ending=ending, heads=student.feature_extractor(names)
        )
        self.accuracy = keras.metrics.Mean(name="accuracy")
        self.built = True

    @property
    def config(self) -> ViTConfig:
        """The student's config."""
        return self.student.config

    @property
    def teacher(self) -> keras.Model:
        """The teacher."""
        return self._untracked.teacher

    def call(self, images: Any, training: bool | None = None) -> dict[str, Any]:
        """Returns logits (B, C): "answer" for evaluation, "label" and "teacher" for each loss."""
        logits = self._untracked.heads(images, training=training)
        return {
            "answer": sum(logits.values()) / len(logits),
            "label": logits["head"],
            "teacher": logits.get("distillation_head", logits["head"]),
        }

    def teacher_logits(self, images: Any) -> Any:
        """Returns the teacher's logits, (B, C) in float32, up to a constant for each image."""
        size = self.teacher.input_shape[1:3]
        if tuple(size) != tuple(self.config.input_shape[:2]) and None not in size:
            images = keras.ops.image.resize(images, size)
        outputs = keras.ops.cast(self.teacher(images, training=False), "float32")
        if self._untracked.ending.is_probabilities:
            of_others = 1 - outputs if self._untracked.ending.activation == "sigmoid" else 1.0
            both = (keras.ops.maximum(each, _MIN_PROBABILITY) for each in (outputs, of_others))
            outputs = keras.ops.subtract(*map(keras.ops.log, both))
        return keras.ops.stop_gradient(outputs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of labels and teacher; in evaluation, that of the labels alone."""
        is_correct = keras.ops.equal(
            keras.ops.argmax(y, axis=-1), keras.ops.argmax(y_pred["answer"], axis=-1)
        )
        is_labelled = keras.ops.any(keras.ops.not_equal(y, 0), axis=-1)
        self.accuracy.update_state(
            keras.ops.cast(is_correct, "float32"), keras.ops.cast(is_labelled, "float32")
        )
        if not training:
            return super().compute_loss(x, y, y_pred["answer"], sample_weight, training)
        label_loss = super().compute_loss(x, y, y_pred["label"], sample_weight, training)
        teacher_loss = distillation_loss(
            self.teacher_logits(x),
            y_pred["teacher"],
            distillation=self.distillation,
            temperature=self.temperature,
        )
        return (1 - self.weight) * label_loss + self.weight * keras.ops.mean(teacher_loss)


def _check_fit(student: VisionTransformer, teacher: keras.Model) -> Ending:
    """Returns what the teacher's outputs mean."""
    config = student.config
    if config.classes is None or config.classifier_activation not in LINEAR:
        raise ValueError(
            "The student must give logits: make it with classes and classifier_activation=None. "
            f"Received: classes={config.classes}, "
            f"classifier_activation={config.classifier_activation!r}."
        )
    ending = ending_of(teacher, loss="softmax")
    if teacher.output_shape != (None, config.classes) or ending.activation is None:
        raise ValueError(
            f"The teacher must have the student's {config.classes} classes. Received: a teacher "
            f"with {ending.output} of shape {teacher.output_shape}."
        )
    if teacher.input_shape[3:] != config.input_shape[2:]:
        raise ValueError(
            f"The teacher must take images (height, width, {config.input_shape[2]}) as the student "
            f"does. Received: a teacher for inputs of shape {teacher.input_shape}."
        )
    taught = getattr(teacher, "config", None)
    if not isinstance(taught, ViTConfig):
        return ending
    is_scaled = config.include_preprocessing and taught.include_preprocessing
    is_same = taught.include_preprocessing == config.include_preprocessing
    if not is_same or (not is_scaled and taught.rescaling != config.rescaling):
        raise ValueError(
            "Teacher and student must take the same numbers; with include_preprocessing=True each "
            "scales pixels itself. Received: include_preprocessing="
            f"{taught.include_preprocessing} of the teacher, {config.include_preprocessing} of the "
            f"student, image_mean={taught.image_mean} and {config.image_mean}, "
            f"image_std={taught.image_std} and {config.image_std}."
        )
    return ending
