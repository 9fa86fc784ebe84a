"""`keras-vit train` and `pretrain`: from images to a run."""

import argparse
import dataclasses
import functools
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_vit.cli import flags, output

if TYPE_CHECKING:
    from keras_vit.config import ViTConfig
    from keras_vit.data import ImageData
    from keras_vit.evaluation import Evaluation
    from keras_vit.model import VisionTransformer
    from keras_vit.training import DistillationModel, Provenance, Recipe, Run, TrainingPlan
    from keras_vit.weights.positions import Method

    Start = Callable[[], Any]  # makes the model to train

# As in keras_vit.weights.positions, which imports NumPy.
POSITIONS = ("original", "bilinear", "bicubic", "bicubic_antialias")
TARGETS = ("mean_color", "small_patch", "pixels")
# Settings that change nothing, or nothing that is meant, without labels.
_OF_CLASSIFIERS = (
    *("representation_dim", "distillation_token", "loss", "head_bias", "label_smoothing"),
    *("balance", "mixup", "cutmix", "mix_per"),
)
# --weights of this name are new ones, and nothing is asked for.
NONE = "none"
_DESCRIPTION = """\
Trains a Vision Transformer and writes a run directory.

--data is a folder with one sub-folder per class, or with train/, validation/ and test/ that have
these, or Training/, val/, seg_test/ and the like. Images are JPEG, PNG, WebP, BMP, GIF, TIFF or
AVIF files of any size, grey, coloured or transparent. Missing splits are made: a tenth of each
class for validation, a tenth for test. --data may also be tfds:NAME, a dataset of TensorFlow
Datasets (pip install tensorflow-datasets), or the word digits, the 1,797 handwritten digits of
scikit-learn (a folder of that name is ./digits).

Where no flag names a model, weights or a recipe, the folder is looked at first, and a line says
what is chosen. ImageNet-21k weights are fine-tuned where they can be reached (Keras' cache,
KERAS_VIT_MIRROR, the network): Ti/16, or S/16 from 1,000 training images on a GPU. Elsewhere, and
with --weights none, a small model trains from nothing. Where memory is exhausted, batches are split
into micro-batches, with the same result. --plan shows the line without training.

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
  keras-vit train --data photos --out photos-run --image-size 96 --epochs 200 --set flip=false
  keras-vit train --data photos --out tuned-run --model Ti/16 --weights imagenet21k
  keras-vit train --data photos --out paper-run --model B/16 --weights imagenet21k \\
      --recipe finetune-pets --batch-size 64 --gradient-accumulation-steps 4
  keras-vit train --data photos --out s16-run --model S/16 --recipe plain-s16 --batch-size 256
  keras-vit train --data photos --out gap-run --set pooling=avg class_token=false
  keras-vit train --data photos --out few-run --weights pretrained-run
  keras-vit train --data photos --out dino-run --weights hf://facebook/dinov2-small --image-size 224
  keras-vit train --data photos --out lora-run --model B/16 --weights imagenet21k --lora 8
  keras-vit train --data photos --out small-run --teacher tuned-run --set distillation=hard
  keras-vit train --data photos --out balanced-run --set balance=true
  keras-vit train --data photos --out photos-run --resume --epochs 150
"""
_SETTINGS = (
    flags.SETTINGS
    + """\
  balance=true           weigh the loss of each image so that all classes count the same
  mixup=0.2              alpha of MixUp, which blends two images
  cutmix=1               alpha of CutMix, which pastes a part of another image; with mixup each
                         image gets one of the two
  distillation=hard      what to learn from --teacher: soft, its probabilities (the default), or
                         hard, its most probable class
  temperature=3          of soft distillation, which divides the logits
  distillation_weight=0.5
                         of the teacher's loss; the labels' loss has the remainder
"""
)
_PRETRAINING = """\
Trains a Vision Transformer without labels and writes a run directory.

The objective masked-patches corrupts half of the patches of each image and predicts them from the
others (arXiv 2010.11929, Appendix B.1.2). The target of a patch is its mean colour, as one of 512
classes; 4x4 such colours; or all of its pixels.

--data is a folder of images, with or without class folders. Without them, a tenth of the images is
set aside for validation; with them, also the test images of a later training. It may also be
tfds:NAME or the word digits, as in keras-vit train. --resume and several GPUs work as there.

The run's model.keras has no classifier and pools by the average of the patches;
reconstructions.png shows its predictions. Continue with keras-vit train --weights RUN, or measure
the features with keras-vit evaluate RUN. Pre-training can help where a class has ten labels or
fewer; the 1,797 digits gain nothing by it, nor do 300 photos.

examples:
  keras-vit pretrain --data photos --out pretrained-run --target pixels
  keras-vit evaluate pretrained-run
  keras-vit train --data photos --out tuned-run --weights pretrained-run
"""
_MASKING = """\
  corruption=0.5         fraction of the patches to corrupt, above 0, at most 1
"""


