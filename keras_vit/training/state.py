"""The state of a compiled model: its weights, random states and optimizer."""

import contextlib
import hashlib
import threading
from collections.abc import Iterable
from typing import Any

import keras
import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16
import numpy as np

from keras_vit import backend


def state_variables(model: keras.Model) -> list[Any]:
    """Returns the weights, random states and optimizer's variables of a compiled model."""
    return [*model.variables, *model.optimizer.variables]


def get_state(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the weights, random states and optimizer of a compiled model, numbered."""
    variables = state_variables(model)
    return numbered([backend.values_of(variable) for variable in variables])


def numbered(arrays: Iterable[Any]) -> dict[str, Any]:
    """Returns arrays under the names that a checkpoint has for them."""
    return {f"{place:05d}": array for place, array in enumerate(arrays)}


def set_state(model: keras.Model, state: dict[str, Any]) -> None:
    """Restores the state that `get_state` returned.

    Raises:
        ValueError: it is the state of another model or optimizer.
    """
    variables = state_variables(model)
    arrays = [value for _, value in sorted(state.items())]
    if len(arrays) == len(variables):
        arrays = list(map(_as_integers, arrays, variables))
    check_layout(model, layout_of(arrays))
    for variable, value in zip(variables, arrays, strict=True):
        variable.assign(value)


def layout_of(arrays: Iterable[Any]) -> list[list[Any]]:
    """Returns the shape and dtype of arrays or variables, as JSON returns them."""
    return [[list(array.shape), keras.backend.standardize_dtype(array.dtype)] for array in arrays]


def check_layout(model: keras.Model, stored: list[list[Any]]) -> None:
    """Raises a ValueError if a state, whose `layout_of` this is, is not of the model."""
    expected = layout_of(state_variables(model))
    if stored != expected:
        pairs = enumerate(zip(stored, expected, strict=False))
        differences = [f"number {place} is {a} and not {b}" for place, (a, b) in pairs if a != b]
        raise ValueError(
            f"The checkpoint is of another model or optimizer: it has {len(stored)} arrays, the "
            f"training {len(expected)}, of which {(differences or ['the last are missing'])[0]}."
        )


def _as_integers(value: Any, variable: Any) -> Any:
    """Returns random states in the backend's dtype, where they are of another backend."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if str(value.dtype) == dtype:
        return value
    is_integer = value.dtype.kind in "iu" and "int" in dtype
    converted = value.astype(dtype) if is_integer else value
    return converted if np.array_equal(converted, value) else value


def state_hash(model: keras.Model) -> str:
    """Returns the SHA-256 of `get_state`: equal hashes mean equal bits."""
    return _hash(backend.values_of(variable) for variable in state_variables(model))


def weights_hash(model: keras.Model) -> str:
    """Returns the SHA-256 of a model's weights alone, compiled or not."""
    return _hash(model.get_weights())


class Copies:
    """Memory for one copy of a model's variables, taken again and again.

    It is made once, with `prepare` while the training goes on: to touch fresh memory takes longer
    than to copy into it. The variables go on changing while the copy is read, so that a file of it
    can be written meanwhile.

    Example:
        >>> weight = keras.Variable([1.0, 2.0])
        >>> copies = Copies([weight])
        >>> (taken,) = copies.take()
        >>> weight.assign([3.0, 4.0]).numpy(), taken
        (array([3., 4.], dtype=float32), array([1., 2.], dtype=float32))

    Args:
        variables: of Keras, in this order.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        self._variables = list(variables)
        self._arrays: list[np.ndarray] = []
        self._preparing: threading.Thread | None = None

    def prepare(self) -> None:
        """Begins to make the memory, in a thread of its own; `take` waits for it."""
        if self._preparing is None and not self._arrays:
            self._preparing = threading.Thread(target=self._make, daemon=True)
            self._preparing.start()

    def take(self) -> list[np.ndarray]:
        """Copies the present values over those of the last time, and returns them."""
        if self._preparing is not None:
            self._preparing.join()
        if not self._arrays:
            self._arrays = self._made()
        for variable, array in zip(self._variables, self._arrays, strict=True):
            np.copyto(array, backend.values_of(variable))
        return self._arrays

    def _make(self) -> None:
        with contextlib.suppress(MemoryError):  # in the thread; `take` raises it where it is seen
            self._arrays = self._made()

    def _made(self) -> list[np.ndarray]:
        # Not zeros: the system gives memory for them when they are first changed.
        return [np.ones(shape, dtype) for shape, dtype in layout_of(self._variables)]

    @property
    def taken(self) -> list[np.ndarray]:
        """What was taken last."""
        return self._arrays


def _hash(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for place, value in enumerate(arrays):
        digest.update(f"{place:05d}".encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
