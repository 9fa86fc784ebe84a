"""Tests of keras_vit.adaptation."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import safetensors.numpy
from conftest import CROSS_ENTROPY, FLOAT32, TINY, VARIED, randomize
from trainings import not_refused

import keras_vit
from keras_vit import VisionTransformer, adaptation, explain
from keras_vit.config import PositionPlacement

ALL = adaptation.TARGETS
HYBRID = dataclasses.replace(
    TINY, input_shape=(32, 32, 3), patch_size=2, resnet_layers=(1,), pooling="map",
    class_token=False, num_layers=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> VisionTransformer:
    """A random model; tests must not change it."""
    return randomize(VisionTransformer(TINY))


def trained(model: keras.Model, images: np.ndarray) -> keras.Model:
    """Fits a model to two images, so that its low-rank matrices are no longer zero."""
    model.compile(keras.optimizers.Adam(0.02), CROSS_ENTROPY, jit_compile=False)  # traces faster
    model.fit(images, np.array([0, 3]), epochs=3, verbose=0)
    return model


@pytest.fixture(scope="module")
def adapted(plain: VisionTransformer) -> Any:
    """It, adapted everywhere and trained; tests must not change it."""
    images = np.random.default_rng(2).uniform(-1, 1, (2, *TINY.input_shape)).astype(np.float32)
    return trained(keras_vit.lora(plain, rank=4, targets=ALL, alpha=3.0), images)


def test_nothing_changes_until_it_is_trained(plain: VisionTransformer, images: np.ndarray) -> None:
    """A fresh adapter answers as the plain model, bit for bit, and shares no weight with it."""
    for targets in (("qkv",), ("out", "fc2"), ALL, "fc1"):
        adapted = keras_vit.lora(plain, targets=targets)
        np.testing.assert_array_equal(adapted(images), plain(images))
        assert not {id(v) for v in adapted.variables} & {id(v) for v in plain.variables}


def test_only_adapters_and_head_train(plain: VisionTransformer, adapted: Any) -> None:
    """After `fit` every other weight has its bits, and every trainable one has moved."""
    old = {v.path: keras.ops.convert_to_numpy(v) for v in plain.weights}
    for variable in adapted.weights:
        is_thin = variable.path.endswith(("lora_kernel_a", "lora_kernel_b"))
        is_head = variable.path.startswith("head/")
        assert variable.trainable == (is_thin or is_head), variable.path
        is_same = not is_thin and np.array_equal(variable, old[variable.path])
        assert is_same == (not variable.trainable), variable.path
        assert not variable.path.endswith("kernel_b") or np.any(variable), variable.path


def test_the_share_of_trainable_parameters() -> None:
    """Of B/16 all four products at rank 8 train less than 5 per cent, in closed form."""
    config = keras_vit.variant("B/16")
    sides = {"qkv": (768, 2304), "out": (768, 768), "fc1": (768, 3072), "fc2": (3072, 768)}
    expected = 12 * sum(8 * sum(side) for side in sides.values()) + 769 * 1000
    with keras_vit.layers.random.skip_initialization():
        adapted = adaptation.LoRAVisionTransformer(config, rank=8, targets=ALL)
    assert adapted.count_params() == keras_vit.parameter_count(config) + expected - 769 * 1000
    actual = sum(np.prod(variable.shape) for variable in adapted.trainable_variables)
    assert actual == expected < 0.05 * keras_vit.parameter_count(config)


def test_merged_is_a_plain_model_with_the_sums(
    plain: VisionTransformer, adapted: Any, images: np.ndarray
) -> None:
    """Each kernel is W + alpha / rank A B in NumPy, and the answer is the adapted model's."""
    merged = keras_vit.merge_lora(adapted)
    assert type(merged) is VisionTransformer
    assert [v.path for v in merged.weights] == [v.path for v in plain.weights]
    np.testing.assert_allclose(merged(images), adapted(images), atol=FLOAT32)
    assert np.abs(keras.ops.convert_to_numpy(merged(images)) - plain(images)).max() > 0.1
    values = {v.path: keras.ops.convert_to_numpy(v) for v in adapted.weights}
    for path in [p.removesuffix("/lora_kernel_a") for p in values if p.endswith("lora_kernel_a")]:
        product = values[f"{path}/lora_kernel_a"].astype(float) @ values[f"{path}/lora_kernel_b"]
        values[f"{path}/kernel"] = values[f"{path}/kernel"] + product * 3 / 4
    other = VisionTransformer(TINY)
    for variable in other.weights:
        variable.assign(values[variable.path])
    np.testing.assert_allclose(merged(images), other(images), atol=FLOAT32)
    other.set_weights(merged.get_weights())
    np.testing.assert_array_equal(merged(images), other(images))


