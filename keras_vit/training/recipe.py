"""`Recipe`: how a model is trained, and its optimizer."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import keras

from keras_vit.config import ViTConfig
from keras_vit.data import Augmentation
from keras_vit.data.augment import Mixing
from keras_vit.limits import check_fields
from keras_vit.losses import LossName
from keras_vit.model import VisionTransformer
from keras_vit.optimizers import (
    LAMB,
    AdamW,
    Cooldown,
    Decay,
    MomentumSGD,
    WarmupDecay,
    decayed_rates,
)
from keras_vit.training.progress import Keep

OptimizerName = Literal["adamw", "lamb", "momentum"]

# Fields of ViTConfig that `Recipe.model` may not set, and what sets them.
NOT_OVERRIDABLE: Mapping[str, str] = {
    "input_shape": "image_size (--image-size)",
    "patch_size": "the choice of the model",
    "classes": "the data",
    "classifier_activation": "the training, which needs logits",
    "problem_type": "the recipe's loss",
    "include_preprocessing": "the training, which feeds pixels 0..255",
    "dropout_rate": "the recipe's field of that name, a number",
    "drop_path_rate": "the recipe's field of that name, a number",
    "remat": "Execution",
}
_LIMITS: dict[str, tuple[float, float]] = {
    "epochs": (1, 1_000_000), "steps": (1, 1_000_000_000), "batch_size": (1, 1_000_000),
    "learning_rate": (0, 100), "warmup": (0, 1_000_000_000), "momentum": (0, 1),
    "epsilon": (1e-30, 1), "weight_decay": (0, 100), "gradient_norm": (1e-9, 1e9),
    "label_smoothing": (0, 0.99), "mixup": (0, 100), "cutmix": (0, 100),
    "average": (0, 1 - 1e-9),  # of 1 it would never leave the first weights
    "patience": (1, 1_000_000), "layer_decay": (0.01, 1), "sam_rho": (0, 10),
    "dropout_rate": (0, 0.99), "drop_path_rate": (0, 0.99),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The lengths of a training, for a given number of images.

    Attributes:
        batch_size: images in a step.
        steps_per_epoch: full batches in a pass over the training images.
        steps: steps in all.
        warmup_steps: the first steps, in which the learning rate rises.
    """

    batch_size: int
    steps_per_epoch: int
    steps: int
    warmup_steps: int

    @property
    def epochs(self) -> int:
        """Passes over the training images; the last one may be incomplete."""
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
        epochs: passes over the training images; None if `steps` is set.
        steps: steps in all; None if `epochs` is set.
        batch_size: images in a step, over all replicas.
        image_size: (height, width) in pixels of the images; None for the model's own.
        optimizer: "adamw"; "lamb", as in DeiT III; or "momentum", as in the paper's fine-tuning.
        learning_rate: the highest, per step, reached after the warm-up.
        warmup: steps in which the learning rate rises from zero; below 1, a fraction of all steps.
        decay: how the learning rate falls after the warm-up: "cosine", "linear" or "constant".
        momentum: fraction of the old momentum in the new one; for "momentum" only.
        accumulator_dtype: dtype of the momentum; for "momentum" only.
        betas: decay of the moving averages of gradients and of their squares in AdamW and LAMB.
        epsilon: keeps their division finite; 1e-8 in all sources, 1e-7 is Keras' default.
        weight_decay: decay of the kernels, multiplied by the learning rate and separate from the
            gradient (decoupled). Biases, norms, tokens, positions and learned factors never decay.
        gradient_norm: maximum of the gradients' global norm; None for no limit.
        loss: "softmax", or "sigmoid", which treats the classes as independent.
        head_bias: initial bias of a new classifier.
        label_smoothing: probability that is spread evenly over all classes.
        balance: whether the loss of a training image is multiplied by the weight of its class,
            images / (classes * images of the class): all classes count the same, and the mean
            weight of the images is 1. The validation loss has no weights.
        mixup: alpha of the blending of images and targets, see `keras_vit.data.mix_batch`.
        cutmix: alpha of pasting a part of another image; with `mixup`, one of the two is drawn.
        mix_per: whether MixUp and CutMix are drawn for each "image", or once for a "batch".
        average: decay of a moving average of the weights, which is evaluated and saved instead of
            them (Polyak averaging); None for none.
        keep: the epoch whose model the run holds: the "best" on the validation images, or the
            "last", as in all sources. With few validation images the best one is best by chance.
        patience: epochs without a lower validation loss after which the training ends early: the
            learning rate then falls from its present value to zero within `cooldown_epochs`. None
            for training to the end, as in all sources.
        layer_decay: factor of the learning rate from each block to the previous one; 1 for none.
        sam_rho: radius of sharpness-aware minimisation; 0 for none.
        dropout_rate: dropout of a model that is made for the recipe; None for the model's own.
        drop_path_rate: stochastic depth of such a model; None for the model's own.
        model: fields of `ViTConfig` for a model that is made for the recipe, such as {"pooling":
            "avg"}; "representation_dim" may be "hidden_dim", the model's own width. An existing
            model or a checkpoint keeps its own fields.
        augmentation: of the training images.
        source: the origin of the recipe.
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
    accumulator_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.05
    gradient_norm: float | None = 1.0
    loss: LossName = "softmax"
    head_bias: float = 0.0
    label_smoothing: float = 0.0
    balance: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_per: Mixing = "image"
    average: float | None = None
    keep: Keep = "best"
    patience: int | None = None
    layer_decay: float = 1.0
    sam_rho: float = 0.0
    dropout_rate: float | None = None
    drop_path_rate: float | None = None
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    augmentation: Augmentation = Augmentation()  # noqa: RUF009 - frozen, so it can be shared
    source: str = ""

    def __post_init__(self) -> None:
        check_fields(self, _LIMITS)
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                "A recipe has either epochs or steps. "
                f"Received: epochs={self.epochs!r}, steps={self.steps!r}."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"betas must be two numbers from 0 and below 1. Received: betas={self.betas!r}."
            )
        if self.optimizer == "lamb" and self.layer_decay != 1:
            raise ValueError(
                "LAMB scales the step of each variable by itself and takes no layer_decay; leave "
                f'it at 1, or choose optimizer="adamw". Received: layer_decay={self.layer_decay!r}.'
            )
        self._check_model()

    def plan(self, *, images: int) -> Plan:
        """Returns the lengths of a training on this number of images.

        An incomplete batch is dropped, except that there is at least one batch.
        """
        steps_per_epoch = max(images // self.batch_size, 1)
        steps = self.steps or (self.epochs or 0) * steps_per_epoch
        return Plan(
            batch_size=min(self.batch_size, images),
            steps_per_epoch=steps_per_epoch,
            steps=steps,
            warmup_steps=round(self.warmup if self.warmup >= 1 else self.warmup * steps),
        )

    def changed(self, **settings: Any) -> "Recipe":
        """Returns the recipe with other values of its fields, its augmentation's or its model's.

        Example:
            >>> recipe = Recipe(epochs=10, batch_size=64, learning_rate=1e-3)
            >>> changed = recipe.changed(steps=500, flip=True, pooling="avg")
            >>> changed.epochs, changed.steps, changed.augmentation.flip, changed.model
            (None, 500, True, {'pooling': 'avg'})

        Args:
            settings: fields of `Recipe`, of which steps displace epochs and epochs steps; of
                `Augmentation`; any other is one of `ViTConfig`, in `model`.

        Raises:
            ValueError: there is no such field, or it may not have this value.
        """

        def take(of: Any) -> dict[str, Any]:
            names = {each.name for each in dataclasses.fields(of)} - {"augmentation", "model"}
            return {name: settings.pop(name) for name in names & settings.keys()}

        changes, augmentation = take(Recipe), take(Augmentation)
        if changes.keys() & {"epochs", "steps"}:
            changes = {"epochs": None, "steps": None, **changes}
        changes["augmentation"] = dataclasses.replace(self.augmentation, **augmentation)
        return dataclasses.replace(self, model={**self.model, **settings}, **changes)

    @property
    def cooldown_epochs(self) -> int:
        """Epochs in which the learning rate falls once the patience has run out: a third of it."""
        return max((self.patience or 0) // 3, 1)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values that JSON can carry."""
        fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return fields

    def config(self, config: ViTConfig) -> ViTConfig:
        """Returns the config of a model that is made for the recipe.

        Example:
            >>> recipe = Recipe(epochs=1, batch_size=8, learning_rate=1e-3, drop_path_rate=0.1,
            ...                 model={"representation_dim": "hidden_dim"})
            >>> config = recipe.config(ViTConfig(hidden_dim=192, num_heads=3))
            >>> config.representation_dim, config.drop_path_rate
            (192, 0.1)

        Raises:
            ValueError: a field of `model` does not fit the others.
        """
        fields = dict(self.model)
        if fields.get("representation_dim") == "hidden_dim":
            fields["representation_dim"] = fields.get("hidden_dim", config.hidden_dim)
        return self.regularized(dataclasses.replace(config, **fields))

    def regularized(self, config: ViTConfig) -> ViTConfig:
        """Returns a config with the recipe's dropout and stochastic depth, where these are set."""
        rates = {"dropout_rate": self.dropout_rate, "drop_path_rate": self.drop_path_rate}
        changes: dict[str, Any] = {name: rate for name, rate in rates.items() if rate is not None}
        return dataclasses.replace(config, **changes)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Recipe":
        """Rebuilds a recipe from `to_dict`."""
        model, augmentation = _with_tuples(fields["model"]), Augmentation(**fields["augmentation"])
        return cls(**{**_with_tuples(fields), "model": model, "augmentation": augmentation})

    def _check_model(self) -> None:
        fields = {field.name: field for field in dataclasses.fields(ViTConfig)}
        for name, value in self.model.items():
            if name in NOT_OVERRIDABLE:
                raise ValueError(
                    f"The model's {name} is decided by {NOT_OVERRIDABLE[name]}; leave it out."
                )
            if name not in fields:
                raise ValueError(
                    f"ViTConfig has no field {name!r} that a recipe may set; choose from "
                    f"{[each for each in fields if each not in NOT_OVERRIDABLE]}."
                )
            allowed = fields[name].metadata["allowed"]
            is_width = (name, value) == ("representation_dim", "hidden_dim")
            if allowed is not None and not is_width and not allowed.fits(value):
                raise ValueError(f"The model's {name} must be {allowed.text}. Received: {value!r}.")


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}


def make_optimizer(
    recipe: Recipe, *, model: VisionTransformer, plan: Plan
) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a recipe for a model, built."""
    schedule, rates = make_schedule(recipe, plan), None
    if recipe.layer_decay != 1:
        rates = decayed_rates(model, model.config, recipe.layer_decay)
    common: dict[str, Any] = {
        "weight_decay": recipe.weight_decay,
        "global_clipnorm": recipe.gradient_norm,
        "use_ema": recipe.average is not None,
        "ema_momentum": recipe.average or 0.0,
    }
    adam = {"beta_1": recipe.betas[0], "beta_2": recipe.betas[1], "epsilon": recipe.epsilon}
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
    undecayed = [variable for variable in variables if variable.path.split("/")[-1] != "kernel"]
    optimizer.exclude_from_weight_decay(var_list=undecayed)
    optimizer.build(variables)  # otherwise TensorFlow traces the training step twice
    if isinstance(schedule, Cooldown):
        schedule.attach(optimizer)
    return optimizer


def make_schedule(recipe: Recipe, plan: Plan) -> WarmupDecay | Cooldown:
    """Returns the learning rate of a recipe by steps."""
    schedule = WarmupDecay(
        recipe.learning_rate, steps=plan.steps, warmup_steps=plan.warmup_steps, decay=recipe.decay
    )
    if recipe.patience is None:
        return schedule
    return Cooldown(schedule, steps=recipe.cooldown_epochs * plan.steps_per_epoch)
