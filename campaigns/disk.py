"""Attacks operations on files: failing disks, killed processes, two writers, and limits.

A case replaces old content with new in a process of its own, with one disturbance. Then the old or
the new content must be complete, an error must be one sentence, and a second try must succeed. One
case in 32 or so is a whole training. Processes are forked, so TensorFlow is imported once.
"""

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from campaigns import oracle
from keras_vit import atomic
from keras_vit.exporting import artefacts
from keras_vit.training import run

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
_CHANGE_EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_SIZE = 3000  # bytes of a file
_TRAINING_SHARE = 1 / 32


class Campaign:
    """Attacks on the writers of files, folders, exports and runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._undisturbed: str | None = None

    def case(self, rng: np.random.Generator) -> oracle.Case:
        """Chooses a task and its disturbance."""
        if rng.random() < _TRAINING_SHARE:
            return self.training(_draw(rng, operations=160, size=80_000))
        task = (_File, _Folder, _Export, _Run)[rng.integers(4)]
        return self.small(task, _draw(rng, operations=32, size=_SIZE))

    def small(self, kind: "type[_File]", trouble: "_Trouble") -> oracle.Case:
        """Makes a case of a task without TensorFlow."""
        self._number += 1
        task = kind(self._folder / str(self._number))
        return oracle.Case(
            what=f"{kind.__name__[1:].lower()}: {trouble.what}",
            act=lambda: _disturbed(task, trouble),
            sound="new",
            names=(str(task.folder),),
        )

    def training(self, trouble: "_Trouble") -> oracle.Case:
        """Makes a case of a training, which is then resumed."""
        self._number += 1
        if self._undisturbed is None:
            task = _Training(self._folder / "sound")
            _in_child(task.work)
            self._undisturbed = task.content()
        task = _Training(self._folder / str(self._number))
        return oracle.Case(
            what=f"training: {trouble.what}",
            act=lambda: _disturbed(task, trouble),
            sound=self._undisturbed,
            names=(str(task.folder),),
            seconds=30,
        )


class _File:
    """A file that is replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.path = folder / "file"
        self.put_old()

    def put_old(self) -> None:
        self.path.write_text("old" * _SIZE)

    def work(self) -> None:
        with atomic.whole_file(self.path) as temporary:
            temporary.write_text("new" * _SIZE)

    def content(self) -> str:
        """Returns "old" or "new" if the content is complete, otherwise a description."""
        text = self.path.read_text() if self.path.exists() else "nothing"
        versions = {kind * _SIZE: kind for kind in ("old", "new")}
        return versions.get(text, f"{len(text)} characters")

    def leftovers(self) -> list[str]:
        return sorted(_names(self.folder) - {self.path.name})


class _Folder(_File):
    """A folder that is swapped with another."""

    def put_old(self) -> None:
        self._fill(self.path, "old")

    def work(self) -> None:
        with atomic.lock(self.folder / "lock", what=f"work in {self.folder}"):
            atomic.restore(self.folder, self.path)
            with atomic.staging_folder(self.folder) as stage:
                with atomic.explain_errors(stage):
                    self._fill(stage, "new")
                atomic.publish(stage, self.path)

    def content(self) -> str:
        if not self.path.is_dir():
            return "nothing"
        texts = {file.read_text() for file in self.path.iterdir()}
        is_complete = texts in ({"old" * _SIZE}, {"new" * _SIZE}) and len(_names(self.path)) == 3
        return texts.pop()[:3] if is_complete else f"{_names(self.path)}"

    def _fill(self, folder: Path, content: str) -> None:
        folder.mkdir(exist_ok=True)
        for name in ("model.keras", "config.json", "labels.txt"):
            (folder / name).write_text(content * _SIZE)


class _Run(_Folder):
    """A run that replaces another at the end of a training."""

    def work(self) -> None:
        with run.lock(self.path):
            unfinished = run.unfinished_path(self.path)
            atomic.restore(unfinished, self.path)
            with atomic.explain_errors(unfinished):
                unfinished.mkdir(exist_ok=True)
            with atomic.staging_folder(unfinished) as stage:
                with atomic.explain_errors(stage):
                    self._fill(stage, "new")
                atomic.publish(stage, self.path)
            shutil.rmtree(unfinished, ignore_errors=True)


