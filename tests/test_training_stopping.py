"""Tests of keras_vit.training.loop."""

import signal
import threading

import pytest

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
    """After an error too."""
    before = signal.getsignal(signal.SIGTERM)

    def fail() -> None:
        with StopRequests():
            assert signal.getsignal(signal.SIGTERM) != before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_threads_train_without_signals() -> None:
    """Python gives signals to the main thread alone."""
    found: list[int] = []

    def run() -> None:
        with StopRequests() as requests:
            found.append(requests.signal_number)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [0]
