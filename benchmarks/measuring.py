"""Measures cases: the contenders run in processes of their own and take turns."""

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CONTENDERS, Case
from benchmarks.worker import MARK

_ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Measured:
    """The figures of one contender for one case.

    Attributes:
        version: version of the contender.
        seconds: seconds of each turn.
        cpu: processor seconds of each turn, of all threads; empty for a cold start.
        peak: peak memory of the process in MiB, or of the accelerator if there is one.
        first: seconds from the imports to the end of the first turn: building and compiling.
        built: seconds of it until the model is built.
        imported: memory in MiB after the imports.
        loading: seconds of each turn after the imports; only for a cold start.
    """

    version: str = ""
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    peak: float = 0.0
    first: float = 0.0
    built: float = 0.0
    imported: float = 0.0
    loading: list[float] = dataclasses.field(default_factory=list)

    def compiling(self, steps: int) -> float:
        """Seconds of the first turn beyond those of a later one: compiling, or warming up."""
        return max(self.first - self.built - steps * statistics.median(self.seconds), 0.0)


class _Worker:
    """A contender's process."""

    def __init__(self, name: str, case: Case, folder: Path, *extra: str, peers_python: str) -> None:
        python = CONTENDERS[name].python(peers_python)
        arguments = [name, json.dumps(dataclasses.asdict(case)), str(folder), *extra]
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self.errors = (folder / "errors").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.worker", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """Waits for the next answer.

        Raises:
            RuntimeError: the process ended without one.
        """
        for line in self.process.stdout or ():
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line[len(MARK) :])
                return answer
        self.errors.seek(0)
        raise RuntimeError(
            (self.errors.read().strip().splitlines() or ["it ended without a message"])[-1]
        )

    def run(self) -> dict[str, Any]:
        """Runs the case once."""
        if self.process.stdin is not None:
            self.process.stdin.write("run\n")
            self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """Waits until the process ends."""
        self.process.communicate()
        self.errors.close()


def measure(
    case: Case, names: Sequence[str], *, rounds: int, peers_python: str
) -> dict[str, Measured]:
    """Measures the contenders that take a case; one that fails is printed and left out."""
    takers = [name for name in names if CONTENDERS[name].takes(case)]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        folders = {name: Path(folder, str(place)) for place, name in enumerate(takers)}
        for each in folders.values():
            each.mkdir()
        start = functools.partial(_Worker, peers_python=peers_python)
        if case.task == "cold":
            return _cold_starts(case, folders, start, rounds=rounds)
        return _turns(case, folders, start, rounds=rounds)


def _turns(
    case: Case, folders: Mapping[str, Path], start: Callable[..., _Worker], *, rounds: int
) -> dict[str, Measured]:
    workers, measured = {}, {}
    for name, folder in folders.items():
        worker = start(name, case, folder)
        try:
            ready = worker.answer()
        except RuntimeError as error:
            _leave_out(name, error)
            worker.close()
            continue
        workers[name] = worker
        measured[name] = Measured(
            version=ready["version"],
            imported=ready["memory"],
            first=ready["seconds"],
            built=ready["built"],
        )
    for turn in range(rounds + 1):
        for name, worker in workers.items():
            answer = worker.run()
            measured[name].peak = answer["peak"]
            if turn:  # the first turn warms up
                measured[name].seconds.append(answer["seconds"])
                measured[name].cpu.append(answer["cpu"])
    for worker in workers.values():
        worker.close()
    return measured


def _cold_starts(
    case: Case, folders: Mapping[str, Path], start: Callable[..., _Worker], *, rounds: int
) -> dict[str, Measured]:
    measured = {name: Measured() for name in folders}
    for name, folder in folders.items():
        start(name, case, folder, "write").close()
    for turn in range(rounds + 1):
        for name, folder in folders.items():
            if name not in measured:
                continue
            start_time = time.perf_counter()
            worker = start(name, case, folder)
            try:
                answer = worker.answer()
            except RuntimeError as error:
                _leave_out(name, error)
                del measured[name]
                continue
            finally:
                seconds = time.perf_counter() - start_time
                worker.close()
            each = measured[name]
            each.version, each.peak, each.imported = (
                answer[key] for key in ("version", "peak", "memory")
            )
            if turn:  # the first turn fills the page cache
                each.seconds.append(seconds)
                each.loading.append(answer["seconds"])
    return measured


def _leave_out(name: str, error: Exception) -> None:
    print(f"{name} is left out: {error}", file=sys.stderr)
