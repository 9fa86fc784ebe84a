"""What is trained, and to which end: labels, a teacher, masked patches; what is saved of it."""

import abc
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import keras
import tensorflow as tf

from keras_vit.adaptation import LoRAVisionTransformer, merge_lora, save_adapter
from keras_vit.backend import ExactTrainer
from keras_vit.backend.private import Functional, layers_of, strategy_of
from keras_vit.config import ViTConfig
from keras_vit.data import antialias_of
from keras_vit.exact import ExactModel
from keras_vit.losses import make_loss
from keras_vit.model import VisionTransformer
from keras_vit.training import run
from keras_vit.training.checkpoints import weights_hash
from keras_vit.training.distillation import DistillationModel, gives_probabilities
from keras_vit.training.job import Job, Resizing
from keras_vit.training.masked_patches import MaskedPatchModel, plot_reconstructions
from keras_vit.training.recipe import make_optimizer

Model: TypeAlias = ViTConfig | keras.Model
# So many validation images are drawn with what is predicted of them.
SHOWN = 8
M = TypeVar("M", bound=keras.Model)


def objective_of(model: Model | Callable[[], Model], job: Job) -> "Objective":
    """Returns the objective that suits a model, in the strategy's scope that this is called in.

    Args:
        model: a config; or a model, functional or sequential ones too, which is trained itself
            where that is possible, and otherwise copied; or a function that makes either.
        job: what is asked besides.

    Raises:
        TypeError: no objective trains such a model.
        ValueError: the model does not fit the job.
    """
    if not isinstance(model, Model):
        model = model()
    if not job.has_labels:
        if isinstance(model, ViTConfig | MaskedPatchModel):
            return MaskedPatchObjective(model, job)
        raise TypeError(
            f"pretrain takes a ViTConfig or a MaskedPatchModel. Received: {type(model).__name__}."
        )
    if isinstance(model, DistillationModel):
        return DistillationObjective(model, job)
    if isinstance(model, ViTConfig | VisionTransformer):
        return ClassificationObjective(model, job)
    if isinstance(model, keras.Sequential | Functional):
        return HandBuiltObjective(model, job)
    if isinstance(model, MaskedPatchModel):
        raise TypeError("A MaskedPatchModel needs no labels; give it to `pretrain`.")
    raise TypeError(
        "train takes a ViTConfig, a VisionTransformer, a DistillationModel, or a functional or "
        f"sequential model. Received: {type(model).__name__}."
    )


