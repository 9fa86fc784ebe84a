"""What several commands share: flags, the values they take, and the data and models they name."""

import argparse
import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import output
from keras_vit.exporting import formats

if TYPE_CHECKING:
    from keras_vit import ViTConfig
    from keras_vit.data import ImageData
    from keras_vit.training import Execution, OpenedModel


def count(text: str) -> int:
    """Reads a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def index(text: str) -> int:
    """Reads a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def seed(text: str) -> int:
    """Reads a seed: NumPy takes 32 bits."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def sha256(text: str) -> str:
    """Reads a SHA-256."""
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 64 hexadecimal digits")
    return text.lower()


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    return _number(text, lambda x: 0 < x < float("inf"), "above 0")


def not_negative(text: str) -> float:
    """Reads a finite number from 0."""
    return _number(text, lambda x: 0 <= x < float("inf"), "from 0")


def share(text: str) -> float:
    """Reads a number from 0, below 1."""
    return _number(text, lambda x: 0 <= x < 1, "from 0, below 1")


def fraction(text: str) -> float:
    """Reads a number above 0, at most 1."""
    return _number(text, lambda x: 0 < x <= 1, "above 0, at most 1")


def words(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns a reader of some of these words, with commas between."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list such as {','.join(allowed[:2])}, of {', '.join(allowed)}"
            )
        return names

    return read


def setting(text: str) -> tuple[str, Any]:
    """Reads "name=value": true, false, none, a number, a word, or several with commas between."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting such as pooling=avg")
    parts = tuple(map(_plain, value.split(",")))
    return name, parts if len(parts) > 1 else parts[0]


def size(text: str) -> tuple[int, int]:
    """Reads "64" or "48x64" as (height, width) in pixels."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64 or 48x64")
    return int(sides[0]), int(sides[-1])


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    """Adds a subcommand whose help keeps the lines of its description, and returns its parser."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON, one object per line, and nothing else (default: text)",
    )


def add_paths(parser: argparse.ArgumentParser, *, needs_out: bool = True) -> None:
    """Adds `--data` and `--out`."""
    group = parser.add_argument_group("required")
    group.add_argument(
        "--data", required=True, metavar="PATH", help='a folder, "tfds:NAME" or "digits"'
    )
    instead = "" if needs_out else " (default: none, with --plan)"
    group.add_argument(
        "--out", required=needs_out, metavar="RUN", help=f"run directory to write{instead}"
    )


def add_model(group: argparse._ArgumentGroup) -> None:
    """Adds `--model`, `--image-size`, `--patch-size` and `--set`."""
    group.add_argument(
        "--model",
        metavar="NAME",
        help='"tiny", "digits", "digits-hybrid", or a published variant such as Ti/16, S/16, B/16 '
        "(default: for the digits digits-hybrid, or digits without labels; otherwise tiny)",
    )
    group.add_argument(
        "--image-size",
        type=size,
        metavar="N or HxW",
        help="size of the model's input in pixels, height x width (default: the recipe's; "
        "otherwise 16 for digits, 64 for tiny, 224 for the variants)",
    )
    group.add_argument(
        "--patch-size",
        type=count,
        metavar="N",
        help="side of a patch in pixels, or for a hybrid in cells of its feature map; must divide "
        "the image size (default: the model's own, 4 for digits, 8 for tiny)",
    )
    group.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a field of ViTConfig of a model with fresh weights, such as pooling=avg, "
        "class_token=false, position_embedding=sincos_2d or layer_scale=1e-4; may be repeated "
        "(default: the recipe's, otherwise the model's own)",
    )


