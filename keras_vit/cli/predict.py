"""`keras-vit predict`: what a model sees in images, for people, programs and tables."""

import argparse
import contextlib
import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from keras_vit.cli import flags, inference, next_command, output
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
    parser = flags.add_command(
        commands, "predict", run, summary="classify images", description=_DESCRIPTION
    )
    flags.add_source(parser, takes_exports=True)
    parser.add_argument(
        "images",
        metavar="IMAGE",
        nargs="+",
        help="image files, folders, patterns in quotes, or - for a pipe",
    )
    parser.add_argument(
        "--top",
        type=flags.count,
        default=5,
        metavar="N",
        help="number of classes to name for each image (default: 5)",
    )
    parser.add_argument(
        "--csv",
        type=_csv_name,
        metavar="FILE",
        help="write a table to this .csv file, one row an image; whole, or not at all after an "
        "interruption (default: none)",
    )
    inference.add_inference(parser)
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Predicts, prints and writes."""
    if arguments.csv is not None:
        _check_writable(Path(arguments.csv))  # before anything takes time
    model = inference.open_model(arguments)
    _check_classifier(model)
    with contextlib.ExitStack() as stack:
        table = None
        if arguments.csv is not None:
            table = stack.enter_context(_csv(Path(arguments.csv)))
        display = _predict(model, arguments, table)
    display.finish()
    _finish(display, model, arguments)
    return 1 if display.failures else 0


def _predict(
    model: "OpenedModel", arguments: argparse.Namespace, table: Any
) -> output.PredictDisplay:
    from keras_vit import data, evaluation

    left_out: list[LeftOut] = []
    images, count = _images(arguments, left_out)
    is_listed = arguments.json or table is None
    display = output.PredictDisplay(
        total=count, is_listed=is_listed, left_out=left_out, json=arguments.json
    )
    top = min(arguments.top, len(model.labels))
    if table is not None:
        table.writerow(_columns(top))
    found = evaluation.predict_files(
        model.model, images, labels=model.labels, top=top, tta=inference.views(model, arguments)
    )
    with display, contextlib.closing(found), _telling(display, arguments):
        for image, predictions in found:
            if isinstance(predictions, Exception):
                display.fail(f"keras-vit: error: {predictions}")
                continue
            if table is not None:
                pairs = ((one.label, one.probability) for one in predictions)
                table.writerow([image.name, *(value for pair in pairs for value in pair)])
            display.show(image.name, predictions)
    if not display.images and not display.failures:
        raise ValueError(f"There are no {data.FORMATS} files to predict; check the names.")
    return display


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


@contextlib.contextmanager
def _telling(display: output.PredictDisplay, arguments: argparse.Namespace) -> Iterator[None]:
    """Says after Ctrl-C what is there."""
    try:
        yield
    except KeyboardInterrupt:
        table = "" if arguments.csv is None else f"; {arguments.csv} was not written"
        told = f"Interrupted after {counted(display.images, 'image')}{table}."
        raise KeyboardInterrupt(told) from None


def _check_classifier(model: "OpenedModel") -> None:
    if model.exported and not model.has_classifier:
        raise ValueError(
            f"{model.source} has no classifier, so that it names no class; keras-vit evaluate "
            "measures its features, and predict takes an exported classifier."
        )
    if not model.has_classifier:
        raise ValueError(
            f"{model.source} has no classifier, so that it names no class; train one on images of "
            f"yours with keras-vit train --data FOLDER --out RUN --weights {model.source}."
        )


def _finish(
    display: output.PredictDisplay, model: "OpenedModel", arguments: argparse.Namespace
) -> None:
    """Names the file that was written, and the next command."""
    if arguments.json:
        return
    if arguments.csv is not None:
        output.say(f"Written: {arguments.csv}")
    first = display.first
    if model.exported:
        output.say_next("check", arguments.source)
    elif first is not None and Path(first).is_file() and next_command.is_typed(first):
        output.say_next("explain", arguments.source, first, "--out", "seen")
    elif model.run is not None:
        output.say_next("evaluate", arguments.source)
    else:
        output.say_next("export", arguments.source, "--out", "export")


def _csv_name(text: str) -> str:
    """Reads the name of a .csv file, so that no image is replaced by mistake."""
    if not text.lower().endswith(".csv"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name that ends in .csv")
    return text


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; give the name of a .csv file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(path.parent)!r} to write {path.name!r} to; make it."
        )


@contextlib.contextmanager
def _csv(path: Path) -> Iterator[Any]:
    from keras_vit import atomic

    kept = "nothing was written"
    with (
        atomic.whole_file(path, kept=kept) as temporary,
        temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream,
    ):
        yield csv.writer(stream)


def _columns(top: int) -> list[str]:
    """Returns the names of the columns: image, label, probability, label_2, probability_2, ..."""
    numbers = ["", *(f"_{place}" for place in range(2, top + 1))]
    return [
        "image",
        *(f"{name}{number}" for number in numbers for name in ("label", "probability")),
    ]
