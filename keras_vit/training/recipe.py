"""How a model is trained: `Recipe`, and the optimizer that it asks for."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints

import keras

from keras_vit.config import ViTConfig
from keras_vit.data import Augmentation
from keras_vit.data.augment import Mixing
from keras_vit.losses import LossName
from keras_vit.model import VisionTransformer
from keras_vit.optimizers import LAMB, AdamW, Decay, MomentumSGD, WarmupDecay, decayed_rates
from keras_vit.training.progress import Keep

OptimizerName = Literal["adamw", "lamb", "momentum"]

# Fields of ViTConfig that `Recipe.model` may not have, and what decides them.
DECIDED: Mapping[str, str] = {
    "input_shape": "image_size (--image-size)",
    "patch_size": "the choice of the model (--patch-size)",
    "classes": "the data",
    "classifier_activation": "the training, which needs logits",
    "include_preprocessing": "the training, which feeds pixels 0..255",
    "dropout_rate": "the recipe's field of that name, a number",
    "drop_path_rate": "the recipe's field of that name (--drop-path)",
    "remat": "Execution (--remat)",
}


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
        optimizer: "adamw"; "lamb", as DeiT III trains; or "momentum", as the paper fine-tunes.
        learning_rate: the highest, per step, reached after the warm-up.
        warmup: steps in which the learning rate rises from zero; if below 1, a fraction of all.
        decay: how the learning rate falls after that: "cosine", "linear" or "constant".
        momentum: share of the old momentum in the new; of "momentum" alone.
        accumulator_dtype: what the momentum is kept in; of "momentum" alone.
        betas: decay of AdamW's and LAMB's two moving averages, of gradients and of their squares.
        epsilon: what keeps their division finite; 1e-8 in all sources, 1e-7 is Keras' default.
        weight_decay: decay of the kernels, times the learning rate, apart from the gradient
            (decoupled); biases, norms, tokens, positions and learned factors never decay.
        gradient_norm: the gradients' global norm is cut to it; None for no limit.
        loss: "softmax", or "sigmoid", which takes the classes for independent.
        head_bias: start of the classifier's bias, where the classifier is fresh.
        label_smoothing: probability that training spreads evenly over all classes.
        mixup: alpha of the blending of images and targets, see `keras_vit.data.mix_batch`.
        cutmix: alpha of pasting a part of another image, in half of the batches if `mixup` is on.
        mix_per: whether MixUp and CutMix draw a share for each "image", or one for a "batch".
        average: decay of the moving average of the weights that is evaluated and saved in their
            place (Polyak averaging); None for none.
        keep: which epoch's model the run holds: the "best" on the validation images, or the "last",
            as all sources do; where validation images are few, the best is so by chance.
        layer_decay: factor of the learning rate from one block to the one before it; 1 for none.
        sam_rho: radius of sharpness-aware minimisation; 0 for none.
        dropout_rate: dropout of a model that is made for the recipe; None for the model's own.
        drop_path_rate: stochastic depth of such a model; None for the model's own.
        model: fields of `ViTConfig` that a model made for the recipe gets, such as {"pooling":
            "avg"}; "hidden_dim" as the value of "representation_dim" is the model's own width. A
            model that is given, or comes from a checkpoint, keeps its own.
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
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.05
    gradient_norm: float | None = 1.0
    loss: LossName = "softmax"
    head_bias: float = 0.0
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_per: Mixing = "image"
    average: float | None = None
    keep: Keep = "best"
    layer_decay: float = 1.0
    sam_rho: float = 0.0
    dropout_rate: float | None = None
    drop_path_rate: float | None = None
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
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
        self._check_optimizer()
        self._check_model()

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
        return {
            **fields,
            "image_size": None if size is None else list(size),
            "betas": list(self.betas),
            "model": {name: _plain(value) for name, value in self.model.items()},
        }

    def config(self, config: ViTConfig) -> ViTConfig:
        """Returns the config of a model that is made for the recipe.

        Example:
            >>> recipe = Recipe(epochs=1, batch_size=8, learning_rate=1e-3, drop_path_rate=0.1,
            ...                 model={"representation_dim": "hidden_dim"})
            >>> config = recipe.config(ViTConfig(hidden_dim=192, num_heads=3))
            >>> config.representation_dim, config.drop_path_rate
            (192, 0.1)

        Args:
            config: that it starts from.

        Raises:
            ValueError: a field of `model` does not fit the others.
        """
        fields = dict(self.model)
        width = fields.get("hidden_dim", config.hidden_dim)
        if fields.get("representation_dim") == "hidden_dim":
            fields["representation_dim"] = width
        return self.regularized(dataclasses.replace(config, **fields))

    def regularized(self, config: ViTConfig) -> ViTConfig:
        """Returns a config with the recipe's dropout and stochastic depth, where it has them."""
        rates = {"dropout_rate": self.dropout_rate, "drop_path_rate": self.drop_path_rate}
        given: dict[str, Any] = {name: rate for name, rate in rates.items() if rate is not None}
        return dataclasses.replace(config, **given)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Recipe":
        """Rebuilds a recipe from `to_dict`."""
        size = fields.get("image_size")
        model = fields.get("model", {})
        return cls(
            **{
                **fields,
                "image_size": None if size is None else tuple(size),
                "betas": tuple(fields.get("betas", cls.betas)),
                "model": {
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in model.items()
                },
                "augmentation": Augmentation(**fields["augmentation"]),
            }
        )

    def _check_optimizer(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"betas must be two numbers from 0 and below 1. Received: betas={self.betas!r}."
            )
        if self.optimizer == "lamb" and self.layer_decay != 1:
            raise ValueError(
                "LAMB scales the step of each variable by itself and takes no layer_decay; leave "
                f'it at 1, or choose optimizer="adamw". Received: layer_decay={self.layer_decay!r}.'
            )

    def _check_model(self) -> None:
        hints = get_type_hints(ViTConfig)
        allowed = [name for name in hints if name not in DECIDED]
        for name, value in self.model.items():
            if name in DECIDED:
                raise ValueError(
                    f"The model's {name} is decided by {DECIDED[name]}; leave it out of `model`."
                )
            if name not in allowed:
                raise ValueError(
                    f"ViTConfig has no field {name!r} that a recipe may set; choose from {allowed}."
                )
            if (name, value) != ("representation_dim", "hidden_dim"):
                _check_kind(name, value, hints[name])


