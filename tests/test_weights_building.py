"""Tests of keras_vit.load: the model that a source describes, or a sentence why not."""

import contextlib
import dataclasses
import http.server
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
import safetensors.numpy
from conftest import TINY, VARIED, randomize

import keras_vit
from keras_vit.model import VisionTransformer
from keras_vit.weights.torch_layouts import torch_rows

MODERN = published.GOLDEN / "modern"


def copied(family: str, folder: Path) -> Path:
    """A copy of a family's folder that may be changed."""
    return Path(shutil.copytree(MODERN / family, folder / family))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "config.json") -> None:
    settings = json.loads((folder / name).read_text())
    change(settings)
    (folder / name).write_text(json.dumps(settings))


def test_a_known_model_type_with_another_networks_arrays_is_no_key_error(tmp_path: Path) -> None:
    """Every array of a plain file is needed: without any one of them there is a sentence."""
    folder = copied("timm_vit", tmp_path)
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    for name in arrays:
        rest = {key: value for key, value in arrays.items() if key != name}
        safetensors.numpy.save_file(rest, folder / "model.safetensors")
        if name in ("head.bias", "head.weight"):
            continue
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            keras_vit.load(folder)


CONFIGS = {
    "plain": TINY,
    "average beside a class token": dataclasses.replace(TINY, pooling="avg"),
    "exact GELU": dataclasses.replace(TINY, activation="gelu", layer_norm_epsilon=1e-12),
    "pixels": dataclasses.replace(TINY, image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 0.4, 0.3)),
    "one channel": dataclasses.replace(TINY, input_shape=(32, 48, 1), image_mean=(0.2,) * 1,
                                       image_std=(0.4,)),
    "hybrid": dataclasses.replace(
        TINY, input_shape=(32, 64, 3), patch_size=1, resnet_layers=(2, 1, 1)
    ),
    "dropout and probabilities": dataclasses.replace(
        TINY, dropout_rate=0.1, classifier_activation="sigmoid", include_preprocessing=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("suffix", [".keras", ".npz"])
def test_our_own_files_come_back_whole(name: str, suffix: str, tmp_path: Path) -> None:
    """What model.save and save_npz write is built again with every field of its config."""
    model = randomize(VisionTransformer(CONFIGS[name]))
    path = tmp_path / f"vit{suffix}"
    model.save(path) if suffix == ".keras" else keras_vit.weights.save_npz(model, path)
    again = keras_vit.load(path)
    assert again.config == model.config
    for variable, other in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(variable, other, err_msg=variable.path)


@pytest.mark.parametrize("fields", [{}, {"pooling": "map", "class_token": False}])
def test_a_foreign_npz_means_the_original(fields: dict[str, Any], tmp_path: Path) -> None:
    """Without companion: tanh, 1e-6, [-1, 1], heads from the arrays, a square grid."""
    config = dataclasses.replace(TINY, input_shape=(48, 48, 3), **fields)
    model = keras_vit.load(published.write(tmp_path / "a.npz", config), classifier_activation=None)
    expected = dataclasses.replace(config, include_preprocessing=True, antialias=False)
    assert model.config == expected


ASKED = [
    ({"classes": 4}, {"classes": 4}, (None, 4)),
    ({"include_top": False}, {"classes": None, "pooling": None}, (None, 17, 16)),
    ({"include_top": False, "pooling": "avg"}, {"pooling": "avg"}, (None, 16)),
    ({"input_shape": (32, 96, 3)}, {"input_shape": (32, 96, 3)}, (None, 7)),
    ({}, {"classifier_activation": "softmax", "include_preprocessing": True}, (None, 7)),
    ({"classifier_activation": None}, {"classifier_activation": None}, (None, 7)),
    ({"include_preprocessing": False}, {"include_preprocessing": False}, (None, 7)),
]


@pytest.mark.parametrize(("arguments", "fields", "shape"), ASKED)
def test_arguments_decide_over_the_source(
    arguments: dict[str, Any], fields: dict[str, Any], shape: tuple[Any, ...]
) -> None:
    """As the builders' do; the rest stays the source's, such as its pixels."""
    model = keras_vit.load(MODERN / "timm_deit", **arguments)
    assert {name: getattr(model.config, name) for name in fields} == fields
    assert model.output_shape == shape
    assert model.config.image_mean == (0.485, 0.456, 0.406)


def test_another_number_of_channels_is_refused() -> None:
    """By load and by a builder alike, whatever the pixels."""
    for family in ("timm_vit", "timm_deit"):
        with pytest.raises(ValueError, match=r"images of 3 channels.*input_shape=\(64, 64, 1\)"):
            keras_vit.load(MODERN / family, input_shape=(64, 64, 1))


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_a_compiled_models_optimizer_is_left_aside(suffix: str, tmp_path: Path) -> None:
    """What was trained and saved with its optimizer gives its weights."""
    model = randomize(VisionTransformer(TINY))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    path = tmp_path / f"vit{suffix}"
    (model.save if suffix == ".keras" else model.save_weights)(path)
    again = VisionTransformer(TINY)
    keras_vit.weights.load(again, path)
    for variable, other in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(variable, other, err_msg=variable.path)


def test_a_dtype_policy_is_taken() -> None:
    """Blocks in bfloat16, weights and head in float32."""
    model = keras_vit.load(MODERN / "timm_vit", dtype="mixed_bfloat16")
    assert model.get_layer("block_0").compute_dtype == "bfloat16"
    assert {weight.dtype for weight in model.weights} == {"float32"}


def test_a_builder_takes_a_folder_with_its_pixels(tmp_path: Path) -> None:
    """A builder is load and a check of sizes: DeiT through ViTTi16 has DeiT's pixels."""
    config = dataclasses.replace(
        keras_vit.variant("Ti/16"), input_shape=(32, 32, 3), classes=5, num_layers=12
    )
    arrays = timm_arrays(config)
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    shutil.copy(MODERN / "timm_deit" / "config.json", tmp_path / "config.json")
    sizes = {"num_heads": 3, "img_size": [32, 32]}
    edit(tmp_path, lambda settings: settings.update(model_args=sizes))
    model = keras_vit.ViTTi16(weights=tmp_path)
    assert (model.config.activation, model.config.image_std) == ("gelu", (0.229, 0.224, 0.225))
    with pytest.raises(ValueError, match="its hidden_dim is 192, the model's is 384"):
        keras_vit.ViTS16(weights=tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.warns(UserWarning, match=r"assumed activation='gelu', .*config\.json") as seen:
        assert keras_vit.ViTTi16(weights=tmp_path).config.image_std == (0.5, 0.5, 0.5)
    assert Path(seen[0].filename) == Path(__file__)


def timm_arrays(config: keras_vit.ViTConfig) -> dict[str, np.ndarray]:
    rows = torch_rows(config, rotary_layout=None)
    pairs = [pair for row in rows for pair in zip(row.names, row.shapes, strict=True)]
    return {name: np.full(shape, 0.01, np.float32) for name, shape in pairs}  # fmt: skip


CHANGED: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "an unknown name": (
        "timm_vit",
        lambda c: c.update(architecture="vit_base_patch16_rpn_224"),
        "timm's 'vit_base_patch16_rpn_224' are not known.*keras_vit.weights.load",
    ),
    "no name": ("timm_vit", lambda c: c.pop("architecture"), "names no timm architecture"),
    "no model type": ("hf_vit_cls", lambda c: c.pop("model_type"), "names no model_type"),
    "another model type": ("hf_vit_cls", lambda c: c.update(model_type="yolos"), "type 'yolos'"),
    "another pooler": ("hf_vit_model", lambda c: c.update(pooler_act="relu"), "pooler_act"),
    "an activation that is not there": (
        "timm_vit",
        lambda c: c["model_args"].update(act_layer="relu"),
        "activation is 'relu'",
    ),
    "another normalisation": (
        "timm_vit",
        lambda c: c["model_args"].update(norm_layer="rmsnorm"),
        "norm_layer='rmsnorm'",
    ),
    "another pooling": ("timm_vit", lambda c: c["model_args"].update(global_pool="max"), "'max'"),
    "a pooling without its arrays": (
        "timm_vit",
        lambda c: c["model_args"].update(global_pool="map"),
        "no attention pooling",
    ),
    "heads that do not divide": (
        "timm_vit",
        lambda c: c["model_args"].update(num_heads=3),
        "says 3 heads, which do not divide the width",
    ),
    "no heads": ("hf_vit_cls", lambda c: c.pop("num_attention_heads"), "say its num_heads"),
    "settings in another shape": ("timm_vit", lambda c: c.update(model_args=[1]), "model_args"),
    "a mean for other channels": (
        "timm_vit",
        lambda c: c["pretrained_cfg"].update(mean=[0.1, 0.2], std=[0.5, 0.5]),
        r"model\.safetensors: image_mean must be a tuple of 3",
    ),
    "a mean in words": (
        "timm_vit",
        lambda c: c["pretrained_cfg"].update(mean="imagenet"),
        "image_mean is 'imagenet'",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_is_not_known_is_refused(case: str, tmp_path: Path) -> None:
    """Settings that mean another network, or none, are one sentence with the file's path."""
    family, change, message = CHANGED[case]
    folder = copied(family, tmp_path)
    edit(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        keras_vit.load(folder)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_fills_a_model_of_a_known_config(tmp_path: Path) -> None:
    """The way on that the refusal names: the model's own config says what the file does not."""
    folder = copied("timm_vit", tmp_path)
    right = keras_vit.load(folder)
    edit(folder, lambda settings: settings.update(architecture="vit_of_tomorrow"))
    model = VisionTransformer(right.config)
    keras_vit.weights.load(model, folder / "model.safetensors")
    for variable, other in zip(right.weights, model.weights, strict=True):
        np.testing.assert_array_equal(variable, other)


def test_a_file_without_settings_is_not_guessed(tmp_path: Path) -> None:
    """Nobody knows the heads of a lone timm file; of transformers the pixels are assumed aloud."""
    folder = copied("timm_vit", tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"does not say its num_heads.*keras_vit\.weights"):
        keras_vit.load(folder)
    folder = copied("hf_vit_cls", tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.warns(UserWarning, match=r"assumed image_mean=.*put .*preprocessor_config") as seen:
        keras_vit.load(folder)
    assert Path(seen[0].filename) == Path(__file__)
    VisionTransformer(TINY).save_weights(tmp_path / "vit.weights.h5")
    with pytest.raises(ValueError, match="does not say its resnet_layers and patch_size and num"):
        keras_vit.load(tmp_path / "vit.weights.h5")


PROCESSORS = [
    ({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)),
    ({"do_normalize": False}, (0.0,), (1.0,)),
    ({"rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 1.0}, (0.5,), (0.5,)),
    (
        {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3},
        (0.5,) * 3,
        (0.5,) * 3,
    ),
]


@pytest.mark.parametrize(("settings", "mean", "std"), PROCESSORS)
def test_pixels_of_an_image_processor(
    settings: dict[str, Any], mean: tuple[float, ...], std: tuple[float, ...], tmp_path: Path
) -> None:
    """Factor, mean, deviation and the two switches of transformers, in units of 1."""
    folder = copied("hf_vit_cls", tmp_path)
    edit(folder, lambda old: old.update(settings), "preprocessor_config.json")
    config = keras_vit.load(folder).config
    np.testing.assert_allclose(config.image_mean, mean, rtol=1e-9)
    np.testing.assert_allclose(config.image_std, std, rtol=1e-9)


def other_numbers(folder: Path) -> dict[str, tuple[Path, keras_vit.ViTConfig]]:
    """Files, and the config of a model into which their weights belong."""
    deit = keras_vit.load(MODERN / "timm_deit").config
    exact = dataclasses.replace(TINY, activation="gelu", layer_norm_epsilon=1e-12)
    VisionTransformer(exact).save(folder / "exact.keras")
    keras_vit.weights.save_npz(VisionTransformer(exact), folder / "exact.npz")
    return {
        "timm": (MODERN / "timm_deit" / "model.safetensors", deit),
        "transformers": (
            MODERN / "hf_vit_cls" / "model.safetensors",
            keras_vit.load(MODERN / "hf_vit_cls").config,
        ),
        "keras": (folder / "exact.keras", exact),
        "companion": (folder / "exact.npz", exact),
        "published": (published.write(folder / "published.npz", TINY), TINY),
    }


DEPARTED: list[dict[str, Any]] = [
    {"activation": "swap"},
    {"layer_norm_epsilon": 2e-6},
    {"image_mean": (0.4, 0.5, 0.6)},
    {"image_std": (0.1, 0.1, 0.1)},
]


@pytest.mark.parametrize("kind", ["timm", "transformers", "keras", "companion", "published"])
def test_weights_of_other_numbers_are_refused(kind: str, tmp_path: Path) -> None:
    """Another activation, epsilon or scaling of pixels is a sentence; the model is as it was."""
    path, config = other_numbers(tmp_path)[kind]
    keras_vit.weights.load(VisionTransformer(config), path)
    swapped = "gelu" if config.activation == "gelu_tanh" else "gelu_tanh"
    for departed in DEPARTED:
        fields: dict[str, Any] = {
            name: swapped if v == "swap" else v for name, v in departed.items()
        }
        model = randomize(VisionTransformer(dataclasses.replace(config, **fields)))
        before = model.get_weights()
        (name,) = fields
        with pytest.raises(ValueError, match=rf"belongs to a model with {name}=.*keras_vit\.load"):
            keras_vit.weights.load(model, path)
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(new, old)


def test_equal_numbers_are_equal_however_they_are_written(tmp_path: Path) -> None:
    """0.5 for one channel is 0.5 for three; a mean that was rounded is the same mean."""
    path = published.write(tmp_path / "a.npz", TINY)
    near = (0.5 + 1e-9,)
    model = VisionTransformer(dataclasses.replace(TINY, image_mean=near, image_std=(0.5,)))
    keras_vit.weights.load(model, path)


def test_folders_hold_one_checkpoint(tmp_path: Path) -> None:
    """model.safetensors or model.keras, or the only file that can be read; otherwise a sentence."""
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint: put one there.*safetensors"):
        keras_vit.load(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"in parts \(pytorch_model\.bin\.index"):
        keras_vit.load(tmp_path)
    model = randomize(VisionTransformer(TINY))
    keras_vit.weights.save_npz(model, tmp_path / "a.npz")
    assert keras_vit.load(str(tmp_path)).config == TINY
    keras_vit.weights.save_npz(model, tmp_path / "b.npz")
    with pytest.raises(ValueError, match=r"several checkpoints \(a\.npz, b\.npz\)"):
        keras_vit.load(tmp_path)
    model.save(tmp_path / "model.keras")
    assert keras_vit.load(tmp_path).config == TINY


ERRORS = [
    ("nowhere", FileNotFoundError, "no file or folder 'nowhere'.*builders"),
    ("imagenet21k", FileNotFoundError, "Published names belong to builders"),
    ("hf://owner", ValueError, "A Hub address is hf://owner/name"),
]


@pytest.mark.parametrize(("source", "kind", "message"), ERRORS)
def test_sources_that_are_none(source: str, kind: type[Exception], message: str) -> None:
    """Each is one sentence that says what a source is."""
    with pytest.raises(kind, match=message):
        keras_vit.load(source)


def test_a_network_of_ours_that_no_layout_holds_names_keras(tmp_path: Path) -> None:
    """A departing .keras file is Keras' to load."""
    VisionTransformer(VARIED).save(tmp_path / "vit.keras")
    with pytest.raises(ValueError, match=r"keras\.saving\.load_model"):
        keras_vit.load(tmp_path / "vit.keras")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """A web server for the files of a folder."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, directory=str(folder), **options)

        def log_message(self, *arguments: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_url_brings_its_settings_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json and preprocessor_config.json are fetched from beside the weights, once."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    for family in ("hf_vit_msn", "timm_siglip_tanh"):  # the second has no preprocessor_config.json
        with served(MODERN) as address:
            url = f"{address}/{family}/model.safetensors"
            model = keras_vit.load(url)
        assert model.config == keras_vit.load(MODERN / family).config
    with served(MODERN) as address:
        assert keras_vit.load(f"{address}/hf_vit_msn/model.safetensors").config.num_heads == 2
