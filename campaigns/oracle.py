"""Decides what one attack ended in: this is the one place that says what is right."""

import dataclasses
import os
import re
import resource
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import keras_vit

SECONDS = 1.0  # of processor time, as others may be busy too; a refusal takes no longer
MEGABYTES = 100.0  # nor more memory above what the process held before
LONGEST = 600  # characters of an error
FINE = ("same", "refused", "unseen")
BAD = ("wrong", "unclear", "slow", "large", "crashed", "hung")
KINDS = (*FINE, *BAD)

_PACKAGE = str(Path(keras_vit.__file__).parent)
# Text of others that helps nobody who has a damaged file.
_FOREIGN = re.compile(r"allow_pickle|Traceback \(most recent|\bat 0x[0-9a-f]+|\x1b|\n.*\n.*\n")
# What a refusal is: errors that callers of Python catch by these names.
_REFUSALS = (ValueError, OSError, ImportError, FloatingPointError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attack.

    Attributes:
        what: what was done to what, in a line.
        act: does what a user would, and returns a digest of the bits that came out.
        sound: the digest of the undamaged original.
        names: an error must hold one of these, as the name of the file that is at fault.
        has_checksum: whether the format can see each changed bit. Otherwise other bits may come
            out, and count as "unseen".
        seconds: how long it may take, where sound input takes long itself.
    """

    what: str
    act: Callable[[], str]
    sound: str
    names: tuple[str, ...]
    has_checksum: bool = True
    seconds: float = SECONDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a case ended in.

    Attributes:
        kind: one of `KINDS`. "same": the original's bits came out. "refused": a clear error of
            ours. "unseen": other bits, of a format without checksum. "wrong": other bits.
            "unclear": an error that is not ours, does not name the file or is too long. "slow" and
            "large": a case above its limits. "crashed" and "hung" are the runner's.
        what: the case's own words.
        message: the error, if there was one.
        seconds: the processor time it took.
        megabytes: the most memory it held above what was held before; 0 where that is not known.
    """

    kind: str
    what: str
    message: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0


def judge(case: Case) -> Verdict:
    """Carries a case out, and decides."""
    before = _start_peak()
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
    ours = isinstance(error, _REFUSALS) and _raised_in(error).startswith(_PACKAGE)
    return ours and says_enough(str(error), names)


def says_enough(text: str, names: tuple[str, ...]) -> bool:
    """Whether an error's text names a file that may be at fault, and is short and clean."""
    named = any(name in text for name in names)
    return named and len(text) <= LONGEST and not _FOREIGN.search(text)


def _raised_in(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _start_peak() -> float:
    """Starts a new highest mark of the process's memory where the system can; returns MB held."""
    try:
        with Path("/proc/self/clear_refs").open("w") as file:
            file.write("5")
    except OSError:
        return _peak()
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _peak() -> float:
    """Returns the highest memory of the process in MB, since `_start_peak` or since it began."""
    try:
        with Path("/proc/self/status").open() as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["VmHWM"].split()[0]) / 2**10
    except (OSError, KeyError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
