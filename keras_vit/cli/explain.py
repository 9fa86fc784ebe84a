"""`keras-vit explain`: what a model sees in an image, as pictures and one page."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keras_vit.cli import opening, output

if TYPE_CHECKING:
    import keras

_DESCRIPTION = """\
Draws what a model sees in an image: attention rollout, relevance of a class, each head of the last
layer, attention distance, token similarity, position embeddings, embedding filters.

Writes PNG files and index.html, a page that holds them all and needs no network.

examples:
  keras-vit explain digits-run digits-run/sample.png --out seen
  keras-vit explain photos-run holiday.jpg --out seen --class dog
  keras-vit explain my-model.keras holiday.jpg --out seen --class 207
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "explain",
        help="draw what a model sees in an image",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="RUN",
        help="a run directory, the --out of a training, or a .keras file of a model that takes "
        "pixels 0..255",
    )
    parser.add_argument("image", metavar="IMAGE", help="a JPEG, PNG, WebP, BMP or GIF file")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument(
        "--class",
        dest="target",
        metavar="NAME",
        help="the class, by name or number from 0, whose relevance is drawn (default: the "
        "likeliest)",
    )
    output.add_json_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reads the image, draws, names the files."""
    from keras_vit import data, explain

    image = data.read_image(arguments.image)
    model, run = opening.open_model(arguments.model)
    labels = _class_names(model) if run is None else run.labels
    target = None if arguments.target is None else _target(arguments.target, labels)
    files = explain.write_explanation(
        model, image, arguments.out, labels=labels, target=target, title=Path(arguments.image).name
    )
    _show(files, image.shape[:2], tuple(model.input_shape[1:3]), json=arguments.json)
    return 0


def _show(
    files: Sequence[Path], size: tuple[int, ...], taken: tuple[int, ...], *, json: bool
) -> None:
    if json:
        names = [str(file) for file in files]
        output.print_json("explanation", files=names, image=size, taken=taken)
        return
    if size != taken:
        print(f"The image of {_size(size)} pixels was resampled to {_size(taken)}.")
    output.say(f"Written: {', '.join(file.name for file in files[:-1])}")
    output.say(f"Open {files[-1]} in a browser.")


def _size(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


def _class_names(model: "keras.Model") -> tuple[str, ...] | None:
    """Returns the names of a published model's classes, where they are known."""
    from keras_vit import preprocessing

    try:
        known = preprocessing.class_labels(model.output_shape[-1])
    except ValueError:
        return None
    return tuple(name for _, name in known)


def _target(text: str, labels: tuple[str, ...] | None) -> int:
    """Returns the number of a class given by name or number; names come first."""
    if labels is not None and text in labels:
        return labels.index(text)
    if text.isdecimal():
        return int(text)
    some = "" if labels is None else f", such as {', '.join(labels[:5])}"
    raise ValueError(f"There is no class {text!r}; give the number or name of a class{some}.")
