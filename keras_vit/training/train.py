"""`train` and `pretrain`: train a model and write a run directory."""

import dataclasses
import datetime
import json
import os
import platform
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit import __version__, atomic, environment
from keras_vit.config import ViTConfig
from keras_vit.data import ImageData, naming_damaged
from keras_vit.data.source import first_names
from keras_vit.limits import counted, is_line
from keras_vit.training import checkpoints, models, run
from keras_vit.training.execution import Engine, Execution, Job, TensorFlowEngine, worker_index
from keras_vit.training.loop import Loop, OutOfMemoryError, StopRequests
from keras_vit.training.masked_patches import MaskedPatchModel
from keras_vit.training.objectives import Model, objective_of
from keras_vit.training.progress import Event, ProgressLogger, TrainingDone
from keras_vit.training.recipe import Recipe
from keras_vit.training.recipes import RECIPES


class TrainingInterrupted(KeyboardInterrupt):
    """Raised after Ctrl-C or SIGTERM; the text says what is saved.

    Attributes:
        path: the folder of the training, which can be resumed; it is also a run directory once an
            epoch is complete.
        exit_code: 130 after Ctrl-C; 75 after SIGTERM, which tells a supervisor to start again.
    """

    def __init__(self, message: str, *, path: Path, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.path = path
        self.exit_code = 75 if signal_number == signal.SIGTERM else 130


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
    provenance: run.Provenance | None = None,
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
            nothing is copied and the seed decides its random weights too:

            - a config, to which pixels 0..255, logits and the data's classes are added;
            - a model that has them already; training starts from its weights, and frozen ones stay
              frozen. A model of `keras_vit.lora` is saved as a plain model, with its adapter;
            - a `DistillationModel`, whose student is trained and saved;
            - a functional or sequential model, which trains as a `keras_vit.ExactModel`;
            - None for the small model that suits the data.
        recipe: how to train. None for the recipe that suits the data.
        seed: decides the random weights, the order of the images and their augmentation.
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

    Raises:
        FileExistsError: `out` holds something that may not be replaced, or another training to it
            is running.
        FloatingPointError: the loss is not finite; the last checkpoints are kept.
        ImportError: matplotlib is not installed.
        MemoryError: memory is exhausted even with micro-batches of one image; before that the
            training went on from its last checkpoint with half as many images in each. The
            last checkpoints are kept.
        OSError: the disk is full, read-only or gone; the text says what is kept and what to do.
        TrainingInterrupted: Ctrl-C or SIGTERM; the text says what is saved.
        ValueError: there are no training or validation images, the model does not fit the data,
            or a training is resumed with other settings.
        WorkerLostError: another worker is lost.
    """
    small = models.MODELS["digits-hybrid" if data.source == "digits" else "tiny"]
    recipe, execution = recipe or default_recipe(data), execution or Execution()
    job = Job(data, recipe=recipe, execution=execution, seed=seed)
    return _run(model or small, job, Path(out), existing, on_event, provenance)


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
    provenance: run.Provenance | None = None,
) -> run.Run:
    """Trains a model without labels, by masked patch prediction, and writes a run directory.

    The loop, checkpoints, strategies and files are those of `train`. The run's model is the Vision
    Transformer without classifier, from the epoch of lowest validation loss, over the same
    corruption each time. reconstructions.png shows its predictions for validation images.
    `Run.classifier` makes a classifier of it to `train`, on its class token if it has one.

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
            which sets the target and takes pixels 0..255; or a function that makes one. None for
            the small model that suits the data.
        recipe: how to train, except `loss`, `label_smoothing` and `head_bias`, which have no
            effect. None for the recipe that suits the data.
        seed: as in `train`, as are `existing`, `execution`, `on_event`, `provenance` and what is
            returned.

    Raises:
        TypeError: the model is none of these.
    """
    # No hybrid: the targets are the pixels of a patch.
    small = models.MODELS["digits" if data.source == "digits" else "tiny"]
    small = dataclasses.replace(small, pooling="avg")
    recipe, execution = recipe or default_pretrain_recipe(data), execution or Execution()
    job = Job(data, recipe=recipe, execution=execution, seed=seed, has_labels=False)
    return _run(model or small, job, Path(out), existing, on_event, provenance)


def make_engine(execution: Execution) -> Engine:
    """Returns what the steps of a training run on; with several workers, as `make_strategy`."""
    if keras.backend.backend() == "tensorflow":
        return TensorFlowEngine(execution.make_strategy())
    execution.check_backend()
    from keras_vit.training.jax_engine import JAXEngine  # JAX may be missing elsewhere

    return JAXEngine(execution.mesh)


def _run(
    model: Model | Callable[[], Model],
    job: Job,
    out: Path,
    existing: run.Existing,
    on_event: Callable[[Event], None] | None,
    provenance: run.Provenance | None,
) -> run.Run:
    check_data(job.data)
    with environment.pictures():
        import matplotlib  # noqa: F401
    engine, plan = make_engine(job.execution), job.plan
    if plan.batch_size % engine.replicas:
        raise ValueError(
            f"A batch of {plan.batch_size} images cannot be divided evenly among "
            f"{engine.replicas} replicas; choose a multiple of {engine.replicas}."
        )
    _check_name(out)
    with run.lock(out, worker=engine.index), StopRequests() as stop:
        if not engine.index:
            atomic.restore(run.unfinished_path(out), out)
        folder = checkpoints.WorkDirectory(out, worker=engine.index)
        _check_places(out, folder, existing=existing)
        keras.utils.set_random_seed(job.seed)
        with engine.scope():
            objective = objective_of(model, job)
            objective.compile()
        logger = ProgressLogger(
            epochs=plan.epochs,
            steps=plan.steps,
            batch_size=plan.batch_size,
            keep=job.recipe.keep,
            on_event=on_event,
        )
        loop = Loop(objective, engine=engine, logger=logger, folder=folder)
        finished = _finished(loop, out=out) if existing == "resume" else None
        if finished is not None:
            return finished
        _begin(loop, provenance or run.Provenance(), existing=existing)
        with naming_damaged(job.data.validation, trained=job.data.train):
            _run_in_memory(loop, stop)
        try:
            if loop.signal_number:
                raise _interruption(loop)
            stop.end_steps()
            return _finish(loop, out=out)
        except TrainingInterrupted:
            raise
        except KeyboardInterrupt:
            raise TrainingInterrupted(
                f"Interrupted at the end of the training: all of it is in {str(folder.path)!r}, "
                "resume to finish the run.",
                path=folder.path,
                signal_number=stop.signal_number or signal.SIGINT,
            ) from None


def _run_in_memory(loop: Loop, stop: StopRequests) -> None:
    while True:
        try:
            return loop.run(stop)
        except OutOfMemoryError:
            job = loop.job.with_more_accumulation(replicas=loop.engine.replicas)
            if job is None or loop.engine.count > 1:  # the other workers wait for this one
                raise
        loop.restart(job)  # here, where the error no longer holds what filled the memory


def _begin(loop: Loop, provenance: run.Provenance, *, existing: run.Existing) -> None:
    is_resumed = existing == "resume" and loop.folder.exists()
    file = loop.folder.path / checkpoints.SETTINGS
    settings = {**loop.settings, "backend": keras.backend.backend()}
    # Before a checkpoint is looked for: each backend has a format of its own.
    more = checkpoints.check_settings(file, settings) if is_resumed else None
    # What resuming need not repeat: it may go on on another machine.
    settings["execution"] = dataclasses.asdict(loop.job.execution)
    # One more than the last step of each worker, or 0.
    last_steps = loop.engine.gather(1 + loop.checkpoints.steps()[-1] if is_resumed else 0)
    if all(last_steps):
        loop.resume()
        before = run.Provenance.read(file)
        settings[run.PROVENANCE] = before.resumed(provenance).to_dict()
        if more is not None:
            loop.notify_more_epochs(more)
        loop.folder.write_settings(settings)
        return
    if max(last_steps) > 1:  # otherwise they were killed before the first step
        workers = [index for index, step in enumerate(last_steps) if not step]
        raise ValueError(
            f"The checkpoints of the workers {workers} are gone; put back the folders "
            f"{loop.folder.path.name}-N, or overwrite the training of all."
        )
    loop.folder.start({**settings, run.PROVENANCE: provenance.to_dict()})
    loop.save()


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
    atomic.check_unheld(run.lock_of(out, worker), what=f"training to {str(out)!r}")
    _check_places(out, checkpoints.WorkDirectory(out, worker=worker), existing=existing)


def _check_name(out: Path) -> None:
    if not out.name or out.name == "..":
        raise ValueError(f"{str(out)!r} names no new folder; give the run a name of its own.")


def _check_places(out: Path, folder: checkpoints.WorkDirectory, *, existing: run.Existing) -> None:
    folder.check_free(existing=existing)
    if existing == "resume" and run.is_run(out) and not folder.exists():
        return  # the run is finished, so nothing is written
    # A training that is resumed was allowed to replace the run when it started.
    is_resumed = existing == "resume" and folder.exists()
    run.check_free(out, existing="overwrite" if is_resumed else existing)


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


def check_data(data: ImageData) -> None:
    """Raises a ValueError where images are missing, or a class cannot be written down."""
    for name in ("train", "validation"):
        if not len(data.split(name)):
            raise ValueError(f"The data has no {name} images; training needs some.")
    for label in data.labels:
        if not is_line(label):
            raise ValueError(
                f"The class {label!r} cannot be a line of labels.txt: its name is empty, has a "
                "line break, or bytes that are not UTF-8; rename it, or its folder."
            )


def _finish(loop: Loop, *, out: Path) -> run.Run:
    config = _config(loop)
    if loop.engine.index:
        model = loop.objective.publish(loop.best_model())
    else:
        model = _publish(loop, config, out)
        # Before the other workers remove their folders: all of them are resumed together or none.
        loop.folder.invalidate()
    loop.wait_for_workers()  # no worker returns before the run exists
    loop.folder.remove()
    return _make_run(out, model, config)


def _finished(loop: Loop, *, out: Path) -> run.Run | None:
    is_visible = run.is_run(out)
    if not loop.engine.gather(int(is_visible and not loop.folder.exists()))[0]:
        return None
    if not is_visible:
        raise FileExistsError(
            f"The first worker has finished the run {str(out)!r}; nothing is left to do here."
        )
    epochs = checkpoints.check_settings(out / run.CONFIG, loop.settings)
    if epochs is not None:
        raise ValueError(
            f"The run {str(out)!r} is finished after {counted(epochs, 'epoch')}, and its "
            f"checkpoints are gone. To train its model further, start from it in another run "
            f"(--weights {out}; model=Run.load({str(out)!r}).model)."
        )
    loop.folder.remove()
    return run.Run.load(out)


def _publish(loop: Loop, config: dict[str, Any], out: Path) -> keras.Model:
    folder = loop.folder.path
    with atomic.staging_folder(folder) as stage:
        with atomic.explain_errors(folder, **run.UNFINISHED):
            for name in (run.HISTORY, run.CURVES):
                shutil.copy2(folder / name, stage / name)
            (stage / run.EVENTS).mkdir()
            for file in (folder / run.EVENTS).iterdir():
                shutil.copy2(file, stage / run.EVENTS / file.name)
            model = _write(stage, loop, config)
        # An exception of the caller ends the training here, as far as it has come.
        loop.logger.on_event(TrainingDone(run=_make_run(stage, model, config)))
        atomic.publish(stage, out)
    return model


def _make_run(path: Path, model: keras.Model, config: dict[str, Any]) -> run.Run:
    return run.Run(path=path, model=model, labels=tuple(config["labels"]), config=config)


def _interruption(loop: Loop) -> TrainingInterrupted:
    """Makes a run of the training's folder, if an epoch is complete; returns what to raise."""
    logger, folder = loop.logger, loop.folder.path
    text = (
        f"Interrupted at step {logger.step} of {loop.plan.steps}: a checkpoint is in "
        f"{str(folder)!r}, resume from it"
    )
    if logger.best is not None:
        epoch = logger.best.epoch
        loop.folder.write_progress(logger.history, best_epoch=epoch, is_last=True)
        with (
            atomic.explain_errors(folder, **run.UNFINISHED),
            atomic.staging_folder(folder) as stage,
        ):
            _write(stage, loop, _config(loop))
            atomic.sync_tree(stage)
            (folder / run.CONFIG).unlink(missing_ok=True)
            # config.json comes last, since it marks a run.
            for file in sorted(stage.iterdir(), key=lambda file: file.name == run.CONFIG):
                file.replace(folder / file.name)
            atomic.sync(folder)
        text += (
            f"; the model of epoch {epoch}, the {logger.keep} so far, can be used from there too"
        )
    return TrainingInterrupted(f"{text}.", path=folder, signal_number=loop.signal_number)


def _config(loop: Loop) -> dict[str, Any]:
    best = loop.logger.best or loop.logger.history[-1]
    return {
        **loop.settings,
        # A resumed training need not repeat this: it may run on another machine.
        "execution": dataclasses.asdict(loop.job.execution),
        run.PROVENANCE: run.Provenance.read(loop.folder.path / checkpoints.SETTINGS).to_dict(),
        # Beside the settings, so that runs from before can be resumed.
        "skipped": first_names(loop.job.data.reasons),
        "result": {
            "epochs": len(loop.logger.history),
            "steps": loop.logger.step,
            "finished": loop.logger.step == loop.plan.steps,
            "cooldown_epoch": loop.logger.cooldown_epoch,
            "best_epoch": best.epoch,
            "validation_loss": best.validation_loss,
            "validation_accuracy": best.validation_accuracy,
            "replaced": list(loop.job.data.train.damage.names),
            "state_sha256": checkpoints.hash_of(checkpoints.state_variables(loop.model)),
        },
        "versions": {
            "keras_vit": __version__,
            "backend": keras.backend.backend(),
            "keras": keras.__version__,
            "tensorflow": tf.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _write(folder: Path, loop: Loop, config: dict[str, Any]) -> keras.Model:
    data, model = loop.job.data, loop.objective.write(loop.best_model(), folder)
    (folder / run.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / run.LABELS).write_text("".join(f"{label}\n" for label in data.labels), "utf-8")
    if data.train.in_files:
        data.write_splits(folder / run.SPLITS)
    elif data.test.in_memory and len(data.test):
        png = tf.io.encode_png(data.test.pixels(0)).numpy()
        (folder / run.SAMPLE).write_bytes(png)
    return model
