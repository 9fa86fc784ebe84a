"""How a model is trained: `Recipe`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from keras_vit.data import Augmentation
from keras_vit.losses import LossName
from keras_vit.optimizers import Decay

OptimizerName = Literal["adamw", "momentum"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe in numbers, for so many images.

    Attributes:
        batch_size: images in a step.
        steps_per_epoch: full batches in a pass over the training images.
        steps: batches in all.
        warmup_steps: of them with a rising learning rate.
    """

    batch_size: int
    steps_per_epoch: int
    steps: int
    warmup_steps: int

    @property
    def epochs(self) -> int:
        """Passes over the training images, the last of which may be cut short."""
        return math.ceil(self.steps / self.steps_per_epoch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained; `RECIPES` has those of the papers.

    Example:
        >>> recipe = Recipe(epochs=10, batch_size=64, learning_rate=1e-3)
        >>> recipe.plan(images=1300)
        Plan(batch_size=64, steps_per_epoch=20, steps=200, warmup_steps=20)
        >>> Recipe.from_dict(recipe.to_dict()) == recipe
        True

    Attributes:
        epochs: passes over the training images; None if `steps` says how long.
        steps: batches in all; None if `epochs` says how long.
        batch_size: images in a step, over all replicas.
        image_size: (height, width) in pixels of the images; None for the model's own.
        optimizer: "adamw", or "momentum" as the paper fine-tunes.
        learning_rate: the highest, per step, reached after the warm-up.
        warmup: steps in which the learning rate rises from zero; if below 1, a fraction of all.
        decay: how the learning rate falls after that: "cosine", "linear" or "constant".
        momentum: share of the old momentum in the new; of "momentum" alone.
        accumulator_dtype: what the momentum is kept in; of "momentum" alone.
        weight_decay: decay of the kernels, times the learning rate; nothing else decays.
        gradient_norm: the gradients' global norm is cut to it; None for no limit.
        loss: "softmax", or "sigmoid", which takes the classes for independent.
        head_bias: start of the classifier's bias, where the classifier is fresh.
        label_smoothing: probability that training spreads evenly over all classes.
        mixup: alpha of the blending of images and targets, see `keras_vit.data.mix_batch`.
        cutmix: alpha of pasting a part of another image, in half of the batches if `mixup` is on.
        average: decay of the moving average of the weights that is evaluated and saved in their
            place (Polyak averaging); None for none.
        layer_decay: factor of the learning rate from one block to the one before it; 1 for none.
        sam_rho: radius of sharpness-aware minimisation; 0 for none.
        dropout_rate: dropout of a model that is made for the recipe; None for the model's own.
        drop_path_rate: stochastic depth of such a model; None for the model's own.
        augmentation: how training images are varied.
        source: where it comes from.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int
    image_size: tuple[int, int] | None = None
    optimizer: OptimizerName = "adamw"
    learning_rate: float
    warmup: float = 0.1
    decay: Decay = "cosine"
    momentum: float = 0.9
    accumulator_dtype: str = "bfloat16"
    weight_decay: float = 0.05
    gradient_norm: float | None = 1.0
    loss: LossName = "softmax"
    head_bias: float = 0.0
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    average: float | None = None
    layer_decay: float = 1.0
    sam_rho: float = 0.0
    dropout_rate: float | None = None
    drop_path_rate: float | None = None
    augmentation: Augmentation = Augmentation()  # noqa: RUF009 - frozen, so it can be shared
    source: str = ""

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                "A recipe has either epochs or steps. "
                f"Received: epochs={self.epochs!r}, steps={self.steps!r}."
            )
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(
                    f"{name} must lie between {low} and {high}. Received: {name}={value!r}."
                )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {list(allowed)}. "
                    f"Received: {name}={getattr(self, name)!r}."
                )

    def plan(self, *, images: int) -> Plan:
        """Returns the recipe in numbers for so many training images.

        An incomplete batch is dropped; fewer images than a batch are one batch.
        """
        steps_per_epoch = max(images // self.batch_size, 1)
        steps = self.steps or (self.epochs or 0) * steps_per_epoch
        return Plan(
            batch_size=min(self.batch_size, images),
            steps_per_epoch=steps_per_epoch,
            steps=steps,
            warmup_steps=round(self.warmup if self.warmup >= 1 else self.warmup * steps),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values that JSON can carry."""
        fields = dataclasses.asdict(self)
        size = fields["image_size"]
        return {**fields, "image_size": None if size is None else list(size)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Recipe":
        """Rebuilds a recipe from `to_dict`."""
        size = fields.get("image_size")
        return cls(
            **{
                **fields,
                "image_size": None if size is None else tuple(size),
                "augmentation": Augmentation(**fields["augmentation"]),
            }
        )


_LIMITS: dict[str, tuple[float, float]] = {
    "epochs": (1, 1_000_000),
    "steps": (1, 1_000_000_000),
    "batch_size": (1, 1_000_000),
    "learning_rate": (0, 100),
    "warmup": (0, 1_000_000_000),
    "momentum": (0, 1),
    "weight_decay": (0, 100),
    "gradient_norm": (1e-9, 1e9),
    "label_smoothing": (0, 0.99),
    "mixup": (0, 100),
    "cutmix": (0, 100),
    "average": (0, 1),
    "layer_decay": (0.01, 1),
    "sam_rho": (0, 10),
    "dropout_rate": (0, 0.99),
    "drop_path_rate": (0, 0.99),
}
_CHOICES = {
    "optimizer": get_args(OptimizerName),
    "decay": get_args(Decay),
    "loss": get_args(LossName),
    "accumulator_dtype": ("bfloat16", "float32"),
}
