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
from trainings import CONFIG, Listener, in_memory, noise, state, stop

from keras_vit import backend, training
from keras_vit.data import Resizing
from keras_vit.optimizers import Cooldown
from keras_vit.training import Execution, PlanChanged, Recipe, Run, train
from keras_vit.training.execution import Job
from keras_vit.training.train import make_engine

# On noise, whose validation loss soon only rises.
RECIPE = Recipe(epochs=20, batch_size=8, learning_rate=0.03, patience=3, average=0.5)
FIXED = dataclasses.replace(RECIPE, epochs=4, patience=None)
SKEWED = np.array([0] * 20 + [1] * 8 + [2] * 4, np.int32)


DATA = in_memory(noise(SKEWED), noise(np.arange(16) % 3))
DEFAULTS: dict[str, Any] = {"data": DATA, "model": CONFIG, "recipe": RECIPE}
BALANCED = dataclasses.replace(
    FIXED, balance=True, label_smoothing=0.1, mixup=0.4, epochs=2, average=None
)


def trained(out: Path, **options: Any) -> tuple[Run, Listener]:
    """Trains, or goes on where it was stopped before."""
    listener = Listener()
    run = train(**{**DEFAULTS, **options}, out=out, on_event=listener, existing="resume")
    return run, listener


def stopped(out: Path, *, at: int, **options: Any) -> None:
    stop(train, at=at, **{**DEFAULTS, **options}, out=out)


def changes(listener: Listener) -> list[PlanChanged]:
    return [event for event in listener.events if isinstance(event, PlanChanged)]


def rates(run: Run) -> list[float]:
    lines = (run.path / "history.csv").read_text().splitlines()
    place = lines[0].split(",").index("learning_rate")
    return [float(line.split(",")[place]) for line in lines[1:]]


@dataclasses.dataclass
class Cooled:
    """A training whose patience runs out, and the symbolic calls of its schedule at each step."""

    run: Run
    listener: Listener
    traces: list[int]


@pytest.fixture(scope="module")
def cooled(tmp_path_factory: pytest.TempPathFactory) -> Cooled:
    """Tests must not change it."""
    call, calls, traces, listener = Cooldown.__call__, [], [], Listener()

    def counted(self: Cooldown, step: Any) -> Any:
        rate = call(self, step)
        calls.append(not backend.is_concrete(rate))
        return rate

    def listen(event: Any) -> None:
        traces.append(sum(calls))
        listener(event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cooldown, "__call__", counted)
        run = train(**DEFAULTS, out=tmp_path_factory.mktemp("cooled") / "run", on_event=listen)
    return Cooled(run, listener, traces)


def test_patience_ends_a_training_by_a_falling_rate(cooled: Cooled) -> None:
    """Three epochs without a lower loss, then one in which the rate falls to zero.

    The step is not compiled again for it: the schedule is traced with the first one.
    """
    run, listener = cooled.run, cooled.listener
    result = run.config["result"]
    began = result["cooldown_epoch"]
    assert began == result["best_epoch"] + 3
    assert (result["finished"], result["epochs"], result["steps"]) == (
        True,
        began + 1,
        4 * began + 4,
    )
    falling = rates(run)
    assert falling[-1] == 0.0
    assert falling[-2] > 0.02
    (change,) = changes(listener)
    assert (change.reason, change.step, change.steps) == ("patience", 4 * began, 4 * began + 4)
    told = (
        f"not fallen since epoch {began - 3}: the learning rate falls from {falling[-2]:.2g} to 0"
    )
    assert told in change.text
    epochs = [event.epochs for event in listener.events if isinstance(event, training.EpochDone)]
    assert epochs[-2:] == [20, began + 1]
    assert cooled.traces[0] == cooled.traces[-1] > 0


@pytest.mark.full
def test_patience_that_does_not_run_out_changes_nothing(tmp_path: Path) -> None:
    """To the bit; nor does one that runs out where the training ends as soon."""
    losses = []
    for patience in (None, 20):
        recipe = dataclasses.replace(FIXED, epochs=2, patience=patience)
        run, listener = trained(tmp_path / str(patience), recipe=recipe)
        assert not changes(listener)
        losses.append(run.config["result"]["validation_loss"])
    assert losses[0] == losses[1]
    recipe = dataclasses.replace(RECIPE, learning_rate=1e-12, patience=1, epochs=3)
    assert trained(tmp_path / "short", recipe=recipe)[0].config["result"]["epochs"] == 3


