"""What is told of a training while it runs: events, a table, event files, experiment trackers."""

import contextlib
import csv
import dataclasses
import errno
import importlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from keras_vit import atomic, environment
from keras_vit.training import run
from keras_vit.training.run import Run

_LOG_EVERY_STEPS = 10
_ERROR_NUMBERS = {
    tf.errors.ResourceExhaustedError: errno.ENOSPC,
    tf.errors.PermissionDeniedError: errno.EACCES,
    tf.errors.NotFoundError: errno.ENOENT,
}
# The same as in tf.summary.scalar, which works only where TensorBoard is installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)

Keep = Literal["best", "last"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDone:
    """One step of training is complete.

    Attributes:
        step: steps so far, from 1.
        steps: steps in all.
        epoch: the epoch of the step, from 1.
        loss: mean loss of the step's images.
        gradient_norm: global norm of the gradients before clipping.
        images_per_second: speed since the second step of this process; None before it.
        memory: peak memory of the process in bytes.
        seconds_left: estimate for the rest; None before the second step.
    """

    step: int
    steps: int
    epoch: int
    loss: float
    gradient_norm: float
    images_per_second: float | None
    memory: int
    seconds_left: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochDone:
    """One epoch is complete, and its model is evaluated on the validation images.

    Attributes:
        epoch: from 1.
        epochs: epochs in all.
        loss: mean loss of the training images, augmented, with smoothed labels and, where the
            recipe balances classes, with their weights.
        accuracy: fraction of the augmented training images that are classified correctly; without
            labels, fraction of the corrupted patches; None where there is no accuracy.
        validation_loss: mean loss of the validation images.
        validation_accuracy: accuracy on the validation images.
        learning_rate: of the epoch's last step.
        seconds: wall time of the epoch.
        seconds_left: estimate for the rest.
        is_best: whether it is the best epoch so far; with `keep="last"`, whether its model is saved
            for the case of an interruption.
    """

    epoch: int
    epochs: int
    loss: float
    accuracy: float | None
    validation_loss: float
    validation_accuracy: float | None
    learning_rate: float
    seconds: float
    seconds_left: float
    is_best: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanChanged:
    """The training goes on otherwise than it was planned.

    Attributes:
        reason: "patience", the validation loss has not fallen for so long; "epochs", a training is
            resumed with more of them; "memory", which was exhausted.
        step: steps so far.
        steps: steps in all, from now on.
        text: a sentence that says what changes and why.
    """

    reason: Literal["patience", "epochs", "memory"]
    step: int
    steps: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingDone:
    """The run is complete, but not yet in its place; the first worker alone reports this.

    Attributes:
        run: the run. Files that are written to `run.path` now, such as measurements, become part of
            it. If the training stops here, it reports this again when it is resumed.
    """

    run: Run


Event = StepDone | EpochDone | PlanChanged | TrainingDone


class ProgressLogger:
    """Records and reports each step and epoch, and selects the epoch whose model is kept.

    The best epoch has the lowest validation loss. Accuracy is too coarse: over 179 images it is
    equal for many epochs, and then an early one wins by chance.

    Attributes:
        epochs: epochs in all.
        steps: steps in all.
        step: steps so far.
        history: the epochs so far.
        best: the epoch whose model is kept, or None.
        cooldown_epoch: the epoch after which the patience had run out, or None.
        keep: "best", or "last", which also saves one epoch in twenty on the way.
        on_event: called with every event.
        stop_requested: whether `on_event` raised a KeyboardInterrupt.
    """

    def __init__(
        self,
        *,
        epochs: int,
        steps: int,
        batch_size: int,
        keep: Keep = "best",
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.epochs, self.steps, self.step = epochs, steps, 0
        self.history: list[EpochDone] = []
        self.best: EpochDone | None = None
        self.cooldown_epoch: int | None = None
        self.stop_requested = False
        self.keep = keep
        self._batch_size = batch_size
        self.on_event = on_event or (lambda event: None)
        self._sums = {"loss": 0.0, "accuracy": 0.0, "steps": 0.0}
        self._first_step = 0
        self._first_step_end = self._epoch_start = time.monotonic()

    def end_step(self, logs: dict[str, Any]) -> None:
        """Records and reports the logs of one step.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"The training loss is {loss} at step {self.step + 1} "
                f"(epoch {len(self.history) + 1})"
            )
        self.step += 1
        self._sums["loss"] += loss
        self._sums["accuracy"] += float(logs.get("accuracy", 0.0))
        self._sums["steps"] += 1
        if not self._first_step:  # it compiles, so its time is not that of the others
            self._first_step, self._first_step_end = self.step, time.monotonic()
        seconds = time.monotonic() - self._first_step_end
        timed_steps = self.step - self._first_step
        self.report(
            StepDone(
                step=self.step,
                steps=self.steps,
                epoch=len(self.history) + 1,
                loss=loss,
                gradient_norm=float(logs["gradient_norm"]),
                images_per_second=timed_steps * self._batch_size / seconds if timed_steps else None,
                memory=_peak_memory(),
                seconds_left=self._seconds_left() if timed_steps else None,
            )
        )

    def end_epoch(self, validation: dict[str, float], *, learning_rate: float) -> EpochDone:
        """Records an epoch, for the caller to `report`; `validation` has its loss and accuracy."""
        epoch, steps = len(self.history) + 1, self._sums["steps"]
        is_lowest = self.best is None or validation["loss"] < self.best.validation_loss
        is_regular = epoch == self.epochs or epoch % max(self.epochs // 20, 1) == 0
        record = EpochDone(
            epoch=epoch,
            epochs=self.epochs,
            loss=self._sums["loss"] / steps,
            accuracy=self._sums["accuracy"] / steps if "accuracy" in validation else None,
            validation_loss=validation["loss"],
            validation_accuracy=validation.get("accuracy"),
            learning_rate=learning_rate,
            seconds=time.monotonic() - self._epoch_start,
            seconds_left=self._seconds_left(),
            is_best=is_regular if self.keep == "last" else is_lowest,
        )
        self.history.append(record)
        if record.is_best:
            self.best = record
        self._sums = dict.fromkeys(self._sums, 0.0)
        self._epoch_start = time.monotonic()
        return record

    @property
    def stale_epochs(self) -> int:
        """The number of epochs since the one of lowest validation loss."""
        losses = [record.validation_loss for record in self.history]
        lowest = min(losses, key=lambda loss: (math.isnan(loss), loss))
        return len(losses) - 1 - losses.index(lowest)

    def report(self, event: Event) -> None:
        """Reports a step, an epoch, or a change of the plan."""
        try:
            self.on_event(event)
        except KeyboardInterrupt:  # the step is complete: the training stops after it
            self.stop_requested = True

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as plain values that JSON can carry."""
        return {
            "step": self.step,
            "history": [dataclasses.asdict(record) for record in self.history],
            "best_epoch": self.best.epoch if self.best else None,
            "cooldown_epoch": self.cooldown_epoch,
            "sums": dict(self._sums),  # which the steps change while this is written
        }

    def resume(self, progress: dict[str, Any]) -> None:
        """Restores the state that `to_dict` returned."""
        self.step = progress["step"]
        self.cooldown_epoch = progress["cooldown_epoch"]
        self.history = [EpochDone(**record) for record in progress["history"]]
        self._sums = progress["sums"]
        best = progress["best_epoch"]
        self.best = self.history[best - 1] if best else None
        self._first_step = 0
        self._epoch_start = time.monotonic()

    def _seconds_left(self) -> float:
        seconds = time.monotonic() - self._first_step_end
        return seconds / max(self.step - self._first_step, 1) * (self.steps - self.step)


def write_history(history: Sequence[EpochDone], file: Path) -> None:
    """Writes one row per epoch as CSV."""
    elsewhere = {"epochs", "seconds_left", "is_best"}
    columns = [f.name for f in dataclasses.fields(EpochDone) if f.name not in elsewhere]
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, history))


