"""Tests of what keras_vit.model may depart in from the published networks."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import conftest
import keras
import numpy as np
import published
import pytest
import variants_oracle
from conftest import FLOAT32, TINY, answers, images_for, made, randomize, whole

import keras_vit
from keras_vit.layers.positions import PositionedLayer, rotary_angles
from keras_vit.model import VisionTransformer
from keras_vit.weights.loading import load_weights
from keras_vit.weights.positions import CELLS, resample_variable

SQUARE = {"input_shape": (24, 24, 3)}
AVERAGE = {"pooling": "avg", "class_token": False}
# Oblong images unless said; the published network, every field alone, then with what it meets.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "representation": {"representation_dim": 16},
    "exact GELU": {"activation": "gelu"},
    "none": {"position_embedding": None},
    "learned in 2-D": {"position_embedding": "learned_2d"},
    "learned in 2-D, square, average": {
        **SQUARE, **AVERAGE, "position_embedding": "learned_2d"
    },
    "sines": {"position_embedding": "sincos_2d"},
    "sines, square": {**SQUARE, "position_embedding": "sincos_2d", "hidden_dim": 36},
    "relative": {"position_embedding": "relative"},
    "relative, square, average": {**SQUARE, **AVERAGE, "position_embedding": "relative"},
    "every block": {"position_placement": "every_block"},
    "every block, shared": {"position_placement": "every_block_shared"},
    "every block, learned in 2-D": {
        "position_placement": "every_block", "position_embedding": "learned_2d"
    },
    "every block, sines, shared": {
        "position_placement": "every_block_shared", "position_embedding": "sincos_2d"
    },
    "registers": {"num_registers": 3},
    "registers, average": {"num_registers": 3, "pooling": "avg"},
    "token beside average": {"num_registers": 1, "pooling": "token_avg"},
    "registers alone": {**AVERAGE, "num_registers": 1, "position_embedding": "relative"},
    "layer scale": {"layer_scale": 0.1},
    "query and key norm": {"query_key_norm": True},
    "SwiGLU": {"activation": "swiglu"},
    "distillation token": {"distillation_token": True},
    "embedding norm": {"embedding_norm": True},
    "embedding norm, every block": {"embedding_norm": True, "position_placement": "every_block"},
    "norm after pooling": {"norm_after_pooling": True},
    "norm after pooling, average": {**AVERAGE, "norm_after_pooling": True},
    "norm after pooling, every token": {"norm_after_pooling": True, "pooling": None},
    "norm after attention pooling": {
        **AVERAGE, "norm_after_pooling": True, "pooling": "map", "pooling_heads": 4
    },
    "quick GELU": {"activation": "quick_gelu"},
    "rotary": {"rotary_period": 100.0, "position_embedding": None},
    "rotary, square, average": {**SQUARE, **AVERAGE, "rotary_period": 100.0},
    "rotary, counted": {**variants_oracle.COUNTED, "num_registers": 2},
    "rotary, relative": {
        "rotary_period": 100.0, "position_embedding": "relative", "query_key_norm": True
    },
    "all": variants_oracle.ALL,
    "all, relative": {**variants_oracle.ALL, "position_embedding": "relative"},
    "all, every block": {
        **variants_oracle.ALL, "position_embedding": "learned_2d",
        "position_placement": "every_block",
    },
    "modern": variants_oracle.MODERN,
}  # fmt: skip
CONFIGS = {
    name: dataclasses.replace(TINY, num_layers=2, **fields) for name, fields in VARIANTS.items()
}
PUBLISHED = ("plain", "representation", "exact GELU")
EVERYTHING = ("all, relative", "all, every block", "modern")
LEFT_OUT: list[tuple[str, dict[str, Any]]] = published.TABLES["left out"]
# One of the fields that a sentence about the variant has to name.
CHANGED = {
    "relative": "position_embedding",
    "all": "num_registers",
    "every block, shared": "position_placement",
}
# What no array shows, as it shows no GELU: a .weights.h5 file of these is that of another network.
UNSHOWN = (
    *("norm after pooling", "norm after pooling, average", "norm after attention pooling"),
    *("quick GELU", "rotary, square, average"),
)


@functools.cache
def model_of(name: str) -> VisionTransformer:
    """A variant with every weight random; tests must not change it."""
    return made(CONFIGS[name])


@functools.cache
def answer_of(name: str) -> np.ndarray:
    return answers(model_of(name), images_for(CONFIGS[name]))


def expected_logits(model: VisionTransformer) -> np.ndarray:
    arrays = variants_oracle.arrays(model)
    return variants_oracle.run(arrays, images_for(model.config), model.config).logits


@functools.cache
def expected_of(name: str) -> np.ndarray:
    return expected_logits(model_of(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_variant_equals_the_same_network_in_numpy(name: str) -> None:
    """Every variant answers as a float64 NumPy walk over its variables, and is counted right."""
    np.testing.assert_allclose(answer_of(name), expected_of(name), rtol=0, atol=FLOAT32)
    assert keras_vit.parameter_count(CONFIGS[name]) == model_of(name).count_params()


def test_the_comparison_sees_a_part_left_out() -> None:
    """Without what the variant adds, the logits are far away."""
    for name, wrong in LEFT_OUT:
        arrays = variants_oracle.arrays(model_of(name))
        for path in [path for path in arrays if path.startswith("pooling_norm/")]:
            arrays[path.replace("pooling", "encoder")] = arrays[path]
        config = dataclasses.replace(CONFIGS[name], **published.in_tuples(wrong))
        expected = variants_oracle.run(arrays, images_for(config), config).logits
        assert np.abs(answer_of(name) - expected).max() > 1e-3, (name, wrong)


@pytest.mark.parametrize("name", ["learned in 2-D", "sines", "relative", "rotary"])
def test_the_comparison_sees_rows_and_columns_exchanged(name: str) -> None:
    """Where the grid is read the wrong way round, the logits are far away."""
    model = model_of(name)
    arrays = variants_oracle.arrays(model)
    turned = dataclasses.replace(model.config, input_shape=(48, 32, 3))
    if name == "learned in 2-D":
        x, y = (f"patch_encoder/position_{axis}" for axis in "xy")
        arrays[x], arrays[y] = arrays[y], arrays[x]
    images = images_for(model.config)
    tokens = images.reshape(2, 4, 8, 6, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 6, 4, 8, 8, 3)
    same_tokens = tokens.transpose(0, 1, 3, 2, 4, 5).reshape(2, 48, 32, 3)
    expected = variants_oracle.run(arrays, same_tokens, turned).logits
    assert np.abs(answer_of(name) - expected).max() > 1e-3


@pytest.mark.parametrize("name", EVERYTHING)
def test_variant_computes_in_mixed_precision(name: str) -> None:
    """Under bfloat16 the answer is float32's to the precision of bfloat16, eager or compiled."""
    model = made(CONFIGS[name], dtype="mixed_bfloat16")
    images, expected = images_for(model.config), expected_of(name)
    for each in (model, model_of(name).copy(dtype="mixed_bfloat16")):
        answer = each(images)
        assert keras.backend.standardize_dtype(answer.dtype) == "float32"
        np.testing.assert_allclose(answer, expected, atol=0.05)
    predicted = model.predict(images, verbose=0)
    assert predicted.dtype == "float32"
    np.testing.assert_allclose(predicted, expected, atol=0.05)


