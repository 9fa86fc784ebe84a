"""Tests of keras_vit.training.recipes and recipe: numbers of the sources, and what they make."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import published
import pytest
from trainings import CONFIG, not_refused

import keras_vit
from keras_vit.optimizers import LAMB, AdamW
from keras_vit.training import RECIPES, Recipe
from keras_vit.training.recipe import OptimizerName, Plan, make_optimizer

Row = dict[str, Any]
SCRATCH = RECIPES["scratch"]
RANGE = "must lie between .* Received: "
WRONG: list[tuple[Row, str]] = [
    *(
        ({name: value}, f"{name} {RANGE}{name}={value}")
        for name, value in [
            *(("epochs", 0), ("batch_size", 0), ("learning_rate", -1.0), ("warmup", -1)),
            *(("learning_rate", float("nan")), ("average", 1.5), ("layer_decay", 0.0)),
            *(("weight_decay", -0.1), ("gradient_norm", 0.0), ("label_smoothing", 1.0)),
        ]
    ),
    *(
        ({name: value}, f"{name} must be one of .* Received: {name}='{value}'")
        for name, value in [
            *(("optimizer", "lion"), ("decay", "step"), ("loss", "hinge"), ("mix_per", "pair"))
        ]
    ),
    ({"steps": 3}, "either epochs or steps"),
    ({"epochs": None}, "either epochs or steps"),
    # Averages that never forget, and LAMB with rates for each layer.
    ({"betas": (0.9, 1.0)}, r"betas must be two numbers .*=\(0.9, 1.0\)"),
    ({"optimizer": "lamb", "layer_decay": 0.75}, r"LAMB .* takes no layer_decay"),
    *(
        ({"model": model}, text)
        for model, text in [
            ({"width": 3}, "no field 'width' that a recipe may set; choose from .*pooling"),
            ({"classes": 3}, "classes is decided by the data"),
            ({"input_shape": (8, 8, 3)}, "input_shape is decided by image_size .--image-size"),
            ({"drop_path_rate": 0.1}, "decided by the recipe's field of that name"),
            ({"class_token": "no"}, "class_token must be True or False. Received: 'no'"),
            (
                {"layer_scale": "small"},
                "layer_scale must be a number above 0 or None. Received: 'small'",
            ),
            ({"layer_norm_epsilon": None}, "must be above 0 and below 1. Received: None"),
            ({"attention_dropout_rate": True}, r"must be in \[0, 1\)\. Received: True"),
        ]
    ),
]
MODEL = dataclasses.replace(CONFIG, classes=3, dropout_rate=0.0)


def test_recipes_are_what_their_sources_say() -> None:
    """Every field of each is the number that was compared with the table that `source` names."""
    actual = {name: recipe.to_dict() for name, recipe in RECIPES.items()}
    assert all(fields.pop("source") for fields in actual.values())
    written = json.loads((published.GOLDEN / "recipes.json").read_text())
    assert json.loads(json.dumps(actual)) == written


def test_every_recipe_can_be_used_and_looked_up() -> None:
    """A source, Adam's numbers of optax and torch, JSON, and a model of its image size.

    A mirrored 2 is no 2.
    """
    lamb = {f"deit3-{name}" for name in ("s16", "b16", "l16", "h14")}
    wrong = []
    for name, recipe in RECIPES.items():
        side = (recipe.image_size or (224, 224))[0]
        variant = keras_vit.VARIANTS["H/14" if side % 16 else "B/16"]
        config = dataclasses.replace(variant, input_shape=(side, side, 3))
        holds = {
            "source": "arXiv" in recipe.source,
            "betas": recipe.betas == (0.9, 0.999),
            "epsilon": name in lamb or recipe.epsilon == 1e-8,
            "JSON": Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe,
            "model": recipe.config(config).grid == config.grid,
        }
        wrong += [(name, what) for what, does in holds.items() if not does]
    assert not wrong
    assert not RECIPES["digits"].augmentation.flip


def test_recipes_that_mean_nothing_are_refused() -> None:
    """With what is allowed and what was received, when the recipe is made."""

    def make(fields: Row) -> Callable[[], object]:
        return lambda: dataclasses.replace(SCRATCH, **fields)

    assert not not_refused((make(fields), text) for fields, text in WRONG)


def test_a_plan_counts_steps() -> None:
    """Epochs are full batches; steps cut the last epoch short; few images are one batch."""
    by_epochs = Recipe(epochs=3, batch_size=64, learning_rate=1, warmup=0.1)
    by_steps = Recipe(steps=50, batch_size=64, learning_rate=1, warmup=7)

    assert by_epochs.plan(images=1259) == Plan(
        batch_size=64, steps_per_epoch=19, steps=57, warmup_steps=6
    )
    assert by_steps.plan(images=1259).epochs == 3
    assert by_steps.plan(images=1259).warmup_steps == 7
    assert by_epochs.plan(images=20) == Plan(
        batch_size=20, steps_per_epoch=1, steps=3, warmup_steps=0
    )


def test_a_recipe_makes_the_model_it_was_published_for() -> None:
    """Its fields of ViTConfig go over those of the variant, widths too; tuples survive JSON."""
    recipe = RECIPES["plain-s16"]
    config = recipe.config(keras_vit.VARIANTS["S/16"])

    assert (config.pooling, config.class_token) == ("avg", False)
    assert (config.position_embedding, config.representation_dim) == ("sincos_2d", 384)
    wider = dataclasses.replace(recipe, model={**recipe.model, "hidden_dim": 768})
    assert wider.config(keras_vit.VARIANTS["S/16"]).representation_dim == 768
    stages = dataclasses.replace(recipe, model={"resnet_layers": (3, 4, 9)})
    assert Recipe.from_dict(json.loads(json.dumps(stages.to_dict()))) == stages


@pytest.mark.parametrize(
    ("name", "kind", "kept"), [("adamw", AdamW, 1 - 0.01 * 0.5), ("lamb", LAMB, 1 - 0.01)]
)
def test_the_optimizer_has_the_numbers_of_the_recipe(
    name: OptimizerName, kind: type[Any], kept: float
) -> None:
    """Epsilon is that of optax and torch, not Keras' 1e-7, and averages and decay are as asked.

    The rate rises linearly and falls as a cosine; `tests/test_optimizers.py` has all of the
    original's. With gradients of zero, kernels shrink and biases, norms, token and positions stay.
    LAMB's step is as long as the rate says, whatever the decay.
    """
    model = keras_vit.VisionTransformer(MODEL)
    asked: dict[str, Any] = {"betas": (0.8, 0.95), "average": 0.99, "weight_decay": 0.5}
    recipe = dataclasses.replace(SCRATCH, optimizer=name, learning_rate=0.01, warmup=0.2, **asked)
    for warmup, before in ((0.0, 0.01), (0.2, 0.0)):
        rising = dataclasses.replace(recipe, epochs=None, steps=10, warmup=warmup)
        optimizer: Any = make_optimizer(rising, model=model, plan=rising.plan(images=1000))
        assert float(optimizer.learning_rate) == pytest.approx(before)
    assert type(optimizer) is kind
    assert (optimizer.epsilon, optimizer.beta_1, optimizer.beta_2) == (1e-8, 0.8, 0.95)
    assert (optimizer.weight_decay, optimizer.global_clipnorm) == (0.5, 1.0)
    assert (optimizer.use_ema, optimizer.ema_momentum) == (True, 0.99)
    for step, rate in ((1, 0.005), (6, 0.005), (10, 0.0), (2, 0.01)):
        optimizer.iterations.assign(step)
        assert float(optimizer.learning_rate) == pytest.approx(rate, abs=1e-8)

    variables = model.trainable_variables
    for variable in variables:
        variable.assign(np.ones(variable.shape))
    optimizer.apply([np.zeros(v.shape, np.float32) for v in variables], variables)
    decayed = {v.path for v in variables if not np.all(np.asarray(v) == 1)}
    assert decayed == {v.path for v in variables if v.name == "kernel"}
    assert len(decayed) > 5
    assert np.asarray(model.get_layer("head").kernel) == pytest.approx(kept)
