"""Shows how a download goes: a bar with speed and time left on a terminal, log lines elsewhere."""

import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress

_LOGGER = logging.getLogger("keras_vit.weights")
_MIB = 2**20


class DownloadProgress(contextlib.AbstractContextManager["DownloadProgress"]):
    """Reports one download.

    Args:
        name: what to call the file.
        show: whether to draw the bar on standard error; None draws it when that is a terminal.
    """

    def __init__(self, name: str, *, show: bool | None) -> None:
        self._name = name
        self._started = time.monotonic()
        self._bar = _bar() if (sys.stderr.isatty() if show is None else show) else None
        self._task = self._bar.add_task(name, total=None) if self._bar is not None else None

    def begin(self, completed: int, total: int | None) -> None:
        """States how many bytes are here already, and how many there will be."""
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, completed=completed, total=total)
        size = "unknown size" if total is None else f"{total / _MIB:.1f} MiB"
        kept = f", {completed / _MIB:.1f} MiB of them already here" if completed else ""
        _LOGGER.info("Downloading %s: %s%s.", self._name, size, kept)

    def advance(self, count: int) -> None:
        """Adds bytes that have arrived."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)

    def __enter__(self) -> "DownloadProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            _LOGGER.info("Downloaded %s in %.1f s.", self._name, time.monotonic() - self._started)


def _bar() -> "rich.progress.Progress":
    import rich.console
    import rich.progress

    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=rich.console.Console(stderr=True),
    )
