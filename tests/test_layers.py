"""Tests of keras_vit.layers: every layer keeps the contract that Keras holds its own layers to."""

import re
from typing import Any

import keras
import numpy as np
import pytest
from conftest import FLOAT32, randomize
from keras.src import testing
from layer_contracts import CONTRACTS

from keras_vit import layers

BAD_ARGUMENTS = [
    (lambda: layers.Patches(0), "patch_size must be a positive integer"),
    (lambda: layers.DropPath(1.0), r"rate must lie in \[0, 1\)"),
    (lambda: layers.TokenPooling("sum"), "Received: pooling='sum'"),
    (lambda: layers.TokenDense(4, activation="relu"), "activation must be one of.*'relu'"),
    (
        lambda: layers.MultiHeadSelfAttention(3)(np.zeros((1, 2, 8), np.float32)),
        "num_heads=3, tokens of width 8",
    ),
    (
        lambda: layers.Patches(16)(np.zeros((1, 30, 32, 3), np.float32)),
        "multiples of patch_size=16. Received: height=30, width=32; resize.*16x32",
    ),
    (
        lambda: layers.Patches(16)(keras.Input((None, 32, None))),
        r"with known channels. Received: shape=\(None, None, 32, None\)",
    ),
    (
        lambda: layers.PatchEncoder(8)(np.zeros((1, 6, 48), np.float32)),
        r"as Patches makes it.* Received: shape=\(1, 6, 48\)",
    ),
    (
        lambda: layers.PatchEncoder(8)(keras.Input((None, None, 48))),
        r"and position_grid if rows and columns are unknown. Received: .*None, None, 48\)",
    ),
    (lambda: layers.PatchEncoder(8, position_embedding="relative"), "learned, .*'relative'"),
    (lambda: layers.PositionEmbedding("2d", grid=(2, 3)), "learned, learned_2d.*'2d'"),
    (
        lambda: layers.PositionEmbedding("learned", grid=(2, 3))(np.zeros((1, 6, 8), np.float32)),
        "2x3 patches after 1 other tokens makes 7. Received: 6 tokens",
    ),
    (
        lambda: layers.PatchEncoder(6, position_embedding="sincos_2d")(
            np.zeros((1, 2, 3, 48), np.float32)
        ),
        "'sincos_2d' need tokens whose width is a multiple of 4. Received: 6",
    ),
    (
        lambda: layers.MultiHeadSelfAttention(2, relative_grid=(2, 3))(
            np.zeros((1, 5, 8), np.float32)
        ),
        "2x3 patches has 6 tokens or more. Received: 5 tokens",
    ),
]


class _Contract(testing.TestCase):
    """Gives `run_layer_test` its home."""

    def runTest(self) -> None: ...


# Keras' own training check passes a generator, and trains layers that have no weights.
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: f"{case[0].__name__}{case[1]}")
def test_layer_keeps_the_keras_contract(case: Any) -> None:
    """Config, building, symbolic and eager calls, fit, saving and mixed precision work."""
    layer_class, arguments, input_shape, output_shape, weights, seeds = case
    _Contract().run_layer_test(
        layer_class,
        init_kwargs=arguments,
        input_shape=input_shape,
        expected_output_shape=output_shape,
        expected_num_trainable_weights=weights,
        expected_num_non_trainable_weights=0,
        expected_num_seed_generators=seeds,
        supports_masking=issubclass(layer_class, keras.layers.Dense),
    )


def test_every_public_layer_is_held_to_the_contract() -> None:
    """A layer that is added without a row above fails here."""
    assert {case[0].__name__ for case in CONTRACTS} == set(layers.__all__)


@pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: f"{case[0].__name__}{case[1]}")
def test_layer_is_rebuilt_by_its_config(case: Any) -> None:
    """Name, dtype policy and every argument survive `from_config(get_config())`."""
    layer_class, arguments, *_ = case
    layer = layer_class(**arguments, name="mine", dtype="mixed_bfloat16")
    config = layer.get_config()
    again = layer_class.from_config(config)
    assert again.get_config() == config
    assert again.name == "mine"
    assert again.dtype_policy.name == "mixed_bfloat16"
    assert set(arguments) <= set(config)


