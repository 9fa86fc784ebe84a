"""Tests of keras_vit.layers.dense and composite: quantisation and LoRA through Keras' own API."""

import dataclasses
from pathlib import Path

import keras
import numpy as np
import pytest
from conftest import FLOAT32, TINY, VARIED, answers, images_for, randomize, reloaded

from keras_vit import VisionTransformer, layers
from keras_vit.layers.dense import MODES

# Keras says of each layer without matrix products that it has no such method.
pytestmark = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")

# Least cosine similarity of the answers before and after; random weights are the hardest to round.
NEAR = {"int8": 0.999, "int4": 0.95, "float8": 0.99}
CONFIGS = {
    "representation": dataclasses.replace(
        TINY, num_layers=1, representation_dim=8, dropout_rate=0.1, drop_path_rate=0.1
    ),
    "map": dataclasses.replace(
        TINY, num_layers=1, pooling="map", class_token=False, representation_dim=8
    ),
    "varied": VARIED,
}


def dense_layers(model: keras.Model) -> list[keras.layers.Dense]:
    return [each for each in model._flatten_layers() if isinstance(each, keras.layers.Dense)]


@pytest.mark.parametrize("name", ["map", pytest.param("varied", marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", MODES)
def test_every_dense_layer_is_quantised_and_comes_back(
    mode: str, name: str, tmp_path: Path
) -> None:
    """Answers stay near, and a file, a weights file and a clone give the quantised one's bits."""
    model, images = randomize(VisionTransformer(CONFIGS[name])), images_for(TINY, 4)
    before = answers(model, images)
    model.predict(images, verbose=0)  # a function that must not be used again
    model.quantize(mode)
    assert {layer.quantization_mode for layer in dense_layers(model)} == {mode}
    after = answers(model, images)
    cosine = (before * after).sum() / np.linalg.norm(before) / np.linalg.norm(after)
    assert NEAR[mode] < cosine < 1 - 1e-7
    np.testing.assert_allclose(model.predict(images, verbose=0), after, atol=FLOAT32)
    loaded = reloaded(model, tmp_path)
    assert type(loaded) is VisionTransformer
    np.testing.assert_array_equal(answers(loaded, images), after)
    model.save_weights(tmp_path / "model.weights.h5")
    for copy in (
        VisionTransformer.from_config(model.get_config()),
        keras.models.clone_model(model),
    ):
        copy.load_weights(tmp_path / "model.weights.h5")
        np.testing.assert_array_equal(answers(copy, images), after)


@pytest.mark.parametrize("mode", [None, "int8"])
def test_adapted_layers_train_and_come_back(mode: str | None, tmp_path: Path) -> None:
    """Keras' own `enable_lora` on every layer: what trains, and the same bits from a file."""
    model, images = randomize(VisionTransformer(CONFIGS["representation"])), images_for(TINY, 4)
    if mode is not None:
        model.quantize(mode, filters="block_")
    inner = [layer for layer in dense_layers(model) if "block_" in layer.path]
    before = answers(model, images)
    for layer in inner:
        layer.enable_lora(2, lora_alpha=6)
    np.testing.assert_allclose(answers(model, images), before, atol=FLOAT32)
    model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy")
    model.fit(images, np.arange(4), verbose=0)
    after = answers(model, images)
    assert np.abs(after - before).max() > 1e-3
    thin = [v for layer in inner for v in (layer.lora_kernel_a, layer.lora_kernel_b)]
    assert all(np.abs(v).max() > 0 for v in thin)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(answers(loaded, images), after)
    paths = [v.path for v in loaded.trainable_variables]
    assert "block_0/attention/qkv/lora_kernel_a" in paths
    assert "block_0/attention/qkv/kernel" not in paths


def test_layers_in_a_model_of_the_users_come_back_too(tmp_path: Path) -> None:
    """Blocks, encoders and pooling in a functional model remember their dense layers."""
    x = inputs = keras.Input((16, 16, 3))
    for layer in (
        layers.Patches(8),
        layers.PatchEncoder(8),
        layers.TransformerBlock(2, 16),
        layers.AttentionPooling(2, 16),
        layers.TokenDense(3, activation="tanh"),
    ):
        x = layer(x)
    model = randomize(keras.Model(inputs, x))
    images = images_for(TINY, 4)[:, :16, :16]
    model.quantize("int8")
    model.layers[3].mlp.fc1.enable_lora(2)
    after = answers(model, images)
    loaded = reloaded(model, tmp_path)
    np.testing.assert_array_equal(answers(loaded, images), after)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(answers(clone, images), after)


def test_weights_from_before_adaptation_load_into_an_adapted_layer(tmp_path: Path) -> None:
    """They answer as they did: the product of the low-rank matrices becomes zero."""
    plain, images = randomize(VisionTransformer(TINY)), images_for(TINY, 4)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = randomize(VisionTransformer(TINY), seed=1)
    qkv = model.get_layer("block_0").attention.qkv
    qkv.enable_lora(2, b_initializer="ones")
    model.load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_allclose(answers(model, images), answers(plain, images), atol=FLOAT32)
    assert np.abs(qkv.lora_kernel_a).max() > 0  # could train on


def test_what_needs_calibration_and_other_models_configs_are_refused() -> None:
    """Errors say which modes there are, and that there is no such dense layer."""
    layer = layers.TokenDense(4)
    layer.build((None, 4))
    with pytest.raises(ValueError, match=r"int8.*float8.*calibration.*'gptq'"):
        layer.quantize("gptq", config=keras.quantizers.GPTQConfig(dataset=["a"], tokenizer=str))
    model = VisionTransformer(CONFIGS["map"])
    config = {**model.get_config(), "dense": {"99": {"lora_rank": 1, "lora_alpha": 1}}}
    with pytest.raises(ValueError, match="changes dense layer 99 of 'vit'"):
        VisionTransformer.from_config(config)