def add_execution(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of `training.Execution`: devices, precision, memory, checkpoints."""
    group.add_argument(
        "--strategy",
        choices=("auto", "none", "mirrored", "multi_worker", "tpu"),
        default="auto",
        help="devices to train on: none is one device, mirrored all GPUs of this machine, "
        "multi_worker the machines of TF_CONFIG; the result is the same (default: auto)",
    )
    group.add_argument(
        "--mesh",
        metavar="AXES",
        help="with KERAS_BACKEND=jax, devices to train on, and what they share: data=8 the batch, "
        "fsdp=8 the batch and the weights, data=4,model=2 also products (default: one device)",
    )
    group.add_argument(
        "--precision",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
        help="dtype that layers compute in; weights stay float32 (default: float32; where train "
        "chooses the model, mixed_bfloat16 if the machine is faster in it)",
    )
    group.add_argument(
        "--accumulate",
        type=count,
        metavar="N",
        help="split each batch into N parts and sum their gradients, to save memory (default: 1, "
        "or in train as many as memory asks for)",
    )
    _add_step(group)


def _add_step(group: argparse._ArgumentGroup) -> None:
    """Adds how a step is computed, and when its result is saved."""
    group.add_argument(
        "--remat",
        nargs="?",
        const=True,
        choices=("dots",),
        help="recompute blocks for the gradient, to save memory, with the same numbers; dots, on "
        "JAX: not their products (default: as the model's config says; a fresh model: no)",
    )
    no = "keep all for the gradient (default: as the model's config says)"
    group.add_argument("--no-remat", dest="remat", action="store_false", default=None, help=no)
    group.add_argument(
        "--xla",
        action=argparse.BooleanOptionalAction,
        help="compile forward and backward pass with XLA (default: on GPUs)",
    )
    group.add_argument(
        "--checkpoint-steps",
        type=count,
        default=1000,
        metavar="N",
        help="steps between checkpoints; one more is saved after each epoch. They are written "
        "while the training goes on, one at a time (default: 1000)",
    )
    group.add_argument(
        "--checkpoint-minutes",
        type=positive,
        default=10.0,
        metavar="N",
        help="minutes without a checkpoint after which there is one (default: 10)",
    )


def add_existing(parser: argparse.ArgumentParser) -> None:
    """Adds `--strict`, `--overwrite` and `--resume`."""
    parser.add_argument(
        "--strict", action="store_true", help="stop at damaged images (default: leave them out)"
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--overwrite",
        dest="existing",
        action="store_const",
        const="overwrite",
        default="refuse",
        help="replace the run at --out once the new one is complete (default: refuse)",
    )
    existing.add_argument(
        "--resume",
        dest="existing",
        action="store_const",
        const="resume",
        help="continue the unfinished training to --out, or start one (default: refuse)",
    )


def execution(arguments: argparse.Namespace) -> "Execution":
    """Returns the execution that the flags of `add_execution` describe."""
    from keras_vit import training

    return training.Execution(
        strategy=arguments.strategy,
        mesh=arguments.mesh,
        precision=arguments.precision or training.Execution.precision,
        accumulate=arguments.accumulate or training.Execution.accumulate,
        remat=arguments.remat,
        xla="auto" if arguments.xla is None else arguments.xla,
        checkpoint_steps=arguments.checkpoint_steps,
        checkpoint_minutes=arguments.checkpoint_minutes,
    )


def model_config(
    arguments: argparse.Namespace, *, image_size: tuple[int, int] | None, default: str
) -> "ViTConfig":
    """Returns the config that the flags of `add_model` name.

    Args:
        arguments: the command line's.
        image_size: (height, width) in pixels; None for the model's own.
        default: the model for the digits, where none is named.
    """
    from keras_vit import training

    name = arguments.model or (default if arguments.data == "digits" else "tiny")
    return training.model_config(name, image_size=image_size, patch_size=arguments.patch_size)


def load_data(
    path: str,
    *,
    strict: bool,
    json: bool,
    labels: Sequence[str] | None = None,
    labelled: bool = True,
) -> "ImageData":
    """Loads the images that `--data` names, with a progress bar, and prints a summary.

    Args:
        path: "digits", "tfds:NAME", or a folder.
        strict: whether damaged images are an error.
        json: whether to print JSON.
        labels: the known classes, to load a folder as test images alone.
        labelled: whether a folder must have class folders.
    """
    from keras_vit import data

    with output.progress("reading the images", json=json) as on_progress:
        if labels is None:
            images = data.load_data(path, labelled=labelled, strict=strict, on_progress=on_progress)
        else:
            images = data.load_test_folder(
                path, labels=labels, strict=strict, on_progress=on_progress
            )
    output.show_data(images, json=json)
    return images


def add_source(parser: argparse.ArgumentParser, *, takes_exports: bool = False) -> None:
    """Adds the positional argument SOURCE."""
    exports = "; or what export wrote, its --out, a version in it or a file"
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a run directory, the --out of a training; or any other source of a model: a .keras "
        "file; a .safetensors file of timm or transformers with its config.json beside it, or "
        "their folder; an .npz file; a URL of one of these; hf://owner/name[@revision]"
        + exports
        * takes_exports,
    )


def is_exported(source: str) -> bool:
    """Whether a SOURCE is what `keras-vit export` writes: its --out, a version in it, or a file.

    Example:
        >>> [is_exported(f"{place}photos.onnx") for place in ("", "hf://owner/")]
        [True, False]
        >>> is_exported("photos.keras")
        False
    """
    path = Path(source)
    if "://" in source:
        return False
    if path.is_dir():
        return any(map(formats.is_version, (path, *formats.version_folders(path))))
    rows = formats.FORMATS.values()
    endings = {row.main_file or f".{row.suffix.rpartition('.')[2]}" for row in rows}
    return source.endswith((formats.RECORD, *endings))


def open_model(source: str) -> "OpenedModel":
    """Opens the model of a SOURCE, and says on stderr what was assumed of it.

    Raises:
        ValueError: it is an exported model, or what `training.open_source` says.
    """
    from keras_vit import training

    if is_exported(source):
        raise ValueError(
            f"{source!r} is an exported model, which predict and evaluate run; give the run or "
            "the model that it was exported from."
        )
    with saying_warnings():
        return training.open_source(source)


@contextlib.contextmanager
def saying_warnings() -> Iterator[None]:
    """Prints each warning for the user on a line of stderr, without the place in the code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            output.say(f"keras-vit: {' '.join(str(warning.message).split())}", file=sys.stderr)


def _number(text: str, is_allowed: Callable[[float], bool], allowed: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not is_allowed(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {allowed}")
    return number


def _plain(text: str) -> bool | int | float | str | None:
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
