"""Tests of the other layouts: safetensors of PyTorch libraries, Keras' own files, and save_npz."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import published
import pytest
import safetensors.numpy
from conftest import TINY, randomize

import keras_vit
from keras_vit.model import VisionTransformer
from keras_vit.weights.checkpoint import open_checkpoint

# The tiny models behind tests/golden/tiny_*.safetensors.
TORCH = keras_vit.ViTConfig(
    input_shape=(32, 48, 3),
    patch_size=8,
    hidden_dim=32,
    mlp_dim=64,
    num_heads=2,
    num_layers=2,
    classes=5,
    activation="gelu",
)
TORCH_LOGITS = np.load(published.GOLDEN / "tiny_safetensors_logits.npz")

KINDS = {
    "plain": TINY,
    "average": dataclasses.replace(TINY, pooling="avg", class_token=False),
    "attention pooling": dataclasses.replace(TINY, pooling="map", class_token=False),
    "representation": dataclasses.replace(TINY, representation_dim=9),
    "no classifier": dataclasses.replace(TINY, classes=None),
    "hybrid": dataclasses.replace(
        TINY, input_shape=(32, 64, 3), patch_size=1, resnet_layers=(2, 1, 1)
    ),
    "root alone": dataclasses.replace(
        TINY, input_shape=(32, 64, 3), patch_size=2, resnet_layers=()
    ),
    "twelve blocks": dataclasses.replace(TINY, num_layers=12),
}


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    """The folder that transformers' `save_pretrained` writes."""
    shutil.copy(published.GOLDEN / "tiny_hf.safetensors", tmp_path / "model.safetensors")
    shutil.copy(published.GOLDEN / "tiny_hf_config.json", tmp_path / "config.json")
    return tmp_path / "model.safetensors"


def logits(model: keras.Model) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(model(published.images(TORCH))))


def test_hugging_face_logits(hugging_face: Path) -> None:
    """The library's own logits, with the epsilon and GELU of its config.json."""
    fields = open_checkpoint(hugging_face).fields
    assert (fields["layer_norm_epsilon"], fields["activation"]) == (1e-12, "gelu")
    model = VisionTransformer(dataclasses.replace(TORCH, layer_norm_epsilon=1e-12))
    keras_vit.weights.load(model, hugging_face)
    np.testing.assert_allclose(logits(model), TORCH_LOGITS["hf"], rtol=0, atol=1e-5)


def test_timm_logits() -> None:
    """timm's own logits from its file."""
    model = VisionTransformer(TORCH)
    keras_vit.weights.load(model, published.GOLDEN / "tiny_timm.safetensors")
    np.testing.assert_allclose(logits(model), TORCH_LOGITS["timm"], rtol=0, atol=1e-5)


def test_torch_comparison_can_fail() -> None:
    """The wrong GELU is further away than the tolerance."""
    model = VisionTransformer(dataclasses.replace(TORCH, activation="gelu_tanh"))
    keras_vit.weights.load(model, published.GOLDEN / "tiny_timm.safetensors")
    assert np.abs(logits(model) - TORCH_LOGITS["timm"]).max() > 1e-5


def test_hugging_face_grid_comes_from_its_config(hugging_face: Path) -> None:
    """24 positions are no square: only config.json knows that they are 4 x 6."""
    assert open_checkpoint(hugging_face).grid == (4, 6)
    config = dataclasses.replace(TORCH, input_shape=(48, 48, 3), layer_norm_epsilon=1e-12)
    model = VisionTransformer(config)
    keras_vit.weights.load(model, hugging_face)
    assert model.get_layer("patch_encoder").position_embedding.shape == (1, 37, 32)


