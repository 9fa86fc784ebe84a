"""Whatever a model was trained in, its float32 copy answers the same."""

import dataclasses
import io
import re
from collections.abc import Callable
from typing import Any

import exported
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import FLOAT32, TINY, randomize
from exported import SERVED, served_model
from PIL import Image

import keras_vit
from keras_vit.data.images import to_grey
from keras_vit.exporting import samples
from keras_vit.exporting.rebuild import Exportable, rebuild
from keras_vit.model import VisionTransformer

PIXELS = np.random.default_rng(5).integers(0, 256, (3, 32, 48, 3)).astype("float32")


def said(model: keras.Model, images: np.ndarray = PIXELS) -> np.ndarray:
    """What the model itself answers."""
    return np.asarray(model(images, training=False), "float32")


def answer(exportable: Exportable, pixels: np.ndarray = PIXELS) -> np.ndarray:
    """What the rebuilt model answers where the original answers probabilities."""
    logits = exportable.network(exportable.from_pixels(pixels), training=False)
    assert exportable.activation is not None
    return np.asarray(exportable.activation(logits))


def plain(dtype: str = "float32", **fields: Any) -> VisionTransformer:
    return randomize(VisionTransformer(dataclasses.replace(SERVED, **fields), dtype=dtype))


def on_several_devices() -> VisionTransformer:
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        return plain()


def adapted(dtype: str) -> VisionTransformer:
    """A LoRA adapter on the classifier, which changes the answers."""
    model = plain(dtype)
    before = said(model)
    model.get_layer("head").enable_lora(2, lora_alpha=3)
    randomize(model, seed=7)
    assert np.abs(said(model) - before).max() > 0.05
    return model


def quantised_whole() -> VisionTransformer:
    """Every dense layer, with LoRA in a block too."""
    model = plain()
    model.quantize("int8")
    model.get_layer("block_0").attention.qkv.enable_lora(2, b_initializer="ones")
    return model


def quantised(mode: str, config: Any = None) -> VisionTransformer:
    model = plain()
    model.quantize(mode, config=config, filters="head")
    return model


class Doubling(keras.layers.Layer):
    """A layer of the user's that no registry knows."""

    def call(self, inputs: Any) -> Any:
        return 2 * inputs


class Unknowing(keras.Model):
    """A model by subclassing, whose constructor takes nothing."""

    def __init__(self) -> None:
        super().__init__(name="unknowing")
        self.inner = base()

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


def base(**fields: Any) -> VisionTransformer:
    """A tiny model that gives features."""
    return served_model(classes=None, classifier_activation=None, **fields)


def with_layers(*layers: Any, shape: tuple[int | None, ...] = (32, 48, 3)) -> keras.Model:
    """A functional model of layers and functions, one after another."""
    images = x = keras.Input(shape)
    for layer in layers:
        x = layer(x)
    return randomize(keras.Model(images, x), seed=3)


def dense(name: str | None = None, activation: str | None = None) -> keras.layers.Dense:
    return keras.layers.Dense(4, name=name, activation=activation)


def sequential(*layers: keras.layers.Layer) -> keras.Model:
    """A Sequential model that has seen a batch, and has no Input."""
    model = keras.Sequential(layers)
    model.build((None, 32, 48, 3))
    return randomize(model, seed=3)


def same_names() -> keras.Model:
    """Three layers of one name, at three depths."""
    first = keras.Sequential([keras.Input((24,)), dense("mine")], name="first")
    second = keras.Sequential([keras.Input((4,)), dense("mine")], name="second")
    return with_layers(base(), first, second, dense("mine", "softmax"))


def around(dtype: str, activation: str) -> keras.Model:
    inner = plain(dtype, classes=None, classifier_activation=None)
    last = keras.layers.Dense(4, activation=activation, dtype=dtype)
    return with_layers(keras.layers.RandomFlip("horizontal"), inner, last)


BLOCKS = keras.quantizers.Int4QuantizationConfig(block_size=8)
NORMALIZED: dict[str, Any] = {"include_preprocessing": False}
# How far a copy in float32 may be from a model in another precision.
HALF = 0.02
MODELS: dict[str, tuple[Callable[[], keras.Model], float]] = {
    "softmax": (plain, FLOAT32),
    "sigmoid": (lambda: plain(classifier_activation="sigmoid"), FLOAT32),
    "logits": (lambda: plain(classifier_activation=None), FLOAT32),
    "normalized": (lambda: plain(**NORMALIZED), FLOAT32),
    "sigmoid, normalized": (
        lambda: plain(**NORMALIZED, classifier_activation="sigmoid"), FLOAT32
    ),
    "logits, normalized": (lambda: plain(**NORMALIZED, classifier_activation=None), FLOAT32),
    "several devices": (on_several_devices, FLOAT32),
    "mixed_bfloat16": (lambda: plain("mixed_bfloat16"), HALF),
    "bfloat16": (lambda: plain("bfloat16"), HALF),
    "float16": (lambda: plain("float16"), HALF),
    "LoRA": (lambda: adapted("float32"), FLOAT32),
    "LoRA, mixed_bfloat16": (lambda: adapted("mixed_bfloat16"), HALF),
    # Rounded as they were; inputs are not rounded.
    "quantised whole": (quantised_whole, 0.03),
    "quantised, int8": (lambda: quantised("int8"), 0.005),
    "quantised, int4": (lambda: quantised("int4"), 0.005),
    "quantised, int4 in blocks": (lambda: quantised("int4", BLOCKS), FLOAT32),
    "quantised, float8": (lambda: quantised("float8"), 0.05),
    "around": (lambda: around("float32", "softmax"), FLOAT32),
    "around, logits": (lambda: around("float32", "linear"), FLOAT32),
    "around, mixed_bfloat16": (lambda: around("mixed_bfloat16", "softmax"), 0.05),
    "around, mixed_bfloat16, logits": (lambda: around("mixed_bfloat16", "linear"), 0.05),
    "Sequential": (
        lambda: sequential(
            keras.layers.RandomFlip(),
            keras.layers.Rescaling(1 / 127.5, -1),
            base(**NORMALIZED),
            keras.layers.Dropout(0.5),
            dense(),
            keras.layers.Softmax(),
        ),
        FLOAT32,
    ),
    "operations": (
        lambda: with_layers(
            lambda x: x / 127.5 - 1, base(**NORMALIZED), dense(), keras.ops.sigmoid
        ),
        FLOAT32,
    ),
    "LoRA inside": (
        lambda: with_layers(keras_vit.lora(base(), rank=2), dense(None, "softmax")), FLOAT32
    ),
    "Lambda": (
        lambda: with_layers(
            keras.layers.Lambda(lambda x: x / 2), base(), Doubling(), dense(None, "softmax")
        ),
        FLOAT32,
    ),
    "same names": (same_names, FLOAT32),
    # Layers that change no value leave the range that the Vision Transformer takes.
    "around, normalized": (
        lambda: with_layers(keras.layers.RandomFlip(), base(**NORMALIZED), dense()), FLOAT32
    ),
}  # fmt: skip


