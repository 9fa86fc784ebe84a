"""Runs the steps of a training, from any step on, and saves what it takes to go on from there."""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit.backend import ExactTrainer
from keras_vit.training.checkpoints import get_state, set_state
from keras_vit.training.execution import Workers
from keras_vit.training.progress import Watcher
from keras_vit.training.recipe import Plan
from keras_vit.training.stopping import StopRequests
from keras_vit.training.tensorboard import EventFiles
from keras_vit.training.unfinished import Unfinished

# What a lost worker looks like to the others: their collectives are broken off.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)

Batches = Callable[[int, tuple[int, int]], tf.data.Dataset]


class WorkerLostError(ConnectionError):
    """Another worker has gone, and without it no step can be made.

    Attributes:
        exit_code: 75, by which a supervisor knows to start the workers again.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


@dataclasses.dataclass(kw_only=True)
class Loop:
    """One training in this process.

    Attributes:
        model: compiled, its optimizer built.
        kept: the part of it that is saved, or itself.
        best_model: equal to that part; takes its weights of the best epoch.
        batches: makes the batches from a step on, for one of several workers.
        validation: the batches that the epochs are judged by.
        plan: how long an epoch and the whole training are.
        checkpoint_steps: steps between checkpoints, besides those after each epoch.
        is_averaged: whether the optimizer's moving average is evaluated and saved.
        workers: those that train together.
        watcher: is told about each step.
        folder: where everything is saved.
    """

    model: ExactTrainer
    kept: keras.Model
    best_model: keras.Model
    batches: Batches
    validation: tf.data.Dataset
    plan: Plan
    checkpoint_steps: int
    is_averaged: bool
    workers: Workers
    watcher: Watcher
    folder: Unfinished

    def resume(self) -> None:
        """Goes back to the last checkpoint that every worker has.

        Raises:
            ValueError: a checkpoint is damaged, or the workers have none in common.
        """
        self.folder.remove_remains()
        latest = max(self.folder.checkpoints.steps(), default=0)
        step = min(self.workers.gather(latest))  # one worker may be a save ahead of another
        state, progress = self.folder.checkpoints.load(step)
        set_state(self.model, state)
        self.watcher.resume(progress)

    def run(self, requests: StopRequests) -> int:
        """Trains to the end, or until someone asks to stop.

        Args:
            requests: where it is asked.

        Returns:
            0 at the end, otherwise the signal that asked any of the workers.

        Raises:
            FloatingPointError: the loss is not finite; the checkpoints are of before.
            WorkerLostError: another worker has gone.
        """
        events = EventFiles(self.folder, self.workers)
        requests.wait_for_steps()
        with contextlib.closing(events):
            try:
                return self._run(requests, events)
            except FloatingPointError as error:
                kept = self.folder.checkpoints.steps()[-1]
                raise FloatingPointError(
                    f"{error}; the checkpoint of step {kept} is kept in {str(self.folder.path)!r}. "
                    "Try a smaller learning rate."
                ) from None
            except _LOST as error:
                if self.workers.count == 1:
                    raise
                raise WorkerLostError(
                    f"Another worker was lost at step {self.watcher.step + 1} "
                    f"({type(error).__name__}); start all workers again, resuming."
                ) from error

    def _run(self, requests: StopRequests, events: EventFiles) -> int:
        dataset = self.workers.distribute(
            lambda shard: self.batches(self.watcher.step, shard), self.plan.batch_size
        )
        self.model.prepare(dataset)
        batches = iter(dataset)
        while self.watcher.step < self.plan.steps:
            own = signal.SIGINT if self.watcher.stop_requested else requests.asked
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
        if step % self.plan.steps_per_epoch == 0 or step == self.plan.steps:
            self._end_epoch(events)
        elif step % self.checkpoint_steps == 0:
            self.save()

    def _end_epoch(self, events: EventFiles) -> None:
        with self._averaged_weights():
            validation = self._evaluate()
            done = self.watcher.end_epoch(
                validation, learning_rate=float(self.model.optimizer.learning_rate)
            )
            if done.is_best:
                self.best_model.set_weights(self.kept.get_weights())
                self.folder.save_best(self.best_model, epoch=done.epoch)
        self.save()
        best = self.watcher.best.epoch if self.watcher.best else done.epoch
        self.folder.remove_old(best_epoch=best)
        is_last = self.watcher.step == self.plan.steps
        self.folder.show(self.watcher.history, best_epoch=best, is_last=is_last)
        events.write_epoch(self.watcher.step, done)
        self.watcher.tell(done)

    def save(self) -> None:
        """Saves a checkpoint."""
        self.folder.checkpoints.save(
            self.watcher.step, get_state(self.model), progress=self.watcher.to_dict()
        )

    def _evaluate(self) -> dict[str, float]:
        logs = self.model.evaluate(self.validation, verbose=0, return_dict=True)
        measured = [name for name in ("loss", "accuracy") if name in logs]
        return {name: float(np.asarray(logs[name]).ravel()[0]) for name in measured}

    @contextlib.contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Puts the moving averages in the weights' place for a while."""
        if not self.is_averaged:
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
