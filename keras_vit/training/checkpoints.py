"""The files of an unfinished training: its settings, checkpoints, best model and curves.

A checkpoint holds all that a training changes, so that what is resumed from it ends with the same
bits: weights, random states, optimizer, the progress of `ProgressLogger`, and the weights of the
best epoch. What is random beside it is a function of seed and step.
"""

import abc
import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import keras
import ml_dtypes
import numpy as np

from keras_vit import atomic, backend, figures
from keras_vit.training import progress, run
from keras_vit.training.progress import EpochDone

SETTINGS = "settings.json"
_SECONDS_BETWEEN_CURVES = 30
_KEPT = 3  # checkpoints
_EPOCHS = "recipe.epochs"
_CHECKPOINT = re.compile(r"checkpoint-(\d{8,})(\.npz|)")
_OWN_NAMES = re.compile(
    rf"\..*|{_CHECKPOINT.pattern}|" + "|".join(map(re.escape, (SETTINGS, run.TRACKERS, *run.FILES)))
)
_STATE, _BEST, _PROGRESS = "state-", "best-", "progress"
_BFLOAT16 = ".bfloat16"  # NumPy's files do not know this dtype
# These errors of reading say nothing about a file's content.
_NOT_DAMAGED = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)


class DamagedError(ValueError):
    """A file that resuming needs is damaged or gone; the text names it."""


def state_variables(model: keras.Model) -> list[Any]:
    """Returns the weights, random states and optimizer's variables of a compiled model."""
    return [*model.variables, *model.optimizer.variables]


def set_state(model: keras.Model, arrays: Sequence[Any]) -> None:
    """Gives the values to `state_variables`; those of another model raise a ValueError."""
    check_layout(model, layout_of(arrays))
    for variable, value in zip(state_variables(model), arrays, strict=True):
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


def hash_of(variables: Iterable[Any]) -> str:
    """Returns the SHA-256 of variables: equal hashes mean equal bits."""
    digest = hashlib.sha256()
    for place, variable in enumerate(variables):
        values = np.ascontiguousarray(backend.values_of(variable))
        # With the number of each: two arrays that are exchanged have another hash.
        digest.update(f"{place:05d}".encode() + values.tobytes())
    return digest.hexdigest()


class Checkpoint(NamedTuple):
    """A checkpoint that was read and checked.

    Attributes:
        step: steps so far.
        progress: values that JSON can carry; its floats are those that were saved.
        best: the weights of the best epoch, if there is one.
        restore: sets the state of the model.
    """

    step: int
    progress: dict[str, Any]
    best: list[np.ndarray]
    restore: Callable[[], None]


