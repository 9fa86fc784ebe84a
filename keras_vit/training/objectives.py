"""What is trained, and to which end: labels, a teacher, masked patches; what is kept of it."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from keras_vit.adaptation import LoRAVisionTransformer, merge_lora, save_adapter
from keras_vit.backend.private import Functional, layers_of, strategy_of
from keras_vit.config import ViTConfig
from keras_vit.data import (
    ImageData,
    Split,
    antialias_of,
    evaluation_batches,
    mix_batch,
    train_batches,
)
from keras_vit.exact import ExactModel
from keras_vit.losses import make_loss
from keras_vit.model import VisionTransformer
from keras_vit.training import run
from keras_vit.training.checkpoints import weights_hash
from keras_vit.training.distillation import DistillationModel, gives_probabilities
from keras_vit.training.execution import Execution
from keras_vit.training.loop import Batches
from keras_vit.training.masked_patches import MaskedPatchModel, plot_reconstructions
from keras_vit.training.recipe import Plan, Recipe, make_optimizer

EVALUATION_BATCH = 128
MIXUP = 100  # marks these draws, so that they share no stream with those of the data's pipeline
Classifier = ExactModel | DistillationModel  # a VisionTransformer is an ExactModel
Trained = Classifier | MaskedPatchModel
Kept = TypeVar("Kept", ExactModel, MaskedPatchModel)


class Resizing(NamedTuple):
    """How images come to the size that a model takes, (height, width) in pixels."""

    size: tuple[int, int]
    antialias: bool


def build_classifier(
    model: ViTConfig | keras.Model | Callable[[], ViTConfig | keras.Model],
    *,
    data: ImageData,
    recipe: Recipe,
    execution: Execution,
) -> Classifier:
    """Returns the model to train, in the strategy's scope that this is called in.

    Args:
        model: a config; or a model, functional or sequential ones too, which is trained itself
            where that is possible, and otherwise copied; or a function that makes either.
        data: decides the number of classes.
        recipe: decides dropout, stochastic depth, what a fresh model is like, and the bias of its
            classifier.
        execution: decides the precision, and whether blocks are computed anew for the gradient.

    Raises:
        ValueError: the model does not fit the data.
    """
    if not isinstance(model, ViTConfig | keras.Model):
        model = model()
    if not isinstance(model, ViTConfig | VisionTransformer | DistillationModel):
        return _wrapped(model, data=data, recipe=recipe, execution=execution)
    if isinstance(model, ViTConfig):
        fresh = recipe.config(execution.config(model))
        fresh = dataclasses.replace(
            fresh,
            classes=len(data.labels),
            classifier_activation=None,
            include_preprocessing=True,
        )
        vit = VisionTransformer(fresh, dtype=execution.precision)
    else:
        _check_classes(model.config, data)
        _check_pixels(model.config)
        given = kept_part(model)
        vit = _placed(given, recipe=recipe, execution=execution)
    heads = [layer for layer in vit.layers if layer.name in ("head", "distillation_head")]
    for head in heads:
        if recipe.head_bias and not keras.ops.any(head.kernel != 0):
            head.bias.assign(keras.ops.full_like(head.bias, recipe.head_bias))
    return _distilled(model, vit) if isinstance(model, DistillationModel) else vit


def build_masked(
    model: ViTConfig | MaskedPatchModel | Callable[[], MaskedPatchModel],
    *,
    recipe: Recipe,
    execution: Execution,
) -> MaskedPatchModel:
    """Returns the model to pre-train, as `build_classifier` does; a config's target is the default.

    Raises:
        ValueError: the model does not take RGB pixels 0..255.
    """
    if not isinstance(model, ViTConfig | MaskedPatchModel):
        model = model()
    if isinstance(model, ViTConfig):
        config = recipe.config(execution.config(model))
        config = dataclasses.replace(config, include_preprocessing=True)
        return MaskedPatchModel(config, dtype=execution.precision)
    _check_pixels(model.config)
    placed: MaskedPatchModel = _placed(model, recipe=recipe, execution=execution)
    return placed


def kept_part(model: Trained) -> ExactModel | MaskedPatchModel:
    """Returns the part of a model that is saved: of a distillation the student."""
    return model.student if isinstance(model, DistillationModel) else model


def compile_model(model: Trained, *, recipe: Recipe, plan: Plan, execution: Execution) -> None:
    """Compiles a model for a recipe, and builds all state that a checkpoint has to hold."""
    own: dict[str, Any] = {}
    if not isinstance(model, MaskedPatchModel):
        own["loss"] = make_loss(recipe.loss, from_logits=_gives_logits(kept_part(model)))
    if isinstance(model, ExactModel):
        own["metrics"] = [keras.metrics.CategoricalAccuracy(name="accuracy")]
    model.compile(
        make_optimizer(recipe, model=model, plan=plan),
        **own,
        accumulate=execution.accumulate,
        sam_rho=recipe.sam_rho,
        report_gradient_norm=True,
        jit_compile=execution.xla,
    )
    if not model.optimizer.built:  # Keras wraps it for float16
        model.optimizer.build(model.trainable_variables)


def parts(
    model: Trained, data: ImageData, *, recipe: Recipe, plan: Plan, seed: int
) -> dict[str, Any]:
    """Returns the arguments of a `Loop` that model, images and recipe decide."""
    kept = kept_part(model)
    size = kept.input_shape[1:3] if isinstance(kept, ExactModel) else kept.config.input_shape[:2]
    resizing = Resizing(size, antialias_of(kept))
    return {
        "model": model,
        "kept": kept,
        "best_model": plain_copy(kept),
        "batches": make_batches(data, resizing, recipe=recipe, plan=plan, seed=seed),
        "validation": make_validation(data, resizing),
        "plan": plan,
        "is_averaged": recipe.average is not None,
    }


def plain_copy(model: Kept) -> Kept:
    """Returns an equal model in float32, outside of any strategy, not compiled.

    One that was built by hand keeps the precision that its layers were given.
    """
    has_policy = isinstance(model, VisionTransformer | MaskedPatchModel)
    copy: Kept = _copied(model, dtype="float32") if has_policy else _copied(model)
    return copy


def make_batches(
    data: ImageData, resizing: Resizing, *, recipe: Recipe, plan: Plan, seed: int
) -> Batches:
    """Returns a function that makes the batches from any step on: images, probabilities."""
    classes = max(len(data.labels), 1)  # without labels all are of one class

    def batches(start_step: int, shard: tuple[int, int]) -> tf.data.Dataset:
        def soften(
            step: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor]:
            images, certain = batch[0], tf.one_hot(batch[1], classes)
            targets = certain * (1 - recipe.label_smoothing) + recipe.label_smoothing / classes
            key = tf.random.experimental.stateless_fold_in(
                tf.constant((seed, MIXUP), tf.int64), step
            )
            return mix_batch(
                images,
                targets,
                alpha=recipe.mixup,
                cutmix=recipe.cutmix,
                per=recipe.mix_per,
                seed=key,
                shard=shard,
            )

        made = train_batches(
            data.train,
            image_size=resizing.size,
            batch_size=plan.batch_size,
            epochs=plan.epochs,
            seed=seed,
            augmentation=recipe.augmentation,
            antialias=resizing.antialias,
            start_step=start_step,
            shard=shard,
        )
        return made.enumerate(start_step).map(soften)

    return batches


def make_validation(data: ImageData, resizing: Resizing) -> tf.data.Dataset:
    """Returns the batches that epochs are judged by: images, probabilities."""
    classes = max(len(data.labels), 1)
    batches = evaluation_batches(
        data.validation,
        image_size=resizing.size,
        batch_size=EVALUATION_BATCH,
        antialias=resizing.antialias,
    ).map(lambda images, targets: (images, tf.one_hot(targets, classes)))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return batches.with_options(options)


CLASSIFICATION, MASKED_PATCHES, DISTILLATION = "classification", "masked-patches", "distillation"

# So many validation images are drawn with what is predicted of them.
SHOWN = 8


def architecture(model: Trained) -> dict[str, Any]:
    """Returns what config.json says of the network; of one built by hand its layers and a hash."""
    if not isinstance(model, VisionTransformer | DistillationModel | MaskedPatchModel):
        text = json.dumps(model.get_config(), sort_keys=True, default=str)
        return {
            "layers": [f"{type(layer).__name__} {layer.name}" for layer in model.layers],
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
    fields: dict[str, Any] = model.config.to_dict()
    return fields


def describe(model: Trained) -> dict[str, Any]:
    """Returns what config.json says of the kind of training; all of it decides the result."""
    trained = sum(int(variable.shape.num_elements()) for variable in model.trainable_variables)
    about: dict[str, Any] = {"objective": CLASSIFICATION, "trained_parameters": trained}
    if isinstance(model, MaskedPatchModel):
        about |= {"objective": MASKED_PATCHES}
        about |= {"target": model.target, "corruption": model.corruption}
    if isinstance(model, DistillationModel):
        about |= {"objective": DISTILLATION}
        about["distillation"] = {
            "kind": model.teaching.distillation,
            "temperature": model.teaching.temperature,
            "weight": model.weight,
            "teacher_sha256": weights_hash(model.teacher),
        }
        model = model.student
    if isinstance(model, LoRAVisionTransformer):
        about["lora"] = {"rank": model.rank, "targets": list(model.targets), "alpha": model.alpha}
    return about


def write_model(best: Path, folder: Path, *, validation: Split) -> VisionTransformer:
    """Writes the run's model and what else came of its kind of training.

    Args:
        best: the file of the best model, as it was trained.
        folder: where to write.
        validation: images to show reconstructions of.

    Returns:
        The run's model.
    """
    model = keras.saving.load_model(best, compile=False)
    kept = kept_model(model)
    if kept is model:
        shutil.copy2(best, folder / run.MODEL)
    else:
        kept.save(folder / run.MODEL)
    if isinstance(model, LoRAVisionTransformer):
        save_adapter(model, folder / run.ADAPTER)
    if isinstance(model, MaskedPatchModel):
        plot_reconstructions(model, validation, folder / run.RECONSTRUCTIONS, count=SHOWN)
    return kept


def read_model(best: Path) -> VisionTransformer:
    """Returns the run's model, where another worker writes it."""
    return kept_model(keras.saving.load_model(best, compile=False))


