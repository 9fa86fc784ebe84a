"""Trainings that go on otherwise than planned: patience, more epochs, less memory, and balance."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit import ViTConfig, backend, training
from keras_vit.data import ImageData, Split
from keras_vit.optimizers import Cooldown
from keras_vit.training import Execution, PlanChanged, Recipe, Run, StepDone, TrainingInterrupted
from keras_vit.training.execution import Job, Resizing

CONFIG = ViTConfig(
    input_shape=(8, 8, 3),
    patch_size=4,
    hidden_dim=16,
    mlp_dim=16,
    num_heads=1,
    num_layers=1,
    dropout_rate=0.1,
)
# On noise, whose validation loss soon only rises.
RECIPE = Recipe(epochs=20, batch_size=8, learning_rate=0.03, patience=3, average=0.5)
FIXED = dataclasses.replace(RECIPE, epochs=4, patience=None)
SKEWED = np.array([0] * 20 + [1] * 8 + [2] * 4, np.int32)


def noise(targets: np.ndarray) -> Split:
    generator = np.random.default_rng(len(targets))
    images = generator.integers(0, 256, (len(targets), 8, 8, 3), np.uint8)
    return Split(images=images, targets=targets)


@pytest.fixture(scope="module")
def data() -> ImageData:
    """Noise in three classes of very different size."""
    train, rest = noise(SKEWED), noise(np.arange(16, dtype=np.int32) % 3)
    return ImageData(
        source="noise", labels=("a", "b", "c"), train=train, validation=rest, test=rest
    )


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
    def changes(self) -> list[PlanChanged]:
        return [event for event in self.events if isinstance(event, PlanChanged)]


def train(data: ImageData, out: Path, *, stop_at: int = 0, **options: Any) -> tuple[Run, Listener]:
    """Trains, or stops after a step; goes on where it was stopped before."""
    listener = Listener(stop_at)
    options = {"recipe": RECIPE, "model": CONFIG, **options}
    trained = training.train(data, out=out, on_event=listener, existing="resume", **options)
    return trained, listener


def stop(data: ImageData, out: Path, *, at: int, **options: Any) -> None:
    with pytest.raises(TrainingInterrupted):
        train(data, out, stop_at=at, **options)


def rates(trained: Run) -> list[float]:
    """The learning rate after each epoch."""
    lines = (trained.path / "history.csv").read_text().splitlines()
    place = lines[0].split(",").index("learning_rate")
    return [float(line.split(",")[place]) for line in lines[1:]]


def state(trained: Run) -> str:
    return str(trained.config["result"]["state_sha256"])


@pytest.fixture(scope="module")
def traces() -> list[int]:
    """The symbolic calls of the schedule so far, at each step of `cooled`."""
    return []


@pytest.fixture(scope="module")
def cooled(
    data: ImageData, tmp_path_factory: pytest.TempPathFactory, traces: list[int]
) -> tuple[Run, Listener]:
    """A training whose patience runs out; tests must not change it."""
    call, calls = Cooldown.__call__, []

    def counted(self: Cooldown, step: Any) -> Any:
        rate = call(self, step)
        calls.append(not backend.is_concrete(rate))
        return rate

    class Counting(Listener):
        def __call__(self, event: Any) -> None:
            traces.append(sum(calls))
            super().__call__(event)

    listener = Counting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cooldown, "__call__", counted)
        trained = training.train(
            data,
            out=tmp_path_factory.mktemp("cooled") / "run",
            model=CONFIG,
            recipe=RECIPE,
            on_event=listener,
        )
    return trained, listener


def test_patience_ends_a_training_by_a_falling_rate(cooled: tuple[Run, Listener]) -> None:
    """Three epochs without a lower loss, then one in which the rate falls to zero."""
    trained, listener = cooled
    result = trained.config["result"]
    began = result["cooldown_epoch"]
    assert began == result["best_epoch"] + 3
    assert (result["finished"], result["epochs"], result["steps"]) == (
        True,
        began + 1,
        4 * began + 4,
    )
    falling = rates(trained)
    assert falling[-1] == 0.0
    assert falling[-2] > 0.02
    (change,) = listener.changes
    assert (change.reason, change.step, change.steps) == ("patience", 4 * began, 4 * began + 4)
    told = (
        f"not fallen since epoch {began - 3}: the learning rate falls from {falling[-2]:.2g} to 0"
    )
    assert told in change.text
    epochs = [event.epochs for event in listener.events if isinstance(event, training.EpochDone)]
    assert epochs[-2:] == [20, began + 1]


def test_the_step_is_not_compiled_again_for_it(
    cooled: tuple[Run, Listener], traces: list[int]
) -> None:
    """The schedule is traced with the first step, and never after it."""
    assert traces[0] == traces[-1] > 0


@pytest.mark.full
def test_the_last_epochs_are_resumed_to_the_same_bits(
    cooled: tuple[Run, Listener], data: ImageData, tmp_path: Path
) -> None:
    """Stopped before the rate falls and while it does; it does not begin to fall again."""
    last = cooled[0].config["result"]["steps"]
    for step in (last - 6, last - 2):
        stop(data, tmp_path / "run", at=step)
    trained, listener = train(data, tmp_path / "run")
    assert not listener.changes
    assert state(trained) == state(cooled[0])
    assert rates(trained) == rates(cooled[0])
    with pytest.raises(ValueError, match=r"recipe.patience=3, not 4; resume it with the same"):
        train(data, tmp_path / "run", recipe=dataclasses.replace(RECIPE, patience=4))


@pytest.mark.full
def test_patience_that_does_not_run_out_changes_nothing(data: ImageData, tmp_path: Path) -> None:
    """To the bit; nor does one that runs out where the training ends as soon."""
    losses = []
    for patience in (None, 20):
        recipe = dataclasses.replace(FIXED, epochs=2, patience=patience)
        trained, listener = train(data, tmp_path / str(patience), recipe=recipe)
        assert not listener.changes
        losses.append(trained.config["result"]["validation_loss"])
    assert losses[0] == losses[1]
    recipe = dataclasses.replace(RECIPE, learning_rate=1e-12, patience=1, epochs=3)
    trained, listener = train(data, tmp_path / "short", recipe=recipe)
    assert trained.config["result"]["epochs"] == 3


@pytest.mark.full
def test_epochs_are_raised_where_a_training_is_resumed(data: ImageData, tmp_path: Path) -> None:
    """The steps taken stay; from there the longer schedule holds, also when resumed again."""
    out, longer = tmp_path / "run", dataclasses.replace(FIXED, epochs=6)
    stop(data, out, at=9, recipe=FIXED)
    shutil.copytree(tmp_path / "run.unfinished", tmp_path / "again.unfinished")
    raised, listener = train(data, out, recipe=longer)
    (change,) = listener.changes
    assert (change.reason, change.step, change.steps) == ("epochs", 9, 24)
    assert "step 9 of 16, to train 24 steps (6 epochs in place of 4)" in change.text
    plain = FIXED.plan(images=32)
    planned = dataclasses.replace(longer).plan(images=32)
    expected = [training.recipe.make_schedule(FIXED, plain)(step) for step in (4, 8)] + [
        training.recipe.make_schedule(longer, planned)(step) for step in (12, 16, 20, 24)
    ]
    np.testing.assert_allclose(rates(raised), np.array(expected, float), atol=1e-8)

    again = tmp_path / "again"
    stop(data, again, at=14, recipe=longer)
    recorded = json.loads((tmp_path / "again.unfinished" / "settings.json").read_text())
    assert recorded["recipe"]["epochs"] == 6
    with pytest.raises(
        ValueError, match=r"epochs=6, not 4; epochs \(--epochs\) may be raised, not"
    ):
        train(data, again, recipe=FIXED)
    assert state(train(data, again, recipe=longer)[0]) == state(raised)

    with pytest.raises(ValueError, match=r"finished after 6 epochs, .* \(--weights .*run; model="):
        train(data, out, recipe=dataclasses.replace(FIXED, epochs=7))
    assert state(train(data, out, recipe=longer)[0]) == state(raised)


@pytest.mark.full
def test_epochs_are_not_raised_while_the_rate_falls(
    cooled: tuple[Run, Listener], data: ImageData, tmp_path: Path
) -> None:
    """The sentence says how to go on."""
    last = cooled[0].config["result"]["steps"]
    stop(data, tmp_path / "run", at=last - 1)
    with pytest.raises(ValueError, match=r"patience ran out after epoch .* Resume with 20 epochs"):
        train(data, tmp_path / "run", recipe=dataclasses.replace(RECIPE, epochs=30))
    assert state(train(data, tmp_path / "run")[0]) == state(cooled[0])


def exhaust(engine: Any, *, at: int, calls: list[int]) -> Any:
    """A step that raises, once its turn has come, what the framework raises without memory."""

    def step(self: Any) -> Any:
        calls.append(0)
        if len(calls) != at:
            return plain(self)
        if keras.backend.backend() == "jax":
            import jax

            plain(self)  # its arguments' memory is given away: what a real failure leaves
            for value in jax.tree.leaves(self._state):
                value.delete()
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        import tensorflow as tf

        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    plain = engine.step
    return step


@pytest.mark.full
def test_exhausted_memory_halves_the_parts(
    data: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last checkpoint on all is as if the batches had been in two parts from there."""
    execution = Execution(checkpoint_steps=3)
    out, other = tmp_path / "run", tmp_path / "other"
    stop(data, other, at=6, recipe=FIXED, execution=execution)
    halved, _ = train(
        data, other, recipe=FIXED, execution=dataclasses.replace(execution, accumulate=2)
    )
    engine = type(execution.make_engine())
    monkeypatch.setattr(engine, "step", exhaust(engine, at=8, calls=[]))
    trained, listener = train(data, out, recipe=FIXED, execution=execution)
    (change,) = listener.changes
    assert (change.reason, change.step, change.steps) == ("memory", 6, 16)
    assert "at step 8: from step 7 on each batch is computed in 2 parts of about 4" in change.text
    assert trained.config["execution"]["accumulate"] == 2
    assert state(trained) == state(halved)


