"""`keras-vit check`: whether exported files are as they were written, and answer as they did."""

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import rich.progress

from keras_vit.cli import flags, output

if TYPE_CHECKING:
    from keras_vit.exporting.checking import Checked

UNASKED = 3  # the exit code where the files are whole and their answers could not be asked for
_DESCRIPTION = f"""\
Compares exported files with their record, verification.json, at any time after the export and on
any machine: a copy that was cut short, a flipped bit on a disk, a file that was swapped, changed,
deleted or added. A damaged file often runs and answers wrongly, so nothing else would say so.

First the SHA-256 of every file is compared. Then, without --quick, each artefact whose files are
whole answers to images that are made the same everywhere, and its answers are compared with those
that it gave when it was exported: they show that the runtime of this machine computes it right.

PATH is what keras-vit export wrote: its --out (all versions are checked), one of the versions, or a
file; of a SavedModel all files are checked. Neither the run nor the model is needed. What
lies beside the versions, the settings of the server, may be edited and is not checked. The record
guards against accidents. It does not guard against someone who changes a file and writes a new
record.

Exit codes: 0 all is as it was; 1 a fault was found; {UNASKED} the files are whole, and the answers
of some could not be compared, for want of a runtime or because the export did not verify them.

examples:
  keras-vit check export/digits
  keras-vit check export/digits/onnx/1
  keras-vit check /mnt/models/digits/3 --quick
  keras-vit check export/digits --json
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(
        commands,
        "check",
        run,
        summary="compare exported files with their record",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "path", metavar="PATH", help="the --out of keras-vit export, a version in it, or a file"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compare the files alone, and run nothing (default: ask for the answers too)",
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Checks each version, and prints what was found."""
    from keras_vit.exporting import checking

    path = Path(arguments.path)
    versions = checking.find_versions(path)
    found = []
    for folder in versions:
        found.append(_check(folder, arguments))
        _show(found[-1], place=path if path.is_file() else folder, is_json=arguments.json)
    faults = sum(len(each.faults) for each in found)
    unasked = 0 if arguments.quick else sum(len(each.unasked) for each in found)
    if not arguments.json:
        _finish(found, faults=faults)
    return 1 if faults else UNASKED if unasked else 0


def _check(folder: Path, arguments: argparse.Namespace) -> "Checked":
    from keras_vit.exporting import checking

    path = Path(arguments.path)
    is_hidden = arguments.json or not output.is_terminal()
    with rich.progress.Progress(
        *rich.progress.Progress.get_default_columns(),
        rich.progress.DownloadColumn(),
        transient=True,
        disable=is_hidden,
    ) as bar:
        task = bar.add_task(f"reading {output.plain(folder)}", total=None)

        def on_progress(completed: int, total: int) -> None:
            bar.update(task, completed=completed, total=total)
            if completed == total and not arguments.quick:
                bar.update(task, description="asking for the answers", total=None)

        return checking.check(
            folder,
            file=path if path.is_file() else None,
            quick=arguments.quick,
            on_progress=on_progress,
        )


def _show(checked: "Checked", *, place: Path, is_json: bool) -> None:
    if is_json:
        output.print_json(
            "checked",
            folder=str(checked.folder),
            made=checked.made,
            artefacts=[
                {**dataclasses.asdict(each), "path": str(each.path)} for each in checked.verdicts
            ],
            faults=checked.faults,
            unasked=checked.unasked,
        )
        return
    output.say(f"{place}" + (f" ({checked.made})" if checked.made else ""))
    if checked.verdicts:
        output.show_verdicts(checked.verdicts)
    for text in checked.unasked:
        output.say(f"keras-vit: {text}", file=sys.stderr)
    for text in checked.faults:
        output.say(f"keras-vit: error: {text}", file=sys.stderr)


def _finish(found: "list[Checked]", *, faults: int) -> None:
    """Says the result, and the next command."""
    if faults:
        count = "1 fault" if faults == 1 else f"{faults} faults"
        output.say(f"{count} in {len(found)} versions: export the model again, or copy it again.")
        output.say_next("export", "--help")
        return
    paths = [verdict.path for each in found for verdict in each.verdicts]
    output.say(f"No fault in {len(paths)} artefacts of {len(found)} versions.")
    scripts = [each.folder.parent / "serve.sh" for each in found]
    script = next((each for each in scripts if each.is_file()), None)
    if script is not None:
        output.say(f"Next: {shlex.quote(str(script))}")
    else:
        output.say_next("evaluate", "--help")
