"""Tests of the other layouts: safetensors of PyTorch libraries, Keras' own files, and save_npz."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import published
import pytest
import safetensors.numpy
from conftest import TINY, assert_same_arrays, randomize

import keras_vit
from keras_vit.model import VisionTransformer
from keras_vit.weights.checkpoint import open_checkpoint

# The tiny models behind tests/golden/tiny_*.safetensors.
TORCH = dataclasses.replace(
    TINY, hidden_dim=32, mlp_dim=64, num_heads=2, num_layers=2, classes=5, activation="gelu",
    layer_norm_epsilon=1e-6,
)  # fmt: skip

SUFFIXES = (".weights.h5", ".keras", ".npz")
SQUARE = dataclasses.replace(TINY, input_shape=(48, 48, 3))  # no .npz says another grid
KINDS = {
    "plain": TINY,
    "square": SQUARE,
    "average": dataclasses.replace(SQUARE, pooling="avg", class_token=False),
    "attention pooling": dataclasses.replace(SQUARE, pooling="map", class_token=False),
    "representation": dataclasses.replace(SQUARE, representation_dim=9),
    "no classifier": dataclasses.replace(SQUARE, classes=None),
    "hybrid": dataclasses.replace(
        TINY, input_shape=(64, 64, 3), patch_size=1, resnet_layers=(2, 1, 1)
    ),
    "root alone": dataclasses.replace(
        TINY, input_shape=(64, 64, 3), patch_size=2, resnet_layers=()
    ),
    "twelve blocks": dataclasses.replace(SQUARE, num_layers=12),
    "average beside a class token": dataclasses.replace(TINY, pooling="avg"),
    "exact GELU": dataclasses.replace(TINY, activation="gelu", layer_norm_epsilon=1e-12),
    "pixels": dataclasses.replace(TINY, image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 0.4, 0.3)),
    "one channel": dataclasses.replace(
        TINY, input_shape=(32, 48, 1), image_mean=(0.2,), image_std=(0.4,)
    ),
    "dropout and probabilities": dataclasses.replace(
        SQUARE, dropout_rate=0.1, classifier_activation="sigmoid", include_preprocessing=True
    ),
}
# Those that the layout of an .npz cannot say.
NOT_SAID = ("plain", "average beside a class token", "exact GELU", "pixels", "one channel")
NOT_ORIGINAL: dict[str, dict[str, Any]] = {
    "activation='gelu'": {"activation": "gelu"},
    "layer_norm_epsilon=1e-05": {"layer_norm_epsilon": 1e-5},
    r"image_mean=\(0.1, 0.2, 0.3\), image_std=\(0.5, 0.5, 0.5\)": {"image_mean": (0.1, 0.2, 0.3)},
    "pooling='avg'": {"pooling": "avg"},
    "pooling='max'": {"pooling": "max"},
    "pooling=None": {"pooling": None},
    r"grid=\(4, 6\)": {"input_shape": TINY.input_shape},
}


def test_hugging_face_grid_comes_from_its_config(tmp_path: Path) -> None:
    """24 positions are no square: only config.json knows that they are 4 x 6, and the epsilon."""
    weights = shutil.copy(published.GOLDEN / "tiny_hf.safetensors", tmp_path / "model.safetensors")
    shutil.copy(published.GOLDEN / "tiny_hf_config.json", tmp_path / "config.json")
    checkpoint = open_checkpoint(weights)
    assert (checkpoint.grid, checkpoint.fields["layer_norm_epsilon"]) == ((4, 6), 1e-12)
    config = dataclasses.replace(TORCH, input_shape=(48, 48, 3), layer_norm_epsilon=1e-12)
    model = VisionTransformer(config)
    keras_vit.weights.load_weights(model, weights)
    assert model.get_layer("patch_encoder").position_embedding.shape == (1, 37, 32)


def test_bfloat16_is_read_exactly(tmp_path: Path) -> None:
    """Half-size files give the float32 of what they hold; NumPy's have raw pairs of bytes."""
    arrays = safetensors.numpy.load_file(published.GOLDEN / "tiny_timm.safetensors")
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    safetensors.numpy.save_file(halves, tmp_path / "model.safetensors")
    rows = {n: a.astype(ml_dtypes.bfloat16) for n, a in published.arrays(TORCH).items()}
    np.savez(tmp_path / "model.npz", **rows)
    for suffix, head in (("safetensors", halves["head.weight"].T), ("npz", rows["head/kernel"])):
        # The published files' activation, which .npz files mean.
        activation: Any = "gelu_tanh" if suffix == "npz" else "gelu"
        model = VisionTransformer(dataclasses.replace(TORCH, activation=activation))
        keras_vit.weights.load_weights(model, tmp_path / f"model.{suffix}")
        np.testing.assert_array_equal(model.get_layer("head").kernel, head.astype(np.float32))