class _Export(_Folder):
    """A new version of two artefacts beside an old one."""

    def put_old(self) -> None:
        self._fill_all(self.path / "tflite" / "1", self.path / "1", "old")

    def work(self) -> None:
        with artefacts.staging_folder(self.path) as stage:
            with atomic.explain_errors(stage):
                self._fill_all(stage / "tflite", stage / "model", "new")
            number = str(artefacts.next_version([self.path, self.path / "tflite"]))
            moves = {stage / "tflite": self.path / "tflite" / number}
            artefacts.publish({**moves, stage / "model": self.path / number})

    def content(self) -> str:
        """Returns the content of the last version if all versions are complete."""
        texts: dict[Path, list[str]] = {}
        for file in self.path.rglob("*.*"):
            if not any(part.startswith(".") for part in file.relative_to(self.path).parts):
                texts.setdefault(file.parent, []).append(file.read_text())
        for folder, files in texts.items():
            if len(files) != 3 or len(set(files)) != 1 or len(files[0]) != 3 * _SIZE:
                return f"{folder} is not complete"
        last = max(int(name) for name in _names(self.path) if name.isdecimal())
        return texts[self.path / str(last)][0][:3]

    def leftovers(self) -> list[str]:
        return sorted(name for name in _names(self.path) - {"tflite"} if not name.isdecimal())

    def _fill_all(self, first: Path, second: Path, content: str) -> None:
        for folder in (first, second):
            folder.mkdir(parents=True)
            self._fill(folder, content)


class _Training(_File):
    """A training of four steps, with a file of metrics, which is then resumed."""

    def put_old(self) -> None:
        self.path = self.folder / "run"

    def work(self) -> None:
        from keras_vit import training
        from keras_vit.config import ViTConfig
        from keras_vit.data import load_digits

        def measure(event: training.Event) -> None:
            if isinstance(event, training.TrainingDone):
                with atomic.whole_file(event.run.path / run.METRICS) as temporary:
                    temporary.write_text("measured")

        training.train(
            load_digits(),
            out=self.path,
            model=ViTConfig(
                input_shape=(8, 8, 3),
                patch_size=4,
                hidden_dim=8,
                mlp_dim=8,
                num_heads=1,
                num_layers=1,
                dropout_rate=0.1,
            ),
            recipe=training.Recipe(steps=4, batch_size=640, learning_rate=1e-3),
            execution=training.Execution(strategy="none", checkpoint_steps=1),
            existing="resume",
            on_event=measure,
        )

    def content(self) -> str:
        if not run.is_run(self.path):
            return "old"
        if (self.path / run.METRICS).read_text() != "measured":
            return "unmeasured"
        digest = hashlib.sha256()
        for name, value in sorted(_arrays(self.path / run.MODEL).items()):
            digest.update(name.encode() + value)
        state = json.loads((self.path / run.CONFIG).read_text())["result"]["state_sha256"]
        return f"{state} {digest.hexdigest()} {sorted(_names(self.path))}"


def _arrays(file: Path) -> dict[str, bytes]:
    arrays: dict[str, bytes] = {}

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[name] = np.asarray(item).tobytes()

    with (
        zipfile.ZipFile(file) as archive,
        archive.open("model.weights.h5") as stream,
        h5py.File(stream, "r") as weights,
    ):
        weights.visititems(add)
    return arrays


class _Trouble:
    """A disturbance: an error or SIGKILL at an operation, a limit, or a second process.

    Args:
        kind: "error" at one operation; "full", errors from one operation on; "kill"; "size" and
            "files", the limits of a file and of open files; "two" processes at once.
        number: the operation, from 1, or the limit.
        error: the error's number.
        can_swap: whether the system can swap two names.
    """

    def __init__(self, kind: str, number: int, error: int = 0, *, can_swap: bool = True) -> None:
        self.kind, self.number, self.error, self.can_swap = kind, number, error, can_swap
        code = f" {errno.errorcode[error]}" if error else ""
        self.what = f"{kind}{code} at {number}" + ("" if can_swap else ", names not swapped")

    def begin(self, folder: Path) -> None:
        """Starts the disturbance of this process."""
        if not self.can_swap:
            atomic._swap = lambda first, second: False
        if self.kind == "size":
            _limit(resource.RLIMIT_FSIZE, self.number)
        elif self.kind == "files":
            opened = max(map(int, _names(Path("/proc/self/fd")))) + self.number
            _limit(resource.RLIMIT_NOFILE, opened)
        elif self.kind != "two":
            self._watch(folder)

    def _watch(self, folder: Path) -> None:
        fsync, swap = os.fsync, atomic._swap

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            is_change = event in _CHANGE_EVENTS or (event == "open" and arguments[2] & _WRITE_FLAGS)
            if is_change and _is_inside(arguments[0], folder):
                self._strike()

        def counted_fsync(fd: Any) -> None:
            self._strike()
            fsync(fd)

        def counted_swap(first: Path, second: Path) -> bool:
            self._strike()
            return swap(first, second)

        os.fsync, atomic._swap = counted_fsync, counted_swap
        sys.addaudithook(hook)

    def _strike(self) -> None:
        self.number -= 1
        if self.number == 0 and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.number == 0 or (self.number < 0 and self.kind == "full"):
            raise OSError(self.error, os.strerror(self.error))