class Objective(abc.ABC):
    """What a training trains, by which loss, and what it saves and says of it.

    Make it, and `compile` it, in the scope of the strategy.

    Args:
        given: what the user gave: a model, or a config where the objective takes one.
        job: what is asked besides.

    Attributes:
        kind: what config.json calls it.
        has_own_accuracy: whether the model itself counts what is right.
        job: what is asked besides the model.
        model: what is trained.
    """

    kind: ClassVar[str] = "classification"
    has_own_accuracy: ClassVar[bool] = False
    model: ExactTrainer

    def __init__(self, given: Any, job: Job) -> None:
        self.job = job
        self.model = self.build(given)

    @abc.abstractmethod
    def build(self, given: Any) -> ExactTrainer:
        """Returns the model to train: the given one if it can be trained here, or a new one.

        Raises:
            ValueError: what was given does not fit the job.
        """

    @property
    def saved(self) -> keras.Model:
        """The part of the model that is saved, or all of it."""
        return self.model

    @property
    def resizing(self) -> Resizing:
        """How images come to the size that the model takes."""
        return Resizing(self.saved.input_shape[1:3], antialias_of(self.saved))

    @abc.abstractmethod
    def plain_copy(self) -> keras.Model:
        """Returns a copy of `saved` in float32, outside of any strategy, not compiled."""

    def loss(self) -> keras.losses.Loss | None:
        """Returns the loss to compile with; None for a model that has its own."""
        return None

    def compile(self) -> None:
        """Compiles the model, and builds all state that a checkpoint has to hold."""
        recipe, execution = self.job.recipe, self.job.execution
        is_measured = self.has_own_accuracy
        self.model.compile(
            make_optimizer(recipe, model=self.model, plan=self.job.plan),
            loss=self.loss(),
            metrics=None if is_measured else [keras.metrics.CategoricalAccuracy(name="accuracy")],
            accumulate=execution.accumulate,
            sam_rho=recipe.sam_rho,
            report_gradient_norm=True,
            jit_compile=execution.xla,
        )
        if not self.model.optimizer.built:  # Keras wraps it for float16
            self.model.optimizer.build(self.model.trainable_variables)

    def settings(self) -> dict[str, Any]:
        """Returns what config.json says of how a run was made; all of it decides the result."""
        data, variables = self.job.data, self.model.trainable_variables
        return {
            "model": self.architecture(),
            "objective": self.kind,
            "trained_parameters": sum(int(one.shape.num_elements()) for one in variables),
            **self.details(),
            "recipe": self.job.recipe.to_dict(),
            "seed": self.job.seed,
            "data": {"source": data.source, "images": data.counts, "damaged": list(data.damaged)},
            "labels": list(data.labels),
        }

    def architecture(self) -> dict[str, Any]:
        """Returns what config.json says of the network."""
        fields: dict[str, Any] = self.model.config.to_dict()
        return fields

    def details(self) -> dict[str, Any]:
        """Returns what config.json says of this objective alone."""
        return {}

    def write(self, best: Path, folder: Path) -> keras.Model:
        """Writes the run's model and what else came of the training.

        Args:
            best: the file of the best model, as it was trained.
            folder: where to write.

        Returns:
            The run's model.
        """
        trained = keras.saving.load_model(best, compile=False)
        published = self.publish(trained)
        if published is trained:
            shutil.copy2(best, folder / run.MODEL)
        else:
            published.save(folder / run.MODEL)
        self.report(trained, folder)
        return published

    def read(self, best: Path) -> keras.Model:
        """Returns the run's model, where another worker writes it."""
        return self.publish(keras.saving.load_model(best, compile=False))

    def publish(self, trained: keras.Model) -> keras.Model:
        """Returns the run's model, made of the best model, or that model itself."""
        return trained

    @abc.abstractmethod
    def report(self, trained: keras.Model, folder: Path) -> None:
        """Writes to a folder what else came of the training, told by the best model."""


class ClassificationObjective(Objective):
    """Trains a `VisionTransformer` on labels, or its adapters, which are merged in the end."""

    def build(self, given: Any) -> ExactTrainer:
        return self.build_classifier(given)

    def build_classifier(self, given: ViTConfig | VisionTransformer) -> VisionTransformer:
        """Returns the network to train; a fresh classifier gets the recipe's bias."""
        recipe, execution = self.job.recipe, self.job.execution
        if isinstance(given, ViTConfig):
            fresh = dataclasses.replace(
                recipe.config(execution.config(given)),
                classes=len(self.job.data.labels),
                classifier_activation=None,
                include_preprocessing=True,
            )
            vit = VisionTransformer(fresh, dtype=execution.precision)
        else:
            if given.config.classes != len(self.job.data.labels):
                raise ValueError(
                    f"The model has classes={given.config.classes}, the data "
                    f"{len(self.job.data.labels)}; make the model with as many."
                )
            _check_pixels(given.config)
            config = _config_of_copy(given, self.job)
            vit = given.copy(config=config, dtype=execution.precision) if config else given
        for layer in vit.layers:
            is_head = layer.name in ("head", "distillation_head")
            if is_head and recipe.head_bias and not keras.ops.any(layer.kernel != 0):
                layer.bias.assign(keras.ops.full_like(layer.bias, recipe.head_bias))
        return vit

    def plain_copy(self) -> keras.Model:
        return self.saved.copy(dtype="float32")

    def loss(self) -> keras.losses.Loss:
        gives_logits = self.saved.config.classifier_activation in (None, "linear")
        return make_loss(self.job.recipe.loss, from_logits=gives_logits)

    def details(self) -> dict[str, Any]:
        vit = self.saved
        if not isinstance(vit, LoRAVisionTransformer):
            return {}
        return {"lora": {"rank": vit.rank, "targets": list(vit.targets), "alpha": vit.alpha}}

    def publish(self, trained: VisionTransformer) -> VisionTransformer:
        return merge_lora(trained) if isinstance(trained, LoRAVisionTransformer) else trained

    def report(self, trained: VisionTransformer, folder: Path) -> None:
        if isinstance(trained, LoRAVisionTransformer):
            save_adapter(trained, folder / run.ADAPTER)


