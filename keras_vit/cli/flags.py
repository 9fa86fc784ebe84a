"""What several commands share: flags, the values they take, and the data and models they name."""

import argparse
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keras_vit.cli import output
from keras_vit.exporting import formats
from keras_vit.limits import shown

if TYPE_CHECKING:
    from keras_vit.data import ImageData, Views
    from keras_vit.training import OpenedModel, Recipe

Reader = Callable[[str], Any]


def whole(least: int, most: int | None = None) -> Reader:
    """Returns a reader of whole numbers in a range; None for no end."""
    span = "a positive integer" if least else "a whole number from 0"
    span += "" if most is None else f" to {most}"

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= (most or int(text)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {span}")
        return int(text)

    return read


def matching(pattern: str, meaning: str) -> Reader:
    """Returns a reader of text that matches a pattern whole."""

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} is not {meaning}")
        return text

    return read


def words(allowed: Sequence[str]) -> Reader:
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
    """Reads "name=value": yes, no, true, false, none, a number, a word, or several with commas."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting such as mixup=0.2")
    return _value(name, value)


def _value(name: str, text: str) -> tuple[str, Any]:
    values = tuple(map(_plain, text.split(",")))
    return name, text if name in _WORDS else values if len(values) > 1 else values[0]


def _plain(text: str) -> bool | int | float | str | None:
    constants = {"true": True, "yes": True, "false": False, "no": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def size(text: str) -> tuple[int, int]:
    """Reads "64" or "48x64" as (height, width) in pixels."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 64 or 48x64")
    return int(sides[0]), int(sides[-1])


SHA256 = matching("[0-9a-fA-F]{64}", "a SHA-256 of 64 hexadecimal digits")


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    after: str | None = None,
) -> argparse.ArgumentParser:
    """Adds a subcommand whose help keeps the lines of its description, and returns its parser."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=after,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, refuse=parser.error)
    return parser


def add(
    to: argparse._ActionsContainer,
    text: str,
    *,
    is_setting: bool = False,
    **options: Mapping[str, Any],
) -> None:
    """Adds the flags of a text, which has them as `--help` shows them.

    Args:
        to: a parser, or a group of one.
        text: two blanks, a flag, its value unless it is a switch, two blanks or more, its help.
        is_setting: whether the flags are short for --set.
        options: of `add_argument`, by the name of the flag.
    """
    for entry in re.split(r"^  (?=--)", text, flags=re.MULTILINE)[1:]:
        head, _, help = entry.partition("  ")
        flag, _, value = head.strip().partition(" ")
        name = flag[2:].replace("-", "_")
        more = {"metavar": value} if value else {"action": "store_true"}
        if is_setting:
            more |= {"dest": "set", "action": "append", "type": functools.partial(_value, name)}
        to.add_argument(flag, help=" ".join(help.split()), **{**more, **options.get(name, {})})


JSON = """
  --json  print JSON, one object per line, and nothing else (default: text)
"""


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


# What --set may name besides the fields of Recipe, Augmentation, Execution and ViTConfig, with the
# argument that it is: of the teacher in `train`, of the objective in `pretrain`.
TEACHING = {
    "distillation": "distillation",
    "temperature": "temperature",
    "distillation_weight": "weight",
}
MASKING = {"corruption": "corruption"}

SETTINGS = """\
settings, as --set NAME=VALUE, each by default the recipe's or the model's own:
  steps=1000             training steps in all, one batch each, instead of --epochs
  patience=5             end early once the validation loss has not fallen for 5 epochs: the
                         learning rate then falls to 0 within a third as many; none never does
  flip=false             mirror no image left to right, where the sides differ, as in writing
  weight_decay=0.05      of the kernels, multiplied by the learning rate
  drop_path_rate=0.1     stochastic depth: probability of skipping a branch of the last block
  average=0.9999         moving average of the weights, which is evaluated and saved
  layer_decay=0.75       factor of the learning rate from each block to the one before it
  sam_rho=0.1            radius of sharpness-aware minimisation, in twice the time
  remat=true             recompute blocks for the gradient, to save memory, with the same numbers;
                         on JAX also dots: not their products
  xla=true               compile forward and backward pass with XLA (auto: on GPUs)
  checkpoint_steps=1000  steps between checkpoints, of which each epoch has one more
  checkpoint_minutes=10  minutes without a checkpoint after which there is one
  patch_size=16          side of a patch in pixels (4 for digits, 8 for tiny, that of the variant's
                         name), or for a hybrid in cells of its feature map
  pooling=avg class_token=false position_embedding=sincos_2d layer_scale=1e-4 num_registers=4
                         and other fields of ViTConfig, of a model with random weights
