"""Tests of keras_vit.layers: every layer keeps the contract that Keras holds its own layers to."""

from typing import Any

import keras
import numpy as np
import pytest
from conftest import FLOAT32, randomize
from keras.src import testing

from keras_vit import layers

BAD_ARGUMENTS: list[tuple[Any, str]] = [
    (lambda: layers.Patches(0), "patch_size must be a positive integer"),
    (lambda: layers.DropPath(1.0), r"rate must lie in \[0, 1\)"),
    (lambda: layers.PatchDropout(1.5), r"rate must lie in \[0, 1\).*1.5"),
    (lambda: layers.TokenPooling("sum"), "Received: pooling='sum'"),
    (lambda: layers.TokenDense(4, activation="relu"), "activation must be one of.*'relu'"),
    (lambda: layers.PatchEncoder(8, position_embedding="relative"), "learned, .*'relative'"),
    (lambda: layers.PositionEmbedding("2d", grid=(2, 3)), "learned, learned_2d.*'2d'"),
    (lambda: layers.Patches(16)(keras.Input((None, 32, None))),
     r"with known channels. Received: shape=\(None, None, 32, None\)"),
    (lambda: layers.PatchEncoder(8)(keras.Input((None, None, 48))),
     r"and position_grid if rows and columns are unknown. Received: .*None, None, 48\)"),
]  # fmt: skip
# A layer, the shape of what it is called on, and what the sentence says.
BAD_SHAPES: list[tuple[keras.Layer, tuple[int, ...], str]] = [
    (layers.MultiHeadSelfAttention(3), (1, 2, 8), "num_heads=3, tokens of width 8"),
    (layers.Patches(16), (1, 30, 32, 3),
     "multiples of patch_size=16. Received: height=30, width=32; resize.*16x32"),
    (layers.PatchEncoder(8), (1, 6, 48), r"as Patches makes it.* Received: shape=\(1, 6, 48\)"),
    (layers.PositionEmbedding("learned", grid=(2, 3)), (1, 6, 8),
     "2x3 patches after 1 other tokens makes 7. Received: 6 tokens"),
    (layers.PatchEncoder(6, position_embedding="sincos_2d"), (1, 2, 3, 48),
     "'sincos_2d' need tokens whose width is a multiple of 4. Received: 6"),
    (layers.MultiHeadSelfAttention(2, relative_grid=(2, 3)), (1, 5, 8),
     "2x3 patches has 6 tokens or more. Received: 5 tokens"),
]  # fmt: skip
PATCHES, TOKENS = (2, 2, 3, 48), (2, 5, 8)
ROTARY = {"grid": (2, 2), "period": 100.0}
PLACED = {"reference_grid": (3, 3), "offset": 0.5}
# What attention may have besides, in a block too.
MANY: dict[str, Any] = {"query_key_norm": True, "relative_grid": (2, 2)}

Case = tuple[type, dict[str, Any], tuple[int, ...], tuple[int, ...], int, int]


def encoder(tokens: int, weights: int, seeds: int = 0, **arguments: Any) -> Case:
    arguments = {"hidden_dim": 8, **arguments}
    return (layers.PatchEncoder, arguments, PATCHES, (2, tokens, 8), weights, seeds)


def attention(weights: int, seeds: int = 0, **arguments: Any) -> Case:
    arguments = {"num_heads": 2, **arguments}
    return (layers.MultiHeadSelfAttention, arguments, TOKENS, TOKENS, weights, seeds)


def block(weights: int, seeds: int = 0, **arguments: Any) -> Case:
    arguments = {"num_heads": 2, "mlp_dim": 16, **arguments}
    return (layers.TransformerBlock, arguments, TOKENS, TOKENS, weights, seeds)


def positions(kind: str, tokens: int, weights: int, **arguments: Any) -> Case:
    shape, arguments = (2, tokens, 8), {"kind": kind, "grid": (2, 3), **arguments}
    return (layers.PositionEmbedding, arguments, shape, shape, weights, 0)


