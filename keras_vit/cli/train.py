"""`keras-vit train`: images in, run directory out."""

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING

from keras_vit.cli import output, values

if TYPE_CHECKING:
    from keras_vit import VisionTransformer, ViTConfig
    from keras_vit.data import ImageData
    from keras_vit.training import Recipe

_DESCRIPTION = """\
Trains a Vision Transformer and writes a run directory.

--data is a folder: one sub-folder per class, or train/, validation/ and test/ that have those.
JPEG, PNG, BMP or GIF of any size, grey, coloured or transparent. Splits that are missing are made:
a tenth of each class for validation, a tenth for test. Or --data is the word digits, for the 1,797
handwritten digits that scikit-learn brings (a folder of that name is ./digits).

The run directory holds model.keras (of the epoch that was best on the validation images),
labels.txt, config.json, history.csv, curves.png, metrics.json and confusion.png. It appears when it
is complete. Ctrl-C keeps the best model so far.

examples:
  keras-vit train --data digits --out digits-run
  keras-vit train --data photos --out photos-run
  keras-vit train --data photos --out photos-run --image-size 96 --epochs 200 --no-flip
  keras-vit train --data photos --out tuned-run --model Ti/16 --weights imagenet21k
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
    needed.add_argument("--data", required=True, metavar="PATH", help='a folder, or "digits"')
    needed.add_argument("--out", required=True, metavar="RUN", help="the run directory to write")
    _add_model_flags(parser.add_argument_group("model"))
    _add_recipe_flags(parser.add_argument_group("recipe"))
    parser.add_argument(
        "--strict", action="store_true", help="stop at damaged images (default: leave them out)"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the run at --out, once the new one is complete (default: refuse)",
    )
    output.add_json_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trains, evaluates, prints."""
    from keras_vit import evaluation, training

    start = time.monotonic()
    training.check_free(arguments.out, overwrite=arguments.overwrite)
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
            overwrite=arguments.overwrite,
            on_event=display.show,
        )
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
        help="size that images are brought to, in pixels (default: 16 for digits, 64 for tiny, "
        "224 for the variants)",
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


def _config(arguments: argparse.Namespace) -> "ViTConfig":
    from keras_vit import training

    if arguments.weights is not None and arguments.model is None:
        raise ValueError("--weights needs --model with the variant that they belong to.")
    if arguments.weights is not None and arguments.patch_size is not None:
        raise ValueError("--patch-size is the checkpoint's; leave it out together with --weights.")
    name = arguments.model or ("digits" if arguments.data == "digits" else "tiny")
    return training.model_config(
        name, image_size=arguments.image_size, patch_size=arguments.patch_size
    )


def _weights(arguments: argparse.Namespace, data: "ImageData") -> "VisionTransformer | None":
    from keras_vit import training

    if arguments.weights is None:
        return None
    return training.pretrained_model(
        arguments.model,
        weights=arguments.weights,
        classes=len(data.labels),
        image_size=arguments.image_size,
    )


def _recipe(arguments: argparse.Namespace, data: "ImageData") -> "Recipe":
    from keras_vit import training

    recipe = training.default_recipe(data)
    augmentation = recipe.augmentation
    if arguments.weights is not None:
        recipe = training.RECIPES["fine-tune"]
    asked = {name: getattr(arguments, name) for name in ("epochs", "batch_size", "learning_rate")}
    if arguments.flip is not None:
        augmentation = dataclasses.replace(augmentation, flip=arguments.flip)
    return dataclasses.replace(
        recipe,
        augmentation=augmentation,
        **{name: value for name, value in asked.items() if value is not None},
    )
