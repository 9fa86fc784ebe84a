"""`train` and `pretrain`: train a model and write a run directory."""

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_vit.config import ViTConfig
from keras_vit.data import ImageData, naming_damaged
from keras_vit.training import models, outcome, progress, run
from keras_vit.training.checkpoints import SETTINGS, Unfinished
from keras_vit.training.execution import Execution, Job, worker_index
from keras_vit.training.loop import Loop, OutOfMemoryError
from keras_vit.training.masked_patches import MaskedPatchModel
from keras_vit.training.objectives import Model, objective_of
from keras_vit.training.outcome import TrainingInterrupted
from keras_vit.training.progress import Event, Watcher
from keras_vit.training.provenance import PROVENANCE, Provenance
from keras_vit.training.recipe import Recipe
from keras_vit.training.recipes import RECIPES
from keras_vit.training.stopping import StopRequests


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
    provenance: Provenance | None = None,
) -> run.Run:
    """Trains a model and writes a run directory: the model of the best epoch and how it was made.

    The best epoch has the lowest validation loss; a recipe may keep the last one instead. The same
    data, model, recipe, seed and machine give the same model, even if the training is interrupted
    and resumed. `out` appears when everything in it is complete. Until then the checkpoints, the
    best model so far, history.csv, curves.png and files for TensorBoard are in a folder named `out`
    with ".unfinished" after it. Ctrl-C and SIGTERM save a checkpoint after the current step, and
    `existing="resume"` continues from there.

    Example:
        >>> import dataclasses, tempfile
        >>> from keras_vit.data import load_digits
        >>> recipe = dataclasses.replace(RECIPES["digits"], epochs=1)
        >>> run = train(load_digits(), out=tempfile.mkdtemp(), recipe=recipe)
        >>> sorted(file.name for file in run.path.iterdir())  # doctest: +NORMALIZE_WHITESPACE
        ['config.json', 'curves.png', 'history.csv', 'labels.txt', 'model.keras', 'sample.png',
         'tensorboard']

    Args:
        data: images in three splits; the test split is not used.
        out: the run directory. A second training to it is an error while the first one runs.
        model: one of these, or a function that makes one in the scope of the strategy, so that
            nothing is copied and the seed decides its fresh weights too:

            - a config, to which pixels 0..255, logits and the data's classes are added;
            - a model that has them already; training starts from its weights, and frozen ones stay
              frozen. A model of `keras_vit.lora` is saved as a plain model, with its adapter;
            - a `DistillationModel`, whose student is trained and saved;
            - a functional or sequential model, which trains as a `keras_vit.ExactModel`;
            - None for the small model that suits the data.
        recipe: how to train. None for the recipe that suits the data.
        seed: decides the fresh weights, the order of the images and their augmentation.
        existing: what to do if there is already a run or an unfinished training: "refuse" it;
            "overwrite" it (a run only once the new one is complete); or "resume" the training with
            the same arguments, of which the recipe's epochs may be more than before. "resume"
            returns a finished run, and starts one if there is none.
        execution: devices, precision, how often to save. None for the defaults of `Execution`.
        on_event: called with a `StepDone` after each step, an `EpochDone` after each epoch, a
            `PlanChanged` where the training goes on otherwise than planned, and a `TrainingDone`
            before the run appears, when files can still be added to it.
        provenance: what config.json says of the command and of the weights that this starts from;
            None for nothing.

    Returns:
        The run, with the model of the best epoch.

    Raises:
        FileExistsError: `out` holds something that may not be replaced, or another training to it
            is running.
        FloatingPointError: the loss is not finite; the last checkpoints are kept.
        ImportError: matplotlib is not installed.
        MemoryError: memory is exhausted even with batches in parts of one image; before that the
            training went on from its last checkpoint in parts of half as many images. The last
            checkpoints are kept.
        OSError: the disk is full, read-only or gone; the text says what is kept and what to do.
        TrainingInterrupted: Ctrl-C or SIGTERM; the text says what is saved.
        ValueError: there are no training or validation images, the model does not fit the data,
            or a training is resumed with other settings.
        WorkerLostError: another worker is lost.
    """
    execution = execution or Execution()
    recipe = recipe or default_recipe(data)
    job = Job(data, recipe=recipe, execution=execution, seed=seed)
    options = _Options(Path(out), existing, on_event, provenance or Provenance())
    return _run(model or default_config(data), job, options)


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
    provenance: Provenance | None = None,
) -> run.Run:
    """Trains a model without labels, by masked patch prediction, and writes a run directory.

    The loop, checkpoints, strategies and files are those of `train`. The run's model is the Vision
    Transformer without classifier, from the epoch of lowest validation loss, over the same
    corruption each time. reconstructions.png shows its predictions for validation images.
    `Run.classifier` makes a classifier of it to `train`.

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
        data: images in three splits; labels and the test split are not used.
        out: the run directory.
        model: a config, to predict mean colours without its classifier; or a `MaskedPatchModel`,
            which sets the target and takes pixels 0..255; or a function that makes one, as in
            `train`. None for the small model that suits the data.
        recipe: how to train, except `loss`, `label_smoothing` and `head_bias`, which have no
            effect. None for the recipe that suits the data.
        seed: decides the fresh weights, the order of the images and their augmentation.
        existing: as in `train`.
        execution: as in `train`.
        on_event: as in `train`.
        provenance: as in `train`.

    Returns:
        The run, with the model of the best epoch.

    Raises:
        TypeError: the model is none of these.
    """
    recipe, execution = recipe or default_pretrain_recipe(data), execution or Execution()
    job = Job(data, recipe=recipe, execution=execution, seed=seed, has_labels=False)
    options = _Options(Path(out), existing, on_event, provenance or Provenance())
    return _run(model or default_pretrain_config(data), job, options)


