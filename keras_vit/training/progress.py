"""Watches a training: tells what happened, counts the time left, keeps the best epoch."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDone:
    """One step of training is over.

    Attributes:
        step: steps so far, from 1.
        steps: steps in all.
        epoch: the epoch it belongs to, from 1.
        seconds_left: estimate for the rest; None before the second step.
    """

    step: int
    steps: int
    epoch: int
    seconds_left: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochDone:
    """One epoch is over, and measured on the validation images.

    Attributes:
        epoch: from 1.
        epochs: epochs in all.
        loss: mean cross-entropy of the training images, varied and with smoothed labels.
        accuracy: fraction of the training images, varied, that were right.
        validation_loss: mean cross-entropy of the validation images.
        validation_accuracy: fraction of the validation images that were right.
        learning_rate: of the epoch's last step.
        seconds: wall time of the epoch.
        seconds_left: estimate for the rest.
        is_best: whether it is the best epoch so far.
    """

    epoch: int
    epochs: int
    loss: float
    accuracy: float
    validation_loss: float
    validation_accuracy: float
    learning_rate: float
    seconds: float
    seconds_left: float
    is_best: bool


Event = StepDone | EpochDone


class Watcher(keras.callbacks.Callback):
    """Reports each step and epoch, and keeps the weights of the best epoch.

    The best epoch has the lowest validation loss. Accuracy would be the coarser judge: over 179
    images it cannot tell most epochs apart, and then an early one wins by chance.

    Args:
        epochs: epochs in all.
        steps: steps in all.
        on_event: called with every `StepDone` and `EpochDone`.
    """

    def __init__(
        self, *, epochs: int, steps: int, on_event: Callable[[Event], None] | None = None
    ) -> None:
        super().__init__()
        self.history: list[EpochDone] = []
        self.best: EpochDone | None = None
        self.best_weights: list[np.ndarray] = []
        self._epochs, self._steps = epochs, steps
        self._on_event = on_event or (lambda event: None)
        self._step = 0
        self._first_step_end = self._epoch_start = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch_start = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step += 1
        if self._step == 1:  # it compiles, and says nothing about the others
            self._first_step_end = time.monotonic()
        epoch = len(self.history) + 1
        left = self._seconds_left() if self._step > 1 else None
        self._on_event(StepDone(step=self._step, steps=self._steps, epoch=epoch, seconds_left=left))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        if not math.isfinite(logs["loss"]):
            raise ValueError(
                f"The training loss is {logs['loss']} after epoch {epoch + 1}; "
                "try a smaller learning rate."
            )
        is_best = self.best is None or logs["val_loss"] < self.best.validation_loss
        done = EpochDone(
            epoch=epoch + 1,
            epochs=self._epochs,
            loss=logs["loss"],
            accuracy=logs["accuracy"],
            validation_loss=logs["val_loss"],
            validation_accuracy=logs["val_accuracy"],
            learning_rate=float(self.model.optimizer.learning_rate),
            seconds=time.monotonic() - self._epoch_start,
            seconds_left=self._seconds_left(),
            is_best=is_best,
        )
        self._record(done)
        self._on_event(done)

    def _record(self, done: EpochDone) -> None:
        weights = self.model.get_weights() if done.is_best else []
        # An interruption may come between any two lines: the epoch and its weights change together.
        self.history.append(done)
        if done.is_best:
            self.best, self.best_weights = done, weights

    def _seconds_left(self) -> float:
        passed = time.monotonic() - self._first_step_end
        return passed / max(self._step - 1, 1) * (self._steps - self._step)
