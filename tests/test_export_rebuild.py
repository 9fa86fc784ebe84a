"""Models of every kind: their float32 copies answer the same, and so does every export."""

import dataclasses
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exported
import keras
import numpy as np
import pytest
import tensorflow as tf
import variants_oracle
from conftest import FLOAT32, OVER_TENSORS, TINY, randomize
from exported import SERVED, served_model
from PIL import Image

import keras_vit
from keras_vit.exporting import export, onnx_files, samples, tflite
from keras_vit.exporting.clean import runners
from keras_vit.exporting.rebuild import Exportable, rebuild
from keras_vit.model import VisionTransformer

PIXELS = np.random.default_rng(5).integers(0, 256, (3, 32, 48, 3)).astype("float32")
BLOCKS = keras.quantizers.Int4QuantizationConfig(block_size=8)
NORMALIZED: dict[str, Any] = {"include_preprocessing": False}
# How far a copy in float32 may be from a model in another precision.
HALF = 0.02
ALL = {"num_layers": 2, **variants_oracle.ALL}
VARIANTS: dict[str, dict[str, Any]] = {
    "relative": {**ALL, "position_embedding": "relative"},
    "every block": {
        **ALL, "position_embedding": "learned_2d", "position_placement": "every_block"
    },
    "modern": {"num_layers": 2, **variants_oracle.MODERN},
    "counted": {"num_layers": 1, "norm_after_pooling": True, **variants_oracle.COUNTED},
}  # fmt: skip
FORMATS = ("savedmodel", "tflite", "tflite-fp16", "tflite-int8", "onnx")
ROUNDED = ("onnx-fp16", "onnx-int8", "onnx-int8-weights", "tflite-int8-weights")
BARE = {"classes": None, "classifier_activation": None}


def said(model: keras.Model, images: np.ndarray = PIXELS) -> np.ndarray:
    return np.asarray(model(images, training=False), "float32")


def answer(exportable: Exportable) -> np.ndarray:
    """What the rebuilt model answers where the original answers probabilities."""
    images = exportable.to_network(PIXELS, "pixels")
    return samples.outputs(exportable, images)["probabilities"]


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
    return served_model(classes=None, classifier_activation=None, **fields)


def with_layers(*layers: Any, shape: tuple[int | None, ...] = (32, 48, 3)) -> keras.Model:
    images = x = keras.Input(shape)
    for layer in layers:
        x = layer(x)
    model = randomize(keras.Model(images, x), seed=3)
    model.compile(loss="categorical_crossentropy")
    return model


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


def over_tensors(name: str, **fields: Any) -> keras.Model:
    return OVER_TENSORS[name](plain(num_layers=3, **fields))


def around(dtype: str, activation: str) -> keras.Model:
    inner = plain(dtype, classes=None, classifier_activation=None)
    last = keras.layers.Dense(4, activation=activation, dtype=dtype)
    return with_layers(keras.layers.RandomFlip("horizontal"), inner, last)


