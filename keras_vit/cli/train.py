"""`keras-vit train`."""

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keras_vit.cli import flags, opening, output

if TYPE_CHECKING:
    import keras

    from keras_vit import VisionTransformer, ViTConfig
    from keras_vit.data import ImageData
    from keras_vit.evaluation import Evaluation
    from keras_vit.training import DistillationModel, Recipe, Run


TARGETS = ("qkv", "out", "fc1", "fc2")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the groups "fine-tuning" and "distillation"."""
    _add_fine_tuning(parser.add_argument_group("fine-tuning"))
    _add_distillation(parser.add_argument_group("distillation"))


def check(arguments: argparse.Namespace) -> None:
    """Raises a ValueError for flags that mean nothing without another."""
    if arguments.weights is None:
        for name in ("freeze", "lora"):
            if getattr(arguments, name) is not None:
                raise ValueError(
                    f"--{name} needs --weights: fresh weights have nothing to keep as it is."
                )
    if arguments.freeze is not None and arguments.lora is not None:
        raise ValueError("--lora freezes every kernel already; leave out --freeze.")
    for name in ("distillation", "temperature", "distillation_weight", "teacher_sha256"):
        if arguments.teacher is None and getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --teacher.")


def adapt(model: "VisionTransformer", arguments: argparse.Namespace) -> "VisionTransformer":
    """Returns the model frozen or adapted, as the flags say."""
    import keras_vit

    if arguments.freeze is not None:
        keras_vit.freeze(model, blocks=arguments.freeze)
    if arguments.lora is not None:
        return keras_vit.lora(model, rank=arguments.lora, targets=arguments.lora_targets)
    return model


def distil(
    student: "VisionTransformer | ViTConfig", data: "ImageData", arguments: argparse.Namespace
) -> "VisionTransformer | ViTConfig | DistillationModel":
    """Returns the student with the teacher of the flags, or as it is without one."""
    from keras_vit import VisionTransformer, ViTConfig, training
    from keras_vit.weights.building import find

    if arguments.teacher is None:
        return student
    if isinstance(student, ViTConfig):
        config = dataclasses.replace(student, classes=len(data.labels), include_preprocessing=True)
        student = VisionTransformer(config)
    if arguments.teacher_sha256 is not None:
        find(arguments.teacher, sha256=arguments.teacher_sha256)
    teacher = _open_teacher(arguments.teacher, labels=data.labels)
    given = {
        "distillation": arguments.distillation,
        "temperature": arguments.temperature,
        "weight": arguments.distillation_weight,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return training.DistillationModel(student, teacher, **chosen)


_DESCRIPTION = """\
Trains a Vision Transformer and writes a run directory.

--data is a folder: one sub-folder per class, or train/, validation/ and test/ that have those.
JPEG, PNG, WebP, BMP or GIF of any size, grey, coloured or transparent. Missing splits are made:
a tenth of each class for validation, a tenth for test. Or --data is tfds:NAME, for a dataset of
TensorFlow Datasets (pip install tensorflow-datasets), or the word digits, for the 1,797 handwritten
digits that scikit-learn brings (a folder of that name is ./digits).

The run directory holds model.keras (of the epoch that was best on the validation images, or, as the
digits and the recipes of the papers have it, of the last), labels.txt, config.json, history.csv,
curves.png, tensorboard/, metrics.json and confusion.png. It appears when it is complete; until then
RUN.unfinished holds checkpoints, history and curves. Ctrl-C and SIGTERM save a checkpoint first.
Whatever ended a training, the same command with --resume goes on, to the same bits; of a finished
run it says so.

Several GPUs are used at once. For several machines, start the same command on each, with TF_CONFIG
in its environment.

