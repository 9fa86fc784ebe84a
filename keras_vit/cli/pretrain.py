"""`keras-vit pretrain`: images without labels in, run directory out."""

import argparse
import dataclasses
import functools
import time
from typing import TYPE_CHECKING

from keras_vit.cli import flags, opening, output

if TYPE_CHECKING:
    from keras_vit.training import MaskedPatchModel, Recipe

OBJECTIVES = ("masked-patches",)
TARGETS = ("mean_color", "small_patch", "pixels")
_DESCRIPTION = """\
Trains a Vision Transformer without labels and writes a run directory.

The objective masked-patches corrupts half of the patches of each image, and predicts them from what
is left (arXiv 2010.11929, Appendix B.1.2): of each its mean colour, one of 512; 4x4 colours; or all
of its pixels.

--data is a folder of images, with class folders or without; without, a tenth is set aside for
validation. With them, the test images of a later training stay unseen. Or it is tfds:NAME or the
word digits, as in keras-vit train; all else is as there too, --resume and several GPUs included.

The run's model.keras has no classifier, and pools by the average of the patches;
reconstructions.png shows what it predicts. Go on with keras-vit train --weights RUN, or measure its
features with keras-vit evaluate RUN.

examples:
  keras-vit pretrain --data digits --out pretrained-run
  keras-vit pretrain --objective masked-patches --target pixels --data photos --out pretrained-run
  keras-vit evaluate pretrained-run
  keras-vit train --data digits --out few-run --weights pretrained-run
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "pretrain",
        help="train a model on images without labels",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_needed(parser)
    group = parser.add_argument_group("objective")
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="masked-patches",
        help="what is learnt (default: masked-patches)",
    )
    group.add_argument(
        "--target",
        choices=TARGETS,
        default="mean_color",
        help="what is predicted of a patch (default: mean_color)",
    )
    group.add_argument(
        "--corruption",
        type=flags.fraction,
        default=0.5,
        metavar="X",
        help="fraction of the patches that is corrupted (default: 0.5)",
    )
    flags.add_sizes(parser.add_argument_group("model"))
    group = parser.add_argument_group("recipe")
    flags.add_length(group, epochs="100")
    flags.add_numbers(group, batch="64", rate="0.001")
    flags.add_regularization(group, is_labelled=False)
    flags.add_execution(parser.add_argument_group("execution"))
    flags.add_existing(parser)
    output.add_json_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trains, prints."""
    from keras_vit import training

    start = time.monotonic()
    execution = flags.execution(arguments)
    training.check_free(arguments.out, existing=arguments.existing)
    _check(arguments)
    execution.make_strategy()  # several workers join before an image is decoded, or never
    data = opening.load_data(
        arguments.data, labelled=False, strict=arguments.strict, json=arguments.json
    )
    display = output.TrainDisplay(data, json=arguments.json)
    recipe = flags.changed(training.default_pretrain_recipe(data), arguments)
    with display:
        result = training.pretrain(
            data,
            out=arguments.out,
            model=functools.partial(_model, arguments, recipe),
            recipe=recipe,
            seed=arguments.seed,
            existing=arguments.existing,
            execution=execution,
            on_event=display.show,
        )
    if training.is_first_worker() and not display.has_ended:
        display.show_finished(result)
    elif training.is_first_worker():
        display.finish_pretraining(result, seconds=time.monotonic() - start)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name, _ in arguments.set:
        if name in ("representation_dim", "distillation_token"):
            raise ValueError(
                f"--set {name} belongs to a classifier, and pretrain makes none; give it to "
                "keras-vit train."
            )


def _model(arguments: argparse.Namespace, recipe: "Recipe") -> "MaskedPatchModel":
    from keras_vit import training

    config = flags.model_config(arguments, image_size=arguments.image_size, default="digits")
    config = dataclasses.replace(config, pooling="avg", class_token=False)
    return training.MaskedPatchModel(
        dataclasses.replace(recipe.config(config), include_preprocessing=True),
        target=arguments.target,
        corruption=arguments.corruption,
        seed=arguments.seed,
    )
