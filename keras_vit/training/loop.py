"""Runs the steps of a training, until the last one or until a signal asks it to stop."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_vit import atomic, backend
from keras_vit.limits import counted
from keras_vit.optimizers import begin_cooldown
from keras_vit.training.checkpoints import DamagedError, Unfinished
from keras_vit.training.execution import Engine, Job
from keras_vit.training.objectives import Objective
from keras_vit.training.progress import EpochDone, EventFiles, PlanChanged, Watcher
from keras_vit.training.recipe import make_schedule
from keras_vit.training.state import Copies
from keras_vit.training.stopping import StopRequests

_NO_STEP = -1  # stands for "no checkpoint"
# Seconds that a step waits for the checkpoint before to be written; after that it goes on without.
_PATIENCE = 1.0
_SAVE = (
    1  # stands for "it is time for a checkpoint"; any signal that is handled has a higher number
)


class Writer:
    """Writes files in a thread of its own, one piece of work at a time.

    Example:
        >>> writer = Writer()
        >>> done = []
        >>> writer.begin(lambda: done.append("written"))
        >>> writer.wait()
        >>> done
        ['written']
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "keras_vit-writer")
        self._work: concurrent.futures.Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begins a piece of work, after the one before."""
        self.wait()
        self._work = self._thread.submit(work)

    def is_free(self, *, within: float | None) -> bool:
        """Whether the work is done, or will be within so many seconds, if any; raises its error."""
        if self._work is None:
            return True
        if not concurrent.futures.wait([self._work], within).done:
            return False
        work, self._work = self._work, None
        work.result()
        return True

    def wait(self) -> None:
        """Waits until the work is done; raises its error."""
        self.is_free(within=None)

    def close(self, *, waits: bool = True) -> None:
        """Takes no more work, and waits until what there is is done, without its error."""
        self._thread.shutdown(wait=waits)


class WorkerLostError(ConnectionError):
    """Another worker is lost, so no further step is possible.

    Attributes:
        exit_code: 75, which tells a supervisor to start the workers again.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class OutOfMemoryError(MemoryError):
    """Memory is exhausted in a step or an evaluation, so that smaller parts may help."""


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
        self._saver = engine.make_saver(self.model, folder.checkpoints)
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
        step, restore, progress = self._load_newest()
        # One worker may be a save ahead of another, or have a damaged file.
        common_step = min(self.engine.gather(step))
        if step > common_step:
            step, restore, progress = self._load_newest(at_most=common_step)
        own_step = step if step == common_step else _NO_STEP
        if min(self.engine.gather(own_step)) == _NO_STEP:
            raise ValueError(
                f"No checkpoint in {str(self.folder.path)!r} is whole"
                + (" and in the folders of all workers" if self.engine.count > 1 else "")
                + ", together with its best model; put the files back, or overwrite the training."
            )
        restore()
        self.watcher.resume(progress)
        if self.watcher.cooldown_epoch is not None:
            self._end_after_cooldown(self.watcher.cooldown_epoch)
        with self._explained():
            self.folder.checkpoints.remove_after(step)
        best = self.watcher.best
        is_missing = best is not None and not self.folder.has_best(best.epoch)
        if best is not None and max(self.engine.gather(int(is_missing))):
            with self._averaged_weights():
                copies = self._best.take()
            if is_missing:
                self._write_best(best.epoch, copies)

    def tell_raised(self, before: int) -> None:
        """Reports that the training, just resumed, has more epochs than before.

        Raises:
            ValueError: its learning rate already falls to its end, because the patience had run
                out.
        """
        steps_before = before * self.plan.steps_per_epoch
        if self.watcher.cooldown_epoch is not None:
            raise ValueError(
                f"The patience ran out after epoch {self.watcher.cooldown_epoch}, and the learning "
                f"rate already falls: epochs (--epochs) cannot be raised any more. Resume with "
                f"{counted(before, 'epoch')}, and train on from the finished run (--weights RUN)."
            )
        rate = float(self.model.optimizer.learning_rate)
        end = float(make_schedule(self.job.recipe, self.plan)(self.plan.steps))
        self.watcher.report(
            self._changed(
                "epochs",
                f"Resumed at step {self.watcher.step} of {steps_before}, to train {self.plan.steps}"
                f" steps ({self.plan.epochs} epochs in place of {before}): from here the learning "
                f"rate is that of the longer schedule, {rate:.2g} now and {end:.2g} at the end.",
            )
        )

    def restart(self, job: Job) -> None:
        """Goes back to the last checkpoint, to go on with a job that needs less memory."""
        step, parts = self.watcher.step, job.execution.accumulate
        self.job = self.objective.job = job
        with self.engine.scope():
            self.objective.compile()
        gc.collect()  # the old optimizer is in circles of references
        self._writer = Writer()
        self._saver = self.engine.make_saver(self.model, self.folder.checkpoints)
        self._best_epoch = None
        self._best_is_taken.set()
        self.resume()
        images = -(-self.plan.batch_size // self.engine.replicas // parts)
        self.watcher.report(
            self._changed(
                "memory",
                f"Memory was exhausted at step {step + 1}: from step {self.watcher.step + 1} on "
                f"each batch is computed in {parts} parts of about {images} images "
                f"(--accumulate {parts}), which changes the result by rounding alone.",
            )
        )

    def _load_newest(
        self, *, at_most: int | None = None
    ) -> tuple[int, Callable[[], None], dict[str, Any]]:
        """Returns the step, progress and what restores the newest whole checkpoint.

        Without one the step is `_NO_STEP`.
        """
        for step in reversed(self.folder.checkpoints.steps()):
            if at_most is not None and step > at_most:
                continue
            try:
                restore, progress = self._saver.load(step)
                self._check_best(progress)
            except DamagedError as error:
                warnings.warn(f"At step {step} {error}; an older one is used.", stacklevel=2)
                continue
            return step, restore, progress
        return _NO_STEP, lambda: None, {}

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
        events = EventFiles(self.folder.path, is_written=not self.engine.index)
        is_lost = False
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
                    self.engine.forget()
                    raise OutOfMemoryError(
                        f"Out of memory at step {self.watcher.step + 1}; the checkpoints in "
                        f"{str(self.folder.path)!r} are kept: free some memory and resume, or "
                        "train with smaller batches or accumulate."
                    ) from error
                is_lost = self.engine.is_loss_of_process(error)
                if is_lost:
                    raise self._worker_lost(error) from error
                raise
            finally:
                self.engine.settle()
                self._writer.close(waits=not is_lost)  # which may wait for the lost one

    def wait_for_workers(self) -> None:
        """Waits until every worker calls this, or raises a WorkerLostError."""
        try:
            self.engine.gather(1)
        except Exception as error:
            if not self.engine.is_loss_of_process(error):
                raise
            raise self._worker_lost(error) from error

    def _worker_lost(self, error: Exception) -> WorkerLostError:
        self.engine.leave()
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
        self._saver.prepare()
        self._best.prepare()
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
        change = self._cool_down_if_due()
        is_last = self.watcher.step == self.plan.steps
        if is_last:
            self.save()
        else:
            self._save_if_free()
        best_epoch = self.watcher.best.epoch if self.watcher.best else record.epoch
        self.folder.write_progress(self.watcher.history, best_epoch=best_epoch, is_last=is_last)
        events.write_epoch(self.watcher.step, record)
        self.watcher.report(record)
        if change is not None:
            self.watcher.report(change)

    def _cool_down_if_due(self) -> PlanChanged | None:
        """Begins the cooldown once the patience has run out, unless the training ends as soon."""
        watcher, recipe = self.watcher, self.job.recipe
        if recipe.patience is None or watcher.cooldown_epoch is not None:
            return None
        stale = watcher.stale_epochs
        if not max(self.engine.gather(int(stale >= recipe.patience))):
            return None
        epoch, rate = len(watcher.history), float(self.model.optimizer.learning_rate)
        if (epoch + recipe.cooldown_epochs) * self.plan.steps_per_epoch >= self.plan.steps:
            return None
        begin_cooldown(self.model.optimizer)
        watcher.cooldown_epoch = epoch
        self._end_after_cooldown(epoch)
        return self._changed(
            "patience",
            f"The validation loss has not fallen since epoch {epoch - stale}: the learning "
            f"rate falls from {rate:.2g} to 0, and the training ends after epoch "
            f"{self.plan.epochs}.",
        )

    def _end_after_cooldown(self, epoch: int) -> None:
        epochs = epoch + self.job.recipe.cooldown_epochs
        self.plan = dataclasses.replace(self.plan, steps=epochs * self.plan.steps_per_epoch)
        self.watcher.end_at(epochs=epochs, steps=self.plan.steps)

    def _changed(self, reason: Any, text: str) -> PlanChanged:
        watcher = self.watcher
        return PlanChanged(reason=reason, step=watcher.step, steps=self.plan.steps, text=text)

    def save(self) -> None:
        """Saves a checkpoint, and returns when it is on the disk."""
        self._writer.wait()
        self._begin_save()
        self._writer.wait()
        self.engine.gather(0)  # on the disks of all

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
        progress = self.watcher.to_dict()
        write_state = self._saver.begin(self.watcher.step, progress=progress)
        work = functools.partial(
            self._write, write_state, progress, list(self.watcher.history), best_epoch
        )
        self._writer.begin(work)

    def _write(
        self,
        write_state: Callable[[], None],
        progress: dict[str, Any],
        history: list[EpochDone],
        new_best: int | None,
    ) -> None:
        """Writes a checkpoint, after the best model that it needs, and removes what is old."""
        with self._explained():
            if new_best is not None:
                self._write_best(new_best, self._best.taken)
            write_state()
            best_epochs = {progress["best_epoch"]} - {None}
            for kept in self.folder.checkpoints.steps():  # any of them may be resumed
                records = history[: self._epochs_at(kept)]
                best_epochs.update([record.epoch for record in records if record.is_best][-1:])
            self.folder.remove_old(best_epochs=best_epochs)

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        """Says of an error of the disk, to remove files included, that resuming goes on."""
        path = self.folder.path
        return atomic.explain_errors(path, kept="the checkpoints are kept", again="resume")

    def _write_best(self, epoch: int, weights: list[np.ndarray]) -> None:
        is_written = not (self._saver.is_shared and self.engine.index)
        try:
            if is_written:
                self._best_model.set_weights(weights)
        finally:
            self._best_is_taken.set()
        if is_written:
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
