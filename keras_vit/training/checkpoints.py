"""The files of an unfinished training: checkpoints, the best model, curves."""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np

from keras_vit import atomic, environment
from keras_vit.training import progress, run
from keras_vit.training.progress import EpochDone
from keras_vit.training.settings import RESUME_OR_REPLACE, check_settings
from keras_vit.training.state import Copies, numbered, set_state, state_variables

_NAME = "checkpoint-{step:08d}"
_PATTERN = re.compile(r"checkpoint-(\d{8,})(\.npz)?")
_PROGRESS = "progress"
_RECORD = "checkpoint.json"
_BFLOAT16 = ".bfloat16"  # suffix of a name, because NumPy's files do not know this dtype

# These errors of reading say nothing about a file's content.
_NOT_DAMAGED = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
_whole_file = functools.partial(atomic.whole_file, kept="the checkpoints are kept", again="resume")


class DamagedError(ValueError):
    """A file that resuming needs is damaged or gone; the text names it."""


class Checkpoints:
    """The last checkpoints of a training, in one folder.

    A checkpoint is a file of NumPy, or a folder into which several processes wrote their parts.

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
        common: holds those that are folders, and must exist where there are any; `folder` unless
            each process has one of its own.
    """

    def __init__(self, folder: Path, *, keep: int, common: Path | None = None) -> None:
        self._folder, self._common = folder, common or folder
        self._keep = keep

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints, ascending."""
        folders = [folder for folder in {self._folder, self._common} if folder.is_dir()]
        entries = [entry for folder in folders for entry in folder.iterdir()]
        matches = [(entry.parent, _PATTERN.fullmatch(entry.name)) for entry in entries]
        own = {True: self._folder, False: self._common}
        return sorted({int(m[1]) for parent, m in matches if m and parent == own[bool(m[2])]})

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
        self._remove(self.shared(step))
        self.remove_old()

    def publish(self, step: int, *, record: dict[str, Any]) -> None:
        """Makes a checkpoint of what lies in `stage`, with a record for `load_record` (JSON)."""
        stage, folder = self.stage(step), self.shared(step)
        with atomic.explain_errors(folder, kept="the older checkpoints are kept", again="resume"):
            files = [file for file in sorted(stage.rglob("*")) if file.is_file()]
            hashes = {file.relative_to(stage).as_posix(): _file_hash(file) for file in files}
            content = json.dumps({**record, "files": hashes})
            text = json.dumps({"sha256": _text_hash(content), "content": content})
            (stage / _RECORD).write_text(text, "utf-8")
            atomic.publish(stage, folder)
            shutil.rmtree(stage, ignore_errors=True)  # one of the same step, which it replaced
            self._file(step).unlink(missing_ok=True)

    def stage(self, step: int) -> Path:
        """Returns where the files of a folder are written, by all processes."""
        return self._common / f".{_NAME.format(step=step)}"

    def shared(self, step: int) -> Path:
        """Returns the folder of a checkpoint that several processes may have written."""
        return self._common / _NAME.format(step=step)

    def load_record(self, step: int, *, part: tuple[int, int] = (0, 1)) -> dict[str, Any]:
        """Returns the record of a folder, after this process has checked its part of the files.

        Raises:
            DamagedError: a file is damaged or gone.
        """
        folder = self.shared(step)
        try:
            text = json.loads((folder / _RECORD).read_text("utf-8"))
            content: dict[str, Any] = json.loads(text["content"])
            names = sorted(content["files"])[part[0] :: part[1]]
            wrong = [n for n in names if _file_hash(folder / n) != content["files"][n]]
            if wrong or text["sha256"] != _text_hash(text["content"]):
                raise ValueError(f"wrong hash of {wrong or _RECORD}")
        except Exception as error:  # of JSON and of the system, of many kinds
            _check_readable(error, folder)
            raise DamagedError(f"the checkpoint {str(folder)!r} is damaged") from error
        return content

    def remove_old(self, *, folders: bool = True) -> None:
        """Removes the oldest, with `folders` also those that all processes have in common."""
        for old in self.steps()[: -self._keep]:
            self._file(old).unlink(missing_ok=True)
            if folders:
                self._remove(self.shared(old))

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
                self._remove(self.shared(later))

    def _file(self, step: int) -> Path:
        return self._folder / f"{_NAME.format(step=step)}.npz"

    def _remove(self, folder: Path) -> None:
        """Removes a folder of `shared`; if killed on the way, a leftover and no checkpoint."""
        hidden = folder.with_name(f".old-{folder.name}")
        with contextlib.suppress(OSError):
            folder.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


class Saver:
    """Copies the state of a compiled model for a checkpoint, and restores it.

    This one writes a file of NumPy's for each process.

    Attributes:
        is_shared: whether the processes write one checkpoint together, into a common folder.
    """

    is_shared = False

    def __init__(self, model: keras.Model, checkpoints: Checkpoints) -> None:
        self._model, self._checkpoints = model, checkpoints
        self._copies = Copies(state_variables(model))

    def prepare(self) -> None:
        """Begins to make the memory for the copies, which the first one waits for."""
        self._copies.prepare()

    def begin(self, step: int, *, progress: dict[str, Any]) -> Callable[[], None]:
        """Copies the state, and returns what makes a checkpoint of it, in any thread."""
        state = numbered(self._copies.take())
        return functools.partial(self._checkpoints.save, step, state, progress=progress)

    def load(self, step: int) -> tuple[Callable[[], None], dict[str, Any]]:
        """Checks a checkpoint; returns what restores the state, and the progress.

        Raises:
            DamagedError: a file is damaged or gone.
            ImportError: orbax-checkpoint wrote it, and is not installed.
        """
        if self._checkpoints.shared(step).is_dir():
            return self._load_shared(step)
        state, progress = self._checkpoints.load(step)
        return functools.partial(set_state, self._model, state), progress

    def _load_shared(self, step: int) -> tuple[Callable[[], None], dict[str, Any]]:
        record, folder = self._checkpoints.load_record(step), self._checkpoints.shared(step)
        needs = f"The checkpoint {str(folder)!r} is kept; on JAX it was saved by orbax-checkpoint"
        if "jax" not in sys.modules:  # the accelerators are the other backend's
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        with environment.installed(needs, "orbax-checkpoint"):
            from keras_vit.training import jax_engine

            read = jax_engine.reader()
        names = list(numbered(record["arrays"]))
        return lambda: set_state(self._model, read(folder, names)), record["progress"]


SETTINGS = "settings.json"
SECONDS_BETWEEN_CURVES = 30
_BEST = "best-{epoch:05d}.keras"
_BEST_PATTERN = re.compile(r"best-\d{5,}\.keras")
_OWN_NAMES = re.compile(
    rf"\..*|{_PATTERN.pattern}|{_BEST_PATTERN.pattern}|"
    + "|".join(map(re.escape, (SETTINGS, run.TRACKERS, *run.FILES)))
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
        self.common = run.unfinished_path(out)
        self._keep = keep
        self._last_plot = -math.inf

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in the folder, which must exist."""
        return Checkpoints(self.path, keep=self._keep, common=self.common)

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
                f"({(foreign or ['no folder'])[0]!r}); choose another out (--out)."
            )
        if existing == "refuse" and self.exists():
            raise FileExistsError(
                f"{str(self.path)!r} holds an unfinished training; {RESUME_OR_REPLACE}."
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

    def check(self, settings: dict[str, Any]) -> int | None:
        """Raises a ValueError unless the folder holds a training with these settings.

        Returns:
            Its number of epochs where the settings have more, otherwise None.
        """
        return check_settings(self.path / SETTINGS, settings)

    def remove_leftovers(self) -> None:
        """Removes the temporary files of a killed process; the caller holds the lock."""
        for entry in self.path.glob(".*"):
            shutil.rmtree(entry, ignore_errors=True)

    def best_model(self, epoch: int) -> Path:
        """Returns the path of the model of a best epoch, which may be the first worker's."""
        own, common = (folder / _BEST.format(epoch=epoch) for folder in (self.path, self.common))
        return common if common.exists() and not own.exists() else own

    def save_best(self, model: keras.Model, *, epoch: int) -> None:
        """Saves the model of the best epoch; `remove_old` removes the previous one."""
        with _whole_file(self.path / _BEST.format(epoch=epoch)) as temporary:
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


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _file_hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