examples:
  keras-vit train --data digits --out digits-run
  keras-vit train --data photos --out photos-run
  keras-vit train --data photos --out photos-run --image-size 96 --epochs 200 --no-flip
  keras-vit train --data photos --out tuned-run --model Ti/16 --weights imagenet21k
  keras-vit train --data photos --out paper-run --model B/16 --weights imagenet21k \\
      --recipe finetune-pets --batch-size 64 --accumulate 4 --precision mixed_bfloat16
  keras-vit train --data photos --out s16-run --model S/16 --recipe plain-s16 --batch-size 256
  keras-vit train --data photos --out gap-run --set pooling=avg --set class_token=false
  keras-vit train --data photos --out few-run --weights pretrained-run --layer-decay 0.75
  keras-vit train --data photos --out lora-run --model B/16 --weights imagenet21k --lora 8
  keras-vit train --data photos --out small-run --teacher tuned-run --distillation hard
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
    flags.add_needed(parser)
    group = parser.add_argument_group("model")
    flags.add_sizes(group)
    group.add_argument(
        "--weights",
        metavar="RUN or FILE or NAME",
        help="start from the model of a run, of pretrain or train, which says what --model is; or "
        "from a checkpoint of the variant: a file, or the name of published weights such as "
        "imagenet21k, which are downloaded (default: from fresh weights)",
    )
    group.add_argument(
        "--weights-sha256",
        type=flags.sha256,
        metavar="HEX",
        help="the SHA-256 of the file of --weights, a run's model.keras, compared before it is "
        "read (default: a download is compared with its first use)",
    )
    _add_recipe_flags(parser.add_argument_group("recipe"))
    add_flags(parser)
    flags.add_execution(parser.add_argument_group("execution"))
    flags.add_existing(parser)
    output.add_json_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trains, evaluates, prints."""
    from keras_vit import evaluation, training

    start = time.monotonic()
    execution = flags.execution(arguments)
    training.check_free(arguments.out, existing=arguments.existing)
    _check(arguments)
    recipe, config = _recipe(arguments), None
    if arguments.weights is None:
        config = flags.model_config(
            arguments, image_size=_image_size(arguments), default="digits-hybrid"
        )
        config = recipe.config(execution.config(config))  # what does not fit is told at once
    execution.make_strategy()  # several workers join before an image is decoded, or never
    data = opening.load_data(arguments.data, strict=arguments.strict, json=arguments.json)
    display = output.TrainDisplay(data, json=arguments.json)
    evaluations: dict[str, evaluation.Evaluation] = {}

    def on_event(event: training.Event) -> None:
        display.show(event)
        if isinstance(event, training.TrainingDone):  # before the run appears, as a part of it
            evaluations.update(_evaluate(event.run, data))

    with display:
        result = training.train(
            data,
            out=arguments.out,
            model=functools.partial(_model, config, data, arguments),
            recipe=recipe,
            seed=arguments.seed,
            existing=arguments.existing,
            execution=execution,
            on_event=on_event,
        )
    if training.is_first_worker():
        _finish(result, display, evaluations, data, start=start)
    return 0


def _finish(
    result: "Run",
    display: output.TrainDisplay,
    evaluations: "dict[str, Evaluation]",
    data: "ImageData",
    *,
    start: float,
) -> None:
    """Prints what a training ended in; a run that was finished before says that it was."""
    from keras_vit import evaluation

    if not display.has_ended and (result.path / evaluation.METRICS).is_file():
        display.show_finished(result)
        return
    if not evaluations:  # the run of a program that did not measure it
        evaluations.update(_evaluate(result, data))
    display.finish(result, evaluations, seconds=time.monotonic() - start)


def _add_fine_tuning(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--layer-decay",
        type=flags.fraction,
        metavar="X",
        help="factor of the learning rate from each block to the one before it, such as 0.75 "
        "(default: 1, the same everywhere)",
    )
    group.add_argument(
        "--freeze",
        type=flags.index,
        metavar="N",
        help="with --weights, do not train the patch embedding and the first N blocks; 0 is the "
        "patch embedding alone (default: train everything)",
    )
    group.add_argument(
        "--lora",
        type=flags.count,
        metavar="RANK",
        help="with --weights, train thin matrices of this rank beside the kernels, and the "
        "classifier; the run's model.keras has them merged, adapter.safetensors has them alone "
        "(default: train the kernels)",
    )
    group.add_argument(
        "--lora-targets",
        type=flags.words(TARGETS),
        default=("qkv",),
        metavar="LIST",
        help=f"what --lora adapts, some of {','.join(TARGETS)} (default: qkv)",
    )


def _add_distillation(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--teacher",
        metavar="RUN",
        help="learn from what this model says too: a run with the same classes, or a .keras file "
        "of any Keras classifier that takes pixels 0..255 (default: learn from labels alone)",
    )
    group.add_argument(
        "--teacher-sha256",
        type=flags.sha256,
        metavar="HEX",
        help="the SHA-256 of the teacher's file, compared before it is read (default: none)",
    )
    group.add_argument(
        "--distillation",
        choices=("soft", "hard"),
        help="the teacher's probabilities, or its likeliest class (default: soft)",
    )
    group.add_argument(
        "--temperature",
        type=flags.positive,
        metavar="X",
        help="what logits are divided by in soft distillation (default: 3)",
    )
    group.add_argument(
        "--distillation-weight",
        type=flags.fraction,
        metavar="X",
        help="what the teacher counts; labels count the rest (default: 0.5)",
    )


def _open_teacher(path: str, *, labels: Sequence[str]) -> "keras.Model":
    """Opens a run that knows the same classes, or a file."""
    model, teacher = opening.open_model(path)
    if teacher is not None and teacher.labels != tuple(labels):
        raise ValueError(
            f"The teacher {path!r} knows the classes {', '.join(teacher.labels[:5])}, the data "
            f"has {', '.join(labels[:5])}; both must have the same, in the same order."
        )
    return model


def _evaluate(result: "Run", data: "ImageData") -> "dict[str, Evaluation]":
    """Measures a run on the images that did not train it, and writes that into it."""
    from keras_vit import evaluation

    evaluations = {
        name: evaluation.evaluate(result.model, data.split(name), labels=data.labels)
        for name in ("validation", "test")
    }
    evaluation.write_report(result.path, evaluations)
    return evaluations


def _add_recipe_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help="how to train: digits, scratch, fine-tune, or one of the papers: vit-imagenet21k, "
        "vit-imagenet, vit-jft-b to -h14, finetune-imagenet, -imagenet-512, -cifar10, -cifar100, "
        "-pets, -flowers, -vtab, augreg-none to augreg-strong2, augreg-imagenet-none to -strong2, "
        "augreg-finetune, plain-s16, deit, deit-384, deit3-s16 to -h14, deit3-384-b16; "
        "docs/training.md has all of them (default: digits for the digits, fine-tune with "
        "--weights, otherwise scratch); the flags below change single numbers of it",
    )
    flags.add_length(group, epochs="200 for the digits, 100 for a folder, 10 with --weights")
    flags.add_numbers(
        group, batch="64", rate="0.002 for the digits, 0.001 for a folder, 0.0001 with --weights"
    )
    flags.add_regularization(group, is_labelled=True)


def _check(arguments: argparse.Namespace) -> None:
    check(arguments)
    if arguments.weights is None:
        if arguments.weights_sha256 is not None:
            raise ValueError("--weights-sha256 needs --weights.")
        return
    if arguments.set:
        raise ValueError(
            f"--set {arguments.set[0][0]} is for fresh weights; leave it out together with "
            "--weights, whose model is what it is."
        )
    if arguments.patch_size is not None:
        raise ValueError("--patch-size is the checkpoint's; leave it out together with --weights.")
    if _is_run(arguments.weights):
        if arguments.model is not None:
            raise ValueError("--model is the run's; leave it out together with --weights RUN.")
    elif arguments.model is None:
        raise ValueError(
            "--weights needs --model with the variant that they belong to, unless they are a run."
        )


def _is_run(weights: str) -> bool:
    return Path(weights).is_dir()


def _model(
    config: "ViTConfig | None", data: "ImageData", arguments: argparse.Namespace
) -> "ViTConfig | VisionTransformer | DistillationModel":
    start = config or adapt(_weights(arguments, data), arguments)
    return distil(start, data, arguments)


def _weights(arguments: argparse.Namespace, data: "ImageData") -> "VisionTransformer":
    from keras_vit import training
    from keras_vit.weights.building import find

    size, sha256 = _image_size(arguments), arguments.weights_sha256
    if _is_run(arguments.weights):
        if sha256 is not None:
            find(arguments.weights, sha256=sha256)
        return training.Run.load(arguments.weights).classifier(data.labels, image_size=size)
    return training.pretrained_model(
        arguments.model,
        weights=arguments.weights,
        classes=len(data.labels),
        image_size=size,
        sha256=sha256,
    )


def _recipe(arguments: argparse.Namespace) -> "Recipe":
    from keras_vit import training

    recipe = training.RECIPES["digits" if arguments.data == "digits" else "scratch"]
    if arguments.weights is not None:
        recipe = dataclasses.replace(
            training.RECIPES["fine-tune"], augmentation=recipe.augmentation
        )
    if arguments.recipe is not None:
        recipe = _named_recipe(arguments.recipe)
    return flags.changed(recipe, arguments)


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