class DistillationObjective(ClassificationObjective):
    """Trains the student of a `DistillationModel`, on labels and after its teacher."""

    kind, has_own_accuracy = "distillation", True
    model: DistillationModel

    def build(self, given: DistillationModel) -> DistillationModel:
        student, teacher = self.build_classifier(given.student), given.teacher
        if not _is_here(teacher):
            is_vit = isinstance(teacher, VisionTransformer)
            teacher = teacher.copy() if is_vit else _rebuilt(teacher)
        return DistillationModel(
            student,
            teacher,
            distillation=given.teaching.distillation,
            temperature=given.teaching.temperature,
            weight=given.weight,
        )

    @property
    def saved(self) -> VisionTransformer:
        return self.model.student

    def details(self) -> dict[str, Any]:
        about = {
            "kind": self.model.teaching.distillation,
            "temperature": self.model.teaching.temperature,
            "weight": self.model.weight,
            "teacher_sha256": weights_hash(self.model.teacher),
        }
        return {"distillation": about, **super().details()}


class HandBuiltObjective(Objective):
    """Trains a functional or sequential model on labels, as an `ExactModel`."""

    def build(self, given: keras.Model) -> ExactModel:
        _check_hand_built(given, self.job)
        if not _is_here(given):
            return _with_weights(ExactModel.from_model(keras.models.clone_model(given)), given)
        return given if isinstance(given, ExactModel) else ExactModel.from_model(given)

    def plain_copy(self) -> keras.Model:
        """Returns a copy, not compiled, with the precision that its layers were given."""
        return _rebuilt(self.model)

    def loss(self) -> keras.losses.Loss:
        return make_loss(self.job.recipe.loss, from_logits=not gives_probabilities(self.model))

    def architecture(self) -> dict[str, Any]:
        """Returns the layers, and a hash of all that the model says of itself."""
        text = json.dumps(self.model.get_config(), sort_keys=True, default=str)
        return {
            "layers": [f"{type(layer).__name__} {layer.name}" for layer in self.model.layers],
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }

    def report(self, trained: keras.Model, folder: Path) -> None:
        """Writes nothing: all that comes of it is the model."""


class MaskedPatchObjective(Objective):
    """Trains a `MaskedPatchModel` on images alone; a config's target is the default."""

    kind, has_own_accuracy = "masked-patches", True
    model: MaskedPatchModel

    def build(self, given: ViTConfig | MaskedPatchModel) -> MaskedPatchModel:
        recipe, execution = self.job.recipe, self.job.execution
        if isinstance(given, ViTConfig):
            config = recipe.config(execution.config(given))
            config = dataclasses.replace(config, include_preprocessing=True)
            return MaskedPatchModel(config, dtype=execution.precision)
        _check_pixels(given.config)
        changed = _config_of_copy(given, self.job)
        if changed is None:
            return given
        return _rebuilt(given, {"config": changed.to_dict(), "dtype": execution.precision})

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.model.config.input_shape[:2], antialias_of(self.model))

    def plain_copy(self) -> MaskedPatchModel:
        return _rebuilt(self.model, {"dtype": "float32"})

    def details(self) -> dict[str, Any]:
        return {"target": self.model.target, "corruption": self.model.corruption}

    def publish(self, trained: MaskedPatchModel) -> VisionTransformer:
        return trained.vit

    def report(self, trained: MaskedPatchModel, folder: Path) -> None:
        images, file = self.job.data.validation, folder / run.RECONSTRUCTIONS
        plot_reconstructions(trained, images, file, count=SHOWN)


