"""`keras-vit export`, `check` and `push`: a trained model for servers, devices and the Hub."""

import argparse
import dataclasses
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich.progress

from keras_vit.cli import flags, output
from keras_vit.exporting.formats import FORMATS
from keras_vit.limits import counted

if TYPE_CHECKING:
    from keras_vit.exporting.records import Checked

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
_CHECK = """\
Compares exported files with their record, verification.json, at any time after the export and on
any machine: a copy that was cut short, a flipped bit on a disk, a file that was swapped, changed,
deleted or added. A damaged file often runs and answers wrongly, so nothing else would say so.

PATH is what keras-vit export wrote: its --out (all versions are checked), one of the versions, or a
file; of a SavedModel all files are checked. Neither the run nor the model is needed. What
lies beside the versions, the settings of the server, may be edited and is not checked. The record
guards against accidents. It does not guard against someone who changes a file and writes a new
record. keras-vit evaluate PATH runs the model on this machine.

The exit code is 1 if a fault was found.

examples:
  keras-vit check export/digits
  keras-vit check export/digits/onnx/1
  keras-vit check export/digits --json
"""
_PUSH = """\
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
        commands, "export", run, "write a model for servers and devices", _DESCRIPTION
    )
    flags.add_source(parser)
    flags.add(
        parser,
        f"""
  --out DIR  directory to export to
  --formats LIST  formats to write, with commas between (default: savedmodel)
  --labels FILE  text file with one label per line (default: the source's; 0, 1, ... where it names
      no classes)
  --images IMAGE  image files to compare on and to calibrate with, with their classes if they lie
      in folders named after them (default: the run's test images; for another source generated
      ones)
  --top N  number of classes that the server returns for each image (default: 5)
  --tflite-batch N  number of images in a batch of a TFLite file (default: 1)
  --opset N  version of ONNX's operators, 17 to 22, for runtimes that know no later one; a model
      that tf2onnx has to convert can be 17 or 18 (default: 20, or 18 if converted)
  --no-verify  do not check the files (default: check them)
{flags.JSON}""",
        out={"required": True},
        formats={"default": "savedmodel"},
        images={"nargs": "+"},
        top={"type": flags.whole(1), "default": 5},
        tflite_batch={"type": flags.whole(1), "default": 1},
        opset={"type": flags.whole(1)},
    )


def add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `check`."""
    parser = flags.add_command(
        commands, "check", check, "compare exported files with their record", _CHECK
    )
    parser.add_argument(
        "path", metavar="PATH", help="the --out of keras-vit export, a version in it, or a file"
    )
    flags.add(parser, flags.JSON)


def run(arguments: argparse.Namespace) -> int:
    """Exports, and prints what was written."""
    from keras_vit.data.source import composed
    from keras_vit.exporting import artefacts

    opened = flags.open_model(arguments.source)
    labels, images = arguments.labels or opened.labels or None, arguments.images or ()
    targets: Sequence[int] = ()
    if images:  # their classes, where all of them lie in folders named after classes
        names = artefacts.read_labels(arguments.labels) if arguments.labels else opened.labels
        places = {label: place for place, label in enumerate(names)}
        folders = [composed(Path(image).absolute().parent.name) for image in images]
        if set(folders) <= set(places):
            targets = [places[name] for name in folders]
    elif opened.run is not None:
        try:
            test = opened.run.data().test
            images, targets = list(test.images), [int(target) for target in test.targets]
        except (ValueError, OSError, ImportError) as error:
            if not arguments.json:
                output.say(f"Checking on generated images, as the run's cannot be loaded: {error}")
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
    for artefact in exported:
        if arguments.json:
            fields = {**dataclasses.asdict(artefact), "path": str(artefact.path)}
            output.print_json("artefact", **fields)
            continue
        size = f"{artefact.bytes / 1e6:.1f} MB"
        checks = "not checked" if arguments.no_verify else f"{len(artefact.checks)} checks passed"
        count = len(artefact.float32_layers)
        kept = f"{count} kernels in float32, " if count else ""
        output.say(f"{artefact.format}: {artefact.path} ({size}, {kept}{checks})")
    if not arguments.json:
        is_served = any(artefact.format == "savedmodel" for artefact in exported)
        script = Path(arguments.out) / "serve.sh"
        _say_next(script if is_served else None, ("check", arguments.out))
    return 0


def _say_next(script: Path | None, other: Sequence[object]) -> None:
    if script is not None:
        output.say(f"Next: {shlex.quote(str(script))}")
    else:
        output.say_next(*other)


def check(arguments: argparse.Namespace) -> int:
    """Compares each version with its record, and prints what was found."""
    from keras_vit.exporting.records import compare, find_versions  # need no framework

    path, column = Path(arguments.path), rich.progress.DownloadColumn()
    file, found = path if path.is_file() else None, []
    for folder in find_versions(path):
        with output.progress(f"reading {folder}", column, json=arguments.json) as on_progress:
            found.append(compare(folder, file=file, on_progress=on_progress))
        _show_checked(found[-1], place=file or folder, is_json=arguments.json)
    faults = sum(len(each.faults) for each in found)
    if not arguments.json:
        _say_result(found, faults=faults)
    return 1 if faults else 0


def _show_checked(checked: "Checked", *, place: Path, is_json: bool) -> None:
    if is_json:
        verdicts = [
            {**dataclasses.asdict(each), "path": str(each.path)} for each in checked.verdicts
        ]
        fields = {"folder": str(checked.folder), "made": checked.made, "artefacts": verdicts}
        output.print_json("checked", **fields, faults=checked.faults)
        return
    output.say(f"{place}" + (f" ({checked.made})" if checked.made else ""))
    if checked.verdicts:
        rows = [
            (
                each.format,
                each.path.name,
                f"{each.bytes / 1e6:.1f} MB",
                "as exported" if each.is_whole else "CHANGED",
            )
            for each in checked.verdicts
        ]
        output.print_table(rows, "format", "artefact", ">size", "files")
    for text in checked.faults:
        output.remark(f"error: {text}")


def _say_result(found: "list[Checked]", *, faults: int) -> None:
    if faults:
        place = f"{counted(faults, 'fault')} in {counted(len(found), 'version')}"
        output.say(f"{place}: export the model again, or copy it again.")
        output.say_next("export", "--help")
        return
    paths = [verdict.path for each in found for verdict in each.verdicts]
    place = f"{counted(len(paths), 'artefact')} of {counted(len(found), 'version')}"
    output.say(f"No fault in {place}.")
    scripts = [each.folder.parent / "serve.sh" for each in found]
    script = next((each for each in scripts if each.is_file()), None)
    _say_next(script, ("evaluate", "--help"))


def add_push(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(commands, "push", push, "put a run on the Hugging Face Hub", _PUSH)
    parser.add_argument("run_path", metavar="RUN", help="run directory, the --out of a training")
    parser.add_argument("address", metavar="ADDRESS", help="hf://owner/name")
    flags.add(
        parser,
        f"""
  --private  make a new repository private (default: as its owner's settings say, usually public)
  --license NAME  licence in the model card, as the Hub writes it, such as apache-2.0 (default:
      what the card says, unknown in a new one)
  --images  also upload report.html, sample.png, reconstructions.png and splits.csv, which show
      images of yours or name their files (default: no)
{flags.JSON}""",
        license={"type": flags.matching("[a-z0-9][a-z0-9.-]*", "a name such as apache-2.0")},
    )


def push(arguments: argparse.Namespace) -> int:
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
