"""Tests of keras_vit.explain.attention."""

import concurrent.futures
import dataclasses
import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import explain_oracle
import keras
import numpy as np
import pytest
import tensorflow as tf
import variants_oracle
from conftest import CROSS_ENTROPY, FLOAT32, OVER_TENSORS, TINY, images_for, randomize, reloaded

import keras_vit
from keras_vit import VisionTransformer, ViTConfig, data, explain
from keras_vit.explain import attention

# Oblong and square; with and without class token; every pooling; a hybrid whose stride is 16.
PLAIN: dict[str, dict[str, Any]] = {
    "token": {},
    "token, square": {"input_shape": (32, 32, 3)},
    "avg with class token": {"pooling": "avg"},
    "avg": {"pooling": "avg", "class_token": False},
    "map": {"pooling": "map", "class_token": False},
    "hybrid": {
        "input_shape": (64, 96, 3), "patch_size": 4, "resnet_layers": (), "num_layers": 2,
    },
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "relative": {**variants_oracle.ALL, "position_embedding": "relative"},
    "every block": {
        **variants_oracle.ALL, "position_embedding": "learned_2d",
        "position_placement": "every_block",
    },
    "average after registers": {
        "num_registers": 3, "pooling": "avg", "position_embedding": "sincos_2d",
        "position_placement": "every_block_shared",
    },
    "modern": variants_oracle.MODERN,
    "rotary after registers": {"num_registers": 2, **variants_oracle.COUNTED},
}  # fmt: skip
CONFIGS = {
    **{name: dataclasses.replace(TINY, **fields) for name, fields in PLAIN.items()},
    **{
        name: dataclasses.replace(TINY, num_layers=2, **fields) for name, fields in VARIANTS.items()
    },
}
# So small that every single attention weight can be nudged up and down.
SMALL = dataclasses.replace(
    TINY, input_shape=(16, 24, 3), hidden_dim=16, mlp_dim=24, num_heads=2, num_layers=2
)
# Of attention as far from uniform as that of `sharp`: 5e-6 is measured, and a transposed grid moves
# it by more than 5e-3.
SHARP = 5 * FLOAT32
# The weights up to the first block.
FIRST = re.compile("(patch_encoder|block_0)/")
# What is asked for, of which model, and what the error says.
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = [
    (explain.attention_weights, {}, {"layers": 3}, "no layer 3; .* 3, numbered 0 to 2"),
    (explain.attention_weights, {}, {"layers": [0, -4]}, "no layer -4"),
    (explain.attention_weights, {}, {"heads": 9}, "no head 9; the model has 3"),
    (explain.attention_weights, {}, {"heads": []}, r"no head \[\]"),
    (explain.pooling_attention, {}, {}, "pooling='token'"),
    (explain.attention_rollout, {"pooling": "max"}, {}, 'pooling="max".*attention_weights'),
    (explain.token_similarity, {}, {"token": (4, 0)}, r"\(4, 0\); .* 4 rows and 6 columns"),
    (explain.token_similarity, {}, {"token": (0, -1)}, r"no patch \(0, -1\)"),
    (explain.token_similarity, {}, {"token": "head"}, "no patch 'head'"),
    (explain.token_similarity, {}, {"layer": 3}, "no layer 3"),
    (
        explain.token_similarity,
        {"pooling": "avg", "class_token": False},
        {},
        "no class token.*4 rows and 6 columns",
    ),
    (explain.class_relevance, {}, {"classes": 7}, "no class 7; .* 7, numbered from 0"),
    (explain.class_relevance, {}, {"classes": [1, -1]}, "no class -1"),
    (explain.class_relevance, {}, {"classes": [1, 2, 3]}, "one for each of the 2 images"),
    (
        explain.class_relevance,
        {"classes": None, "pooling": None},
        {"classes": 0},
        r"shape \(None, 25, 24\)",
    ),
]
RELEVANT = {
    "token": SMALL,
    "token, square": dataclasses.replace(SMALL, input_shape=(16, 16, 3)),
    "avg": dataclasses.replace(SMALL, **PLAIN["avg"]),
    "map": dataclasses.replace(SMALL, **PLAIN["map"]),
    "hybrid": dataclasses.replace(SMALL, input_shape=(32, 48, 3), patch_size=4, resnet_layers=()),
    **{name: dataclasses.replace(SMALL, **fields) for name, fields in VARIANTS.items()},
}


