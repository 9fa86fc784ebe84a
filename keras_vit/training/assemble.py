"""Makes the parts of a training: the model, compiled for its recipe, and its batches."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.data import ImageData, evaluation_batches, mix_batch, train_batches
from keras_vit.model import VisionTransformer
from keras_vit.training.distillation import DistillationModel
from keras_vit.training.execution import Execution
from keras_vit.training.loop import Batches
from keras_vit.training.losses import make_loss
from keras_vit.training.masked_patches import MaskedPatchModel
from keras_vit.training.optimizer import make_optimizer
from keras_vit.training.recipe import Plan, Recipe

EVALUATION_BATCH = 128
MIXUP = 100  # marks these draws, so that they share no stream with those of the data's pipeline

Classifier = VisionTransformer | DistillationModel
Trained = Classifier | MaskedPatchModel
Kept = TypeVar("Kept", VisionTransformer, MaskedPatchModel)


def build_classifier(
    model: ViTConfig | Classifier | Callable[[], ViTConfig | Classifier],
    *,
    data: ImageData,
    recipe: Recipe,
    execution: Execution,
) -> Classifier:
    """Returns the model to train, in the strategy's scope that this is called in.

    Args:
        model: a config; or a model, which is trained itself where that is possible, and otherwise
            copied; or a function that makes either.
        data: decides the number of classes.
        recipe: decides dropout, stochastic depth and the bias of a fresh classifier.
        execution: decides the precision.

    Raises:
        ValueError: the model does not fit the data.
    """
    if not isinstance(model, ViTConfig | Classifier):
        model = model()
    if isinstance(model, ViTConfig):
        vit = VisionTransformer(_config(model, data, recipe), dtype=execution.precision)
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
        config = dataclasses.replace(model, include_preprocessing=True, **_regularization(recipe))
        return MaskedPatchModel(config, dtype=execution.precision)
    _check_pixels(model.config)
    placed: MaskedPatchModel = _placed(model, recipe=recipe, execution=execution)
    return placed


def kept_part(model: Trained) -> VisionTransformer | MaskedPatchModel:
    """Returns the part of a model that is saved: of a distillation the student."""
    return model.student if isinstance(model, DistillationModel) else model


def compile_model(model: Trained, *, recipe: Recipe, plan: Plan, execution: Execution) -> None:
    """Compiles a model for a recipe, and builds all state that a checkpoint has to hold."""
    own: dict[str, Any] = {}
    if not isinstance(model, MaskedPatchModel):
        is_logits = model.config.classifier_activation is None
        own["loss"] = make_loss(recipe.loss, from_logits=is_logits)
    if isinstance(model, VisionTransformer):
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
    kept, config = kept_part(model), model.config
    return {
        "model": model,
        "kept": kept,
        "best_model": plain_copy(kept),
        "batches": make_batches(data, config, recipe=recipe, plan=plan, seed=seed),
        "validation": make_validation(data, config),
        "plan": plan,
        "is_averaged": recipe.average is not None,
    }


def plain_copy(model: Kept) -> Kept:
    """Returns an equal model in float32, outside of any strategy, not compiled."""
    copy: Kept = type(model).from_config({**model.get_config(), "dtype": "float32"})
    copy.set_weights(model.get_weights())
    return copy


def make_batches(
    data: ImageData, config: ViTConfig, *, recipe: Recipe, plan: Plan, seed: int
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
                images, targets, alpha=recipe.mixup, cutmix=recipe.cutmix, seed=key, shard=shard
            )

        made = train_batches(
            data.train,
            image_size=config.input_shape[:2],
            batch_size=plan.batch_size,
            epochs=plan.epochs,
            seed=seed,
            augmentation=recipe.augmentation,
            antialias=config.antialias,
            start_step=start_step,
            shard=shard,
        )
        return made.enumerate(start_step).map(soften)

    return batches


def make_validation(data: ImageData, config: ViTConfig) -> tf.data.Dataset:
    """Returns the batches that epochs are judged by: images, probabilities."""
    classes = max(len(data.labels), 1)
    batches = evaluation_batches(
        data.validation,
        image_size=config.input_shape[:2],
        batch_size=EVALUATION_BATCH,
        antialias=config.antialias,
    ).map(lambda images, targets: (images, tf.one_hot(targets, classes)))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return batches.with_options(options)


def _config(config: ViTConfig, data: ImageData, recipe: Recipe) -> ViTConfig:
    return dataclasses.replace(
        config,
        classes=len(data.labels),
        classifier_activation=None,
        include_preprocessing=True,
        **_regularization(recipe),
    )


def _regularization(recipe: Recipe) -> dict[str, Any]:
    rates = {"dropout_rate": recipe.dropout_rate, "drop_path_rate": recipe.drop_path_rate}
    return {name: rate for name, rate in rates.items() if rate is not None}


def _placed(model: Any, *, recipe: Recipe, execution: Execution) -> Any:
    """Returns the model, or a copy in this scope and with this precision and dropout.

    What is frozen stays frozen.
    """
    config = dataclasses.replace(model.config, **_regularization(recipe))
    fields = {**model.get_config(), "config": config.to_dict(), "dtype": execution.precision}
    is_here = model.distribute_strategy is tf.distribute.get_strategy()
    if is_here and fields == model.get_config():
        return model
    copy = type(model).from_config(fields)
    copy.set_weights(model.get_weights())
    for ours, theirs in zip(copy.weights, model.weights, strict=True):
        ours.trainable = theirs.trainable
    return copy


def _distilled(model: DistillationModel, student: VisionTransformer) -> DistillationModel:
    """Returns the model with the student in its place, and the teacher in this scope."""
    teacher = model.teacher
    if teacher.distribute_strategy is not tf.distribute.get_strategy():
        teacher = type(teacher).from_config(teacher.get_config())
        teacher.set_weights(model.teacher.get_weights())
    return DistillationModel(
        student,
        teacher,
        distillation=model.teaching.distillation,
        temperature=model.teaching.temperature,
        weight=model.weight,
    )


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