LOGITS = {name for name in MODELS if "logits" in name} | {"around, normalized"}


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize("name", MODELS)
def test_the_copy_answers_as_the_model(name: str) -> None:
    """Its activation turns logits into what the model answers; all of it is float32."""
    make, atol = MODELS[name]
    model = make()
    exportable = rebuild(model)
    takes = "normalized" if "normalized" in name else "pixels"
    assert exportable.takes == takes
    expected = said(model, PIXELS if takes == "pixels" else PIXELS / np.float32(127.5) - 1)
    assert exportable.answers == ("logits" if name in LOGITS else "probabilities")
    if name in LOGITS:
        expected = np.asarray(keras.ops.softmax(expected))
    np.testing.assert_allclose(answer(exportable), expected, atol=atol)
    assert {layer.compute_dtype for layer in exportable.network._flatten_layers()} == {"float32"}
    if not isinstance(model, VisionTransformer):
        return
    assert [weight.path for weight in exportable.network.weights] == [
        weight.path for weight in VisionTransformer(TINY).weights
    ]
    if name.startswith("quantised, "):
        references = samples.make_references(exportable)
        check = samples.compare_rebuilt(model, exportable, references)
        assert check.passed
        assert "cosine" in check.name
    elif "LoRA" not in name and "quantised" not in name:
        for weight, copied in zip(model.weights, exportable.network.weights, strict=True):
            np.testing.assert_array_equal(np.asarray(weight.value, "float32"), copied.numpy())


def with_quantised_einsum() -> keras.Model:
    model = with_layers(base(), keras.layers.EinsumDense("bd,dc->bc", 4, name="mine"))
    model.get_layer("mine").quantize("int8")
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another range": (
        lambda: with_layers(
            keras.layers.Rescaling(2.0, -1), base(include_preprocessing=False), dense()
        ),
        r"ValueError: .*whose layers turn 0\.\.255 into -1\.\.509 before it; put a Rescaling",
    ),
    "any size": (
        lambda: with_layers(keras.layers.Resizing(32, 48), base(), dense(), shape=(None, None, 3)),
        r"ValueError: .*images of one size.* '.*' for inputs of shape \(None, None, None, 3\)",
    ),
    "quantised in a layout of its own": (
        with_quantised_einsum,
        r"ValueError: .*'mine' is quantised in mode 'int8'; export can undo",
    ),
    "subclass": (
        Unknowing,
        r"TypeError: .*Received: 'unknowing', a Unknowing without one; give export ker",
    ),
    "subclass inside": (
        lambda: with_layers(Unknowing()),
        r"TypeError: .*get_config.*unexpected keyword argument",
    ),
    "softmax inside": (
        lambda: with_layers(with_layers(base(), dense(), keras.layers.Softmax())),
        r"TypeError: .*outermost model computes.*use Activation\('softmax'\)",
    ),
    "path": (lambda: "model.keras", "TypeError: export takes a"),
    "no transformer": (
        lambda: keras.Sequential([keras.Input((32, 48, 3)), keras.layers.Flatten()]),
        "TypeError: export takes a",
    ),
    "layer": (lambda: keras.layers.Dense(1), "TypeError: export takes a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_copied_is_refused(name: str) -> None:
    """One sentence names the reason and what to do."""
    make, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError)) as refused:
        rebuild(make())
    assert re.match(message, f"{refused.type.__name__}: {refused.value}")


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_grey_images_have_the_levels_of_pillow(mode: str) -> None:
    """Colour and grey files get the levels of Pillow's mode "L", which rounds them."""
    image = Image.open(io.BytesIO(exported.photo(1, mode=mode)))
    levels = to_grey(np.asarray(image.convert("RGB"), "float32"))[..., 0]
    np.testing.assert_allclose(levels, np.asarray(image.convert("L"), "float32"), atol=0.51)


def test_the_original_is_left_as_it_is() -> None:
    """Taking the activation off the copy leaves the user's model alone."""
    model = with_layers(base(), dense(None, "softmax"))
    before = said(model)
    rebuild(model)
    np.testing.assert_array_equal(said(model), before)


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