def sharp(config: ViTConfig, **options: Any) -> VisionTransformer:
    """A random model whose attention is far from uniform: no comparison passes by averaging."""
    model = randomize(VisionTransformer(config, **options))
    for index in range(config.num_layers):
        qkv = model.get_layer(f"block_{index}").attention.qkv
        qkv.kernel.assign(qkv.kernel * 4)
    return model


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    """Tests must not change it."""
    return sharp(TINY)


@pytest.fixture(scope="module")
def small() -> VisionTransformer:
    """Tests must not change it."""
    return sharp(SMALL)


def oracle_of(model: VisionTransformer) -> Callable[..., explain_oracle.Pass]:
    """The NumPy network with the model's weights: from images, and deltas, to a pass."""
    arrays = variants_oracle.arrays(model)
    return lambda images, deltas=None: variants_oracle.run(arrays, images, model.config, deltas)


def seen(model: VisionTransformer, images: np.ndarray) -> np.ndarray:
    """The images, or what a hybrid's stem makes of them: the oracle starts there."""
    if model.config.resnet_layers is None:
        return images
    return np.asarray(model.features(images, ["stem"])["stem"], np.float64)


def unit(vectors: np.ndarray) -> np.ndarray:
    directions: np.ndarray = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return directions


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_attention_is_that_of_numpy(config: ViTConfig) -> None:
    """Weights, rollout, distance and pooling equal a NumPy walk over the same weights."""
    model, images = sharp(config), images_for(config)
    expected = oracle_of(model)(seen(model, images))
    weights = explain.attention_weights(model, images)
    np.testing.assert_allclose(weights, np.stack(expected.weights, axis=1), atol=SHARP)
    assert weights.max() > 0.3  # far from uniform
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


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tokens_and_positions_are_those_of_numpy(config: ViTConfig) -> None:
    """Cosines of each patch with one, and of every two positions, whatever stands before them."""
    model, images = sharp(config), images_for(config)
    (rows, columns), prefix = config.grid, variants_oracle.prefix_of(config)
    tokens = oracle_of(model)(seen(model, images)).tokens[1]
    patches = unit(tokens[:, prefix:])
    expected = np.einsum("bnd,bd->bn", patches, patches[:, 2 * columns + 3])
    actual = explain.token_similarity(model, images, token=(2, 3), layer=1)
    np.testing.assert_allclose(actual, expected.reshape(2, rows, columns), atol=SHARP)
    if config.class_token:  # which is meant by default, after the last block
        last = unit(oracle_of(model)(seen(model, images)).tokens[-1])
        expected = np.einsum("bnd,bd->bn", last[:, prefix:], last[:, 0]).reshape(2, rows, columns)
        np.testing.assert_allclose(explain.token_similarity(model, images), expected, atol=SHARP)
    if not config.adds_positions:
        kind = config.position_embedding
        with pytest.raises(ValueError, match=f"adds no position .*position_embedding={kind!r}"):
            explain.position_similarity(model)
        return
    places = {"input": "patch_encoder", "every_block": "positions_0"}
    layer = places.get(config.position_placement, "positions")
    table = unit(variants_oracle.table(variants_oracle.arrays(model), layer, config)[prefix:])
    similarity = explain.position_similarity(model)
    assert similarity.shape == (rows, columns, rows, columns)
    flat = similarity.reshape(rows * columns, -1)
    np.testing.assert_allclose(flat, table @ table.T, atol=FLOAT32)


