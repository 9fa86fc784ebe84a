"""`keras-vit compare`: several runs side by side."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from keras_vit.cli import flags, next_command, output
from keras_vit.limits import counted

if TYPE_CHECKING:
    from keras_vit.reporting import Comparison

_DESCRIPTION = """\
Compares runs: their accuracy with its interval, the settings that differ, their learning curves,
and, where they have test images in common, McNemar's test of each pair.

Each run is measured again on its own test images. If these are gone, the numbers are those of its
metrics.json, and there is no test. The page needs no other file and no network.

examples:
  keras-vit compare photos-run tuned-run
  keras-vit compare photos-run tuned-run lora-run --out comparison.html
  keras-vit compare photos-run tuned-run --json
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(
        commands, "compare", run, summary="compare several runs", description=_DESCRIPTION
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directories, 2 to 8")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="page to write or replace (default: comparison.html; none with --json)",
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, and writes the page."""
    from keras_vit import reporting

    out = arguments.out or (None if arguments.json else "comparison.html")
    if out is not None and not Path(out).parent.is_dir():  # before the runs are measured
        raise FileNotFoundError(f"There is no folder for {out!r}; make it, or give another --out.")
    comparison = reporting.compare(arguments.runs)
    if out is not None:
        reporting.write_comparison(out, comparison)
    if arguments.json:
        _print_json(comparison)
        return 0
    _print(comparison)
    output.say(f"Open {out} in a browser.")
    output.say_next(*next_command.after_comparison(comparison))
    return 0


def _print_json(comparison: "Comparison") -> None:
    for each in comparison.runs:
        output.print_json(
            "run",
            run=each.name,
            parameters=each.parameters,
            seconds=each.seconds,
            result=each.config.get("result"),
            test=each.numbers or None,
        )
    output.print_json("settings", differ=comparison.settings)
    for pair in comparison.pairs:
        output.print_json("pair", **dataclasses.asdict(pair))
    for note in comparison.notes:
        output.print_json("note", text=note)


def _print(comparison: "Comparison") -> None:
    for each in comparison.runs:
        numbers = each.numbers
        if not numbers:
            loss = each.config.get("result", {}).get("validation_loss")
            output.say(f"{each.name}: validation loss {loss}")
            continue
        low, high = numbers["accuracy_interval"]
        output.say(
            f"{each.name}: accuracy {numbers['accuracy']:.2%} of {numbers['images']} test images "
            f"(95% interval {low:.1%} to {high:.1%}), loss {numbers['loss']:.4f}"
        )
    for pair in comparison.pairs:
        output.say(
            f"{pair.first} and {pair.second}: of {counted(pair.images, 'image')} the first alone "
            f"gets {pair.first_alone} right, the second alone {pair.second_alone}; "
            f"p = {pair.p_corrected:.3g}. {pair.verdict}"
        )
    for note in comparison.notes:
        output.say(note)
