"""`keras-vit list`: the published checkpoints, and public repositories that load by address."""

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from keras_vit.cli import flags, output

if TYPE_CHECKING:
    from keras_vit.weights.catalog import CatalogRow, Repository

_DESCRIPTION = """\
Lists the published checkpoints. Each name in the column "weights" of the first table, of Google's
own files, is a value of `weights`:

  keras_vit.ViTB16(weights="augreg/imagenet21k+imagenet2012")

A short name such as "imagenet21k" means the first row of that variant and data with the nearest
image size. With --variant each row also has the URL of its file. The table leaves out most of the
52 thousand files of the AugReg study; "augreg/<file name>" loads any of them.

Each address in the second table is a repository on the Hugging Face Hub of timm or transformers:

  keras_vit.load("hf://facebook/dinov2-base")

`keras_vit.load`, and the commands that take a SOURCE, read many more of these families than the
table has. With --family each row also has its data, what its licence forbids, and its sources.

examples:
  keras-vit list
  keras-vit list --variant B/16
  keras-vit list --variant Ti/16 --json
  keras-vit list --family dinov3
"""

_TRAIN = ("train", "--data", "digits", "--out", "digits-tuned")
_WIDTH = 100  # characters of a line
_MARKS = {"classifier": "", "fine-tuned": "f", "linear": "l", "k-NN": "k", "zero-shot": "z"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(commands, "list", run, "list the published weights", _DESCRIPTION)
    flags.add(
        parser.add_mutually_exclusive_group(),
        """
  --variant NAME  list only Google's files of this variant, such as B/16 (default: all)
  --family NAME  list only the repositories of this family, such as dinov2 (default: all)
""",
    )
    flags.add(parser, flags.JSON)


def run(arguments: argparse.Namespace) -> int:
    """Prints the rows."""
    from keras_vit import variants
    from keras_vit.weights import catalog, repositories

    variant, family = arguments.variant, arguments.family
    if variant is not None:
        variants.variant(variant)
    files = [row for row in catalog() if family is None and variant in (None, row.variant)]
    listed = repositories(family) if variant is None else ()
    if arguments.json:
        for file in files:
            derived = {"url": file.url, "parameters": file.parameters, "paper": file.paper}
            print(json.dumps({**dataclasses.asdict(file), **derived}))
        for row in listed:
            print(json.dumps({**dataclasses.asdict(row), "card": row.card}))
        return 0
    if files:
        _print_table(files, with_files=variant is not None)
    if files and listed:
        print()
    if listed:
        _print_repositories(listed, with_sources=family is not None)
    if family is not None:
        address = min(listed, key=lambda row: row.parameters).address
        output.say_next("export", address, "--out", "export")
    elif variant is None:
        output.say_next("list", "--variant", "Ti/16")
    elif files:
        file = min(files, key=lambda row: row.image_size)
        output.say_next(*_TRAIN, "--model", variant, "--weights", file.words[1])
    else:
        print(f"No weights of {variant} are published; it trains from scratch.")
        output.say_next(*_TRAIN, "--model", variant)
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


def _print_repositories(rows: "Sequence[Repository]", *, with_sources: bool) -> None:
    from keras_vit.weights.catalog import ACCURACY_KINDS, FAMILIES

    width = max(len(row.address) for row in rows)
    restrictions = list(dict.fromkeys(row.restrictions for row in rows if row.restrictions))
    print(f"{'address':<{width}}{'px':>5}{'params':>7} {'licence':<14} top-1")
    family = None
    for row in rows:
        if row.family != family:
            family = row.family
            print(f"{family}: {FAMILIES[family]}")
        mark = str(restrictions.index(row.restrictions) + 1) if row.restrictions else ""
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.2f}"
        kind = _MARKS[row.accuracy_kind] if row.accuracy_kind else ""
        millions = row.parameters / 1e6
        size = f"{millions:.{int(millions < 100)}f} M"  # three digits or more
        print(
            f"{row.address:<{width}}{row.image_size:>5}{size:>7} "
            f"{row.licence:<12} {mark:<1} {accuracy:<5}{kind}".rstrip()
        )
        if with_sources:
            print("\n".join(_sources(row)))
    notes = [f"{place}: {text}" for place, text in enumerate(restrictions, start=1)]
    kinds = {row.accuracy_kind for row in rows}
    notes += [f"{_MARKS[k] or 'top-1'}: {text}" for k, text in ACCURACY_KINDS.items() if k in kinds]
    if any("@" in row.address for row in rows):
        notes.append("@: a pull request of the Hub's converter, which the owner had not merged")
    for note in notes:
        print("\n".join(_wrapped(note)))
    if not with_sources:
        print("--family NAME shows the data, notes and sources of its rows")


def _sources(row: "Repository") -> Iterator[str]:
    from keras_vit.weights.catalog import ACCURACY_KINDS

    ends = f"{row.classes:,} classes" if row.classes else "no classifier"
    ends += f", a layer of {row.representation_dim:,}" if row.representation_dim else ""
    yield f"  trained on {row.data}; {ends}" if row.data else f"  {ends}"
    if row.note:
        yield from _wrapped(row.note, indent="  ")
    yield from (f"  {url}" for url in dict.fromkeys((row.card, row.source)))
    if row.accuracy_kind is not None:
        yield f"  top-1 {ACCURACY_KINDS[row.accuracy_kind]}, by"
        yield f"  {row.accuracy_source}"


def _wrapped(text: str, *, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent or "   ")