def test_the_comparison_sees_a_transposed_grid(
    model: VisionTransformer, images: np.ndarray
) -> None:
    """It fails where rows and columns are confused, the usual mistake on oblong images."""
    expected = explain_oracle.rollout(oracle_of(model)(images), TINY)
    wrong = explain.attention_rollout(model, images).reshape(2, 6, 4).transpose(0, 2, 1)
    assert np.abs(wrong - expected).max() > 100 * SHARP


def test_what_there_is_not_is_refused(model: VisionTransformer, images: np.ndarray) -> None:
    """A layer, head, patch, class or pooling: the error says which there are.

    Of what there is one is chosen, several in any order, or counted from the end; the axes stay.
    """
    everything = explain.attention_weights(model, images)
    chosen = explain.attention_weights(model, images, layers=[2, 0], heads=-1)
    np.testing.assert_array_equal(chosen, everything[:, [2, 0]][:, :, [2]])
    assert explain.attention_weights(model, images, layers=1).shape == (2, 1, 3, 25, 25)
    for function, fields, arguments, message in REFUSED:
        asked = VisionTransformer(dataclasses.replace(TINY, **fields)) if fields else model
        with pytest.raises(ValueError, match=message):
            function(asked, images, **arguments)
    most = VisionTransformer(dataclasses.replace(TINY, pooling="max", num_layers=1))
    assert explain.attention_weights(most, images).shape == (2, 1, 3, 25, 25)  # though no rollout
    with pytest.raises(ValueError, match=r"image\[None\].*\(32, 48, 3\)"):
        explain.attention_rollout(model, images[0])
    inputs = keras.Input((32, 48, 3))
    two = [VisionTransformer(TINY, name=name)(inputs) for name in "ab"]
    for count, other in ((0, keras.Sequential()), (2, keras.Model(inputs, two))):
        with pytest.raises(ValueError, match=f"contains {count}"):
            attention.find_vit(other)
        with pytest.raises(ValueError, match=f"contains {count}"):
            keras_vit.freeze(other, blocks=1)


def test_nested_models_are_explained_as_the_user_calls_them(
    model: VisionTransformer, images: np.ndarray, tmp_path: Path
) -> None:
    """What stands before the Vision Transformer is applied, and what is explained is the same."""
    inputs = keras.Input((32, 48, 3))
    scaled = keras.layers.Rescaling(1 / 50, offset=-128 / 50)(inputs)
    middle_inputs = keras.Input((32, 48, 3))
    middle = keras.Model(middle_inputs, model(middle_inputs), name="middle")
    functional = keras.Model(inputs, keras.layers.Dense(2)(middle(scaled)))
    sequential = keras.Sequential(
        [keras.layers.Rescaling(1 / 50, offset=-128 / 50), model, keras.layers.Dense(2)]
    )
    loaded = reloaded(functional, tmp_path)
    expected = explain.attention_weights(model, images)
    for nested in (functional, sequential, Subclassed(model), loaded):
        actual = explain.attention_weights(nested, images * 50 + 128)
        np.testing.assert_allclose(actual, expected, atol=2e-5)
    actual = explain.token_similarity(functional, images * 50 + 128)
    np.testing.assert_allclose(actual, explain.token_similarity(model, images), atol=1e-5)


