"""Trains a model on images and leaves a run directory."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.data import ImageData, evaluation_batches, mix_batch, train_batches
from keras_vit.data.pipeline import steps_per_epoch
from keras_vit.model import VisionTransformer
from keras_vit.training import finish, models, report, run
from keras_vit.training import recipe as recipes
from keras_vit.training.optimizer import make_optimizer
from keras_vit.training.progress import Event, Watcher

EVALUATION_BATCH = 128
MIXUP = 100  # marks these draws, so that they share no stream with those of the data's pipeline


def train(
    data: ImageData,
    *,
    out: str | os.PathLike[str],
    model: ViTConfig | VisionTransformer | None = None,
    recipe: recipes.Recipe | None = None,
    seed: int = 0,
    overwrite: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> run.Run:
    """Trains a model and leaves a run directory: the model of the best epoch and how it was made.

    The best epoch has the lowest validation loss. The same data, model, recipe, seed and machine
    give the same model. `out` appears when everything in it is complete. An interruption (Ctrl-C)
    after the first epoch saves the best epoch so far.

    Example:
        >>> import dataclasses, tempfile
        >>> from keras_vit.data import load_digits
        >>> recipe = dataclasses.replace(recipes.RECIPES["digits"], epochs=1)
        >>> run = train(load_digits(), out=tempfile.mkdtemp(), recipe=recipe)
        >>> sorted(file.name for file in run.path.iterdir())  # doctest: +NORMALIZE_WHITESPACE
        ['config.json', 'curves.png', 'history.csv', 'labels.txt', 'model.keras', 'sample.png']

    Args:
        data: images in three splits; the test split is not looked at.
        out: the run directory to make.
        model: a config, which is built to take pixels 0..255 and to give logits for the data's
            classes; or a model that does so already, and is then trained in place. None for the
            small model that suits the data.
        recipe: how to train. None for the recipe that suits the data.
        seed: decides the fresh weights, the order of the images and how they are varied.
        overwrite: whether a run that is at `out` may be replaced, once the new one is complete.
        on_event: called with a `StepDone` after each step and an `EpochDone` after each epoch.

    Returns:
        The run, with the model of the best epoch.

    Raises:
        FileExistsError: something is at `out` that may not be replaced.
        ImportError: matplotlib is not installed.
        TrainingInterrupted: Ctrl-C; the text says what was saved.
        ValueError: there are no training or validation images, the model does not fit the data,
            or the loss became infinite.
    """
    out = Path(out)
    _check_backend()
    _check_data(data)
    report.check_matplotlib()
    run.check_free(out, overwrite=overwrite)
    recipe = recipe or default_recipe(data)
    keras.utils.set_random_seed(seed)
    vit = _built(model or default_config(data), data=data)
    watcher = Watcher(
        epochs=recipe.epochs,
        steps=recipe.epochs * steps_per_epoch(data.train, batch_size=recipe.batch_size),
        on_event=on_event,
    )
    with run.staging_directory(out) as stage:
        finished = _fit(vit, data, recipe=recipe, seed=seed, watcher=watcher)
        if watcher.best is None:
            raise finish.TrainingInterrupted(
                "Interrupted before the end of the first epoch: nothing was saved.", path=None
            )
        # A fresh model, because a compiled one would be saved with its optimizer.
        best = VisionTransformer.from_config(vit.get_config())
        best.set_weights(watcher.best_weights)
        config = finish.describe(best, data, recipe=recipe, seed=seed, watcher=watcher)
        finish.write(stage, best, data, config=config, watcher=watcher)
        return finish.publish(stage, out, model=best, config=config, finished=finished)


def default_config(data: ImageData) -> ViTConfig:
    """Returns the config of the small model that suits the data.

    Example:
        >>> from keras_vit.data import load_digits
        >>> default_config(load_digits()).input_shape
        (16, 16, 3)
    """
    return models.MODELS["digits" if data.source == "digits" else "tiny"]


def default_recipe(data: ImageData) -> recipes.Recipe:
    """Returns the recipe for training from scratch that suits the data.

    Example:
        >>> from keras_vit.data import load_digits
        >>> default_recipe(load_digits()).epochs
        100
    """
    return recipes.RECIPES["digits" if data.source == "digits" else "scratch"]


def _check_backend() -> None:
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Training needs Keras' TensorFlow backend. Received: {keras.backend.backend()!r}; "
            "set KERAS_BACKEND=tensorflow."
        )


def _check_data(data: ImageData) -> None:
    for name in ("train", "validation"):
        if not len(data.split(name)):
            raise ValueError(f"The data has no {name} images; training needs some.")


def _built(model: ViTConfig | VisionTransformer, *, data: ImageData) -> VisionTransformer:
    if isinstance(model, ViTConfig):
        return VisionTransformer(
            dataclasses.replace(
                model,
                classes=len(data.labels),
                classifier_activation=None,
                include_preprocessing=True,
            )
        )
    config = model.config
    if config.classes != len(data.labels):
        raise ValueError(
            f"The model has classes={config.classes}, the data {len(data.labels)}; "
            "make the model with as many."
        )
    if not config.include_preprocessing or config.input_shape[2] != 3:
        raise ValueError(
            "The model must take RGB pixels 0..255: make it with include_preprocessing=True and "
            f"three channels. Received: include_preprocessing={config.include_preprocessing}, "
            f"input_shape={config.input_shape}."
        )
    return model


def _fit(
    model: VisionTransformer,
    data: ImageData,
    *,
    recipe: recipes.Recipe,
    seed: int,
    watcher: Watcher,
) -> bool:
    """Trains in place and returns whether no interruption came."""
    classes, image_size = len(data.labels), model.input_shape[1:3]

    def soften(step: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        images, certain = batch[0], tf.one_hot(batch[1], classes)
        targets = certain * (1 - recipe.label_smoothing) + recipe.label_smoothing / classes
        key = tf.random.experimental.stateless_fold_in(tf.constant((seed, MIXUP), tf.int64), step)
        return mix_batch(images, targets, alpha=recipe.mixup, seed=key)

    batches = train_batches(
        data.train,
        image_size=image_size,
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
        seed=seed,
        augmentation=recipe.augmentation,
    )
    validation = evaluation_batches(
        data.validation, image_size=image_size, batch_size=EVALUATION_BATCH
    )
    steps = steps_per_epoch(data.train, batch_size=recipe.batch_size)
    model.compile(
        make_optimizer(recipe, model=model, steps=recipe.epochs * steps),
        loss=keras.losses.CategoricalCrossentropy(
            from_logits=model.config.classifier_activation is None
        ),
        metrics=["accuracy"],
    )
    try:
        model.fit(
            batches.enumerate().map(soften),
            epochs=recipe.epochs,
            steps_per_epoch=steps,
            shuffle=False,  # it is shuffled
            validation_data=validation.map(lambda x, y: (x, tf.one_hot(y, classes))),
            callbacks=[watcher],
            verbose=0,
        )
        finished = True
    except KeyboardInterrupt:
        finished = False
    return finished
