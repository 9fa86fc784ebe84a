"""The flags of `keras-vit train` that fine-tune on little hardware, and distil a teacher."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keras_vit.cli import values

if TYPE_CHECKING:
    import keras

    from keras_vit import VisionTransformer, ViTConfig
    from keras_vit.data import ImageData
    from keras_vit.training import DistillationModel

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
    from keras_vit.weights.source import find

    if arguments.teacher is None:
        return student
    if isinstance(student, ViTConfig):
        config = dataclasses.replace(student, classes=len(data.labels), include_preprocessing=True)
        student = VisionTransformer(config)
    if arguments.teacher_sha256 is not None:
        find(arguments.teacher, sha256=arguments.teacher_sha256)
    teacher = _open(arguments.teacher, labels=data.labels)
    given = {
        "distillation": arguments.distillation,
        "temperature": arguments.temperature,
        "weight": arguments.distillation_weight,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return training.DistillationModel(student, teacher, **chosen)


def _add_fine_tuning(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--layer-decay",
        type=values.fraction,
        metavar="X",
        help="factor of the learning rate from each block to the one before it, such as 0.75 "
        "(default: 1, the same everywhere)",
    )
    group.add_argument(
        "--freeze",
        type=values.index,
        metavar="N",
        help="with --weights, do not train the patch embedding and the first N blocks; 0 is the "
        "patch embedding alone (default: train everything)",
    )
    group.add_argument(
        "--lora",
        type=values.count,
        metavar="RANK",
        help="with --weights, train thin matrices of this rank beside the kernels, and the "
        "classifier; the run's model.keras has them merged, adapter.safetensors has them alone "
        "(default: train the kernels)",
    )
    group.add_argument(
        "--lora-targets",
        type=values.words(TARGETS),
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
        type=values.sha256,
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
        type=values.positive,
        metavar="X",
        help="what logits are divided by in soft distillation (default: 3)",
    )
    group.add_argument(
        "--distillation-weight",
        type=values.fraction,
        metavar="X",
        help="what the teacher counts; labels count the rest (default: 0.5)",
    )


def _open(path: str, *, labels: Sequence[str]) -> "keras.Model":
    """Opens a teacher: a run that knows the same classes, or a file."""

    from keras_vit import training

    if not path.endswith(".keras") or Path(path).is_dir():
        opened = training.load_run(path)
        if opened.labels != tuple(labels):
            raise ValueError(
                f"The teacher {path!r} knows the classes {', '.join(opened.labels[:5])}, the data "
                f"has {', '.join(labels[:5])}; both must have the same, in the same order."
            )
        return opened.model
    if not Path(path).exists():
        raise FileNotFoundError(f"There is no model file {path!r}; check the path.")
    return training.open_model(path)
