"""Tests of the families of checkpoints of timm and transformers, each against its library."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import FLOAT32, answers, assert_same_arrays
from published import MODERN, rewritten

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
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "pixels": ("timm_deit", {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}),
    "tanh": ("timm_siglip_tanh", {"activation": "gelu"}),
    "quick_gelu": ("timm_clip_quickgelu", {"activation": "gelu"}),
    "heads": ("timm_vit", {"num_heads": 4}),
    "pooling heads": ("timm_pe_core", {"pooling_heads": None}),
    "rotary period": ("hf_dinov3", {"rotary_period": 10.0}),
    "rotary grid": ("timm_sbb_rope", {"rotary_grid": (14, 14)}),
    "rotary offset": ("timm_pe_core", {"rotary_offset": 0.0}),
}
ONE = np.ones(16, np.float32)
NORMS = {f"blocks.{block}.mlp.norm.weight": ONE for block in (0, 1)}
TABLES = {
    f"blocks.{block}.attn.relative_position_bias_table": np.ones((51, 2), np.float32)
    for block in (0, 1)
}
GATE = ((0, "weight"), (0, "bias"), (1, "weight"), (1, "bias"))
# A family, arrays that its file has besides or otherwise (None: it lacks them; text: a copy of that
# one), other settings, and what the sentence says.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # EVA-02, and its CLIP
    ("timm_sbb_rope", NORMS, {},
     r"needs a normalisation inside attention or MLP \(as in EVA-02\) \(blocks\.0\.mlp\.norm"),
    ("timm_pe_core", {"blocks.0.attn.norm.weight": ONE}, {}, "inside attention or MLP"),
    # RADIO, AIMv2 and NaFlex, of timm and of transformers
    ("timm_vit", {"model.patch_generator.embedder.weight": ONE}, {}, r"needs RADIO's patches"),
    ("timm_vit", {"patch_embed.norm.weight": ONE}, {},
     "needs AIMv2's normalisation by the root mean square"),
    ("hf_clip", {"encoder.layers.0.rms_norm1.weight": ONE}, {}, "needs AIMv2's normalisation"),
    ("timm_vit", {"embeds.proj.weight": ONE}, {}, "needs NaFlex's patches"),
    ("hf_siglip", {"embeddings.patch_embedding.weight": np.ones((16, 768), np.float32)}, {},
     r"patches are a linear layer of shape \(16, 768\).*NaFlex"),
    # parts of attention
    ("timm_vit", {"blocks.0.attn.q_norm.weight": ONE}, {}, "normalisation of queries and keys"),
    ("timm_vit", {"blocks.0.attn.gate.weight": ONE}, {}, "gate of the attention's output"),
    ("hf_dinov2", {"encoder.layer.0.attention.attention.query.weight": np.ones((16, 8), "f4")}, {},
     r"arrays of one layer do not fit each other.*\(16, 8\), \(16, 16\)"),
    ("timm_vit", {f"blocks.0.attn.{p}_proj.weight": np.ones((1, 16), "f4") for p in "qkv"}, {},
     "whole and in parts"),
    ("timm_dinov3_qkvb", {"blocks.1.attn.q_bias": None}, {},
     r"missing: blocks\.1\.attn\.qkv\.bias"),
    # a gate that the settings do not know, settings with a gate, and GEGLU
    ("timm_dinov2_giant", {}, {"architecture": "vit_base_patch14_dinov2"},
     "say activation='gelu', and its arrays have a gate"),
    ("timm_dinov2", {}, {"architecture": "vit_giant_patch14_dinov2"},
     "say activation='swiglu', and its arrays have no gate"),
    ("hf_dinov3",
     {f"layer.{i}.mlp.gate_proj.{leaf}": f"layer.{i}.mlp.up_proj.{leaf}" for i, leaf in GATE}, {},
     "say activation='gelu', and its arrays have a gate"),
    # positions
    ("timm_deit3", {"pos_embed": None}, {}, r"lacks the positions"),
    ("timm_beit", {"pos_embed": np.ones((1, 17, 16), np.float32)}, {},
     "learned positions and a relative position bias together"),
    ("timm_beit", TABLES, {}, r"51 positions, not a square grid|does not say the height"),
    ("hf_dinov3", {}, {"rope_theta": 0}, r"rope_theta is 0; .*\(1, inf\)"),
    # a classifier on tokens that are not normalised, attention pooling without the class token
    ("hf_clip", {"classifier.weight": np.ones((7, 16), np.float32)}, {},
     r"Arrays, by timm's names, unexpected: classifier\.weight"),
    ("timm_pe_core", {}, {"architecture": "vit_base_patch16_siglip_224"},
     "leaves the class token out"),
]  # fmt: skip


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


@pytest.mark.parametrize(("family", "fields"), WRONG.values(), ids=WRONG)
def test_the_comparison_can_fail(family: str, fields: dict[str, Any]) -> None:
    """Each of what comes from beside the arrays moves the numbers by more than the tolerance."""
    right = loaded(MODERN / family)
    wrong = VisionTransformer(dataclasses.replace(right.config, **fields))
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
    for number, (family, others, more, message) in enumerate(REFUSED):

        def change(arrays: Arrays, settings: Any, *, new: Any = others, fields: Any = more) -> None:
            settings.update(fields)
            for name, value in new.items():
                arrays[name] = arrays[value] if isinstance(value, str) else value
                if value is None:
                    del arrays[name]

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
