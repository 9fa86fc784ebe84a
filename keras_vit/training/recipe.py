"""How a model is trained: `Recipe`, and the table of recipes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_vit.data import Augmentation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained: AdamW, linear warm-up, cosine decay to zero.

    Example:
        >>> recipe = RECIPES["scratch"]
        >>> Recipe.from_dict(recipe.to_dict()) == recipe
        True

    Attributes:
        epochs: passes over the training images.
        batch_size: images in a step.
        learning_rate: the highest, per step, reached after the warm-up.
        warmup: fraction of the steps in which the learning rate rises from zero.
        weight_decay: decay of the kernels, times the learning rate; nothing else decays.
        gradient_norm: the gradients' global norm is cut to it.
        label_smoothing: probability that training spreads evenly over all classes.
        mixup: alpha of the blending of images and targets, see `keras_vit.data.mix_batch`.
        augmentation: how training images are varied.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    warmup: float = 0.1
    weight_decay: float = 0.05
    gradient_norm: float = 1.0
    label_smoothing: float = 0.1
    mixup: float = 0.0
    augmentation: Augmentation = Augmentation()  # noqa: RUF009 - frozen, so it can be shared

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]] = {
            "epochs": (1, 1_000_000),
            "batch_size": (1, 1_000_000),
            "learning_rate": (0, 100),
            "warmup": (0, 1),
            "weight_decay": (0, 100),
            "gradient_norm": (1e-9, 1e9),
            "label_smoothing": (0, 0.99),
            "mixup": (0, 100),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"{name} must lie between {low} and {high}. "
                    f"Received: {name}={getattr(self, name)!r}."
                )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values that JSON can carry."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Recipe":
        """Rebuilds a recipe from `to_dict`."""
        return cls(**{**fields, "augmentation": Augmentation(**fields["augmentation"])})


RECIPES: Mapping[str, Recipe] = {
    # Learning rate, batch, epochs, augmentation and mixup were chosen by cross-validation within
    # the training and validation images; weight decay and label smoothing are DeiT's
    # (arXiv 2012.12877, Table 9). A mirrored 2 is no digit.
    "digits": Recipe(
        epochs=100,
        batch_size=32,
        learning_rate=1e-3,
        mixup=0.2,
        augmentation=Augmentation(rotation=15, shift=0.1, zoom=0.15),
    ),
    # Weight decay and label smoothing are DeiT's (arXiv 2012.12877, Table 9), the learning rate and
    # the gradient norm those of ViT-L/16 and larger (arXiv 2010.11929, Table 3).
    "scratch": Recipe(
        epochs=100,
        batch_size=64,
        learning_rate=1e-3,
        augmentation=Augmentation(crop=0.35, flip=True),
    ),
    # For published weights: no weight decay and no label smoothing, as the original fine-tunes
    # (arXiv 2010.11929, Appendix B.1.1), but with AdamW at a tenth of the rate from scratch.
    "fine-tune": Recipe(
        epochs=10,
        batch_size=64,
        learning_rate=1e-4,
        weight_decay=0.0,
        label_smoothing=0.0,
        augmentation=Augmentation(crop=0.35, flip=True),
    ),
}
