"""Checkpoints of a training: all that the next step depends on, in files that are whole or absent.

Keras saves neither the state of its random generators nor a file in one piece (measured:
tests/test_training_checkpoints.py kills a process while it saves).
"""

import errno
import hashlib
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np

from keras_vit import atomic

_NAME = "checkpoint-{step:08d}.npz"
_PATTERN = re.compile(r"checkpoint-(\d{8,})\.npz")
_PROGRESS = "progress"
# What hinders reading and says nothing about a file's content.
_NOT_DAMAGED = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
_BFLOAT16 = ".bfloat16"  # at the end of a name: NumPy's files do not know that dtype


class DamagedError(ValueError):
    """A file that a training needs to go on is damaged, or gone; the text names it."""


class Checkpoints:
    """The last checkpoints of a training, in one folder.

    Example:
        >>> import tempfile
        >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()), keep=2)
        >>> for step in (1, 2, 3):
        ...     checkpoints.save(step, {"w": np.ones(2)}, progress={"epoch": step})
        >>> checkpoints.steps(), checkpoints.load(3)[1]
        ([2, 3], {'epoch': 3})

    Args:
        folder: where they are; must exist.
        keep: how many there are at most.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def steps(self) -> list[int]:
        """Returns the steps there is a checkpoint of, ascending."""
        found = [_PATTERN.fullmatch(file.name) for file in self._folder.iterdir()]
        return sorted(int(match[1]) for match in found if match)

    def save(self, step: int, arrays: dict[str, np.ndarray], *, progress: dict[str, Any]) -> None:
        """Writes a checkpoint, then removes the oldest.

        Args:
            step: steps done.
            arrays: any dtype of NumPy's, or bfloat16.
            progress: what JSON can carry; its floats come back the same.
        """
        text = np.frombuffer(json.dumps(progress).encode(), np.uint8)
        kept = {"kept": "the checkpoints of before are kept", "again": "resume"}
        with atomic.whole_file(self._file(step), **kept) as temporary:
            packed: dict[str, Any] = {**dict(map(_packed, arrays.items())), _PROGRESS: text}
            np.savez(temporary, **packed)
        for old in self.steps()[: -self._keep]:
            self._file(old).unlink(missing_ok=True)

    def load(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Reads a checkpoint.

        Raises:
            DamagedError: the file is damaged, or gone.
        """
        file = self._file(step)
        try:
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                arrays = dict(_unpacked(name, archive[name]) for name in archive.files)
            progress = json.loads(arrays.pop(_PROGRESS).tobytes())
        except Exception as error:  # zipfile, zlib and NumPy have many ways to say it
            _check_readable(error, file)
            raise DamagedError(f"the checkpoint {str(file)!r} is damaged") from error
        return arrays, progress

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps: the training goes on before them."""
        for later in self.steps():
            if later > step:
                self._file(later).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self._folder / _NAME.format(step=step)


def check_archive(file: Path) -> None:
    """Reads an archive to its end, such as a `.keras` file, and compares its checksums.

    Raises:
        DamagedError: it is damaged, or gone.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            member = archive.testzip()
    except Exception as error:  # zipfile and zlib have many ways to say it
        _check_readable(error, file)
        raise DamagedError(f"the model {str(file)!r} is damaged") from error
    if member is not None:
        raise DamagedError(f"the model {str(file)!r} is damaged")


def get_state(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the weights, random states and optimizer of a compiled model, by number."""
    return {
        f"{place:05d}": np.asarray(keras.ops.convert_to_numpy(variable))
        for place, variable in enumerate(_variables(model))
    }


def set_state(model: keras.Model, state: dict[str, np.ndarray]) -> None:
    """Puts back what `get_state` returned.

    Raises:
        ValueError: it is the state of another model or optimizer.
    """
    variables = _variables(model)
    found = [(tuple(value.shape), str(value.dtype)) for _, value in sorted(state.items())]
    wanted = [(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]
    if found != wanted:
        raise ValueError(
            f"The checkpoint is of another model or optimizer: it has {len(found)} arrays, the "
            f"training {len(wanted)}, of which {_first_difference(found, wanted)}."
        )
    for variable, (_, value) in zip(variables, sorted(state.items()), strict=True):
        variable.assign(value)


def state_hash(model: keras.Model) -> str:
    """Returns the SHA-256 of `get_state`: equal hashes are equal bits."""
    return _hash(get_state(model))


def weights_hash(model: keras.Model) -> str:
    """Returns the SHA-256 of a model's weights alone, compiled or not."""
    return _hash({f"{place:05d}": value for place, value in enumerate(model.get_weights())})


def _check_readable(error: Exception, file: Path) -> None:
    """Raises what is no fault of the file's content: that it may not be read, or no memory."""
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, OSError) and error.errno in _NOT_DAMAGED:
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: {str(file)!r} cannot be read; nothing is lost, let it be "
            "read and resume.",
        ) from error


def _hash(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, value in arrays.items():
        digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _variables(model: keras.Model) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def _first_difference(found: list[Any], wanted: list[Any]) -> str:
    for place, (ours, theirs) in enumerate(zip(found, wanted, strict=False)):
        if ours != theirs:
            return f"number {place} is {ours} and not {theirs}"
    return "the last are missing"


def _packed(item: tuple[str, np.ndarray]) -> tuple[str, np.ndarray]:
    name, value = item
    if value.dtype == ml_dtypes.bfloat16:
        return name + _BFLOAT16, value.view(np.uint16)
    return name, value


def _unpacked(name: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    if name.endswith(_BFLOAT16):
        return name.removesuffix(_BFLOAT16), value.view(ml_dtypes.bfloat16)
    return name, value
