"""Makes the optimizer of a recipe."""

from typing import Any

import keras

from keras_vit.model import VisionTransformer
from keras_vit.optimizers import LAMB, AdamW, MomentumSGD, WarmupDecay, decayed_rates
from keras_vit.training.recipe import Plan, Recipe


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
    others = [
        variable
        for variable in model.trainable_variables
        if variable.path.split("/")[-1] != "kernel"
    ]
    optimizer.exclude_from_weight_decay(var_list=others)
    optimizer.build(model.trainable_variables)  # else the training step is traced twice
    return optimizer
