"""Measures what an export costs: seconds of each part, and memory beside the model's own.

    python -m benchmarks.export_cost --variant B/16 --formats savedmodel tflite

Each format is exported in a process of its own, from a model with random weights. Memory is the
highest of the exporting process above what it had with the model in it, over the bytes of the
weights; the process that checks the files is measured apart.
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import export as serving

_PEAK, _NOW = "VmHWM", "VmRSS"
# The parts of an export: the module and the function that does each.
_PARTS = (
    ("rebuild", "rebuild"),
    ("samples", "make_verification_images"),
    ("samples", "compare_rebuilt"),
    ("savedmodel", "write"),
    ("tflite", "write"),
    ("onnx_files", "write"),
    ("verification", "run_checks"),
    ("artefacts", "publish"),
)


def main() -> None:
    """Runs each format in a process, and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variant", default="B/16", help="with random weights (%(default)s)")
    parser.add_argument("--formats", nargs="+", default=["savedmodel", "tflite"])
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.variant, options.alone)))
        return
    for name in options.formats:
        command = [sys.executable, "-m", "benchmarks.export_cost", "--variant", options.variant]
        finished = subprocess.run(
            [*command, "--alone", name], check=True, capture_output=True, text=True
        )
        figures = json.loads(finished.stdout.splitlines()[-1])
        if options.json:
            print(json.dumps({"format": name, **serving.about(options.variant), **figures}))
            continue
        print(
            f"{name}: {figures['seconds']:.1f} s, {figures['processor']:.1f} s of processors, "
            f"{figures['memory']:.1f} times the weights, checks {figures['checker']:.1f}"
        )
        for part, seconds in figures["parts"].items():
            print(f"  {part:24}{seconds:8.1f} s")


def measure(variant: str, name: str) -> dict[str, Any]:
    """Exports one format, and returns seconds, those of each part, and memory over the weights."""
    from keras_vit.exporting import export

    model = serving.make_model(variant, 224)
    model(np.zeros((1, *model.input_shape[1:]), np.float32))  # its kernels are loaded
    weights = 4 * model.count_params()
    with tempfile.TemporaryDirectory() as folder, _timed() as parts:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
        before, start, used = _status(_NOW), time.perf_counter(), _processor_seconds()
        (artefact,) = export(model, Path(folder) / "model", formats=[name])
        seconds, used = time.perf_counter() - start, _processor_seconds() - used
        peak = _status(_PEAK)
    children = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "seconds": seconds,
        "processor": used,
        "memory": (peak - before) / weights,
        "checker": children / weights,
        "bytes": artefact.bytes,
        "parts": parts,
    }


@contextlib.contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Measures the seconds of each part while it is in use."""
    import importlib

    parts: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                parts[name] = parts.get(name, 0.0) + time.perf_counter() - start

        return run

    with contextlib.ExitStack() as stack:
        for module_name, name in _PARTS:
            module = importlib.import_module(f"keras_vit.exporting.{module_name}")
            function = getattr(module, name)
            stack.callback(setattr, module, name, function)
            setattr(module, name, timed(name, function))
        yield parts


def _processor_seconds() -> float:
    """Returns the seconds that processors have worked for this process and those it has ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _status(name: str) -> int:
    """Returns a number of bytes that the system knows of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


if __name__ == "__main__":
    main()
