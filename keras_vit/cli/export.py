"""`keras-vit export`: a trained model for TensorFlow Serving, TFLite and ONNX."""

import argparse
import dataclasses
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import flags, output
from keras_vit.exporting.formats import FORMATS

if TYPE_CHECKING:
    from keras_vit.exporting import Artefact
    from keras_vit.training import OpenedModel, Run

_FORMATS = textwrap.fill(f"The formats: {', '.join(FORMATS)}.", 104, break_on_hyphens=False)
_DESCRIPTION = f"""\
Writes a trained model in the formats that servers and devices run. Each file is compared with the
model before it is put in place, on the run's test images or on --images.

{_FORMATS}
int8 multiplies in int8, the fastest on processors; int8-weights stores in int8 and computes in
float32, for small files. docs/serving.md says which is fastest where.
savedmodel is for TensorFlow Serving: DIR is its base path; DIR/1, DIR/2, ... are the versions.
The other formats are written to DIR/tflite/N and DIR/onnx/N.

examples:
  keras-vit export digits-run --out export/digits
  keras-vit export photos-run --out export/photos --formats savedmodel,tflite,tflite-int8,onnx
  keras-vit export model.keras --labels labels.txt --out export/mine --images photos/*.jpg
  keras-vit export hf://google/vit-base-patch16-224 --out export/vit
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(
        commands,
        "export",
        run,
        summary="write a model for servers and devices",
        description=_DESCRIPTION,
    )
    flags.add_source(parser)
    parser.add_argument("--out", metavar="DIR", required=True, help="directory to export to")
    parser.add_argument(
        "--formats",
        metavar="LIST",
        default="savedmodel",
        help="formats to write, with commas between (default: savedmodel)",
    )
    parser.add_argument(
        "--labels",
        metavar="FILE",
        help="text file with one label per line (default: the source's; 0, 1, ... where it "
        "names no classes)",
    )
    parser.add_argument(
        "--images",
        metavar="IMAGE",
        nargs="+",
        help="image files to compare on and to calibrate with, with their classes if they lie in "
        "folders named after them (default: the run's test images; for another source generated "
        "ones)",
    )
    _add_settings(parser)
    flags.add_json(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--top",
        type=flags.count,
        default=5,
        metavar="N",
        help="number of classes that the server returns for each image (default: 5)",
    )
    parser.add_argument(
        "--tflite-batch",
        type=flags.count,
        default=1,
        metavar="N",
        help="number of images in a batch of a TFLite file (default: 1)",
    )
    parser.add_argument(
        "--opset",
        type=flags.count,
        metavar="N",
        help="version of ONNX's operators, 17 to 22, for runtimes that know no later one; a model "
        "that tf2onnx has to convert can be 17 or 18 (default: 20, or 18 if converted)",
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not check the files (default: check them)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exports, and prints what was written."""
    from keras_vit.exporting import artefacts

    opened = flags.open_model(arguments.source)
    labels, images = arguments.labels or opened.labels or None, arguments.images or ()
    targets = _folder_targets(images, labels)
    if opened.run is not None and not images:
        images, targets = _test_images(opened.run, is_json=arguments.json)
    try:
        exported = artefacts.export(
            opened.model,
            arguments.out,
            formats=[name.strip() for name in arguments.formats.split(",")],
            labels=labels,
            images=images,
            targets=targets,
            top_k=arguments.top,
            tflite_batch_size=arguments.tflite_batch,
            opset=arguments.opset,
            verify=not arguments.no_verify,
        )
    except TypeError as error:
        if str(error).startswith("export "):  # what it takes: no fault, but a sentence to print
            raise ValueError(str(error)) from error
        raise
    for artefact in exported:
        _show(artefact, is_json=arguments.json, is_verified=not arguments.no_verify)
    if not arguments.json:
        _say_next(exported, opened, arguments)
    return 0


def _say_next(
    exported: "Sequence[Artefact]", opened: "OpenedModel", arguments: argparse.Namespace
) -> None:
    if any(artefact.format == "savedmodel" for artefact in exported):
        output.say(f"Next: {shlex.quote(str(Path(arguments.out) / 'serve.sh'))}")
    elif opened.run is not None and opened.has_classifier:
        output.say_next("evaluate", arguments.source)
    else:
        formats = ("--formats", "savedmodel")
        output.say_next("export", arguments.source, "--out", arguments.out, *formats)


def _test_images(run: "Run", *, is_json: bool) -> tuple[Sequence[Any], Sequence[int]]:
    """Returns the run's test images and their classes, or nothing."""
    try:
        test = run.data().test
        return list(test.images), [int(target) for target in test.targets]
    except (ValueError, OSError, ImportError) as error:
        if not is_json:
            output.say(f"Checking on generated images, as the run's cannot be loaded: {error}")
        return (), ()


def _folder_targets(images: Sequence[str], labels: Sequence[str] | str | None) -> Sequence[int]:
    """Returns the class of each image if all of them lie in folders named after classes."""
    if isinstance(labels, str):
        labels = Path(labels).read_text(encoding="utf-8").splitlines() if images else ()
    folders = [Path(image).absolute().parent.name for image in images]
    places = {label: place for place, label in enumerate(labels or ())}
    return [places[name] for name in folders] if set(folders) <= set(places) else ()


def _show(artefact: "Artefact", *, is_json: bool, is_verified: bool) -> None:
    if is_json:
        fields = {**dataclasses.asdict(artefact), "path": str(artefact.path)}
        output.print_json("artefact", **fields)
        return
    size = f"{artefact.bytes / 1e6:.1f} MB"
    checks = f"{len(artefact.checks)} checks passed" if is_verified else "not checked"
    kept = f"{len(artefact.floats)} kernels in float32, "
    kept = kept if artefact.floats else ""
    output.say(f"{artefact.format}: {artefact.path} ({size}, {kept}{checks})")
