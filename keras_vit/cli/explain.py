"""`keras-vit explain`: what a model attends to in an image, as pictures and one page."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from keras_vit.cli import flags, output

_DESCRIPTION = """\
Draws what a model attends to in an image: attention rollout, relevance of a class, each head of the
last layer, attention distance, token similarity, position embeddings, embedding filters.

Writes PNG files, and index.html, one page that contains them all and needs no network.

examples:
  keras-vit explain digits-run digits-run/sample.png --out seen
  keras-vit explain photos-run holiday.jpg --out seen --class dog
  keras-vit explain my-model.keras holiday.jpg --out seen --class 207
  keras-vit explain hf://timm/deit_base_patch16_224.fb_in1k holiday.jpg --out seen
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(
        commands, "explain", run, summary="draw what a model attends to", description=_DESCRIPTION
    )
    flags.add_source(parser)
    parser.add_argument(
        "image", metavar="IMAGE", help="a JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF file"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--class",
        dest="target",
        metavar="NAME",
        help="class whose relevance is drawn, by name or number from 0 (default: the most "
        "probable)",
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Reads the image, draws, prints the names of the files."""
    from keras_vit import data, explain

    image = data.read_image(arguments.image)
    opened = flags.open_model(arguments.source)
    model, labels = opened.model, opened.labels or None
    target = None if arguments.target is None else _target(arguments.target, labels)
    files = explain.write_explanation(
        model, image, arguments.out, labels=labels, target=target, title=Path(arguments.image).name
    )
    _show(files, image.shape[:2], tuple(model.input_shape[1:3]), json=arguments.json)
    if not arguments.json:
        if opened.run is not None and opened.has_classifier:
            output.say_next("evaluate", arguments.source)
        else:
            output.say_next("export", arguments.source, "--out", "export")
    return 0


def _show(
    files: Sequence[Path], size: tuple[int, ...], input_size: tuple[int, ...], *, json: bool
) -> None:
    if json:
        names = [str(file) for file in files]
        output.print_json("explanation", files=names, image=size, taken=input_size)
        return
    from keras_vit.explain import attention

    if size != input_size:
        old, new = attention.sides(size), attention.sides(input_size)
        output.say(f"The image is {old}; it was resampled to {new}, the size that the model takes.")
    output.say(f"Written: {', '.join(file.name for file in files[:-1])}")
    output.say(f"Open {files[-1]} in a browser.")


def _target(text: str, labels: tuple[str, ...] | None) -> int:
    """Returns the number of a class given by name or number; names come first."""
    if labels is not None and text in labels:
        return labels.index(text)
    if text.isdecimal():
        return int(text)
    examples = "" if labels is None else f", such as {', '.join(labels[:5])}"
    raise ValueError(f"There is no class {text!r}; give the number or name of a class{examples}.")
