"""Tests of models for images of any size: one graph that answers as `resize` does."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import published
import pytest
import tensorflow as tf
from conftest import CROSS_ENTROPY, FLOAT32, TINY, randomize
from test_model_variants import CONFIGS

import keras_vit
from keras_vit import VisionTransformer, ViTConfig, evaluation, explain, training
from keras_vit.data import load_digits

OPEN = (None, None, 3)
SIZES = [(32, 48), (48, 40), (8, 88)]
# Every variant but those that are refused.
NAMES = [name for name, config in CONFIGS.items() if config.position_embedding != "relative"]


def images_of(height: int, width: int, count: int = 2) -> np.ndarray:
    generator = np.random.default_rng(height * width)
    return generator.uniform(-1, 1, (count, height, width, 3)).astype(np.float32)


def open_and_fixed(config: ViTConfig) -> tuple[VisionTransformer, VisionTransformer]:
    """Returns a model for images of any size, and the one for its grid with the same weights."""
    fixed = randomize(VisionTransformer(config))
    return keras_vit.resize(fixed, OPEN), fixed


def one_graph(model: keras.Model) -> tuple[Any, list[int]]:
    """Returns the model as one graph, and a list that grows with each time that it is traced."""
    traces: list[int] = []

    @tf.function(input_signature=[tf.TensorSpec((None, *OPEN))])
    def graph(images: Any) -> Any:
        traces.append(1)
        return model(images, training=False)

    return graph, traces


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_answers_as_the_resized_model(name: str) -> None:
    """At other sizes, from one trace, and eagerly; the weights are those of the fixed model.

    The first variant at the tables' own size too: there is nothing to resample.
    """
    model, fixed = open_and_fixed(CONFIGS[name])
    graph, traces = one_graph(model)
    for size in SIZES if name == NAMES[0] else SIZES[1:]:
        resized, images = keras_vit.resize(fixed, (*size, 3)), images_of(*size)
        expected = resized(images)
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(graph(images), expected, rtol=0, atol=FLOAT32 * scale)
        np.testing.assert_allclose(model(images), expected, rtol=0, atol=FLOAT32 * scale)
    assert len(traces) == 1
    assert [v.path for v in model.weights] == [v.path for v in fixed.weights]
    assert model.count_params() == keras_vit.parameter_count(model.config)


def test_the_comparison_can_fail() -> None:
    """Positions that are resampled otherwise give other answers."""
    model, fixed = open_and_fixed(TINY)
    images = images_of(48, 40)
    other = keras_vit.resize(fixed, (48, 40, 3), positions="bilinear")
    assert np.abs(model(images) - other(images)).max() > 1e-3


def test_a_known_size_costs_nothing() -> None:
    """Only a model for images of any size resamples or computes places in its graph."""
    for name in ("every block", "sines", "rotary"):
        for model in open_and_fixed(CONFIGS[name]):
            function = tf.function(lambda images, model=model: model(images, training=False))
            spec = tf.TensorSpec((None, *model.input_shape[1:]))
            operations = function.get_concrete_function(spec).graph.get_operations()
            kinds = {operation.type for operation in operations}
            assert ("Range" in kinds) == (model.input_shape[1] is None), name


@pytest.mark.full
@pytest.mark.parametrize("fields", [{}, {"remat": True, "rotary_period": 100.0}])
def test_fit_and_predict_take_batches_of_several_sizes(fields: dict[str, Any]) -> None:
    """Of two grids, neither the tables' own: positions learn too, without a trace for each size."""
    model, _ = open_and_fixed(dataclasses.replace(CONFIGS["every block"], **fields))
    batches = [(images_of(*size), np.array([1, 2])) for size in SIZES[1:]]
    spec = (tf.TensorSpec((None, *OPEN)), tf.TensorSpec((None,), tf.int64))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    data = data.apply(tf.data.experimental.assert_cardinality(len(batches)))
    before = {variable.path: np.array(variable) for variable in model.trainable_variables}
    model.compile("sgd", CROSS_ENTROPY)
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    unmoved = [v.path for v in model.trainable_variables if np.array_equal(v, before[v.path])]
    assert not unmoved
    answers = model.predict(data, verbose=0)
    # Keras' own traces for the first size, and for any size from the second on.
    traces = []
    for size in [(8, 8), (56, 16), (24, 88), (40, 40)]:
        model.predict(images_of(*size), verbose=0)
        traces.append(model.predict_function.experimental_get_tracing_count())
    assert traces[1] == traces[2] == traces[3]
    expected = np.concatenate([model(images) for images, _ in batches])
    np.testing.assert_allclose(answers, expected, rtol=0, atol=FLOAT32)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    """As .keras, as weights, and as a SavedModel that needs no Keras, still for any size."""
    model, _ = open_and_fixed(CONFIGS["rotary, counted"])
    model.save(tmp_path / "vit.keras")
    model.save_weights(tmp_path / "vit.weights.h5")
    model.export(tmp_path / "saved", verbose=False)
    again = keras.saving.load_model(tmp_path / "vit.keras")
    filled = VisionTransformer(model.config)
    filled.load_weights(tmp_path / "vit.weights.h5")
    served = tf.saved_model.load(tmp_path / "saved")
    assert again.config == model.config
    for size in SIZES:
        images = images_of(*size)
        for answer in (again(images), filled(images), served.serve(images)):
            np.testing.assert_allclose(answer, model(images), rtol=0, atol=FLOAT32)


