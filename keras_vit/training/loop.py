"""Carries a training out, step by step, until its end or until someone asks to stop."""

import contextlib
import dataclasses
import signal
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.training.checkpoints import (
    DamagedError,
    EventFiles,
    Unfinished,
    get_state,
    set_state,
)
from keras_vit.training.execution import Workers
from keras_vit.training.objectives import Objective
from keras_vit.training.progress import Watcher

_KINDS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Takes the two signals while it is entered.

    Before the steps begin SIGINT interrupts at once; but what Python or TensorFlow swallow of that,
    in the middle of building a model, is remembered too. Between steps a second SIGINT interrupts.

    Example:
        >>> with StopRequests() as stop:
        ...     stop.wait_for_steps()
        ...     signal.raise_signal(signal.SIGINT)
        >>> stop.asked == signal.SIGINT
        True

    Attributes:
        asked: the first signal that came, or 0.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._waits = self._ends = False
        self._before: dict[int, Any] = {}

    def wait_for_steps(self) -> None:
        """From now on the first signal is only remembered."""
        self._waits = True

    def end_steps(self) -> None:
        """From now on a signal interrupts at once, SIGTERM too; one that came late, here."""
        self._waits, self._ends = False, True
        if self.asked:
            raise KeyboardInterrupt

    def __enter__(self) -> "StopRequests":
        try:
            self._before = {kind: signal.signal(kind, self._ask) for kind in _KINDS}
        except ValueError:  # not the main thread, which alone gets signals
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.asked
        self.asked = self.asked or number
        if self._ends or (number == signal.SIGINT and not (is_first and self._waits)):
            raise KeyboardInterrupt


# What a lost worker looks like to the others: their collectives are broken off.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
_NONE = -1  # a step that no checkpoint is of


