"""The settings of a training besides its model, and its batches."""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from keras_vit.data import ImageData, evaluation_batches, mix_batch, train_batches
from keras_vit.training.execution import Execution
from keras_vit.training.recipe import Plan, Recipe

EVALUATION_BATCH = 128
MIXUP = 100  # gives mixing another random stream than the data pipeline has


class Resizing(NamedTuple):
    """How images are resized for a model; `size` is (height, width) in pixels."""

    size: tuple[int, int]
    antialias: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """The settings of a training besides its model.

    Attributes:
        data: images in three splits.
        recipe: how to train.
        execution: devices, precision, how often to save.
        seed: decides the order of the images and their augmentation.
        has_labels: whether the training uses labels.
    """

    data: ImageData
    _: dataclasses.KW_ONLY
    recipe: Recipe
    execution: Execution
    seed: int = 0
    has_labels: bool = True

    @property
    def plan(self) -> Plan:
        """The recipe in numbers, for these images."""
        return self.recipe.plan(images=len(self.data.train))

    @property
    def width(self) -> int:
        """The size of a target; without labels all images are of one class."""
        return max(len(self.data.labels), 1)

    def training_batches(
        self, resizing: Resizing, *, start_step: int, shard: tuple[int, int]
    ) -> tf.data.Dataset:
        """Returns batches of (images, probabilities) from a step on, for one of several workers."""
        recipe, plan = self.recipe, self.plan

        def smooth_and_mix(
            step: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor]:
            images, targets = batch[0], tf.one_hot(batch[1], self.width)
            smoothing = recipe.label_smoothing
            return mix_batch(
                images,
                targets * (1 - smoothing) + smoothing / self.width,
                alpha=recipe.mixup,
                cutmix=recipe.cutmix,
                per=recipe.mix_per,
                seed=tf.random.experimental.stateless_fold_in(
                    tf.constant((self.seed, MIXUP), tf.int64), step
                ),
                shard=shard,
            )

        batches = train_batches(
            self.data.train,
            image_size=resizing.size,
            batch_size=plan.batch_size,
            epochs=plan.epochs,
            seed=self.seed,
            augmentation=recipe.augmentation,
            antialias=resizing.antialias,
            start_step=start_step,
            shard=shard,
        )
        return batches.enumerate(start_step).map(smooth_and_mix)

    def validation_batches(
        self, resizing: Resizing, *, shard: tuple[int, int] = (0, 1)
    ) -> tf.data.Dataset:
        """Returns the batches of (images, probabilities) that evaluate an epoch."""
        batches = evaluation_batches(
            self.data.validation,
            image_size=resizing.size,
            batch_size=EVALUATION_BATCH,
            antialias=resizing.antialias,
            shard=shard,
        )
        return batches.map(lambda images, targets: (images, tf.one_hot(targets, self.width)))