_LIMITS: dict[str, tuple[float, float]] = {
    "epochs": (1, 1_000_000),
    "steps": (1, 1_000_000_000),
    "batch_size": (1, 1_000_000),
    "learning_rate": (0, 100),
    "warmup": (0, 1_000_000_000),
    "momentum": (0, 1),
    "epsilon": (1e-30, 1),
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
    "mix_per": get_args(Mixing),
    "keep": get_args(Keep),
    "accumulator_dtype": ("bfloat16", "float32"),
}


def make_optimizer(
    recipe: Recipe, *, model: VisionTransformer, plan: Plan
) -> keras.optimizers.Optimizer:
    """Makes an optimizer for a model.

    Example:
        >>> from keras_vit import ViTConfig
        >>> model = VisionTransformer(ViTConfig(
        ...     input_shape=(16, 16, 3), patch_size=8, hidden_dim=8, mlp_dim=16, num_heads=2,
        ...     num_layers=1, classes=3))
        >>> recipe = Recipe(steps=100, batch_size=8, learning_rate=0.1)
        >>> optimizer = make_optimizer(recipe, model=model, plan=recipe.plan(images=100))
        >>> float(optimizer.learning_rate)  # the warm-up starts from zero
        0.0

    Args:
        recipe: learning rate, warm-up, decay, clipping, averaging.
        model: the model to train.
        plan: the recipe's, for the number of images.
    """
    schedule = WarmupDecay(
        recipe.learning_rate,
        steps=plan.steps,
        warmup_steps=plan.warmup_steps,
        decay=recipe.decay,
    )
    rates = None
    if recipe.layer_decay != 1:
        rates = decayed_rates(model, model.config, recipe.layer_decay)
    common: dict[str, Any] = {
        "weight_decay": recipe.weight_decay,
        "global_clipnorm": recipe.gradient_norm,
        "use_ema": recipe.average is not None,
        "ema_momentum": recipe.average or 0.0,
    }
    adam = {
        "beta_1": recipe.betas[0],
        "beta_2": recipe.betas[1],
        "epsilon": recipe.epsilon,
    }
    optimizer: keras.optimizers.Optimizer
    if recipe.optimizer == "momentum":
        optimizer = MomentumSGD(
            schedule,
            momentum=recipe.momentum,
            accumulator_dtype=recipe.accumulator_dtype,
            layer_rates=rates,
            **common,
        )
    elif recipe.optimizer == "lamb":
        optimizer = LAMB(schedule, **adam, **common)
    else:
        optimizer = AdamW(schedule, layer_rates=rates, **adam, **common)
    variables = model.trainable_variables
    others = [one for one in variables if one.path.split("/")[-1] != "kernel"]
    optimizer.exclude_from_weight_decay(var_list=others)
    optimizer.build(variables)  # else the training step is traced twice
    return optimizer


def _check_kind(name: str, value: Any, hint: Any) -> None:
    """Raises a ValueError for what ViTConfig, which looks at ranges, would take for something."""
    kinds = {hint, *get_args(hint)}
    if kinds == {bool} and not isinstance(value, bool):
        raise ValueError(f"The model's {name} must be true or false. Received: {value!r}.")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if float in kinds and not (is_number or (value is None and type(None) in kinds)):
        raise ValueError(f"The model's {name} must be a number. Received: {value!r}.")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
