"""Lets a loader build layers without drawing the random numbers that it is about to overwrite."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from keras_vit import backend

_overwritten = contextvars.ContextVar("overwritten", default=False)


@contextlib.contextmanager
def overwritten_weights() -> Iterator[None]:
    """Inside this scope `initializer` leaves memory as it is: every weight must be assigned."""
    token = _overwritten.set(True)
    try:
        yield
    finally:
        _overwritten.reset(token)


def initializer(wanted: Any) -> Any:
    """Returns the wanted Keras initializer, or one that does nothing where it would be in vain."""
    return backend.uninitialized if _overwritten.get() else wanted
