"""Looks at images and machine, and plans a training that suits them."""

import dataclasses
import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.data import ImageData, Split
from keras_vit.data.images import read_bytes
from keras_vit.limits import counted
from keras_vit.model import VisionTransformer
from keras_vit.training import measuring, models, run
from keras_vit.training.checkpoints import SETTINGS, Unfinished
from keras_vit.training.execution import Execution, Job, Precision, cluster_workers
from keras_vit.training.recipe import Recipe
from keras_vit.training.recipes import RECIPES
from keras_vit.weights import sources
from keras_vit.weights.download import MIRROR_SETTING

AUTO = "auto"
PUBLISHED = "imagenet21k"  # of AugReg: 37 MiB for Ti/16, 115 for S/16
_SMALL, _LARGER = "Ti/16", "S/16"
_MANY = 1000  # training images, from which an accelerator fine-tunes the larger one
# A fine-tuning shorter than this hardly moves the weights: it then takes smaller batches.
_STEPS, _SMALLEST_BATCH = 200, 8
_EPOCHS = 100  # at most
_PLACES = {
    None: "",
    "cache": " (in the cache)",
    "mirror": " (in the mirror)",
    "network": " (from the network)",
}
_LOOKED_AT = 32  # images whose size is read


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What to train, how, and what it will take.

    Attributes:
        images: the number of images in each split.
        classes: the number of classes.
        largest: images of the largest class, in all splits; None for images that are not held.
        smallest: images of the smallest class.
        sides: median of the images' longer and of their shorter sides, in pixels.
        model: the model's name, as in `MODEL_NAMES`.
        weights: the published weights that it starts from; None for fresh ones.
        place: where their file is: "cache", "mirror" or "network".
        unreached: why there are no published weights, where they were looked for.
        config: the model's sizes; None for a model that only its file describes.
        recipe: how to train.
        execution: where, with the precision and the number of parts of a batch.
        cost: what was measured; None before.
        seconds: of the whole training, after the measurement.
        is_split: whether memory asks for the parts of a batch.
    """

    images: Mapping[str, int]
    classes: int
    largest: int | None = None
    smallest: int | None = None
    sides: tuple[int, int] | None = None
    model: str
    weights: str | None = None
    place: sources.Place | None = None
    unreached: str | None = None
    config: ViTConfig | None
    recipe: Recipe
    execution: Execution
    cost: measuring.Cost | None = None
    seconds: float | None = None
    is_split: bool = False

    def make_model(self) -> ViTConfig | VisionTransformer:
        """Returns the model to give to `train`: weights are downloaded here, if need be.

        Raises:
            OSError: the file cannot be fetched.
            ValueError: only its file describes the model.
        """
        if self.config is None:
            raise ValueError(f"The model {self.model!r} is known by its file alone; load that.")
        if self.weights is None:
            return self.config
        return models.pretrained_model(
            self.model,
            weights=self.weights,
            classes=self.classes,
            image_size=self.config.image_size,
        )

    def measured(self, data: ImageData, *, seed: int = 0, fits: bool = True) -> Self:
        """Returns the plan with its `cost` and time, and batches in as many parts as memory asks.

        Args:
            data: the images of the plan.
            seed: decides which images are read.
            fits: whether `execution.accumulate` may grow; the result stays the same but for
                rounding.

        Raises:
            MemoryError: not even one image fits into memory.
        """
        if self.config is None:
            return self
        job = Job(data, recipe=self.recipe, execution=self.execution, seed=seed)
        cost = measuring.measure(self.config, job)
        gc.collect()  # the model of the measurement, which holds itself
        execution, is_split = self.execution, False
        if fits:
            replicas = execution.make_engine().replicas
            parts = _parts(job.plan.batch_size // replicas, part=cost.part)
            is_split = parts > execution.accumulate
            accumulate = max(execution.accumulate, parts)
            execution = dataclasses.replace(execution, accumulate=accumulate)
        seconds = cost.seconds(job)
        return dataclasses.replace(
            self, execution=execution, cost=cost, seconds=seconds, is_split=is_split
        )

    @property
    def steps_text(self) -> str:
        """The recipe, memory and time, in a sentence."""
        plan, recipe = self.recipe.plan(images=self.images["train"]), self.recipe
        length = counted(*((recipe.epochs, "epoch") if recipe.epochs else (plan.steps, "step")))
        size = (self.config and self.config.image_size) or recipe.image_size
        parts = [] if size is None else [_pixels(size)]
        parts += [f"{length} in batches of {plan.batch_size}"]
        if self.execution.accumulate > 1:
            why = " to fit into memory" if self.is_split else ""
            parts[-1] += f", each in {self.execution.accumulate} parts{why}"
        parts += [self.execution.precision]
        text = ", ".join(parts)
        if self.cost is None or self.seconds is None:
            return f"{text}."
        speed = 1 / (self.cost.seconds_per_image + self.cost.seconds_to_read)
        text += f": about {duration(self.seconds)} on {measuring.devices_text()}"
        memory = "" if self.cost.memory is None else f", {self.cost.memory / 2**30:.1f} GiB"
        if memory and self.cost.limit is not None:
            memory += f" of {self.cost.limit / 2**30:.1f}"
        shown = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        text += f" ({shown} images/s measured{memory})."
        if not self.cost.fits:
            remat = "" if self.execution.remat else ", or --remat"
            text += (
                " This does not fit into the free memory, even with one image at a time; choose a "
                f"smaller --model or --image-size{remat}."
            )
        return text

    @property
    def choice_text(self) -> str:
        """The images, and what is trained on them, in a sentence."""
        count = sum(self.images.values())
        text = f"{counted(count, 'image')} of {counted(self.classes, 'class')}"
        if self.largest and self.smallest:
            ratio = self.largest / self.smallest
            text += f", the largest {ratio:.1f} times the smallest"
        if self.sides is not None:
            text += f", median sides {self.sides[0]} and {self.sides[1]} pixels"
        if self.weights is not None:
            return f"{text}: fine-tunes {self.model} from {self.weights}{_PLACES[self.place]}."
        text += f": trains {self.model} from fresh weights"
        return f"{text}." if self.unreached is None else f"{text}, as {self.unreached}."

    def __str__(self) -> str:
        return f"{self.choice_text}\n{self.steps_text}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values that JSON can carry."""
        plan, cost = self.recipe.plan(images=self.images["train"]), self.cost
        return {
            "images": dict(self.images),
            "classes": self.classes,
            "largest_class": self.largest,
            "smallest_class": self.smallest,
            "median_sides": None if self.sides is None else list(self.sides),
            "model": self.model,
            "weights": self.weights,
            "weights_are_in": self.place,
            "unreached": self.unreached,
            "image_size": None if self.config is None else list(self.config.image_size),
            "epochs": plan.epochs,
            "steps": plan.steps,
            "batch_size": plan.batch_size,
            "accumulate": self.execution.accumulate,
            "precision": self.execution.precision,
            "devices": measuring.devices_text(),
            "seconds": self.seconds,
            "memory": None if cost is None else cost.memory,
            "memory_limit": None if cost is None else cost.limit,
            "fits": None if cost is None else cost.fits,
            "seconds_per_image": None if cost is None else cost.seconds_per_image,
            "seconds_to_read_an_image": None if cost is None else cost.seconds_to_read,
        }