class _Options(NamedTuple):
    """Arguments of `train` and `pretrain` that decide nothing of the result."""

    out: Path
    existing: run.Existing
    on_event: Callable[[Event], None] | None
    provenance: Provenance


def _run(model: Model | Callable[[], Model], job: Job, options: _Options) -> run.Run:
    """Trains a model, from its first step or from a checkpoint."""
    out, existing = options.out, options.existing
    _check_data(job.data)
    progress.check_matplotlib()
    engine, plan = job.execution.make_engine(), job.plan
    job.execution.check_batch(plan.batch_size, replicas=engine.replicas)
    _check_name(out)
    with run.hold(out, worker=engine.index), StopRequests() as stop:
        if not engine.index:
            run.restore(out)
        keep = job.execution.keep_checkpoints
        folder = Unfinished(out, worker=engine.index, keep=keep)
        _check_places(out, folder, existing=existing)
        keras.utils.set_random_seed(job.seed)
        with engine.scope():
            objective = objective_of(model, job)
            objective.compile()
        watcher = Watcher(
            epochs=plan.epochs,
            steps=plan.steps,
            batch_size=plan.batch_size,
            keep=job.recipe.keep,
            on_event=options.on_event,
        )
        loop = Loop(objective, engine=engine, watcher=watcher, folder=folder)
        finished = outcome.finished(loop, out=out) if existing == "resume" else None
        if finished is not None:
            return finished
        _begin(loop, options)
        return _train(loop, stop, out=out)


def _train(loop: Loop, stop: StopRequests, *, out: Path) -> run.Run:
    with naming_damaged(loop.job.data.validation, trained=loop.job.data.train):
        signal_number = _run_in_memory(loop, stop)
    try:
        if not signal_number:
            stop.end_steps()
        return outcome.finish(loop, out=out, signal_number=signal_number)
    except TrainingInterrupted:
        raise
    except KeyboardInterrupt:
        folder = loop.folder.path
        raise TrainingInterrupted(
            f"Interrupted at the end of the training: all of it is in {str(folder)!r}, resume to "
            "finish the run.",
            path=folder,
            signal_number=stop.signal_number or signal.SIGINT,
        ) from None


def _run_in_memory(loop: Loop, stop: StopRequests) -> int:
    """Runs the loop, in smaller parts of batches each time that memory is exhausted."""
    while True:
        try:
            return loop.run(stop)
        except OutOfMemoryError:
            job = loop.job.in_smaller_parts(replicas=loop.engine.replicas)
            if job is None or loop.engine.count > 1:  # the other workers wait for this one
                raise
        loop.restart(job)  # here, where the error no longer holds what filled the memory


def _begin(loop: Loop, options: _Options) -> None:
    """Restores the last checkpoint, or makes the folder and the first checkpoint."""
    is_resumed = options.existing == "resume" and loop.folder.exists()
    # One more than the last step of each worker, or 0.
    last_steps = loop.engine.gather(1 + loop.folder.checkpoints.steps()[-1] if is_resumed else 0)
    if all(last_steps):
        raised = loop.folder.check(loop.settings)
        loop.resume()
        before = Provenance.read(loop.folder.path / SETTINGS)
        provenance = before.resumed(options.provenance)
        if raised is not None:
            loop.tell_raised(raised)
        if raised is not None or provenance != before:
            loop.folder.write_settings(_recorded(loop, provenance))
        return
    if max(last_steps) > 1:  # otherwise they were killed before the first step
        workers = [index for index, step in enumerate(last_steps) if not step]
        raise ValueError(
            f"The checkpoints of the workers {workers} are gone; put back the folders "
            f"{loop.folder.path.name}-N, or overwrite the training of all."
        )
    loop.folder.start(_recorded(loop, options.provenance))
    loop.save()


def _recorded(loop: Loop, provenance: Provenance) -> dict[str, Any]:
    """Returns the settings, and what resuming need not repeat: execution and provenance."""
    return {
        **loop.settings,
        "execution": dataclasses.asdict(loop.job.execution),
        PROVENANCE: provenance.to_dict(),
    }


def check_free(out: str | os.PathLike[str], *, existing: run.Existing = "refuse") -> None:
    """Raises an error if a training to `out` would replace what it may not.

    Example:
        >>> check_free("new-run")

    Raises:
        FileExistsError: `out` holds something that may not be replaced, or another training to it
            is running.
        ValueError: `out` is not a name that a folder can have.
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
        return  # the run is finished, so nothing is written
    # A training that is resumed was allowed to replace the run when it started.
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

    It pools by the average of the patches, because nothing trains a class token. It is not a
    hybrid, because the targets are the pixels of a patch.

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
    """Returns the recipe for pre-training without labels, with the augmentation of `train`.

    Example:
        >>> from keras_vit.data import load_digits
        >>> default_pretrain_recipe(load_digits()).augmentation.rotation
        15
    """
    augmentation = default_recipe(data).augmentation
    return dataclasses.replace(RECIPES["masked-patches"], augmentation=augmentation)


def _check_data(data: ImageData) -> None:
    for name in ("train", "validation"):
        if not len(data.split(name)):
            raise ValueError(f"The data has no {name} images; training needs some.")
    for label in data.labels:
        is_line = label.splitlines() == [label]
        if not is_line or label != label.encode("utf-8", "ignore").decode("utf-8"):
            raise ValueError(
                f"The class {label!r} cannot be a line of labels.txt: its name is empty, has a "
                "line break, or bytes that are not UTF-8; rename it, or its folder."
            )
