"""Judges the result of an attack: the only place that defines which results are right."""

import dataclasses
import os
import re
import resource
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import keras_vit

SECONDS = 5.0  # of processor time; ten times the slowest case, on a processor of 2023
MEGABYTES = 100.0  # above the memory of the process before the case
LONGEST = 600  # characters of an error
FINE = ("same", "refused", "unseen")
BAD = ("wrong", "unclear", "slow", "large", "crashed", "hung")
KINDS = (*FINE, *BAD)

_PACKAGE = str(Path(keras_vit.__file__).parent)
# Text of other libraries, which does not help a user with a damaged file.
_FOREIGN = re.compile(r"allow_pickle|Traceback \(most recent|\bat 0x[0-9a-f]+|\x1b|\n.*\n.*\n")
# The errors that count as a refusal: users of Python catch these classes.
_REFUSALS = (ValueError, OSError, ImportError, FloatingPointError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attack.

    Attributes:
        what: the file and its damage, in one line.
        act: acts as a user would, and returns a digest of the result.
        sound: the digest for the undamaged file.
        names: names of the files that may be at fault; an error must contain one.
        has_checksum: whether the format detects each changed bit. Otherwise another result counts
            as "unseen".
        seconds: limit of the processor time, more than `SECONDS` where undamaged files need it.
    """

    what: str
    act: Callable[[], str]
    sound: str
    names: tuple[str, ...]
    has_checksum: bool = True
    seconds: float = SECONDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a case.

    Attributes:
        kind: one of `KINDS`. "same": the result of the undamaged file. "refused": a clear error of
            keras_vit. "unseen": another result, of a format without checksum. "wrong": another
            result. "unclear": an error of another library, without the file's name, or too long.
            "slow" and "large": a case above its limits. The runner adds "crashed" and "hung".
        what: the case's `what`.
        message: the error; empty without one.
        seconds: its processor time.
        megabytes: its peak memory above that of the process before; 0 where it is unknown.
    """

    kind: str
    what: str
    message: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0


def judge(case: Case) -> Verdict:
    """Runs a case and judges its result."""
    before = _reset_peak()
    start = time.process_time()
    try:
        digest = case.act()
    except Exception as error:
        kind = "refused" if _is_clear(error, case.names) else "unclear"
        message = f"{type(error).__name__}: {error}"
        if kind == "unclear":
            message += f" [raised in {_raised_in(error)}]"
    else:
        kind = "same" if digest == case.sound else "wrong" if case.has_checksum else "unseen"
        message = ""
    seconds = time.process_time() - start
    megabytes = max(_peak() - before, 0.0)
    if kind in FINE and seconds > case.seconds:
        kind = "slow"
    if kind in FINE and megabytes > MEGABYTES:
        kind = "large"
    return Verdict(kind=kind, what=case.what, message=message, seconds=seconds, megabytes=megabytes)


def _is_clear(error: Exception, names: tuple[str, ...]) -> bool:
    is_ours = isinstance(error, _REFUSALS) and _raised_in(error).startswith(_PACKAGE)
    return is_ours and says_enough(str(error), names)


def says_enough(text: str, names: tuple[str, ...]) -> bool:
    """Whether an error's text names a file at fault, is short, and has no foreign text."""
    has_name = any(name in text for name in names)
    return has_name and len(text) <= LONGEST and not _FOREIGN.search(text)


def _raised_in(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _reset_peak() -> float:
    """Resets the peak memory of the process where the system can; returns its current MB."""
    try:
        with Path("/proc/self/clear_refs").open("w") as file:
            file.write("5")
    except OSError:
        return _peak()
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _peak() -> float:
    """Returns the peak memory of the process in MB, since `_reset_peak` or its start."""
    try:
        with Path("/proc/self/status").open() as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["VmHWM"].split()[0]) / 2**10
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
