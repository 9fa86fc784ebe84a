"""Objectives: what each kind of model is trained for, and what a run saves of it."""

import abc
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import keras

from keras_vit.adaptation import LoRAVisionTransformer, merge_lora, save_adapter
from keras_vit.backend import ExactTrainer, is_in_scope
from keras_vit.backend.private import Functional
from keras_vit.config import LINEAR, TRAINED_BY, ViTConfig, ending_of
from keras_vit.data import Resizing, resizing_of
from keras_vit.losses import make_loss
from keras_vit.model import ExactModel, VisionTransformer, backbones
from keras_vit.training import run
from keras_vit.training.checkpoints import hash_of
from keras_vit.training.distillation import DistillationModel
from keras_vit.training.execution import Job
from keras_vit.training.masked_patches import MaskedPatchModel, plot_reconstructions
from keras_vit.training.recipe import make_optimizer

Model: TypeAlias = ViTConfig | keras.Model
_RECONSTRUCTIONS = 8  # validation images
M = TypeVar("M", bound=keras.Model)


def objective_of(model: Model | Callable[[], Model], job: Job) -> "Objective":
    """Returns the objective for a model; call it in the scope of the strategy.

    A model is copied only where it cannot be trained itself.
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
        return CompiledModelObjective(model, job)
    if isinstance(model, MaskedPatchModel):
        raise TypeError("A MaskedPatchModel needs no labels; give it to `pretrain`.")
    raise TypeError(
        "train takes a ViTConfig, a VisionTransformer, a DistillationModel, or a functional or "
        f"sequential model. Received: {type(model).__name__}."
    )


class Objective(abc.ABC):
    """What a training trains, with which loss, and what it saves.

    Create and `compile` it in the scope of the strategy.

    Attributes:
        kind: its name in config.json.
        has_own_accuracy: whether the model itself measures its accuracy.
        job: data, recipe, execution and seed.
        model: the model to train.
    """

    kind: ClassVar[str] = "classification"
    has_own_accuracy: ClassVar[bool] = False
    model: ExactTrainer

    def __init__(self, model: Any, job: Job) -> None:
        self.job = job
        self.model = self.build(model)

    @abc.abstractmethod
    def build(self, model: Any) -> ExactTrainer:
        """Returns the model to train: the same one if it can be trained here, or a new one."""

    @property
    def saved(self) -> keras.Model:
        """The model that is saved: all of `model`, or a part of it."""
        return self.model

    @property
    def resizing(self) -> Resizing:
        """How images are resized for the model."""
        resizing: Resizing = self.model.config.resizing()
        return resizing

    @abc.abstractmethod
    def inference_model(self) -> keras.Model:
        """Returns a copy of `saved` in float32, outside any strategy, not compiled."""

    def loss(self) -> keras.losses.Loss | None:
        """Returns the loss of labels for `compile`; None for a model with its own loss."""
        name = self.job.recipe.loss
        ending = ending_of(self.saved, loss=name)
        if ending.problem_type != TRAINED_BY[name]:
            raise ValueError(
                f"loss={name!r} trains a model that ends in logits or in {name}; make it with "
                f"classifier_activation=None. Received: {self.saved.name!r}, whose outputs are "
                f"those of {ending.problem_type or 'features'}."
            )
        return make_loss(name, from_logits=not ending.is_probabilities)

    def compile(self) -> None:
        """Compiles the model, and builds all state that a checkpoint holds."""
        recipe, execution = self.job.recipe, self.job.execution
        accuracy = [] if self.has_own_accuracy else [keras.metrics.CategoricalAccuracy("accuracy")]
        self.model.compile(
            make_optimizer(recipe, model=self.model, plan=self.job.plan),
            loss=self.loss(),
            metrics=accuracy or None,
            gradient_accumulation_steps=execution.gradient_accumulation_steps,
            sam_rho=recipe.sam_rho,
            report_gradient_norm=True,
            jit_compile=execution.xla,
        )
        if not self.model.optimizer.built:  # Keras wraps it for float16
            self.model.optimizer.build(self.model.trainable_variables)

    def settings(self) -> dict[str, Any]:
        """Returns the settings in config.json that decide the result."""
        data, variables = self.job.data, self.model.trainable_variables
        return {
            "model": self.architecture(),
            "objective": self.kind,
            "trained_parameters": sum(math.prod(v.shape) for v in variables),
            **self.details(),
            "recipe": self.job.recipe.to_dict(),
            "seed": self.job.seed,
            "data": {"source": data.source, "images": data.counts, "damaged": list(data.damaged)},
            "labels": list(data.labels),
        }

    def architecture(self) -> dict[str, Any]:
        """Returns the description of the network in config.json."""
        fields: dict[str, Any] = self.model.config.told_by(self.job.recipe.loss).to_dict()
        return fields

    def details(self) -> dict[str, Any]:
        """Returns the settings of this objective alone."""
        return {}

    def write(self, trained: keras.Model, folder: Path) -> keras.Model:
        """Writes all that comes of a plain copy with the best weights; returns the run's model."""
        published = self.publish(trained)
        published.save(folder / run.MODEL)
        self.report(trained, folder)
        return published

    def publish(self, trained: keras.Model) -> keras.Model:
        """Returns the run's model: that with the best weights, or a model derived from it."""
        return trained

    def report(self, trained: keras.Model, folder: Path) -> None:  # noqa: B027 - often none
        """Writes the results besides the model."""


