"""Tests of keras_vit.training.recipe."""

import dataclasses
import json

import pytest

from keras_vit.training import RECIPES, Recipe
from keras_vit.training.recipe import Plan

WRONG = [
    ("epochs", 0),
    ("batch_size", 0),
    ("learning_rate", -1.0),
    ("learning_rate", float("nan")),
    ("warmup", -1),
    ("average", 1.5),
    ("layer_decay", 0.0),
    ("weight_decay", -0.1),
    ("gradient_norm", 0.0),
    ("label_smoothing", 1.0),
]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_json(name: str) -> None:
    """What config.json records is the whole recipe."""
    recipe = RECIPES[name]

    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_impossible_numbers_are_errors(name: str, value: float) -> None:
    """A number out of range is named with its limits and its value."""
    with pytest.raises(ValueError, match=f"{name} must lie between .* Received: {name}={value}"):
        dataclasses.replace(RECIPES["scratch"], **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer", "lamb"), ("decay", "step"), ("loss", "hinge")]
)
def test_unknown_parts_are_errors(name: str, value: str) -> None:
    """A part that does not exist is named with those that do."""
    with pytest.raises(ValueError, match=f"{name} must be one of .* Received: {name}='{value}'"):
        dataclasses.replace(RECIPES["scratch"], **{name: value})


def test_a_recipe_has_one_length() -> None:
    """Epochs and steps together, or neither, are an error."""
    with pytest.raises(ValueError, match="either epochs or steps"):
        dataclasses.replace(RECIPES["scratch"], steps=3)
    with pytest.raises(ValueError, match="either epochs or steps"):
        dataclasses.replace(RECIPES["scratch"], epochs=None)


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


def test_every_recipe_has_its_source() -> None:
    """A number that nobody can look up is no recipe."""
    assert all("arXiv" in recipe.source for recipe in RECIPES.values())


# arXiv 2010.11929, Tables 3 and 4; vit_jax/configs; big_vision/configs/vit_i21k.py.
PUBLISHED = {
    "vit-imagenet21k": {"epochs": 90, "learning_rate": 1e-3, "weight_decay": 0.03},
    "vit-imagenet": {"epochs": 300, "learning_rate": 3e-3, "weight_decay": 0.3},
    "finetune-imagenet": {"steps": 20_000, "batch_size": 512, "weight_decay": 0.0},
    "finetune-cifar10": {"steps": 10_000, "optimizer": "momentum", "gradient_norm": 1.0},
    "finetune-cifar100": {"steps": 10_000, "image_size": (384, 384)},
    "finetune-pets": {"steps": 500, "warmup": 100},
    "finetune-flowers": {"steps": 500, "accumulator_dtype": "bfloat16"},
    "finetune-vtab": {"steps": 2_500, "learning_rate": 0.01},
    "augreg-strong2": {"epochs": 300, "mixup": 0.8, "loss": "sigmoid", "head_bias": -10.0},
    "augreg-finetune": {"steps": 500, "warmup": 100, "learning_rate": 0.03},
    "plain-s16": {"epochs": 90, "batch_size": 1024, "mixup": 0.2},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_are_the_papers(name: str) -> None:
    """The numbers of the tables, copied a second time."""
    recipe = RECIPES[name]

    assert {field: getattr(recipe, field) for field in PUBLISHED[name]} == PUBLISHED[name]


def test_digits_are_never_mirrored() -> None:
    """A mirrored 2 is no 2."""
    assert not RECIPES["digits"].augmentation.flip