"""
AFTER = (
    "Every field of keras_vit.training.Recipe and Execution, keras_vit.data.Augmentation and\n"
    "keras_vit.ViTConfig is a setting; help(keras_vit.training.Recipe) in Python explains them."
)


_WORDS = ("mesh", "strategy")  # settings whose text is taken as it is
ALWAYS_LOGGED = ("tensorboard", "csv")


_MODEL = """
  --model NAME  "tiny", "digits", "digits-hybrid", or a published variant such as Ti/16, S/16, B/16
      (default: for the digits digits-hybrid, or digits without labels; otherwise tiny)
  --image-size N or HxW  size of the model's input in pixels, height x width (default: the
      recipe's; otherwise 16 for digits, 64 for tiny, 224 for the variants)
"""
# These are short for --set.
_RECIPE = """
  --epochs N  passes over the training images; with --resume, more than before continue the
      training by the longer schedule (default: 200 for the digits, 100 for a folder, 10 with
      --weights, or as many as 200 steps take; 100 in pretrain)
  --batch-size N  images per step, over all devices (default: 64; with --weights 8 of few images)
  --learning-rate X  peak learning rate, at the end of the warm-up (default: 0.002 for the digits,
      0.001 for a folder, 0.0001 with --weights, of few images 0.0003; 0.001 in pretrain)
"""
_EXECUTION = """
  --strategy NAME  devices to train on: none is one device, mirrored all GPUs of this machine,
      multi_worker the machines of TF_CONFIG, tpu a TPU; the result is the same (default: auto)
  --mesh AXES  with KERAS_BACKEND=jax, devices to train on, and what they share: data=8 the batch,
      fsdp=8 the batch and the weights, data=4,model=2 also products (default: one device)
  --precision DTYPE  dtype that layers compute in, float32, mixed_bfloat16 or mixed_float16;
      weights stay float32 (default: float32; where train chooses the model, mixed_bfloat16 if the
      machine is faster in it)
  --gradient-accumulation-steps N  split each batch into N micro-batches and sum their gradients,
      to save memory (default: 1, or in train as many as memory asks for)
"""
_MORE = """
  --set NAME=VALUE  change other numbers of the recipe, the execution or a new model, see the
      settings below (default: none)
  --seed N  random seed of new weights, and of the order and augmentation of images (default: 0)
"""
_LOG = """
  --log LIST  where the numbers of each epoch go, with commas between: tensorboard and csv, which
      are always written, mlflow, wandb; the last two take their usual environment variables, such
      as MLFLOW_TRACKING_URI and WANDB_MODE (default: tensorboard,csv)
"""
_EXISTING = """
  --overwrite  replace the run at --out once the new one is complete (default: refuse)
  --resume  continue the unfinished training to --out, or start one (default: refuse)
"""


def add_training(
    parser: argparse.ArgumentParser, *, needs_out: bool
) -> tuple[argparse._ArgumentGroup, argparse._ArgumentGroup]:
    """Adds the flags that `train` and `pretrain` share; returns the groups of model and recipe."""
    names = ("required", "model", "recipe", "execution")
    required, model, recipe, execution = map(parser.add_argument_group, names)
    instead = "" if needs_out else " (default: none, with --plan)"
    add(required, '  --data PATH  a folder, "tfds:NAME" or "digits"', data={"required": True})
    add(required, f"  --out RUN  run directory to write{instead}", out={"required": needs_out})
    add(model, _MODEL, image_size={"type": size})
    add(recipe, _RECIPE, is_setting=True)
    seed = {"type": whole(0, 2**32 - 1), "default": 0}  # NumPy takes 32 bits
    add(recipe, _MORE, set={"type": setting, "action": "extend", "nargs": "+"}, seed=seed)
    add(execution, _EXECUTION, is_setting=True)
    names = (*ALWAYS_LOGGED, "mlflow", "wandb")
    add(execution, _LOG, log={"type": words(names), "default": ALWAYS_LOGGED})
    add(parser, f"  --strict  stop at damaged images (default: leave them out){JSON}")
    existing = {"dest": "existing", "action": "store_const", "default": "refuse"}
    add(
        parser.add_mutually_exclusive_group(),
        _EXISTING,
        overwrite={**existing, "const": "overwrite"},
        resume={**existing, "const": "resume"},
    )
    parser.set_defaults(set=[])
    return model, recipe


class Settings(NamedTuple):
    """What --set and the flags short for it say, by what takes it."""

    recipe: dict[str, Any]  # as `Recipe.changed` takes them
    execution: dict[str, Any]
    model: dict[str, Any]  # fields of ViTConfig of a new model
    objective: dict[str, Any]

    def change(self, recipe: "Recipe") -> "Recipe":
        """Returns the recipe with what they say of it, and of its model but the size of patches."""
        model = {name: value for name, value in self.model.items() if name != "patch_size"}
        return recipe.changed(**self.recipe, **model)

    @classmethod
    def of(cls, arguments: argparse.Namespace, objective: Mapping[str, str]) -> "Settings":
        """Sorts them; the objective's are its arguments by the name of their setting.

        Raises:
            ValueError: nothing takes one of them.
        """
        from keras_vit import data, training
        from keras_vit.config import ViTConfig

        types = (training.Recipe, data.Augmentation, training.Execution, ViTConfig)
        recipe, augmentation, execution, model = (
            dict.fromkeys(field.name for field in dataclasses.fields(each)) for each in types
        )
        for name in ("model", "augmentation", "image_size", "source"):
            del recipe[name]
        sorts = (recipe | augmentation, execution, model, objective)
        found: tuple[dict[str, Any], ...] = ({}, {}, {}, {})
        for name, value in dict(arguments.set).items():
            place = next((place for place, names in enumerate(sorts) if name in names), None)
            if place is None:
                known = ", ".join(dict.fromkeys(name for names in sorts for name in names))
                raise ValueError(f"There is no setting {shown(name)}; --set takes one of {known}.")
            found[place][objective.get(name, name)] = value
        return cls(*found)


def default_model(arguments: argparse.Namespace, of_digits: str) -> str:
    """Returns the name of the model where no flag says it."""
    return of_digits if arguments.data == "digits" else "tiny"


def load_data(
    arguments: argparse.Namespace,
    *,
    labels: Callable[[Sequence[str]], Sequence[str]] | None = None,
    labelled: bool = True,
) -> "ImageData":
    """Loads the images that `--data` names, with a progress bar, and prints a summary.

    Args:
        arguments: the command line's: data, strict and json.
        labels: gives the known classes for the names of folders, to load test images alone.
        labelled: whether a folder must have class folders.
    """
    from keras_vit import data

    with output.progress("reading the images", json=arguments.json) as on_progress:
        more: dict[str, Any] = {"strict": arguments.strict, "on_progress": on_progress}
        if labels is None:
            images = data.load_data(arguments.data, labelled=labelled, **more)
        else:
            images = data.load_test_folder(arguments.data, labels=labels, **more)
    output.show_data(images, json=arguments.json)
    return images


_INFERENCE = """
  --precision DTYPE  dtype that the model computes in, float32 or bfloat16; the latter is faster on
      processors that have units for it, slower on all others; an exported model has its own
      (default: float32)
  --tta  test-time augmentation: average the probabilities of 7 views of each image, the whole and
      crops at two scales, or of 14 where the run's recipe mirrors images; it takes as many times
      the time (default: the whole image alone)
