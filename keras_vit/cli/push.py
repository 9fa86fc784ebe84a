"""`keras-vit push`: a run on the Hugging Face Hub."""

import argparse
import dataclasses
import re
from pathlib import Path

from keras_vit.cli import flags, output

_DESCRIPTION = """\
Uploads the files of a run to a repository on the Hugging Face Hub, in one commit, with its model
card README.md. The repository is made if there is none.

keras-vit predict, evaluate, explain and export, and keras_vit.load, take its address. Files that
show images of yours, or name them, stay here unless you give --images.

It needs pip install huggingface-hub, and a token that may write: hf auth login, or HF_TOKEN.

examples:
  keras-vit push photos-run hf://owner/photos
  keras-vit push photos-run hf://owner/photos --private
  keras-vit push photos-run hf://owner/photos --license apache-2.0 --images
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(
        commands, "push", run, summary="put a run on the Hugging Face Hub", description=_DESCRIPTION
    )
    parser.add_argument("run_path", metavar="RUN", help="run directory, the --out of a training")
    parser.add_argument("address", metavar="ADDRESS", help="hf://owner/name")
    parser.add_argument(
        "--private",
        action="store_true",
        help="make a new repository private (default: as its owner's settings say, usually public)",
    )
    parser.add_argument(
        "--license",
        type=_license,
        metavar="NAME",
        help="licence in the model card, as the Hub writes it, such as apache-2.0 (default: what "
        "the card says, unknown in a new one)",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="also upload report.html, sample.png, reconstructions.png and splits.csv, which show "
        "images of yours or name their files (default: no)",
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Uploads, and prints the address."""
    from keras_vit import reporting

    published = reporting.push(
        arguments.run_path,
        arguments.address,
        private=arguments.private,
        license=arguments.license,
        images=arguments.images,
    )
    if arguments.json:
        output.print_json("pushed", **dataclasses.asdict(published))
        return 0
    output.say(f"{len(published.files)} files, commit {published.commit}: {published.url}")
    sample = Path(arguments.run_path) / "sample.png"
    if sample.is_file():
        output.say_next("predict", published.address, sample)
    else:
        output.say_next("export", published.address, "--out", "export")
    return 0


def _license(text: str) -> str:
    """Reads the name of a licence."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name such as apache-2.0")
    return text
