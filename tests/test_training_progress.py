"""Tests of keras_vit.training.progress."""

from typing import Any

import keras
import numpy as np
import pytest

from keras_vit.training import EpochDone, StepDone
from keras_vit.training.progress import Watcher


def watch(epochs: list[tuple[float, float]], **fields: Any) -> Watcher:
    """Feeds a watcher one step and one (accuracy, loss) of validation per epoch."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    watcher = Watcher(epochs=len(epochs), steps=len(epochs), **fields)
    watcher.set_model(model)
    for epoch, (accuracy, loss) in enumerate(epochs):
        watcher.on_epoch_begin(epoch)
        model.set_weights([np.full((1, 1), epoch + 1.0), np.zeros(1)])
        watcher.on_train_batch_end(0)
        logs = {"loss": 1.0, "accuracy": 0.5, "val_accuracy": accuracy, "val_loss": loss}
        watcher.on_epoch_end(epoch, logs)
    return watcher


# (validation accuracy, validation loss) of each epoch -> the best one, from 1.
BEST = [
    ([(0.5, 1.0), (0.9, 2.0), (0.8, 0.1)], 3),
    ([(0.9, 0.5), (0.9, 0.4), (0.9, 0.6)], 2),
    ([(0.9, 0.5), (0.9, 0.5)], 1),
]


@pytest.mark.parametrize(("epochs", "best"), BEST)
def test_the_best_epoch_is_the_one_of_least_validation_loss(
    epochs: list[tuple[float, float]], best: int
) -> None:
    """Its weights are kept, whatever came after."""
    watcher = watch(epochs)

    assert watcher.best is not None
    assert watcher.best.epoch == best
    assert watcher.best_weights[0].item() == best


def test_events_come_in_order_and_are_complete() -> None:
    """Each step and each epoch is told once, with what is left to do."""
    events: list[Any] = []
    watch([(0.5, 1.0), (0.6, 0.9)], on_event=events.append)

    assert [type(event) for event in events] == [StepDone, EpochDone] * 2
    assert [event.step for event in events[::2]] == [1, 2]
    assert events[0].seconds_left is None
    assert events[2].seconds_left == 0
    assert [event.is_best for event in events[1::2]] == [True, True]
    assert events[1].validation_accuracy == 0.5


def test_a_loss_that_is_no_number_stops_the_training() -> None:
    """The sentence says what to try."""
    watcher = watch([(0.5, 1.0)])

    with pytest.raises(ValueError, match=r"loss is nan after epoch 2; try a smaller learning rate"):
        watcher.on_epoch_end(1, {"loss": float("nan")})
