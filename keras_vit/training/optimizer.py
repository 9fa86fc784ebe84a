"""Makes the optimizer of a recipe: AdamW whose decay touches kernels alone, warm-up, cosine."""

import keras

from keras_vit.training.recipe import Recipe


def make_optimizer(recipe: Recipe, *, model: keras.Model, steps: int) -> keras.optimizers.Optimizer:
    """Makes an optimizer for a model.

    Example:
        >>> import keras
        >>> from keras_vit.training import recipe
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> optimizer = make_optimizer(recipe.RECIPES["digits"], model=model, steps=100)
        >>> float(optimizer.learning_rate)  # the warm-up starts from zero
        0.0

    Args:
        recipe: learning rate, warm-up, decay and clipping.
        model: the model to train, built.
        steps: steps of the whole training.
    """
    warmup = round(recipe.warmup * steps)
    # `decay_steps` counts from the end of the warm-up, and an integer 0 would not do as a start.
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0 if warmup else recipe.learning_rate,
        max(steps - warmup, 1),
        warmup_target=recipe.learning_rate if warmup else None,
        warmup_steps=warmup,
    )
    optimizer = keras.optimizers.AdamW(
        schedule, weight_decay=recipe.weight_decay, global_clipnorm=recipe.gradient_norm
    )
    others = [
        variable
        for variable in model.trainable_variables
        if variable.path.split("/")[-1] != "kernel"
    ]
    optimizer.exclude_from_weight_decay(var_list=others)
    optimizer.build(model.trainable_variables)  # else the training step is traced twice
    return optimizer
