"""Tests of keras_vit.explain.attention."""

import concurrent.futures
import dataclasses
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import explain_oracle
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import FLOAT32, TINY, randomize

from keras_vit import explain
from keras_vit.config import ViTConfig
from keras_vit.explain import attention
from keras_vit.model import VisionTransformer

# Oblong and square; with and without class token; every pooling; a hybrid whose stride is 16.
CONFIGS = {
    "token": TINY,
    "token, square": dataclasses.replace(TINY, input_shape=(32, 32, 3)),
    "avg with class token": dataclasses.replace(TINY, pooling="avg"),
    "avg": dataclasses.replace(TINY, pooling="avg", class_token=False),
    "map": dataclasses.replace(TINY, pooling="map", class_token=False),
    "hybrid": dataclasses.replace(
        TINY, input_shape=(64, 96, 3), patch_size=4, resnet_layers=(), num_layers=2
    ),
}
# Of attention as far from uniform as that of `sharp`: 5e-6 is measured, and a transposed grid moves
# it by more than 5e-3.
SHARP = 5 * FLOAT32


def sharp(config: ViTConfig, **options: Any) -> VisionTransformer:
    """A random model whose attention is far from uniform: no comparison passes by averaging."""
    model = randomize(VisionTransformer(config, **options))
    for index in range(config.num_layers):
        qkv = model.get_layer(f"block_{index}").attention.qkv
        qkv.kernel.assign(qkv.kernel * 4)
    return model


def images_for(config: ViTConfig, count: int = 2) -> np.ndarray:
    shape = (count, *config.input_shape)
    return np.random.default_rng(5).uniform(-1, 1, shape).astype(np.float32)


def expected_pass(
    model: VisionTransformer, images: np.ndarray, folder: Path
) -> explain_oracle.Pass:
    arrays = explain_oracle.arrays(model, folder)
    if model.config.resnet_layers is not None:
        images = explain_oracle.tokens_before(model, images)
    return explain_oracle.run(arrays, images, str(model.config.pooling))


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_is_that_of_numpy(name: str, tmp_path: Path) -> None:
    """Weights, rollout and distance equal a NumPy walk over the same weights."""
    config = CONFIGS[name]
    model, images = sharp(config), images_for(config)
    expected = expected_pass(model, images, tmp_path)
    weights = explain.attention_weights(model, images)
    np.testing.assert_allclose(weights, np.stack(expected.weights, axis=1), atol=SHARP)
    assert weights.max() > 0.5  # far from uniform
    np.testing.assert_allclose(
        explain.attention_rollout(model, images),
        explain_oracle.rollout(expected, config),
        atol=SHARP,
    )
    np.testing.assert_allclose(
        explain.mean_attention_distance(model, images),
        explain_oracle.distance(expected, config),
        rtol=1e-5,
    )
    if expected.pooling is not None:
        pooled = explain.pooling_attention(model, images)
        np.testing.assert_allclose(pooled, expected.pooling[:, :, 0], atol=SHARP)


def test_the_comparison_sees_a_transposed_grid(tmp_path: Path) -> None:
    """It fails where rows and columns are confused, the usual mistake on oblong images."""
    model, images = sharp(TINY), images_for(TINY)
    expected = explain_oracle.rollout(expected_pass(model, images, tmp_path), TINY)
    wrong = explain.attention_rollout(model, images).reshape(2, 6, 4).transpose(0, 2, 1)
    assert np.abs(wrong - expected).max() > 100 * SHARP


def test_layers_and_heads_are_chosen_by_index() -> None:
    """One, several in any order, or counted from the end; the axes stay."""
    model, images = sharp(TINY), images_for(TINY)
    everything = explain.attention_weights(model, images)
    chosen = explain.attention_weights(model, images, layers=[2, 0], heads=-1)
    np.testing.assert_array_equal(chosen, everything[:, [2, 0]][:, :, [2]])
    assert explain.attention_weights(model, images, layers=1).shape == (2, 1, 3, 25, 25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 3}, r"no layer 3; the model has 3, numbered 0 to 2"),
        ({"layers": [0, -4]}, r"no layer -4"),
        ({"heads": 9}, r"no head 9; the model has 3"),
        ({"heads": []}, r"no head \[\]"),
    ],
)
def test_a_layer_or_head_that_does_not_exist_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    """The error says how many there are."""
    with pytest.raises(ValueError, match=message):
        explain.attention_weights(sharp(TINY), images_for(TINY), **arguments)


