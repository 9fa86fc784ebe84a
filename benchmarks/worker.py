"""Measures one contender in a process of its own, at the requests of its parent.

The parent writes a line for each run, and the worker answers with a line of figures. The parent
times a cold start itself, from before the start of the process to its answer.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cases import CONTENDERS, Case

MARK = "benchmark: "  # begins an answer: frameworks print other lines


def main() -> None:
    """Answers the parent until it closes the pipe."""
    name, fields, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    case = Case(**fields)
    module: Any = importlib.import_module(f"benchmarks.{CONTENDERS[name].module}")
    if len(sys.argv) > 4:  # only write the weights of a cold start
        module.write_weights(name, case, folder)
        return
    module.import_framework(name)
    imported = {"memory": memory("VmRSS"), "version": module.version(name)}
    start = time.perf_counter()
    if case.task == "cold":
        module.first_prediction(name, case, folder)
        answer({**imported, "seconds": time.perf_counter() - start, "peak": memory("VmHWM")})
        return
    run = module.make_run(name, case, folder)
    built = time.perf_counter() - start
    finish, peak = getattr(module, "finish", _nothing), getattr(module, "peak", _nothing)

    def turn() -> None:
        for _ in range(case.steps):
            result = run()
        finish(result)

    turn()
    seconds = time.perf_counter() - start
    answer({**imported, "seconds": seconds, "built": built, "peak": peak() or memory("VmHWM")})
    for _ in sys.stdin:
        start, start_cpu = time.perf_counter(), time.process_time()
        turn()
        seconds = (time.perf_counter() - start) / case.steps
        cpu = (time.process_time() - start_cpu) / case.steps
        answer({"seconds": seconds, "cpu": cpu, "peak": peak() or memory("VmHWM")})


def _nothing(*_: object) -> None:
    """Stands for `finish` and `peak` in modules that have none."""


def answer(figures: dict[str, Any]) -> None:
    """Prints an answer for the parent."""
    print(MARK + json.dumps(figures), flush=True)


def memory(key: str) -> float:
    """Returns the process's memory in MiB: "VmRSS" now, "VmHWM" at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


if __name__ == "__main__":
    main()
