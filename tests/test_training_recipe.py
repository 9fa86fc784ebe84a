"""Tests of keras_vit.training.recipe."""

import dataclasses
import json

import pytest

from keras_vit.training import RECIPES, Recipe

WRONG = [
    ("epochs", 0),
    ("batch_size", 0),
    ("learning_rate", -1.0),
    ("learning_rate", float("nan")),
    ("warmup", 1.5),
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


def test_digits_are_never_mirrored() -> None:
    """A mirrored 2 is no 2."""
    assert not RECIPES["digits"].augmentation.flip
