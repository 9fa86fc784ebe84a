"""What tests of training in this process share: a small model, data, and who listens to it."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from keras_vit import ViTConfig
from keras_vit.data import Augmentation, ImageData, Resizing, Split, train_batches
from keras_vit.training import Run, StepDone, TrainingInterrupted

CONFIG = ViTConfig(
    input_shape=(8, 8, 3),
    patch_size=4,
    hidden_dim=16,
    mlp_dim=16,
    num_heads=2,
    num_layers=1,
    dropout_rate=0.1,
)


def noise(targets: np.ndarray) -> Split:
    """An image for each target, of which nothing can be learnt."""
    generator = np.random.default_rng(len(targets))
    images = generator.integers(0, 256, (len(targets), 8, 8, 3), np.uint8)
    return Split(images=images, targets=targets.astype(np.int32))


def batches(split: Split, **fields: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two epochs of training batches, of which `fields` say more."""
    options: dict[str, Any] = {
        "resizing": Resizing((4, 4)),
        "batch_size": 3,
        "epochs": 2,
        "seed": 7,
    }
    options |= {"augmentation": Augmentation(), **fields}
    return [(x.numpy(), y.numpy()) for x, y in train_batches(split, **options)]


def in_memory(train: Split, rest: Split, *, labels: str = "abc") -> ImageData:
    return ImageData(source="noise", labels=tuple(labels), train=train, validation=rest, test=rest)


@dataclasses.dataclass
class Listener:
    """Keeps the events of a training, and interrupts it after a step."""

    stop_at: int = 0
    events: list[Any] = dataclasses.field(default_factory=list)

    def __call__(self, event: Any) -> None:
        self.events.append(event)
        if isinstance(event, StepDone) and event.step == self.stop_at:
            raise KeyboardInterrupt

    @property
    def losses(self) -> list[float]:
        return [event.loss for event in self.events if isinstance(event, StepDone)]


def stop(function: Callable[..., Run], *, at: int, **arguments: Any) -> TrainingInterrupted:
    """Trains until after a step, from the beginning or from where it was stopped before."""
    with pytest.raises(TrainingInterrupted, match=r"a checkpoint is in .*\.unfinished") as stopped:
        function(**arguments, existing="resume", on_event=Listener(at))
    return stopped.value


def state(run: Run) -> str:
    return str(run.config["result"]["state_sha256"])


def not_refused(
    calls: Iterable[tuple[Callable[[], object], str]],
    errors: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> list[str]:
    """Of calls that must raise such an error with such a text, those that do otherwise.

    The text is a pattern, and is looked for in "ValueError: what the error says".
    """
    wrong = []
    for number, (call, text) in enumerate(calls):
        said = "no error"
        try:
            call()
        except errors as error:
            said = f"{type(error).__name__}: {error}"
        if not re.search(text, said):
            wrong.append(f"call {number}: {said!r} is not {text!r}")
    return wrong