"""


def add_inference(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `predict` and `evaluate`: `--precision` and `--tta`."""
    add(parser, _INFERENCE, precision={"choices": ("float32", "bfloat16"), "default": "float32"})


def is_exported(source: str) -> bool:
    """Whether a SOURCE is what `keras-vit export` writes: its --out, a version in it, or a file."""
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
    return training.open_source(source)


def open_to_run(arguments: argparse.Namespace) -> "OpenedModel":
    """Opens the model of `predict` and `evaluate` in their precision, or an exported one."""
    from keras_vit import evaluation
    from keras_vit.model import VisionTransformer

    if is_exported(arguments.source):
        return _open_exported(arguments)
    opened = open_model(arguments.source)
    if arguments.precision == "bfloat16" and not isinstance(opened.model, VisionTransformer):
        raise ValueError(
            f"Only a VisionTransformer alone runs in bfloat16; leave --precision out. Received: "
            f"{opened.source}, a model with other layers."
        )
    if arguments.precision == "bfloat16" and not evaluation.has_bfloat16_units():
        output.remark("this processor has no units for bfloat16; float32 is faster on it.")
    model = evaluation.in_precision(opened.model, arguments.precision)
    return dataclasses.replace(opened, model=model)


def _open_exported(arguments: argparse.Namespace) -> "OpenedModel":
    if arguments.precision != "float32":
        raise ValueError(
            "An exported model computes in the precision that it was exported in; leave "
            f"--precision out. Received: {arguments.source}."
        )
    from keras_vit import preprocessing, training
    from keras_vit.data.source import composed
    from keras_vit.exporting import opening

    opened = opening.open_artefact(Path(arguments.source))
    if not opened.is_recorded:
        output.remark(
            f"{arguments.source} has no verification.json beside it: whether it is as it was "
            "exported is not known."
        )
    labels = identifiers = tuple(map(composed, opened.about.labels))
    if len(labels) in preprocessing.LABELLED:
        published = preprocessing.class_labels(len(labels))
        if labels == tuple(name for _, name in published):
            identifiers = tuple(identifier for identifier, _ in published)
    return training.OpenedModel(
        source=arguments.source,
        model=opened.model,
        labels=labels,
        identifiers=identifiers,
        states_labels=True,
        exported=True,
    )


def views(opened: "OpenedModel", arguments: argparse.Namespace) -> "Views | None":
    """Returns the views of `--tta`; they are mirrored where the run's training mirrored images."""
    from keras_vit.data import Views

    if not arguments.tta:
        return None
    augmentation = opened.recipe.get("augmentation")
    return Views(flip=isinstance(augmentation, dict) and augmentation.get("flip") is True)