def save(model: VisionTransformer, path: Path) -> None:
    if path.suffix == ".npz":
        keras_vit.weights.save_npz(model, path)
    else:
        (model.save if path.suffix == ".keras" else model.save_weights)(path)


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    """A file that ends early is a sentence with its path, whatever its format."""
    model = VisionTransformer(SQUARE)
    paths = [tmp_path / f"model{suffix}" for suffix in (".safetensors", *SUFFIXES)]
    shutil.copy(published.GOLDEN / "tiny_timm.safetensors", paths[0])
    for path in paths:
        if path != paths[0]:
            save(model, path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match="whole") as caught:
            open_checkpoint(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("received", NOT_ORIGINAL)
def test_an_npz_is_never_another_network(received: str, tmp_path: Path) -> None:
    """What its layout would be read as otherwise is refused, and no file written."""
    model = VisionTransformer(dataclasses.replace(SQUARE, **NOT_ORIGINAL[received]))
    message = rf"cannot say {received}; model\.save\(\"model\.keras\"\) writes"
    with pytest.raises(ValueError, match=message):
        keras_vit.weights.save_npz(model, tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_own_files_come_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """What Keras or save_npz writes fills an equal model, and is built again.

    Its config is in the .keras file alone. An optimizer in a file is left aside.
    """
    model = randomize(VisionTransformer(KINDS[kind]))
    if kind in ("plain", "hybrid"):
        model.compile("adam", "categorical_crossentropy")
        model.optimizer.build(model.trainable_variables)
    for suffix in SUFFIXES[:2] if kind in NOT_SAID else SUFFIXES:
        path = tmp_path / f"model{suffix}"
        save(model, path)
        filled = VisionTransformer(KINDS[kind])
        keras_vit.weights.load_weights(filled, path)
        built = filled if suffix == ".weights.h5" else keras_vit.load(path)
        assert built.config == model.config or suffix == ".npz"
        for again in (filled, built):
            assert_same_arrays(again.weights, model.weights)


def test_builder_takes_weights_alone(tmp_path: Path) -> None:
    """Classes and head of a file that Keras wrote decide what the builder leaves open."""
    model = randomize(keras_vit.ViTTi16(input_shape=(32, 32, 3), classes=4))
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    says = "assumed activation='gelu_tanh', layer_norm_epsilon=1e-06, image_mean"
    with pytest.warns(UserWarning, match=says):
        again = keras_vit.ViTTi16(weights=path)
    with pytest.warns(UserWarning, match=says):
        larger = keras_vit.ViTTi16(weights=path, input_shape=(48, 64, 3), classes=9)
    assert again.config == model.config
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    np.testing.assert_array_equal(again(pixels), model(pixels))
    assert larger.output_shape == (None, 9)


def test_other_files_are_not_checkpoints(tiny: VisionTransformer, tmp_path: Path) -> None:
    """Suffixes are listed; a `.keras` file of something else names the function that loads it."""
    (tmp_path / "model.pth").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"ends in \.npz, \.safetensors, .*\.weights\.h5, \.keras"):
        open_checkpoint(tmp_path / "model.pth")
    with pytest.raises(ValueError, match=r"an \.npz file. Received: '.*model\.h5'"):
        # NumPy would add the suffix.
        keras_vit.weights.save_npz(VisionTransformer(SQUARE), tmp_path / "model.h5")
    inputs = keras.Input((32, 48, 3))
    keras.Model(inputs, tiny(inputs)).save(tmp_path / "mine.keras")
    with pytest.raises(ValueError, match=r"holds a 'Functional'.*keras.saving.load_model"):
        open_checkpoint(tmp_path / "mine.keras")


def test_saved_names_and_shapes_are_the_originals(tmp_path: Path) -> None:
    """Those by which tests/test_golden.py makes its weights, as the original does; in float32."""
    for kind in ("representation", "attention pooling", "hybrid"):
        keras_vit.weights.save_npz(VisionTransformer(KINDS[kind]), tmp_path / "a.npz")
        with np.load(tmp_path / "a.npz", allow_pickle=False) as saved:
            found = {name: (saved[name].shape, saved[name].dtype) for name in saved}
        expected = published.arrays(KINDS[kind])
        assert found == {name: (a.shape, np.dtype("f4")) for name, a in expected.items()}
