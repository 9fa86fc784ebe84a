"""`keras-vit train`: images in, run directory out."""

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING

from keras_vit.cli import output, values

if TYPE_CHECKING:
    from keras_vit import VisionTransformer, ViTConfig
    from keras_vit.data import ImageData
    from keras_vit.training import Execution, Recipe

_DESCRIPTION = """\
Trains a Vision Transformer and writes a run directory.

--data is a folder: one sub-folder per class, or train/, validation/ and test/ that have those.
JPEG, PNG, BMP or GIF of any size, grey, coloured or transparent. Splits that are missing are made:
a tenth of each class for validation, a tenth for test. Or --data is tfds:NAME, for a dataset of
TensorFlow Datasets (pip install "keras-vit[tfds]"), or the word digits, for the 1,797 handwritten
digits that scikit-learn brings (a folder of that name is ./digits).

The run directory holds model.keras (of the epoch that was best on the validation images),
labels.txt, config.json, history.csv, curves.png, tensorboard/, metrics.json and confusion.png. It
appears when it is complete; until then RUN.unfinished holds checkpoints, history and curves. Ctrl-C
and SIGTERM save a checkpoint first. Whatever ended a training, the same command with --resume goes
on, to the same bits.

Several GPUs are used at once. For several machines, start the same command on each, with TF_CONFIG
in its environment.

examples:
  keras-vit train --data digits --out digits-run
  keras-vit train --data photos --out photos-run
  keras-vit train --data photos --out photos-run --image-size 96 --epochs 200 --no-flip
  keras-vit train --data photos --out tuned-run --model Ti/16 --weights imagenet21k
  keras-vit train --data photos --out paper-run --model B/16 --weights imagenet21k \\
      --recipe finetune-pets --batch-size 64 --accumulate 4 --precision mixed_bfloat16
  keras-vit train --data photos --out photos-run --resume
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "train",
        help="train a model on a folder of images",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    needed = parser.add_argument_group("needed")
    needed.add_argument(
        "--data", required=True, metavar="PATH", help='a folder, "tfds:NAME" or "digits"'
    )
    needed.add_argument("--out", required=True, metavar="RUN", help="the run directory to write")
    _add_model_flags(parser.add_argument_group("model"))
    _add_recipe_flags(parser.add_argument_group("recipe"))
    _add_execution_flags(parser.add_argument_group("execution"))
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
        help="replace the run at --out, once the new one is complete (default: refuse)",
    )
    existing.add_argument(
        "--resume",
        dest="existing",
        action="store_const",
        const="resume",
        help="go on with the unfinished training of this --out; start it if there is none "
        "(default: refuse)",
    )
    output.add_json_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trains, evaluates, prints."""
    from keras_vit import evaluation, training

    start = time.monotonic()
    execution = _execution(arguments)
    training.check_free(arguments.out, existing=arguments.existing)
    config = _config(arguments)
    data = output.load_data(arguments.data, strict=arguments.strict, json=arguments.json)
    display = output.TrainDisplay(data, json=arguments.json)
    with display:
        result = training.train(
            data,
            out=arguments.out,
            model=_weights(arguments, data) or config,
            recipe=_recipe(arguments, data),
            seed=arguments.seed,
            existing=arguments.existing,
            execution=execution,
            on_event=display.show,
        )
    if not training.is_first_worker():
        return 0
    evaluations = {
        name: evaluation.evaluate(result.model, data.split(name), labels=data.labels)
        for name in ("validation", "test")
    }
    evaluation.write_report(result.path, evaluations)
    display.finish(result, evaluations, seconds=time.monotonic() - start)
    return 0


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        metavar="NAME",
        help='"tiny", "digits", or a published variant such as Ti/16, S/16, B/16 '
        "(default: digits for the digits, otherwise tiny)",
    )
    group.add_argument(
        "--weights",
        metavar="FILE or NAME",
        help="start from a checkpoint of the variant: a file, or the name of published weights "
        "such as imagenet21k, which are downloaded (default: from fresh weights)",
    )
    group.add_argument(
        "--image-size",
        type=values.size,
        metavar="N or HxW",
        help="size that images are brought to, in pixels (default: the recipe's; otherwise 16 for "
        "digits, 64 for tiny, 224 for the variants)",
    )
    group.add_argument(
        "--patch-size",
        type=values.count,
        metavar="N",
        help="side of a patch in pixels; must divide the image (default: 4 for digits, 8 for tiny, "
        "the variant's own)",
    )


