"""Measures keras_vit and every installed peer.

    python -m benchmarks                                   # inference, B/16, batch 8, float32
    python -m benchmarks --task training --precisions float32 bfloat16 --variants S/16 B/16
    python -m benchmarks --batches 1 2 4 8 16 --out curves # a scaling curve, JSON and a chart
    python -m benchmarks --image-sizes 224 384 512 --layers 6 12 24 --only keras_vit timm
    python -m benchmarks --task training --only keras_vit "keras_vit remat"
    python -m benchmarks --task training --replicas 1 2 4 --only keras_vit
    python -m benchmarks --task cold                       # process start to first prediction
    python -m benchmarks --suite issue --out issue         # every target
    python -m benchmarks --suite accelerator --out gpu     # on an accelerator: B/16, L/16, H/14
    python -m benchmarks --suite trial --rounds 1          # the same on a tiny model, anywhere

Each contender runs in a process of its own. They take turns, so a busy machine slows down all of
them. Figures are medians, ratios are medians over the turns. GFLOP/s count the model's matrix
products, two operations for each multiplication, a training step three times. MFU divides them by
the GFLOP/s of a measured matrix product, in the same precision on the same device. MiB is the peak
memory of the accelerator, or else of the process. "compile s" is what the first turn takes longer
than the others.

The suite "accelerator" compares keras_vit on JAX with timm under torch.compile, for inference and
training in bfloat16. A contender that does not fit into the memory is named and left out; so is one
that is not installed. The figures so far are written after each case.

Peers are KerasHub (keras-hub), timm, Hugging Face (transformers), OpenVINO and ONNX Runtime; the
first three run in --peers-python. Cold starts are comparable only there, as each library imports no
more than its own installation has. bfloat16 is comparable only on processors with units for it: see
the line "machine".
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.cases import CONTENDERS, PRECISIONS, SIZES, TASKS, Case, installed, product
from benchmarks.ceiling import accelerator, ceiling
from benchmarks.measuring import measure
from benchmarks.suites import SUITES

_PACKAGES = ("tensorflow", "keras", "keras-hub", "jax", "torch", "timm", "transformers", "openvino")
# Features of processors that multiply bfloat16, by their names in /proc/cpuinfo.
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the cases of the command line and reports the figures."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.threads:
        # Before any runtime starts: each starts as many threads as there are cores to use.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    available = installed(options.peers_python)
    names = [
        name for name in CONTENDERS if name in available and name in (options.only or CONTENDERS)
    ]
    if not names:
        parser.error(f"Nothing to measure is installed. Received: {options.only}.")
    try:
        plan = _plan(options, names)
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more. Received: {options.rounds}.")
    about = _about(options.rounds)
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    print(f"contenders: {', '.join(names)}")
    missing = [name for name in CONTENDERS if name not in available]
    if missing:
        print(f"not installed: {', '.join(missing)}")
    targets = SUITES.get(options.suite, [])
    figures, ceilings = {}, {}
    for case, contenders in plan.items():
        figures[case] = measure(
            case, contenders, rounds=options.rounds, peers_python=options.peers_python
        )
        if case.precision not in ceilings:
            ceilings[case.precision] = ceiling(case.precision)
        report.print_case(case, figures[case], peak=ceilings[case.precision])
        if options.out:  # after each case: a long run may be stopped
            options.out.mkdir(parents=True, exist_ok=True)
            about = {**about, "ceilings": ceilings}
            report.write_json(options.out / "figures.json", about, figures)
    if targets:
        report.print_targets(figures, targets)
    if options.out:
        _write_chart(options.out, figures)


def _write_chart(folder: Path, figures: report.Figures) -> None:
    print(f"\nWritten: {folder / 'figures.json'}")
    try:
        report.write_chart(folder / "chart.png", figures)
        print(f"Written: {folder / 'chart.png'}")
    except ImportError as error:
        print(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", choices=SUITES, help="a set of cases with their targets")
    add("--task", choices=TASKS, default="inference", help="(default: inference)")
    add("--variants", nargs="+", default=["B/16"], metavar="V", help=f"sizes: {', '.join(SIZES)}")
    add("--image-sizes", nargs="+", type=int, default=[224], metavar="N", help="(default: 224)")
    add("--batches", nargs="+", type=int, metavar="N", help="(default: 8; 1 for a cold start)")
    add("--precisions", nargs="+", choices=PRECISIONS, default=["float32"])
    add("--layers", nargs="+", type=int, default=[0], metavar="N", help="(default: the variant's)")
    add("--replicas", nargs="+", type=int, default=[1], metavar="N", help="of a training step")
    add("--only", nargs="+", choices=CONTENDERS, help="(default: all that are installed)")
    add(
        "--peers-python",
        metavar="PYTHON",
        default=sys.executable,
        help="the Python of an environment with the peers (default: this one)",
    )
    add("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    add("--steps", type=int, default=1, metavar="N", help="in a turn; 20 on an accelerator")
    add("--threads", type=int, help="cores to use (default: all)")
    add("--out", type=Path, metavar="DIR", help="write figures.json and chart.png there")
    return parser


def _plan(options: argparse.Namespace, names: list[str]) -> dict[Case, list[str]]:
    """Returns the contenders of each case; of a suite, those that its targets name."""
    if not options.suite:
        cases = product(
            task=[options.task],
            variant=options.variants,
            image_size=options.image_sizes,
            batch=options.batches or [1 if options.task == "cold" else 8],
            precision=options.precisions,
            layers=options.layers,
            replicas=options.replicas,
            steps=[options.steps],
        )
        return dict.fromkeys(cases, names)
    contenders: dict[Case, set[str]] = {}
    for target in SUITES[options.suite]:
        contenders.setdefault(target.case, set()).update((target.ours, *target.peers))
    return {case: [name for name in names if name in each] for case, each in contenders.items()}


def _about(rounds: int) -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
    has_bfloat16 = not set(_BFLOAT16_FLAGS).isdisjoint(processor.get("flags", "").split())
    versions = {
        package: importlib.metadata.version(package)
        for package in _PACKAGES
        if importlib.util.find_spec(package.replace("-", "_"))
    }
    return {
        "machine": f"{platform.machine()}, {processor.get('model name', 'unknown')}, "
        f"{len(os.sched_getaffinity(0))} cores, bfloat16 {'units' if has_bfloat16 else 'EMULATED'}",
        **_accelerator(),
        "date": time.strftime("%Y-%m-%d"),
        "rounds": rounds,
        **versions,
    }


def _accelerator() -> dict[str, object]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is not None:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        return {"accelerator": process.stdout.strip()}
    return {"accelerator": accelerator() or "none; every figure is the processor's"}


if __name__ == "__main__":
    main()
