"""Tests of the families of checkpoints of timm and transformers, each against its library."""

import dataclasses
import functools
import json
import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import FLOAT32, answers, assert_same_arrays
from published import GOLDEN, MODERN, rewritten

import keras_vit
from keras_vit.model import VisionTransformer
from keras_vit.weights.checkpoint import open_checkpoint
from keras_vit.weights.loading import load_weights
from keras_vit.weights.torch_layouts import torch_rows

FAMILIES = sorted(folder.name for folder in MODERN.iterdir() if folder.is_dir())
assert len(FAMILIES) == 42
TOLERANCE = 2e-5  # of the largest value; float noise stays below 3e-6

# transformers' CLIP gives its tokens before the last normalisation.
NOT_NORMALISED = ("hf_clip", "hf_clip_proj")
Arrays = dict[str, np.ndarray]
# "networks": a family, arrays that its file has besides or otherwise (their shape; None: it lacks
# them; text: a copy of that one), other settings, and what the sentence says. "assumed": a family
# whose file lies alone, what the model's config says, and what is assumed then. "wrong": a family,
# and other values of what comes from beside its arrays. "wrapped": what a model went through, and
# how that changes the names of its arrays, by regular expressions.
SETTINGS = json.loads((GOLDEN / "settings.json").read_text())


def reference(family: str) -> Arrays:
    with np.load(MODERN / family / "reference.npz") as arrays:
        return {name: arrays[name] for name in arrays}


def loaded(folder: Path, **arguments: Any) -> VisionTransformer:
    return keras_vit.load(folder, classifier_activation=None, **arguments)