@pytest.mark.full
def test_memory_for_one_image_is_needed(
    data: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are halved down to one image; then the sentence says what to do."""
    execution, listener = Execution(accumulate=4), Listener()
    engine = type(execution.make_engine())

    def step(self: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(MemoryError, match=r"step 1; .* are kept: free some memory and resume"):
        training.train(
            data,
            out=tmp_path / "run",
            model=CONFIG,
            recipe=FIXED,
            execution=execution,
            on_event=listener,
        )
    assert [change.text.split(" in ")[1].split(" (")[0] for change in listener.changes] == [
        "8 parts of about 1 images"
    ]


@pytest.mark.parametrize(
    ("size", "parts"),
    [(64, [2, 4, 8, 16, 32, 64]), (48, [2, 4, 8, 16, 24, 48]), (7, [2, 6, 7]), (1, [])],
)
def test_parts_are_halved_by_their_largest(size: int, parts: list[int], data: ImageData) -> None:
    """The first part has what the others leave over; replicas share a batch before."""
    split = noise(np.zeros(128, np.int32))
    job = Job(
        dataclasses.replace(data, train=split),
        recipe=dataclasses.replace(FIXED, batch_size=2 * size),
        execution=Execution(),
    )
    actual: list[int] = []
    smaller = job.in_smaller_parts(replicas=2)
    while smaller is not None:
        actual.append(smaller.execution.accumulate)
        smaller = smaller.in_smaller_parts(replicas=2)
    assert actual == parts


BALANCED = dataclasses.replace(
    FIXED, balance=True, label_smoothing=0.1, mixup=0.4, epochs=2, average=None
)


def test_weights_of_classes_have_a_mean_of_one(data: ImageData) -> None:
    """Of the unsmoothed targets, mixed or not; a class without images takes no part."""
    expected = 32 / (3 * np.array([20, 8, 4]))
    for recipe in (BALANCED, dataclasses.replace(BALANCED, label_smoothing=0.0)):
        job = Job(data, recipe=recipe, execution=Execution())
        targets = np.eye(3)[SKEWED] * (1 - recipe.label_smoothing) + recipe.label_smoothing / 3
        actual = (targets @ job.class_weights())[:, 0]
        np.testing.assert_allclose(actual, expected[SKEWED], rtol=1e-6)
        assert actual.mean() == pytest.approx(1, rel=1e-6)
        mixed = 0.3 * targets[0] + 0.7 * targets[-1]
        weight = 0.3 * expected[0] + 0.7 * expected[2]
        assert float(mixed @ job.class_weights()[:, 0]) == pytest.approx(weight, rel=1e-6)
    fourth = dataclasses.replace(data, labels=("a", "b", "c", "none"))
    job = Job(
        fourth, recipe=dataclasses.replace(BALANCED, label_smoothing=0), execution=Execution()
    )
    np.testing.assert_allclose(job.class_weights()[:3, 0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="balance=True weighs classes, and this training has no"):
        Job(data, recipe=BALANCED, execution=Execution(), has_labels=False)


def losses_of_steps(listener: Listener) -> list[float]:
    return [event.loss for event in listener.events if isinstance(event, StepDone)]


@pytest.mark.full
def test_balance_weighs_training_and_not_validation(data: ImageData, tmp_path: Path) -> None:
    """The first loss of a classifier of zeros is the weights' mean times log 3; parts add up."""
    recipe = dataclasses.replace(BALANCED, batch_size=16)
    trained, listener = train(data, tmp_path / "run", recipe=recipe)
    parts = Execution(accumulate=4)
    _, others = train(data, tmp_path / "parts", recipe=recipe, execution=parts)
    weights = [
        np.asarray(batch[2])
        for batch in Job(data, recipe=recipe, execution=parts)
        .training_batches(Resizing((8, 8), True), start_step=0, shard=(0, 1))
        .as_numpy_iterator()
    ]
    losses = losses_of_steps(listener)
    assert losses[0] == pytest.approx(weights[0].mean() * math.log(3), rel=1e-5)
    assert abs(weights[0].mean() - 1) > 0.01  # or it would show nothing
    assert losses_of_steps(others)[0] == pytest.approx(losses[0], rel=1e-5)
    logits = trained.model(data.validation.images.astype(np.float32), training=False)
    targets = data.validation.targets
    unweighted = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)
    expected = float(keras.ops.mean(unweighted))
    assert trained.config["result"]["validation_loss"] == pytest.approx(expected, rel=1e-4)
    assert trained.config["recipe"]["balance"] is True


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="Strategies are TensorFlow's")
@pytest.mark.full
def test_replicas_balance_and_cool_down_as_one_device(data: ImageData, tmp_path: Path) -> None:
    """Two replicas, each with images of other weights, give the losses of one device."""
    recipe = dataclasses.replace(BALANCED, patience=3, epochs=20)
    model = dataclasses.replace(CONFIG, dropout_rate=0.0)
    alone, one = train(data, tmp_path / "one", recipe=recipe, model=model)
    several = Execution(strategy="mirrored")
    together, two = train(data, tmp_path / "two", recipe=recipe, model=model, execution=several)
    losses = losses_of_steps(one)
    np.testing.assert_allclose(losses_of_steps(two)[:4], losses[:4], rtol=1e-5)
    began = [each.config["result"]["cooldown_epoch"] for each in (alone, together)]
    assert None not in began
