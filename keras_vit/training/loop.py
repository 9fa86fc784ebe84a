"""Runs the steps of a training, until the last one or until a signal asks it to stop."""

import contextlib
import functools
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np

from keras_vit import backend
from keras_vit.training.checkpoints import (
    Copies,
    DamagedError,
    EventFiles,
    Unfinished,
    Writer,
    numbered,
    set_state,
    state_variables,
)
from keras_vit.training.execution import Engine
from keras_vit.training.objectives import Objective
from keras_vit.training.progress import EpochDone, Watcher

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NO_STEP = -1  # stands for "no checkpoint"
# Seconds that a step waits for the checkpoint before to be written; after that it goes on without.
_PATIENCE = 1.0
_SAVE = (
    1  # stands for "it is time for a checkpoint"; any signal that is handled has a higher number
)


class StopRequests:
    """Handles SIGINT and SIGTERM inside a `with` block.

    Before the steps, SIGINT interrupts at once. The signal is also remembered, because Python or
    TensorFlow may swallow the KeyboardInterrupt while a model is built. During the steps the first
    signal is only remembered, and a second SIGINT interrupts.

    Example:
        >>> with StopRequests() as stop:
        ...     stop.begin_steps()
        ...     signal.raise_signal(signal.SIGINT)
        >>> stop.signal_number == signal.SIGINT
        True

    Attributes:
        signal_number: the first signal received, or 0.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._in_steps = self._after_steps = False
        self._previous_handlers: dict[int, Any] = {}

    def begin_steps(self) -> None:
        """From now on the first signal is only remembered."""
        self._in_steps = True

    def end_steps(self) -> None:
        """From now on each signal interrupts at once; so does one that is already remembered."""
        self._in_steps, self._after_steps = False, True
        if self.signal_number:
            raise KeyboardInterrupt

    def __enter__(self) -> "StopRequests":
        # Only the main thread may set handlers; signals do not reach the other threads.
        with contextlib.suppress(ValueError):
            self._previous_handlers = {
                number: signal.signal(number, self._handle) for number in _SIGNALS
            }
        # The command line remembers an interruption that was swallowed before.
        if getattr(self._previous_handlers.get(signal.SIGINT), "received", False):
            self.__exit__()
            raise KeyboardInterrupt
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.signal_number
        self.signal_number = self.signal_number or number
        if self._after_steps or (number == signal.SIGINT and not (is_first and self._in_steps)):
            raise KeyboardInterrupt


class WorkerLostError(ConnectionError):
    """Another worker is lost, so no further step is possible.

    Attributes:
        exit_code: 75, which tells a supervisor to start the workers again.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class Loop:
    """One training in this process.

    Args:
        objective: the compiled objective.
        engine: what the steps run on.
        watcher: receives the logs of each step.
        folder: holds the checkpoints and the best model.

    Attributes:
        job: data, recipe, execution and seed.
        model: the model to train.
        plan: the lengths of an epoch and of the training.
        settings: the part of config.json that decides the result.
    """

    def __init__(
        self, objective: Objective, *, engine: Engine, watcher: Watcher, folder: Unfinished
    ) -> None:
        self.objective, self.job, self.model = objective, objective.job, objective.model
        self.engine, self.watcher, self.folder = engine, watcher, folder
        self.plan = self.job.plan
        self._best_model = objective.plain_copy()
        self._resizing = objective.resizing
        self._writer = Writer()
        self._state = Copies(state_variables(self.model))
        self._best = Copies(objective.saved.weights)
        self._best_epoch: int | None = None  # whose weights are in `_best` and on no disk
        self._best_is_taken = threading.Event()  # by the writer; until then `_best` stays
        self._best_is_taken.set()
        self._last_save = time.monotonic()
        self.settings = objective.settings()

    def resume(self) -> None:
        """Restores the newest checkpoint that is whole on every worker, and its best model.

        A damaged checkpoint is skipped with a warning.

        Raises:
            ValueError: no checkpoint is whole, or the workers have none in common.
        """
        self.folder.remove_leftovers()
        step, state, progress = self._load_newest()
        # One worker may be a save ahead of another, or have a damaged file.
        common_step = min(self.engine.gather(step))
        if step > common_step:
            step, state, progress = self._load_newest(at_most=common_step)
        own_step = step if step == common_step else _NO_STEP
        if min(self.engine.gather(own_step)) == _NO_STEP:
            raise ValueError(
                f"No checkpoint in {str(self.folder.path)!r} is whole"
                + (" and in the folders of all workers" if self.engine.count > 1 else "")
                + ", together with its best model; put the files back, or overwrite the training."
            )
        set_state(self.model, state)
        self.watcher.resume(progress)
        self.folder.checkpoints.remove_after(step)
        best = self.watcher.best
        if best is not None and not self.folder.has_best(best.epoch):
            with self._averaged_weights():
                copies = self._best.take()
            self._write_best(best.epoch, copies)

    def _load_newest(
        self, *, at_most: int | None = None
    ) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
        """Returns the step, state and progress of the newest whole checkpoint, or `_NO_STEP`."""
        for step in reversed(self.folder.checkpoints.steps()):
            if at_most is not None and step > at_most:
                continue
            try:
                state, progress = self.folder.checkpoints.load(step)
                self._check_best(progress)
            except DamagedError as error:
                warnings.warn(f"At step {step} {error}; an older one is used.", stacklevel=2)
                continue
            return step, state, progress
        return _NO_STEP, {}, {}

    def _check_best(self, progress: dict[str, Any]) -> None:
        """Raises a DamagedError if the best model of a checkpoint is neither whole nor its own."""
        epoch, step = progress["best_epoch"], progress["step"]
        is_own = self._ends_epoch(step) and self._epochs_at(step) == epoch
        if epoch is not None and not is_own and not self.folder.has_best(epoch):
            file = str(self.folder.best_model(epoch))
            raise DamagedError(f"the model {file!r} is damaged or gone")

    def _epochs_at(self, step: int) -> int:
        """Returns the number of epochs that are complete at a step."""
        return self.plan.epochs if step == self.plan.steps else step // self.plan.steps_per_epoch

    def _ends_epoch(self, step: int) -> bool:
        return step % self.plan.steps_per_epoch == 0 or step == self.plan.steps

    def run(self, stop: StopRequests) -> int:
        """Trains to the last step, or until a signal asks any worker to stop.

        After an error the last checkpoints stay.

        Args:
            stop: receives the signals.

        Returns:
            0 after the last step, otherwise the number of the signal.

        Raises:
            FloatingPointError: the loss is not finite.
            MemoryError: memory is exhausted.
            OSError: the disk is full or gone.
            WorkerLostError: another worker is lost.
        """
        events = EventFiles(self.folder, is_written=not self.engine.index)
        stop.begin_steps()
        with contextlib.closing(events):
            try:
                return self._run_steps(stop, events)
            except FloatingPointError as error:
                self._writer.close()
                step = self.folder.checkpoints.steps()[-1]
                raise FloatingPointError(
                    f"{error}; the checkpoint of step {step} is kept in {str(self.folder.path)!r}. "
                    "Try a smaller learning rate."
                ) from None
            except Exception as error:
                if self.engine.is_out_of_memory(error):
                    raise MemoryError(
                        f"Out of memory at step {self.watcher.step + 1}; the checkpoints in "
                        f"{str(self.folder.path)!r} are kept: free some memory and resume, or "
                        "train with smaller batches or accumulate."
                    ) from error
                if self.engine.is_loss_of_process(error):
                    raise self._worker_lost(error) from error
                raise
            finally:
                self.engine.settle()
                self._writer.close()

    def wait_for_workers(self) -> None:
        """Waits until every worker calls this, or raises a WorkerLostError."""
        try:
            self.engine.gather(1)
        except Exception as error:
            if not self.engine.is_loss_of_process(error):
                raise
            raise self._worker_lost(error) from error

    def _worker_lost(self, error: Exception) -> WorkerLostError:
        return WorkerLostError(
            f"Another worker was lost at step {self.watcher.step + 1} "
            f"({type(error).__name__}); start all workers again and resume."
        )

    def _run_steps(self, stop: StopRequests, events: EventFiles) -> int:
        start_step = self.watcher.step
        self.engine.begin(
            self.model,
            training=lambda shard: self.job.training_batches(
                self._resizing, start_step=start_step, shard=shard
            ),
            validation=lambda shard: self.job.validation_batches(self._resizing, shard=shard),
            size=self.plan.batch_size,
        )
        while self.watcher.step < self.plan.steps:
            own_signal = signal.SIGINT if self.watcher.stop_requested else stop.signal_number
            own_request = int(own_signal) or (_SAVE if self._is_save_due() else 0)
            request = max(self.engine.gather(own_request))
            if request > _SAVE:
                self.save()
                return request
            if request:
                self._save_if_free(within=0.0)
            self._end_step(self.engine.step(), events)
        return 0

    def _end_step(self, logs: dict[str, Any], events: EventFiles) -> None:
        self.watcher.end_step(logs)
        step = self.watcher.step
        events.write_step(step, logs)
        if self._ends_epoch(step):
            self._end_epoch(events)
        elif step % self.job.execution.checkpoint_steps == 0:
            self._save_if_free()

    def _end_epoch(self, events: EventFiles) -> None:
        self.engine.settle()
        with self._averaged_weights():
            validation = self._evaluate()
            record = self.watcher.end_epoch(
                validation, learning_rate=float(self.model.optimizer.learning_rate)
            )
            if record.is_best:
                self._best_is_taken.wait()
                self._best.take()
                self._best_epoch = record.epoch
        is_last = self.watcher.step == self.plan.steps
        if is_last:
            self.save()
        else:
            self._save_if_free()
        best_epoch = self.watcher.best.epoch if self.watcher.best else record.epoch
        self.folder.write_progress(self.watcher.history, best_epoch=best_epoch, is_last=is_last)
        events.write_epoch(self.watcher.step, record)
        self.watcher.report(record)

    def save(self) -> None:
        """Saves a checkpoint, and returns when it is on the disk."""
        self._writer.wait()
        self._begin_save()
        self._writer.wait()

    def _is_save_due(self) -> bool:
        seconds = time.monotonic() - self._last_save
        return seconds > 60 * self.job.execution.checkpoint_minutes

    def _save_if_free(self, *, within: float = _PATIENCE) -> None:
        """Begins a checkpoint, unless one is being written on any worker: then there is none."""
        is_busy = not self._writer.is_free(within=within)
        if not max(self.engine.gather(int(is_busy))):
            self._begin_save()

    def _begin_save(self) -> None:
        self.engine.settle()
        self._last_save = time.monotonic()
        best_epoch, self._best_epoch = self._best_epoch, None
        if best_epoch is not None:
            self._best_is_taken.clear()
        step, progress = self.watcher.step, self.watcher.to_dict()
        work = functools.partial(
            self._write, step, self._state.take(), progress, list(self.watcher.history), best_epoch
        )
        self._writer.begin(work)

    def _write(
        self,
        step: int,
        state: list[np.ndarray],
        progress: dict[str, Any],
        history: list[EpochDone],
        new_best: int | None,
    ) -> None:
        """Writes a checkpoint, after the best model that it needs, and removes what is old."""
        if new_best is not None:
            self._write_best(new_best, self._best.taken)
        self.folder.checkpoints.save(step, numbered(state), progress=progress)
        best_epochs = {progress["best_epoch"]} - {None}
        for kept in self.folder.checkpoints.steps():  # any of them may be resumed
            records = history[: self._epochs_at(kept)]
            best_epochs.update([record.epoch for record in records if record.is_best][-1:])
        self.folder.remove_old(best_epochs=best_epochs)

    def _write_best(self, epoch: int, weights: list[np.ndarray]) -> None:
        try:
            self._best_model.set_weights(weights)
        finally:
            self._best_is_taken.set()
        self.folder.save_best(self._best_model, epoch=epoch)

    def _evaluate(self) -> dict[str, float]:
        logs = self.engine.evaluate()
        names = [name for name in ("loss", "accuracy") if name in logs]
        return {name: float(np.asarray(logs[name]).ravel()[0]) for name in names}

    @contextlib.contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Replaces the weights by their moving averages inside a `with` block."""
        if self.job.recipe.average is None:
            yield
            return
        variables = self.model.trainable_variables
        values = [np.array(backend.values_of(variable)) for variable in variables]
        self.model.optimizer.finalize_variable_values(variables)
        try:
            yield
        finally:
            # From copies: a swap by sums and differences does not restore the same bits.
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
