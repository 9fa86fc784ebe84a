"""The files of an unfinished training: checkpoints, the best model, curves, event files."""

import concurrent.futures
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
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from keras_vit import atomic, backend
from keras_vit.training import progress, run
from keras_vit.training.progress import EpochDone
from keras_vit.training.run import EVENTS

_NAME = "checkpoint-{step:08d}.npz"
_PATTERN = re.compile(r"checkpoint-(\d{8,})\.npz")
_PROGRESS = "progress"
_BFLOAT16 = ".bfloat16"  # suffix of a name, because NumPy's files do not know this dtype

# These errors of reading say nothing about a file's content.
_NOT_DAMAGED = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
_whole_file = functools.partial(atomic.whole_file, kept="the checkpoints are kept", again="resume")


class DamagedError(ValueError):
    """A file that resuming needs is damaged or gone; the text names it."""


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
        folder: holds the checkpoints; must exist.
        keep: the maximum number of checkpoints.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints, ascending."""
        matches = [_PATTERN.fullmatch(file.name) for file in self._folder.iterdir()]
        return sorted(int(match[1]) for match in matches if match)

    def save(self, step: int, arrays: dict[str, np.ndarray], *, progress: dict[str, Any]) -> None:
        """Writes a checkpoint, then removes the oldest.

        Args:
            step: steps so far.
            arrays: in any dtype of NumPy's, or bfloat16.
            progress: values that JSON can carry; its floats are restored exactly.
        """
        members: dict[str, Any] = {}
        for name, value in arrays.items():
            if value.dtype == ml_dtypes.bfloat16:
                name, value = name + _BFLOAT16, value.view(np.uint16)
            members[name] = value
        members[_PROGRESS] = np.frombuffer(json.dumps(progress).encode(), np.uint8)
        with _whole_file(self._file(step), kept="the older checkpoints are kept") as temporary:
            np.savez(temporary, **members)
        for old in self.steps()[: -self._keep]:
            self._file(old).unlink(missing_ok=True)

    def load(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Reads a checkpoint.

        Raises:
            DamagedError: the file is damaged or gone.
        """
        file, arrays = self._file(step), {}
        try:
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                for name in archive.files:
                    value = archive[name]
                    if name.endswith(_BFLOAT16):
                        name, value = name.removesuffix(_BFLOAT16), value.view(ml_dtypes.bfloat16)
                    arrays[name] = value
            progress = json.loads(arrays.pop(_PROGRESS).tobytes())
        except Exception as error:  # zipfile, zlib and NumPy raise many kinds
            _check_readable(error, file)
            raise DamagedError(f"the checkpoint {str(file)!r} is damaged") from error
        return arrays, progress

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, because the training repeats these steps."""
        for later in self.steps():
            if later > step:
                self._file(later).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self._folder / _NAME.format(step=step)


def state_variables(model: keras.Model) -> list[Any]:
    """Returns the weights, random states and optimizer's variables of a compiled model."""
    return [*model.variables, *model.optimizer.variables]


