"""Prints the time of keras_vit in each kernel, by TensorFlow's profiler.

    python -m benchmarks.profile
    python -m benchmarks.profile --task training --variant S/16 --batch 16

Kernels may run at the same time on several threads, so their sum may exceed the time of a run.
"XLA loop" is all element-wise loops that XLA compiles.
"""

import collections
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import PRECISIONS, Case, case_parser
from benchmarks.keras_runs import import_framework, make_run

# Events of kernels are named "place in the model:kind"; only that of XLA's loops is not.
_KERNEL = re.compile(r"[^:]+:(\w+)")
_LOOP = "CpuExecutable::ExecuteAsyncOnStream"
_RUNS = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the case under the profiler and prints the table."""
    parser = case_parser("python -m benchmarks.profile", __doc__)
    add = parser.add_argument
    add("--task", choices=("inference", "training"), default="inference", help="(%(default)s)")
    add("--precision", choices=PRECISIONS, default="float32", help="(%(default)s)")
    try:
        case = Case(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))
    import_framework("keras_vit")
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        seconds = _profile(case, Path(folder))
        milliseconds, calls = _kernels(next(Path(folder).rglob("*.xplane.pb")))
    print(f"{case}: {seconds * 1e3:.0f} ms a run, of which ms in each kernel")
    for name, total in milliseconds.most_common(20):
        share = total / sum(milliseconds.values())
        print(f"{name:32}{total / _RUNS:>9.1f}{share:>7.1%}{calls[name] // _RUNS:>7} calls")


def _profile(case: Case, folder: Path) -> float:
    """Returns the seconds of a run, and writes the profile into the folder."""
    import tensorflow as tf

    run = make_run("keras_vit", case, folder)
    run()
    run()
    with tf.profiler.experimental.Profile(str(folder)):
        start = time.perf_counter()
        for _ in range(_RUNS):
            run()
        return (time.perf_counter() - start) / _RUNS


def _kernels(path: Path) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Returns the milliseconds and the calls of each kind of kernel."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space: Any = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    milliseconds: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for plane in space.planes:
        kinds = {key: _kind(each.name) for key, each in plane.event_metadata.items()}
        for event in (event for line in plane.lines for event in line.events):
            kind = kinds.get(event.metadata_id)
            if kind is not None:
                milliseconds[kind] += event.duration_ps / 1e9
                calls[kind] += 1
    return milliseconds, calls


def _kind(name: str) -> str | None:
    """Returns the kernel of an event, None if it is not one."""
    if name == _LOOP:
        return "XLA loop"
    kernel = _KERNEL.fullmatch(name)
    return kernel and kernel[1]


if __name__ == "__main__":
    main()