def _peak_memory() -> int:
    try:
        import resource
    except ImportError:  # as on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class EventFiles:
    """The event files for TensorBoard, which TensorFlow writes on every backend."""

    def __init__(self, folder: Path, *, is_written: bool) -> None:
        self._path = str(folder / run.EVENTS)
        with self._number_errors():
            self._writer = (
                tf.summary.create_file_writer(self._path)
                if is_written
                else tf.summary.create_noop_writer()
            )

    def close(self) -> None:
        """Writes what is still buffered."""
        with self._number_errors():
            self._writer.close()

    def write_step(self, step: int, logs: dict[str, Any]) -> None:
        """Writes the logs of a step, for one step in ten."""
        if step % _LOG_EVERY_STEPS == 0:
            self._write(step, {f"step/{name}": value for name, value in logs.items()})

    def write_epoch(self, step: int, record: EpochDone) -> None:
        values = {
            "train/loss": record.loss,
            "train/accuracy": record.accuracy,
            "validation/loss": record.validation_loss,
            "validation/accuracy": record.validation_accuracy,
            "learning_rate": record.learning_rate,
        }
        self._write(step, values)
        with self._number_errors():
            self._writer.flush()

    def _write(self, step: int, values: dict[str, Any]) -> None:
        with self._number_errors(), self._writer.as_default(step=step):
            for name, value in values.items():
                if value is not None:
                    number = tf.cast(tf.reshape(value, ()), tf.float32)
                    tf.summary.write(name, number, metadata=_SCALAR)

    @contextlib.contextmanager
    def _number_errors(self) -> Iterator[None]:
        """Turns TensorFlow's errors, which have no number, into an OSError."""
        try:
            yield
        except tf.errors.OpError as error:
            number = _ERROR_NUMBERS.get(type(error), errno.EIO)
            with atomic.explain_errors(self._path, **run.UNFINISHED):
                raise OSError(number, "") from error


