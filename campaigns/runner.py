"""Runs a campaign in worker processes, so that crashes and hangs are detected."""

import collections
import dataclasses
import importlib
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from campaigns import oracle

HUNG = 60.0  # seconds for one case
_STARTUP = 300.0  # seconds before the first case: imports and undamaged files
_CONTEXT = multiprocessing.get_context("spawn")


class Campaign(Protocol):
    """The interface of the class `Campaign` in each module of campaigns."""

    def __init__(self, folder: Path) -> None:
        """Makes its undamaged files in a folder of its own, once for each process."""

    def case(self, rng: np.random.Generator) -> oracle.Case:
        """Makes an attack, with `rng` for all random choices."""


@dataclasses.dataclass
class Outcome:
    """The result of a campaign.

    Attributes:
        counts: number of cases of each kind.
        failures: the numbers and verdicts of the cases that failed.
        seconds: processor time of the slowest case.
        megabytes: memory of the largest case.
        elapsed: seconds of the whole campaign.
    """

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[tuple[int, oracle.Verdict]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    megabytes: float = 0.0
    elapsed: float = 0.0

    @property
    def cases(self) -> int:
        return self.counts.total()

    def add(self, index: int, verdict: oracle.Verdict) -> None:
        self.counts[verdict.kind] += 1
        self.seconds = max(self.seconds, verdict.seconds)
        self.megabytes = max(self.megabytes, verdict.megabytes)
        if verdict.kind not in oracle.FINE:
            self.failures.append((index, verdict))


def make_case(campaign: Campaign, *, seed: int, index: int) -> oracle.Case:
    """Makes case number `index` of a seed: the same in any order, on any machine."""
    return campaign.case(np.random.default_rng([seed, index]))


def open_campaign(module: str, folder: Path) -> Campaign:
    """Makes the campaign of a module, such as "campaigns.weights"."""
    campaign: Campaign = importlib.import_module(module).Campaign(folder)
    return campaign


def run(
    module: str,
    *,
    count: int,
    seed: int = 0,
    first: int = 0,
    processes: int = 2,
    on_progress: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Runs `count` cases of a campaign, from number `first`.

    If a process dies or is silent for a minute, its current case counts as failed, and a new
    process continues with the next case.
    """
    outcome, start = Outcome(), time.monotonic()
    shares = [range(first + i, first + count, processes) for i in range(min(processes, count))]
    workers = [_Worker(module, seed, share) for share in shares]
    while workers:
        ready = multiprocessing.connection.wait([worker.pipe for worker in workers], timeout=1.0)
        for worker in list(workers):
            if worker.pipe in ready:
                worker.receive(outcome)
            elif worker.is_hung:
                worker.give_up(outcome, "hung")
            if worker.is_done:
                workers.remove(worker)
        outcome.elapsed = time.monotonic() - start
        on_progress(outcome)
    return outcome


class _Worker:
    """A process, and its successor after each case that ends it."""

    def __init__(self, module: str, seed: int, share: range) -> None:
        self._module, self._seed, self._share = module, seed, share
        self._start()

    def _start(self) -> None:
        self.pipe, remote = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=_work, args=(self._module, self._seed, self._share, remote), daemon=True
        )
        self._process.start()
        remote.close()
        self.is_done = False
        self._last_message = time.monotonic()
        self._current: tuple[int, str] | None = None

    @property
    def is_hung(self) -> bool:
        return time.monotonic() - self._last_message > (HUNG if self._current else _STARTUP)

    def receive(self, outcome: Outcome) -> None:
        self._last_message = time.monotonic()
        try:
            message: Any = self.pipe.recv()
        except (EOFError, OSError):
            self.give_up(outcome, "crashed")
            return
        if message is None:
            self._process.join()
            self.is_done = True
        elif isinstance(message, tuple):
            self._current = message
        else:
            for index, verdict in message:
                outcome.add(index, verdict)
            self._share = self._share[len(message) :]
            self._current = None

    def give_up(self, outcome: Outcome, kind: str) -> None:
        self._process.kill()
        self._process.join()
        if self._current is None:
            raise RuntimeError(
                f"A process of {self._module} ended (exit code "
                f"{self._process.exitcode}) before its next case; see its output."
            )
        index, what = self._current
        outcome.add(index, oracle.Verdict(kind=kind, what=what, message=""))
        self._share = self._share[self._share.index(index) + 1 :]
        if self._share:
            self._start()
        else:
            self.is_done = True


def _work(
    module: str, seed: int, share: range, pipe: "multiprocessing.connection.Connection[Any, Any]"
) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with tempfile.TemporaryDirectory() as folder:
        campaign = open_campaign(module, Path(folder))
        for index in share:
            case = make_case(campaign, seed=seed, index=index)
            pipe.send((index, case.what))
            pipe.send([(index, oracle.judge(case))])
    pipe.send(None)
