"""Plans a training by rules: what suits the images and the device."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.config import ViTConfig
from keras_vit.data import ImageData
from keras_vit.limits import counted
from keras_vit.model import VisionTransformer
from keras_vit.training import models, run
from keras_vit.training.checkpoints import SETTINGS, WorkDirectory
from keras_vit.training.execution import Execution, Precision, cluster_workers
from keras_vit.training.recipe import Recipe
from keras_vit.training.recipes import RECIPES
from keras_vit.training.train import default_recipe
from keras_vit.weights import sources
from keras_vit.weights.download import MIRROR_SETTING

AUTO = "auto"
PUBLISHED = "imagenet21k"  # of AugReg: 37 MiB for Ti/16, 115 for S/16
_MANY = 1000  # training images, from which an accelerator fine-tunes S/16 and not Ti/16
# A training from weights that is shorter than this hardly moves them.
_STEPS, _SMALLEST_BATCH = 200, 8
# What suits so few: a small model of 13 classes of photos, trained on 10 others of 6 and 24 images,
# ends at test losses of 1.4 and 0.7, with the recipe's own 1e-4 at 1.9 and 1.5.
_OF_FEW = {"learning_rate": 3e-4, "layer_decay": 0.75}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What to train on images, and how.

    Attributes:
        data: the images.
        model: the model's name, as in `MODEL_NAMES`.
        config: the model's sizes; None for a model that only its file describes.
        recipe: how to train.
        execution: where, with the precision.
        weights: the published weights that it starts from; None for random ones.
        place: where their file is: "cache", "mirror" or "network".
        unreached: why there are no published weights, where they were looked for.
    """

    data: ImageData
    model: str
    config: ViTConfig | None
    recipe: Recipe
    execution: Execution
    weights: str | None = None
    place: sources.Origin | None = None
    unreached: str | None = None

    def make_model(self) -> ViTConfig | VisionTransformer | None:
        """Returns the model to give to `train`: weights are downloaded here, if need be."""
        if self.weights is None or self.config is None:
            return self.config
        return models.pretrained_model(
            self.model,
            weights=self.weights,
            classes=len(self.data.labels),
            image_size=self.config.image_size,
        )

    @property
    def choice_text(self) -> str:
        """The images, and what is trained on them, in a sentence."""
        images, classes = sum(self.data.counts.values()), len(self.data.labels)
        text = f"{counted(images, 'image')} of {counted(classes, 'class')}"
        counts = _class_counts(self.data)
        if min(counts, default=0):
            text += f", the largest {max(counts) / min(counts):.1f} times the smallest"
        if self.weights is not None:
            where = "from" if self.place == "network" else "in"
            place = f" ({where} the {self.place})" if self.place else ""
            return f"{text}: fine-tunes {self.model} from {self.weights}{place}."
        reason = "" if self.unreached is None else f", as {self.unreached}"
        return f"{text}: trains {self.model} from random weights{reason}."

    @property
    def steps_text(self) -> str:
        """The recipe and the devices, in a sentence."""
        plan, recipe = self.recipe.plan(images=len(self.data.train)), self.recipe
        length = counted(*((recipe.epochs, "epoch") if recipe.epochs else (plan.steps, "step")))
        text = f"{length} in batches of {plan.batch_size}"
        if self.execution.gradient_accumulation_steps > 1:
            text += f", each in {self.execution.gradient_accumulation_steps} micro-batches"
        size = (self.config and self.config.image_size) or recipe.image_size
        if size is not None:
            order = "" if size[0] == size[1] else " (height x width)"
            text = f"{size[0]}x{size[1]} pixels{order}, {text}"
        return f"{text}, {self.execution.precision}, on {_devices_text()}."

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values that JSON can carry."""
        plan, counts = self.recipe.plan(images=len(self.data.train)), _class_counts(self.data)
        return {
            "images": dict(self.data.counts),
            "classes": len(self.data.labels),
            "largest_class": max(counts, default=None),
            "smallest_class": min(counts, default=None),
            "model": self.model,
            "weights": self.weights,
            "weights_are_in": self.place,
            "unreached": self.unreached,
            "image_size": None if self.config is None else list(self.config.image_size),
            "epochs": plan.epochs,
            "steps": plan.steps,
            "batch_size": plan.batch_size,
            "gradient_accumulation_steps": self.execution.gradient_accumulation_steps,
            "precision": self.execution.precision,
            "devices": _devices_text(),
        }


def plan(
    data: ImageData,
    *,
    weights: str | None = AUTO,
    image_size: tuple[int, int] | None = None,
    execution: Execution | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> TrainingPlan:
    """Plans a training that suits the images and the device.

    Published weights are fine-tuned where they can be reached: Ti/16, or S/16 from 1,000 training
    images on a GPU or TPU. Elsewhere the small model trains from nothing. Nothing is downloaded
    before `TrainingPlan.make_model`.

    Example:
        >>> from keras_vit.data import load_digits
        >>> made = plan(load_digits())
        >>> made.model, made.weights, made.recipe.epochs
        ('digits-hybrid', None, 200)

    To train by it, give `train` its `make_model`, `recipe` and `execution`.

    Args:
        data: the images.
        weights: "auto", the name of published weights, or None for random ones.
        image_size: (height, width) in pixels; None for the model's own.
        execution: where to train. None for the defaults of `Execution`, with the precision that the
            machine is fast in.
        settings: numbers of the recipe to set, as `Recipe.changed` takes them.

    Raises:
        ValueError: there are no published weights of that name, or a setting does not fit.
    """
    published = PUBLISHED if weights == AUTO else weights
    place, unreached = None, None
    if data.source == "digits":
        name, execution = "digits-hybrid", execution or Execution()
    else:
        name = "S/16" if _devices()[0] != "CPU" and len(data.train) >= _MANY else "Ti/16"
        place, unreached = _place(published, name, image_size)
        name = name if place else "tiny"
    recipe = fine_tuning(data, **settings) if place else default_recipe(data).changed(**settings)
    return TrainingPlan(
        data=data,
        model=name,
        config=models.model_config(name, image_size=image_size),
        recipe=recipe,
        execution=execution or Execution(precision=fast_precision(Execution())),
        weights=None if place is None else published,
        place=place,
        unreached=unreached,
    )


def trains_anew(weights: str) -> bool:
    """Whether weights change as much as random ones: a run's, without labels or by their recipe."""
    folder = Path(weights).parent if Path(weights).name == run.MODEL else Path(weights)
    fields = run.read_fields(folder / run.CONFIG) if run.is_run(folder) else {}
    source = run.flat(fields).get("recipe.source")
    is_own = source in (RECIPES["scratch"].source, RECIPES["digits"].source)
    return is_own or fields.get("objective") == run.MASKED_PATCHES