def kept_model(model: keras.Model) -> VisionTransformer:
    """Returns the plain model of what was trained: adapters merged, no prediction of patches."""
    if isinstance(model, LoRAVisionTransformer):
        return merge_lora(model)
    return model.vit if isinstance(model, MaskedPatchModel) else model


def _placed(model: Any, *, recipe: Recipe, execution: Execution) -> Any:
    """Returns the model, or a copy in this scope, with this precision, memory and dropout.

    What is frozen stays frozen.
    """
    config = recipe.regularized(execution.config(model.config))
    fields = {"config": config.to_dict(), "dtype": execution.precision}
    if _is_here(model) and fields.items() <= model.get_config().items():
        return model
    return _copied(model, config=config, dtype=execution.precision)


def _copied(model: Any, **changes: Any) -> Any:
    """Returns a copy in this scope; `changes` are the config or dtype of one that has them."""
    if isinstance(model, VisionTransformer):
        return model.copy(**changes)
    if "config" in changes:
        changes["config"] = changes["config"].to_dict()
    return _filled(type(model).from_config({**model.get_config(), **changes}), model)


def _filled(copy: Kept, model: keras.Model) -> Kept:
    """Returns a copy with the weights of its model; what is frozen there is frozen here."""
    copy.set_weights(model.get_weights())
    for ours, theirs in zip(copy.weights, model.weights, strict=True):
        ours.trainable = theirs.trainable
    return copy


