"""Reports the progress of a training: events, a table, curves, event files."""

import contextlib
import csv
import dataclasses
import errno
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from keras_vit import atomic
from keras_vit.training.run import EVENTS, Run

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


class Watcher:
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
            is_best=self._is_best(epoch, validation["loss"]),
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

    def _is_best(self, epoch: int, validation_loss: float) -> bool:
        if self.keep == "last":
            return epoch == self.epochs or epoch % max(self.epochs // 20, 1) == 0
        return self.best is None or validation_loss < self.best.validation_loss

    def _seconds_left(self) -> float:
        seconds = time.monotonic() - self._first_step_end
        return seconds / max(self.step - self._first_step, 1) * (self.steps - self.step)


def write_history(history: Sequence[EpochDone], file: Path) -> None:
    """Writes one row per epoch as CSV."""
    left_out = {"epochs", "seconds_left", "is_best"}
    columns = [f.name for f in dataclasses.fields(EpochDone) if f.name not in left_out]
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


class EventFiles:
    """The event files for TensorBoard, which TensorFlow writes on every backend."""

    def __init__(self, folder: Path, *, is_written: bool) -> None:
        self._path = str(folder / EVENTS)
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
        """Writes the record of an epoch."""
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
            with atomic.explain_errors(self._path, kept="the checkpoints are kept", again="resume"):
                raise OSError(number, "") from error