@pytest.mark.parametrize("name", OVER_TENSORS)
def test_models_over_our_tensors_are_explained_and_frozen(
    name: str, images: np.ndarray, tmp_path: Path
) -> None:
    """By the layers that they have: of live ones, and of those of a file.

    Images are resized for them as for the model whose layers they are; what is the user's trains.
    """
    vit = sharp(dataclasses.replace(TINY, include_preprocessing=True, antialias=False))
    over, count = OVER_TENSORS[name](vit), 2 if name == "cut" else 3
    for model in (over, reloaded(over, tmp_path)):
        if name != "clone":  # which has weights of its own
            expected = explain.attention_weights(vit, images)[:, :count]
            actual = explain.attention_weights(model, images)
            np.testing.assert_allclose(actual, expected, atol=FLOAT32)
        assert explain.attention_weights(model, images).shape == (2, count, 3, 25, 25)
        assert explain.class_relevance(model, images, 1).shape == (2, 4, 6)
        assert explain.position_similarity(model).shape == (4, 6, 4, 6)
        assert data.resizing_of(model) == data.resizing_of(vit)
        keras_vit.freeze(model, blocks=1)
        frozen = {weight.path for weight in model.weights if not weight.trainable}
        assert frozen == {weight.path for weight in vit.weights if FIRST.match(weight.path)}
        with pytest.raises(ValueError, match=f"from 0 to {count}"):
            keras_vit.freeze(model, blocks=4)


def test_what_does_not_answer_with_one_tensor_is_refused() -> None:
    vit = VisionTransformer(TINY)
    for model in (vit.feature_extractor(["pooling"]), Subclassed(vit)):
        with pytest.raises(ValueError, match="needs a classifier with outputs of shape"):
            explain.class_relevance(model, images_for(TINY))
    mapped = VisionTransformer(dataclasses.replace(TINY, pooling="map", class_token=False))
    with pytest.raises(ValueError, match=r"pool by attention\. Received: .* pooling=None"):
        explain.pooling_attention(OVER_TENSORS["cut"](mapped), images_for(TINY))
    with pytest.raises(ValueError, match=r"names none.* of shape that are not known"):
        data.resizing_of(Subclassed(vit))


class Subclassed(keras.Model):
    """A user's model without a graph."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.scale = keras.layers.Rescaling(1 / 50, offset=-128 / 50)
        self.vit = vit

    def call(self, inputs: object) -> object:
        return self.vit(self.scale(inputs))


def test_a_fine_tuned_model_is_explained_by_its_new_weights(images: np.ndarray) -> None:
    """After `fit`, compiled, the weights are those of the trained variables."""
    model = sharp(TINY)
    before = explain.attention_weights(model, images)
    model.compile(keras.optimizers.SGD(0.1), CROSS_ENTROPY)
    model.fit(images, np.array([0, 1]), verbose=0)
    after = explain.attention_weights(model, images)
    expected = oracle_of(model)(images)
    np.testing.assert_allclose(after, np.stack(expected.weights, axis=1), atol=SHARP)
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_is_near(
    policy: str, tiny: VisionTransformer, small: VisionTransformer, images: np.ndarray
) -> None:
    """Half precision gives float32 arrays near the float32 model's."""
    mixed = tiny.copy(dtype=policy)
    for function in (explain.attention_weights, explain.attention_rollout):
        actual = function(mixed, images)
        assert actual.dtype.kind == "f"
        np.testing.assert_allclose(actual, function(tiny, images), atol=0.01)
    expected = explain.class_relevance(small, images_for(SMALL), 1)
    actual = explain.class_relevance(small.copy(dtype=policy), images_for(SMALL), 1)
    assert actual.dtype.kind == "f"
    np.testing.assert_allclose(actual, expected, atol=0.1 * float(expected.max()))


def test_listening_changes_neither_the_answer_nor_the_model() -> None:
    """The recorded pass answers as the model does, and the model's layers are as they were."""
    for name in PLAIN:
        model, images = sharp(CONFIGS[name]), images_for(CONFIGS[name])
        before = [vars(layer).get("call") for layer in model._flatten_layers()]
        expected = keras.ops.convert_to_numpy(model(images))
        (recorded,) = attention.records(model, [images])
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


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="a function of TensorFlow")
def test_a_graph_that_is_traced_while_somebody_listens_tells_nothing(
    model: VisionTransformer, images: np.ndarray
) -> None:
    """A model that runs the Vision Transformer inside a compiled function is refused, and works."""

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


