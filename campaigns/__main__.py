"""Carries a campaign out: python -m campaigns NAME --count N --seed S."""

import argparse
import pathlib
import pkgutil
import sys
import tempfile
import time

import campaigns
from campaigns import oracle, runner

CORE = ("oracle", "mutations", "runner", "__main__")
_SHOWN = 20


def names() -> list[str]:
    """Returns the campaigns that there are."""
    return sorted(m.name for m in pkgutil.iter_modules(campaigns.__path__) if m.name not in CORE)


def main() -> int:
    """Runs what the command line asks for; 1 if one case is not fine."""
    arguments = _parser().parse_args()
    if arguments.case is not None:
        return _one(arguments.name, seed=arguments.seed, index=arguments.case)
    told = time.monotonic()

    def tell(outcome: runner.Outcome) -> None:
        nonlocal told
        if time.monotonic() - told > arguments.every:
            told = time.monotonic()
            print(_line(outcome), flush=True)

    outcome = runner.run(
        f"campaigns.{arguments.name}",
        count=arguments.count,
        seed=arguments.seed,
        first=arguments.first,
        processes=arguments.processes,
        tell=tell,
    )
    for index, verdict in outcome.bad[:_SHOWN]:
        print(f"{verdict.kind} --seed {arguments.seed} --case {index}: {verdict.what}")
        print(f"    {verdict.message[:1000]} ({verdict.seconds:.2f} s, {verdict.megabytes:.0f} MB)")
    print(_line(outcome))
    return 0 if outcome.is_fine else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m campaigns", description=__doc__)
    parser.add_argument("name", choices=names())
    parser.add_argument("--count", type=int, default=1000, help="cases (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two lines")
    parser.add_argument("--case", type=int, help="carry out this case alone, in this process")
    return parser


def _one(name: str, *, seed: int, index: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        campaign = runner.open_campaign(f"campaigns.{name}", pathlib.Path(folder))
        verdict = oracle.judge(runner.make_case(campaign, seed=seed, index=index))
    print(verdict)
    return 0 if verdict.kind in oracle.FINE else 1


def _line(outcome: runner.Outcome) -> str:
    counts = ", ".join(f"{outcome.counts[kind]:,} {kind}" for kind in oracle.KINDS)
    return (
        f"{outcome.cases:,} cases in {outcome.passed:,.0f} s: {counts}; "
        f"slowest {outcome.seconds:.2f} s, largest {outcome.megabytes:.0f} MB"
    )


if __name__ == "__main__":
    sys.exit(main())