def get_state(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the weights, random states and optimizer of a compiled model, numbered."""
    variables = state_variables(model)
    return numbered([backend.values_of(variable) for variable in variables])


def numbered(arrays: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns arrays under the names that a checkpoint has for them."""
    return {f"{place:05d}": array for place, array in enumerate(arrays)}


def set_state(model: keras.Model, state: dict[str, np.ndarray]) -> None:
    """Restores the state that `get_state` returned.

    Raises:
        ValueError: it is the state of another model or optimizer.
    """
    variables = state_variables(model)
    arrays = [value for _, value in sorted(state.items())]
    if len(arrays) == len(variables):
        arrays = list(map(_as_integers, arrays, variables))
    stored = [(tuple(value.shape), str(value.dtype)) for value in arrays]
    expected = [(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]
    if stored != expected:
        pairs = enumerate(zip(stored, expected, strict=False))
        differences = [f"number {place} is {a} and not {b}" for place, (a, b) in pairs if a != b]
        raise ValueError(
            f"The checkpoint is of another model or optimizer: it has {len(stored)} arrays, the "
            f"training {len(expected)}, of which {(differences or ['the last are missing'])[0]}."
        )
    for variable, value in zip(variables, arrays, strict=True):
        variable.assign(value)


def _as_integers(value: np.ndarray, variable: Any) -> np.ndarray:
    """Returns random states in the backend's dtype, where they are of another backend."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    is_integer = value.dtype.kind in "iu" and "int" in dtype
    converted = value.astype(dtype) if is_integer else value
    return converted if np.array_equal(converted, value) else value


def state_hash(model: keras.Model) -> str:
    """Returns the SHA-256 of `get_state`: equal hashes mean equal bits."""
    return _hash(get_state(model).values())


def weights_hash(model: keras.Model) -> str:
    """Returns the SHA-256 of a model's weights alone, compiled or not."""
    return _hash(model.get_weights())


class Copies:
    """Memory for one copy of a model's variables, taken again and again.

    It is made once: to touch fresh memory takes longer than to copy into it. The variables go on
    changing while the copy is read, so that a file of it can be written meanwhile.

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

    def take(self) -> list[np.ndarray]:
        """Copies the present values over those of the last time, and returns them."""
        if not self._arrays:
            self._arrays = [np.array(backend.values_of(variable)) for variable in self._variables]
        else:
            for variable, array in zip(self._variables, self._arrays, strict=True):
                np.copyto(array, backend.values_of(variable))
        return self._arrays

    @property
    def taken(self) -> list[np.ndarray]:
        """What was taken last."""
        return self._arrays


class Writer:
    """Writes files in a thread of its own, one piece of work at a time.

    Example:
        >>> writer = Writer()
        >>> done = []
        >>> writer.begin(lambda: done.append("written"))
        >>> writer.wait()
        >>> done
        ['written']
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "keras_vit-writer")
        self._work: concurrent.futures.Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begins a piece of work, after the one before."""
        self.wait()
        self._work = self._thread.submit(work)

    def is_free(self, *, within: float | None) -> bool:
        """Whether the work is done, or will be within so many seconds, if any; raises its error."""
        if self._work is None:
            return True
        if not concurrent.futures.wait([self._work], within).done:
            return False
        work, self._work = self._work, None
        work.result()
        return True

    def wait(self) -> None:
        """Waits until the work is done; raises its error."""
        self.is_free(within=None)

    def close(self) -> None:
        """Waits until the work is done, without its error."""
        self._thread.shutdown()


SETTINGS = "settings.json"
SECONDS_BETWEEN_CURVES = 30
_BEST = "best-{epoch:05d}.keras"
_BEST_PATTERN = re.compile(r"best-\d{5,}\.keras")
_OWN_NAMES = re.compile(
    rf"\..*|checkpoint-\d+\.npz|{_BEST_PATTERN.pattern}|"
    + "|".join(map(re.escape, (SETTINGS, *run.FILES)))
)


class Unfinished:
    """`OUT.unfinished`: the folder of a training beside its run directory, one for each worker.

    Args:
        out: the run directory.
        worker: the index of the worker.
        keep: the maximum number of checkpoints.
    """

    def __init__(self, out: Path, *, worker: int = 0, keep: int = 3) -> None:
        self.path = run.unfinished_path(out, worker=worker)
        self._keep = keep
        self._last_plot = -math.inf

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in the folder, which must exist."""
        return Checkpoints(self.path, keep=self._keep)

    def exists(self) -> bool:
        """Whether there is a training to resume."""
        return (self.path / SETTINGS).is_file() and bool(self.checkpoints.steps())

    def check_free(self, *, existing: run.Existing) -> None:
        """Raises a FileExistsError where a training would replace what it may not."""
        entries = sorted(self.path.iterdir()) if self.path.is_dir() else []
        foreign = [entry.name for entry in entries if not _OWN_NAMES.fullmatch(entry.name)]
        if foreign or self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise FileExistsError(
                f"{str(self.path)!r} holds other things than a training "
                f"({(foreign or ['no folder'])[0]!r}); choose another place for the run."
            )
        if existing == "refuse" and self.exists():
            raise FileExistsError(
                f"{str(self.path)!r} holds an unfinished training; resume it, overwrite it, or "
                "choose another place."
            )

    def start(self, settings: dict[str, Any]) -> None:
        """Replaces the folder by an empty one for a training with these settings."""
        self.remove()
        with atomic.explain_errors(self.path, kept="nothing was begun"):
            self.path.mkdir(parents=True, exist_ok=True)
        with atomic.whole_file(self.path / SETTINGS, kept="nothing was begun") as temporary:
            temporary.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")

    def check(self, settings: dict[str, Any]) -> None:
        """Raises a ValueError unless the folder holds a training with these settings."""
        check_settings(self.path / SETTINGS, settings)

    def remove_leftovers(self) -> None:
        """Removes the temporary files of a killed process; the caller holds the lock."""
        for entry in self.path.glob(".*"):
            shutil.rmtree(entry, ignore_errors=True)

    def best_model(self, epoch: int) -> Path:
        """Returns the path of the model of a best epoch."""
        return self.path / _BEST.format(epoch=epoch)

    def save_best(self, model: keras.Model, *, epoch: int) -> None:
        """Saves the model of the best epoch; `remove_old` removes the previous one."""
        with _whole_file(self.best_model(epoch)) as temporary:
            model.save(temporary)

    def has_best(self, epoch: int) -> bool:
        """Whether the model of a best epoch exists and every checksum in it is right."""
        file = self.best_model(epoch)
        try:
            with zipfile.ZipFile(file) as archive:
                return archive.testzip() is None
        except Exception as error:  # zipfile and zlib raise many kinds
            _check_readable(error, file)
            return False

    def remove_old(self, *, best_epochs: set[int]) -> None:
        """Removes the models of all epochs but these."""
        current = set(map(self.best_model, best_epochs))
        for file in self.path.iterdir():
            if _BEST_PATTERN.fullmatch(file.name) and file not in current:
                file.unlink(missing_ok=True)

    def write_progress(self, history: list[EpochDone], *, best_epoch: int, is_last: bool) -> None:
        """Writes the table, and at most every half minute the curves, which take longer."""
        with _whole_file(self.path / run.HISTORY) as temporary:
            progress.write_history(history, temporary)
        now = time.monotonic()
        if now < self._last_plot + SECONDS_BETWEEN_CURVES and not is_last:
            return
        self._last_plot = now
        with _whole_file(self.path / run.CURVES) as temporary:
            progress.plot_curves(history, temporary, best_epoch=best_epoch)

    def invalidate(self) -> None:
        """Makes the training impossible to resume, in one atomic step."""
        with contextlib.suppress(OSError):
            (self.path / SETTINGS).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder."""
        self.invalidate()
        shutil.rmtree(self.path, ignore_errors=True)


def check_settings(file: Path, settings: dict[str, Any]) -> None:
    """Raises a ValueError unless a training or run was started with these settings.

    Args:
        file: `SETTINGS` of an unfinished training, or config.json of a run.
        settings: the present ones.
    """
    try:
        stored = _flat(dict(json.loads(file.read_text("utf-8"))))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{str(file)!r} is damaged, so the settings of the training are unknown; overwrite it, "
            "or choose another place."
        ) from error
    for name, value in _flat(json.loads(json.dumps(settings))).items():
        if stored.get(name) != value:
            raise ValueError(
                f"The training in {str(file.parent)!r} was started with {name}={stored.get(name)!r}"
                f", not {value!r}; resume it with the same settings, or delete the folder."
            )


EVERY = 10  # steps
_ERROR_NUMBERS = {
    tf.errors.ResourceExhaustedError: errno.ENOSPC,
    tf.errors.PermissionDeniedError: errno.EACCES,
    tf.errors.NotFoundError: errno.ENOENT,
}

# The same as in tf.summary.scalar, which works only where TensorBoard is installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)


class EventFiles:
    """The event files for TensorBoard, which TensorFlow writes on every backend.

    Args:
        folder: the folder of the training.
        is_written: whether this process writes them.
    """

    def __init__(self, folder: Unfinished, *, is_written: bool) -> None:
        self._path = str(folder.path / EVENTS)
        with self._number_errors():
            self._writer = (
                tf.summary.create_file_writer(self._path)
                if is_written
                else tf.summary.create_noop_writer()
            )

    def close(self) -> None:
        """Writes what is still buffered."""
        with self._number_errors():
            self._writer.close()

    def write_step(self, step: int, logs: dict[str, Any]) -> None:
        """Writes the logs of a step, for one step in ten."""
        if step % EVERY == 0:
            self._write(step, {f"step/{name}": value for name, value in logs.items()})

    def write_epoch(self, step: int, record: EpochDone) -> None:
        """Writes the record of an epoch."""
        values = {
            "train/loss": record.loss,
            "train/accuracy": record.accuracy,
            "validation/loss": record.validation_loss,
            "validation/accuracy": record.validation_accuracy,
            "learning_rate": record.learning_rate,
        }
        self._write(step, {name: value for name, value in values.items() if value is not None})
        with self._number_errors():
            self._writer.flush()

    @contextlib.contextmanager
    def _number_errors(self) -> Iterator[None]:
        """Turns TensorFlow's errors, which have no number, into an OSError."""
        try:
            yield
        except tf.errors.OpError as error:
            number = _ERROR_NUMBERS.get(type(error), errno.EIO)
            with atomic.explain_errors(self._path, kept="the checkpoints are kept", again="resume"):
                raise OSError(number, "") from error

    def _write(self, step: int, values: dict[str, Any]) -> None:
        with self._number_errors(), self._writer.as_default(step=step):
            for name, value in values.items():
                number = tf.cast(tf.reshape(value, ()), tf.float32)
                tf.summary.write(name, number, metadata=_SCALAR)


def _check_readable(error: Exception, file: Path) -> None:
    """Raises errors of memory and permission, which say nothing about the file's content."""
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, OSError) and error.errno in _NOT_DAMAGED:
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno)}: {str(file)!r} cannot be read; nothing is lost, make it "
            "readable and resume.",
        ) from error


def _hash(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for place, value in enumerate(arrays):
        digest.update(f"{place:05d}".encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns {"a": {"b": 1}} into {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