def test_another_image_size_is_resampled_and_said(
    model: VisionTransformer, images: np.ndarray
) -> None:
    """A warning names both sizes, and the result is that of the resampled images."""
    large = np.repeat(np.repeat(images, 2, axis=1), 2, axis=2)
    with pytest.warns(
        UserWarning,
        match="96 pixels wide and 64 high; they were resampled to 48 pixels wide and 32",
    ):
        actual = explain.attention_rollout(model, large)
    resized = keras.ops.convert_to_numpy(keras.ops.image.resize(large, (32, 48), antialias=True))
    np.testing.assert_allclose(actual, explain.attention_rollout(model, resized), atol=FLOAT32)


def test_images_are_taken_in_batches(small: VisionTransformer) -> None:
    """Many images give what they give one by one, across the border of the batches."""
    images = images_for(SMALL, attention.BATCH_SIZE + 2)
    actual = explain.attention_rollout(small, images)
    single = np.concatenate([explain.attention_rollout(small, image[None]) for image in images])
    np.testing.assert_allclose(actual, single, atol=FLOAT32)
    distances = [explain.mean_attention_distance(small, image[None]) for image in images]
    np.testing.assert_allclose(
        explain.mean_attention_distance(small, images), np.mean(distances, axis=0), rtol=1e-5
    )


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.full) if x in VARIANTS else x for x in RELEVANT]
)
def test_relevance_is_that_of_finite_differences(name: str) -> None:
    """With every gradient found by nudging a weight in NumPy, the relevance is the same.

    Where there are two classifiers, the score is their mean, and their tokens answer in halves.
    """
    config = RELEVANT[name]
    model, images, classes = sharp(config), images_for(config), [3, 6]
    expected = [
        explain_oracle.relevance(oracle_of(model), image, config, target)
        for image, target in zip(seen(model, images), classes, strict=True)
    ]
    actual = explain.class_relevance(model, images, classes)
    assert np.std(expected) > (1e-4 if name in VARIANTS else 1e-3)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-6)


def test_the_relevance_is_that_of_the_class_asked_for(small: VisionTransformer) -> None:
    """Another class has another relevance, by far more than the tolerance.

    None asks for each image's own top-1 class. The gradient is that of the logit, also where
    the model ends in softmax.
    """
    images = images_for(SMALL, 10)
    one, other = (explain.class_relevance(small, images[:2], target) for target in (3, 6))
    assert np.abs(one - other).max() > 20 * 2e-5
    likeliest = keras.ops.convert_to_numpy(small(images)).argmax(axis=-1)
    assert len(set(likeliest.tolist())) > 1
    expected = explain.class_relevance(small, images, likeliest.tolist())
    np.testing.assert_allclose(explain.class_relevance(small, images), expected, atol=1e-7)
    softmax = small.copy(config=dataclasses.replace(SMALL, classifier_activation="softmax"))
    actual, expected = (explain.class_relevance(x, images[:2], 2) for x in (softmax, small))
    np.testing.assert_allclose(actual, expected, atol=1e-7)


def test_a_users_classifier_is_asked_for_its_own_classes() -> None:
    """Through the user's head the relevance is that of a model with that head built in."""
    features, images = sharp(dataclasses.replace(SMALL, classes=None)), images_for(SMALL)
    whole = VisionTransformer(dataclasses.replace(SMALL, classes=4))
    kernel = np.random.default_rng(3).standard_normal((16, 4)).astype(np.float32)
    whole.set_weights([*features.get_weights(), kernel, np.zeros(4)])
    inputs = keras.Input(SMALL.input_shape)
    head = keras.layers.Dense(4, kernel_initializer=keras.initializers.Constant(kernel))
    mine = keras.Model(inputs, head(features(keras.layers.Rescaling(2.0)(inputs))))
    np.testing.assert_allclose(
        explain.class_relevance(mine, images / 2, [1, 3]),
        explain.class_relevance(whole, images, [1, 3]),
        rtol=1e-4,
        atol=1e-6,
    )