class ClassificationObjective(Objective):
    """Trains a `VisionTransformer` on labels, or its adapters, which it merges at the end."""

    def build(self, model: Any) -> ExactTrainer:
        recipe, execution = self.job.recipe, self.job.execution
        classes = len(self.job.data.labels)
        if isinstance(model, ViTConfig):
            config = dataclasses.replace(
                recipe.config(execution.config(model)), classes=classes, include_preprocessing=True
            ).with_activation(None, TRAINED_BY[recipe.loss])
            vit = VisionTransformer(config, dtype=execution.precision)
        else:
            if model.config.classes != classes:
                raise ValueError(
                    f"The model has classes={model.config.classes}, the data {classes}; make the "
                    "model with as many."
                )
            changed = _config_of_copy(model, self.job)
            vit = model.copy(config=changed, dtype=execution.precision) if changed else model
        for layer in vit.layers:
            is_head = layer.name in ("head", "distillation_head")
            if is_head and recipe.head_bias and not keras.ops.any(layer.kernel != 0):
                layer.bias.assign(keras.ops.full_like(layer.bias, recipe.head_bias))
        return vit

    def inference_model(self) -> keras.Model:
        return self.saved.copy(dtype="float32")

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
    """Trains the student of a `DistillationModel` on labels and on its teacher's outputs."""

    kind, has_own_accuracy = "distillation", True
    model: DistillationModel

    def build(self, model: DistillationModel) -> DistillationModel:
        student: Any = super().build(model.student)
        teacher = model.teacher
        if not is_in_scope(teacher):
            is_vit = isinstance(teacher, VisionTransformer)
            teacher = teacher.copy() if is_vit else _rebuilt(teacher)
        return DistillationModel(
            student,
            teacher,
            distillation=model.distillation,
            temperature=model.temperature,
            weight=model.weight,
        )

    @property
    def saved(self) -> VisionTransformer:
        return self.model.student

    def details(self) -> dict[str, Any]:
        distillation = {
            "kind": self.model.distillation,
            "temperature": self.model.temperature,
            "weight": self.model.weight,
            "teacher_sha256": hash_of(self.model.teacher.weights),
        }
        return {"distillation": distillation, **super().details()}


class CompiledModelObjective(Objective):
    """Trains a functional or sequential model on labels, as an `ExactModel`."""

    def build(self, model: keras.Model) -> ExactModel:
        _check_hand_built(model, self.job)
        model = model if is_in_scope(model) else _rebuilt(model)
        return model if isinstance(model, ExactModel) else ExactModel.from_model(model)

    @property
    def resizing(self) -> Resizing:
        return resizing_of(self.model)

    def inference_model(self) -> keras.Model:
        return _rebuilt(self.model)  # with the precision of its layers

    def publish(self, trained: keras.Model) -> keras.Model:
        # A file says by the loss what its logits mean.
        trained.compile(loss=self.loss(), jit_compile=False)
        return trained

    def architecture(self) -> dict[str, Any]:
        text = json.dumps(self.model.get_config(), sort_keys=True, default=str)
        return {
            "layers": [f"{type(layer).__name__} {layer.name}" for layer in self.model.layers],
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }


