"""`keras-vit list`: the published checkpoints."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras_vit.cli import flags

if TYPE_CHECKING:
    from keras_vit.weights.catalog import CatalogRow

_DESCRIPTION = """\
Lists the published checkpoints. Each name in the column "weights" is a value of `weights`:

  keras_vit.ViTB16(weights="augreg/imagenet21k+imagenet2012")

A short name such as "imagenet21k" means the first row of that variant and data with the nearest
image size. With --variant each row also has the URL of its file. The table leaves out most of the
52 thousand files of the AugReg study; "augreg/<file name>" loads any of them.

examples:
  keras-vit list
  keras-vit list --variant B/16
  keras-vit list --variant Ti/16 --json
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(
        commands, "list", run, summary="list the published weights", description=_DESCRIPTION
    )
    parser.add_argument(
        "--variant", metavar="NAME", help="list only this variant, such as B/16 (default: all)"
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the rows."""
    from keras_vit import variants
    from keras_vit.weights import catalog

    if arguments.variant is not None:
        variants.variant(arguments.variant)
    rows = [row for row in catalog() if arguments.variant in (None, row.variant)]
    if not rows and not arguments.json:
        print(f"No weights of {arguments.variant} are published; it trains from scratch.")
    elif arguments.json:
        for row in rows:
            derived = {"url": row.url, "parameters": row.parameters, "paper": row.paper}
            print(json.dumps({**dataclasses.asdict(row), **derived}))
    else:
        _print_table(rows, with_files=arguments.variant is not None)
    return 0


def _print_table(rows: "Sequence[CatalogRow]", *, with_files: bool) -> None:
    print(f"{'variant':<10}{'weights':<34}{'pixels':>6}{'classes':>10}{'params':>9}{'top-1':>9}")
    for row in rows:
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.2f} %"
        mark = "*" if row.head == "zeros" else " "
        print(
            f"{row.variant:<10}{row.words[1]:<34}{row.image_size:>6}{row.classes:>9,}{mark}"
            f"{row.parameters / 1e6:>7.1f} M{accuracy:>9}".rstrip()
        )
        if with_files:
            size = f" ({row.published_size})" if row.published_size else ""
            source = f"; top-1 by {row.accuracy_source}" if row.accuracy_source else ""
            print(f"  {row.url}{size}{source}")
    if any(row.head == "zeros" for row in rows):
        print("* published without a trained classifier: all zeros")
    print("Licence Apache-2.0; source https://github.com/google-research/vision_transformer")