_WEIGHTS = """
  --weights SOURCE or NAME  weights to start from, which also decide --model: a run of pretrain or
      train; a .keras, .safetensors or .npz file; a folder with config.json and model.safetensors;
      a URL; hf://owner/name[@revision]; or, with --model, a checkpoint of that variant or the name
      of published weights, such as imagenet21k, which are downloaded; none for random weights
      (default: for a folder, imagenet21k of Ti/16 or S/16 if no flag names a model or recipe and
      they can be reached; otherwise none)
  --weights-sha256 HEX  expected SHA-256 of the file of --weights, or of the run's model.keras;
      checked before the file is read (default: a download is compared with its first)
  --positions METHOD  how the position embeddings of --weights are resampled to --image-size:
      original, as the original's fine-tuning does, or as PyTorch's interpolate does: bilinear,
      bicubic, or bicubic_antialias, which is timm's (default: original)
"""
_RECIPE = """
  --recipe NAME  training recipe: digits, scratch, fine-tune, or one of the papers:
      vit-imagenet21k, vit-imagenet, vit-jft-b to -h14, finetune-imagenet, -imagenet-512, -cifar10,
      -cifar100, -pets, -flowers, -vtab, augreg-none to augreg-strong2, augreg-imagenet-none to
      -strong2, augreg-finetune, plain-s16, deit, deit-384, deit3-s16 to -h14, deit3-384-b16;
      docs/training.md lists all of them (default: digits for the digits, otherwise scratch, also
      with --weights of a run by these or of pretrain; with others fine-tune; of few images as long
      as 200 steps); --set changes single numbers of it
"""
_LEARNING = """
  --freeze N  with --weights, freeze the patch embedding and the first N blocks; 0 freezes the
      patch embedding alone (default: train everything)
  --lora RANK  with --weights, train low-rank adapters (LoRA) of this rank and the classifier, not
      the kernels; model.keras has the adapters merged, adapter.safetensors has them alone
      (default: train the kernels)
  --lora-targets LIST  layers that --lora adapts, some of qkv,out,fc1,fc2 (default: qkv)
  --teacher SOURCE  also learn from the predictions of this model (distillation): a run with the
      same classes, a .keras file of any Keras classifier that takes pixels 0..255, or another
      source as of --weights (default: learn from labels alone)
  --teacher-sha256 HEX  expected SHA-256 of the teacher's file, checked before it is read (default:
      none)
"""
_PLAN = """
  --plan  look at the images and the machine, print what would be trained, and end; nothing is
      downloaded or written (default: train)
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `train`."""
    parser = flags.add_command(
        commands, "train", run, "train a model on images", _DESCRIPTION, _SETTINGS + flags.AFTER
    )
    model, recipe = flags.add_training(parser, needs_out=False)
    sha256 = {"type": flags.SHA256}
    flags.add(model, _WEIGHTS, weights_sha256=sha256, positions={"choices": POSITIONS})
    flags.add(recipe, _RECIPE)
    flags.add(
        parser.add_argument_group("fine-tuning and distillation"),
        _LEARNING,
        freeze={"type": flags.whole(0)},
        lora={"type": flags.whole(1)},
        lora_targets={"type": flags.words(("qkv", "out", "fc1", "fc2")), "default": ("qkv",)},
        teacher_sha256=sha256,
    )
    flags.add(parser, _PLAN)


def add_pretrain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand `pretrain`."""
    parser = flags.add_command(
        commands,
        "pretrain",
        pretrain,
        "train a model on images without labels",
        _PRETRAINING,
        flags.SETTINGS + _MASKING + flags.AFTER,
    )
    flags.add(
        parser,
        """
  --target NAME  what to predict of a patch: mean_color, its mean colour; small_patch, 4x4 colours;
      or pixels, all of them (default: mean_color)