@pytest.mark.parametrize("name", EVERYTHING)
def test_variant_is_saved_and_copied_bit_for_bit(name: str, tmp_path: Path) -> None:
    """`.keras`, `.weights.h5` and a copy have every variable, path and answer."""
    model = model_of(name)
    images = images_for(model.config)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    filled = VisionTransformer(model.config)
    filled.load_weights(tmp_path / "model.weights.h5")
    for again in (loaded, filled, model.copy()):
        assert [v.path for v in again.weights] == [v.path for v in model.weights]
        assert again.config == model.config
        np.testing.assert_array_equal(answers(again, images), answer_of(name))


def test_nothing_of_a_variant_is_in_a_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off means absent: no layer, no variable, and attention in the backend's own fused form."""
    model = VisionTransformer(TINY)
    names = {layer.name for layer in model._flatten_layers(include_self=False)}
    assert names == {
        *("images", "patches", "patch_encoder", "projection", "encoder_norm", "pooling", "head"),
        *(f"block_{index}" for index in range(TINY.num_layers)),
        *("attention_norm", "attention", "qkv", "out", "mlp_norm", "mlp", "fc1", "fc2"),
        *(model.get_layer(f"block_{index}").drop_path.name for index in range(TINY.num_layers)),
    }
    assert len(model.weights) == 4 + 12 * TINY.num_layers + 2 + 2
    monkeypatch.delattr("keras_vit.layers.attention.attention_weights")
    monkeypatch.delattr(PositionedLayer, "_parts")
    monkeypatch.delattr("keras_vit.layers.attention.rotate")
    monkeypatch.delattr("keras_vit.layers.block.draw_places")
    model(images_for(TINY))


