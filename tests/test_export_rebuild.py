"""Whatever a model was trained in, its float32 copy answers the same."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import TINY, randomize
from exported import SERVED, served_model

from keras_vit.exporting import samples
from keras_vit.exporting.rebuild import Exportable, rebuild
from keras_vit.model import VisionTransformer

PIXELS = np.random.default_rng(5).integers(0, 256, (3, 32, 48, 3)).astype("float32")
EXACT = 1e-6


def said(model: keras.Model) -> np.ndarray:
    """What the model itself answers."""
    return np.asarray(model(PIXELS, training=False), "float32")


def answer(exportable: Exportable, pixels: np.ndarray = PIXELS) -> np.ndarray:
    """What the rebuilt model answers where the original answers probabilities."""
    logits = exportable.network(exportable.from_pixels(pixels), training=False)
    assert exportable.activation is not None
    return np.asarray(exportable.activation(logits))


def around(inner: keras.Model, **dense: Any) -> keras.Model:
    """A model with a Vision Transformer inside and a layer of the user's after it."""
    images = keras.Input(inner.input_shape[1:], name="photos")
    x = keras.layers.RandomFlip("horizontal", name="flip")(images)
    outputs = keras.layers.Dense(4, name="mine", **dense)(inner(x))
    return randomize(keras.Model(images, outputs), seed=2)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", None])
@pytest.mark.parametrize("include_preprocessing", [True, False])
def test_a_float32_model_is_copied_exactly(
    activation: str | None, include_preprocessing: bool
) -> None:
    """The copy gives logits; its activation turns them into what the model answers."""
    model = served_model(
        classifier_activation=activation, include_preprocessing=include_preprocessing
    )
    exportable = rebuild(model)
    images = PIXELS if include_preprocessing else PIXELS / 127.5 - 1
    expected = np.asarray(model(images))
    if activation is None:
        expected = np.asarray(keras.ops.softmax(expected))
    np.testing.assert_allclose(answer(exportable), expected, atol=EXACT)
    assert exportable.takes == ("pixels" if include_preprocessing else "normalized")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "float16"])
def test_a_low_precision_model_becomes_float32(policy: str) -> None:
    """Every variable and computation of the copy is float32, and the weights are the model's."""
    model = randomize(VisionTransformer(SERVED, dtype=policy))
    exportable = rebuild(model)
    for layer in exportable.network._flatten_layers():
        assert layer.compute_dtype == "float32"
    for weight, copied in zip(model.weights, exportable.network.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(weight.value, "float32"), copied.numpy())
    np.testing.assert_allclose(answer(exportable), said(model), atol=0.02)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_lora_is_merged(policy: str) -> None:
    """A LoRA adapter on the classifier is part of the copy, in float32."""
    model = randomize(VisionTransformer(SERVED, dtype=policy))
    before = answer(rebuild(model))
    model.get_layer("head").enable_lora(2, lora_alpha=3)
    randomize(model, seed=7)
    exportable = rebuild(model)
    atol = EXACT if policy == "float32" else 0.02
    np.testing.assert_allclose(answer(exportable), said(model), atol=atol)
    assert np.abs(answer(exportable) - before).max() > 0.05
    assert [weight.path for weight in exportable.network.weights] == [
        weight.path for weight in VisionTransformer(TINY).weights
    ]


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_a_model_quantised_whole_is_restored() -> None:
    """Every dense layer becomes float32 again, with LoRA in the blocks too."""
    model = served_model()
    model.quantize("int8")
    model.get_layer("block_0").attention.qkv.enable_lora(2, b_initializer="ones")
    np.testing.assert_allclose(answer(rebuild(model)), said(model), atol=0.03)


def test_int8_weights_are_restored() -> None:
    """A classifier quantised to int8 becomes float32 again; other modes are refused."""
    model = served_model()
    model.quantize("int8", filters="head")
    exportable = rebuild(model)
    np.testing.assert_allclose(answer(exportable), said(model), atol=0.02)
    other = served_model()
    other.quantize("int4", filters="head")
    with pytest.raises(ValueError, match=r"quantised in mode 'int4'; export can undo int8"):
        rebuild(other)


def test_a_model_of_several_devices_is_copied() -> None:
    """The variables of a MirroredStrategy become ordinary ones."""
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        model = randomize(VisionTransformer(SERVED))
    np.testing.assert_allclose(answer(rebuild(model)), said(model), atol=EXACT)


@pytest.mark.parametrize("activation", ["softmax", "linear"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_model_around_a_vision_transformer_is_copied(activation: str | None, policy: str) -> None:
    """What a user adds around the model is rebuilt too, in float32, down to logits."""
    inner = randomize(
        VisionTransformer(dataclasses.replace(SERVED, classes=None, classifier_activation=None),
                          dtype=policy)
    )  # fmt: skip
    model = around(inner, activation=activation, dtype=policy)
    expected = said(model)
    if activation == "linear":
        expected = np.asarray(keras.ops.softmax(expected))
    exportable = rebuild(model)
    atol = EXACT if policy == "float32" else 0.05
    np.testing.assert_allclose(answer(exportable), expected, atol=atol)
    assert {layer.compute_dtype for layer in exportable.network._flatten_layers()} == {"float32"}


def test_the_original_is_left_as_it_is() -> None:
    """Taking the activation off the copy leaves the user's model alone."""
    model = around(served_model(classes=None, classifier_activation=None), activation="softmax")
    before = said(model)
    rebuild(model)
    np.testing.assert_array_equal(said(model), before)


@pytest.mark.parametrize(
    "model",
    [
        lambda: "model.keras",
        lambda: keras.Sequential([keras.Input((32, 48, 3)), keras.layers.Flatten()]),
        lambda: keras.layers.Dense(1),
    ],
    ids=["path", "no transformer", "layer"],
)
def test_other_things_are_refused(model: VisionTransformer) -> None:
    """What is no model with one Vision Transformer is refused with what is allowed."""
    with pytest.raises(TypeError, match="export takes a"):
        rebuild(model())


@pytest.mark.parametrize("norm_after_pooling", [False, True])
@pytest.mark.parametrize("pooling", ["avg", "map"])
def test_features_are_what_the_classifier_sees(pooling: str, norm_after_pooling: bool) -> None:
    """Beside the logits stands the vector they are made of, its normalisation included."""
    model = served_model(pooling=pooling, norm_after_pooling=norm_after_pooling)
    exportable = rebuild(model)
    answers = exportable.outputs()(exportable.from_pixels(PIXELS))
    head = model.get_layer("head")
    np.testing.assert_allclose(
        answers["features"] @ head.kernel + head.bias, answers["logits"], atol=1e-5
    )


def test_a_copy_that_differs_is_noticed() -> None:
    """The comparison of a model and its copy fails when one weight is off."""
    model = served_model()
    exportable = rebuild(model)
    expected = samples.make_references(exportable)
    assert samples.compare_rebuilt(model, exportable, expected).passed
    model.get_layer("head").bias.assign_add(np.full(7, 1e-2) * np.arange(7))
    assert not samples.compare_rebuilt(model, exportable, expected).passed
