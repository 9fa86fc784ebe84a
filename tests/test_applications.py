"""Tests of keras_vit.applications."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any, get_args

import keras
import numpy as np
import published
import pytest

import keras_vit
from keras_vit import VARIANTS, ViTConfig
from keras_vit.applications import BUILDERS
from keras_vit.weights.positions import Method

TI16 = VARIANTS["Ti/16"]
SMALL = (32, 48, 3)

# keras.applications.ConvNeXtTiny's arguments, in its order but for include_preprocessing.
ARGUMENTS = [
    *("include_top", "weights", "input_tensor", "input_shape", "pooling", "classes"),
    *("classifier_activation", "include_preprocessing", "name"),
    *("dropout_rate", "drop_path_rate", "remat", "positions", "sha256"),  # ours, by keyword
]

FRESH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"classes": 1000, "pooling": "token", "class_token": True}),
    ({"classes": 5}, {"classes": 5}),
    ({"pooling": "avg"}, {"pooling": "avg", "class_token": False, "classes": 1000}),
    ({"pooling": "map"}, {"pooling": "map", "class_token": False}),
    ({"include_top": False}, {"classes": None, "pooling": None, "class_token": True}),
    ({"include_top": False, "pooling": "avg"}, {"classes": None, "pooling": "avg"}),
    ({"include_top": False, "pooling": "token"}, {"classes": None, "pooling": "token"}),
    # What is passed on as it is.
    *(
        (fields, fields)
        for fields in (
            {"classifier_activation": None},
            {"include_preprocessing": False},
            {"dropout_rate": 0.1, "drop_path_rate": 0.2, "remat": True},
        )
    ),
]

# What the file holds, what the call asks for, what the model must be.
SEVEN: dict[str, Any] = {"classes": 7}
WIDE = {**SEVEN, "representation_dim": 9}
AVERAGE, MAP = ({**SEVEN, "pooling": pooling, "class_token": False} for pooling in ("avg", "map"))
CHECKPOINTS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (SEVEN, {}, {**SEVEN, "pooling": "token", "input_shape": (32, 32, 3)}),
    (SEVEN, {"input_shape": (48, 64, 3)}, {"input_shape": (48, 64, 3)}),
    (WIDE, {}, WIDE),
    (WIDE, {"classes": 4}, {"classes": 4, "representation_dim": None}),
    (WIDE, {"include_top": False}, {"classes": None, "representation_dim": None, "pooling": None}),
    ({"classes": None}, {"classes": 3}, {"classes": 3}),
    ({"classes": None}, {"include_top": False, "pooling": "token"}, {"pooling": "token"}),
    (AVERAGE, {}, AVERAGE),
    (MAP, {}, MAP),
    (MAP, {"include_top": False}, {"pooling": None, "classes": None}),
]
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_shape": (30, 48, 3)}, ValueError, "multiples of 16.*nearest that fits is"),
    ({"positions": "nearest"}, ValueError, "resampled by one of.*bicubic_antialias.*'nearest'"),
    ({"pooling": "mean"}, ValueError, "pooling must be one of"),
    ({"classes": 0}, ValueError, "classes must be a positive integer"),
    ({"classifier_activation": "sofmax"}, ValueError, "sofmax"),
    ({"weights": "nowhere.npz"}, FileNotFoundError, "There is no file 'nowhere.npz'"),
    ({"input_tensor": np.zeros((1, 32, 32, 3))}, TypeError, "must be a Keras tensor.*ndarray"),
    ({"input_tensor": keras.Input((None, None, 3))}, ValueError, "open shape"),
]


def checkpoint(tmp_path: Path, **fields: Any) -> tuple[Path, ViTConfig]:
    config = dataclasses.replace(TI16, **{"input_shape": (32, 32, 3), **fields})
    return published.write(tmp_path / "weights.npz", config), config


def values(model: keras.Model) -> dict[str, np.ndarray]:
    return {variable.path: keras.ops.convert_to_numpy(variable) for variable in model.weights}


def test_every_variant_has_a_public_builder() -> None:
    """A variant added to the table is a function of the package, named after it."""
    assert list(BUILDERS) == list(VARIANTS)
    for name, builder in BUILDERS.items():
        assert getattr(keras_vit, builder.__name__) is builder
        assert name.split("/")[1] in builder.__name__


def test_builders_build_their_variants() -> None:
    """Each has its variant's sizes, the arguments of keras.applications and a docstring of both."""
    sizes = ("hidden_dim", "mlp_dim", "num_heads", "num_layers", "patch_size", "resnet_layers")
    for variant, builder in BUILDERS.items():
        config, text = VARIANTS[variant], inspect.getdoc(builder) or ""
        assert list(inspect.signature(builder).parameters) == ARGUMENTS
        assert f"{keras_vit.parameter_count(config):,} parameters" in text
        assert f"multiples of {config.stride}" in text
        assert "arxiv.org" in text
        if keras_vit.parameter_count(config) > 50e6:
            continue  # the same code; its size is held by test_variants
        side = 2 * config.stride
        model = builder(input_shape=(side, side, 3), classes=3)
        assert [getattr(model.config, s) for s in sizes] == [getattr(config, s) for s in sizes]
        assert model.name == builder.__name__.lower()


