"""Tests of patch dropout: which tokens of an image training leaves out."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import CROSS_ENTROPY, FLOAT32, TINY, answers, images_for, made, reloaded, whole

from keras_vit import VisionTransformer, layers

HALF = dataclasses.replace(TINY, num_layers=1, patch_dropout_rate=0.5)
ON_TENSORFLOW = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="gradients are taken with TensorFlow"
)
ROTARY = {"rotary_period": 100.0, "position_embedding": None, "hidden_dim": 24, "num_heads": 2}
ANY_SIZE = {"input_shape": (None, None, 3), "position_grid": (4, 6)}


def numbered(batch: int, *, prefix: int = 1) -> np.ndarray:
    """Tokens of one value: patches have their number, those before them negative ones."""
    values = np.concatenate([-1.0 - np.arange(prefix), np.arange(24)])
    return np.tile(values[None, :, None].astype(np.float32), (batch, 1, 1))


def places_left(layer: layers.PatchDropout, batch: int) -> np.ndarray:
    """The numbers of the tokens that a training call leaves, (batch, N)."""
    tokens = layer(numbered(batch, prefix=layer.num_prefix_tokens), training=True)
    return np.asarray(keras.ops.convert_to_numpy(tokens))[..., 0]


def trained(model: VisionTransformer, images: np.ndarray) -> np.ndarray:
    """What a model answers in training."""
    answer = whole(model, lambda x: model(x, training=True))(images)
    return np.asarray(keras.ops.convert_to_numpy(answer))


def test_a_rounded_part_of_the_patches_goes_on() -> None:
    """Different ones, in row order, one at least, as they are; tokens before them always do.

    Over calls and images each stays at its rate; images of one call differ.
    """
    for rate, count in ((0.01, 24), (0.1, 22), (0.5, 12), (0.75, 6), (0.9, 2), (0.99, 1)):
        for prefix in (0, 1, 4):
            left = places_left(layers.PatchDropout(rate, num_prefix_tokens=prefix), 50)
            assert left.shape == (50, prefix + count)
            assert (left[:, :prefix] == -1 - np.arange(prefix)).all()
            assert (np.diff(left[:, prefix:], axis=1) > 0).all()
            assert set(np.unique(left[:, prefix:])) <= set(range(24))
    keras.utils.set_random_seed(0)
    layer = layers.PatchDropout(0.75)
    left = np.concatenate([places_left(layer, 500)[:, 1:] for _ in range(4)])
    shares = np.array([(left == place).any(axis=1).mean() for place in range(24)])
    np.testing.assert_allclose(shares, 0.25, atol=0.04)
    assert len(np.unique(left, axis=0)) > 1900


def test_rotary_positions_go_on_with_their_patches() -> None:
    """Each image gets the angles of the tokens that it keeps; without training, all do."""
    tokens = numbered(5)
    cos_sin = np.random.default_rng(0).normal(size=(2, 25, 4)).astype(np.float32)
    layer = layers.PatchDropout(0.5)
    both = layer(tokens, cos_sin=cos_sin, training=True)
    left, cos_sin_left = map(keras.ops.convert_to_numpy, both)
    assert cos_sin_left.shape == (2, 5, 13, 4)
    for image, numbers in enumerate(left[..., 0]):
        places = np.where(numbers < 0, 0, numbers + 1).astype(int)
        np.testing.assert_array_equal(cos_sin_left[:, image], cos_sin[:, places])
    for given, passed in zip((tokens, cos_sin), layer(tokens, cos_sin=cos_sin), strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(passed), given)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("extra", [{}, {"query_key_norm": True}])
def test_blocks_turn_what_is_left_as_they_turn_all(remat: bool, extra: dict[str, Any]) -> None:
    """Turned one after the other, images answer as each does where attention is told its places."""
    block = layers.TransformerBlock(2, 16, remat=remat, **extra)
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(3, 6, 8)).astype(np.float32)
    cos_sin = rng.normal(size=(2, 3, 6, 4)).astype(np.float32)
    block.build(tokens.shape)

    def call(tokens: Any, cos_sin: Any) -> Any:
        return block(tokens, cos_sin=cos_sin, training=True)

    turning = whole(block, call)
    together = turning(tokens, cos_sin)
    for image in range(3):
        alone = turning(tokens[image : image + 1], cos_sin[:, image])
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(together)[image],
            keras.ops.convert_to_numpy(alone)[0],
            rtol=0,
            atol=FLOAT32,
        )
    others = turning(tokens, np.roll(cos_sin, 1, axis=1))
    assert np.abs(keras.ops.convert_to_numpy(keras.ops.subtract(together, others))).max() > 1e-3


@pytest.mark.parametrize(
    "fields", [{}, ROTARY, {**ROTARY, **ANY_SIZE}], ids=["learned", "rotary", "any size"]
)
def test_models_drop_and_learn(fields: dict[str, Any]) -> None:
    """Evaluation has the numbers of a model without it; training moves every weight."""
    config = dataclasses.replace(HALF, **fields)
    dropping = made(config)
    plain = made(dataclasses.replace(config, patch_dropout_rate=0.0))
    plain.set_weights(dropping.get_weights()[: len(plain.weights)])
    images, labels = images_for(HALF, 8), np.arange(8) % 7
    expected = answers(plain, images)
    atol = FLOAT32 if fields else 0  # angles are computed in another place
    np.testing.assert_allclose(answers(dropping, images), expected, rtol=0, atol=atol)
    evaluated = whole(dropping, lambda x: dropping(x, training=False))(images)
    np.testing.assert_allclose(evaluated, expected, rtol=0, atol=atol)
    assert np.abs(trained(dropping, images) - expected).max() > 1e-3
    # The rate adds the state of its random numbers and nothing else.
    assert dropping.output_shape == plain.output_shape
    assert len(dropping.variables) == len(plain.variables) + 1
    assert [v.path for v in dropping.weights] == [v.path for v in plain.weights]
    assert "patch_dropout" not in [layer.name for layer in plain.layers]
    assert "patch_dropout" not in dropping.feature_names
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in dropping.trainable_variables]
    dropping.compile(keras.optimizers.SGD(0.1), CROSS_ENTROPY)
    dropping.fit(images, labels, batch_size=8, verbose=0)
    for old, variable in zip(before, dropping.trainable_variables, strict=True):
        assert not np.array_equal(old, variable), variable.path


def test_every_pooling_takes_fewer_tokens() -> None:
    """Answers of training have the shape of others; without pooling there are fewer tokens."""
    for pooling in ("token", "avg", "max", "map", None):
        fields: dict[str, Any] = {"pooling": pooling, "remat": pooling != "avg"}
        config = dataclasses.replace(HALF, num_registers=2, **fields)
        shape = (4, 7) if pooling else (4, 15, 7)
        assert trained(made(config), images_for(config, 4)).shape == shape, pooling


@pytest.mark.parametrize(
    ("dtype", "jit_compile"),
    [("mixed_bfloat16", False), pytest.param("float32", True, marks=pytest.mark.full)],
)
def test_models_train_in_a_graph(dtype: str, jit_compile: bool, tmp_path: Path) -> None:
    """XLA off and on, the loss falls, and a saved model answers as the trained one."""
    keras.utils.set_random_seed(0)
    config = dataclasses.replace(HALF, remat=True, dropout_rate=0.1, drop_path_rate=0.1)
    model = VisionTransformer(config, dtype=dtype)
    model.compile(keras.optimizers.Adam(0.01), CROSS_ENTROPY, jit_compile=jit_compile)
    images, labels = images_for(config, 8), np.arange(8) % 7
    losses = model.fit(images, labels, epochs=15, batch_size=8, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    again = reloaded(model, tmp_path)
    np.testing.assert_allclose(answers(again, images), answers(model, images), atol=FLOAT32)


@ON_TENSORFLOW
def test_only_what_is_left_has_gradients() -> None:
    """The gradient of each image reaches exactly the pixels of the patches that are left."""
    import tensorflow as tf

    model = made(HALF)
    images = tf.constant(images_for(HALF, 4))
    with tf.GradientTape() as tape:
        tape.watch(images)
        score = tf.reduce_sum(model(images, training=True) ** 2)
    change = np.abs(tape.gradient(score, images)).reshape(4, 4, 8, 6, 8, 3).max(axis=(2, 4, 5))
    assert ((change > 0).sum(axis=(1, 2)) == 12).all()