def test_uniform_attention_has_the_mean_distance_of_the_grid() -> None:
    """Where every query is zero, the distance is the mean one of all pairs, in closed form."""
    model = VisionTransformer(dataclasses.replace(TINY, input_shape=(8, 24, 3)))
    for index in range(3):
        model.get_layer(f"block_{index}").attention.qkv.kernel.assign(np.zeros((24, 72)))
    actual = explain.mean_attention_distance(model, np.zeros((1, 8, 24, 3)))
    # Three patches in a row: 4 ordered pairs one patch apart, 2 two apart, of 9.
    np.testing.assert_allclose(actual, np.full((3, 3), 8 * (4 * 1 + 2 * 2) / 9), rtol=1e-6)


def test_nested_models_are_explained_as_the_user_calls_them(tmp_path: Path) -> None:
    """What stands before the Vision Transformer is applied, and what is explained is the same."""
    vit, images = sharp(TINY), images_for(TINY)
    pixels = images * 50 + 128
    inputs = keras.Input((32, 48, 3))
    scaled = keras.layers.Rescaling(1 / 50, offset=-128 / 50)(inputs)
    middle_inputs = keras.Input((32, 48, 3))
    middle = keras.Model(middle_inputs, vit(middle_inputs), name="middle")
    functional = keras.Model(inputs, keras.layers.Dense(2)(middle(scaled)))
    sequential = keras.Sequential(
        [keras.layers.Rescaling(1 / 50, offset=-128 / 50), vit, keras.layers.Dense(2)]
    )
    functional.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    expected = explain.attention_weights(vit, images)
    for model in (functional, sequential, Subclassed(vit), loaded):
        actual = explain.attention_weights(model, pixels)
        np.testing.assert_allclose(actual, expected, atol=2e-5)


class Subclassed(keras.Model):
    """A user's model without a graph."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.scale = keras.layers.Rescaling(1 / 50, offset=-128 / 50)
        self.vit = vit

    def call(self, inputs: object) -> object:
        return self.vit(self.scale(inputs))


def test_a_fine_tuned_model_is_explained_by_its_new_weights(tmp_path: Path) -> None:
    """After `fit`, compiled, the weights are those of the trained variables."""
    model, images = sharp(TINY), images_for(TINY)
    before = explain.attention_weights(model, images)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    model.fit(images, np.array([0, 1]), verbose=0)
    after = explain.attention_weights(model, images)
    expected = expected_pass(model, images, tmp_path)
    np.testing.assert_allclose(after, np.stack(expected.weights, axis=1), atol=SHARP)
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_is_near(policy: str) -> None:
    """Half precision gives float32 arrays near the float32 model's."""
    plain, images = randomize(VisionTransformer(TINY)), images_for(TINY)
    mixed = VisionTransformer(TINY, dtype=policy)
    mixed.set_weights(plain.get_weights())
    for function in (explain.attention_weights, explain.attention_rollout):
        actual = function(mixed, images)
        assert actual.dtype.kind == "f"
        np.testing.assert_allclose(actual, function(plain, images), atol=0.01)


def test_listening_changes_neither_the_answer_nor_the_model() -> None:
    """The recorded pass answers as the model does, and the model's layers are as they were."""
    for config in CONFIGS.values():
        model, images = sharp(config), images_for(config)
        before = [vars(layer).get("call") for layer in model._flatten_layers()]
        expected = keras.ops.convert_to_numpy(model(images))
        recorded = attention.record_attention(model, model, images)
        np.testing.assert_allclose(recorded.outputs, expected, atol=FLOAT32)
        np.testing.assert_array_equal(model(images), expected)
        assert [vars(layer).get("call") for layer in model._flatten_layers()] == before