class WorkerLostError(ConnectionError):
    """Another worker has gone, and without it no step can be made.

    Attributes:
        exit_code: 75, by which a supervisor knows to start the workers again.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class Loop:
    """One training in this process.

    Args:
        objective: compiled.
        workers: those that train together.
        watcher: is told about each step.
        folder: where everything is saved.

    Attributes:
        job: what was asked besides the model.
        model: what is trained.
        plan: how long an epoch and the whole training are.
        settings: what config.json says of how the run is made.
    """

    def __init__(
        self, objective: Objective, *, workers: Workers, watcher: Watcher, folder: Unfinished
    ) -> None:
        self.objective, self.job, self.model = objective, objective.job, objective.model
        self.workers, self.watcher, self.folder = workers, watcher, folder
        self.plan = self.job.plan
        self._best_model = objective.plain_copy()
        self._resizing = objective.resizing
        self._validation = workers.divided(self.job.validation_batches(self._resizing))
        self.settings = objective.settings()

    def resume(self) -> None:
        """Goes back to the last checkpoint that every worker has whole, with its best model.

        What is damaged is left out with a warning.

        Raises:
            ValueError: no checkpoint is whole, or the workers have none in common.
        """
        self.folder.remove_remains()
        found = self._load_newest()
        # One worker may be a save ahead of another, or have a damaged file.
        step = min(self.workers.gather(found.step if found else _NONE))
        if found and found.step != step:
            found = self._load_newest(at_most=step)
        found = found if found and found.step == step else None
        if min(self.workers.gather(found.step if found else _NONE)) == _NONE or found is None:
            raise ValueError(
                f"No checkpoint in {str(self.folder.path)!r} is whole"
                + (" and in the folders of all workers" if self.workers.count > 1 else "")
                + ", with the best model it belongs to; put the files back, or overwrite the "
                "training."
            )
        set_state(self.model, found.state)
        self.watcher.resume(found.progress)
        self.folder.checkpoints.remove_after(step)
        best = self.watcher.best
        if best is not None and not found.has_best:
            with self._averaged_weights():
                self._save_best(best.epoch)

    def _load_newest(self, *, at_most: int | None = None) -> "_Found | None":
        """Returns the newest checkpoint that is whole, with its best model."""
        for step in reversed(self.folder.checkpoints.steps()):
            if at_most is not None and step > at_most:
                continue
            try:
                state, progress = self.folder.checkpoints.load(step)
                has_best = self._check_best(progress)
            except DamagedError as error:
                warnings.warn(f"At step {step} {error}; an older one is used.", stacklevel=2)
                continue
            return _Found(step=step, state=state, progress=progress, has_best=has_best)
        return None

    def _check_best(self, progress: dict[str, Any]) -> bool:
        """Whether the best model of a checkpoint is there; False if the checkpoint is that model.

        Raises:
            DamagedError: it cannot be had.
        """
        epoch = progress["best_epoch"]
        if epoch is None or self.folder.has_best(epoch):
            return True
        if self._epochs_ended(progress["step"]) == epoch and self._is_epochs_end(progress["step"]):
            return False
        raise DamagedError(f"the model {str(self.folder.best_model(epoch))!r} is damaged or gone")

    def _epochs_ended(self, step: int) -> int:
        return self.plan.epochs if step == self.plan.steps else step // self.plan.steps_per_epoch

    def _is_epochs_end(self, step: int) -> bool:
        return step % self.plan.steps_per_epoch == 0 or step == self.plan.steps

    def run(self, stop: StopRequests) -> int:
        """Trains to the end, or until someone asks to stop.

        Args:
            stop: where it is asked.

        Returns:
            0 at the end, otherwise the signal that asked any of the workers.

        Raises:
            FloatingPointError: the loss is not finite; the checkpoints are of before.
            MemoryError: there is not enough; the checkpoints are of before.
            OSError: the disk is full or gone; likewise.
            WorkerLostError: another worker has gone.
        """
        events = EventFiles(self.folder, self.workers)
        stop.wait_for_steps()
        with contextlib.closing(events):
            try:
                return self._run(stop, events)
            except (MemoryError, tf.errors.ResourceExhaustedError) as error:
                raise MemoryError(
                    f"Out of memory at step {self.watcher.step + 1}; the checkpoints in "
                    f"{str(self.folder.path)!r} are kept: free some and resume, or train with "
                    "smaller batches or accumulate."
                ) from error
            except FloatingPointError as error:
                kept = self.folder.checkpoints.steps()[-1]
                raise FloatingPointError(
                    f"{error}; the checkpoint of step {kept} is kept in {str(self.folder.path)!r}. "
                    "Try a smaller learning rate."
                ) from None
            except _LOST as error:
                if self.workers.count == 1:
                    raise
                raise self._lost(error) from error

    def meet(self) -> None:
        """Waits until every worker is here.

        Raises:
            WorkerLostError: another worker has gone.
        """
        try:
            self.workers.gather(1)
        except _LOST as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> WorkerLostError:
        return WorkerLostError(
            f"Another worker was lost at step {self.watcher.step + 1} "
            f"({type(error).__name__}); start all workers again, resuming."
        )

    def _run(self, stop: StopRequests, events: EventFiles) -> int:
        dataset = self.workers.distribute(
            lambda shard: self.job.training_batches(
                self._resizing, start_step=self.watcher.step, shard=shard
            ),
            self.plan.batch_size,
        )
        self.model.prepare(dataset)
        batches = iter(dataset)
        while self.watcher.step < self.plan.steps:
            own = signal.SIGINT if self.watcher.stop_requested else stop.asked
            asked = max(self.workers.gather(int(own)))
            if asked:
                self.save()
                return asked
            self.model.reset_metrics()  # so that the logs are those of one step
            logs = self.model.train_function(batches)
            self._end_step(logs, events)
        return 0

    def _end_step(self, logs: dict[str, Any], events: EventFiles) -> None:
        self.watcher.end_step(logs)
        step = self.watcher.step
        events.write_step(step, logs)
        if self._is_epochs_end(step):
            self._end_epoch(events)
        elif step % self.job.execution.checkpoint_steps == 0:
            self.save()

    def _end_epoch(self, events: EventFiles) -> None:
        with self._averaged_weights():
            validation = self._evaluate()
            done = self.watcher.end_epoch(
                validation, learning_rate=float(self.model.optimizer.learning_rate)
            )
            if done.is_best:
                self._save_best(done.epoch)
        self.save()
        best = self.watcher.best.epoch if self.watcher.best else done.epoch
        self.folder.remove_old(best_epochs={best, *self._best_epochs()})
        is_last = self.watcher.step == self.plan.steps
        self.folder.show(self.watcher.history, best_epoch=best, is_last=is_last)
        events.write_epoch(self.watcher.step, done)
        self.watcher.tell(done)

    def _save_best(self, epoch: int) -> None:
        self._best_model.set_weights(self.objective.saved.get_weights())
        self.folder.save_best(self._best_model, epoch=epoch)

    def _best_epochs(self) -> Iterator[int]:
        """The best epoch as of each checkpoint, of which any may be the one that is resumed."""
        for step in self.folder.checkpoints.steps():
            ended = self.watcher.history[: self._epochs_ended(step)]
            yield from [done.epoch for done in ended if done.is_best][-1:]

    def save(self) -> None:
        """Saves a checkpoint."""
        self.folder.checkpoints.save(
            self.watcher.step, get_state(self.model), progress=self.watcher.to_dict()
        )

    def _evaluate(self) -> dict[str, float]:
        logs = self.model.evaluate(self._validation, verbose=0, return_dict=True)
        measured = [name for name in ("loss", "accuracy") if name in logs]
        return {name: float(np.asarray(logs[name]).ravel()[0]) for name in measured}

    @contextlib.contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Puts the moving averages in the weights' place for a while."""
        if self.job.recipe.average is None:
            yield
            return
        variables = self.model.trainable_variables
        own = [variable.numpy() for variable in variables]
        self.model.optimizer.finalize_variable_values(variables)
        try:
            yield
        finally:
            # From copies: a swap by sums and differences would not give back the same bits.
            for variable, value in zip(variables, own, strict=True):
                variable.assign(value)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """A whole checkpoint, and whether its best model is there or is to be made of it."""

    step: int
    state: dict[str, np.ndarray]
    progress: dict[str, Any]
    has_best: bool
