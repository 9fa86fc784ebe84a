"""`StopRequests`: what Ctrl-C and SIGTERM do while a model is trained."""

import contextlib
import signal
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequests:
    """Handles SIGINT and SIGTERM inside a `with` block.

    Before the steps, SIGINT interrupts at once. The signal is also remembered, because Python or
    TensorFlow may swallow the KeyboardInterrupt while a model is built. During the steps the first
    signal is only remembered, and a second SIGINT interrupts.

    Example:
        >>> with StopRequests() as stop:
        ...     stop.begin_steps()
        ...     signal.raise_signal(signal.SIGINT)
        >>> stop.signal_number == signal.SIGINT
        True

    Attributes:
        signal_number: the first signal received, or 0.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._in_steps = self._after_steps = False
        self._previous_handlers: dict[int, Any] = {}

    def begin_steps(self) -> None:
        """From now on the first signal is only remembered."""
        self._in_steps = True

    def end_steps(self) -> None:
        """From now on each signal interrupts at once; so does one that is already remembered."""
        self._in_steps, self._after_steps = False, True
        if self.signal_number:
            raise KeyboardInterrupt

    def __enter__(self) -> "StopRequests":
        # Only the main thread may set handlers; signals do not reach the other threads.
        with contextlib.suppress(ValueError):
            self._previous_handlers = {
                number: signal.signal(number, self._handle) for number in _SIGNALS
            }
        # The command line remembers an interruption that was swallowed before.
        if getattr(self._previous_handlers.get(signal.SIGINT), "received", False):
            self.__exit__()
            raise KeyboardInterrupt
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.signal_number
        self.signal_number = self.signal_number or number
        if self._after_steps or (number == signal.SIGINT and not (is_first and self._in_steps)):
            raise KeyboardInterrupt