""",
        target={"choices": TARGETS, "default": TARGETS[0]},
    )
    flags.add_training(parser, needs_out=True)


def check_usage(arguments: argparse.Namespace) -> None:
    """Ends the program with exit code 2 where `--out` is missing, which `--plan` does not need."""
    if arguments.out is None and not arguments.plan:
        arguments.refuse("the following arguments are required: --out")


def run(arguments: argparse.Namespace) -> int:
    """Trains, evaluates and prints."""
    from keras_vit import training
    from keras_vit.training.train import check_data, make_engine
    from keras_vit.variants import VARIANTS

    began = time.monotonic()
    settings = flags.Settings.of(arguments, flags.TEACHING)
    execution = training.Execution(**settings.execution)
    if not arguments.plan:
        training.check_free(arguments.out, existing=arguments.existing)
    is_new = arguments.weights in (None, NONE)
    _check(arguments, settings, is_new=is_new)
    recipe = _recipe(arguments, settings)  # before the images are read, to refuse wrong settings
    size = arguments.image_size or recipe.image_size
    name, config = arguments.model, None
    if is_new:
        name = name or flags.default_model(arguments, "digits-hybrid")
        config = training.model_config(
            name, image_size=size, patch_size=settings.model.get("patch_size")
        )
        config = recipe.config(execution.config(config))
    make_engine(execution)  # before any TensorFlow operation: workers join a cluster first
    data = flags.load_data(arguments)
    check_data(data)  # --plan trains nothing, which would say it
    if not is_new and arguments.recipe is None:
        # Adapters of low blocks learn as fast as others.
        numbers = {} if arguments.lora is None else {"layer_decay": 1.0}
        anew = training.planning.trains_anew(arguments.weights)
        recipe = training.planning.fine_tuning(data, anew=anew, **{**numbers, **settings.recipe})
    make_model: Start = functools.partial(_model, config, data, settings, arguments, size=size)
    if not is_new and name in VARIANTS:
        config = training.model_config(name, image_size=size)
    given = training.TrainingPlan(
        data=data,
        model=name or "the model",
        config=config,
        recipe=recipe,
        execution=execution,
        weights=None if is_new else arguments.weights,
    )
    plan, make_model = decide(arguments, settings, given, make_model)
    if arguments.plan:
        return 0
    provenance = training.Provenance.of(
        arguments.command,
        weights=plan.weights,
        model=plan.model if plan.model in VARIANTS else None,
        teacher=arguments.teacher,
    )
    train = functools.partial(training.train, data, recipe=plan.recipe, execution=plan.execution)
    return _carry_out(train, make_model, provenance, arguments, data, began=began)


def pretrain(arguments: argparse.Namespace) -> int:
    """Trains without labels and prints."""
    from keras_vit import training
    from keras_vit.training.train import make_engine

    began = time.monotonic()
    settings = flags.Settings.of(arguments, flags.MASKING)
    execution = training.Execution(**settings.execution)
    training.check_free(arguments.out, existing=arguments.existing)
    for name, _ in arguments.set:
        if name in _OF_CLASSIFIERS:
            raise ValueError(
                f"--set {name} belongs to a classifier, and pretrain makes none; give it to "
                "keras-vit train."
            )
    make_engine(execution)  # before any TensorFlow operation: workers join a cluster first
    data = flags.load_data(arguments, labelled=False)

    def make_model() -> training.MaskedPatchModel:
        name = arguments.model or flags.default_model(arguments, "digits")
        size, patch_size = arguments.image_size, settings.model.get("patch_size")
        config = training.model_config(name, image_size=size, patch_size=patch_size)
        config = recipe.config(dataclasses.replace(config, pooling="avg"))
        return training.MaskedPatchModel(
            dataclasses.replace(config, include_preprocessing=True),
            target=arguments.target,
            seed=arguments.seed,
            **settings.objective,
        )

    recipe = settings.change(training.default_pretrain_recipe(data))
    train = functools.partial(training.pretrain, data, recipe=recipe, execution=execution)
    provenance = training.Provenance.of(arguments.command)
    return _carry_out(train, make_model, provenance, arguments, data, began=began)


def _carry_out(
    train: "functools.partial[Run]",
    make_model: "Start",
    provenance: "Provenance",
    arguments: argparse.Namespace,
    data: "ImageData",
    *,
    began: float,
) -> int:
    from keras_vit import training

    display = output.TrainDisplay(json=arguments.json)
    evaluations: dict[str, Evaluation] = {}
    is_first = training.is_first_worker()

    def on_event(event: training.Event) -> None:
        display.show(event)
        if isinstance(event, training.TrainingDone):  # the run directory appears after this
            evaluations.update(_report(event.run, data, arguments))
        track(event)

    names = [name for name in arguments.log if name not in flags.ALWAYS_LOGGED and is_first]
    logged = {name: getattr(arguments, name) for name in ("data", "model", "seed")}
    logged["recipe"] = train.keywords["recipe"].to_dict()
    with display, training.Trackers(names, out=arguments.out, settings=logged) as track:
        result = train(
            out=arguments.out,
            model=make_model,
            seed=arguments.seed,
            existing=arguments.existing,
            on_event=on_event,
            provenance=provenance,
        )
    if not is_first:
        return 0
    is_unmeasured = result.has_classifier and not (result.path / training.run.METRICS).is_file()
    if not display.has_ended and not is_unmeasured:
        display.show_finished(result)
        return 0
    if result.has_classifier and not evaluations:  # it was finished without this command
        evaluations.update(_report(result, data, arguments))
    display.finish(result, evaluations, seconds=time.monotonic() - began)
    return 0


def _report(
    result: "Run", data: "ImageData", arguments: argparse.Namespace
) -> "dict[str, Evaluation]":
    from keras_vit import evaluation, reporting

    evaluations = {
        name: evaluation.evaluate(result.model, data.split(name), labels=data.labels)
        for name in ("validation", "test")
        if result.has_classifier
    }
    subject = reporting.Subject(
        name=arguments.out,
        model=result.model,
        run=result,
        data=data if result.has_classifier else None,
        evaluations=evaluations,
        command=arguments.command,
    )
    output.warn(reporting.write_files(result.path, subject))
    reporting.write_card(result, name=Path(arguments.out).name)
    return evaluations


def decide(
    arguments: argparse.Namespace,
    settings: flags.Settings,
    given: "TrainingPlan",
    make_model: "Start",
) -> "tuple[TrainingPlan, Start]":
    """Returns what to train: as it was started, as the flags say, or else what suits the images.

    Args:
        arguments: the command line's.
        settings: what --set says.
        given: what the flags say.
        make_model: makes the model that the flags say.
    """
    from keras_vit import training
    from keras_vit.training import planning

    says = (arguments.model, arguments.recipe, arguments.teacher, settings.model)
    is_open = arguments.data != "digits" and arguments.weights in (None, NONE) and not any(says)
    is_resumed = arguments.existing == "resume" and arguments.out is not None
    started = planning.ResumePoint.read(arguments.out) if is_resumed else None
    plan = given
    if started is not None:  # it goes on, whatever can be reached now
        count = started.gradient_accumulation_steps
        kept = {"precision": started.precision, "gradient_accumulation_steps": count}
        execution = dataclasses.replace(given.execution, **{**kept, **settings.execution})
        given = dataclasses.replace(given, execution=execution)
        if is_open:
            recipe = started.recipe.changed(**settings.recipe)
            given = dataclasses.replace(given, recipe=recipe, config=started.config)
            make_model = given.make_model
        plan = dataclasses.replace(given, model="as started", config=started.config, weights=None)
    elif planning.is_one_of_several():
        if is_open and training.is_first_worker() and not arguments.json:
            output.say("Several workers train together: nothing is chosen, the flags decide.")
        return given, make_model
    elif is_open:
        execution = given.execution
        if "precision" not in settings.execution:
            precision = planning.fast_precision(execution)
            execution = dataclasses.replace(execution, precision=precision)
        plan = training.plan(
            given.data,
            weights=None if arguments.weights == NONE else planning.AUTO,
            image_size=arguments.image_size,
            execution=execution,
            settings=settings.recipe,
        )
        given, make_model = plan, plan.make_model
    if arguments.plan or (is_open and started is None):
        _show(arguments, plan, is_started=started is not None)
    return given, make_model


def _show(arguments: argparse.Namespace, plan: "TrainingPlan", *, is_started: bool) -> None:
    if arguments.json:
        output.print_json("plan", **plan.to_dict())
        return
    choice = f"{arguments.out} goes on as it was started:" if is_started else plan.choice_text
    output.say(f"{choice} {plan.steps_text}")
    if arguments.plan:
        words = [word for word in shlex.split(arguments.command)[1:] if word != "--plan"]
        name = Path(arguments.data.rpartition(":")[2]).resolve().name or "new"
        output.say_next(*words, *(() if arguments.out else ("--out", f"{name}-run")))


def _check(arguments: argparse.Namespace, settings: flags.Settings, *, is_new: bool) -> None:
    from keras_vit import training
    from keras_vit.weights.checkpoint import SUFFIXES

    weights = arguments.weights
    if arguments.freeze is not None and arguments.lora is not None:
        raise ValueError("--lora freezes every kernel already; leave out --freeze.")
    if arguments.teacher is None and arguments.teacher_sha256 is not None:
        raise ValueError("--teacher-sha256 needs --teacher.")
    if arguments.teacher is None and settings.objective:
        name = next(name for name, _ in arguments.set if name in flags.TEACHING)
        raise ValueError(f"--set {name} needs --teacher.")
    if is_new:
        for name in ("freeze", "lora", "weights_sha256", "positions"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --weights.")
        return
    if settings.model:
        raise ValueError(
            f"--set {next(iter(settings.model))} is for random weights; leave it out together with "
            "--weights, which come with their model."
        )
    if training.has_run_files(Path(weights)):
        if arguments.model is not None:
            raise ValueError("--model is the run's; leave it out together with --weights RUN.")
    elif arguments.model is None and "://" not in weights and not Path(weights).exists():
        if weights.endswith(SUFFIXES):
            raise FileNotFoundError(f"There is no model file {weights!r}; check the path.")
        raise ValueError(
            f"--weights {weights} is no file or folder, and as a published name it needs --model "
            "with the variant that it belongs to, such as --model B/16."
        )


def _recipe(arguments: argparse.Namespace, settings: flags.Settings) -> "Recipe":
    from keras_vit import training

    name = arguments.recipe or ("digits" if arguments.data == "digits" else "scratch")
    if name not in training.RECIPES:
        names = ", ".join(training.RECIPES)
        raise ValueError(f"There is no recipe {name!r}; choose one of {names}.")
    return settings.change(training.RECIPES[name])


def _model(
    config: "ViTConfig | None",
    data: "ImageData",
    settings: flags.Settings,
    arguments: argparse.Namespace,
    *,
    size: tuple[int, int] | None,
) -> "ViTConfig | VisionTransformer | DistillationModel":
    from keras_vit import training
    from keras_vit.adaptation import freeze, lora
    from keras_vit.model import VisionTransformer
    from keras_vit.weights.sources import find

    if config is not None and arguments.teacher is None:
        return config
    if config is None:
        start = _pretrained(arguments, data, size=size)
        if arguments.freeze is not None:
            freeze(start, blocks=arguments.freeze)
        if arguments.lora is not None:
            start = lora(start, rank=arguments.lora, targets=arguments.lora_targets)
    else:
        config = dataclasses.replace(config, classes=len(data.labels), include_preprocessing=True)
        start = VisionTransformer(config)
    if arguments.teacher is None:
        return start
    if arguments.teacher_sha256 is not None:
        find(arguments.teacher, sha256=arguments.teacher_sha256)
    teacher = flags.open_model(arguments.teacher)
    names = (teacher.labels, teacher.identifiers)
    if teacher.states_labels and tuple(data.labels) not in names:
        raise ValueError(
            f"The teacher {arguments.teacher!r} has the classes {', '.join(names[0][:5])}, the "
            f"data has {', '.join(data.labels[:5])}; both must have the same, in the same order."
        )
    return training.DistillationModel(start, teacher.model, **settings.objective)


def _pretrained(
    arguments: argparse.Namespace, data: "ImageData", *, size: tuple[int, int] | None
) -> "VisionTransformer":
    from keras_vit import training
    from keras_vit.weights.sources import find

    sha256 = arguments.weights_sha256
    positions: Method = arguments.positions or "original"
    if training.has_run_files(Path(arguments.weights)):
        if sha256 is not None:
            find(arguments.weights, sha256=sha256)
        trained = training.Run.load(arguments.weights)
        return trained.classifier(data.labels, image_size=size, positions=positions)
    return training.pretrained_model(
        arguments.model,
        weights=arguments.weights,
        classes=len(data.labels),
        image_size=size,
        positions=positions,
        sha256=sha256,
    )
