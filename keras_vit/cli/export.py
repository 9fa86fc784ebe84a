"""`keras-vit export`: a trained model for TensorFlow Serving, TFLite and ONNX."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import flags, opening, output

if TYPE_CHECKING:
    from keras_vit.exporting import Artefact
    from keras_vit.training import Run

_FORMATS = "savedmodel, tflite, tflite-fp16, tflite-int8, tflite-int8-full, onnx"
_DESCRIPTION = f"""\
Writes a trained model in the formats that servers and devices run, and checks each file against
the model before it is put in place.

The formats: {_FORMATS}.
savedmodel is for TensorFlow Serving: DIR is its base path, DIR/1, DIR/2, ... are the versions.
The others lie in DIR/tflite/N and DIR/onnx/N. The checks use the run's test images, or --images.

examples:
  keras-vit export digits-run --out export/digits
  keras-vit export photos-run --out export/photos --formats savedmodel,tflite,tflite-int8,onnx
  keras-vit export model.keras --labels labels.txt --out export/mine --images photos/*.jpg
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "export",
        help="write a model for servers and devices",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="a run directory, or a .keras file")
    parser.add_argument("--out", metavar="DIR", required=True, help="the directory to export to")
    parser.add_argument(
        "--formats",
        metavar="LIST",
        default="savedmodel",
        help="formats with commas between (default: savedmodel)",
    )
    parser.add_argument(
        "--labels",
        metavar="FILE",
        help="text file with one label a line (default: the run's; for a .keras file 0, 1, ...)",
    )
    parser.add_argument(
        "--images",
        metavar="IMAGE",
        nargs="+",
        help="image files to check on, and to set the ranges of tflite-int8-full "
        "(default: the run's test images; for a .keras file drawn ones)",
    )
    _add_answers(parser)
    output.add_json_flag(parser)
    parser.set_defaults(run=run)


def _add_answers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--top",
        type=flags.count,
        default=5,
        metavar="N",
        help="how many classes the server names for each image (default: 5)",
    )
    parser.add_argument(
        "--tflite-batch",
        type=flags.count,
        default=1,
        metavar="N",
        help="how many images a TFLite file takes at once (default: 1)",
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not check the files (default: check them)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exports and says what was written."""
    from keras_vit.exporting import artefacts

    model, labels, images = _open(arguments)
    made = artefacts.export(
        model,
        arguments.out,
        formats=[name.strip() for name in arguments.formats.split(",")],
        labels=labels,
        images=images,
        top_k=arguments.top,
        tflite_batch_size=arguments.tflite_batch,
        verify=not arguments.no_verify,
    )
    for artefact in made:
        _show(artefact, as_json=arguments.json, verified=not arguments.no_verify)
    if not arguments.json and made[0].format == "savedmodel":
        output.say(f"Next: {Path(arguments.out) / 'serve.sh'}")
    return 0


def _open(arguments: argparse.Namespace) -> tuple[Any, Any, Sequence[Any]]:
    """Returns the model, its labels, and the images to check on."""
    model, run = opening.open_model(arguments.model)
    images = arguments.images or ()
    if run is None:
        return model, arguments.labels, images
    images = images or _test_images(run, is_json=arguments.json)
    return model, arguments.labels or run.labels, images


def _test_images(run: "Run", *, is_json: bool) -> Sequence[Any]:
    try:
        return list(run.data().test.images)
    except (ValueError, OSError, ImportError) as error:
        if not is_json:
            output.say(f"Checking on drawn images, as the run's own cannot be had: {error}")
        return ()


def _show(artefact: "Artefact", *, as_json: bool, verified: bool) -> None:
    if as_json:
        fields = {**dataclasses.asdict(artefact), "path": str(artefact.path)}
        output.print_json("artefact", **fields)
        return
    size = f"{artefact.bytes / 1e6:.1f} MB"
    checked = f"{len(artefact.checks)} checks passed" if verified else "not checked"
    output.say(f"{artefact.format}: {artefact.path} ({size}, {checked})")