@pytest.mark.full
def test_epochs_are_raised_where_a_training_is_resumed(tmp_path: Path) -> None:
    """The steps taken stay; from there the longer schedule holds, also when resumed again."""
    out, longer = tmp_path / "run", dataclasses.replace(FIXED, epochs=6)
    stopped(out, at=9, recipe=FIXED)
    shutil.copytree(tmp_path / "run.unfinished", tmp_path / "again.unfinished")
    raised, listener = trained(out, recipe=longer)
    (change,) = changes(listener)
    assert (change.reason, change.step, change.steps) == ("epochs", 9, 24)
    assert "step 9 of 16, to train 24 steps (6 epochs in place of 4)" in change.text
    before, after = (
        training.recipe.make_schedule(each, each.plan(images=32)) for each in (FIXED, longer)
    )
    expected = [before(4), before(8), *map(after, (12, 16, 20, 24))]
    np.testing.assert_allclose(rates(raised), np.array(expected, float), atol=1e-8)

    again = tmp_path / "again"
    stopped(again, at=14, recipe=longer)
    recorded = json.loads((tmp_path / "again.unfinished" / "settings.json").read_text())
    assert recorded["recipe"]["epochs"] == 6
    with pytest.raises(
        ValueError, match=r"epochs=6, not 4; epochs \(--epochs\) may be raised, not"
    ):
        trained(again, recipe=FIXED)
    assert state(trained(again, recipe=longer)[0]) == state(raised)

    with pytest.raises(ValueError, match=r"finished after 6 epochs, .* \(--weights .*run; model="):
        trained(out, recipe=dataclasses.replace(FIXED, epochs=7))
    assert state(trained(out, recipe=longer)[0]) == state(raised)