MODELS: dict[str, tuple[Callable[[], keras.Model], float]] = {
    **{
        f"{activation}{', normalized' * is_normalized}": (
            functools.partial(
                plain, classifier_activation=activation, include_preprocessing=not is_normalized
            ),
            FLOAT32,
        )
        for activation in ("softmax", "sigmoid", None)
        for is_normalized in (False, True)
    },
    "several devices": (on_several_devices, FLOAT32),
    **{
        dtype: (functools.partial(plain, dtype), HALF)
        for dtype in ("mixed_bfloat16", "bfloat16", "float16")
    },
    "LoRA": (lambda: adapted("float32"), FLOAT32),
    "LoRA, mixed_bfloat16": (lambda: adapted("mixed_bfloat16"), HALF),
    # Rounded as they were; inputs are not rounded.
    "quantised whole": (quantised_whole, 0.03),
    "quantised, int8": (lambda: quantised("int8"), 0.005),
    "quantised, int4": (lambda: quantised("int4"), 0.005),
    "quantised, int4 in blocks": (lambda: quantised("int4", BLOCKS), FLOAT32),
    "quantised, float8": (lambda: quantised("float8"), 0.05),
    **{
        f"around, {dtype}, {activation}": (functools.partial(around, dtype, activation), atol)
        for dtype, atol in (("float32", FLOAT32), ("mixed_bfloat16", 0.05))
        for activation in ("softmax", "linear")
    },
    "Sequential": (
        lambda: sequential(
            keras.layers.RandomFlip(), keras.layers.Rescaling(1 / 127.5, -1), base(**NORMALIZED),
            keras.layers.Dropout(0.5), dense(), keras.layers.Softmax(),
        ), FLOAT32
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
    **{
        f"over tensors, {name}": (functools.partial(over_tensors, name), FLOAT32)
        for name in OVER_TENSORS
    },
    "over tensors, normalized": (lambda: over_tensors("output", **NORMALIZED), FLOAT32),
    "over tensors, LoRA": (
        lambda: randomize(OVER_TENSORS["output"](keras_vit.lora(plain(num_layers=3), rank=2))),
        FLOAT32,
    ),
    # Layers that change no value leave the range that the Vision Transformer takes.
    "around, normalized": (
        lambda: with_layers(keras.layers.RandomFlip(), base(**NORMALIZED), dense()), FLOAT32
    ),
}  # fmt: skip


LOGITS = {name for name in MODELS if "None" in name or "linear" in name} | {"around, normalized"}


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize("name", MODELS)
def test_the_copy_answers_as_the_model(name: str) -> None:
    """Its activation turns logits into what the model answers; all of it is float32.

    The model itself is left as it is.
    """
    make, atol = MODELS[name]
    model = make()
    takes = "normalized" if "normalized" in name else "pixels"
    images = PIXELS if takes == "pixels" else PIXELS / np.float32(127.5) - 1
    expected = said(model, images)
    exportable = rebuild(model)
    assert exportable.takes == takes
    np.testing.assert_array_equal(said(model, images), expected)
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
        batch = samples.make_verification_images(exportable, work=0).batch
        check = samples.compare_rebuilt(model, exportable, batch)
        assert check.passed
        assert "cosine" in check.name
    elif "LoRA" not in name and "quantised" not in name:
        for weight, copied in zip(model.weights, exportable.network.weights, strict=True):
            np.testing.assert_array_equal(np.asarray(weight.value, "float32"), copied.numpy())


def test_what_cannot_be_copied_is_refused() -> None:
    """One sentence names the reason and what to do."""
    einsum = with_layers(base(), keras.layers.EinsumDense("bd,dc->bc", 4, name="mine"))
    einsum.get_layer("mine").quantize("int8")
    scaled = with_layers(keras.layers.Rescaling(2.0, -1), base(**NORMALIZED), dense())
    scaling = keras.layers.Rescaling(2.0, -1, name="rescaling")  # as Keras names the first, and we
    over = with_layers(scaling, *plain(**NORMALIZED).layers[1:])
    any_size = with_layers(keras.layers.Resizing(32, 48), base(), dense(), shape=(None, None, 3))
    softmax = with_layers(with_layers(base(), dense(), keras.layers.Softmax()))
    flat = keras.Sequential([keras.Input((32, 48, 3)), keras.layers.Flatten()])
    for model, kind, message in (
        (scaled, ValueError, r"turn 0\.\.255 into -1\.\.509 before it; put a Rescaling"),
        (over, ValueError, r"turn 0\.\.255 into -1\.\.509 before it; put a Rescaling"),
        (any_size, ValueError, r"one size.* '.*' for inputs of shape \(None, None, None, 3\)"),
        (einsum, ValueError, "'mine' is quantised in mode 'int8'; export can undo"),
        (Unknowing(), TypeError, "'unknowing', a Unknowing without one; give export ker"),
        (with_layers(Unknowing()), TypeError, "get_config.*unexpected keyword argument"),
        (softmax, TypeError, r"outermost model computes.*use Activation\('softmax'\)"),
        ("model.keras", TypeError, "export takes a"),
        (flat, TypeError, "export takes a"),
        (plain().feature_extractor(["pooling"]), TypeError, "to one tensor .* with 1 inside"),
        (keras.layers.Dense(1), TypeError, "export takes a"),
    ):
        with pytest.raises(kind, match=message):
            rebuild(model)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_grey_images_have_the_levels_of_pillow(mode: str) -> None:
    """Colour and grey files get the levels of Pillow's mode "L", which rounds them."""
    image = Image.open(io.BytesIO(exported.photo(1, mode=mode)))
    levels = samples.to_grey(np.asarray(image.convert("RGB"), "float32"))[..., 0]
    np.testing.assert_allclose(levels, np.asarray(image.convert("L"), "float32"), atol=0.51)


@pytest.mark.parametrize("norm_after_pooling", [False, True])
@pytest.mark.parametrize("pooling", ["avg", "map"])
def test_features_are_what_the_classifier_sees(pooling: str, norm_after_pooling: bool) -> None:
    """Beside the logits stands the vector they are made of, its normalisation included."""
    model = served_model(pooling=pooling, norm_after_pooling=norm_after_pooling)
    exportable = rebuild(model)
    answers = exportable.answer(PIXELS)
    head = model.get_layer("head")
    np.testing.assert_allclose(
        answers["features"] @ head.kernel + head.bias, answers["logits"], atol=1e-5
    )


def test_a_copy_that_differs_is_noticed() -> None:
    """The comparison of a model and its copy fails when one weight is off."""
    model = served_model()
    exportable = rebuild(model)
    expected = samples.make_verification_images(exportable, work=0).batch
    assert samples.compare_rebuilt(model, exportable, expected).passed
    model.get_layer("head").bias.assign_add(np.full(7, 1e-2) * np.arange(7))
    assert not samples.compare_rebuilt(model, exportable, expected).passed


def grey_hybrid() -> keras.Model:
    """Of one block: of random ones int8 loses more than its gate lets pass."""
    fields: dict[str, Any] = {"resnet_layers": (1,), "patch_size": 2, "num_layers": 1}
    model = served_model(input_shape=(32, 48, 1), **fields)
    model.quantize("int8")
    return model


SAVED, TFLITE, ONNX = FORMATS[:1], FORMATS[1:4], FORMATS[4:]
# Models, or the fields of those that are to be served, and their formats.
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    # What no writer knows by heart is converted.
    **{name: (fields, FORMATS) for name, fields in VARIANTS.items()},
    "grey, quantised hybrid": (grey_hybrid, FORMATS),
    "LoRA in a Sequential": (
        lambda: sequential(keras_vit.lora(base(), rank=2), dense(None, "softmax")), FORMATS
    ),
    "swiglu": (
        {"hidden_dim": 48, "mlp_dim": 96, "num_layers": 2, "activation": "swiglu"}, ROUNDED
    ),
    # tf2onnx with the exact GELU, and with a stem.
    "exact GELU": ({"activation": "gelu", "position_embedding": "relative"}, ONNX),
    "normed hybrid": ({"resnet_layers": (1,), "patch_size": 2, "query_key_norm": True}, ONNX),
    "hybrid": ({"resnet_layers": (1, 1), "patch_size": 1, "num_registers": 1}, TFLITE),
    # Other signatures.
    "features": (BARE, SAVED),
    "numbers": ({"classifier_activation": None, "problem_type": "regression"}, FORMATS),
    "tokens": ({**BARE, "pooling": None}, SAVED),
    "sigmoid": ({"include_preprocessing": False, "classifier_activation": "sigmoid"}, SAVED),
    "map": ({"pooling": "map", "class_token": False, "representation_dim": 12}, SAVED),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.parametrize("name", KINDS)
def test_every_format_is_written_and_verified(name: str, tmp_path: Path) -> None:
    """The files hold the export's checks, and LiteRT and ONNX Runtime answer like the model."""
    pytest.importorskip("tf2onnx")
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    kind, formats = KINDS[name]
    model = kind() if callable(kind) else served_model(**kind)
    artefacts = export(model, tmp_path / "v", formats=formats)
    assert tuple(each.format for each in artefacts) == formats
    assert all(check.passed for each in artefacts for check in each.checks)
    shape = (1, *model.input_shape[1:])
    images = np.random.default_rng(6).uniform(0, 255, shape).astype("float32")
    expected = np.asarray(model(images, training=False))
    for each in artefacts if formats != SAVED else ():
        if each.format == "savedmodel":
            continue
        runner_of = runners.RUNNERS[each.format.partition("-")[0]]
        answer = runner_of(each.path).run("", {"images": images})
        is_exact = each.format in ("tflite", "onnx") and name != "grey, quantised hybrid"
        said = "values" if name == "numbers" else "probabilities"
        np.testing.assert_allclose(answer[said], expected, atol=FLOAT32 if is_exact else 0.02)
        # With and without XNNPACK, on one thread and on two.
        resolvers = litert.OpResolverType
        for resolver in (resolvers.AUTO, resolvers.BUILTIN_WITHOUT_DEFAULT_DELEGATES):
            for threads in (1, 2) if each.format == "tflite-int8" else ():
                interpreter = litert.Interpreter(
                    str(each.path), num_threads=threads, experimental_op_resolver_type=resolver
                )
                runner = interpreter.get_signature_runner(runners.SIGNATURE)
                answered = runner(images=images)[said]
                np.testing.assert_allclose(answered, expected, atol=0.02)


def test_a_hybrid_that_tflite_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    """The sentence names the fields and the formats that are left; nothing is written."""
    model = served_model(resnet_layers=(), patch_size=2, num_layers=1, query_key_norm=True)
    message = "savedmodel or onnx. Received: a hybrid with query_key_norm set"
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "v", formats=["onnx", "tflite-int8"])
    assert not list(tmp_path.iterdir())


def test_the_writers_by_hand_leave_variants_alone() -> None:
    """No variant reaches a forward pass that was written for networks without its fields."""
    for fields in VARIANTS.values():
        exportable = rebuild(served_model(**fields))
        assert exportable.written_config is None
        assert type(tflite.make_module(exportable, batch_size=1)).__name__ == "Module"
        with pytest.raises(ValueError, match="Only a network like the published"):
            onnx_files.make_onnx(exportable)
    assert rebuild(served_model()).written_config is not None
