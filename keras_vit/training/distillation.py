"""Training a student after a teacher: soft and hard distillation, as in DeiT.

Source: arXiv 2012.12877, Section 4; facebookresearch/deit, losses.py.
"""

from typing import Any, Literal, get_args

import keras

from keras_vit import backend
from keras_vit.config import ViTConfig
from keras_vit.model import VisionTransformer

Distillation = Literal["soft", "hard"]

# arXiv 2012.12877, Section 5.3; the weight is that of the code's --distillation-alpha.
TEMPERATURE, WEIGHT = 3.0, 0.5
# The smallest probability that has a logarithm here.
_TINY = 1e-7


@keras.saving.register_keras_serializable(package="keras_vit")
class DistillationLoss(keras.losses.Loss):
    """How far a student's logits are from a teacher's.

    Example:
        >>> loss = DistillationLoss("hard")
        >>> round(float(loss([[1.0, 0.0]], [[0.0, 0.0]])), 4)  # the logarithm of 2
        0.6931

    Args:
        distillation: "soft" or "hard", see `DistillationModel`.
        temperature: of "soft".

    Raises:
        ValueError: there is no such distillation, or the temperature is not above 0.
    """

    def __init__(
        self,
        distillation: Distillation = "soft",
        *,
        temperature: float = TEMPERATURE,
        name: str = "distillation",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        if distillation not in get_args(Distillation):
            raise ValueError(
                f"distillation must be one of {list(get_args(Distillation))}. "
                f"Received: distillation={distillation!r}."
            )
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0. Received: temperature={temperature!r}.")
        self.distillation, self.temperature = distillation, temperature

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each image, (B,), for logits (B, C) of teacher and student."""
        if self.distillation == "hard":
            wanted = keras.ops.argmax(y_true, axis=-1)
            return keras.ops.sparse_categorical_crossentropy(wanted, y_pred, from_logits=True)
        taught, said = (
            keras.ops.log_softmax(logits / self.temperature, axis=-1) for logits in (y_true, y_pred)
        )
        divergence = keras.ops.sum(keras.ops.exp(taught) * (taught - said), axis=-1)
        return self.temperature**2 * divergence

    def get_config(self) -> dict[str, Any]:
        own = {"distillation": self.distillation, "temperature": self.temperature}
        return {**super().get_config(), **own}


class DistillationModel(backend.ExactTrainer, keras.Model):
    """A Vision Transformer that learns from labels and from what a teacher says of the same images.

    `compile` it with an optimizer and the loss of the labels, and `fit` it; `student` is then an
    ordinary model. The loss is `(1 - weight)` times that of the labels, and `weight` times that of
    the teacher. An image whose targets are all zero has no label: it learns from the teacher alone.
    Evaluation looks at the student and the labels only.

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
        student: gives logits.
        teacher: any classifier of the same classes, whose last layer gives logits or softmax; it
            takes images as the student does, at a size of its own. Nothing in it changes, and it is
            no part of what is saved.
        distillation: "soft": the teacher's probabilities, by Kullback-Leibler divergence at a
            temperature, times its square; "hard": the teacher's likeliest class.
        temperature: what logits are divided by; of "soft" alone.
        weight: what the teacher counts, from 0 to 1; labels count the rest.
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
        if not 0 <= weight <= 1:
            raise ValueError(f"weight must be from 0 to 1. Received: weight={weight!r}.")
        _check_fit(student, teacher)
        self.student, self.weight = student, weight
        self.teaching = DistillationLoss(distillation, temperature=temperature)
        self._hidden = _Untracked(teacher, _heads(student))
        self.accuracy = keras.metrics.Mean(name="accuracy")
        self.built = True

    @property
    def config(self) -> ViTConfig:
        """The student's."""
        config: ViTConfig = self.student.config
        return config

    @property
    def teacher(self) -> keras.Model:
        """The teacher."""
        return self._hidden.teacher

    def call(self, images: Any, training: bool | None = None) -> dict[str, Any]:
        """Returns the student's logits (B, C): its answer, and what labels and teacher train."""
        logits = self._hidden.heads(images, training=training)
        return {
            "answer": sum(logits.values()) / len(logits),
            "label": logits["head"],
            "teacher": logits.get("distillation_head", logits["head"]),
        }

    def teacher_logits(self, images: Any) -> Any:
        """Returns what the teacher says, (B, C) in float32, up to a constant for each image."""
        size = self.teacher.input_shape[1:3]
        if tuple(size) != tuple(self.config.input_shape[:2]) and None not in size:
            images = keras.ops.image.resize(images, size)
        outputs = keras.ops.cast(self.teacher(images, training=False), "float32")
        if gives_probabilities(self.teacher):
            outputs = keras.ops.log(keras.ops.maximum(outputs, _TINY))
        return keras.ops.stop_gradient(outputs)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of labels and teacher; in evaluation, of the labels alone."""
        right = keras.ops.equal(
            keras.ops.argmax(y, axis=-1), keras.ops.argmax(y_pred["answer"], axis=-1)
        )
        is_labelled = keras.ops.any(keras.ops.not_equal(y, 0), axis=-1)
        self.accuracy.update_state(
            keras.ops.cast(right, "float32"), keras.ops.cast(is_labelled, "float32")
        )
        if not training:
            return super().compute_loss(x, y, y_pred["answer"], sample_weight, training)
        labels = super().compute_loss(x, y, y_pred["label"], sample_weight, training)
        # By `call`: under several replicas a loss object divides by their number.
        teaching = keras.ops.mean(self.teaching.call(self.teacher_logits(x), y_pred["teacher"]))
        return (1 - self.weight) * labels + self.weight * teaching


class _Untracked:
    """Hides models from the model that uses them, which would train and save them."""

    def __init__(self, teacher: keras.Model, heads: keras.Model) -> None:
        self.teacher, self.heads = teacher, heads


def _heads(student: VisionTransformer) -> keras.Model:
    """Returns the logits of each of the student's heads, by their names."""
    names = [name for name in ("head", "distillation_head") if name in student.feature_names]
    return student.feature_extractor(names)


def gives_probabilities(model: keras.Model) -> bool:
    """Whether a classifier's last layer gives softmax, not logits."""
    last = model.layers[-1]
    is_softmax = getattr(last, "activation", None) is keras.activations.softmax
    return is_softmax or isinstance(last, keras.layers.Softmax)


def _check_fit(student: VisionTransformer, teacher: keras.Model) -> None:
    config = student.config
    if config.classes is None or config.classifier_activation not in (None, "linear"):
        raise ValueError(
            "The student must give logits: make it with classes and classifier_activation=None. "
            f"Received: classes={config.classes}, "
            f"classifier_activation={config.classifier_activation!r}."
        )
    if teacher.output_shape != (None, config.classes):
        raise ValueError(
            f"The teacher must know the student's {config.classes} classes. Received: a teacher "
            f"with outputs of shape {teacher.output_shape}."
        )
    if teacher.input_shape[3:] != config.input_shape[2:]:
        raise ValueError(
            f"The teacher must take images (height, width, {config.input_shape[2]}) as the student "
            f"does. Received: a teacher for inputs of shape {teacher.input_shape}."
        )
    pixels = getattr(getattr(teacher, "config", None), "include_preprocessing", None)
    if pixels is not None and pixels != config.include_preprocessing:
        raise ValueError(
            "Teacher and student must take the same numbers. Received: "
            f"include_preprocessing={pixels} of the teacher, {config.include_preprocessing} of the "
            "student."
        )
    if pixels is False and teacher.config.rescaling != config.rescaling:
        raise ValueError(
            "Teacher and student must take the same numbers; with include_preprocessing=True each "
            "scales pixels itself. Received: images scaled to "
            f"image_mean={teacher.config.image_mean}, image_std={teacher.config.image_std} for the "
            f"teacher, image_mean={config.image_mean}, image_std={config.image_std} for the other."
        )
