"""`keras-vit pretrain`: trains a model on images without labels."""

import argparse
import dataclasses
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING

from keras_vit.cli import flags, output, recipe_flags, tracking

if TYPE_CHECKING:
    from keras_vit.training import MaskedPatchModel, Recipe, Run

OBJECTIVES = ("masked-patches",)
TARGETS = ("mean_color", "small_patch", "pixels")
_DESCRIPTION = """\
Trains a Vision Transformer without labels and writes a run directory.

The objective masked-patches corrupts half of the patches of each image and predicts them from the
others (arXiv 2010.11929, Appendix B.1.2). The target of a patch is its mean colour, as one of 512
classes; 4x4 such colours; or all of its pixels.

--data is a folder of images, with or without class folders. Without them, a tenth of the images is
set aside for validation; with them, also the test images of a later training. It may also be
tfds:NAME or the word digits, as in keras-vit train. --resume and several GPUs work as there.

The run's model.keras has no classifier and pools by the average of the patches.
reconstructions.png shows its predictions. Continue with keras-vit train --weights RUN, or measure
the features with keras-vit evaluate RUN.

examples:
  keras-vit pretrain --data digits --out pretrained-run
  keras-vit pretrain --objective masked-patches --target pixels --data photos --out pretrained-run
  keras-vit evaluate pretrained-run
  keras-vit train --data digits --out few-run --weights pretrained-run
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(
        commands,
        "pretrain",
        run,
        summary="train a model on images without labels",
        description=_DESCRIPTION,
    )
    flags.add_paths(parser)
    group = parser.add_argument_group("objective")
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="masked-patches",
        help="pre-training objective (default: masked-patches)",
    )
    group.add_argument(
        "--target",
        choices=TARGETS,
        default="mean_color",
        help="what to predict of a patch: its mean colour, 4x4 colours, or all of its pixels "
        "(default: mean_color)",
    )
    group.add_argument(
        "--corruption",
        type=flags.fraction,
        default=0.5,
        metavar="X",
        help="fraction of the patches to corrupt, above 0, at most 1 (default: 0.5)",
    )
    flags.add_model(parser.add_argument_group("model"))
    group = parser.add_argument_group("recipe")
    recipe_flags.add_schedule(group, epochs="100", batch_size="64", learning_rate="0.001")
    recipe_flags.add_regularization(group, is_labelled=False)
    group = parser.add_argument_group("execution")
    flags.add_execution(group)
    tracking.add_log(group)
    flags.add_existing(parser)
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains and prints."""
    from keras_vit import reporting, training
    from keras_vit.training.train import make_engine

    start = time.monotonic()
    execution = flags.execution(arguments)
    training.check_free(arguments.out, existing=arguments.existing)
    _check(arguments)
    make_engine(execution)  # before any TensorFlow operation: workers join a cluster first
    data = flags.load_data(
        arguments.data, labelled=False, strict=arguments.strict, json=arguments.json
    )
    display = output.TrainDisplay(json=arguments.json)
    recipe = recipe_flags.override_recipe(training.default_pretrain_recipe(data), arguments)

    def on_event(event: training.Event) -> None:
        display.show(event)
        if isinstance(event, training.TrainingDone):  # the run directory appears after this
            _write_report(event.run, arguments)
            reporting.write_card(event.run, name=Path(arguments.out).name)
        track(event)

    with display, tracking.trackers(arguments, recipe) as track:
        result = training.pretrain(
            data,
            out=arguments.out,
            model=functools.partial(_model, arguments, recipe),
            recipe=recipe,
            seed=arguments.seed,
            existing=arguments.existing,
            execution=execution,
            on_event=on_event,
            provenance=training.Provenance.of(arguments.command),
        )
    if training.is_first_worker():
        if display.has_ended:
            display.finish_pretraining(result, seconds=time.monotonic() - start)
        else:
            display.show_finished(result)
    return 0


def _write_report(result: "Run", arguments: argparse.Namespace) -> None:
    from keras_vit import reporting
    from keras_vit.training import run as training_run

    subject = reporting.Subject(
        name=arguments.out, model=result.model, run=result, command=arguments.command
    )
    output.warn(reporting.try_report(result.path / training_run.REPORT, subject))


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
