"""The public repositories: every row complete, of the right size, and one that `load` reads.

And what timm's names of models mean.
"""

import dataclasses
import json
import re
from typing import Any

import published
import pytest

from keras_vit import ViTConfig, parameter_count
from keras_vit.weights import torch_names
from keras_vit.weights.catalog import ACCURACY_KINDS, FAMILIES, Repository, repositories
from keras_vit.weights.sources import hub_parts

ROWS = repositories()
ADDRESSES = [row.address for row in ROWS]
OPEN = {"Apache-2.0", "MIT"}  # licences that ask for attribution alone

# What the networks of a family have beyond the published one.
_AVERAGED: dict[str, Any] = {"pooling": "avg", "norm_after_pooling": True, "layer_scale": 1e-5}
_BEIT = {**_AVERAGED, "position_embedding": "relative"}
_GAP: dict[str, Any] = {"class_token": False, "pooling": "avg"}
_MAP: dict[str, Any] = {"class_token": False, "pooling": "map"}
_TOWER: dict[str, Any] = {"embedding_norm": True, "representation_activation": None}
_ROTARY: dict[str, Any] = {"position_embedding": None, "rotary_period": 100.0}
PARTS: dict[str, dict[str, Any]] = {
    "deit3": {"layer_scale": 1e-6},
    "ijepa": _GAP,
    "dinov2": {"layer_scale": 1e-5},
    "dinov3": {"layer_scale": 1e-5, "num_registers": 4, **_ROTARY},
    **dict.fromkeys(("siglip", "siglip2"), _MAP),
    **dict.fromkeys(("clip", "openclip", "metaclip"), _TOWER),
    **dict.fromkeys(("beit", "data2vec"), _BEIT),
    "sbb": {**_AVERAGED, **_GAP},
    "tipsv2": {"layer_scale": 1e-5},
    "pe": {**_TOWER, "pooling": "map", "rotary_period": 100.0},
}

# Millions of parameters as others count them, without biases that are zero: timm
# (results/results-imagenet.csv), and the READMEs of facebookresearch/dinov3 and
# facebookresearch/perception_models.
PUBLISHED: dict[str, float] = published.TABLES["millions"]
# timm's own values for every name that the table answers: plain ViT, DeiT, SigLIP and CLIP as made
# by timm 1.0.31, the others as its source says them (registered functions' `model_args`).
TIMM = json.loads((published.GOLDEN / "timm_names.json").read_text())


def config_of(row: Repository) -> ViTConfig:
    """Returns the config of the model that `load` builds, as far as its size hangs on it."""
    name = f"{row.architecture} {row.address}"
    parts = dict(PARTS.get(row.family, {}))
    registers = re.search(r"_reg(\d)", row.architecture)
    if registers or "with_registers" in row.architecture:
        parts["num_registers"] = int(registers[1]) if registers else 4
    if row.family == "sbb" and "rope" in name:
        parts |= _ROTARY
    if "so150m" in name:
        parts["layer_scale"] = None
    if row.family == "deit" and (row.architecture == "deit" or "distilled" in name):
        parts["distillation_token"] = True
    if re.search("dinov2-.*giant|giant.*(dinov2|tipsv2)|dinov3.*(plus|7b)|(plus|7b).*dinov3", name):
        parts["activation"] = "swiglu"
    if row.family == "dinov2" and row.classes:
        parts["pooling"] = "token_avg"
    return ViTConfig(
        input_shape=(row.image_size, row.image_size, 3),
        patch_size=row.patch_size,
        hidden_dim=row.hidden_dim,
        mlp_dim=row.mlp_dim,
        num_heads=row.hidden_dim // 64,  # any divisor, but for BEiT, whose heads are so wide
        num_layers=row.num_layers,
        classes=row.classes,
        representation_dim=row.representation_dim,
        **parts,
    )


def test_parameters_are_those_of_the_model() -> None:
    """The count is that of the config, and another depth, width or size gives another.

    Biases of zeros make less than 0.1 percent; figures of others are rounded by their authors.
    """
    wrong = []
    for row in ROWS:
        if parameter_count(config_of(row)) != row.parameters:
            wrong.append((row.address, "parameters"))
        has_table = row.family != "dinov3" and "rope" not in row.architecture
        for name in ("hidden_dim", "mlp_dim", "num_layers", *["image_size"] * has_table):
            other = dataclasses.replace(row, **{name: 2 * getattr(row, name)})
            if parameter_count(config_of(other)) == row.parameters:
                wrong.append((row.address, name))
    parameters = {row.address: row.parameters / 1e6 for row in ROWS}
    for address, millions in PUBLISHED.items():
        rounding = 0.5 if millions == int(millions) else 0.05
        # "0.32B" of PE is rough.
        tolerance = 5 if "vit_pe" in address else rounding + 1e-3 * millions
        if abs(parameters[address] - millions) > tolerance:
            wrong.append((address, "parameters"))
    assert not wrong


