"""Ends a training: the run directory is assembled and put into its place."""

import dataclasses
import datetime
import json
import platform
import shutil
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit import atomic, version
from keras_vit.data import loading
from keras_vit.training import run
from keras_vit.training.checkpoints import check_settings, state_hash
from keras_vit.training.loop import Loop


class TrainingInterrupted(KeyboardInterrupt):
    """Raised after Ctrl-C or SIGTERM; its text says what was saved.

    Attributes:
        path: the folder of the training, which can be resumed; a run directory as well, once an
            epoch is over.
        exit_code: 130 after Ctrl-C; 75 after SIGTERM, by which a supervisor knows to start again.
    """

    def __init__(self, message: str, *, path: Path, asked: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.path = path
        self.exit_code = 75 if asked == signal.SIGTERM else 130


def finish(loop: Loop, *, out: Path, asked: int) -> run.Run:
    """Makes the run directory, or after an interruption leaves what can be resumed.

    Args:
        loop: that has run.
        out: the run directory.
        asked: the signal that interrupted it, or 0.

    Raises:
        TrainingInterrupted: the training was interrupted.
    """
    if asked:
        raise _interruption(loop, asked=asked)
    config = _config(loop)
    # From its file: after resuming, the best epoch may have been another process's.
    if loop.workers.index:
        model = loop.objective.read(_best_file(loop))
    else:
        model = _publish(loop, config, out)
        # Before the others remove theirs: they are resumed together or not at all.
        loop.folder.retire()
    loop.meet()  # the run is there before any worker says so
    loop.folder.remove()
    return _run(out, model, config)


def cut_off(folder: Path, *, asked: int) -> TrainingInterrupted:
    """Returns the interruption of a training while its run was made."""
    return TrainingInterrupted(
        f"Interrupted at the end of the training: all of it is in {str(folder)!r}, resume to "
        "finish the run.",
        path=folder,
        asked=asked or signal.SIGINT,
    )


def finished(loop: Loop, *, out: Path) -> run.Run | None:
    """Returns the run at `out` if the first worker has finished it and none is left to do.

    Raises:
        FileExistsError: it has, and this worker cannot see the run.
        ValueError: the run was started with other settings.
    """
    is_there = run.is_run(out)
    if not loop.workers.gather(int(is_there and not loop.folder.exists()))[0]:
        return None
    if not is_there:
        raise FileExistsError(
            f"The first worker has finished the run {str(out)!r}; nothing is left to do here."
        )
    check_settings(out / run.CONFIG, loop.settings)
    loop.folder.remove()
    return run.Run.load(out)


def _publish(loop: Loop, config: dict[str, Any], out: Path) -> keras.Model:
    """Assembles the run in the training's folder, lets others add to it, and puts it in place."""
    folder = loop.folder.path
    with atomic.staging_folder(folder) as stage:
        with atomic.explain_errors(folder, kept="the checkpoints are kept", again="resume"):
            for name in (run.HISTORY, run.CURVES):
                shutil.copy2(folder / name, stage / name)
            (stage / run.EVENTS).mkdir()
            for file in (folder / run.EVENTS).iterdir():
                shutil.copy2(file, stage / run.EVENTS / file.name)
            model = _write(stage, loop, config)
        loop.watcher.tell_end(_run(stage, model, config))
        atomic.publish(stage, out)
    return model


def _run(path: Path, model: keras.Model, config: dict[str, Any]) -> run.Run:
    return run.Run(path=path, model=model, labels=tuple(config["labels"]), config=config)


def _interruption(loop: Loop, *, asked: int) -> TrainingInterrupted:
    watcher, folder = loop.watcher, loop.folder.path
    text = (
        f"Interrupted at step {watcher.step} of {loop.plan.steps}: a checkpoint is in "
        f"{str(folder)!r}, resume from it"
    )
    if watcher.best is None:
        return TrainingInterrupted(f"{text}.", path=folder, asked=asked)
    loop.folder.show(watcher.history, best_epoch=watcher.best.epoch, is_last=True)
    _leave_run(folder, loop)
    return TrainingInterrupted(
        f"{text}; the model of epoch {watcher.best.epoch}, the {watcher.keep} so far, can be used "
        "from there too.",
        path=folder,
        asked=asked,
    )


def _leave_run(folder: Path, loop: Loop) -> None:
    """Makes a run of the training's folder; config.json, which makes it one, comes last."""
    with (
        atomic.explain_errors(folder, kept="the checkpoints are kept", again="resume"),
        atomic.staging_folder(folder) as stage,
    ):
        _write(stage, loop, _config(loop))
        atomic.sync_tree(stage)
        (folder / run.CONFIG).unlink(missing_ok=True)
        for file in sorted(stage.iterdir(), key=lambda file: file.name == run.CONFIG):
            file.replace(folder / file.name)
        atomic.sync_folder(folder)


def _config(loop: Loop) -> dict[str, Any]:
    """Returns what config.json says: how the run was made, where, and how it came out."""
    best = loop.watcher.best
    return {
        **loop.settings,
        # Not a part of what a resumed training must repeat: it may run elsewhere.
        "execution": dataclasses.asdict(loop.job.execution),
        "result": {
            "epochs": len(loop.watcher.history),
            "steps": loop.watcher.step,
            "finished": loop.watcher.step == loop.plan.steps,
            "best_epoch": best.epoch if best else None,
            "validation_loss": best.validation_loss if best else None,
            "validation_accuracy": best.validation_accuracy if best else None,
            "replaced": list(loop.job.data.train.damage.names),
            "state_sha256": state_hash(loop.model),
        },
        "versions": {
            "keras_vit": version.__version__,
            "keras": keras.__version__,
            "tensorflow": tf.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _write(folder: Path, loop: Loop, config: dict[str, Any]) -> keras.Model:
    """Writes the files of a run that do not grow with the training, and returns its model."""
    data, model = loop.job.data, loop.objective.write(_best_file(loop), folder)
    (folder / run.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / run.LABELS).write_text("".join(f"{label}\n" for label in data.labels), "utf-8")
    if data.train.in_files:
        loading.write_splits(data, folder / run.SPLITS)
    elif data.test.in_memory and len(data.test):
        png = tf.io.encode_png(data.test.pixels(0)).numpy()
        (folder / run.SAMPLE).write_bytes(png)
    return model


def _best_file(loop: Loop) -> Path:
    best = loop.watcher.best
    if best is None:
        raise ValueError("No epoch is over: there is no best one.")
    return loop.folder.best_model(best.epoch)