# Class, arguments, input shape, output shape, trainable weights, seed generators.
CONTRACTS: list[Case] = [
    (layers.Patches, {"patch_size": 4}, (2, 8, 12, 3), PATCHES, 0, 0),
    encoder(7, 4),
    encoder(6, 3, 1, class_token=False, dropout_rate=0.5),
    encoder(10, 8, position_embedding="learned_2d", num_registers=2, distillation_token=True),
    encoder(7, 3, position_embedding=None),
    encoder(7, 4, position_grid=(3, 2)),
    (layers.PatchDropout, {"rate": 0.5, "num_prefix_tokens": 2}, (2, 7, 8), (2, 7, 8), 0, 1),
    (
        layers.RotaryEmbedding,
        {"size": 8, "period": 100.0, "reference_grid": (2, 2), "offset": 0.5},
        *(PATCHES, (2, 7, 8), 0, 0),
    ),
    positions("learned", 7, 1),
    positions("learned_2d", 8, 3, num_prefix_tokens=2, num_registers=1),
    positions("sincos_2d", 6, 0, num_prefix_tokens=0),
    (layers.TokenDense, {"units": 6}, (2, 5, 4), (2, 5, 6), 2, 0),
    (layers.TokenDense, {"units": 6, "activation": "gelu"}, (2, 4), (2, 6), 2, 0),
    (layers.TokenDense, {"units": 6, "activation": "quick_gelu"}, (2, 4), (2, 6), 2, 0),
    (layers.MLP, {"mlp_dim": 16}, TOKENS, TOKENS, 4, 0),
    (layers.MLP, {"mlp_dim": 16, "dropout_rate": 0.5}, TOKENS, TOKENS, 4, 1),
    (layers.MLP, {"mlp_dim": 16, "activation": "swiglu"}, TOKENS, TOKENS, 4, 0),
    attention(4),
    attention(9, **MANY),
    attention(4, rotary=ROTARY),
    attention(4, 1, attention_dropout_rate=0.5, dropout_rate=0.5),
    (layers.LayerNormalization, {"epsilon": 1e-3}, TOKENS, TOKENS, 2, 0),
    (layers.DropPath, {"rate": 0.5}, TOKENS, TOKENS, 0, 1),
    (layers.DropPath, {"rate": 0.0}, TOKENS, TOKENS, 0, 0),
    block(12),
    block(12, 3, dropout_rate=0.1, drop_path_rate=0.1),
    block(12, 2, dropout_rate=0.1, remat=True),
    block(19, 1, layer_scale=0.1, drop_path_rate=0.1, remat=True, **MANY),
    block(12, activation="quick_gelu", rotary={**ROTARY, **PLACED}, remat=True),
    (layers.TokenPooling, {"pooling": "token", "token": 1}, TOKENS, (2, 8), 0, 0),
    (layers.TokenPooling, {"pooling": "token"}, TOKENS, (2, 8), 0, 0),
    (layers.TokenPooling, {"pooling": "avg", "num_prefix_tokens": 0}, TOKENS, (2, 8), 0, 0),
    (layers.TokenPooling, {"pooling": "token_avg"}, TOKENS, (2, 16), 0, 0),
    (layers.AttentionPooling, {"num_heads": 2, "mlp_dim": 16}, TOKENS, (2, 8), 13, 0),
    (
        layers.StdConv2D,
        {"filters": 8, "kernel_size": 3, "strides": 2},
        *((2, 7, 8, 3), (2, 4, 4, 8), 1, 0),
    ),
    (layers.BottleneckUnit, {"filters": 32}, (2, 4, 4, 128), (2, 4, 4, 128), 9, 0),
    (layers.BottleneckUnit, {"filters": 32, "strides": 2}, (2, 4, 4, 64), (2, 2, 2, 128), 12, 0),
    (layers.ResNetStem, {"layers": ()}, (2, 16, 16, 3), (2, 4, 4, 64), 3, 0),
    (layers.ResNetStem, {"layers": (1, 1)}, (2, 16, 16, 3), (2, 2, 2, 512), 27, 0),
]


class _Contract(testing.TestCase):
    """Gives `run_layer_test` its home."""

    def runTest(self) -> None: ...


# Keras' own training check passes a generator, and trains layers that have no weights.
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("case", CONTRACTS, ids=lambda case: f"{case[0].__name__}{case[1]}")
def test_layer_keeps_the_keras_contract(case: Any) -> None:
    """Building, symbolic and eager calls, fit, saving and mixed precision work.

    Name, dtype policy and every argument survive `from_config(get_config())`.
    """
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
    layer = layer_class(**arguments, name="mine", dtype="mixed_bfloat16")
    config = layer.get_config()
    again = layer_class.from_config(config)
    assert again.get_config() == config
    assert (again.name, again.dtype_policy.name) == ("mine", "mixed_bfloat16")
    assert set(arguments) <= set(config)


def test_every_public_layer_is_held_to_the_contract() -> None:
    """A layer that is added without a row above fails here."""
    assert {case[0].__name__ for case in CONTRACTS} == set(layers.__all__)


def test_bad_arguments_are_refused() -> None:
    """A wrong argument or image gets one sentence with what was received."""
    for make, message in BAD_ARGUMENTS:
        with pytest.raises(ValueError, match=message):
            make()
    for layer, shape, message in BAD_SHAPES:
        with pytest.raises(ValueError, match=message):
            layer(np.zeros(shape, np.float32))
    # Keras adds the call's arguments to errors raised in `call`; ours are raised before it.
    with pytest.raises(ValueError, match="multiples of patch_size") as caught:
        layers.Patches(16).compute_output_shape((1, 30, 32, 3))
    assert "\n" not in str(caught.value)


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
        plain, dropping = (layers.TransformerBlock(2, 16), layers.TransformerBlock(2, 16, **rate))
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