@pytest.mark.parametrize(("make", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(make: Any, message: str) -> None:
    """A wrong argument or image gets one sentence with what was received."""
    with pytest.raises(ValueError, match=message):
        make()


def test_patches_keep_the_pixels_of_a_patch_together() -> None:
    """Patch (i, j) holds its pixels in row order, channels last."""
    image = np.arange(1 * 4 * 6 * 2, dtype=np.float32).reshape(1, 4, 6, 2)
    patches = keras.ops.convert_to_numpy(layers.Patches(2)(image))
    np.testing.assert_array_equal(patches[0, 1, 2], image[0, 2:4, 4:6].ravel())
    np.testing.assert_array_equal(patches[0, 0, 1], image[0, 0:2, 2:4].ravel())


def test_permuting_patches_with_their_positions_leaves_the_class_token() -> None:
    """Attention has no order of its own: only the position embeddings carry it."""
    encoder, block = layers.PatchEncoder(8), layers.TransformerBlock(2, 16)
    patches = np.random.default_rng(0).standard_normal((2, 2, 3, 12)).astype(np.float32)
    model = keras.Sequential([encoder, block])
    model(patches)
    randomize(model)
    before = keras.ops.convert_to_numpy(model(patches))[:, 0]
    order = np.array([3, 1, 5, 0, 2, 4])
    table = keras.ops.convert_to_numpy(encoder.position_embedding)
    shuffled = patches.reshape(2, 6, 12)[:, order].reshape(2, 2, 3, 12)
    encoder.position_embedding.assign(table[:, [0, *(order + 1)]])
    after = keras.ops.convert_to_numpy(model(shuffled))[:, 0]
    np.testing.assert_allclose(after, before, atol=FLOAT32)
    encoder.position_embedding.assign(table)
    moved = keras.ops.convert_to_numpy(model(shuffled))[:, 0]
    assert np.abs(moved - before).max() > 1e-3


def test_drop_path_drops_whole_samples_and_keeps_the_mean() -> None:
    """Each sample is either zero or scaled by 1 / (1 - rate), at about the rate asked for."""
    layer = layers.DropPath(0.25, seed=1)
    out = keras.ops.convert_to_numpy(layer(np.ones((4000, 3, 2), np.float32), training=True))
    assert set(np.unique(out)) == {0.0, np.float32(1 / 0.75)}
    assert (out.std(axis=(1, 2)) == 0).all()
    assert abs((out[:, 0, 0] == 0).mean() - 0.25) < 0.03
    np.testing.assert_array_equal(layer(np.ones((2, 3, 2)), training=False), np.ones((2, 3, 2)))


def test_dropout_acts_in_training_only() -> None:
    """Every dropout rate changes the output in training and none at inference."""
    tokens = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    for name in ("dropout_rate", "attention_dropout_rate", "drop_path_rate"):
        rate: dict[str, Any] = {name: 0.5}
        plain, dropping = (
            layers.TransformerBlock(2, 16),
            layers.TransformerBlock(2, 16, **rate),
        )
        plain(tokens), dropping(tokens)
        randomize(plain), dropping.set_weights(plain.get_weights())
        expected = keras.ops.convert_to_numpy(plain(tokens))
        np.testing.assert_allclose(dropping(tokens, training=False), expected, atol=FLOAT32)
        trained = keras.ops.convert_to_numpy(dropping(tokens, training=True))
        assert np.abs(trained - expected).max() > 1e-2, name


def test_average_pooling_leaves_the_tokens_before_the_patches_out() -> None:
    """The average is over patches; of two tokens before them, it starts at the third."""
    tokens = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    with_token = layers.TokenPooling("avg", num_prefix_tokens=2)(tokens)
    np.testing.assert_allclose(with_token, tokens[:, 2:].mean(1), atol=FLOAT32)
    largest = layers.TokenPooling("max", num_prefix_tokens=2)(tokens)
    np.testing.assert_array_equal(largest, np.max(np.asarray(tokens)[:, 2:], axis=1))
    without = layers.TokenPooling("avg", num_prefix_tokens=0)(tokens)
    np.testing.assert_allclose(without, tokens.mean(1), atol=FLOAT32)


def test_initial_weights_are_the_originals() -> None:
    """Xavier-uniform products, N(0, 1e-6) MLP biases, N(0, 0.02) positions, zero class token."""
    block, encoder = layers.TransformerBlock(4, 512), layers.PatchEncoder(128)
    block.build((None, 10, 128))
    encoder.build((None, 20, 20, 48))
    weights = {v.path.split("/", 1)[1]: keras.ops.convert_to_numpy(v) for v in block.weights}
    limit = np.sqrt(6 / (128 + 128))
    for name in ("attention/qkv/kernel", "attention/out/kernel"):
        assert np.abs(weights[name]).max() <= limit
        assert weights[name].std() == pytest.approx(limit / np.sqrt(3), rel=0.02)
    assert weights["mlp/fc1/kernel"].std() == pytest.approx(np.sqrt(2 / 640), rel=0.02)
    assert weights["mlp/fc1/bias"].std() == pytest.approx(1e-6, rel=0.2)
    assert not weights["attention/qkv/bias"].any()
    assert not keras.ops.convert_to_numpy(encoder.class_token).any()
    positions = keras.ops.convert_to_numpy(encoder.position_embedding)
    assert positions.std() == pytest.approx(0.02, rel=0.05)
    projection = keras.ops.convert_to_numpy(encoder.projection.kernel)
    assert projection.std() == pytest.approx(np.sqrt(1 / 48), rel=0.05)


def test_ten_lines_assemble_a_vision_transformer() -> None:
    """The layers work in a plain functional model, and training moves every weight."""
    images = keras.Input((32, 32, 3))
    x = layers.Patches(8)(images)
    x = layers.PatchEncoder(16)(x)
    for _ in range(2):
        x = layers.TransformerBlock(num_heads=2, mlp_dim=32)(x)
    x = layers.LayerNormalization()(x)
    model = keras.Model(images, keras.layers.Dense(3)(x[:, 0]))
    randomize(model)
    before = [keras.ops.convert_to_numpy(weight) for weight in model.trainable_weights]
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    generator = np.random.default_rng(0)
    model.fit(generator.random((8, 32, 32, 3)), generator.integers(0, 3, 8), verbose=0)
    for old, weight in zip(before, model.trainable_weights, strict=True):
        assert not np.array_equal(old, keras.ops.convert_to_numpy(weight)), weight.path


def test_layer_errors_are_one_sentence() -> None:
    """Keras adds the call's arguments to errors raised in `call`; ours are raised before it."""
    with pytest.raises(ValueError, match="multiples of patch_size") as caught:
        layers.Patches(16).compute_output_shape((1, 30, 32, 3))
    assert re.search(r"\n", str(caught.value)) is None