@pytest.mark.parametrize("name", EVERYTHING)
def test_lora_adapts_every_variant(name: str) -> None:
    """At first it changes nothing; merged, a changed adapter computes the same."""
    images, adapted = images_for(CONFIGS[name]), keras_vit.lora(model_of(name), rank=2)
    np.testing.assert_allclose(answers(adapted, images), answer_of(name), atol=FLOAT32)
    answer = answers(randomize(adapted), images)
    assert np.abs(answer - answer_of(name)).max() > 1e-3
    merged = answers(keras_vit.merge_lora(adapted), images)
    np.testing.assert_allclose(merged, answer, atol=FLOAT32)


@pytest.mark.parametrize("name", EVERYTHING)
def test_features_come_on_the_grid(name: str) -> None:
    """Tokens as rows and columns of patches, without those before them; vectors as they are."""
    model = model_of(name)
    images, names = images_for(model.config), ("patch_encoder", "block_1", "pooling", "head")

    def both(images: Any) -> Any:
        return model.features(images, names), model.features(images, names, grid=True)

    plain, grid = whole(model, both)(images)
    (rows, columns), prefix = model.config.grid, model.config.num_prefix_tokens
    for token in names[:2]:
        assert grid[token].shape == (2, rows, columns, 24)
        for row, column in np.ndindex(rows, columns):
            expected = plain[token][:, prefix + row * columns + column]
            np.testing.assert_array_equal(grid[token][:, row, column], expected)
    for vector in names[2:]:
        np.testing.assert_array_equal(grid[vector], plain[vector])


def test_the_grid_of_a_model_without_pooling_has_its_logits() -> None:
    """Every token has logits there: they too come on the grid, and a stem's output stays."""
    config = dataclasses.replace(
        TINY, patch_size=2, resnet_layers=(), pooling=None, num_registers=1
    )
    model, images = made(config), images_for(config)
    names = ("stem", "head")
    features = whole(model, lambda x: model.features(x, names, grid=True))(images)
    assert features["stem"].shape == (2, 8, 12, 64)
    expected = answers(model, images)[:, 2:].reshape(2, 4, 6, 7)
    np.testing.assert_allclose(features["head"], expected, atol=FLOAT32)


@pytest.mark.full
@pytest.mark.parametrize("name", EVERYTHING)
def test_recomputed_gradients_are_the_kept_ones(name: str) -> None:
    """`remat` changes neither loss nor update; with every dropout in bfloat16 it learns."""
    kept = made(CONFIGS[name])
    thrifty = VisionTransformer(dataclasses.replace(kept.config, remat=True))
    thrifty.set_weights(kept.get_weights())
    random = dataclasses.replace(thrifty.config, **conftest.every_dropout(0.1))
    mixed = made(random, dtype="mixed_bfloat16")
    before = kept.get_weights()
    images, labels = images_for(kept.config), np.array([1, 2])
    for model in (kept, thrifty):
        model.compile(keras.optimizers.SGD(1.0), conftest.CROSS_ENTROPY)
        model.fit(images, labels, verbose=0)
    for old, one, two in zip(before, kept.weights, thrifty.weights, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5, err_msg=one.path)
        # The softmax does not see what is the same for all keys.
        if not one.path.endswith("key_norm/beta"):
            assert not np.array_equal(old, one), one.path
    keras.utils.set_random_seed(0)
    mixed.compile(keras.optimizers.SGD(0.1), conftest.CROSS_ENTROPY)
    losses = mixed.fit(images, labels, epochs=16, verbose=0).history["loss"]
    assert np.mean(losses[-4:]) < losses[0]


def test_fresh_variants_start_as_their_sources_say() -> None:
    """Factors at their value, tokens and tables small, and no two registers alike."""
    config = dataclasses.replace(
        CONFIGS["all, relative"], num_registers=8, hidden_dim=96, input_shape=(96, 96, 3)
    )
    model = VisionTransformer(config)
    arrays = variants_oracle.arrays(model)
    np.testing.assert_array_equal(arrays["block_0/attention_scale"], np.full(96, 0.5))
    np.testing.assert_array_equal(arrays["block_1/mlp_scale"], np.full(96, 0.5))
    assert not arrays["patch_encoder/class_token"].any()
    for path in ("patch_encoder/registers", "block_1/attention/relative_bias"):
        assert arrays[path].std() == pytest.approx(0.02, rel=0.1), path
    assert arrays["patch_encoder/distillation_token"].std() == pytest.approx(0.02, rel=0.3)
    registers = arrays["patch_encoder/registers"][0]
    assert len(np.unique(registers, axis=0)) == 8
    assert (arrays["block_0/attention/query_norm/gamma"] == 1).all()