def test_gradients_are_those_of_the_merged_kernel(adapted: Any, images: np.ndarray) -> None:
    """They follow from the plain model's dW by the chain rule: dA = s dW B', dB = s A' dW."""
    import tensorflow as tf

    def gradients(model: keras.Model) -> dict[str, np.ndarray]:
        with tf.GradientTape() as tape:
            loss = CROSS_ENTROPY(np.array([1, 2]), model(images))
        slopes = tape.gradient(loss, [v.value for v in model.trainable_variables])
        pairs = zip(model.trainable_variables, slopes, strict=True)
        return {v.path: np.asarray(slope) for v, slope in pairs}

    actual, of_kernel = gradients(adapted), gradients(keras_vit.merge_lora(adapted))
    layers = adapted.adapted_layers()
    assert len(layers) == 12
    for layer in layers:
        slope = 3 / 4 * of_kernel[f"{layer.path}/kernel"]
        a, b = layer.lora_kernel_a, layer.lora_kernel_b
        np.testing.assert_allclose(actual[a.path], slope @ np.transpose(b), atol=1e-5)
        np.testing.assert_allclose(actual[b.path], np.transpose(a) @ slope, atol=1e-5)


def test_an_adapter_file_holds_the_adapter_alone(
    plain: VisionTransformer, adapted: Any, images: np.ndarray, tmp_path: Path
) -> None:
    """It is small, and on the same plain model it gives the same bits."""
    path = keras_vit.save_adapter(adapted, tmp_path / "a.safetensors")
    numbers = sum(int(np.prod(v.shape)) for v in adapted.trainable_variables)
    assert 4 * numbers < path.stat().st_size < 4 * numbers + 4000
    again = keras_vit.load_adapter(plain, path)
    np.testing.assert_array_equal(again(images), adapted(images))
    paths = [[v.path for v in model.trainable_variables] for model in (again, adapted)]
    assert paths[0] == paths[1]


def test_adapters_that_do_not_fit_or_are_damaged_are_refused(
    plain: VisionTransformer, tmp_path: Path
) -> None:
    """A variable that differs is named; a checksum sees a changed bit, rank or alpha.

    Numbers with a right checksum are held to what they may be, too.
    """
    path = keras_vit.save_adapter(keras_vit.lora(plain, rank=2), tmp_path / "a.safetensors")
    content = path.read_bytes()
    tensors = safetensors.numpy.load(content)

    def opened(changed: bytes, **fields: Any) -> Callable[[], object]:
        def call() -> object:
            path.write_bytes(changed)
            model = VisionTransformer(dataclasses.replace(TINY, **fields))
            return keras_vit.load_adapter(model, path)

        return call

    def made(rank: int, bias: float) -> bytes:
        settings = json.dumps({"rank": rank, "targets": ["qkv"], "alpha": None})
        changed = {**tensors, "head/bias": np.full(7, bias, np.float32)}
        checksum = adaptation._checksum(settings, changed)
        return safetensors.numpy.save(changed, metadata={"lora": settings, "sha256": checksum})

    key = "'block_3/attention/qkv/lora_kernel_a' and 1 more differ"
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    gone, other = tmp_path / "nothing.safetensors", tmp_path / "a.npz"
    other_alpha = content.replace(rb"\"alpha\": null", rb"\"alpha\": 8888")
    calls = [
        (opened(content, num_layers=4), f"another model: {key}"),
        (opened(content, hidden_dim=48), "another model"),
        (opened(content, classes=9), "another model: 'head/bias' and 1 more"),
        (opened(b"no"), "not an adapter|not a whole"),
        (opened(safetensors.numpy.save({"a": np.zeros(2)})), "not an adapter|not a whole"),
        (opened(flipped), r"a\.safetensors is damaged: .* own checksum"),
        (opened(other_alpha), "own checksum"),
        (opened(made(10**9, 0.0)), r"a\.safetensors is damaged: rank"),
        (opened(made(2, np.nan)), r"a\.safetensors is damaged: rank"),
        (lambda: keras_vit.load_adapter(plain, gone), "FileNotFoundError: .*nothing"),
        (lambda: keras_vit.save_adapter(keras_vit.lora(plain), other), r"\.safetensors file"),
    ]
    assert other_alpha != content
    assert not not_refused(calls, (ValueError, FileNotFoundError))