def _wrapped(
    model: keras.Model, *, data: ImageData, recipe: Recipe, execution: Execution
) -> ExactModel:
    """Returns an exact model of a functional or sequential one, in this scope.

    Raises:
        TypeError: it is a class with a `call`.
        ValueError: it does not fit the data, or cannot be changed as it is asked for.
    """
    _check_wrapped(model, data=data, recipe=recipe, execution=execution)
    if _is_here(model):
        return model if isinstance(model, ExactModel) else ExactModel.from_model(model)
    return _filled(ExactModel.from_model(keras.models.clone_model(model)), model)


def _check_wrapped(
    model: keras.Model, *, data: ImageData, recipe: Recipe, execution: Execution
) -> None:
    if not isinstance(model, keras.Sequential | Functional):
        raise TypeError(
            "train takes a ViTConfig, a VisionTransformer, a DistillationModel, or a functional or "
            f"sequential model. Received: {type(model).__name__}."
        )
    shape, classes = model.input_shape, len(data.labels)
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
        "layer_decay": recipe.layer_decay != 1,
        "dropout_rate": recipe.dropout_rate is not None,
        "drop_path_rate": recipe.drop_path_rate is not None,
        "remat": execution.remat is not None,
        "precision": execution.precision != "float32",
    }
    wrong = [name for name, is_asked in asked.items() if is_asked]
    if wrong:
        raise ValueError(
            f"{wrong[0]} cannot be changed in a model that is built by hand; build it so, and "
            f"leave {wrong[0]} at its default."
        )


def _distilled(model: DistillationModel, student: VisionTransformer) -> DistillationModel:
    """Returns the model with the student in its place, and the teacher in this scope."""
    teacher = model.teacher
    if not _is_here(teacher):
        teacher = _copied(teacher)
    return DistillationModel(
        student,
        teacher,
        distillation=model.teaching.distillation,
        temperature=model.teaching.temperature,
        weight=model.weight,
    )


def _is_here(model: keras.Model) -> bool:
    """Whether a model's variables lie where those of this scope do."""
    # Not `distribute_strategy`, which of a model made without one is that of any scope.
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    return strategy_of(model) is strategy


def _gives_logits(model: keras.Model) -> bool:
    if isinstance(model, VisionTransformer):
        return model.config.classifier_activation in (None, "linear")
    return not gives_probabilities(model)


def _check_classes(config: ViTConfig, data: ImageData) -> None:
    if config.classes != len(data.labels):
        raise ValueError(
            f"The model has classes={config.classes}, the data {len(data.labels)}; "
            "make the model with as many."
        )


def _check_pixels(config: ViTConfig) -> None:
    if not config.include_preprocessing or config.input_shape[2] != 3:
        raise ValueError(
            "The model must take RGB pixels 0..255: make it with include_preprocessing=True and "
            f"three channels. Received: include_preprocessing={config.include_preprocessing}, "
            f"input_shape={config.input_shape}."
        )
