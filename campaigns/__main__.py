"""Runs a campaign: python -m campaigns NAME --count N --seed S."""

import argparse
import pathlib
import pkgutil
import sys
import tempfile
import time

import campaigns
from campaigns import oracle, runner

CORE = ("oracle", "mutations", "runner", "__main__")
_MOST_PRINTED = 20  # failures


def names() -> list[str]:
    """Returns the names of the campaigns."""
    return sorted(m.name for m in pkgutil.iter_modules(campaigns.__path__) if m.name not in CORE)


def main() -> int:
    """Runs the campaign of the command line; returns 1 if a case fails."""
    arguments = _parser().parse_args()
    if arguments.case is not None:
        return _run_case(arguments.name, seed=arguments.seed, index=arguments.case)
    last_print = time.monotonic()

    def print_progress(outcome: runner.Outcome) -> None:
        nonlocal last_print
        if time.monotonic() - last_print > arguments.every:
            last_print = time.monotonic()
            print(_summary(outcome), flush=True)

    outcome = runner.run(
        f"campaigns.{arguments.name}",
        count=arguments.count,
        seed=arguments.seed,
        first=arguments.first,
        processes=arguments.processes,
        on_progress=print_progress,
    )
    for index, verdict in outcome.failures[:_MOST_PRINTED]:
        print(f"{verdict.kind} --seed {arguments.seed} --case {index}: {verdict.what}")
        print(f"    {verdict.message[:1000]} ({verdict.seconds:.2f} s, {verdict.megabytes:.0f} MB)")
    print(_summary(outcome))
    return 1 if outcome.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m campaigns", description=__doc__)
    parser.add_argument("name", choices=names())
    parser.add_argument("--count", type=int, default=1000, help="cases (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--every", type=float, default=30.0, help="seconds between two lines of progress"
    )
    parser.add_argument("--case", type=int, help="run this case alone, in this process")
    return parser


def _run_case(name: str, *, seed: int, index: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        campaign = runner.open_campaign(f"campaigns.{name}", pathlib.Path(folder))
        verdict = oracle.judge(runner.make_case(campaign, seed=seed, index=index))
    print(verdict)
    return 0 if verdict.kind in oracle.FINE else 1


def _summary(outcome: runner.Outcome) -> str:
    counts = ", ".join(f"{outcome.counts[kind]:,} {kind}" for kind in oracle.KINDS)
    return (
        f"{outcome.cases:,} cases in {outcome.elapsed:,.0f} s: {counts}; "
        f"slowest {outcome.seconds:.2f} s, largest {outcome.megabytes:.0f} MB"
    )


if __name__ == "__main__":
    sys.exit(main())
