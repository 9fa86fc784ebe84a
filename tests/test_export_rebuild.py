"""Whatever a model was trained in, its float32 copy answers the same."""

import dataclasses
import io
from pathlib import Path
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
from keras_vit.exporting import export, samples
from keras_vit.exporting.rebuild import Exportable, rebuild
from keras_vit.model import VisionTransformer

PIXELS = np.random.default_rng(5).integers(0, 256, (3, 32, 48, 3)).astype("float32")


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
    np.testing.assert_allclose(answer(exportable), expected, atol=FLOAT32)
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
    atol = FLOAT32 if policy == "float32" else 0.02
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


@pytest.mark.parametrize(
    ("mode", "config", "atol"),
    [
        ("int8", None, 0.005),
        ("int4", None, 0.005),
        ("int4", keras.quantizers.Int4QuantizationConfig(block_size=8), FLOAT32),
        ("float8", None, 0.05),
    ],
    ids=["int8", "int4", "int4 blocks", "float8"],
)
def test_quantised_weights_are_restored(mode: str, config: Any, atol: float) -> None:
    """A quantised classifier becomes float32 again, rounded as it was; inputs are not rounded."""
    model = served_model()
    model.quantize(mode, config=config, filters="head")
    exportable = rebuild(model)
    np.testing.assert_allclose(answer(exportable), said(model), atol=atol)
    expected = samples.make_references(exportable)
    check = samples.compare_rebuilt(model, exportable, expected)
    assert check.passed
    assert "cosine" in check.name


def test_quantised_layers_without_a_float_form_are_refused() -> None:
    """A layer whose quantised kernel has a layout of its own is named."""
    model = with_layers(base(), keras.layers.EinsumDense("bd,dc->bc", 4, name="mine"))
    model.get_layer("mine").quantize("int8")
    with pytest.raises(ValueError, match=r"'mine' is quantised in mode 'int8'; export can undo"):
        rebuild(model)


def test_a_model_of_several_devices_is_copied() -> None:
    """The variables of a MirroredStrategy become ordinary ones."""
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        model = randomize(VisionTransformer(SERVED))
    np.testing.assert_allclose(answer(rebuild(model)), said(model), atol=FLOAT32)


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
    atol = FLOAT32 if policy == "float32" else 0.05
    np.testing.assert_allclose(answer(exportable), expected, atol=atol)
    assert {layer.compute_dtype for layer in exportable.network._flatten_layers()} == {"float32"}


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


AROUND = {
    "Sequential": lambda: sequential(
        keras.layers.RandomFlip(),
        keras.layers.Rescaling(1 / 127.5, -1),
        base(include_preprocessing=False),
        keras.layers.Dropout(0.5),
        dense(),
        keras.layers.Softmax(),
    ),
    "operations": lambda: with_layers(
        lambda x: x / 127.5 - 1,
        base(include_preprocessing=False),
        dense(),
        keras.ops.sigmoid,
    ),
    "LoRA inside": lambda: with_layers(keras_vit.lora(base(), rank=2), dense(None, "softmax")),
    "Lambda": lambda: with_layers(
        keras.layers.Lambda(lambda x: x / 2), base(), Doubling(), dense(None, "softmax")
    ),
    "same names": same_names,
}


@pytest.mark.parametrize("name", AROUND)
def test_layers_around_are_copied(name: str) -> None:
    """Whatever stands around, the copy answers the same, and takes pixels as the model does."""
    model = AROUND[name]()
    exportable = rebuild(model)
    np.testing.assert_allclose(answer(exportable), said(model), atol=FLOAT32)
    assert exportable.takes == exportable.network_takes == "pixels"


def test_a_normalized_range_passes_through_layers_around() -> None:
    """Layers that change no value leave the range that the Vision Transformer takes."""
    model = with_layers(keras.layers.RandomFlip(), base(include_preprocessing=False), dense())
    assert rebuild(model).takes == "normalized"


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: with_layers(
                keras.layers.Rescaling(2.0, -1), base(include_preprocessing=False), dense()
            ),
            ValueError,
            r"whose layers turn 0\.\.255 into -1\.\.509 before it; put a Rescaling",
        ),
        (
            lambda: with_layers(
                keras.layers.Resizing(32, 48), base(), dense(), shape=(None, None, 3)
            ),
            ValueError,
            r"images of one size.* Received: '.*' for inputs of shape \(None, None, None, 3\)",
        ),
        (Unknowing, TypeError, r"Received: 'unknowing', a Unknowing without one; give export ker"),
        (lambda: with_layers(Unknowing()), TypeError, r"get_config.*unexpected keyword argument"),
        (
            lambda: with_layers(with_layers(base(), dense(), keras.layers.Softmax())),
            TypeError,
            r"outermost model computes.*use Activation\('softmax'\)",
        ),
    ],
    ids=["another range", "any size", "subclass", "subclass inside", "softmax inside"],
)
def test_what_cannot_be_copied_is_refused(make: Any, kind: type[Exception], message: str) -> None:
    """One sentence names the reason and what to do."""
    with pytest.raises(kind, match=message):
        rebuild(make())


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_grey_images_have_the_levels_of_pillow(mode: str) -> None:
    """Colour and grey files get the levels of Pillow's mode "L", which rounds them."""
    image = Image.open(io.BytesIO(exported.photo(1, mode=mode)))
    levels = to_grey(np.asarray(image.convert("RGB"), "float32"))[..., 0]
    np.testing.assert_allclose(levels, np.asarray(image.convert("L"), "float32"), atol=0.51)


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


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize("kind", ["grey, quantised hybrid", "LoRA in a Sequential"])
def test_every_kind_of_model_is_exported_to_every_format(kind: str, tmp_path: Path) -> None:
    """The formats are verified, and the files answer in LiteRT with and without XNNPACK."""
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    pytest.importorskip("tf2onnx")
    if kind.startswith("grey"):
        # One block: of random ones int8 loses more than its gate lets pass.
        fields = {"resnet_layers": (1,), "patch_size": 2, "num_layers": 1}
        model = served_model(input_shape=(32, 48, 1), **fields)
        model.quantize("int8")
    else:
        model = sequential(keras_vit.lora(base(), rank=2), dense(None, "softmax"))
    shape = model.input_shape[1:]
    images = np.random.default_rng(5).uniform(0, 255, (1, *shape)).astype("float32")
    formats = ["savedmodel", "tflite", "tflite-fp16", "tflite-int8", "onnx"]
    made = {each.format: each.path for each in export(model, tmp_path / "v", formats=formats)}
    expected = np.asarray(model(images, training=False))
    resolvers = litert.OpResolverType.AUTO, litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    for resolver in resolvers:
        for threads in (1, 2):
            runner = litert.Interpreter(
                str(made["tflite-int8"]),
                num_threads=threads,
                experimental_op_resolver_type=resolver,
            ).get_signature_runner("serving_default")
            answered = runner(images=images)["probabilities"]
            np.testing.assert_allclose(answered, expected, atol=0.02)