def test_hugging_face_base_model_has_a_representation_layer(tmp_path: Path) -> None:
    """`ViTModel` has no prefix, and its pooler is the paper's representation layer."""
    arrays = safetensors.numpy.load_file(published.GOLDEN / "tiny_hf.safetensors")
    body = {n.removeprefix("vit."): a for n, a in arrays.items() if n.startswith("vit.")}
    generator = np.random.default_rng(0)
    body["pooler.dense.weight"] = generator.standard_normal((32, 32)).astype(np.float32)
    body["pooler.dense.bias"] = generator.standard_normal(32).astype(np.float32)
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(body, path)
    assert open_checkpoint(path).fields["representation_dim"] == 32
    config = dataclasses.replace(TORCH, classes=None, layer_norm_epsilon=1e-12)
    token, pooled = (
        VisionTransformer(dataclasses.replace(config, representation_dim=width))
        for width in (None, 32)
    )
    keras_vit.weights.load(token, path)
    keras_vit.weights.load(pooled, path)
    kernel, bias = body["pooler.dense.weight"], body["pooler.dense.bias"]
    expected = np.tanh(logits(token) @ kernel.T + bias)
    np.testing.assert_allclose(logits(pooled), expected, atol=1e-5)


def test_unknown_activation_is_refused(hugging_face: Path) -> None:
    """A ViT with another activation is not silently another model."""
    settings = json.loads((hugging_face.parent / "config.json").read_text())
    settings["hidden_act"] = "relu"
    (hugging_face.parent / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="activation is 'relu'"):
        open_checkpoint(hugging_face)


def test_bfloat16_safetensors_are_read_exactly(tmp_path: Path) -> None:
    """Half-size files give the float32 of what they hold."""
    arrays = safetensors.numpy.load_file(published.GOLDEN / "tiny_timm.safetensors")
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    safetensors.numpy.save_file(halves, tmp_path / "model.safetensors")
    model = VisionTransformer(TORCH)
    keras_vit.weights.load(model, tmp_path / "model.safetensors")
    head = keras.ops.convert_to_numpy(model.get_layer("head").kernel)
    np.testing.assert_array_equal(head, halves["head.weight"].astype(np.float32).T)


def damaged(path: Path, folder: Path) -> Path:
    content = bytearray(path.read_bytes())
    (folder / path.name).write_bytes(content[: len(content) // 2])
    return folder / path.name


@pytest.mark.parametrize("suffix", [".safetensors", ".weights.h5", ".keras", ".npz"])
def test_half_a_file_is_refused(suffix: str, tiny: VisionTransformer, tmp_path: Path) -> None:
    """A file that ends early is a sentence with its path, whatever its format."""
    whole = tmp_path / f"model{suffix}"
    if suffix == ".safetensors":
        shutil.copy(published.GOLDEN / "tiny_timm.safetensors", whole)
    elif suffix == ".npz":
        keras_vit.weights.save_npz(tiny, whole)
    else:
        (tiny.save if suffix == ".keras" else tiny.save_weights)(whole)
    (tmp_path / "half").mkdir()
    half = damaged(whole, tmp_path / "half")
    with pytest.raises(ValueError, match="whole") as caught:
        open_checkpoint(half)
    assert str(half) in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".weights.h5", ".keras", ".npz"])
def test_own_files_come_back_bit_for_bit(kind: str, suffix: str, tmp_path: Path) -> None:
    """What Keras or save_npz writes is read by our tables into the identical model."""
    model = randomize(VisionTransformer(KINDS[kind]))
    path = tmp_path / f"model{suffix}"
    save = {".weights.h5": model.save_weights, ".keras": model.save}
    save.get(suffix, lambda target: keras_vit.weights.save_npz(model, target))(path)
    again = VisionTransformer(KINDS[kind])
    keras_vit.weights.load(again, path)
    for variable, other in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(variable, other, err_msg=variable.path)


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_builder_takes_keras_files(suffix: str, tmp_path: Path) -> None:
    """Classes and head of a file that Keras wrote decide what the builder leaves open."""
    model = randomize(keras_vit.ViTTi16(input_shape=(32, 32, 3), classes=4))
    path = tmp_path / f"model{suffix}"
    (model.save if suffix == ".keras" else model.save_weights)(path)
    says = "assumed activation='gelu_tanh', layer_norm_epsilon=1e-06, image_mean"
    told = pytest.warns(UserWarning, match=says) if suffix == ".weights.h5" else _silence()
    with told:
        again = keras_vit.ViTTi16(weights=path)
    assert again.config == model.config
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    np.testing.assert_array_equal(again(pixels), model(pixels))
    with told:
        larger = keras_vit.ViTTi16(weights=path, input_shape=(48, 64, 3), classes=9)
    assert larger.output_shape == (None, 9)


