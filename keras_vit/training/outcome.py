"""What comes of a training: a run directory, or a training that can be resumed."""

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
from keras_vit.limits import counted
from keras_vit.training import run
from keras_vit.training.checkpoints import SETTINGS
from keras_vit.training.loop import Loop
from keras_vit.training.provenance import PROVENANCE, Provenance
from keras_vit.training.settings import check_settings
from keras_vit.training.state import state_hash

INTERRUPTED, TERMINATED = 130, 75  # exit codes; the second tells a supervisor to start again


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
        self.exit_code = TERMINATED if signal_number == signal.SIGTERM else INTERRUPTED


def finish(loop: Loop, *, out: Path, signal_number: int) -> run.Run:
    """Makes the run directory, or after an interruption leaves a training that can be resumed.

    Args:
        loop: the loop after its last step.
        out: the run directory.
        signal_number: the signal that interrupted the loop, or 0.

    Raises:
        TrainingInterrupted: a signal interrupted the loop.
    """
    if signal_number:
        raise _interruption(loop, signal_number=signal_number)
    config = _config(loop)
    # From its file: after resuming, the best epoch may have been another process's.
    if loop.engine.index:
        model = loop.objective.read(_best_file(loop))
    else:
        model = _publish(loop, config, out)
        # Before the other workers remove their folders: all of them are resumed together or none.
        loop.folder.invalidate()
    loop.wait_for_workers()  # no worker returns before the run exists
    loop.folder.remove()
    return _make_run(out, model, config)


def finished(loop: Loop, *, out: Path) -> run.Run | None:
    """Returns the run at `out` if the first worker has finished it, otherwise None.

    Raises:
        FileExistsError: the run is finished, and this worker cannot see it.
        ValueError: the run was started with other settings, or is to have more epochs.
    """
    is_visible = run.is_run(out)
    if not loop.engine.gather(int(is_visible and not loop.folder.exists()))[0]:
        return None
    if not is_visible:
        raise FileExistsError(
            f"The first worker has finished the run {str(out)!r}; nothing is left to do here."
        )
    epochs = check_settings(out / run.CONFIG, loop.settings)
    if epochs is not None:
        raise ValueError(
            f"The run {str(out)!r} is finished after {counted(epochs, 'epoch')}, and its "
            f"checkpoints are gone. To train its model further, start from it in another run "
            f"(--weights {out}; model=Run.load({str(out)!r}).model)."
        )
    loop.folder.remove()
    return run.Run.load(out)


def _publish(loop: Loop, config: dict[str, Any], out: Path) -> keras.Model:
    """Assembles the run in the training's folder, reports it, and moves it to its place."""
    folder = loop.folder.path
    with atomic.staging_folder(folder) as stage:
        with atomic.explain_errors(folder, kept="the checkpoints are kept", again="resume"):
            for name in (run.HISTORY, run.CURVES):
                shutil.copy2(folder / name, stage / name)
            (stage / run.EVENTS).mkdir()
            for file in (folder / run.EVENTS).iterdir():
                shutil.copy2(file, stage / run.EVENTS / file.name)
            model = _write(stage, loop, config)
        loop.watcher.report_run(_make_run(stage, model, config))
        atomic.publish(stage, out)
    return model


def _make_run(path: Path, model: keras.Model, config: dict[str, Any]) -> run.Run:
    return run.Run(path=path, model=model, labels=tuple(config["labels"]), config=config)


def _interruption(loop: Loop, *, signal_number: int) -> TrainingInterrupted:
    watcher, folder = loop.watcher, loop.folder.path
    text = (
        f"Interrupted at step {watcher.step} of {loop.plan.steps}: a checkpoint is in "
        f"{str(folder)!r}, resume from it"
    )
    if watcher.best is not None:
        epoch = watcher.best.epoch
        loop.folder.write_progress(watcher.history, best_epoch=epoch, is_last=True)
        _leave_run(folder, loop)
        text += (
            f"; the model of epoch {epoch}, the {watcher.keep} so far, can be used from there too"
        )
    return TrainingInterrupted(f"{text}.", path=folder, signal_number=signal_number)


def _leave_run(folder: Path, loop: Loop) -> None:
    """Makes a run of the training's folder; config.json comes last, since it marks a run."""
    with (
        atomic.explain_errors(folder, kept="the checkpoints are kept", again="resume"),
        atomic.staging_folder(folder) as stage,
    ):
        _write(stage, loop, _config(loop))
        atomic.sync_tree(stage)
        (folder / run.CONFIG).unlink(missing_ok=True)
        for file in sorted(stage.iterdir(), key=lambda file: file.name == run.CONFIG):
            file.replace(folder / file.name)
        atomic.sync(folder)


def _config(loop: Loop) -> dict[str, Any]:
    """Returns the content of config.json: settings, execution, result and versions."""
    best = loop.watcher.best
    return {
        **loop.settings,
        # A resumed training need not repeat this: it may run on another machine.
        "execution": dataclasses.asdict(loop.job.execution),
        PROVENANCE: Provenance.read(loop.folder.path / SETTINGS).to_dict(),
        "result": {
            "epochs": len(loop.watcher.history),
            "steps": loop.watcher.step,
            "finished": loop.watcher.step == loop.plan.steps,
            "cooldown_epoch": loop.watcher.cooldown_epoch,
            "best_epoch": best.epoch if best else None,
            "validation_loss": best.validation_loss if best else None,
            "validation_accuracy": best.validation_accuracy if best else None,
            "replaced": list(loop.job.data.train.damage.names),
            "state_sha256": state_hash(loop.model),
        },
        "versions": {
            "keras_vit": version.__version__,
            "backend": keras.backend.backend(),
            "keras": keras.__version__,
            "tensorflow": tf.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _write(folder: Path, loop: Loop, config: dict[str, Any]) -> keras.Model:
    """Writes all files of a run but the history, curves and events; returns the model."""
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
        raise ValueError("No epoch is complete: there is no best one.")
    return loop.folder.best_model(best.epoch)
