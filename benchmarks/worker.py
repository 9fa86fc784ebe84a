"""One contender in a process of its own: makes its run, then times it whenever it is asked.

The parent writes a line for each run; the answer is a line with the seconds. A cold start is timed
by the parent, from before the process exists to the line that says that it is ready.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cases import CONTENDERS, Case

MARK = "benchmark: "  # what the answers begin with, among whatever else a framework prints


def main() -> None:
    """Serves the parent until it closes the pipe."""
    name, fields, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    case = Case(**fields)
    module: Any = importlib.import_module(f"benchmarks.{CONTENDERS[name].module}")
    if len(sys.argv) > 4:  # write the weights that a cold start will read
        module.write_weights(name, case, folder)
        return
    module.import_framework(name)
    imported = {"memory": memory("VmRSS"), "version": module.version(name)}
    begun = time.perf_counter()
    if case.task == "cold":
        module.first_prediction(name, case, folder)
        say({**imported, "seconds": time.perf_counter() - begun, "peak": memory("VmHWM")})
        return
    run = module.make_run(name, case, folder)
    finish, peak = getattr(module, "finish", _nothing), getattr(module, "peak", _nothing)

    def turn() -> None:
        for _ in range(case.steps):
            result = run()
        finish(result)

    turn()
    say({**imported, "seconds": time.perf_counter() - begun, "peak": peak() or memory("VmHWM")})
    for _ in sys.stdin:
        begun, begun_cpu = time.perf_counter(), time.process_time()
        turn()
        taken = (time.perf_counter() - begun) / case.steps
        cpu = (time.process_time() - begun_cpu) / case.steps
        say({"seconds": taken, "cpu": cpu, "peak": peak() or memory("VmHWM")})


def _nothing(*_: object) -> None:
    """What a module says that does not compute on an accelerator, or computes nothing later."""


def say(answer: dict[str, Any]) -> None:
    """Answers the parent."""
    print(MARK + json.dumps(answer), flush=True)


def memory(key: str) -> float:
    """Returns the process's memory in MiB: "VmRSS" now, "VmHWM" at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


if __name__ == "__main__":
    main()
