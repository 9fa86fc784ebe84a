"""`keras-vit predict`: what a model sees in images, for people, programs and tables."""

import argparse
import contextlib
import csv
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from keras_vit.cli import flags, output
from keras_vit.limits import counted

if TYPE_CHECKING:
    from keras_vit.data import LeftOut, NamedImage
    from keras_vit.training import OpenedModel

_DESCRIPTION = """\
Classifies images with the model of a run or of another source, such as a file or hf://owner/name.

IMAGE is a file; a folder, whose images are taken at any depth; a pattern in quotes, such as
"photos/**/*.jpg"; or - for a pipe. If the pipe holds an image, it is that image. Otherwise it holds
names of files and folders, one a line, or with a NUL after each, as find -print0 prints them.

Prints the most probable classes of each image and their probabilities: a table, or a line an image
where there are many. With --csv it prints how many images each class has. An image that cannot be
read gives a line on stderr; the others are predicted, and the exit code is 1. The same image has
the same numbers, however many others there are.

examples:
  keras-vit predict digits-run digits-run/sample.png
  keras-vit predict photos-run holiday-photos --csv holiday.csv
  keras-vit predict photos-run "photos/**/*.jpg" --top 1 --json
  find photos -newer last.txt -print0 | keras-vit predict photos-run -
  curl https://example.org/cat.jpg | keras-vit predict photos-run -
  keras-vit predict photos-run holiday.jpg --tta
  keras-vit predict hf://google/vit-base-patch16-224 holiday.jpg
  keras-vit predict export/photos/onnx/1 holiday.jpg
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(commands, "predict", run, "classify images", _DESCRIPTION)
    flags.add_source(parser, takes_exports=True)
    parser.add_argument(
        "images",
        metavar="IMAGE",
        nargs="+",
        help="image files, folders, patterns in quotes, or - for a pipe",
    )
    flags.add(
        parser,
        f"""
  --top N  number of classes to name for each image (default: 5)
  --csv FILE  write a table to this .csv file, one row an image; whole, or not at all after an
      interruption (default: none)
{flags.JSON}""",
        top={"type": flags.whole(1), "default": 5},
        # So that no image is replaced by mistake.
        csv={"type": flags.matching(r"(?i).*\.csv", "a name that ends in .csv")},
    )
    flags.add_inference(parser)


def run(arguments: argparse.Namespace) -> int:
    """Predicts, prints and writes."""
    if arguments.csv is not None:  # before anything takes time
        path = Path(arguments.csv)
        if path.is_dir():
            raise IsADirectoryError(f"{str(path)!r} is a folder; give the name of a .csv file.")
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"There is no folder {str(path.parent)!r} to write {path.name!r} to; make it."
            )
    opened = flags.open_to_run(arguments)
    _check_classifier(opened)
    left_out: list[LeftOut] = []
    images, count = _images(arguments, left_out)
    is_listed = arguments.json or arguments.csv is None
    display = output.PredictDisplay(total=count, is_listed=is_listed, json=arguments.json)
    with _csv(arguments.csv) as write:
        _predict(opened, images, display, write, arguments)
    display.finish(left_out)
    if arguments.json:
        return 1 if display.failures else 0
    if arguments.csv is not None:
        output.say(f"Written: {arguments.csv}")
    first = display.first or ""
    if not opened.exported and first.isprintable() and Path(first).is_file():
        output.say_next("explain", arguments.source, first, "--out", "seen")
    else:
        output.say_next(*output.after_looking(opened))
    return 1 if display.failures else 0


def _predict(
    opened: "OpenedModel",
    images: "Iterator[NamedImage]",
    display: output.PredictDisplay,
    write: Callable[[list[object]], object],
    arguments: argparse.Namespace,
) -> None:
    """Shows the classes of each image, and writes them to the table."""
    from keras_vit import data, evaluation

    top = min(arguments.top, len(opened.labels))
    numbers = ["", *(f"_{place}" for place in range(2, top + 1))]
    write(["image", *(f"{name}{n}" for n in numbers for name in ("label", "probability"))])
    views = flags.views(opened, arguments)
    found = evaluation.predict_files(opened.model, images, labels=opened.labels, top=top, tta=views)
    try:
        with display, contextlib.closing(found):
            for image, predictions in found:
                if isinstance(predictions, Exception):
                    display.fail(f"error: {predictions}")
                    continue
                pairs = ((one.label, one.probability) for one in predictions)
                write([image.name, *(value for pair in pairs for value in pair)])
                display.show(image.name, predictions)
    except KeyboardInterrupt:
        table = "" if arguments.csv is None else f"; {arguments.csv} was not written"
        done = f"Interrupted after {counted(display.images, 'image')}{table}."
        raise KeyboardInterrupt(done) from None
    if not display.images and not display.failures:
        raise ValueError(f"There are no {data.FORMATS} files to predict; check the names.")


def _images(
    arguments: argparse.Namespace, left_out: "list[LeftOut]"
) -> "tuple[Iterator[NamedImage], int | None]":
    """Returns the images, and how many there are; None where a pipe has to say that."""
    from keras_vit import data

    has_pipe = data.PIPE in arguments.images
    if has_pipe and sys.stdin.isatty():
        raise ValueError("- reads an image, or names of images, from a pipe; there is none.")
    pipe = cast(io.BufferedIOBase, sys.stdin.buffer) if has_pipe else None
    named = data.named_images(arguments.images, pipe=pipe)

    def images() -> "Iterator[NamedImage]":
        for one in named:
            if isinstance(one, data.LeftOut):
                left_out.append(one)
            else:
                yield one

    if has_pipe:
        return images(), None
    listed = list(images())
    return iter(listed), len(listed)


def _check_classifier(model: "OpenedModel") -> None:
    if model.has_classifier:
        return
    advice = (
        "keras-vit evaluate measures its features, and predict takes an exported classifier"
        if model.exported
        else "train one on images of yours with keras-vit train --data FOLDER --out RUN --weights "
        f"{model.source}"
    )
    raise ValueError(f"{model.source} has no classifier, so that it names no class; {advice}.")


@contextlib.contextmanager
def _csv(name: str | None) -> Iterator[Callable[[list[object]], object]]:
    """Gives what writes a row of the table, which is there at the end; nothing without a name."""
    from keras_vit import atomic

    if name is None:
        yield lambda row: None
        return
    with (
        atomic.whole_file(Path(name), kept="nothing was written") as temporary,
        temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream,
    ):
        yield csv.writer(stream).writerow