def plan(
    data: ImageData,
    *,
    weights: str | None = AUTO,
    image_size: tuple[int, int] | None = None,
    execution: Execution | None = None,
    seed: int = 0,
) -> TrainingPlan:
    """Looks at images and machine, and plans a training that suits them; it takes a few steps.

    Published weights are fine-tuned where they can be reached: Ti/16, or S/16 from 1,000 training
    images on a GPU or TPU. Elsewhere the small model trains from nothing. Nothing is downloaded
    before `TrainingPlan.make_model`.

    Example:
        >>> from keras_vit.data import load_digits
        >>> made = plan(load_digits())
        >>> made.model, made.weights, made.recipe.epochs, made.seconds > 0
        ('digits-hybrid', None, 200, True)

    To train by it: `train(data, out="run", model=plan.make_model, recipe=plan.recipe,
    execution=plan.execution)`.

    Args:
        data: the images.
        weights: "auto", the name of published weights, or None for fresh ones.
        image_size: (height, width) in pixels; None for the model's own.
        execution: where to train. None for the defaults of `Execution`, with the precision that the
            machine is fast in.
        seed: decides which images are read.

    Raises:
        MemoryError: not even one image fits into memory.
        ValueError: there are no published weights of that name.
    """
    return choose(data, weights=weights, image_size=image_size, execution=execution).measured(
        data, seed=seed
    )


