"""Times loading and running full-size models from local files: keras_vit, timm and transformers.

    python -m benchmarks.weights --peers-python path/to/python
    python -m benchmarks.weights --models dinov2-b14-reg dinov3-b16 siglip-so400m clip-l14

Each load is a process of its own; the contenders take turns. The libraries write the files that
they and keras_vit read. "load" is the time from the call until every weight is read once, because a
memory-mapped file is not loaded before; "process" is the time from the start of Python. Memory is
the process's peak of loading above that of the imports. "images/s" is of a batch of two, float32,
at the size that the network is published for. "difference" is the largest one between the answers
to the same images and those of the library that wrote the file, of the largest answer.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.weight_runs import LIBRARIES, MODELS, WEIGHTS
from benchmarks.worker import MARK

ROOT = Path(__file__).parents[1]
FIGURES = ("imports", "load", "process", "memory", "images_per_second")
Turn = dict[str, dict[str, float]]


def main() -> None:
    """Writes the files, measures, and prints the tables and the ratios."""
    description = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weights",
        description=description[0] + "\n\n" + description[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["vit-l16"],
        metavar="NAME",
        help=f"of {', '.join(MODELS)} (default: vit-l16)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument(
        "--peers-python",
        default=sys.executable,
        help="a Python that has timm and transformers (default: this one)",
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON (default: do not)")
    arguments = parser.parse_args()
    results = {
        name: measure(name, rounds=arguments.rounds, peers_python=arguments.peers_python)
        for name in arguments.models
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


def measure(name: str, *, rounds: int, peers_python: str) -> dict[str, list[Turn]]:
    """Returns the figures of every turn for the file of each library, and prints their medians."""
    turns: dict[str, list[Turn]] = {}
    pythons = {"keras_vit": sys.executable, **dict.fromkeys(LIBRARIES, peers_python)}
    for writer in pythons if name == "vit-l16" else LIBRARIES:
        contenders = ("keras_vit", "timm" if writer == "keras_vit" else writer)
        with tempfile.TemporaryDirectory() as temporary:
            folder = f"{temporary}/{name}"
            _run(pythons[writer], "write", writer, name, folder)
            file = next(each for each in Path(folder).glob("model.*") if each.suffix in WEIGHTS)
            measured: list[Turn] = [
                {each: _run(pythons[each], "run", each, name, folder) for each in contenders}
                for _ in range(rounds + 1)
            ]
            size = file.stat().st_size / 2**20
        turns[writer] = measured[1:]  # the first fills the page cache
        _report(f"{name}, {file.name} of {writer}", size, turns[writer])
    return turns


def _run(python: str, *arguments: str) -> dict[str, float]:
    command = [python, "-m", "benchmarks.weight_runs", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{process.stderr[-2000:]}")
    lines = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
    return dict(json.loads(lines[-1].removeprefix(MARK))) if lines else {}


def _report(title: str, size: float, turns: list[Turn]) -> None:
    print(f"{title}, {size:.0f} MiB, medians of {len(turns)} turns")
    print(
        f"{'':<22}{'import s':>9}{'load s':>9}{'process s':>10}{'peak MiB':>10}{'/ file':>8}"
        f"{'images/s':>10}{'difference':>12}"
    )
    ours, peer = turns[0]
    for name in (ours, peer):
        middle = {
            key: statistics.median(turn[name][key] for turn in turns)
            for key in (*FIGURES, "difference")
        }
        print(
            f"{name + ' ' + str(turns[0][name]['version']):<22}{middle['imports']:>9.2f}"
            f"{middle['load']:>9.2f}{middle['process']:>10.2f}{middle['memory']:>10.0f}"
            f"{middle['memory'] / size:>8.2f}{middle['images_per_second']:>10.2f}"
            f"{middle['difference']:>12.1e}"
        )
    ratios = {
        key: statistics.median(turn[peer][key] / turn[ours][key] for turn in turns)
        for key in FIGURES
    }
    shown = ", ".join(f"{key.replace('_', ' ')} {ratio:.2f}" for key, ratio in ratios.items())
    print(f"{peer} / {ours}, turn by turn: {shown}", flush=True)


if __name__ == "__main__":
    main()