class Trackers(contextlib.AbstractContextManager["Trackers"]):
    """Hands the epochs of a training to "mlflow" or "wandb"; it is an `on_event` of `train`.

    Each goes on with its active run, or with that of a resumed training, or begins one. One that
    fails later is left out of `names`, with a warning.
    """

    def __init__(
        self, names: Iterable[str], *, out: str | Path, settings: dict[str, Any] | None = None
    ) -> None:
        self.names, self._out, self._settings = tuple(names), Path(out), run.flat(settings or {})
        self._runs: dict[str, Any] = {}
        for name in self.names:
            if name not in TRACKERS:
                raise ValueError(f"There is no tracker {name!r}; choose from mlflow, wandb.")
            with environment.installed(f"--log {name} needs {TRACKERS[name][0]}", name):
                importlib.import_module(name)

    def __exit__(self, *error: Any) -> None:
        self._each(lambda opened, log: opened.__exit__(*error))

    def __call__(self, event: Event) -> None:
        """Records an event; raises an OSError where a tracker cannot begin."""
        if self.names and not self._runs and not isinstance(event, TrainingDone):
            self._begin()
        if isinstance(event, EpochDone):
            logs = {name.replace("validation", "val"): n for name, n in _numbers(vars(event))}
            self._each(lambda opened, log: log(logs, step=event.epoch))
        elif isinstance(event, TrainingDone) and (event.run.path / run.METRICS).is_file():
            results = dict(_numbers(run.flat(run.read_fields(event.run.path / run.METRICS))))
            self._each(lambda opened, log: log(results))

    def _begin(self) -> None:
        file = run.unfinished_path(self._out) / run.TRACKERS
        known = run.read_fields(file) if file.is_file() else {}
        for name in self.names:
            _, advice, begin = TRACKERS[name]
            opened = begin(self._out.name, self._settings, known.get(name))
            try:
                known[name], log = opened.__enter__()
            except Exception as error:  # the clients have many kinds
                reason = " ".join(str(error).split())
                advice = f"{advice}, or train without --log {name}."
                raise OSError(f"{name} cannot begin a run ({reason}); {advice}") from error
            self._runs[name] = opened, log
        with atomic.whole_file(file) as temporary:
            temporary.write_text(json.dumps(known), encoding="utf-8")

    def _each(self, use: Callable[..., object]) -> None:
        for name in [name for name in self.names if name in self._runs]:
            try:
                use(*self._runs[name])
            except Exception as error:  # a training is worth more than its record elsewhere
                self.names = tuple(other for other in self.names if other != name)
                reason = " ".join(str(error).split())
                text = f"{name} records nothing more of this training: {reason}"
                warnings.warn(text, stacklevel=3)


@contextlib.contextmanager
def _mlflow(name: str, settings: dict[str, Any], identity: str | None) -> Iterator[Any]:
    mlflow = importlib.import_module("mlflow")
    with contextlib.ExitStack() as stack:
        if mlflow.active_run() is None:
            run_name = None if identity else name
            stack.enter_context(mlflow.start_run(identity, run_name=run_name))
        if identity is None:
            mlflow.log_params(settings)
        yield mlflow.active_run().info.run_id, mlflow.log_metrics


@contextlib.contextmanager
def _wandb(name: str, settings: dict[str, Any], identity: str | None) -> Iterator[Any]:
    wandb = importlib.import_module("wandb")
    with contextlib.ExitStack() as stack:
        if wandb.run is None:
            project = os.environ.get("WANDB_PROJECT", "keras-vit")
            quiet = wandb.Settings(silent=True, console="off")  # standard output is ours
            known = {"id": identity, "resume": "allow", "config": settings, "settings": quiet}
            wandb.init(project=project, name=name, **known)
            stack.push(lambda kind, *_: wandb.finish(exit_code=int(kind is not None)))
        wandb.define_metric("epoch/*", step_metric="epoch/epoch")

        def log(numbers: dict[str, float], step: int | None = None) -> None:
            epoch = {} if step is None else {"epoch/epoch": step}
            prefix = "epoch/" if epoch else ""
            wandb.log({prefix + name: number for name, number in numbers.items()} | epoch)

        yield wandb.run.id, log


def _numbers(fields: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if name.endswith(("loss", "accuracy", "learning_rate")) and value is not None:
            yield name.replace(".", "_"), value


# What each is called, what to do where it cannot begin, and what begins it.
TRACKERS = {
    "mlflow": ("MLflow", "check MLFLOW_TRACKING_URI", _mlflow),
    "wandb": ("Weights & Biases", "run wandb login, or set WANDB_MODE=offline", _wandb),
}