class Checkpoints(abc.ABC):
    """The last checkpoints of a compiled model, in one folder; each engine has its own format.

    Attributes:
        suffix: how their names end.
    """

    suffix: ClassVar[str]

    def __init__(self, model: keras.Model, folder: Path) -> None:
        self._model, self._folder = model, folder

    @abc.abstractmethod
    def begin(
        self, step: int, *, progress: dict[str, Any], best: list[np.ndarray]
    ) -> Callable[[], None]:
        """Copies the state; returns what writes a checkpoint of it, in any thread.

        `progress` and `best`, see `Checkpoint`, must not change any more.
        """

    @abc.abstractmethod
    def load(self, step: int) -> Checkpoint:
        """Reads a checkpoint; raises a DamagedError."""

    def path(self, step: int) -> Path:
        """Returns the path of a checkpoint, a file or a folder."""
        return self._folder / f"checkpoint-{step:08d}{self.suffix}"

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints, ascending."""
        return steps_in(self._folder, self.suffix)

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, because the training repeats these steps."""
        self._remove(lambda steps: [later for later in steps if later > step])

    def remove_old(self) -> None:
        """Removes all but the last."""
        self._remove(lambda steps: steps[:-_KEPT])

    def _remove(self, choose: Callable[[list[int]], list[int]]) -> None:
        """Removes checkpoints; if killed on the way, a folder is a leftover and no checkpoint."""
        with atomic.explain_errors(self._folder, **run.UNFINISHED):
            for path in map(self.path, choose(self.steps())):
                if path.is_dir():
                    hidden = path.with_name(f".old-{path.name}")
                    with contextlib.suppress(OSError):
                        path.rename(hidden)
                        shutil.rmtree(hidden, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def steps_in(folder: Path, suffix: str) -> list[int]:
    """Returns the steps of a folder's checkpoints, ascending."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    matches = filter(None, map(_CHECKPOINT.fullmatch, names))
    return sorted(int(match[1]) for match in matches if match[2] == suffix)


class NumpyCheckpoints(Checkpoints):
    """Each a file of NumPy's with the whole state; every process writes its own."""

    suffix = ".npz"
    _copies: Sequence[np.ndarray] = ()

    def begin(
        self, step: int, *, progress: dict[str, Any], best: list[np.ndarray]
    ) -> Callable[[], None]:
        values = map(backend.values_of, state_variables(self._model))
        # Into the same memory each time: to touch other memory takes longer than to copy.
        if not self._copies:
            self._copies = [np.array(each) for each in values]
        else:
            for copy, each in zip(self._copies, values, strict=True):
                np.copyto(copy, each)
        return functools.partial(self.write, step, progress, best)

    def write(self, step: int, progress: dict[str, Any], best: list[np.ndarray]) -> None:
        """Writes a checkpoint of the copies, then removes the oldest."""
        text = np.frombuffer(json.dumps(progress).encode(), np.uint8)
        members = {_PROGRESS: text, **named(self._copies, _STATE), **named(best, _BEST)}
        kept = "the older checkpoints are kept"
        with atomic.whole_file(self.path(step), kept=kept, again="resume") as temporary:
            np.savez(temporary, **members)  # type: ignore[arg-type]
        self.remove_old()

    def load(self, step: int) -> Checkpoint:
        file = self.path(step)
        try:
            # A pickle could run code.
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                progress = json.loads(archive[_PROGRESS].tobytes())
                state, best = unnamed(archive, _STATE), unnamed(archive, _BEST)
        except Exception as error:  # zipfile, zlib and NumPy raise many kinds
            check_readable(error, file)
            raise DamagedError(f"the checkpoint {str(file)!r} is damaged") from error
        return Checkpoint(step, progress, best, functools.partial(set_state, self._model, state))


def named(arrays: Iterable[np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """Returns arrays by kind and number, as NumPy's files hold them."""
    members = {}
    for place, value in enumerate(arrays):
        is_bfloat16 = value.dtype == ml_dtypes.bfloat16
        # With leading zeros, so that `unnamed` has the order from the sorted names.
        name = f"{kind}{place:05d}" + (_BFLOAT16 if is_bfloat16 else "")
        members[name] = value.view(np.uint16) if is_bfloat16 else value
    return members


def unnamed(archive: Mapping[str, np.ndarray], kind: str) -> list[np.ndarray]:
    """Returns the arrays of a kind, as `named` got them."""
    return [
        archive[name].view(ml_dtypes.bfloat16) if name.endswith(_BFLOAT16) else archive[name]
        for name in sorted(archive)
        if name.startswith(kind)
    ]


class WorkDirectory:
    """`OUT.unfinished`: the folder of a training beside its run directory, one for each worker.

    Attributes:
        path: the folder.
        common: that of the first worker, which holds what all of them write together.
    """

    def __init__(self, out: Path, *, worker: int = 0) -> None:
        self.path, self.common = run.unfinished_path(out, worker=worker), run.unfinished_path(out)
        self._last_plot = -math.inf

    def exists(self) -> bool:
        """Whether there is a training to resume."""
        has_checkpoint = steps_in(self.path, NumpyCheckpoints.suffix) or steps_in(self.common, "")
        return (self.path / SETTINGS).is_file() and bool(has_checkpoint)

    def check_free(self, *, existing: run.Existing) -> None:
        """Raises a FileExistsError where a training would replace what it may not."""
        run.has_entries(self.path, _OWN_NAMES.fullmatch, what="a training")
        if existing == "refuse" and self.exists():
            raise FileExistsError(
                f"{str(self.path)!r} holds an unfinished training; {run.RESUME_OR_REPLACE}."
            )

    def start(self, settings: dict[str, Any]) -> None:
        """Replaces the folder by an empty one for a training with these settings."""
        self.remove()
        with atomic.explain_errors(self.path, kept="nothing was begun"):
            self.path.mkdir(parents=True, exist_ok=True)
        self.write_settings(settings, kept="nothing was begun")

    def write_settings(
        self, settings: dict[str, Any], *, kept: str = "the checkpoints are kept"
    ) -> None:
        """Replaces the record of the settings, in one atomic step."""
        with atomic.whole_file(self.path / SETTINGS, kept=kept) as temporary:
            temporary.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")

    def remove_leftovers(self) -> None:
        """Removes the temporary files of a killed process; the caller holds the lock."""
        for entry in self.path.glob(".*"):
            shutil.rmtree(entry, ignore_errors=True)

    def write_progress(self, history: list[EpochDone], *, best_epoch: int, is_last: bool) -> None:
        """Writes the table, and at most every half minute the curves, which take longer."""
        with atomic.whole_file(self.path / run.HISTORY, **run.UNFINISHED) as temporary:
            progress.write_history(history, temporary)
        now = time.monotonic()
        if now < self._last_plot + _SECONDS_BETWEEN_CURVES and not is_last:
            return
        self._last_plot = now
        with atomic.whole_file(self.path / run.CURVES, **run.UNFINISHED) as temporary:
            figures.plot_curves(history, best_epoch=best_epoch).savefig(temporary, dpi=120)

    def write_model(self, model: keras.Model) -> None:
        """Replaces the run's model of the best epoch, for whoever wants it before the end."""
        with atomic.whole_file(self.path / run.MODEL, **run.UNFINISHED) as temporary:
            model.save(temporary)
            # Of a training that was stopped, and was resumed: it says what another model is.
            (self.path / run.CONFIG).unlink(missing_ok=True)

    def invalidate(self) -> None:
        """Makes the training impossible to resume, in one atomic step."""
        with contextlib.suppress(OSError):
            (self.path / SETTINGS).unlink(missing_ok=True)

    def remove(self) -> None:
        self.invalidate()
        shutil.rmtree(self.path, ignore_errors=True)


def check_settings(file: Path, settings: dict[str, Any]) -> int | None:
    """Raises a ValueError unless a training or run was started with these settings.

    The file is settings.json of an unfinished training, or config.json of a run. Epochs may be more
    than they were: then it returns what they were.
    """
    stored, present = run.flat(run.read_fields(file)), run.flat(json.loads(json.dumps(settings)))
    before, now = stored.get(_EPOCHS), present.get(_EPOCHS)
    is_raised = isinstance(before, int) and isinstance(now, int) and now > before
    for name, value in present.items():
        if stored.get(name) == value or (name == _EPOCHS and is_raised):
            continue
        advice = "resume it with the same settings, or delete the folder"
        if name.startswith("data."):
            advice = "put the images back as they were, or begin anew (--overwrite)"
        if name == "backend":
            advice = f"resume it with KERAS_BACKEND={stored.get(name)}, which began it"
        if name == _EPOCHS:
            advice = f"epochs (--epochs) may be raised, not lowered; {advice}"
        raise ValueError(
            f"The training in {str(file.parent)!r} was started with {name}={stored.get(name)!r}, "
            f"not {value!r}; {advice}."
        )
    return before if is_raised else None


def check_readable(error: Exception, file: Path) -> None:
    """Raises errors of memory and permission, which say nothing about the file's content."""
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, OSError) and error.errno in _NOT_DAMAGED:
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: {str(file)!r} cannot be read; nothing is lost, make it "
            "readable and resume.",
        ) from error
