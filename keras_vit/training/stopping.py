"""SIGINT and SIGTERM while a training runs: remembered, so that it stops between two steps."""

import signal
from types import FrameType
from typing import Any

_KINDS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Takes the two signals while it is entered.

    Before the steps begin SIGINT interrupts at once; but what Python or TensorFlow swallow of that,
    in the middle of building a model, is remembered too. Between steps a second SIGINT interrupts.

    Example:
        >>> with StopRequests() as requests:
        ...     requests.wait_for_steps()
        ...     signal.raise_signal(signal.SIGINT)
        >>> requests.asked == signal.SIGINT
        True

    Attributes:
        asked: the first signal that came, or 0.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._waits = self._ends = False
        self._before: dict[int, Any] = {}

    def wait_for_steps(self) -> None:
        """From now on the first signal is only remembered."""
        self._waits = True

    def end_steps(self) -> None:
        """From now on a signal interrupts at once, SIGTERM too; one that came late, here."""
        self._waits, self._ends = False, True
        if self.asked:
            raise KeyboardInterrupt

    def __enter__(self) -> "StopRequests":
        try:
            self._before = {kind: signal.signal(kind, self._ask) for kind in _KINDS}
        except ValueError:  # not the main thread, which alone gets signals
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.asked
        self.asked = self.asked or number
        if self._ends or (number == signal.SIGINT and not (is_first and self._waits)):
            raise KeyboardInterrupt