def choose(
    data: ImageData,
    *,
    weights: str | None = AUTO,
    image_size: tuple[int, int] | None = None,
    execution: Execution | None = None,
) -> TrainingPlan:
    """Returns a plan that nothing is measured for; the arguments are those of `plan`."""
    if data.source == "digits":
        digits = models.model_config("digits-hybrid", image_size=image_size)
        given = execution or Execution()
        return describe(
            data,
            model="digits-hybrid",
            config=digits,
            recipe=RECIPES["digits"],
            execution=given,
        )
    execution = execution or Execution(precision=fast_precision(Execution()))
    is_larger = measuring.has_accelerator() and len(data.train) >= _MANY
    name = _LARGER if is_larger else _SMALL
    place, unreached = _place(weights, name, image_size)
    if place is None:
        return describe(
            data,
            model="tiny",
            config=models.model_config("tiny", image_size=image_size),
            recipe=RECIPES["scratch"],
            execution=execution,
            unreached=unreached,
        )
    return describe(
        data,
        model=name,
        weights=PUBLISHED if weights == AUTO else weights,
        place=place,
        config=models.model_config(name, image_size=image_size),
        recipe=fine_tuning(len(data.train)),
        execution=execution,
    )


def describe(
    data: ImageData,
    *,
    model: str,
    config: ViTConfig | None,
    recipe: Recipe,
    execution: Execution,
    weights: str | None = None,
    place: sources.Place | None = None,
    unreached: str | None = None,
) -> TrainingPlan:
    """Returns the plan of what is chosen already; see `TrainingPlan` for the arguments."""
    counts = _class_counts(data)
    return TrainingPlan(
        images=data.counts,
        classes=len(data.labels),
        largest=None if counts is None else int(counts.max()),
        smallest=None if counts is None else int(counts.min()),
        sides=_median_sides(data.train),
        model=model,
        weights=weights,
        place=place,
        unreached=unreached,
        config=config,
        recipe=recipe,
        execution=execution,
    )


