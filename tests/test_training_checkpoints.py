"""Tests of keras_vit.training.checkpoints."""

import dataclasses
import sys
import threading
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest
from conftest import TINY

from keras_vit import VisionTransformer
from keras_vit.training import MomentumSGD
from keras_vit.training.checkpoints import Checkpoints, DamagedError, Saver
from keras_vit.training.loop import Writer
from keras_vit.training.state import Copies, get_state, set_state, state_variables

ARRAYS = {
    "00000": np.arange(6, dtype=np.float32).reshape(2, 3),
    "00001": np.array([1.5, -2], ml_dtypes.bfloat16),
    "00002": np.array(7, np.int64),
}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    """Values, shapes and dtypes, bfloat16 too; floats of the progress to the bit.

    Older ones go, other files stay.
    """
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 100_000_000):
        checkpoints.save(step, ARRAYS, progress={"loss": 1 / 3})
    assert checkpoints.steps() == [10, 100_000_000]
    assert (tmp_path / "notes.txt").exists()
    assert len(list(tmp_path.iterdir())) == 3

    arrays, progress = checkpoints.load(10)
    assert progress == {"loss": 1 / 3}
    assert arrays.keys() == ARRAYS.keys()
    for name, value in ARRAYS.items():
        assert arrays[name].dtype == value.dtype
        np.testing.assert_array_equal(arrays[name], value)


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


def published(checkpoints: Checkpoints, step: int) -> Path:
    """A checkpoint that is a folder: two files, one of them in a folder of its own."""
    stage = checkpoints.stage(step)
    (stage / "state").mkdir(parents=True)
    (stage / "manifest").write_bytes(b"what is where")
    (stage / "state" / "part").write_bytes(bytes(range(99)))
    checkpoints.publish(step, record={"progress": {"loss": 1 / 3}, "arrays": []})
    checkpoints.remove_old()
    return checkpoints.shared(step)


def test_folders_are_checkpoints_beside_files(tmp_path: Path) -> None:
    """Of all workers in one folder; the last are kept of both kinds, and one of each step."""
    own = tmp_path / "own"
    own.mkdir()
    checkpoints = Checkpoints(own, keep=2, common=tmp_path)
    checkpoints.save(1, ARRAYS, progress={})
    for step in (2, 3, 3):
        published(checkpoints, step)
    assert checkpoints.steps() == [2, 3]
    assert Checkpoints(tmp_path / "another's", keep=2, common=tmp_path).steps() == [2, 3]
    assert checkpoints.load_record(3)["progress"] == {"loss": 1 / 3}
    checkpoints.save(3, ARRAYS, progress={})  # another backend, at the same step
    assert checkpoints.steps() == [2, 3]
    assert not checkpoints.shared(3).exists()
    published(checkpoints, 4)
    checkpoints.remove_after(3)
    assert checkpoints.steps() == [3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["own"]


def test_damage_of_a_folder_is_told(tmp_path: Path) -> None:
    """Any byte of any file, a cut and a lost file; each process finds what is in its part."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    folder = published(checkpoints, 1)
    for file in (path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damaged in (bytes(flipped), content[:-1], b"", None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(DamagedError, match=r"checkpoint-00000001' is damaged$"):
                checkpoints.load_record(1)
        file.write_bytes(content)
        assert checkpoints.load_record(1)["arrays"] == []
    (folder / "state" / "part").write_bytes(b"")
    checkpoints.load_record(1, part=(0, 2))
    with pytest.raises(DamagedError):
        checkpoints.load_record(1, part=(1, 2))


def test_what_jax_saved_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what to install, and the checkpoint stays."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    folder = published(checkpoints, 1)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    text = r"checkpoint-00000001' is kept; .*not installed; run: pip install orbax-checkpoint"
    with pytest.raises(ImportError, match=text):
        Saver(compiled(), checkpoints).load(1)
    assert folder.is_dir()


def compiled(rate: float = 0.2, *, jit_compile: bool = False) -> VisionTransformer:
    config = dataclasses.replace(TINY, num_layers=1, dropout_rate=rate, patch_dropout_rate=rate)
    model = VisionTransformer(config)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(MomentumSGD(0.1), loss, jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    return model


def test_a_state_of_another_model_is_an_error() -> None:
    """The first difference is named."""
    with pytest.raises(ValueError, match=r"of another model or optimizer: it has \d+ arrays"):
        set_state(compiled(), get_state(compiled(rate=0.0)))


@pytest.mark.full
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_a_copy_does_not_change_with_the_model(jit_compile: bool) -> None:
    """Every variable, the optimizer's and random states too, in the same memory each time."""
    model = compiled(jit_compile=jit_compile)
    images = np.zeros((2, *TINY.input_shape), np.float32)
    copies = Copies(state_variables(model))
    copies.prepare()  # in a thread, which `take` waits for
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
