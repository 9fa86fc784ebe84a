"""What is on the disk while a training goes on: checkpoints, the best model, files to look at."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from keras_vit import atomic
from keras_vit.training import progress, run
from keras_vit.training.execution import Workers
from keras_vit.training.progress import EpochDone
from keras_vit.training.run import EVENTS

_NAME = "checkpoint-{step:08d}.npz"
_PATTERN = re.compile(r"checkpoint-(\d{8,})\.npz")
_PROGRESS = "progress"

# What hinders reading and says nothing about a file's content.
_NOT_DAMAGED = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
# What an error of the disk leaves here.
_whole_file = functools.partial(atomic.whole_file, kept="the checkpoints are kept", again="resume")
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
        with _whole_file(self._file(step), kept="the checkpoints of before are kept") as temporary:
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


SETTINGS = "settings.json"
SECONDS_BETWEEN_CURVES = 30
_BEST = "best-{epoch:05d}.keras"
_BEST_PATTERN = re.compile(r"best-\d{5,}\.keras")
_OURS = re.compile(
    rf"\..*|checkpoint-\d+\.npz|{_BEST_PATTERN.pattern}|"
    + "|".join(map(re.escape, (SETTINGS, *run.FILES)))
)


class Unfinished:
    """`OUT.unfinished`, beside the run directory that it becomes; one for each worker.

    Args:
        out: the run directory that will be made.
        worker: which of the workers this is, from 0.
        keep: how many checkpoints are kept.
    """

    def __init__(self, out: Path, *, worker: int = 0, keep: int = 3) -> None:
        self.path = run.unfinished_path(out, worker=worker)
        self._keep = keep
        self._last_plot = -math.inf

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in the folder, which must be there."""
        return Checkpoints(self.path, keep=self._keep)

    def exists(self) -> bool:
        """Whether there is a training to resume."""
        return (self.path / SETTINGS).is_file() and bool(self.checkpoints.steps())

    def check_free(self, *, existing: run.Existing) -> None:
        """Raises a FileExistsError where something would be lost that nobody gave up."""
        found = sorted(self.path.iterdir()) if self.path.is_dir() else []
        foreign = [entry.name for entry in found if not _OURS.fullmatch(entry.name)]
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
        """Makes the folder anew for a training with these settings."""
        self.retire()
        shutil.rmtree(self.path, ignore_errors=True)
        with atomic.explain_errors(self.path, kept="nothing was begun"):
            self.path.mkdir(parents=True, exist_ok=True)
        with atomic.whole_file(self.path / SETTINGS, kept="nothing was begun") as temporary:
            temporary.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")

    def check(self, settings: dict[str, Any]) -> None:
        """Raises a ValueError unless the folder holds a training with these settings."""
        check_settings(self.path / SETTINGS, settings)

    def remove_remains(self) -> None:
        """Removes what a process was writing when it was killed; nobody may write there now."""
        for entry in self.path.glob(".*"):
            shutil.rmtree(entry, ignore_errors=True)

    def best_model(self, epoch: int) -> Path:
        """Returns the file of the model of an epoch that was the best."""
        return self.path / _BEST.format(epoch=epoch)

    def save_best(self, model: keras.Model, *, epoch: int) -> None:
        """Saves the model of the best epoch; the one before goes with `remove_old`."""
        with _whole_file(self.best_model(epoch)) as temporary:
            model.save(temporary)

    def has_best(self, epoch: int) -> bool:
        """Whether the model of an epoch that was the best is there and whole."""
        try:
            check_archive(self.best_model(epoch))
        except DamagedError:
            return False
        return True

    def remove_old(self, *, best_epochs: set[int]) -> None:
        """Removes models of epochs that were the best for none of the checkpoints."""
        kept = set(map(self.best_model, best_epochs))
        for file in self.path.iterdir():
            if _BEST_PATTERN.fullmatch(file.name) and file not in kept:
                file.unlink(missing_ok=True)

    def show(self, history: list[EpochDone], *, best_epoch: int, is_last: bool) -> None:
        """Brings the table up to date, and the curves, which take longer, every half minute."""
        with _whole_file(self.path / run.HISTORY) as temporary:
            progress.write_history(history, temporary)
        now = time.monotonic()
        if now < self._last_plot + SECONDS_BETWEEN_CURVES and not is_last:
            return
        self._last_plot = now
        with _whole_file(self.path / run.CURVES) as temporary:
            progress.plot_curves(history, temporary, best_epoch=best_epoch)

    def retire(self) -> None:
        """Takes away what makes the folder a training that can be resumed; in one step."""
        with contextlib.suppress(OSError):
            (self.path / SETTINGS).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder, after its run is complete."""
        self.retire()
        shutil.rmtree(self.path, ignore_errors=True)


def check_settings(file: Path, settings: dict[str, Any]) -> None:
    """Raises a ValueError unless a training or run was started with these settings.

    Args:
        file: `SETTINGS` of an unfinished training, or config.json of a run.
        settings: what is asked for now.
    """
    try:
        found = _flat(dict(json.loads(file.read_text("utf-8"))))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{str(file)!r} is damaged, so that nobody knows what was trained; overwrite it, or "
            "choose another place."
        ) from error
    for name, value in _flat(json.loads(json.dumps(settings))).items():
        if found.get(name) != value:
            raise ValueError(
                f"The training in {str(file.parent)!r} was started with {name}={found.get(name)!r},"
                f" not {value!r}; resume it with the same settings, or delete the folder."
            )


EVERY = 10  # steps
_NUMBERS = {
    tf.errors.ResourceExhaustedError: errno.ENOSPC,
    tf.errors.PermissionDeniedError: errno.EACCES,
    tf.errors.NotFoundError: errno.ENOENT,
}

# As tf.summary.scalar makes it, which needs TensorBoard itself to be installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)


class EventFiles:
    """Event files in the folder of a training, written by its first worker.

    Args:
        folder: of the training.
        workers: those that train together.
    """

    def __init__(self, folder: Unfinished, workers: Workers) -> None:
        path = str(folder.path / EVENTS)
        is_first = workers.index == 0
        self._path = path
        with self._telling():
            self._writer = (
                tf.summary.create_file_writer(path) if is_first else tf.summary.create_noop_writer()
            )

    def close(self) -> None:
        """Brings to the files what is not there yet."""
        with self._telling():
            self._writer.close()

    def write_step(self, step: int, logs: dict[str, Any]) -> None:
        """Writes the numbers of one step, for one step in ten."""
        if step % EVERY == 0:
            self._write(step, {f"step/{name}": value for name, value in logs.items()})

    def write_epoch(self, step: int, done: EpochDone) -> None:
        """Writes the numbers of one epoch."""
        values = {
            "train/loss": done.loss,
            "train/accuracy": done.accuracy,
            "validation/loss": done.validation_loss,
            "validation/accuracy": done.validation_accuracy,
            "learning_rate": done.learning_rate,
        }
        self._write(step, {name: value for name, value in values.items() if value is not None})
        with self._telling():
            self._writer.flush()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Makes an error of the disk of TensorFlow's, which has no number."""
        try:
            yield
        except tf.errors.OpError as error:
            number = _NUMBERS.get(type(error), errno.EIO)
            with atomic.explain_errors(self._path, kept="the checkpoints are kept", again="resume"):
                raise OSError(number, "") from error

    def _write(self, step: int, values: dict[str, Any]) -> None:
        with self._telling(), self._writer.as_default(step=step):
            for name, value in values.items():
                number = tf.cast(tf.reshape(value, ()), tf.float32)
                tf.summary.write(name, number, metadata=_SCALAR)


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


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, so that a difference has a name."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
