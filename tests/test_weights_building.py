"""Tests of keras_vit.load, or a sentence why not; and of the names of classes beside weights."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import download_rig as rig
import keras
import numpy as np
import published
import pytest
import safetensors.numpy
from conftest import FLOAT32, TINY, VARIED, assert_same_arrays, randomize
from published import MODERN, rewritten

import keras_vit
from keras_vit import preprocessing
from keras_vit.config import ProblemType
from keras_vit.model import VisionTransformer
from keras_vit.weights.torch_layouts import torch_rows

# "refused": a family, a part of its settings, its new values (None: there is none), and what is
# said then; "processors": settings, and the mean and deviation that they mean.
SETTINGS = json.loads((published.GOLDEN / "settings.json").read_text())
ENDINGS = [*zip(get_args(ProblemType), ("softmax", "sigmoid", "linear"), strict=True)]


def copied(family: str, folder: Path) -> Path:
    return Path(shutil.copytree(MODERN / family, folder / family))


def edit(
    folder: Path, values: dict[str, Any], *, part: str = "", name: str = "config.json"
) -> None:
    """Gives settings, or a part of them, other values; None takes one away."""
    settings = json.loads((folder / name).read_text())
    place = settings[part] if part else settings
    place.update(values)
    for key in [key for key, value in values.items() if value is None]:
        del place[key]
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


@pytest.mark.parametrize("fields", [{}, {"pooling": "map", "class_token": False}])
def test_a_foreign_npz_means_the_original(fields: dict[str, Any], tmp_path: Path) -> None:
    """That is tanh, 1e-6, [-1, 1], heads from the arrays, a square grid."""
    config = dataclasses.replace(TINY, input_shape=(48, 48, 3), **fields)
    model = keras_vit.load(published.write(tmp_path / "a.npz", config), classifier_activation=None)
    expected = dataclasses.replace(config, include_preprocessing=True, antialias=False)
    assert model.config == expected


def test_arguments_decide_over_the_source() -> None:
    """As the builders' do; the rest stays the source's, such as its pixels."""
    plain = keras_vit.load(MODERN / "timm_deit")
    assert plain.config.include_preprocessing
    assert plain.config.classifier_activation == "softmax"
    fields: dict[str, Any] = {"include_preprocessing": False, "classifier_activation": None}
    asked: dict[str, Any] = {**fields, "input_shape": (32, 96, 3), "classes": 4}
    model = keras_vit.load(MODERN / "timm_deit", dtype="mixed_bfloat16", **asked)
    assert model.config == dataclasses.replace(plain.config, **asked)
    assert model.config.image_mean == (0.485, 0.456, 0.406)
    assert model.get_layer("block_0").compute_dtype == "bfloat16"
    assert {weight.dtype for weight in model.weights} == {"float32"}


def test_another_number_of_channels_is_refused() -> None:
    """By load and by a builder alike, whatever the pixels."""
    for family in ("timm_vit", "timm_deit"):
        with pytest.raises(ValueError, match=r"images of 3 channels.*input_shape=\(64, 64, 1\)"):
            keras_vit.load(MODERN / family, input_shape=(64, 64, 1))


def test_a_builder_takes_a_folder_with_its_pixels(tmp_path: Path) -> None:
    """A builder is load and a check of sizes: DeiT through ViTTi16 has DeiT's pixels."""
    config = dataclasses.replace(
        keras_vit.variant("Ti/16"), input_shape=(32, 32, 3), classes=5, num_layers=12
    )
    rows = torch_rows(config, rotary_layout=None)
    pairs = [pair for row in rows for pair in zip(row.names, row.shapes, strict=True)]
    arrays = {name: np.full(shape, 0.01, np.float32) for name, shape in pairs}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    shutil.copy(MODERN / "timm_deit" / "config.json", tmp_path / "config.json")
    edit(tmp_path, {"model_args": {"num_heads": 3, "img_size": [32, 32]}})
    model = keras_vit.ViTTi16(weights=tmp_path)
    assert (model.config.activation, model.config.image_std) == ("gelu", (0.229, 0.224, 0.225))
    with pytest.raises(ValueError, match="its hidden_dim is 192, the model's is 384"):
        keras_vit.ViTS16(weights=tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.warns(UserWarning, match=r"assumed activation='gelu', .*config\.json") as seen:
        assert keras_vit.ViTTi16(weights=tmp_path).config.image_std == (0.5, 0.5, 0.5)
    assert Path(seen[0].filename) == Path(__file__)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    """Settings that mean another network, or none, are one sentence with the file's path."""
    for number, (family, part, values, message) in enumerate(SETTINGS["refused"]):
        folder = copied(family, tmp_path / str(number))
        edit(folder, values, part=part)
        with pytest.raises(ValueError, match=message) as caught:
            keras_vit.load(folder)
        assert "\n" not in str(caught.value)
        assert str(folder) in str(caught.value)


def test_an_unknown_name_fills_a_model_of_a_known_config(tmp_path: Path) -> None:
    """The way on that the refusal names: the model's own config says what the file does not."""
    folder = copied("timm_vit", tmp_path)
    right = keras_vit.load(folder)
    edit(folder, {"architecture": "vit_of_tomorrow"})
    model = VisionTransformer(right.config)
    keras_vit.weights.load_weights(model, folder / "model.safetensors")
    assert_same_arrays(model.weights, right.weights)


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
    with pytest.raises(ValueError, match="does not say its patch_size and num_heads and resnet"):
        keras_vit.load(tmp_path / "vit.weights.h5")


def test_pixels_of_an_image_processor(tmp_path: Path) -> None:
    """Factor, mean, deviation and the two switches of transformers, in units of 1."""
    for number, (settings, mean, std) in enumerate(SETTINGS["processors"]):
        folder = copied("hf_vit_cls", tmp_path / str(number))
        edit(folder, settings, name="preprocessor_config.json")
        config = keras_vit.load(folder).config
        np.testing.assert_allclose(config.image_mean, mean, rtol=1e-9)
        np.testing.assert_allclose(config.image_std, std, rtol=1e-9)


def other_numbers(folder: Path) -> list[tuple[Path, keras_vit.ViTConfig]]:
    """Files, and the config of a model into which their weights belong."""
    exact = dataclasses.replace(TINY, activation="gelu", layer_norm_epsilon=1e-12)
    VisionTransformer(exact).save(folder / "exact.keras")
    return [
        *(
            (MODERN / family / "model.safetensors", keras_vit.load(MODERN / family).config)
            for family in ("timm_deit", "hf_vit_cls")
        ),
        (folder / "exact.keras", exact),
        (published.write(folder / "published.npz", TINY), TINY),
    ]


def test_weights_of_other_numbers_are_refused(tmp_path: Path) -> None:
    """Another activation, epsilon or scaling of pixels is a sentence; the model is as it was.

    0.5 for one channel is 0.5 for three; a mean that was rounded is the same mean.
    """
    near: dict[str, Any] = {"image_mean": (0.5 + 1e-9,), "image_std": (0.5,)}
    path = published.write(tmp_path / "a.npz", TINY)
    keras_vit.weights.load_weights(VisionTransformer(dataclasses.replace(TINY, **near)), path)
    for path, config in other_numbers(tmp_path):
        keras_vit.weights.load_weights(VisionTransformer(config), path)
        fields: dict[str, Any] = {
            "activation": "gelu" if config.activation == "gelu_tanh" else "gelu_tanh",
            "layer_norm_epsilon": 2e-6,
            "image_mean": (0.4, 0.5, 0.6),
            "image_std": (0.1, 0.1, 0.1),
        }
        for name, value in fields.items():
            model = randomize(VisionTransformer(dataclasses.replace(config, **{name: value})))
            before = model.get_weights()
            message = rf"belongs to a model with {name}=.*keras_vit\.load"
            with pytest.raises(ValueError, match=message):
                keras_vit.weights.load_weights(model, path)
            assert_same_arrays(model.get_weights(), before, f"{path} {name}")


def test_folders_hold_one_checkpoint(tmp_path: Path) -> None:
    """model.safetensors or model.keras, or the only file that can be read; otherwise a sentence."""
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint: put one there.*safetensors"):
        keras_vit.load(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"in parts \(pytorch_model\.bin\.index"):
        keras_vit.load(tmp_path)
    config = dataclasses.replace(TINY, input_shape=(48, 48, 3))
    published.write(tmp_path / "a.npz", config)
    assert keras_vit.load(str(tmp_path)).config.grid == (6, 6)
    published.write(tmp_path / "b.npz", config)
    with pytest.raises(ValueError, match=r"several checkpoints \(a\.npz, b\.npz\)"):
        keras_vit.load(tmp_path)
    randomize(VisionTransformer(TINY)).save(tmp_path / "model.keras")
    assert keras_vit.load(tmp_path).config == TINY


def test_sources_that_are_none(tmp_path: Path) -> None:
    """Each is one sentence that says what a source is; a departing .keras file is for Keras."""
    VisionTransformer(VARIED).save(tmp_path / "vit.keras")
    for source, kind, message in (
        (str(tmp_path / "vit.keras"), ValueError, r"keras\.saving\.load_model"),
        ("nowhere", FileNotFoundError, "no file or folder 'nowhere'.*builders"),
        ("imagenet21k", FileNotFoundError, "Published names belong to builders"),
        ("hf://owner", ValueError, "A Hub address is hf://owner/name"),
    ):
        with pytest.raises(kind, match=message):
            keras_vit.load(source)


def test_a_url_brings_its_settings_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json and preprocessor_config.json are fetched from beside the weights, once."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with rig.serving() as server:
        for family in ("timm_siglip_tanh", "hf_vit_msn"):  # the first has no preprocessor_config
            for file in (MODERN / family).glob("*.[js]*"):
                server.files[f"/{family}/{file.name}"] = file.read_bytes()
            url = f"{server.url}/{family}/model.safetensors"
            assert keras_vit.load(url).config == keras_vit.load(MODERN / family).config
        count = len(server.requests)
        assert keras_vit.load(url).config.num_heads == 2
        assert len(server.requests) == count


WORDS = ["cat", "dog", "sea urchin", "owl", "fox", "hen", "crane"]
PAIRS = tuple((word, word) for word in WORDS)
NUMBERED = {str(place): word for place, word in enumerate(WORDS)}
MEANINGS = {"dog": "dog, Canis familiaris", "owl": 3, "stranger": "x"}
IMAGENET = preprocessing.class_labels(1000)
SYNONYMS = {str(i): f"{word.replace('_', ' ')}, other" for i, (_, word) in enumerate(IMAGENET)}
UNUSABLE: dict[str, Any] = {
    "placeholders": {str(place): f"LABEL_{place}" for place in range(7)},
    "none": None,
    "too few": {"0": "cat", "1": "dog"},
    "a gap": {str(place): "x" for place in range(1, 8)},
    "no text": {**NUMBERED, "3": ["owl"]},
    "nothing": {**NUMBERED, "3": " "},
    "a list of lists": [[]],
    "a number": 7,
}


def source(family: str, folder: Path, *, classes: int | None = None, **more: Any) -> Path:
    """A copy of a family's folder with more settings, and a classifier of another size."""

    def change(arrays: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
        settings.update(more)
        if classes is not None:
            head = "classifier" if "classifier.bias" in arrays else "head"
            width = arrays[f"{head}.weight"].shape[1]
            arrays[f"{head}.weight"] = np.ones((classes, width), np.float32)
            arrays[f"{head}.bias"] = np.ones(classes, np.float32)

    return rewritten(family, folder, change)


def test_names_of_transformers(tmp_path: Path) -> None:
    """id2label, by the numbers of the classes, whatever their order; each name has one line."""
    for family in ("hf_vit_cls", "hf_deit_cls", "hf_dinov2_cls", "hf_beit"):
        folder = source(family, tmp_path, id2label=dict(reversed(NUMBERED.items())))
        assert keras_vit.weights.labels(folder) == PAIRS
    many = {**NUMBERED, "0": "a\nb\t c\u2028"}
    folder = source("hf_vit_cls", tmp_path / "lines", id2label=many)
    assert keras_vit.weights.labels(folder) == (("a b c", "a b c"), *PAIRS[1:])


@pytest.mark.parametrize(("said", "activation"), ENDINGS)
def test_the_ending_of_transformers(said: str, activation: Any, tmp_path: Path) -> None:
    """problem_type decides, and is kept where logits are asked for."""
    images = np.random.default_rng(0).uniform(0, 255, (2, 64, 64, 3)).astype("float32")
    logits = np.asarray(keras_vit.load(MODERN / "hf_vit_cls", classifier_activation=None)(images))
    folder = source("hf_vit_cls", tmp_path, problem_type=said)
    model, bare = (keras_vit.load(folder, classifier_activation=x) for x in ("auto", None))
    assert (model.config.resolved_problem_type, bare.config.resolved_problem_type) == (said, said)
    np.testing.assert_allclose(bare(images), logits, atol=FLOAT32)
    expected = keras.activations.get(activation)(logits)
    np.testing.assert_allclose(model(images), expected, atol=FLOAT32)


def test_names_of_timm(tmp_path: Path) -> None:
    """label_names, described where label_descriptions has them; at the top or inside."""
    names: dict[str, Any] = {"label_names": WORDS, "label_descriptions": MEANINGS}
    expected = (PAIRS[0], ("dog", "dog, Canis familiaris"), *PAIRS[2:])
    inside = source("timm_deit", tmp_path / "inside", pretrained_cfg=dict(names))
    for folder in (inside, source("timm_deit", tmp_path, **names)):
        assert keras_vit.weights.labels(folder) == expected


def test_what_names_no_class_is_left_aside(tmp_path: Path) -> None:
    """The model loads as it does without; nobody says its classes then. Features are none."""
    assert keras_vit.weights.labels(MODERN / "hf_dinov2") is None
    for case, names in UNUSABLE.items():
        for family, field in (("hf_vit_cls", "id2label"), ("timm_deit", "label_names")):
            folder = source(family, tmp_path / case, **{field: names})
            assert keras_vit.weights.labels(folder) is None, (case, family)
            assert keras_vit.load(folder).config.classes == 7


def test_a_thousand_classes_are_imagenets(tmp_path: Path) -> None:
    """As decode_predictions takes them, where the source has no names of its own.

    transformers' files lack what ImageNet's folders are called; in another order they stay.
    """
    for family in ("hf_vit_cls", "timm_deit"):
        assert keras_vit.weights.labels(source(family, tmp_path, classes=1000)) == IMAGENET
    turned = {str(999 - i): SYNONYMS[str(i)] for i in range(1000)}
    fewer, named, other = (
        keras_vit.weights.labels(
            source("hf_vit_cls", tmp_path / str(place), classes=1000, id2label=names)
        )
        for place, names in enumerate((NUMBERED, SYNONYMS, turned))
    )
    # Names that do not fit are not replaced by others that are as likely wrong.
    assert fewer is None
    assert named == tuple((IMAGENET[i][0], SYNONYMS[str(i)]) for i in range(1000))
    assert other is not None
    assert other[0] == (turned["0"], turned["0"])