def fine_tuning(images: int) -> Recipe:
    """Returns the recipe to fine-tune on so many images: few of them take small batches.

    Example:
        >>> [(recipe.batch_size, recipe.epochs) for recipe in map(fine_tuning, (5000, 300, 20))]
        [(64, 10), (8, 10), (8, 100)]
    """
    recipe = RECIPES["fine-tune"]
    epochs = recipe.epochs or 1
    size = max(images * epochs // _STEPS, _SMALLEST_BATCH)
    size = min(2 ** (size.bit_length() - 1), recipe.batch_size)
    epochs = max(epochs, -(-_STEPS // max(images // size, 1)))
    epochs = min(epochs, _EPOCHS)
    patience = max(recipe.patience or 0, epochs // 3)
    return dataclasses.replace(recipe, batch_size=size, epochs=epochs, patience=patience)


def fast_precision(execution: Execution) -> Precision:
    """Returns the precision that this machine trains fastest in, by the kind of its devices."""
    # XLA makes no use of a processor's units.
    is_slow = execution.xla is True and not measuring.has_accelerator()
    return "mixed_bfloat16" if measuring.multiplies_bfloat16() and not is_slow else "float32"


def may_be_tight(
    config: ViTConfig, data: ImageData, *, recipe: Recipe, execution: Execution
) -> bool:
    """Whether a batch might not fit into memory, so that it is worth to measure."""
    return measuring.may_be_tight(config, Job(data, recipe=recipe, execution=execution))


def is_one_of_several() -> bool:
    """Whether this process trains together with others, which could choose otherwise."""
    count = os.environ.get("KERAS_DISTRIBUTION_NUM_PROCESSES", "1")
    return len(cluster_workers()) > 1 or count not in ("", "1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
    """What a training that can be resumed, or is finished, was started with.

    Attributes:
        config: the model's.
        recipe: the recipe.
        precision: dtype policy of the layers.
        accumulate: parts of a batch.
        has_patience: whether it was started with the setting, which older trainings had not.
    """

    config: ViTConfig
    recipe: Recipe
    precision: Precision
    accumulate: int
    has_patience: bool

    @classmethod
    def read(cls, out: str | os.PathLike[str]) -> Self | None:
        """Reads it, so that what can be reached later does not change the model; None for nothing.

        A model that its config alone does not describe is none: it comes by the arguments again.
        """
        try:
            fields = started_fields(out)
            if fields is None:
                return None
            execution = fields.get("execution", {})
            return cls(
                config=ViTConfig.from_dict(fields["model"]),
                recipe=Recipe.from_dict(fields["recipe"]),
                precision=execution.get("precision", Execution.precision),
                accumulate=execution.get("accumulate", Execution.accumulate),
                has_patience="patience" in fields["recipe"],
            )
        except (ValueError, TypeError, LookupError, AttributeError):
            return None  # `train` says what is wrong with it


def started_fields(out: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns the record of an unfinished training or of a run; None where there is neither.

    Raises:
        ValueError: the record is damaged.
    """
    unfinished = Unfinished(Path(out))
    file = unfinished.path / SETTINGS if unfinished.exists() else Path(out) / run.CONFIG
    return run.read_fields(file) if file.is_file() else None


def _place(
    weights: str | None, name: str, image_size: tuple[int, int] | None
) -> tuple[sources.Place | None, str | None]:
    """Returns where published weights are, or why there are none."""
    if weights is None:
        return None, None
    patch = models.model_config(name).patch_size
    if image_size is not None and any(side % patch for side in image_size):
        height, width = image_size
        return None, f"patches of {patch} pixels do not divide {height}x{width} (height x width)"
    published = PUBLISHED if weights == AUTO else weights
    size = None if image_size is None else max(image_size)
    try:
        return sources.reach(published, name, image_size=size), None
    except ConnectionError as error:
        return None, (
            f"published weights cannot be reached ({error}); they need fewer images: connect to "
            f"the network, set {MIRROR_SETTING} to a folder or URL that has them, or ask "
            "for none by --weights none"
        )


def _pixels(size: tuple[int, int]) -> str:
    """Returns an image size in words; height first, which is said where it matters."""
    height, width = size
    return f"{height}x{width} pixels" + ("" if height == width else " (height x width)")


def _parts(size: int, *, part: int) -> int:
    """Returns into how many parts to split so many images, so that none is larger than a part."""
    counts = range(1, size + 1)
    # The first part has the remainder, too.
    return next(count for count in counts if size // count + size % count <= max(part, 1))


def _class_counts(data: ImageData) -> np.ndarray | None:
    """Returns the images of each class; None where all of them would have to be read."""
    splits = [data.train, data.validation, data.test]
    if not all(hasattr(split, "images") for split in splits):
        return None
    targets = np.concatenate([split.targets for split in splits])
    return np.bincount(targets, minlength=len(data.labels))


def _median_sides(split: Split) -> tuple[int, int] | None:
    """Returns the medians of the longer and of the shorter side of some images."""
    sides = [sorted(shape, reverse=True) for shape in _shapes(split)]
    if not sides:
        return None
    longer, shorter = np.median(sides, axis=0)
    return int(longer), int(shorter)


def _shapes(split: Split) -> list[tuple[int, int]]:
    """Returns (height, width) as stored, of images here and there in a split."""
    if split.in_memory:
        return [split.images.shape[1:3]]
    if hasattr(split, "images"):
        places = np.unique(np.linspace(0, len(split) - 1, _LOOKED_AT).astype(int))
        contents = [
            read_bytes(one) if split.in_files else one
            for one in (split.images[place] for place in places)
        ]
    else:
        contents = [item[0] for item in split.items().take(_LOOKED_AT).as_numpy_iterator()]
    return [shape for each in contents if (shape := _shape(each)) is not None]


def _shape(contents: bytes) -> tuple[int, int] | None:
    """Returns (height, width) of an image file; None for the kinds that would be decoded for it."""
    if contents.startswith(b"\xff\xd8"):
        try:
            height, width, _ = tf.io.extract_jpeg_shape(contents).numpy()
        except tf.errors.InvalidArgumentError:
            return None
        return int(height), int(width)
    if contents.startswith(b"\x89PNG"):
        return int.from_bytes(contents[20:24]), int.from_bytes(contents[16:20])
    return None


_UNITS = ((172_800, 86_400, "days"), (7_200, 3_600, "hours"), (120, 60, "minutes"))


def duration(seconds: float) -> str:
    """Returns a time in words.

    Example:
        >>> [duration(seconds) for seconds in (0.2, 95, 4000, 9000, 1e6)]
        ['1 second', '95 seconds', '67 minutes', '2.5 hours', '12 days']
    """
    for least, unit, name in _UNITS:
        if seconds >= least:
            number = seconds / unit
            return f"{number:.0f} {name}" if number >= 10 else f"{number:.2g} {name}"
    return counted(max(round(seconds), 1), "second")
