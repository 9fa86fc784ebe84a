"""Tests of keras_vit.weights.architectures: what names alone mean."""

import json

import published
import pytest

from keras_vit.weights.architectures import TIMM_ARCHITECTURES, find_architecture

# timm 1.0.31's own values for every name that the table answers.
TIMM = json.loads((published.GOLDEN / "timm_names.json").read_text())


@pytest.mark.parametrize("name", TIMM)
def test_names_mean_what_timm_means(name: str) -> None:
    """Heads, activation and epsilon of each registered function."""
    found = find_architecture(name)
    assert {field: getattr(found, field) for field in TIMM[name]} == TIMM[name]


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
