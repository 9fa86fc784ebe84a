"""Small models of `learn_from_few.py`: compiled once, trained anew for each seed, measured."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit.data import Resizing, Split, resize_image
from keras_vit.data.source import untuned
from keras_vit.training import MaskedPatchModel, WarmupDecay

SIZE, BATCH = (16, 16), 64


class Learner:
    """A compiled model that starts anew for each seed: compiling takes longer than learning.

    AdamW, linear warm-up over a tenth of the steps, cosine decay.
    """

    def __init__(self, model: keras.Model, *, steps: int) -> None:
        self.model, self.steps = model, steps
        self.rate = keras.Variable(0.0, trainable=False)  # in a variable, it can change
        schedule = WarmupDecay(self.rate, steps=steps, warmup_steps=steps // 10)
        optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.05, global_clipnorm=1.0)
        has_loss = not isinstance(model, MaskedPatchModel)
        model.compile(
            optimizer,
            keras.losses.CategoricalCrossentropy(from_logits=True) if has_loss else None,
            steps_per_execution=10,
        )

    def learn(self, split: Split, *, seed: int, start: Any = None, rate: float = 1e-3) -> None:
        """Learns from the images of a split; a class of -1 is no label.

        Args:
            split: the images.
            seed: of their order, and of random weights.
            start: weights to start from; None for fresh ones.
            rate: the highest learning rate.
        """
        trained = getattr(self.model, "student", self.model)
        trained.set_weights(fresh(trained, seed) if start is None else start)
        for variable in self.model.optimizer.variables:
            variable.assign(keras.ops.zeros_like(variable))
        self.rate.assign(rate)
        classes = trained.config.classes or 1
        pairs = (pixels(split), tf.one_hot(split.targets, classes))
        batches = untuned(tf.data.Dataset.from_tensor_slices(pairs))
        batches = batches.shuffle(len(split), seed=seed).repeat()
        batches = batches.batch(BATCH, drop_remainder=True).take(self.steps)
        self.model.fit(batches, verbose=0)


def fresh(model: keras.Model, seed: int) -> list[np.ndarray]:
    """Returns the weights of a new model like this one."""
    keras.utils.set_random_seed(seed)
    return type(model).from_config(model.get_config()).get_weights()


def pixels(split: Split) -> np.ndarray:
    """Returns the images of a split at the models' size."""
    return np.asarray(resize_image(split.images, Resizing(SIZE)))


def accuracy(model: keras.Model, split: Split) -> float:
    """Returns the fraction of the images that a classifier names rightly."""
    answers = model.predict(pixels(split), batch_size=512, verbose=0)
    return float((answers.argmax(axis=1) == split.targets).mean())