def test_a_checkpoint_becomes_a_model_for_any_size(tmp_path: Path) -> None:
    """By the builders, `load` and `load_weights`; the table keeps the file's grid."""
    config = dataclasses.replace(keras_vit.VARIANTS["Ti/16"], input_shape=(64, 64, 3), classes=7)
    path = published.write(tmp_path / "vit.npz", config)
    fixed = keras_vit.load(path, input_shape=(48, 80, 3))
    given = VisionTransformer(fixed.config.resized((64, 64, 3)).resized(OPEN))
    keras_vit.weights.load_weights(given, path)
    images = np.random.default_rng(0).integers(0, 256, (1, 48, 80, 3), np.uint8)
    for model in (
        keras_vit.ViTTi16(weights=path, input_shape=OPEN),
        keras_vit.load(path, input_shape=OPEN),
        given,
    ):
        assert model.config.position_grid == (4, 4)
        np.testing.assert_allclose(model(images), fixed(images), rtol=0, atol=FLOAT32)
    model.save(tmp_path / "vit.keras")
    assert keras_vit.load(tmp_path / "vit.keras").config.input_shape == OPEN
    back = keras_vit.load(tmp_path / "vit.keras", input_shape=(48, 80, 3))
    np.testing.assert_allclose(back(images), fixed(images), rtol=0, atol=FLOAT32)
    assert keras_vit.ViTTi16(input_shape=OPEN, classes=3).config.position_grid == (14, 14)


def test_features_lie_on_the_images_grid() -> None:
    """As (B, h, w, D), for images of another size than the tables'."""
    model, _ = open_and_fixed(CONFIGS["registers"])
    features = model.features(images_of(48, 40), ["block_1", "pooling"], grid=True)
    assert features["block_1"].shape == (2, 6, 5, 24)
    assert features["pooling"].shape == (2, 24)
    assert "rotary_embedding" not in open_and_fixed(CONFIGS["rotary"])[0].feature_names


def test_half_precision_resamples_in_float32() -> None:
    """The table is cast after it is resampled, as that of a resized model."""
    model, fixed = open_and_fixed(TINY)
    model, fixed = (each.copy(dtype="mixed_bfloat16") for each in (model, fixed))
    images = images_of(48, 40)
    expected = keras_vit.resize(fixed, (48, 40, 3))(images)
    np.testing.assert_allclose(model(images), expected, rtol=0, atol=0.03)
    assert model.get_layer("patch_encoder").position_table((6, 5)).dtype == tf.float32


def test_what_needs_one_size_says_so(tmp_path: Path) -> None:
    """In a sentence that says how to get a model for one."""
    fields: dict[str, Any] = {"include_preprocessing": True, "classes": 10}
    model, _ = open_and_fixed(dataclasses.replace(TINY, num_layers=1, **fields))
    digits, out = load_digits(), tmp_path / "out"
    for attempt in (
        lambda: keras_vit.export(model, out),
        lambda: evaluation.evaluate(model, digits.test, labels=tuple("0123456789")),
        lambda: training.train(digits, out=out, model=model),
        lambda: training.pretrain(digits, out=out, model=model.config),
        lambda: explain.attention_rollout(model, images_of(32, 48)),
        lambda: model.encode(np.zeros((1, 25, 24), np.float32)),
    ):
        with pytest.raises(ValueError, match=r"images of one size|resized to the size") as caught:
            attempt()
        assert "keras_vit.resize(model, (height, width, 3))" in str(caught.value)
        assert not any(tmp_path.iterdir())


def test_positions_are_resampled_in_one_way_alone() -> None:
    """Another way than the graph's is refused, where a model for any size is asked for.

    So is an image that the patch does not divide: in a sentence, in a graph by TensorFlow.
    """
    _, fixed = open_and_fixed(TINY)
    with pytest.raises(ValueError, match=r"as .original. in its graph.*'bicubic'"):
        keras_vit.resize(fixed, OPEN, positions="bicubic")
    with pytest.raises(ValueError, match=r"as .original. in its graph.*'bilinear'"):
        keras_vit.ViTTi16(input_shape=OPEN, positions="bilinear")
    model, _ = open_and_fixed(dataclasses.replace(TINY, num_layers=1))
    with pytest.raises(ValueError, match=r"multiples of patch_size=8.*height=33, width=48"):
        model(images_of(33, 48))
    graph, _ = one_graph(model)
    with pytest.raises(tf.errors.InvalidArgumentError):
        graph(images_of(33, 48))
