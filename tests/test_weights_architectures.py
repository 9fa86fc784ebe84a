"""Tests of keras_vit.weights.architectures: what names alone mean."""

import dataclasses
import json

import published
import pytest

from keras_vit.weights.architectures import TIMM_ARCHITECTURES, find_architecture

# timm's own values for every name that the table answers: plain ViT, DeiT, SigLIP and CLIP as made
# by timm 1.0.31, the others as its source says them (registered functions' `model_args`).
TIMM = json.loads((published.GOLDEN / "timm_names.json").read_text())


@pytest.mark.parametrize("name", TIMM)
def test_names_mean_what_timm_means(name: str) -> None:
    """Heads, activation, epsilon and rotary positions of each registered function."""
    found = find_architecture(name)
    assert found is not None
    fields = json.loads(json.dumps(dataclasses.asdict(found)))  # tuples are lists there
    assert {field: fields[field] for field in TIMM[name]} == TIMM[name]
    assert ("rotary_period" in TIMM[name]) == (found.rotary_period is not None)


def test_every_row_is_held() -> None:
    """Each row of the table answers at least one of timm's names."""
    used = {find_architecture(name) for name in TIMM}
    assert used == set(TIMM_ARCHITECTURES)


@pytest.mark.parametrize(
    "name", ["", "vit_base_patch16_22", "vit_base_patch16_224_miil", "my_vit_base_patch16_224"]
)
def test_other_names_are_not_guessed(name: str) -> None:
    """Only whole names count."""
    assert find_architecture(name) is None
