"""Tests of keras_vit.training.checkpoints."""

import dataclasses
import threading
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest
from conftest import TINY

from keras_vit import VisionTransformer
from keras_vit.training import MomentumSGD
from keras_vit.training.checkpoints import (
    Checkpoints,
    Copies,
    DamagedError,
    Writer,
    get_state,
    set_state,
    state_hash,
    state_variables,
)

ARRAYS = {
    "00000": np.arange(6, dtype=np.float32).reshape(2, 3),
    "00001": np.array([1.5, -2], ml_dtypes.bfloat16),
    "00002": np.array(7, np.int64),
}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    """Values, shapes and dtypes, bfloat16 too; floats of the progress to the bit."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(12, ARRAYS, progress={"loss": 1 / 3})
    arrays, progress = checkpoints.load(12)

    assert progress == {"loss": 1 / 3}
    assert {name: value.dtype for name, value in arrays.items()} == {
        name: value.dtype for name, value in ARRAYS.items()
    }
    for name, value in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], value)


def test_the_last_are_kept(tmp_path: Path) -> None:
    """Older ones go, other files stay."""
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 100_000_000):
        checkpoints.save(step, ARRAYS, progress={})

    assert checkpoints.steps() == [10, 100_000_000]
    assert (tmp_path / "notes.txt").exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_damage_is_told(tmp_path: Path) -> None:
    """A flipped byte, and a file that is cut, are named."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, ARRAYS, progress={})
    file = tmp_path / "checkpoint-00000001.npz"
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    for damaged in (bytes(content), bytes(content[:300])):
        file.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"checkpoint-00000001.npz' is damaged$"):
            checkpoints.load(1)


def compiled(rate: float = 0.2, *, jit_compile: bool = False) -> VisionTransformer:
    config = dataclasses.replace(TINY, num_layers=1, dropout_rate=rate, patch_dropout_rate=rate)
    model = VisionTransformer(config)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(MomentumSGD(0.1), loss, jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    return model


def train(model: VisionTransformer) -> None:
    model.fit(np.ones((2, 32, 48, 3)), np.zeros(2), verbose=0)


def test_a_state_is_all_that_training_changes() -> None:
    """Put into another model, it goes on alike: weights, momenta, step, random states."""
    first, second = compiled(), compiled()
    train(first)
    assert state_hash(first) != state_hash(second)

    set_state(second, get_state(first))
    assert state_hash(second) == state_hash(first)
    for model in (first, second):
        train(model)
    assert state_hash(second) == state_hash(first)


def test_a_state_of_another_model_is_an_error() -> None:
    """The first difference is named."""
    with pytest.raises(ValueError, match=r"of another model or optimizer: it has \d+ arrays"):
        set_state(compiled(), get_state(compiled(rate=0.0)))


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_a_copy_does_not_change_with_the_model(jit_compile: bool) -> None:
    """Every variable, the optimizer's and random states too, in the same memory each time."""
    model = compiled(jit_compile=jit_compile)
    images = np.zeros((2, *TINY.input_shape), np.float32)
    copies = Copies(state_variables(model))
    places: set[tuple[int, ...]] = set()
    for _ in range(3):
        expected = [np.array(value) for value in get_state(model).values()]
        taken = copies.take()
        model.fit(images, np.array([0, 1]), verbose=0)
        for before, copy in zip(expected, taken, strict=True):
            assert copy.dtype == before.dtype
            np.testing.assert_array_equal(copy, before)
        places.add(tuple(copy.ctypes.data for copy in taken))
    assert len(places) == 1
    after = get_state(model).values()
    assert sum(not np.array_equal(a, b) for a, b in zip(after, taken, strict=True)) > 10


def test_a_writer_does_one_thing_at_a_time() -> None:
    """In its own thread; waiting ends in time, and an error comes out once."""
    writer, gate, done = Writer(), threading.Event(), []

    def work(name: str) -> None:
        gate.wait()
        done.append((name, threading.current_thread() is threading.main_thread()))

    assert writer.is_free(within=0)
    writer.begin(lambda: work("first"))
    assert not writer.is_free(within=0.01)
    gate.set()
    writer.begin(lambda: work("second"))
    writer.wait()
    assert done == [("first", False), ("second", False)]
    writer.begin(lambda: np.load("no such file"))
    with pytest.raises(FileNotFoundError):
        writer.wait()
    assert writer.is_free(within=0)
    writer.begin(lambda: work("third"))
    writer.close()
    assert len(done) == 3
