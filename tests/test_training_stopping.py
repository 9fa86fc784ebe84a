"""Tests of what Ctrl-C and SIGTERM do while a model is trained."""

import concurrent.futures
import contextlib
import signal
from collections.abc import Iterator

import pytest

from keras_vit.cli.main import Interrupts
from keras_vit.training.loop import StopRequests


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