def test_angles_run_over_rows_then_columns_from_fast_to_slow() -> None:
    """Written out for a grid of 2x3: half of the pairs turn by the row, half by the column."""
    angles = rotary_angles(
        grid=(2, 3), size=8, period=100.0, reference_grid=(4, 3), offset=0.5
    ).reshape(2, 3, 4)
    np.testing.assert_allclose(angles[1, 2], [3.0, 0.3, 2.5, 0.25])
    np.testing.assert_allclose(angles[0, 0], [1.0, 0.1, 0.5, 0.05])
    angles = rotary_angles(grid=(2, 4), size=8, period=100.0).reshape(2, 4, 4)
    circle = 2 * np.pi
    np.testing.assert_allclose(angles[0, 0] / circle, [-0.5, -0.05, -0.75, -0.075])
    np.testing.assert_allclose(angles[1, 2] / circle, [0.5, 0.05, 0.25, 0.025])


def test_dropout_of_attention_leaves_rotation_in() -> None:
    """Where weights are dropped, they are those of turned queries: the mean comes near."""
    config = dataclasses.replace(CONFIGS["rotary"], num_layers=1, attention_dropout_rate=0.05)
    keras.utils.set_random_seed(0)
    model = made(config)
    still = model.copy(config=dataclasses.replace(config, rotary_period=None))
    tokens = np.random.default_rng(0).standard_normal((1, config.num_tokens, 24)) * 3
    attention, unturned = (each.get_layer("block_0").attention for each in (model, still))
    exact, without = (np.asarray(f(tokens.astype(np.float32))) for f in (attention, unturned))
    many = np.repeat(tokens, 400, axis=0).astype(np.float32)
    mean = np.asarray(attention(many, training=True)).mean(axis=0)
    assert np.abs(mean - exact[0]).max() < 0.2 * np.abs(without - exact).max()


@pytest.mark.parametrize(
    ("shape", "method"), [((48, 40, 3), "original"), ((16, 56, 3), "bilinear")]
)
def test_resized_variants_are_the_same_networks_on_another_grid(shape: Any, method: Any) -> None:
    """Tables of every kind are resampled, sines and turns computed anew; all else is copied."""
    for name, config in CONFIGS.items():
        model = model_of(name)
        resized = keras_vit.resize(model, shape, positions=method)
        assert resized.config == dataclasses.replace(config, input_shape=shape)
        assert resized.name == model.name
        for old, new in zip(model.weights, resized.weights, strict=True):
            value, kind = keras.ops.convert_to_numpy(old), old.path.rsplit("/", 1)[-1]
            if kind in CELLS:
                grids = (config.grid, resized.config.grid)
                value = resample_variable(kind, value, *grids, method=method)
            np.testing.assert_array_equal(new, value, err_msg=f"{name}: {old.path}")
        answer = answers(resized, images_for(resized.config))
        expected = expected_logits(resized)
        np.testing.assert_allclose(answer, expected, rtol=0, atol=FLOAT32, err_msg=name)
    with pytest.raises(ValueError, match="keep the number of channels"):
        keras_vit.resize(model_of("plain"), (64, 48, 1))


def test_layouts_that_have_no_room_refuse_a_variant(tmp_path: Path) -> None:
    """Reading and writing both name the fields and say what to do instead."""
    plain = VisionTransformer(dataclasses.replace(TINY, num_layers=2))
    plain.save_weights(tmp_path / "plain.weights.h5")
    for name, field in CHANGED.items():
        model = model_of(name)
        model.save(tmp_path / "model.keras")
        for attempt in (
            lambda model=model: keras_vit.weights.save_npz(model, tmp_path / "model.npz"),
            lambda model=model: load_weights(model, tmp_path / "plain.weights.h5"),
            lambda: load_weights(plain, tmp_path / "model.keras"),
        ):
            message = f"the published network alone; save another with model.save.*{field}="
            with pytest.raises(ValueError, match=message):
                attempt()


def test_weights_of_a_variant_are_not_taken_for_a_published_network(tmp_path: Path) -> None:
    """The file alone does not say its config: other arrays must not fill a plain model."""

    @functools.cache
    def plain(width: int, number: int) -> VisionTransformer:
        fields: dict[str, Any] = ({}, {"pooling": "avg"}, AVERAGE)[number]
        return VisionTransformer(
            dataclasses.replace(TINY, num_layers=2, hidden_dim=width, **fields)
        )

    for name in [name for name in CONFIGS if name not in (*UNSHOWN, *PUBLISHED)]:
        file = tmp_path / f"{name}.weights.h5"
        model_of(name).save_weights(file)
        for number in range(3):
            with pytest.raises(ValueError, match=r"does not fit|does not say|holds no Vision"):
                load_weights(plain(CONFIGS[name].hidden_dim, number), file)