@pytest.mark.full
def test_a_falling_rate_goes_on_falling(cooled: Cooled, tmp_path: Path) -> None:
    """It does not begin anew where it is resumed, and epochs are not raised: a sentence says how.

    Before and after it began to fall, tests/test_training_kills.py kills a training.
    """
    out = tmp_path / "run"
    stopped(out, at=cooled.run.config["result"]["steps"] - 1)
    with pytest.raises(ValueError, match=r"patience ran out after epoch .* Resume with 20 epochs"):
        trained(out, recipe=dataclasses.replace(RECIPE, epochs=30))
    run, listener = trained(out)
    assert not changes(listener)
    assert (state(run), rates(run)) == (state(cooled.run), rates(cooled.run))
    with pytest.raises(ValueError, match=r"recipe.patience=3, not 4; resume it with the same"):
        trained(out, recipe=dataclasses.replace(RECIPE, patience=4))


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
def test_exhausted_memory_accumulates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last checkpoint on all is as if batches had been split in two from there."""
    execution = Execution(checkpoint_steps=3)
    in_parts = dataclasses.replace(execution, gradient_accumulation_steps=2)
    stopped(tmp_path / "other", at=6, recipe=FIXED, execution=execution)
    halved, _ = trained(tmp_path / "other", recipe=FIXED, execution=in_parts)
    engine = type(make_engine(execution))
    monkeypatch.setattr(engine, "step", exhaust(engine, at=8, calls=[]))
    run, listener = trained(tmp_path / "run", recipe=FIXED, execution=execution)
    (change,) = changes(listener)
    assert (change.reason, change.step, change.steps) == ("memory", 6, 16)
    text = "at step 8: from step 7 on each batch is computed in 2 micro-batches of about 4"
    assert text in change.text
    assert run.config["execution"]["gradient_accumulation_steps"] == 2
    assert state(run) == state(halved)


def test_memory_for_one_image_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are halved down to one image; then the sentence says what to do."""
    execution, listener = Execution(gradient_accumulation_steps=4), Listener()

    def step(self: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(type(make_engine(execution)), "step", step)
    arguments = {**DEFAULTS, "recipe": FIXED, "execution": execution, "on_event": listener}
    with pytest.raises(MemoryError, match=r"step 1; .* are kept: free some memory and resume"):
        train(**arguments, out=tmp_path / "run")
    (change,) = changes(listener)
    assert " in 8 micro-batches of about 1 images (" in change.text


def test_parts_are_halved_by_their_largest() -> None:
    """The first part has what the others leave over; replicas share a batch before.

    Validation takes no more images at once than a part has.
    """
    data = dataclasses.replace(DATA, train=noise(np.zeros(128)))
    for size, parts in (
        (64, [2, 4, 8, 16, 32, 64]),
        (48, [2, 4, 8, 16, 24, 48]),
        (7, [2, 6, 7]),
        (1, []),
    ):
        recipe = dataclasses.replace(FIXED, batch_size=2 * size)
        smaller = Job(data, recipe=recipe, execution=Execution()).with_more_accumulation(replicas=2)
        actual: list[int] = []
        while smaller is not None:
            actual.append(smaller.execution.gradient_accumulation_steps)
            smaller = smaller.with_more_accumulation(replicas=2)
        assert actual == parts, size
        single = Job(data, recipe=recipe, execution=Execution(gradient_accumulation_steps=2 * size))
        assert single.evaluation_batch_size == 1


def test_weights_of_classes_have_a_mean_of_one() -> None:
    """Of the unsmoothed targets, mixed or not; a class without images takes no part."""
    expected = 32 / (3 * np.array([20, 8, 4]))
    for recipe in (BALANCED, dataclasses.replace(BALANCED, label_smoothing=0.0)):
        job = Job(DATA, recipe=recipe, execution=Execution())
        targets = np.eye(3)[SKEWED] * (1 - recipe.label_smoothing) + recipe.label_smoothing / 3
        actual = (targets @ job.class_weights())[:, 0]
        np.testing.assert_allclose(actual, expected[SKEWED], rtol=1e-6)
        assert actual.mean() == pytest.approx(1, rel=1e-6)
        mixed = 0.3 * targets[0] + 0.7 * targets[-1]
        weight = 0.3 * expected[0] + 0.7 * expected[2]
        assert float(mixed @ job.class_weights()[:, 0]) == pytest.approx(weight, rel=1e-6)
    fourth = dataclasses.replace(DATA, labels=("a", "b", "c", "none"))
    recipe = dataclasses.replace(BALANCED, label_smoothing=0)
    job = Job(fourth, recipe=recipe, execution=Execution())
    np.testing.assert_allclose(job.class_weights()[:3, 0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="balance=True weighs classes, and this training has no"):
        Job(DATA, recipe=BALANCED, execution=Execution(), has_labels=False)


@pytest.mark.full
def test_balance_weighs_training_and_not_validation(tmp_path: Path) -> None:
    """The first loss of a classifier of zeros is the weights' mean times log 3; parts add up.

    So do two replicas, each with images of other weights, and their patience runs out too.
    """
    recipe = dataclasses.replace(BALANCED, batch_size=16, patience=3, epochs=20)
    model = dataclasses.replace(CONFIG, dropout_rate=0.0)
    run, listener = trained(tmp_path / "run", recipe=recipe, model=model)
    batches = Job(DATA, recipe=recipe, execution=Execution()).training_batches(
        Resizing((8, 8), True), start_step=0, shard=(0, 1)
    )
    mean = np.mean(next(batches.as_numpy_iterator())[2])
    assert listener.losses[0] == pytest.approx(mean * math.log(3), rel=1e-5)
    assert abs(mean - 1) > 0.01  # or it would show nothing
    others = {"accumulated": Execution(gradient_accumulation_steps=4)}
    if keras.backend.backend() == "tensorflow":
        others["replicas"] = Execution(strategy="mirrored")
    for name, execution in others.items():
        again, two = trained(tmp_path / name, recipe=recipe, model=model, execution=execution)
        np.testing.assert_allclose(two.losses[:4], listener.losses[:4], rtol=1e-5, err_msg=name)
        assert again.config["result"]["cooldown_epoch"] is not None
    logits = run.model(DATA.validation.images.astype(np.float32), training=False)
    targets = DATA.validation.targets
    unweighted = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)
    expected = float(keras.ops.mean(unweighted))
    assert run.config["result"]["validation_loss"] == pytest.approx(expected, rel=1e-4)
    assert run.config["recipe"]["balance"] is True
