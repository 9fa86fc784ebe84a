"""Tests of keras_vit.training.checkpoints, and of what Ctrl-C and SIGTERM do to a training."""

import concurrent.futures
import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import CROSS_ENTROPY, TINY, randomize

from keras_vit import VisionTransformer, backend
from keras_vit.cli.main import Interrupts
from keras_vit.optimizers import MomentumSGD
from keras_vit.training import checkpoints as saving
from keras_vit.training.loop import StopRequests


def compiled(*, jit_compile: bool = False) -> VisionTransformer:
    config = dataclasses.replace(TINY, num_layers=1, dropout_rate=0.2, patch_dropout_rate=0.2)
    model = VisionTransformer(config)
    model.compile(MomentumSGD(0.1), CROSS_ENTROPY, jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    return model


def state_of(model: VisionTransformer) -> list[np.ndarray]:
    return [np.array(backend.values_of(variable)) for variable in saving.state_variables(model)]


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    """Values to the bit, those in bfloat16 too; floats of the progress; the best weights.

    Older ones go, other files stay, and folders, which are another engine's, are none.
    """
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-00000003").mkdir()
    model = compiled()  # whose momentum is in bfloat16
    assert "bfloat16" in {str(array.dtype) for array in state_of(model)}
    randomize(model)
    checkpoints, before = saving.NumpyCheckpoints(model, tmp_path), state_of(model)
    best = [array + 1 for array in before[:3]]
    for step in (8, 9, 10, 100_000_000):
        checkpoints.begin(step, progress={"loss": 1 / 3}, best=best)()
    assert checkpoints.steps() == [9, 10, 100_000_000]
    assert len(list(tmp_path.iterdir())) == 5
    saving.set_state(model, [np.zeros_like(array) for array in before])
    found = checkpoints.load(10)
    assert (found.step, found.progress) == (10, {"loss": 1 / 3})
    found.restore()
    for array, expected in zip([*state_of(model), *found.best], [*before, *best], strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)
    with pytest.raises(ValueError, match=r"of another model or optimizer: it has \d+ arrays"):
        saving.set_state(model, before[1:])
    checkpoints.remove_after(10)
    assert checkpoints.steps() == [9, 10]


def test_damage_is_told(tmp_path: Path) -> None:
    """Any flipped bit that would change a value, and a file that is cut, are named."""
    model = compiled()
    checkpoints, expected = saving.NumpyCheckpoints(model, tmp_path), state_of(model)
    checkpoints.begin(1, progress={}, best=[])()
    file = checkpoints.path(1)
    content, harmless = file.read_bytes(), 0
    for place in range(0, len(content), len(content) // 50):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with contextlib.suppress(saving.DamagedError):
            loaded = checkpoints.load(1)
            loaded.restore()
            for array, before in zip(state_of(model), expected, strict=True):
                np.testing.assert_array_equal(array, before)
            harmless += 1  # a byte of a header that says nothing, as a time
    assert harmless < 25
    file.write_bytes(content[:300])
    with pytest.raises(saving.DamagedError, match=r"checkpoint-00000001.npz' is damaged$"):
        checkpoints.load(1)


@pytest.mark.full
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_a_copy_does_not_change_with_the_model(jit_compile: bool, tmp_path: Path) -> None:
    """Every variable, the optimizer's and random states too, in the same memory each time."""
    model = compiled(jit_compile=jit_compile)
    images = np.zeros((2, *TINY.input_shape), np.float32)
    checkpoints = saving.NumpyCheckpoints(model, tmp_path)
    places: set[tuple[int, ...]] = set()
    for step in range(3):
        expected = state_of(model)
        write = checkpoints.begin(step, progress={}, best=[])
        places.add(tuple(copy.ctypes.data for copy in checkpoints._copies))
        model.fit(images, np.array([0, 1]), verbose=0)
        after = state_of(model)
        write()
        checkpoints.load(step).restore()
        for before, restored in zip(expected, state_of(model), strict=True):
            np.testing.assert_array_equal(restored, before)
        saving.set_state(model, after)
    assert sum(not np.array_equal(a, b) for a, b in zip(after, expected, strict=True)) > 10
    assert len(places) == 1


def test_before_the_steps_ctrl_c_interrupts_and_is_remembered() -> None:
    """Where the interruption is swallowed, as in the middle of building a model, it is not lost."""
    with StopRequests() as requests:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert requests.signal_number == signal.SIGINT


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_between_steps_the_first_signal_waits(kind: signal.Signals) -> None:
    """It is remembered; a second Ctrl-C interrupts, a second SIGTERM does not."""
    with StopRequests() as requests:
        requests.begin_steps()
        signal.raise_signal(kind)
        signal.raise_signal(signal.SIGTERM)
        assert requests.signal_number == kind
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back() -> None:
    """After an error too; other threads train without: the main thread alone gets signals."""
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(ZeroDivisionError), StopRequests():
        assert signal.getsignal(signal.SIGTERM) != before
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == before

    def run() -> int:
        with StopRequests() as requests:
            return requests.signal_number

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(run).result() == 0


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    """Python's own handler: a shell that starts the tests in the background has none set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupt")
def test_an_interruption_that_was_swallowed_before_is_not_lost() -> None:
    """The command line remembers it, and a training does not begin; handlers are put back."""
    before = signal.getsignal(signal.SIGINT)

    def begin() -> None:
        with StopRequests():
            pytest.fail("it has begun")

    with Interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        remembering = signal.getsignal(signal.SIGINT)
        assert remembering is not before
        with pytest.raises(KeyboardInterrupt):
            begin()
        assert signal.getsignal(signal.SIGINT) is remembering
    assert signal.getsignal(signal.SIGINT) is before
    with Interrupts(), StopRequests() as requests:
        assert not requests.signal_number
