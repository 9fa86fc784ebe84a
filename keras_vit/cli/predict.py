"""`keras-vit predict`: what images show."""

import argparse
import sys

from keras_vit.cli import evaluate, flags, opening, output

_DESCRIPTION = """\
Names what images show, with the model of a run.

Prints the likeliest classes of each image and their probabilities. An image that cannot be read is
named, the others are predicted, and the exit code is 1.

examples:
  keras-vit predict digits-run digits-run/sample.png
  keras-vit predict photos-run *.jpg --top 1
  keras-vit predict photos-run holiday.jpg --json
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "predict",
        help="name what images show",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="RUN", help="a run directory, the --out of a training")
    parser.add_argument(
        "images", metavar="IMAGE", nargs="+", help="JPEG, PNG, WebP, BMP or GIF files"
    )
    parser.add_argument(
        "--top",
        type=flags.count,
        default=5,
        metavar="N",
        help="how many classes to name for each image (default: 5)",
    )
    evaluate.add_flag(parser)
    output.add_json_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Reads the images, predicts, prints."""
    from keras_vit import data, evaluation

    opened = opening.open_run(arguments)
    images, problems = {}, []
    for path in arguments.images:
        try:
            images[path] = data.read_image(path)
        except (ValueError, OSError) as error:
            problems.append(error)
    predictions = evaluation.predict(
        opened.model, list(images.values()), labels=opened.labels, top=arguments.top
    )
    output.show_predictions(dict(zip(images, predictions, strict=True)), json=arguments.json)
    for problem in problems:
        output.say(f"keras-vit: error: {problem}", file=sys.stderr)
    return 1 if problems else 0
