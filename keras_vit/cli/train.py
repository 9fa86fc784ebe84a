"""`keras-vit train`: trains a classifier, from fresh or from published weights."""

import argparse
import dataclasses
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING

from keras_vit.cli import flags, output, plan, recipe_flags, tracking

if TYPE_CHECKING:
    from keras_vit import VisionTransformer, ViTConfig
    from keras_vit.data import ImageData
    from keras_vit.evaluation import Evaluation
    from keras_vit.training import DistillationModel, Execution, Recipe, Run
    from keras_vit.weights.positions import Method

# As in keras_vit.weights.positions, which imports NumPy.
POSITIONS = ("original", "bilinear", "bicubic", "bicubic_antialias")
_LORA_TARGETS = ("qkv", "out", "fc1", "fc2")
_DESCRIPTION = """\
Trains a Vision Transformer and writes a run directory.

--data is a folder with one sub-folder per class, or with train/, validation/ and test/ that have
these. Images are JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF files of any size, grey, coloured or
transparent. Missing splits are made: a tenth of each class for validation, a tenth for test. --data
may also be tfds:NAME, a dataset of TensorFlow Datasets (pip install tensorflow-datasets), or the
word digits, the 1,797 handwritten digits of scikit-learn (a folder of that name is ./digits).

Where no flag names a model, weights or a recipe, the folder is looked at first, and a line says
what is chosen. ImageNet-21k weights are fine-tuned where they can be reached (Keras' cache,
KERAS_VIT_MIRROR, the network): Ti/16, or S/16 from 1,000 training images on a GPU. Elsewhere, and
with --weights none, a small model trains from nothing. Where memory is exhausted, batches are split
into parts, with the same result. --plan shows the line without training.

The run directory holds model.keras, labels.txt, config.json, history.csv, curves.png, tensorboard/,
metrics.json, confusion.png and report.html, a page of all this. The model is that of the epoch with
the best validation result; for the digits and the recipes of the papers, that of the last epoch.
The directory appears when it is complete; until then RUN.unfinished holds checkpoints, history and
curves. Ctrl-C and SIGTERM save a checkpoint first. However a training ended, the same command with
--resume continues it, to the same bits.

All GPUs of the machine are used. For several machines, start the same command on each, with
TF_CONFIG in its environment.

examples:
  keras-vit train --data digits --out digits-run
  keras-vit train --data photos --plan
  keras-vit train --data photos --out photos-run
  keras-vit train --data photos --out photos-run --image-size 96 --epochs 200 --no-flip
  keras-vit train --data photos --out tuned-run --model Ti/16 --weights imagenet21k
  keras-vit train --data photos --out paper-run --model B/16 --weights imagenet21k \\
      --recipe finetune-pets --batch-size 64 --accumulate 4 --precision mixed_bfloat16
  keras-vit train --data photos --out s16-run --model S/16 --recipe plain-s16 --batch-size 256
  keras-vit train --data photos --out gap-run --set pooling=avg --set class_token=false
  keras-vit train --data photos --out few-run --weights pretrained-run --layer-decay 0.75
  keras-vit train --data photos --out dino-run --weights hf://facebook/dinov2-small --image-size 224
  keras-vit train --data photos --out lora-run --model B/16 --weights imagenet21k --lora 8
  keras-vit train --data photos --out small-run --teacher tuned-run --distillation hard
  keras-vit train --data photos --out balanced-run --balance
  keras-vit train --data photos --out photos-run --resume --epochs 150
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = flags.add_command(
        commands, "train", run, summary="train a model on images", description=_DESCRIPTION
    )
    flags.add_paths(parser, needs_out=False)
    group = parser.add_argument_group("model")
    flags.add_model(group)
    group.add_argument(
        "--weights",
        metavar="SOURCE or NAME",
        help="weights to start from, which also decide --model: a run of pretrain or train; a "
        ".keras, .safetensors or .npz file; a folder with config.json and model.safetensors; a "
        "URL; hf://owner/name[@revision]; or, with --model, a checkpoint of that variant or the "
        "name of published weights, such as imagenet21k, which are downloaded; none for fresh "
        "weights (default: for a folder, imagenet21k of Ti/16 or S/16 if no flag names a model "
        "or recipe and they can be reached; otherwise none)",
    )
    group.add_argument(
        "--weights-sha256",
        type=flags.sha256,
        metavar="HEX",
        help="expected SHA-256 of the file of --weights, or of the run's model.keras; checked "
        "before the file is read (default: a download is compared with its first use)",
    )
    group.add_argument(
        "--positions",
        choices=POSITIONS,
        help="how the position embeddings of --weights are resampled to --image-size: original, as "
        "the original's fine-tuning does, or as PyTorch's interpolate does; bicubic_antialias is "
        "timm's (default: original)",
    )
    _add_recipe_flags(parser.add_argument_group("recipe"))
    _add_fine_tuning(parser.add_argument_group("fine-tuning"))
    _add_distillation(parser.add_argument_group("distillation"))
    group = parser.add_argument_group("execution")
    flags.add_execution(group)
    tracking.add_log(group)
    plan.add_flag(parser)
    flags.add_existing(parser)
    flags.add_json(parser)
    parser.set_defaults(refuse=parser.error)


def check_usage(arguments: argparse.Namespace) -> None:
    """Ends the program with exit code 2 where `--out` is missing, which `--plan` does not need."""
    if arguments.out is None and not arguments.plan:
        arguments.refuse("the following arguments are required: --out")


def run(arguments: argparse.Namespace) -> int:
    """Trains, evaluates and prints."""
    from keras_vit import evaluation, training

    start = time.monotonic()
    execution = flags.execution(arguments)
    if not arguments.plan:
        training.check_free(arguments.out, existing=arguments.existing)
    data, decision = _decide(arguments, execution)
    if arguments.plan:
        return 0
    display = output.TrainDisplay(json=arguments.json)
    evaluations: dict[str, evaluation.Evaluation] = {}

    def on_event(event: training.Event) -> None:
        display.show(event)
        if isinstance(event, training.TrainingDone):  # the run directory appears after this
            evaluations.update(_evaluate(event.run, data, arguments))
        track(event)

    with display, tracking.trackers(arguments, decision.recipe) as track:
        result = training.train(
            data,
            out=arguments.out,
            model=decision.start,
            recipe=decision.recipe,
            seed=arguments.seed,
            existing=arguments.existing,
            execution=decision.execution,
            on_event=on_event,
            provenance=training.Provenance.of(
                arguments.command,
                weights=decision.weights,
                model=decision.variant,
                teacher=decision.teacher,
            ),
        )
    if training.is_first_worker():
        _finish(result, display, evaluations, data, arguments, start=start)
    return 0


def _decide(
    arguments: argparse.Namespace, execution: "Execution"
) -> "tuple[ImageData, plan.Decision]":
    """Returns the images, and what is trained on them."""
    from keras_vit.training.train import make_engine

    recipe, config = _said(arguments, execution)
    make_engine(execution)  # before any TensorFlow operation: workers join a cluster first
    data = flags.load_data(arguments.data, strict=arguments.strict, json=arguments.json)
    start = functools.partial(_model, config, data, arguments)
    weights = None if arguments.weights == plan.NONE else arguments.weights
    given = plan.Decision(recipe, execution, start, weights, arguments.model, arguments.teacher)
    return data, plan.decide(arguments, data, config=config, given=given)


def _said(
    arguments: argparse.Namespace, execution: "Execution"
) -> "tuple[Recipe, ViTConfig | None]":
    """Returns the recipe of the flags, and the model with fresh weights; checks both."""
    is_fresh = arguments.weights in (None, plan.NONE)
    _check(arguments, is_fresh=is_fresh)
    recipe = _recipe(arguments, is_fresh=is_fresh)
    if not is_fresh:
        return recipe, None
    config = flags.model_config(
        arguments, image_size=_image_size(arguments), default="digits-hybrid"
    )
    return recipe, recipe.config(execution.config(config))


def _finish(
    result: "Run",
    display: output.TrainDisplay,
    evaluations: "dict[str, Evaluation]",
    data: "ImageData",
    arguments: argparse.Namespace,
    *,
    start: float,
) -> None:
    """Prints the result of a training, or that the run was finished before."""
    from keras_vit import evaluation

    if not display.has_ended and (result.path / evaluation.METRICS).is_file():
        display.show_finished(result)
        return
    if not evaluations:  # the training was finished without this command
        evaluations.update(_evaluate(result, data, arguments))
    display.finish(result, evaluations, seconds=time.monotonic() - start)


def _add_fine_tuning(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--layer-decay",
        type=flags.fraction,
        metavar="X",
        help="factor of the learning rate from each block to the one before it, such as 0.75 "
        "(default: 1, the same for all)",
    )
    group.add_argument(
        "--freeze",
        type=flags.index,
        metavar="N",
        help="with --weights, freeze the patch embedding and the first N blocks; 0 freezes the "
        "patch embedding alone (default: train everything)",
    )
    group.add_argument(
        "--lora",
        type=flags.count,
        metavar="RANK",
        help="with --weights, train low-rank adapters (LoRA) of this rank and the classifier, not "
        "the kernels; model.keras has the adapters merged, adapter.safetensors has them alone "
        "(default: train the kernels)",
    )
    group.add_argument(
        "--lora-targets",
        type=flags.words(_LORA_TARGETS),
        default=("qkv",),
        metavar="LIST",
        help=f"layers that --lora adapts, some of {','.join(_LORA_TARGETS)} (default: qkv)",
    )


def _add_distillation(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--teacher",
        metavar="SOURCE",
        help="also learn from the predictions of this model (distillation): a run with the same "
        "classes, a .keras file of any Keras classifier that takes pixels 0..255, or another "
        "source as of --weights (default: learn from labels alone)",
    )
    group.add_argument(
        "--teacher-sha256",
        type=flags.sha256,
        metavar="HEX",
        help="expected SHA-256 of the teacher's file, checked before it is read (default: none)",
    )
    group.add_argument(
        "--distillation",
        choices=("soft", "hard"),
        help="what to learn from the teacher: soft, its probabilities, or hard, its most probable "
        "class (default: soft)",
    )
    group.add_argument(
        "--temperature",
        type=flags.positive,
        metavar="X",
        help="temperature of soft distillation, which divides the logits (default: 3)",
    )
    group.add_argument(
        "--distillation-weight",
        type=flags.fraction,
        metavar="X",
        help="weight of the teacher's loss, above 0, at most 1; the labels' loss has the remainder "
        "(default: 0.5)",
    )


def _evaluate(
    result: "Run", data: "ImageData", arguments: argparse.Namespace
) -> "dict[str, Evaluation]":
    """Evaluates a run on its validation and test images; writes its report and card into it."""
    from keras_vit import evaluation, reporting
    from keras_vit.training import run as training_run

    evaluations = {
        name: evaluation.evaluate(result.model, data.split(name), labels=data.labels)
        for name in ("validation", "test")
    }
    evaluation.write_report(result.path, evaluations)
    subject = reporting.Subject(
        name=arguments.out,
        model=result.model,
        run=result,
        data=data,
        evaluations=evaluations,
        command=arguments.command,
    )
    output.warn(reporting.try_report(result.path / training_run.REPORT, subject))
    reporting.write_card(result, name=Path(arguments.out).name)
    return evaluations


def _add_recipe_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help="training recipe: digits, scratch, fine-tune, or one of the papers: vit-imagenet21k, "
        "vit-imagenet, vit-jft-b to -h14, finetune-imagenet, -imagenet-512, -cifar10, -cifar100, "
        "-pets, -flowers, -vtab, augreg-none to augreg-strong2, augreg-imagenet-none to -strong2, "
        "augreg-finetune, plain-s16, deit, deit-384, deit3-s16 to -h14, deit3-384-b16; "
        "docs/training.md lists all of them (default: digits for the digits, fine-tune with "
        "--weights, otherwise scratch); the flags below change single numbers of it",
    )
    recipe_flags.add_schedule(
        group,
        epochs="200 for the digits, 100 for a folder, 10 with --weights",
        patience="30 for a folder, 5 with --weights; 0 for the digits and the papers' recipes",
        batch_size="64",
        learning_rate="0.002 for the digits, 0.001 for a folder, 0.0001 with --weights",
    )
    recipe_flags.add_regularization(group, is_labelled=True)


def _check(arguments: argparse.Namespace, *, is_fresh: bool) -> None:
    """Raises a ValueError for flags that contradict or need each other."""
    if arguments.freeze is not None and arguments.lora is not None:
        raise ValueError("--lora freezes every kernel already; leave out --freeze.")
    for name in ("distillation", "temperature", "distillation_weight", "teacher_sha256"):
        if arguments.teacher is None and getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --teacher.")
    if is_fresh:
        _check_fresh(arguments)
        return
    if arguments.set:
        raise ValueError(
            f"--set {arguments.set[0][0]} is for fresh weights; leave it out together with "
            "--weights, which come with their model."
        )
    if arguments.patch_size is not None:
        raise ValueError("--patch-size is the checkpoint's; leave it out together with --weights.")
    if _is_run(arguments.weights):
        if arguments.model is not None:
            raise ValueError("--model is the run's; leave it out together with --weights RUN.")
    elif arguments.model is None:
        _check_source(arguments.weights)


def _check_fresh(arguments: argparse.Namespace) -> None:
    for name in ("freeze", "lora", "weights_sha256", "positions"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --weights.")


def _check_source(weights: str) -> None:
    """Raises an error for what cannot say its own model: a published name, or nothing at all."""
    from keras_vit.weights.checkpoint import SUFFIXES

    if "://" in weights or Path(weights).exists():
        return
    if weights.endswith(SUFFIXES):
        raise FileNotFoundError(f"There is no model file {weights!r}; check the path.")
    raise ValueError(
        f"--weights {weights} is no file or folder, and as a published name it needs --model with "
        "the variant that it belongs to, such as --model B/16."
    )


def _is_run(weights: str) -> bool:
    from keras_vit import training

    return training.has_run_files(Path(weights))


def _model(
    config: "ViTConfig | None", data: "ImageData", arguments: argparse.Namespace
) -> "ViTConfig | VisionTransformer | DistillationModel":
    start = config or _adapt(_pretrained(arguments, data), arguments)
    return start if arguments.teacher is None else _with_teacher(start, data, arguments)


def _adapt(model: "VisionTransformer", arguments: argparse.Namespace) -> "VisionTransformer":
    """Returns the model, frozen by `--freeze` or adapted by `--lora`."""
    import keras_vit

    if arguments.freeze is not None:
        keras_vit.freeze(model, blocks=arguments.freeze)
    if arguments.lora is not None:
        return keras_vit.lora(model, rank=arguments.lora, targets=arguments.lora_targets)
    return model


def _with_teacher(
    student: "VisionTransformer | ViTConfig", data: "ImageData", arguments: argparse.Namespace
) -> "DistillationModel":
    """Returns the student with the teacher of the flags."""
    from keras_vit import VisionTransformer, ViTConfig, training
    from keras_vit.weights.sources import find

    if isinstance(student, ViTConfig):
        config = dataclasses.replace(student, classes=len(data.labels), include_preprocessing=True)
        student = VisionTransformer(config)
    if arguments.teacher_sha256 is not None:
        find(arguments.teacher, sha256=arguments.teacher_sha256)
    teacher = flags.open_model(arguments.teacher)
    names = (teacher.labels, teacher.identifiers)
    if teacher.states_labels and tuple(data.labels) not in names:
        raise ValueError(
            f"The teacher {arguments.teacher!r} has the classes {', '.join(names[0][:5])}, the "
            f"data has {', '.join(data.labels[:5])}; both must have the same, in the same order."
        )
    options = {
        "distillation": arguments.distillation,
        "temperature": arguments.temperature,
        "weight": arguments.distillation_weight,
    }
    options = {name: value for name, value in options.items() if value is not None}
    return training.DistillationModel(student, teacher.model, **options)


def _pretrained(arguments: argparse.Namespace, data: "ImageData") -> "VisionTransformer":
    from keras_vit import training
    from keras_vit.weights.sources import find

    size, sha256 = _image_size(arguments), arguments.weights_sha256
    positions: Method = arguments.positions or "original"
    if _is_run(arguments.weights):
        if sha256 is not None:
            find(arguments.weights, sha256=sha256)
        trained = training.Run.load(arguments.weights)
        return trained.classifier(data.labels, image_size=size, positions=positions)
    with flags.saying_warnings():
        return training.pretrained_model(
            arguments.model,
            weights=arguments.weights,
            classes=len(data.labels),
            image_size=size,
            positions=positions,
            sha256=sha256,
        )


def _recipe(arguments: argparse.Namespace, *, is_fresh: bool) -> "Recipe":
    from keras_vit import training

    recipe = training.RECIPES["digits" if arguments.data == "digits" else "scratch"]
    if arguments.recipe is not None:
        recipe = _named_recipe(arguments.recipe)
    elif not is_fresh:
        augmentation = recipe.augmentation
        recipe = dataclasses.replace(training.RECIPES["fine-tune"], augmentation=augmentation)
        if arguments.data == "digits":
            recipe = dataclasses.replace(recipe, patience=None)
    return recipe_flags.override_recipe(recipe, arguments)


def _named_recipe(name: str) -> "Recipe":
    from keras_vit import training

    if name not in training.RECIPES:
        raise ValueError(
            f"There is no recipe {name!r}; choose one of {', '.join(training.RECIPES)}."
        )
    return training.RECIPES[name]


def _image_size(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """Returns the size of `--image-size`, or the recipe's; None for the model's own."""
    if arguments.image_size is not None or arguments.recipe is None:
        size: tuple[int, int] | None = arguments.image_size
        return size
    return _named_recipe(arguments.recipe).image_size