class MaskedPatchObjective(Objective):
    """Trains a `MaskedPatchModel` on images alone; a config gets the default target."""

    kind, has_own_accuracy = run.MASKED_PATCHES, True
    model: MaskedPatchModel

    def build(self, model: ViTConfig | MaskedPatchModel) -> MaskedPatchModel:
        recipe, execution = self.job.recipe, self.job.execution
        if isinstance(model, ViTConfig):
            config = recipe.config(execution.config(model))
            config = dataclasses.replace(config, include_preprocessing=True)
            return MaskedPatchModel(config, dtype=execution.precision)
        changed = _config_of_copy(model, self.job)
        if changed is None:
            return model
        return _rebuilt(model, {"config": changed.to_dict(), "dtype": execution.precision})

    def loss(self) -> None:
        return None

    def inference_model(self) -> MaskedPatchModel:
        return _rebuilt(self.model, {"dtype": "float32"})

    def details(self) -> dict[str, Any]:
        return {"target": self.model.target, "corruption": self.model.corruption}

    def publish(self, trained: MaskedPatchModel) -> VisionTransformer:
        return trained.vit

    def report(self, trained: MaskedPatchModel, folder: Path) -> None:
        images, file = self.job.data.validation, folder / run.RECONSTRUCTIONS
        plot_reconstructions(trained, images, file, count=_RECONSTRUCTIONS)


def _config_of_copy(model: VisionTransformer | MaskedPatchModel, job: Job) -> ViTConfig | None:
    """Returns the config of the copy to train; None if the model itself can be trained."""
    _ = model.config.image_size  # batches hold images of one size
    if not model.config.include_preprocessing or model.config.input_shape[2] != 3:
        raise ValueError(
            "The model must take RGB pixels 0..255: make it with include_preprocessing=True and "
            "three channels. Received: include_preprocessing="
            f"{model.config.include_preprocessing}, input_shape={model.config.input_shape}."
        )
    config = job.recipe.regularized(job.execution.config(model.config))
    if config.resolved_problem_type is not None and config.classifier_activation in LINEAR:
        config = config.with_activation(config.classifier_activation, TRAINED_BY[job.recipe.loss])
    fields = {"config": config.to_dict(), "dtype": job.execution.precision}
    fits = is_in_scope(model) and fields.items() <= model.get_config().items()
    return None if fits else config


def _rebuilt(model: M, changes: Mapping[str, Any] | None = None) -> M:
    """Returns a copy in this scope, with changes to its `get_config`; what is frozen stays so."""
    copy: M = type(model).from_config({**model.get_config(), **(changes or {})})
    copy.set_weights(model.get_weights())
    for variable, original in zip(copy.weights, model.weights, strict=True):
        variable.trainable = original.trainable
    return copy


def _check_hand_built(model: keras.Model, job: Job) -> None:
    shape, wanted = model.input_shape, (None, len(job.data.labels))
    if isinstance(shape, list | dict) or len(shape) != 4 or None in shape[1:3] or shape[3] != 3:
        raise ValueError(
            "The model must take RGB images of one size, (None, height, width, 3). "
            f"Received: a model for inputs of shape {shape}."
        )
    if model.output_shape != wanted:
        raise ValueError(
            f"The model must give one number for each of the {wanted[1]} classes, {wanted}. "
            f"Received: a model with outputs of shape {model.output_shape}."
        )
    takes_pixels = all(each.config.include_preprocessing for each in backbones(model))
    if not takes_pixels and not any(isinstance(x, keras.layers.Rescaling) for x in model.layers):
        raise ValueError(
            "The model must take pixels 0..255: make the Vision Transformer inside with "
            "include_preprocessing=True, or put a keras.layers.Rescaling before it. "
            "Received: include_preprocessing=False."
        )
    usual = {"layer_decay": 1, "precision": "float32"}
    usual |= dict.fromkeys(("dropout_rate", "drop_path_rate", "remat"))
    asked = vars(job.recipe) | vars(job.execution)
    for name, value in usual.items():
        if asked[name] != value:
            raise ValueError(
                f"{name} cannot be changed in a model that is built by hand; set it there, and "
                f"leave {name} at its default."
            )