def feature(model: VisionTransformer, images: np.ndarray, name: str) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(model.features(images, [name])[name]))


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def expected_answer(family: str) -> np.ndarray:
    numbers = reference(family)
    return numbers["logits" if "logits" in numbers else "pooled"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_its_librarys_numbers(family: str) -> None:
    """From uint8 pixels: sizes, parts, pixels, activation and epsilon all come from the folder."""
    numbers = reference(family)
    images, model = numbers["images"], loaded(MODERN / family)
    for name in {"logits", "pooled"} & set(numbers):
        assert difference(answers(model, images), numbers[name]) < TOLERANCE
    if "tokens" in numbers:
        is_last = model.config.norm_after_pooling or family in NOT_NORMALISED
        tokens = feature(model, images, "block_1" if is_last else "encoder_norm")
        assert difference(tokens, numbers["tokens"]) < TOLERANCE
    for name, head in (("cls_logits", "head"), ("distillation_logits", "distillation_head")):
        if name in numbers:
            assert difference(feature(model, images, head), numbers[name]) < TOLERANCE
    assert model.count_params() == keras_vit.parameter_count(model.config)


@pytest.mark.parametrize(("family", "fields"), SETTINGS["wrong"])
def test_the_comparison_can_fail(family: str, fields: dict[str, Any]) -> None:
    """Each of what comes from beside the arrays moves the numbers by more than the tolerance."""
    right = loaded(MODERN / family)
    config = right.config.to_dict() | fields
    wrong = VisionTransformer(keras_vit.ViTConfig.from_dict(config))
    wrong.set_weights(right.get_weights())
    found = answers(wrong, reference(family)["images"])
    assert difference(found, expected_answer(family)) > 5 * TOLERANCE


@pytest.mark.parametrize("family", ["timm_pe_core", "timm_sbb_rope"])
def test_the_comparison_sees_the_order_of_rotary_channels(family: str) -> None:
    """Query and key as they stand in the file turn otherwise."""
    right = loaded(MODERN / family)
    checkpoint = open_checkpoint(MODERN / family / "model.safetensors")
    rows = torch_rows(right.config, rotary_layout="halves")
    variables = {variable.path: variable for variable in right.weights}
    for row in rows:
        variables[row.path].assign(row.join(*(checkpoint.arrays[n].read() for n in row.names)))
    found = answers(right, reference(family)["images"])
    assert difference(found, expected_answer(family)) > 5 * TOLERANCE


def test_another_size_is_the_same_as_resizing() -> None:
    """Tables of positions and offsets are resampled, rotary positions computed anew."""
    for family in (
        *("hf_beit", "hf_clip_proj", "hf_deit_cls", "hf_dinov2_cls", "hf_dinov2_reg", "timm_deit3"),
        *("timm_deit_distilled", "timm_pe_core", "timm_sbb_rope"),
    ):
        model = loaded(MODERN / family)
        stride = model.config.stride
        shape = (6 * stride, 5 * stride, 3)
        larger, resized = loaded(MODERN / family, input_shape=shape), keras_vit.resize(model, shape)
        assert larger.config == resized.config
        assert_same_arrays(larger.weights, resized.weights, family)


def test_without_top_every_token_is_the_librarys() -> None:
    """Heads, their poolings and what they normalise are left aside by name.

    Asked for the average it is that of the library's patches, whatever the file's own pooling.
    """
    averaged = ("timm_deit_distilled", "timm_pe_core")
    for family in (*averaged, "timm_sbb_rope", "timm_dinov2_reg4", "timm_clip"):
        model, numbers = keras_vit.load(MODERN / family, include_top=False), reference(family)
        assert difference(answers(model, numbers["images"]), numbers["tokens"]) < TOLERANCE, family
        if family in averaged:
            model = keras_vit.load(MODERN / family, include_top=False, pooling="avg")
            mean = numbers["tokens"][:, -16:].mean(axis=1)
            assert difference(answers(model, numbers["images"]), mean) < TOLERANCE, family


def test_a_fresh_head_is_as_wide_as_the_pooling() -> None:
    """Another number of classes leaves all of the file's classifiers aside."""
    for family in ("timm_deit_distilled", "hf_dinov2_cls", "timm_beit"):
        model = loaded(MODERN / family, classes=3)
        assert model.output_shape == (None, 3)
        heads = [w for w in model.weights if w.path.startswith(("head/", "distillation_head/"))]
        assert not any(np.any(keras.ops.convert_to_numpy(weight)) for weight in heads), family


def test_a_model_of_another_rotation_is_refused() -> None:
    """No array shows the period, and every number depends on it."""
    path = MODERN / "hf_dinov3" / "model.safetensors"
    config = keras_vit.load(MODERN / "hf_dinov3").config
    load_weights(VisionTransformer(config), path)
    no_period = r"belongs to a model with rotary_period=100\.0"
    no_room = "layouts of timm and transformers hold other network"
    plain = keras_vit.load(MODERN / "timm_vit").config
    cases: list[tuple[keras_vit.ViTConfig, str, dict[str, Any]]] = [
        (config, no_period, {"rotary_period": 50.0}),
        (config, no_period, {"rotary_period": None}),
        (plain, no_room, {"position_embedding": "sincos_2d"}),
        (plain, no_room, {"query_key_norm": True}),
    ]
    for config, message, fields in cases:
        path = MODERN / ("timm_vit" if config is plain else "hf_dinov3") / "model.safetensors"
        with pytest.raises(ValueError, match=message):
            load_weights(VisionTransformer(dataclasses.replace(config, **fields)), path)


def two_towers(arrays: Arrays, settings: dict[str, Any]) -> None:
    """As transformers' CLIPModel and SiglipModel write it; heads that are the default go unsaid."""
    kind = settings.pop("model_type")
    tower = {**settings, "model_type": kind}
    settings.clear()
    settings |= {"model_type": kind.removesuffix("_vision_model"), "vision_config": tower}
    for name in [name for name in arrays if not name.startswith(("vision_model.", "visual_p"))]:
        arrays[f"vision_model.{name}"] = arrays.pop(name)
    arrays |= {
        "text_model.embeddings.token_embedding.weight": np.ones((3, 3), np.float32),
        "text_projection.weight": np.ones((3, 3), np.float32),
        "logit_scale": np.ones((), np.float32),
        "vision_model.embeddings.position_ids": np.arange(17)[None],
    }


def shared_bias(arrays: Arrays, settings: dict[str, Any]) -> None:
    """One table of offsets for all blocks, as BEiT's pre-training has it."""
    start = "beit.encoder.layer.{}.attention.attention."
    name = "relative_position_bias.relative_position_bias_table"
    arrays[f"beit.encoder.{name}"] = arrays.pop(start.format(0) + name)
    del arrays[start.format(1) + name]
    arrays["beit.encoder.relative_position_bias.relative_position_index"] = np.zeros((17, 17))


def equal_bias(arrays: Arrays, settings: dict[str, Any]) -> None:
    names = sorted(name for name in arrays if name.endswith("relative_position_bias_table"))
    arrays[names[1]] = arrays[names[0]]


def test_a_shared_bias_is_every_blocks(tmp_path: Path) -> None:
    """As if each block had the same table."""
    images = reference("hf_beit")["images"]
    shared = loaded(rewritten("hf_beit", tmp_path / "shared", shared_bias))
    equal = loaded(rewritten("hf_beit", tmp_path / "equal", equal_bias))
    np.testing.assert_array_equal(answers(shared, images), answers(equal, images))


def gated_in_parts(arrays: Arrays, settings: dict[str, Any]) -> None:
    """As timm's SwiGLU keeps gate and value; transformers' DINOv3 likewise."""
    for name in [name for name in arrays if ".mlp.fc1." in name]:
        gate, value = np.split(arrays.pop(name), 2)
        arrays[name.replace("fc1", "fc1_g")], arrays[name.replace("fc1", "fc1_x")] = gate, value


REWRITTEN = {
    "hf_clip_proj": two_towers,
    "hf_siglip": two_towers,
    "timm_dinov2_giant": gated_in_parts,
}


@pytest.mark.parametrize("family", REWRITTEN)
def test_other_files_of_a_network_give_the_same_numbers(family: str, tmp_path: Path) -> None:
    """A text tower is left aside; a gate in parts stands beside its value in our kernel."""
    model = loaded(rewritten(family, tmp_path, REWRITTEN[family]))
    found = answers(model, reference(family)["images"])
    assert difference(found, expected_answer(family)) < TOLERANCE


def test_another_network_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """By load, by a builder and into a model: the file, what it needs, an array that shows it."""
    for number, (family, others, more, message) in enumerate(SETTINGS["networks"]):

        def change(arrays: Arrays, settings: Any, *, new: Any = others, fields: Any = more) -> None:
            settings.update(fields)
            for name, value in new.items():
                if value is None:
                    del arrays[name]
                else:
                    is_copy = isinstance(value, str)
                    arrays[name] = arrays[value] if is_copy else np.ones(value, np.float32)

        config = keras_vit.load(MODERN / family).config
        folder = rewritten(family, tmp_path / str(number), change)
        for attempt in (
            functools.partial(keras_vit.load, folder),
            functools.partial(
                load_weights, VisionTransformer(config), folder / "model.safetensors"
            ),
        ):
            with pytest.raises(ValueError, match=message) as caught:
                attempt()
            assert str(folder) in str(caught.value)
            assert "\n" not in str(caught.value)


def test_nobody_knows_the_rotation_of_an_unknown_name(tmp_path: Path) -> None:
    """A model of a known config is not filled where the order of channels is not known."""
    config = keras_vit.load(MODERN / "timm_sbb_rope").config
    folder = rewritten(
        "timm_sbb_rope", tmp_path, lambda a, c: c.update(architecture="vit_of_tomorrow")
    )
    with pytest.raises(ValueError, match="which channels its rotary positions turn together"):
        load_weights(VisionTransformer(config), folder / "model.safetensors")
    with pytest.raises(ValueError, match="'vit_of_tomorrow' are not known to this version"):
        keras_vit.load(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrapped_arrays_are_those_inside(family: str, tmp_path: Path) -> None:
    """What stands before all names, and wrappers of parts, change nothing; a counter neither."""
    plain = open_checkpoint(MODERN / family / "model.safetensors")
    for wrapper, pairs in SETTINGS["wrapped"]:

        def change(arrays: Arrays, settings: Any, *, pairs: Any = pairs) -> None:
            for old in list(arrays):
                name = old
                for pattern, replacement in pairs:
                    name = re.sub(pattern, replacement, name)
                arrays[name] = arrays.pop(old)
            arrays["n_averaged"] = np.array(7)

        folder = rewritten(family, tmp_path / wrapper, change)
        checkpoint = open_checkpoint(folder / "model.safetensors")
        assert (checkpoint.fields, checkpoint.grid) == (plain.fields, plain.grid)
        assert sorted(checkpoint.arrays) == sorted(plain.arrays)
        for name, array in checkpoint.arrays.items():
            np.testing.assert_array_equal(array.read(), plain.arrays[name].read())


@pytest.mark.parametrize("family", ["hf_vit_cls", "hf_clip", "timm_vit"])
@pytest.mark.parametrize(
    "starts", [("", "ema."), ("model.", "model_ema.module."), ("a.", "b.", "c.")]
)
def test_several_copies_are_refused_by_name(
    family: str, starts: Sequence[str], tmp_path: Path
) -> None:
    """The average beside the weights, student and teacher: each is named."""

    def copy(arrays: Arrays, settings: Any) -> None:
        for name in list(arrays):
            array = arrays.pop(name)
            arrays.update({f"{start}{name}": array + i for i, start in enumerate(starts)})

    count = "two" if len(starts) == 2 else "3"
    with pytest.raises(ValueError, match=f"holds {count} networks, one .* and one below") as caught:
        keras_vit.load(rewritten(family, tmp_path / "all", copy))
    below = "vit." if family == "hf_vit_cls" else ""
    for start in starts:
        place = f"below '{start}{below}'" if start + below else "at its top"
        assert place in str(caught.value)


def test_a_grid_that_nobody_says_is_square(tmp_path: Path) -> None:
    """Of a config.json without image_size; the side of a patch may be a pair."""
    said = {"image_size": None, "patch_size": [16, 16]}
    model = keras_vit.load(rewritten("hf_vit_cls", tmp_path, lambda a, c: c.update(said)))
    assert model.config == keras_vit.load(MODERN / "hf_vit_cls").config


def test_a_lone_file_fills_a_model_aloud(tmp_path: Path) -> None:
    """What neither file nor config says is told once; what either says is not assumed."""
    said: dict[str, Any] = {"activation": "gelu_tanh", "layer_norm_epsilon": 1e-6}
    said |= {"include_preprocessing": True, "image_mean": (0.5,) * 3, "image_std": (0.5, 0.5, 0.5)}
    cases = [*SETTINGS["assumed"], ("timm_vit", said, [])]
    for number, (family, fields, assumed) in enumerate(cases):
        folder = Path(shutil.copytree(MODERN / family, tmp_path / str(number)))
        for name in ("config.json", "preprocessor_config.json"):
            (folder / name).unlink(missing_ok=True)
        sizes: dict[str, Any] = {"input_shape": (64, 64, 3), "hidden_dim": 16, "classes": 7}
        sizes |= {"mlp_dim": 64 if family == "timm_vit" else 48, "num_heads": 2, "num_layers": 2}
        config = keras_vit.ViTConfig.from_dict({**sizes, **fields}).resized((48, 64, 3))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_weights(VisionTransformer(config), folder / "model.safetensors")
        start = f"{folder / 'model.safetensors'} does not say what it was trained with; assumed "
        texts = [f"{start}{', '.join(assumed)}. Where that is wrong"] * bool(assumed)
        assert [str(each.message).split(", so is")[0] for each in caught] == texts
        assert {each.filename for each in caught} <= {__file__}


def test_a_towers_projection_is_no_classifier(tmp_path: Path) -> None:
    """timm's CLIP before it was fine-tuned: no softmax, and other classes replace it."""
    generator = np.random.default_rng(0)
    kernel, bias = (generator.normal(size=shape).astype(np.float32) for shape in ((512, 16), 512))

    def project(arrays: Arrays, settings: Any) -> None:
        arrays["head.weight"], arrays["head.bias"] = kernel, bias
        settings["num_classes"] = 512
        settings["pretrained_cfg"]["tag"] = "laion2b"

    folder = rewritten("timm_clip", tmp_path, project)
    images, model = reference("timm_clip")["images"], keras_vit.load(folder)
    vector = feature(loaded(MODERN / "timm_clip"), images, "pooling")
    assert difference(answers(model, images), vector @ kernel.T + bias) < TOLERANCE
    assert (model.config.classes, model.config.representation_dim) == (None, 512)
    classifier = keras_vit.load(folder, classes=3)
    np.testing.assert_allclose(answers(classifier, images).sum(axis=1), 1, rtol=FLOAT32)


def test_weights_of_another_gelu_are_told(tmp_path: Path) -> None:
    """OpenAI's towers in timm: as timm computes them, with a warning that says what to change."""
    folder = rewritten("timm_clip", tmp_path, lambda a, c: c["pretrained_cfg"].update(tag="openai"))
    with pytest.warns(UserWarning, match="with quick_gelu.*_clip_quickgelu_224"):
        model = keras_vit.load(folder)
    assert model.config.activation == "gelu"


def test_registers_may_have_positions(tmp_path: Path) -> None:
    """As SO150M's have: added to the registers, the network computes the same."""
    family, generator = "timm_sbb_reg4_gap", np.random.default_rng(0)

    def place(arrays: Arrays, settings: Any) -> None:
        own = generator.normal(size=arrays["reg_token"].shape).astype(np.float32)
        arrays["reg_token"] = arrays["reg_token"] - own
        arrays["pos_embed"] = np.concatenate([own, arrays["pos_embed"]], axis=1)

    folder = rewritten(family, tmp_path, place)
    images, plain, model = reference(family)["images"], loaded(MODERN / family), loaded(folder)
    assert model.config == plain.config
    assert difference(answers(model, images), answers(plain, images)) < TOLERANCE