def _silence() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()  # a warning is an error in these tests


def test_a_users_model_is_not_a_checkpoint(tiny: VisionTransformer, tmp_path: Path) -> None:
    """A `.keras` file of something else names the function that loads it."""
    inputs = keras.Input((32, 48, 3))
    keras.Model(inputs, tiny(inputs)).save(tmp_path / "mine.keras")
    with pytest.raises(ValueError, match=r"holds a 'Functional'.*keras.saving.load_model"):
        open_checkpoint(tmp_path / "mine.keras")


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    """The sentence lists the suffixes there are."""
    (tmp_path / "model.pth").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"ends in \.npz, \.safetensors, .*\.weights\.h5, \.keras"):
        open_checkpoint(tmp_path / "model.pth")


def test_saved_names_and_shapes_are_the_originals(tmp_path: Path) -> None:
    """The keys of the published ViT-B/16 file, and its shapes, in float32."""
    config = keras_vit.ViTConfig(num_layers=1, classes=21843, representation_dim=768)
    keras_vit.weights.save_npz(VisionTransformer(config), tmp_path / "a.npz")
    block = "Transformer/encoderblock_0"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert {arrays[name].dtype for name in arrays} == {np.dtype(np.float32)}
        shapes = {name: arrays[name].shape for name in arrays}
    heads = {
        f"{attention}/{part}/{leaf}": shape
        for part in ("query", "key", "value")
        for leaf, shape in (("kernel", (768, 12, 64)), ("bias", (12, 64)))
    }
    norms = {
        f"{name}/{leaf}": (768,)
        for name in (f"{block}/LayerNorm_0", f"{block}/LayerNorm_2", "Transformer/encoder_norm")
        for leaf in ("scale", "bias")
    }
    assert shapes == heads | norms | {
        "cls": (1, 1, 768),
        "embedding/kernel": (16, 16, 3, 768),
        "embedding/bias": (768,),
        "Transformer/posembed_input/pos_embedding": (1, 197, 768),
        f"{attention}/out/kernel": (12, 64, 768),
        f"{attention}/out/bias": (768,),
        f"{block}/MlpBlock_3/Dense_0/kernel": (768, 3072),
        f"{block}/MlpBlock_3/Dense_0/bias": (3072,),
        f"{block}/MlpBlock_3/Dense_1/kernel": (3072, 768),
        f"{block}/MlpBlock_3/Dense_1/bias": (768,),
        "pre_logits/kernel": (768, 768),
        "pre_logits/bias": (768,),
        "head/kernel": (768, 21843),
        "head/bias": (21843,),
    }


def test_save_npz_refuses_another_suffix(tiny: VisionTransformer, tmp_path: Path) -> None:
    """NumPy would add the suffix in silence."""
    with pytest.raises(ValueError, match=r"an \.npz file. Received: '.*model\.h5'"):
        keras_vit.weights.save_npz(tiny, tmp_path / "model.h5")


def test_resize_keeps_every_weight_but_the_positions(tiny: VisionTransformer) -> None:
    """A live model for another size has the same numbers; the given one is left alone."""
    larger = keras_vit.resize(tiny, (64, 48, 3))
    assert larger.config == dataclasses.replace(TINY, input_shape=(64, 48, 3))
    assert larger.name == tiny.name
    for old, new in zip(tiny.weights, larger.weights, strict=True):
        if old.path == "patch_encoder/position_embedding":
            table = keras.ops.convert_to_numpy(old)
            wanted = keras_vit.weights.resample_positions(table, (4, 6), (8, 6))
            np.testing.assert_array_equal(new, wanted)
        else:
            np.testing.assert_array_equal(new, old)
    with pytest.raises(ValueError, match="keep the number of channels"):
        keras_vit.resize(tiny, (64, 48, 1))