def _limit(kind: int, number: int) -> None:
    resource.setrlimit(kind, (number, resource.getrlimit(kind)[1]))


def _is_inside(path: Any, folder: Path) -> bool:
    if not isinstance(path, str | Path):
        return False
    # Operations relative to an open folder have relative paths.
    return Path(path).is_relative_to(folder) or not Path(path).is_absolute()


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


# The most operations on files of each task.
_OPERATIONS: dict[type[_File], int] = {_File: 10, _Folder: 22, _Export: 32, _Run: 24}


def _draw(rng: np.random.Generator, *, operations: int, size: int) -> _Trouble:
    kind = str(rng.choice(["error", "full", "kill", "kill", "size", "files", "two"]))
    number = {"size": size, "files": 8, "two": 1}.get(kind, operations)
    error = int(rng.choice(ERRORS)) if kind in ("error", "full") else 0
    return _Trouble(
        kind, int(rng.integers(1, number + 1)), error, can_swap=bool(rng.random() < 0.7)
    )


def _disturbed(task: _File, trouble: _Trouble) -> str:
    """Runs a task with trouble and again without; returns the content at the end."""
    waits = [_start(task, trouble) for _ in range(2 if trouble.kind == "two" else 1)]
    reports = [json.loads(wait()) for wait in waits]
    if trouble.kind == "two" and all("error" in report for report in reports):
        raise RuntimeError(f"both failed: {reports}")
    for report in reports:
        if not report.get("clear", True):
            raise RuntimeError(f"unclear: {report['error']}")
    content = task.content()
    if content == "nothing" and not trouble.can_swap and trouble.kind in ("kill", "full"):
        content = "old"  # the next start restores it
    if content not in ("old", "new") and not isinstance(task, _Training):
        raise RuntimeError(f"not complete after the trouble: {content}")
    if not isinstance(task, _Training) or not run.is_run(task.path) or trouble.kind != "two":
        _in_child(task.work)
    if task.leftovers():
        raise RuntimeError(f"left over: {task.leftovers()}")
    return task.content()


def _in_child(work: Callable[[], None]) -> None:
    if os.waitstatus_to_exitcode(os.waitpid(_fork(work), 0)[1]):
        raise RuntimeError("the second try failed")


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        warnings.simplefilter("ignore")
        work()
        code = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _start(task: _File, trouble: _Trouble) -> Callable[[], str]:
    """Starts a task with trouble; returns a function that waits for its report, as JSON."""
    reading, writing = os.pipe()

    def work() -> None:
        report: dict[str, Any] = {}
        try:
            trouble.begin(task.folder)
            task.work()
        except Exception as error:
            report["error"] = f"{type(error).__name__}: {error} [{oracle._raised_in(error)}]"
            report["clear"] = oracle._is_clear(error, (str(task.folder),))
        os.write(writing, json.dumps(report).encode())

    pid = _fork(work)
    os.close(writing)

    def wait() -> str:
        with os.fdopen(reading) as stream:
            text = stream.read()
        os.waitpid(pid, 0)
        return text or "{}"

    return wait


def drawn_cases(campaign: Campaign) -> Iterator[oracle.Case]:
    """Yields three dozen small cases like those of the campaign."""
    for index in range(36):
        task = (_File, _Folder, _Export, _Run)[index % 4]
        trouble = _draw(np.random.default_rng(index), operations=32, size=_SIZE)
        yield campaign.small(task, trouble)


def training_cases(campaign: Campaign) -> Iterator[oracle.Case]:
    """Yields trainings: killed, on a disk that becomes read-only, and beside another one."""
    yield campaign.training(_Trouble("kill", 40))
    yield campaign.training(_Trouble("full", 100, errno.EROFS))
    yield campaign.training(_Trouble("two", 1))


def every_case(campaign: Campaign) -> Iterator[oracle.Case]:
    """Yields small cases: each operation of each task, killed and failing, and each limit."""
    for task, last in _OPERATIONS.items():
        for can_swap in (True, False):
            for number in range(1, last + 1):
                yield campaign.small(task, _Trouble("kill", number, can_swap=can_swap))
                error = ERRORS[number % len(ERRORS)]
                for kind in ("error", "full"):
                    yield campaign.small(task, _Trouble(kind, number, error, can_swap=can_swap))
        for number in range(1, 9):
            yield campaign.small(task, _Trouble("files", number))
            yield campaign.small(task, _Trouble("size", number * _SIZE // 3))
            yield campaign.small(task, _Trouble("two", number))