def fine_tuning(data: ImageData, *, anew: bool = False, **settings: Any) -> Recipe:
    """Returns the recipe to train from weights, of at least 200 steps however few the images are.

    That of random weights if `anew`. `settings` are numbers to set, as for `Recipe.changed`.
    """
    recipe = own = default_recipe(data)
    if not anew:
        recipe = dataclasses.replace(RECIPES["fine-tune"], augmentation=own.augmentation)
    images, chosen = len(data.train), dict[str, Any]()
    if recipe.plan(images=images).steps < _STEPS:
        size = max(images * (recipe.epochs or 1) // _STEPS, _SMALLEST_BATCH)
        chosen = {**({} if anew else _OF_FEW), "batch_size": 2 ** (size.bit_length() - 1)}
    if settings.get("optimizer") == "lamb":  # which takes none
        chosen.pop("layer_decay", None)
    chosen |= settings
    least = math.ceil(_STEPS / recipe.changed(**chosen).plan(images=images).steps_per_epoch)
    if not settings.keys() & {"epochs", "steps"}:
        chosen["epochs"] = max(recipe.epochs or 1, least)
    # No early end before these steps either.
    chosen.setdefault("patience", own.patience and max(recipe.patience or 0, least))
    return recipe.changed(**chosen)


def _place(
    published: str | None, name: str, image_size: tuple[int, int] | None
) -> tuple[sources.Origin | None, str | None]:
    if published is None:
        return None, None
    patch, (height, width) = models.model_config(name).patch_size, image_size or (0, 0)
    if height % patch or width % patch:
        return None, f"patches of {patch} pixels do not divide {height}x{width} (height x width)"
    try:
        return sources.resolve_origin(published, name, image_size=max(height, width) or None), None
    except ConnectionError as error:
        return None, (
            f"published weights cannot be reached ({error}): expect a lower accuracy. For them "
            f"connect to the network, or set {MIRROR_SETTING} to a folder or URL that has them; "
            "--weights none asks for none"
        )


def _class_counts(data: ImageData) -> list[int]:
    splits = [data.train, data.validation, data.test]
    if not all(hasattr(split, "images") for split in splits):
        return []
    targets = np.concatenate([split.targets for split in splits])
    return [int(count) for count in np.bincount(targets, minlength=len(data.labels))]


def fast_precision(execution: Execution) -> Precision:
    """Returns the precision that this machine trains fastest in.

    Of processors, those with AMX are 1.4 to 2.3 times as fast in mixed_bfloat16 under TensorFlow
    (docs/speed); XLA's code has no use for it. Of GPUs, those from Ampere on.
    """
    kind, versions = _devices()
    # GPUs of other makers have a name in place of this number.
    is_new = all(re.match(r"([89]|\d\d)\.\d", version) for version in versions)
    is_fast = kind == "TPU" or (kind == "GPU" and is_new)
    if kind == "CPU" and keras.backend.backend() == "tensorflow" and execution.xla is not True:
        is_fast = environment.has_bfloat16_units(among=(environment.BFLOAT16_TILES,))
    return "mixed_bfloat16" if is_fast else "float32"


def _devices() -> tuple[str, list[str]]:
    if keras.backend.backend() == "jax":
        import jax

        devices = jax.local_devices()
        versions = [str(getattr(each, "compute_capability", "")) for each in devices]
        return jax.default_backend().upper(), versions
    if os.environ.get("TPU_NAME"):
        return "TPU", []
    gpus = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    versions = [".".join(map(str, each.get("compute_capability", ()))) for each in gpus]
    return ("GPU" if versions else "CPU"), versions


def _devices_text() -> str:
    kind, versions = _devices()
    if kind == "CPU":
        return f"{environment.cores()} CPU cores"
    return f"{len(versions)} {kind}" if versions else kind


def is_one_of_several() -> bool:
    """Whether this process trains together with others, which could choose otherwise."""
    count = os.environ.get("KERAS_DISTRIBUTION_NUM_PROCESSES", "1")
    return len(cluster_workers()) > 1 or count not in ("", "1")


class ResumePoint(NamedTuple):
    """What a training that can be resumed, or is finished, was started with."""

    config: ViTConfig
    recipe: Recipe
    precision: Precision
    gradient_accumulation_steps: int

    @classmethod
    def read(cls, out: str | os.PathLike[str]) -> Self | None:
        """Reads it; None for nothing, and for a model that its config alone does not describe."""
        unfinished = WorkDirectory(Path(out))
        file = unfinished.path / SETTINGS if unfinished.exists() else Path(out) / run.CONFIG
        if not file.is_file():
            return None
        try:
            fields = run.read_fields(file)
            return cls(
                config=ViTConfig.from_dict(fields["model"]),
                recipe=Recipe.from_dict(fields["recipe"]),
                precision=fields["execution"]["precision"],
                gradient_accumulation_steps=fields["execution"]["gradient_accumulation_steps"],
            )
        except (ValueError, TypeError, LookupError, AttributeError):
            return None  # `train` says what is wrong with it