def test_arguments_without_weights() -> None:
    """Arguments left open take the variant's values, the others are obeyed.

    As in keras.applications: pixels 0..255 in, softmax over 1,000 classes out.
    """
    for arguments, fields in FRESH:
        model = keras_vit.ViTTi16(input_shape=SMALL, **arguments)
        assert {name: getattr(model.config, name) for name in fields} == fields
    model = keras_vit.ViTTi16(input_shape=SMALL)
    out = model(np.full((1, *SMALL), 255, np.uint8))
    np.testing.assert_allclose(out, np.full((1, 1000), 1e-3), atol=1e-6)


def test_checkpoint_decides_what_is_left_open(tmp_path: Path) -> None:
    """Classes, class token, pooling, representation layer and image size come from the file."""
    for held, arguments, fields in CHECKPOINTS:
        path, _ = checkpoint(tmp_path, **held)
        model = keras_vit.ViTTi16(weights=path, **arguments)
        assert {name: getattr(model.config, name) for name in fields} == fields


def test_every_weight_of_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    """The builder's weights are those of `weights.load_weights`, the classifier included."""
    path, config = checkpoint(tmp_path, classes=7, representation_dim=9)
    built = keras_vit.ViTTi16(weights=path)
    loaded = keras_vit.VisionTransformer(config)
    keras_vit.weights.load_weights(loaded, path)
    expected, actual = values(loaded), values(built)
    assert list(actual) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
        assert value.any(), name


@pytest.mark.parametrize("positions", get_args(Method))
def test_positions_are_resampled_as_asked_for(positions: Method, tmp_path: Path) -> None:
    """Builders and `keras_vit.load` resample by the method that they are given and no other."""
    path, config = checkpoint(tmp_path, classes=7, input_shape=(64, 64, 3))
    table = published.arrays(config)["Transformer/posembed_input/pos_embedding"]
    tables = {
        method: keras_vit.weights.resample_positions(table, (4, 4), (3, 6), method=method)
        for method in get_args(Method)
    }
    for model in (
        keras_vit.ViTTi16(weights=path, input_shape=(48, 96, 3), positions=positions),
        keras_vit.load(path, input_shape=(48, 96, 3), positions=positions),
    ):
        found = values(model)["patch_encoder/position_embedding"]
        assert [m for m in tables if np.array_equal(found, tables[m])] == [positions]


def test_another_number_of_classes_makes_a_fresh_head(tmp_path: Path) -> None:
    """The new classifier is zeros, everything below it the checkpoint's; other models are drawn."""
    path, _ = checkpoint(tmp_path, classes=7)
    model = values(keras_vit.ViTTi16(weights=path, classes=4))
    assert model["head/kernel"].shape == (192, 4)
    assert not model["head/kernel"].any()
    assert model["block_11/mlp/fc2/kernel"].any()
    # Skipping the initializers ends with the build that asked for it.
    assert values(keras_vit.ViTTi16(input_shape=SMALL))["block_0/mlp/fc1/kernel"].any()


def test_input_tensor_is_built_upon() -> None:
    """Layers before the tensor are part of the model, which is plain Keras and survives saving."""
    inputs = keras.Input((64, 96, 3))
    small = keras.layers.AveragePooling2D(2)(inputs)
    model = keras_vit.ViTTi16(input_tensor=small, classes=3, classifier_activation=None)
    assert model.input_shape == (None, 64, 96, 3)
    assert model.output_shape == (None, 3)
    again = keras.Model.from_config(model.get_config())
    assert [v.shape for v in again.weights] == [v.shape for v in model.weights]


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    """One sentence each; another variant's file with all sizes that differ, no head invented."""
    for arguments, kind, message in ERRORS:
        with pytest.raises(kind, match=message):
            keras_vit.ViTTi16(**arguments)
    path, _ = checkpoint(tmp_path, classes=7)
    with pytest.raises(ValueError, match=r"is 16, .*resnet_layers is None, the model's is \(\)"):
        keras_vit.RViTTi16(weights=path)
    path, _ = checkpoint(tmp_path, classes=None)
    with pytest.raises(ValueError, match="holds no classifier; pass classes=N"):
        keras_vit.ViTTi16(weights=path)
