"""Trains a classifier, or pre-trains without labels, and leaves a run directory."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import keras

from keras_vit.config import ViTConfig
from keras_vit.data import ImageData, naming_damaged
from keras_vit.training import finish, models, progress, run
from keras_vit.training.checkpoints import Unfinished
from keras_vit.training.execution import Execution, Workers, worker_index
from keras_vit.training.job import Job
from keras_vit.training.loop import Loop, StopRequests
from keras_vit.training.masked_patches import MaskedPatchModel
from keras_vit.training.objectives import Model, objective_of
from keras_vit.training.progress import Event, Watcher
from keras_vit.training.recipe import Recipe
from keras_vit.training.recipes import RECIPES


def train(
    data: ImageData,
    *,
    out: str | os.PathLike[str],
    model: ViTConfig | keras.Model | Callable[[], ViTConfig | keras.Model] | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    existing: run.Existing = "refuse",
    execution: Execution | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> run.Run:
    """Trains a model and leaves a run directory: the model of the best epoch and how it was made.

    The best epoch has the lowest validation loss; a recipe may keep the last one. The same data,
    model, recipe, seed and machine give the same model, however often the training was stopped and
    resumed. `out` appears when everything in it is complete; until then all is in `out` with
    ".unfinished" after its name: the checkpoints, the best model so far, history.csv, curves.png
    and files for TensorBoard. Ctrl-C and SIGTERM save a checkpoint after the current step;
    `existing="resume"` goes on from there.

    Example:
        >>> import dataclasses, tempfile
        >>> from keras_vit.data import load_digits
        >>> recipe = dataclasses.replace(RECIPES["digits"], epochs=1)
        >>> run = train(load_digits(), out=tempfile.mkdtemp(), recipe=recipe)
        >>> sorted(file.name for file in run.path.iterdir())  # doctest: +NORMALIZE_WHITESPACE
        ['config.json', 'curves.png', 'history.csv', 'labels.txt', 'model.keras', 'sample.png',
         'tensorboard']

    Args:
        data: images in three splits; the test split is not looked at.
        out: the run directory to make. A second training to it is refused while one is at work.
        model: a config, which is built to take pixels 0..255 and to give logits for the data's
            classes; or a model that does so already, whose weights are started from, what is
            frozen stays frozen; or a `DistillationModel`, whose student is trained and kept. One
            of `keras_vit.lora` is kept as a plain model, its adapter beside it. Or a function that
            makes any of these, called where the model is to lie, so that nothing is copied; the
            seed decides its fresh weights too. A functional or sequential model trains too, as a
            `keras_vit.ExactModel`. None for the small model that suits the data.
        recipe: how to train. None for the recipe that suits the data.
        seed: decides the fresh weights, the order of the images and how they are varied.
        existing: what to do where a run or an unfinished training is already: "refuse",
            "overwrite" it (a run only once the new one is complete), or "resume" the unfinished
            one with the same arguments: a finished one is returned, and without any it starts anew.
        execution: devices, precision, how often to save. None for the defaults of `Execution`.
        on_event: called with a `StepDone` after each step, an `EpochDone` after each epoch, and a
            `TrainingDone` before the run appears, which may still add to it.

    Returns:
        The run, with the model of the best epoch.

    Raises:
        FileExistsError: something is at `out` that may not be replaced, or another training is at
            work there.
        FloatingPointError: the loss became infinite; the checkpoints of before are kept.
        ImportError: matplotlib is not installed.
        MemoryError: there is not enough; the checkpoints of before are kept.
        OSError: the disk is full, read-only or gone; the text says what is kept and what to do.
        TrainingInterrupted: Ctrl-C or SIGTERM; the text says what was saved.
        ValueError: there are no training or validation images, the model does not fit the data,
            or a training is resumed otherwise than it was started.
        WorkerLostError: another worker has gone.
    """
    recipe, execution = recipe or default_recipe(data), execution or Execution()
    job = Job(data, recipe=recipe, execution=execution, seed=seed)
    model = model or default_config(data)
    return _run(model, job, out=Path(out), existing=existing, on_event=on_event)


def pretrain(
    data: ImageData,
    *,
    out: str | os.PathLike[str],
    model: ViTConfig | MaskedPatchModel | Callable[[], MaskedPatchModel] | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    existing: run.Existing = "refuse",
    execution: Execution | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> run.Run:
    """Trains a model without labels, by masked patch prediction, and leaves a run directory.

    Everything is as in `train`: the same loop, checkpoints, strategies and files. The run's model
    is the Vision Transformer without classifier, of the epoch of least validation loss, over the
    same corruption each time; reconstructions.png shows what it predicts of validation images.
    `Run.classifier` makes a classifier of it to `train` on.

    Example:
        >>> import dataclasses, tempfile
        >>> from keras_vit.data import load_digits
        >>> config = ViTConfig(input_shape=(8, 8, 3), patch_size=4, hidden_dim=8, mlp_dim=8,
        ...                    num_heads=1, num_layers=1, pooling="avg", class_token=False)
        >>> recipe = dataclasses.replace(RECIPES["masked-patches"], epochs=None, steps=2)
        >>> run = pretrain(load_digits(), out=tempfile.mkdtemp(), model=config, recipe=recipe)
        >>> run.model.output_shape, (run.path / "reconstructions.png").is_file()
        ((None, 8), True)

    Args:
        data: images in three splits; labels and the test split are not looked at.
        out: the run directory to make.
        model: a config, whose classifier is left out, to predict mean colours; or a
            `MaskedPatchModel`, which says what is predicted and takes pixels 0..255; or a function
            that makes one, as in `train`. None for the small model that suits the data.
        recipe: how to train; `loss`, `label_smoothing` and `head_bias` do not matter. None for
            the recipe that suits the data.
        seed: decides the fresh weights, the order of the images and how they are varied.
        existing: as in `train`.
        execution: as in `train`.
        on_event: as in `train`.

    Returns:
        The run, with the model of the best epoch.

    Raises:
        TypeError: the model is neither.
    """
    recipe, execution = recipe or default_pretrain_recipe(data), execution or Execution()
    job = Job(data, recipe=recipe, execution=execution, seed=seed, has_labels=False)
    model = model or default_pretrain_config(data)
    return _run(model, job, out=Path(out), existing=existing, on_event=on_event)


def _run(
    model: Model | Callable[[], Model],
    job: Job,
    *,
    out: Path,
    existing: run.Existing,
    on_event: Callable[[Event], None] | None,
) -> run.Run:
    """Trains a model, from the start or from a checkpoint on."""
    _check_backend()
    _check_data(job.data)
    progress.check_matplotlib()
    strategy = job.execution.make_strategy()
    workers, plan = Workers(strategy), job.plan
    job.execution.check_batch(plan.batch_size, replicas=strategy.num_replicas_in_sync)
    _check_name(out)
    with run.hold(out, worker=workers.index), StopRequests() as stop:
        folder = _free_folder(out, job, workers=workers, existing=existing)
        keras.utils.set_random_seed(job.seed)
        with strategy.scope():
            objective = objective_of(model, job)
            objective.compile()
        watcher = Watcher(
            epochs=plan.epochs,
            steps=plan.steps,
            batch_size=plan.batch_size,
            keep=job.recipe.keep,
            on_event=on_event,
        )
        loop = Loop(objective, workers=workers, watcher=watcher, folder=folder)
        finished = finish.finished(loop, out=out) if existing == "resume" else None
        if finished is not None:
            return finished
        _begin(loop, existing=existing)
        return _train(loop, stop, out=out)


def _free_folder(out: Path, job: Job, *, workers: Workers, existing: run.Existing) -> Unfinished:
    """Returns the folder to train in, where nothing is lost by it; the lock is held."""
    if not workers.index:
        run.restore(out)
    folder = Unfinished(out, worker=workers.index, keep=job.execution.keep_checkpoints)
    _check_places(out, folder, existing=existing)
    return folder


def _train(loop: Loop, stop: StopRequests, *, out: Path) -> run.Run:
    with naming_damaged(loop.job.data.validation, trained=loop.job.data.train):
        asked = loop.run(stop)
    try:
        if not asked:
            stop.end_steps()
        return finish.finish(loop, out=out, asked=asked)
    except finish.TrainingInterrupted:
        raise
    except KeyboardInterrupt:
        raise finish.cut_off(loop.folder.path, asked=stop.asked) from None


def _begin(loop: Loop, *, existing: run.Existing) -> None:
    """Goes back to the last checkpoint, or makes the folder and the first one."""
    is_there = existing == "resume" and loop.folder.exists()
    reached = loop.workers.gather(1 + loop.folder.checkpoints.steps()[-1] if is_there else 0)
    if all(reached):
        loop.folder.check(loop.settings)
        loop.resume()
        return
    if max(reached) > 1:  # otherwise they were killed before the first step
        lacking = [index for index, steps in enumerate(reached) if not steps]
        raise ValueError(
            f"Of the workers {lacking} the checkpoints are gone; put back the folders "
            f"{loop.folder.path.name}-N, or overwrite the training of all."
        )
    loop.folder.start(loop.settings)
    loop.save()


def check_free(out: str | os.PathLike[str], *, existing: run.Existing = "refuse") -> None:
    """Raises an error unless `train` may write to `out` without losing anything.

    Example:
        >>> check_free("new-run")

    Raises:
        FileExistsError: something is there that may not be replaced, or another training is at
            work there.
        ValueError: `out` is no name that a folder can have.
    """
    out, worker = Path(out), worker_index()
    _check_name(out)
    run.check_unheld(out, worker=worker)
    _check_places(out, Unfinished(out, worker=worker), existing=existing)


def _check_name(out: Path) -> None:
    if not out.name or out.name == "..":
        raise ValueError(f"{str(out)!r} names no new folder; give the run a name of its own.")


def _check_places(out: Path, folder: Unfinished, *, existing: run.Existing) -> None:
    folder.check_free(existing=existing)
    if existing == "resume" and run.is_run(out) and not folder.exists():
        return  # a finished run: nothing is written
    # An unfinished training that is resumed was allowed to replace what is there.
    is_resumed = existing == "resume" and folder.exists()
    run.check_free(out, existing="overwrite" if is_resumed else existing)


def default_config(data: ImageData) -> ViTConfig:
    """Returns the config of the small model that suits the data.

    Example:
        >>> from keras_vit.data import load_digits
        >>> default_config(load_digits()).input_shape
        (16, 16, 3)
    """
    return models.MODELS["digits-hybrid" if data.source == "digits" else "tiny"]


def default_pretrain_config(data: ImageData) -> ViTConfig:
    """Returns the config to pre-train on the data without labels.

    It pools by the average of the patches: no class token would be trained for anything. Patches
    are of pixels, which are what is predicted: it is no hybrid.

    Example:
        >>> from keras_vit.data import load_digits
        >>> default_pretrain_config(load_digits()).pooling
        'avg'
    """
    config = models.MODELS["digits" if data.source == "digits" else "tiny"]
    return dataclasses.replace(config, pooling="avg", class_token=False)


def default_recipe(data: ImageData) -> Recipe:
    """Returns the recipe for training from scratch that suits the data.

    Example:
        >>> from keras_vit.data import load_digits
        >>> default_recipe(load_digits()).epochs
        200
    """
    return RECIPES["digits" if data.source == "digits" else "scratch"]


def default_pretrain_recipe(data: ImageData) -> Recipe:
    """Returns the recipe for pre-training without labels, images varied as with labels.

    Example:
        >>> from keras_vit.data import load_digits
        >>> default_pretrain_recipe(load_digits()).augmentation.rotation
        15
    """
    varied = default_recipe(data).augmentation
    return dataclasses.replace(RECIPES["masked-patches"], augmentation=varied)


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
