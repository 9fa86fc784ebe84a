"""Runs the steps of a training, until the last one or until a signal asks it to stop."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras
import numpy as np

from keras_vit import backend
from keras_vit.limits import counted
from keras_vit.optimizers import begin_cooldown
from keras_vit.training.checkpoints import Checkpoint, DamagedError, WorkDirectory
from keras_vit.training.execution import Engine, Job
from keras_vit.training.objectives import Objective
from keras_vit.training.progress import EventFiles, PlanChanged, ProgressLogger
from keras_vit.training.recipe import make_schedule

# Seconds that a step waits for the checkpoint before to be written; after that it goes on without.
_JOIN_TIMEOUT = 1.0
_SAVE = 1  # asks for a checkpoint; any signal that is handled has a higher number
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_steps(loop: "Loop", stop: "StopRequests") -> None:
    """Trains to the last step, or until any worker is to stop."""
    while not loop.is_over(stop):  # asked before the first step, too: a signal may have come
        loop.log(loop.engine.step())
        if loop.ends_epoch():
            loop.evaluate()
        if loop.is_save_due():
            loop.save_if_free()
    if loop.signal_number:
        loop.save()


class Loop:
    """One training in this process.

    Attributes:
        objective: compiled, in the scope of the engine.
        logger: receives the logs of each step.
        folder: holds the checkpoints.
        job: data, recipe, execution and seed.
        plan: the lengths of an epoch and of the training.
        settings: the part of config.json that decides the result.
        checkpoints: the last ones.
        best: the weights of the best epoch, which nobody changes: they are replaced.
        signal_number: of what any worker was stopped by, or 0.
    """

    def __init__(
        self, objective: Objective, *, engine: Engine, logger: ProgressLogger, folder: WorkDirectory
    ) -> None:
        self.objective, self.job, self.model = objective, objective.job, objective.model
        self.engine, self.logger, self.folder = engine, logger, folder
        self.plan, self.settings = self.job.plan, objective.settings()
        self.signal_number = 0
        self.best: list[np.ndarray] = []
        # Made before the steps, by all workers together: what cannot be copied is told now.
        self._plain = objective.inference_model()
        self._in_file = self.best  # those of the file of the run's model
        self._last_save, self._is_late = time.monotonic(), False
        self._open()

    def _open(self) -> None:
        # Writes one checkpoint at a time, while the steps go on.
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "keras_vit-writer")
        self._writing: concurrent.futures.Future[None] | None = None
        self.checkpoints = self.engine.make_checkpoints(self.model, self.folder)

    def is_over(self, stop: "StopRequests") -> bool:
        """Whether the last step is taken, or any worker is asked to stop.

        The workers agree by one sum for each step, also on whether a checkpoint is overdue.
        """
        if self.logger.step == self.plan.steps:
            return True
        minutes = (time.monotonic() - self._last_save) / 60
        own = signal.SIGINT if self.logger.stop_requested else stop.signal_number
        own = int(own) or (_SAVE if minutes > self.job.execution.checkpoint_minutes else 0)
        # The largest wins: a signal to one worker stops all of them at the same step.
        request = max(self.engine.gather(own))
        self._is_late = request == _SAVE
        self.signal_number = request if request > _SAVE else 0
        return bool(self.signal_number)

    def log(self, logs: dict[str, Any]) -> None:
        """Records and reports one step."""
        self.logger.end_step(logs)
        self._events.write_step(self.logger.step, logs)

    def ends_epoch(self) -> bool:
        """Whether the last step so far ends an epoch."""
        step = self.logger.step
        return step % self.plan.steps_per_epoch == 0 or step == self.plan.steps

    def evaluate(self) -> None:
        """Measures the model on the validation images, keeps the best, and ends the epoch."""
        self.engine.synchronize()
        with self._averaged_weights():
            logs = self.engine.evaluate()
            names = [name for name in ("loss", "accuracy") if name in logs]
            record = self.logger.end_epoch(
                {name: float(np.asarray(logs[name]).ravel()[0]) for name in names},
                learning_rate=float(self.model.optimizer.learning_rate),
            )
            if record.is_best:
                weights = self.objective.saved.weights
                self.best = [np.array(backend.values_of(each)) for each in weights]
        cooldown = self._cool_down_if_due()
        best = self.logger.best or record
        is_last = self.logger.step == self.plan.steps
        self.folder.write_progress(self.logger.history, best_epoch=best.epoch, is_last=is_last)
        self._events.write_epoch(self.logger.step, record)
        self.logger.report(record)
        if cooldown is not None:
            self._report_change("patience", cooldown)

    def is_save_due(self) -> bool:
        """Whether to save: after an epoch, so many steps, or so many minutes."""
        is_regular = self.logger.step % self.job.execution.checkpoint_steps == 0
        return self._is_late or is_regular or self.ends_epoch()

    def save_if_free(self) -> None:
        """Begins a checkpoint, unless one is being written on any worker: then there is none.

        That of the last step is waited for.
        """
        if self.logger.step == self.plan.steps:
            self.save()
            return
        is_written = self._is_written(within=0.0 if self._is_late else _JOIN_TIMEOUT)
        # All workers or none: training resumes only from a step that all of them have.
        if min(self.engine.gather(int(is_written))):
            self._begin_save()

    def save(self) -> None:
        """Saves a checkpoint, and returns when it is on the disk."""
        self._is_written()
        self._begin_save()
        self._is_written()
        self.engine.gather(0)  # on the disks of all

    def _is_written(self, *, within: float | None = None) -> bool:
        """Whether the last checkpoint is on the disk, after so many seconds; raises its error."""
        if self._writing is None:
            return True
        if not concurrent.futures.wait([self._writing], within).done:
            return False
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def run(self, stop: "StopRequests") -> None:
        """Prepares and runs the steps, see `signal_number`; after an error the checkpoints stay.

        Raises:
            FloatingPointError: the loss is not finite.
            MemoryError: memory is exhausted.
            OSError: the disk is full or gone.
            WorkerLostError: another worker is lost.
        """
        self._events = EventFiles(self.folder.path, is_written=not self.engine.index)
        start_step, resizing, is_lost = self.logger.step, self.objective.resizing, False
        stop.begin_steps()
        with contextlib.closing(self._events):
            try:
                self.engine.begin(
                    self.model,
                    training=lambda shard: self.job.training_batches(
                        resizing, start_step=start_step, shard=shard
                    ),
                    validation=lambda shard: self.job.validation_batches(resizing, shard=shard),
                    size=self.plan.batch_size,
                )
                run_steps(self, stop)
            except FloatingPointError as error:
                self._writer.shutdown()
                step = self.checkpoints.steps()[-1]
                raise FloatingPointError(
                    f"{error}; the checkpoint of step {step} is kept in {str(self.folder.path)!r}. "
                    "Try a smaller learning rate."
                ) from None
            except Exception as error:
                if self.engine.is_out_of_memory(error):
                    self.engine.discard_state()
                    raise OutOfMemoryError(
                        f"Out of memory at step {self.logger.step + 1}; the checkpoints in "
                        f"{str(self.folder.path)!r} are kept: free some memory and resume, or "
                        "train with smaller batches or accumulate."
                    ) from error
                is_lost = self.engine.is_loss_of_process(error)
                if is_lost:
                    raise self._worker_lost(error) from error
                raise
            finally:
                self.engine.synchronize()
                self._writer.shutdown(wait=not is_lost)  # which may wait for the lost one

    def resume(self) -> None:
        """Restores the newest checkpoint that is whole on every worker.

        A damaged checkpoint is skipped with a warning.

        Raises:
            ValueError: no checkpoint is whole, or the workers have none in common.
        """
        self.folder.remove_leftovers()
        found = self._load_newest()
        # One worker may be a save ahead of another, or have a damaged file, or none: -1.
        common_step = min(self.engine.gather(found.step if found else -1))
        if found is not None and found.step > common_step:
            found = self._load_newest(at_most=common_step)
        is_common = found is not None and found.step == common_step
        if not min(self.engine.gather(int(is_common))) or found is None:
            raise ValueError(
                f"No checkpoint in {str(self.folder.path)!r} is whole"
                + (" and in the folders of all workers" if self.engine.count > 1 else "")
                + "; put the files back, or overwrite the training."
            )
        found.restore()
        self.best = found.best
        self.logger.resume(found.progress)
        if self.logger.cooldown_epoch is not None:
            self._end_after_cooldown(self.logger.cooldown_epoch)
        self.checkpoints.remove_after(found.step)

    def notify_more_epochs(self, before: int) -> None:
        """Reports that the training, just resumed, has more epochs; an error in its cooldown."""
        if self.logger.cooldown_epoch is not None:
            raise ValueError(
                f"The patience ran out after epoch {self.logger.cooldown_epoch}, and the learning "
                f"rate already falls: epochs (--epochs) cannot be raised any more. Resume with "
                f"{counted(before, 'epoch')}, and train on from the finished run (--weights RUN)."
            )
        plan, rate = self.plan, float(self.model.optimizer.learning_rate)
        end = float(make_schedule(self.job.recipe, plan)(plan.steps))
        self._report_change(
            "epochs",
            f"Resumed at step {self.logger.step} of {before * plan.steps_per_epoch}, to train "
            f"{plan.steps} steps ({plan.epochs} epochs in place of {before}): from here the "
            f"learning rate is that of the longer schedule, {rate:.2g} now and {end:.2g} at the "
            "end.",
        )

    def best_model(self) -> keras.Model:
        """Returns a plain copy of the model, the same each time, with the best weights."""
        self._plain.set_weights(self.best)
        return self._plain

    def restart(self, job: Job) -> None:
        """Goes back to the last checkpoint, to go on with a job that needs less memory."""
        step, count = self.logger.step, job.execution.gradient_accumulation_steps
        self.job = self.objective.job = job
        with self.engine.scope():
            self.objective.compile()
        gc.collect()  # the old optimizer is in circles of references
        self._open()
        self.resume()
        images = -(-self.plan.batch_size // self.engine.replicas // count)
        self._report_change(
            "memory",
            f"Memory was exhausted at step {step + 1}: from step {self.logger.step + 1} on "
            f"each batch is computed in {count} micro-batches of about {images} images "
            f"(--gradient-accumulation-steps {count}), which changes the result by rounding alone.",
        )

    def wait_for_workers(self) -> None:
        """Waits until every worker calls this, or raises a WorkerLostError."""
        try:
            self.engine.gather(1)
        except Exception as error:
            if self.engine.is_loss_of_process(error):
                raise self._worker_lost(error) from error
            raise

    def _worker_lost(self, error: Exception) -> "WorkerLostError":
        self.engine.shut_down()
        return WorkerLostError(
            f"Another worker was lost at step {self.logger.step + 1} "
            f"({type(error).__name__}); start all workers again and resume."
        )

    def _load_newest(self, *, at_most: float = math.inf) -> Checkpoint | None:
        steps = [step for step in self.checkpoints.steps() if step <= at_most]
        for step in reversed(steps):
            try:
                return self.checkpoints.load(step)
            except DamagedError as error:
                warnings.warn(f"At step {step} {error}; an older one is used.", stacklevel=2)
        return None

    def _cool_down_if_due(self) -> str | None:
        """Begins the cooldown once the patience has run out, unless the training ends as soon."""
        logger, recipe = self.logger, self.job.recipe
        if recipe.patience is None or logger.cooldown_epoch is not None:
            return None
        stale = logger.stale_epochs
        if not max(self.engine.gather(int(stale >= recipe.patience))):
            return None
        epoch, rate = len(logger.history), float(self.model.optimizer.learning_rate)
        if (epoch + recipe.cooldown_epochs) * self.plan.steps_per_epoch >= self.plan.steps:
            return None
        begin_cooldown(self.model.optimizer)
        logger.cooldown_epoch = epoch
        self._end_after_cooldown(epoch)
        return (
            f"The validation loss has not fallen since epoch {epoch - stale}: the learning "
            f"rate falls from {rate:.2g} to 0, and the training ends after epoch "
            f"{self.plan.epochs}."
        )

    def _end_after_cooldown(self, epoch: int) -> None:
        epochs = epoch + self.job.recipe.cooldown_epochs
        self.plan = dataclasses.replace(self.plan, steps=epochs * self.plan.steps_per_epoch)
        self.logger.epochs, self.logger.steps = epochs, self.plan.steps

    def _report_change(self, reason: Any, text: str) -> None:
        step, steps = self.logger.step, self.plan.steps
        self.logger.report(PlanChanged(reason=reason, step=step, steps=steps, text=text))

    def _begin_save(self) -> None:
        self.engine.synchronize()
        self._last_save = time.monotonic()
        progress = self.logger.to_dict()
        write = self.checkpoints.begin(self.logger.step, progress=progress, best=self.best)
        self._writing = self._writer.submit(self._save, write, self.best)

    def _save(self, write: Callable[[], None], best: list[np.ndarray]) -> None:
        write()
        if best and best is not self._in_file and not self.engine.index:
            self._plain.set_weights(best)
            self.folder.write_model(self.objective.publish(self._plain))
            self._in_file = best

    @contextlib.contextmanager
    def _averaged_weights(self) -> Iterator[None]:
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


class WorkerLostError(ConnectionError):
    """Another worker is lost, so no further step is possible.

    Attributes:
        exit_code: 75, which tells a supervisor to start the workers again.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class OutOfMemoryError(MemoryError):
    """Memory is exhausted in a step or an evaluation, so that smaller micro-batches may help."""


class StopRequests:
    """Handles SIGINT and SIGTERM inside a `with` block.

    Before the steps, SIGINT interrupts at once. The signal is also remembered, because Python or
    TensorFlow may swallow the KeyboardInterrupt while a model is built. During the steps the first
    signal is only remembered, and a second SIGINT interrupts.

    Attributes:
        signal_number: the first signal received, or 0.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._interrupting: tuple[int, ...] = (signal.SIGINT,)  # whichever comes first
        self._previous_handlers: dict[int, Any] = {}

    def begin_steps(self) -> None:
        """From now on the first signal is only remembered."""
        self._interrupting = ()

    def end_steps(self) -> None:
        """From now on each signal interrupts at once; so does one that is already remembered."""
        self._interrupting = _SIGNALS
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
        is_second = bool(self.signal_number)
        self.signal_number = self.signal_number or number
        if number in self._interrupting or (is_second and number == signal.SIGINT):
            raise KeyboardInterrupt