def _config_of_copy(model: VisionTransformer | MaskedPatchModel, job: Job) -> ViTConfig | None:
    """Returns the config of the copy to train; None where the model itself can be trained.

    It decides dropout and memory; the copy lies in this scope, and has the precision asked for.
    """
    config = job.recipe.regularized(job.execution.config(model.config))
    fields = {"config": config.to_dict(), "dtype": job.execution.precision}
    fits = _is_here(model) and fields.items() <= model.get_config().items()
    return None if fits else config


def _rebuilt(model: M, changes: Mapping[str, Any] | None = None) -> M:
    """Returns a copy in this scope, with some fields of its `get_config` changed."""
    copy: M = type(model).from_config({**model.get_config(), **(changes or {})})
    return _with_weights(copy, model)


def _with_weights(copy: M, model: keras.Model) -> M:
    """Returns a copy with the weights of its model; what is frozen there is frozen here."""
    copy.set_weights(model.get_weights())
    for ours, theirs in zip(copy.weights, model.weights, strict=True):
        ours.trainable = theirs.trainable
    return copy


def _is_here(model: keras.Model) -> bool:
    """Whether a model's variables lie where those of this scope do."""
    # Not `distribute_strategy`, which of a model made without one is that of any scope.
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    return strategy_of(model) is strategy


def _check_hand_built(model: keras.Model, job: Job) -> None:
    """Raises a ValueError if a model does not fit the data, or cannot be changed as asked for."""
    shape, classes = model.input_shape, len(job.data.labels)
    if isinstance(shape, list | dict) or len(shape) != 4 or None in shape[1:3] or shape[3] != 3:
        raise ValueError(
            "The model must take RGB images of one size, (None, height, width, 3). "
            f"Received: a model for inputs of shape {shape}."
        )
    if model.output_shape != (None, classes):
        raise ValueError(
            f"The model must give one number for each of the {classes} classes, (None, {classes}). "
            f"Received: a model with outputs of shape {model.output_shape}."
        )
    inside = [layer for layer in layers_of(model) if isinstance(layer, VisionTransformer)]
    scales = any(isinstance(layer, keras.layers.Rescaling) for layer in model.layers)
    if any(not vit.config.include_preprocessing for vit in inside) and not scales:
        raise ValueError(
            "The model must take pixels 0..255: make the Vision Transformer inside with "
            "include_preprocessing=True, or put a keras.layers.Rescaling before it. "
            "Received: include_preprocessing=False."
        )
    asked = {
        "layer_decay": job.recipe.layer_decay != 1,
        "dropout_rate": job.recipe.dropout_rate is not None,
        "drop_path_rate": job.recipe.drop_path_rate is not None,
        "remat": job.execution.remat is not None,
        "precision": job.execution.precision != "float32",
    }
    wrong = [name for name, is_asked in asked.items() if is_asked]
    if wrong:
        raise ValueError(
            f"{wrong[0]} cannot be changed in a model that is built by hand; build it so, and "
            f"leave {wrong[0]} at its default."
        )


def _check_pixels(config: ViTConfig) -> None:
    if not config.include_preprocessing or config.input_shape[2] != 3:
        raise ValueError(
            "The model must take RGB pixels 0..255: make it with include_preprocessing=True and "
            f"three channels. Received: include_preprocessing={config.include_preprocessing}, "
            f"input_shape={config.input_shape}."
        )