def test_repositories_are_readable() -> None:
    """Each address parses, and names an architecture whose settings are known."""
    types = {*torch_names.HUGGING_FACE_TYPES, *torch_names.TWO_TOWERS}
    wrong = []
    for row in ROWS:
        repository, _, file = hub_parts(row.address, suffixes=(".safetensors",))
        holds = [
            file is None and row.card == f"https://huggingface.co/{repository}",
            row.image_size % row.patch_size == 0,
        ]
        if row.library == "transformers":
            holds.append(row.architecture in types)
        else:
            owner, _, name = repository.partition("/")
            known = torch_names.find_architecture(row.architecture)
            patch, size = re.search(r"patch(\d+)", name), re.search(r"_(\d{3})\.", name)
            holds += [
                (owner, name.partition(".")[0]) == ("timm", row.architecture),
                known is not None and row.hidden_dim % known.num_heads == 0,
                patch is None or int(patch[1]) == row.patch_size,
                size is None or int(size[1]) == row.image_size,
            ]
        wrong += [(row.address, holds)] * (not all(holds))
    assert not wrong


def test_repositories_have_their_sources() -> None:
    """What is said has a URL; a licence that restricts says what it forbids."""
    wrong = []
    for row in ROWS:
        measured, kind = row.accuracy is not None, row.accuracy_kind
        holds = [
            row.source.startswith("https://") and row.licence != "",
            bool(row.restrictions) >= (row.licence not in OPEN),
            all(text == "" or text.endswith(".") for text in (row.restrictions, row.note)),
            (kind in ACCURACY_KINDS) == measured,
            (row.accuracy_source or "").startswith("https://") == measured,
            row.accuracy is None or 50 < row.accuracy < 100,
            kind != "classifier" or row.classes == 1000,
            kind in (None, "classifier") or row.classes is None,
            (row.data != "") == (row.family != "pe"),
            ("@" in row.address) == ("pull request" in row.note),
        ]
        wrong += [(row.address, holds)] * (not all(holds))
    assert not wrong


def test_no_restriction_is_forgotten() -> None:
    """Licences that are known to restrict stand with their sentence, whoever holds the copy."""
    non_commercial = {row.family for row in ROWS if "commercial" in row.restrictions}
    assert non_commercial == {"mae", "ijepa", "msn", "openclip", "metaclip"}
    for family in ("mae", "ijepa", "msn", "metaclip"):
        assert all("commercial" in row.restrictions for row in repositories(family))
    for row in repositories("dinov3"):
        assert "military" in row.restrictions
        assert row.restrictions.startswith("Gated") == row.address.startswith("hf://facebook/")


def test_rows_are_in_order_and_once() -> None:
    """Families follow each other as listed, none is empty, and no address comes twice.

    Of a wrong family one sentence names the right ones and the likeliest.
    """
    assert list(dict.fromkeys(row.family for row in ROWS)) == list(FAMILIES)
    assert [row for family in FAMILIES for row in repositories(family)] == list(ROWS)
    assert len(set(ADDRESSES)) == len(ADDRESSES) > 100
    for family, likely in (("dino2", "dinov2"), ("SigLIP2", "siglip2"), ("clipp", "clip")):
        with pytest.raises(ValueError, match=r"There is no family .*vit, deit, .*") as caught:
            repositories(family)
        assert str(caught.value).endswith(f"Did you mean {likely!r}?")
        assert all(name in str(caught.value) for name in FAMILIES)
    with pytest.raises(ValueError, match=r"tipsv2, pe\.$"):
        repositories("0")


def test_names_mean_what_timm_means() -> None:
    """Heads, activation, epsilon and rotary positions of each registered function, and no more."""
    wrong, used = [], set()
    for name, expected in TIMM.items():
        found = torch_names.find_architecture(name)
        assert found is not None, name
        used.add(found)
        fields = json.loads(json.dumps(dataclasses.asdict(found)))  # tuples are lists there
        is_turned = ("rotary_period" in expected) == (found.rotary_period is not None)
        if not is_turned or {field: fields[field] for field in expected} != expected:
            wrong.append(name)
    assert not wrong
    assert used == set(torch_names.TIMM_ARCHITECTURES)  # each row answers one name at least
    tail = ("", "vit_base_patch16_22", "vit_base_patch16_224_miil", "my_vit_base_patch16_224")
    assert not any(map(torch_names.find_architecture, tail))  # only whole names count