@pytest.mark.parametrize("answers", [10, pytest.param(250, marks=pytest.mark.full)])
def test_threads_read_and_call_one_model_at_once(answers: int) -> None:
    """Each answer of four threads, two of which read attention, is that of one thread alone."""
    model = sharp(dataclasses.replace(TINY, num_layers=1))
    batches = [images_for(TINY) * scale for scale in (0.5, 1.0)]
    uses: list[Callable[[Any], Any]] = [lambda images: np.asarray(model(images)),
            lambda images: explain.attention_weights(model, images)] * 2  # fmt: skip
    expected = [[use(images) for images in batches] for use in uses[:2]] * 2
    start = threading.Barrier(4)

    def work(place: int) -> int:
        start.wait()
        actual = (uses[place](batches[turn % 2]) for turn in range(answers))
        pairs = zip(actual, itertools.cycle(expected[place]), strict=False)
        return sum(np.allclose(*pair, atol=FLOAT32) for pair in pairs)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [answers] * 4
    for one, another in expected[:2]:
        assert not np.allclose(one, another, atol=1e-3)


def test_a_graph_that_is_traced_while_somebody_listens_tells_nothing() -> None:
    """A model that runs the Vision Transformer inside a compiled function is refused, and works."""
    model, images = sharp(TINY), images_for(TINY)

    class Compiled(Subclassed):
        def build(self, shape: object) -> None:
            self.built = True

        @tf.function(autograph=False)
        def call(self, inputs: object) -> object:
            return self.vit(inputs)

    compiled = Compiled(model)
    with pytest.raises(ValueError, match=r"did not run its layer 'block_0/attention' eagerly"):
        explain.attention_weights(compiled, images)
    np.testing.assert_allclose(compiled(images), model(images), atol=FLOAT32)
    with pytest.raises(ValueError, match="did not run its layer"):
        explain.token_similarity(compiled, images)


def test_another_image_size_is_resampled_and_said() -> None:
    """A warning names both sizes, and the result is that of the resampled images."""
    model, images = sharp(TINY), images_for(TINY)
    large = np.repeat(np.repeat(images, 2, axis=1), 2, axis=2)
    with pytest.warns(
        UserWarning,
        match="96 pixels wide and 64 high; they were resampled to 48 pixels wide and 32",
    ):
        actual = explain.attention_rollout(model, large)
    resized = keras.ops.convert_to_numpy(keras.ops.image.resize(large, (32, 48), antialias=True))
    np.testing.assert_allclose(actual, explain.attention_rollout(model, resized), atol=FLOAT32)


def test_images_are_taken_in_batches() -> None:
    """Many images give what they give one by one, across the border of the batches."""
    model = sharp(TINY)
    images = images_for(TINY, attention.BATCH_SIZE + 2)
    actual = explain.attention_rollout(model, images)
    single = np.concatenate([explain.attention_rollout(model, image[None]) for image in images])
    np.testing.assert_allclose(actual, single, atol=FLOAT32)
    distances = [explain.mean_attention_distance(model, image[None]) for image in images]
    np.testing.assert_allclose(
        explain.mean_attention_distance(model, images), np.mean(distances, axis=0), rtol=1e-5
    )


def two(images: object) -> list[object]:
    return [VisionTransformer(TINY, name=name)(images) for name in "ab"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), "contains 0"),
        (lambda: keras.Model((i := keras.Input((32, 48, 3))), two(i)), "contains 2"),
    ],
)
def test_a_model_without_exactly_one_vit_is_refused(make: Callable[[], Any], message: str) -> None:
    """The error counts them."""
    with pytest.raises(ValueError, match=message):
        attention.find_vit(make())


def test_images_without_a_batch_are_refused() -> None:
    """The error says how to add the axis."""
    with pytest.raises(ValueError, match=r"image\[None\].*\(32, 48, 3\)"):
        explain.attention_rollout(sharp(TINY), images_for(TINY)[0])


def test_max_pooling_has_no_one_way_back_to_the_patches() -> None:
    """Rollout is refused, attention is read."""
    config = dataclasses.replace(TINY, pooling="max", num_layers=1)
    model, images = sharp(config), images_for(config)
    with pytest.raises(ValueError, match=r'pooling="max".*attention_weights'):
        explain.attention_rollout(model, images)
    assert explain.attention_weights(model, images).shape == (2, 1, 3, 25, 25)


def test_only_attention_pooling_has_pooling_attention() -> None:
    """Asked of another model, the error names its pooling."""
    with pytest.raises(ValueError, match="pooling='token'"):
        explain.pooling_attention(sharp(TINY), images_for(TINY))