@pytest.mark.parametrize("config", [HYBRID, dataclasses.replace(TINY, classes=None), VARIED])
def test_other_models_are_adapted(config: keras_vit.ViTConfig) -> None:
    """Hybrids, attention pooling and feature models too; only blocks have low-rank matrices."""
    model = randomize(VisionTransformer(config))
    adapted = keras_vit.lora(model, targets=ALL, rank=2)
    images = np.ones((1, *config.input_shape), np.float32)
    # With LayerScale an adapted layer scales its result, another one its kernel.
    atol = 0 if config.layer_scale is None else FLOAT32
    np.testing.assert_allclose(adapted(images), model(images), rtol=0, atol=atol)
    assert len(adapted.adapted_layers()) == 4 * config.num_layers
    names = {v.path.rsplit("/", 1)[0] for v in adapted.trainable_variables}
    heads = {name for name in names if name.endswith("head")}
    assert len(heads) == (config.classes is not None) + config.distillation_token
    assert names == heads | {layer.path for layer in adapted.adapted_layers()}


@pytest.mark.full
def test_mixed_precision_and_explanation(plain: VisionTransformer, images: np.ndarray) -> None:
    """An adapted model trains in bfloat16, and its attention is that of the merged one."""
    mixed = VisionTransformer(TINY, dtype="mixed_bfloat16")
    mixed.set_weights(plain.get_weights())
    adapted = trained(keras_vit.lora(mixed, targets=ALL), images)
    merged = keras_vit.merge_lora(adapted)
    assert merged.get_layer("block_0").compute_dtype == "bfloat16"
    np.testing.assert_allclose(merged(images), adapted(images), atol=0.1)
    actual, expected = (explain.attention_weights(m, images) for m in (adapted, merged))
    np.testing.assert_allclose(actual, expected, atol=0.02)


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_what_cannot_be_adapted_or_merged_is_refused(plain: VisionTransformer) -> None:
    """The error says what is allowed, or the way."""
    layer = keras_vit.layers.TokenDense(4)
    with pytest.raises(ValueError, match="not built"):
        layer.enable_lora(2)
    layer.build((None, 4))
    layer.enable_lora(2)
    # Merging into whole numbers would round the adapter away.
    quantised = keras_vit.lora(plain, rank=2)
    quantised.quantize("int8")
    lora, merge, freeze = keras_vit.lora, keras_vit.merge_lora, keras_vit.freeze
    not_adapted = r"TypeError: .*keras_vit\.lora made.*VisionTransformer"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: lora(plain, targets=("qkv", "head")), r"some of qkv, out, fc1, fc2.*'head'"),
        (lambda: lora(plain, targets=()), r"targets=\(\)"),
        (lambda: lora(plain, rank=0), "from 1 to 24.*'block_0/attention/qkv'.*rank=0"),
        (lambda: lora(plain, rank=25), "rank=25"),
        (lambda: lora(keras.Sequential([plain])), "TypeError: .*inside your model.*Sequential"),
        (lambda: lora(lora(plain)), "adapted already"),
        (lambda: layer.enable_lora(2), "rank 2 already"),
        (lambda: merge(plain), not_adapted),
        (lambda: keras_vit.save_adapter(plain, "x"), not_adapted),
        (lambda: merge(quantised), "'block_0/attention/qkv' is quantised, so the adapter"),
        (lambda: freeze(plain, blocks=-1), "from 0 to 3.*blocks=-1"),
        (lambda: freeze(plain, blocks=4), "from 0 to 3.*blocks=4"),
    ]
    assert not not_refused(calls, (ValueError, TypeError))


def left_to_train(model: VisionTransformer, blocks: int) -> list[str]:
    """Freezes so many blocks; returns the layers that then train."""
    keras_vit.freeze(model, blocks)
    return [variable.path.split("/")[0] for variable in model.trainable_variables]


def test_positions_freeze_with_their_block() -> None:
    """Those of a block that trains do, those of all blocks freeze with the first.

    All before the blocks is frozen, the first norm too; last norm, pooling and classifier train.
    """
    names: dict[PositionPlacement, str] = {
        "every_block": "positions",
        "every_block_shared": "block",
    }
    for placement, name in names.items():
        model = VisionTransformer(dataclasses.replace(TINY, position_placement=placement))
        assert left_to_train(model, 1)[0] == f"{name}_1"
        assert left_to_train(model, 0)[0] == f"{name}_0"
    assert set(left_to_train(VisionTransformer(TINY), 2)) == {"block_2", "encoder_norm", "head"}
    rests: list[tuple[dict[str, Any], set[str]]] = [
        ({"pooling": "avg", "embedding_norm": True}, {"pooling_norm", "head"}),
        ({"pooling": "map"}, {"pooling", "pooling_norm", "head"}),
        ({"pooling": None}, {"head"}),
        ({"pooling": None, "representation_dim": 5}, {"representation", "head"}),
        ({"pooling": None, "classes": None}, set()),
    ]
    for fields, rest in rests:
        model = VisionTransformer(dataclasses.replace(TINY, norm_after_pooling=True, **fields))
        assert set(left_to_train(model, 3)) == rest, fields
        assert left_to_train(model, 0)[0] == "block_0"
