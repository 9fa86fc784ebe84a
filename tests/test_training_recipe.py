"""Tests of keras_vit.training.recipe."""

import dataclasses
import json
from typing import Any

import pytest

import keras_vit
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
    fields: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} must lie between .* Received: {name}={value}"):
        dataclasses.replace(RECIPES["scratch"], **fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimizer", "lion"), ("decay", "step"), ("loss", "hinge"), ("mix_per", "pair")],
)
def test_unknown_parts_are_errors(name: str, value: str) -> None:
    """A part that does not exist is named with those that do."""
    fields: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} must be one of .* Received: {name}='{value}'"):
        dataclasses.replace(RECIPES["scratch"], **fields)


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


def test_digits_are_never_mirrored() -> None:
    """A mirrored 2 is no 2."""
    assert not RECIPES["digits"].augmentation.flip


def test_a_recipe_makes_the_model_it_was_published_for() -> None:
    """Its fields of ViTConfig go over those of the variant, widths included, and survive JSON."""
    recipe = RECIPES["plain-s16"]
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))

    config = again.config(keras_vit.VARIANTS["S/16"])

    assert (config.pooling, config.class_token) == ("avg", False)
    assert (config.position_embedding, config.representation_dim) == ("sincos_2d", 384)
    wider = dataclasses.replace(recipe, model={**recipe.model, "hidden_dim": 768})
    assert wider.config(keras_vit.VARIANTS["S/16"]).representation_dim == 768
    stages = dataclasses.replace(recipe, model={"resnet_layers": (3, 4, 9)})
    assert Recipe.from_dict(json.loads(json.dumps(stages.to_dict()))) == stages


WRONG_MODELS = [
    ({"width": 3}, "no field 'width' that a recipe may set; choose from .*pooling"),
    ({"classes": 3}, "classes is decided by the data"),
    ({"input_shape": (8, 8, 3)}, "input_shape is decided by image_size .--image-size"),
    ({"drop_path_rate": 0.1}, "decided by the recipe's field of that name"),
    ({"class_token": "no"}, "class_token must be true or false. Received: 'no'"),
    ({"layer_scale": "small"}, "layer_scale must be a number. Received: 'small'"),
    ({"layer_norm_epsilon": None}, "layer_norm_epsilon must be a number. Received: None"),
    ({"attention_dropout_rate": True}, "must be a number. Received: True"),
]


@pytest.mark.parametrize(("model", "message"), WRONG_MODELS)
def test_fields_of_the_model_that_mean_nothing_are_errors(
    model: dict[str, Any], message: str
) -> None:
    """A field is refused with the reason when the recipe is made, not when the model is."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(RECIPES["scratch"], model=model)


def test_parts_that_do_not_fit_each_other_are_errors() -> None:
    """LAMB with rates for each layer, and averages that never forget, are refused."""
    with pytest.raises(ValueError, match=r"LAMB .* takes no layer_decay"):
        dataclasses.replace(RECIPES["deit3-s16"], layer_decay=0.75)
    with pytest.raises(ValueError, match=r"betas must be two numbers .*=\(0.9, 1.0\)"):
        dataclasses.replace(RECIPES["scratch"], betas=(0.9, 1.0))