def _add_recipe_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help="how to train: digits, scratch, fine-tune, or one of the papers: vit-imagenet21k, "
        "vit-imagenet, finetune-imagenet, -cifar10, -cifar100, -pets, -flowers, -vtab, augreg-none "
        "to augreg-strong2, augreg-finetune, plain-s16 (default: digits for the digits, fine-tune "
        "with --weights, otherwise scratch); the flags below change single numbers of it",
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=values.count,
        metavar="N",
        help="batches in all, instead of --epochs (default: by epochs)",
    )
    length.add_argument(
        "--epochs",
        type=values.count,
        metavar="N",
        help="passes over the training images (default: 100 for the digits, 100 for a folder, "
        "10 with --weights)",
    )
    group.add_argument(
        "--batch-size",
        type=values.count,
        metavar="N",
        help="images in a step (default: 32 for the digits, otherwise 64)",
    )
    group.add_argument(
        "--learning-rate",
        type=values.positive,
        metavar="X",
        help="the highest learning rate, after the warm-up (default: 0.001; 0.0001 with --weights)",
    )
    group.add_argument(
        "--flip",
        action=argparse.BooleanOptionalAction,
        help="mirror half of the images left to right (default: yes, but not the digits); "
        "use --no-flip where left and right differ, as in writing",
    )
    group.add_argument(
        "--seed",
        type=values.seed,
        default=0,
        metavar="N",
        help="decides fresh weights, order and variation of the images (default: 0)",
    )


def _add_execution_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--strategy",
        choices=("auto", "none", "mirrored", "multi_worker", "tpu"),
        default="auto",
        help="devices: one, all of this machine, the machines of TF_CONFIG, a TPU; the same is "
        "learnt on all of them (default: auto, whichever is there)",
    )
    group.add_argument(
        "--precision",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
        default="float32",
        help="what the layers compute in; weights stay float32 (default: float32)",
    )
    group.add_argument(
        "--accumulate",
        type=values.count,
        default=1,
        metavar="N",
        help="cut each batch into N parts, one after another, to save memory (default: 1)",
    )
    group.add_argument(
        "--checkpoint-steps",
        type=values.count,
        default=1000,
        metavar="N",
        help="steps between checkpoints, besides one after each epoch (default: 1000)",
    )


def _execution(arguments: argparse.Namespace) -> "Execution":
    from keras_vit import training

    return training.Execution(
        strategy=arguments.strategy,
        precision=arguments.precision,
        accumulate=arguments.accumulate,
        checkpoint_steps=arguments.checkpoint_steps,
    )


def _config(arguments: argparse.Namespace) -> "ViTConfig":
    from keras_vit import training

    if arguments.weights is not None and arguments.model is None:
        raise ValueError("--weights needs --model with the variant that they belong to.")
    if arguments.weights is not None and arguments.patch_size is not None:
        raise ValueError("--patch-size is the checkpoint's; leave it out together with --weights.")
    name = arguments.model or ("digits" if arguments.data == "digits" else "tiny")
    return training.model_config(
        name, image_size=_image_size(arguments), patch_size=arguments.patch_size
    )


def _weights(arguments: argparse.Namespace, data: "ImageData") -> "VisionTransformer | None":
    from keras_vit import training

    if arguments.weights is None:
        return None
    return training.pretrained_model(
        arguments.model,
        weights=arguments.weights,
        classes=len(data.labels),
        image_size=_image_size(arguments),
    )


def _recipe(arguments: argparse.Namespace, data: "ImageData") -> "Recipe":
    from keras_vit import training

    recipe = training.default_recipe(data)
    augmentation = recipe.augmentation
    if arguments.weights is not None:
        recipe = training.RECIPES["fine-tune"]
    if arguments.recipe is not None:
        recipe = _named_recipe(arguments.recipe)
        augmentation = recipe.augmentation
    asked = {name: getattr(arguments, name) for name in ("batch_size", "learning_rate")}
    if arguments.flip is not None:
        augmentation = dataclasses.replace(augmentation, flip=arguments.flip)
    if arguments.epochs or arguments.steps:
        recipe = dataclasses.replace(recipe, epochs=arguments.epochs, steps=arguments.steps)
    return dataclasses.replace(
        recipe,
        augmentation=augmentation,
        **{name: value for name, value in asked.items() if value is not None},
    )


def _named_recipe(name: str) -> "Recipe":
    from keras_vit import training

    if name not in training.RECIPES:
        raise ValueError(
            f"There is no recipe {name!r}; choose one of {', '.join(training.RECIPES)}."
        )
    return training.RECIPES[name]


def _image_size(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """Returns the size that was asked for, or the recipe's; None for the model's own."""
    if arguments.image_size is not None or arguments.recipe is None:
        size: tuple[int, int] | None = arguments.image_size
        return size
    return _named_recipe(arguments.recipe).image_size
