"""Tests of keras_vit.config."""

import dataclasses
import json
from typing import Any

import numpy as np
import published
import pytest
import test_model_variants
from conftest import TINY

from keras_vit import VARIANTS, ViTConfig
from keras_vit.weights.layouts import check_published

ANY_SIZE = {"input_shape": (None, None, 3), "position_grid": (4, 6)}


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    *((published.in_tuples(fields), message) for fields, message in published.TABLES["bad fields"]),
    ({"image_mean": [0.5]}, r"image_mean must be a tuple of 3 finite numbers.*\[0.5\]"),
    ({"image_mean": (0.4, 0.5, float("nan"))}, "image_mean must be a tuple of 3 finite"),
    ({"pooling": np.zeros(2)}, "pooling must be one of .*Received"),
    ({"pooling": "cls"}, r"None\]; \"cls\" is \"token\"\. Received: pooling='cls'"),
    ({"rotary_offset": float("nan")}, "rotary_offset must be a finite number.*nan"),
]


def test_configs_survive_json() -> None:
    """Written as JSON and read back each is the same: the variants' and what departs from them."""
    fields: dict[str, Any] = {"image_mean": (0.1, 0.2, 0.3), "remat": "dots", **ANY_SIZE}
    other = dataclasses.replace(TINY, representation_activation=None, **fields)
    for config in (other, *VARIANTS.values(), *test_model_variants.CONFIGS.values()):
        assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_bad_fields_are_refused_in_one_sentence() -> None:
    """Construction names the field, what it received and what is allowed."""
    for fields, message in BAD_FIELDS:
        with pytest.raises(ValueError, match=message) as caught:
            dataclasses.replace(TINY, **fields)
        assert "\n" not in str(caught.value)
    # A dictionary from another version of the config is not half understood.
    with pytest.raises(ValueError, match=r"no field \['depth'\]; help"):
        ViTConfig.from_dict({**TINY.to_dict(), "depth": 3})


def test_a_published_network_departs_in_nothing() -> None:
    """No published variant has a field that other layouts have no room for; each such is named."""
    assert {name for config in VARIANTS.values() for name in config.nonstandard_fields} == set()
    changed: dict[str, Any] = {
        "position_embedding": "sincos_2d",
        "position_placement": "every_block",
        "num_registers": 1,
        "layer_scale": 0.1,
        "query_key_norm": True,
        "distillation_token": True,
        "activation": "swiglu",
        "embedding_norm": True,
        "representation_activation": None,
        "norm_after_pooling": True,
        "rotary_period": 100.0,
    }
    for name, value in changed.items():
        assert dataclasses.replace(TINY, **{name: value}).nonstandard_fields == (name,)
    assert dataclasses.replace(TINY, patch_dropout_rate=0.5).nonstandard_fields == ()
    counted: dict[str, Any] = {"rotary_period": 9.0, "rotary_grid": (16, 16), "rotary_offset": 0.5}
    several = {**counted, "activation": "quick_gelu", "pooling_heads": 4}
    config = dataclasses.replace(TINY, pooling="map", class_token=False, **several)
    assert set(config.nonstandard_fields) == set(several)
    double = dataclasses.replace(TINY, pooling="token_avg")
    assert double.nonstandard_fields == ("pooling",)
    with pytest.raises(ValueError, match="pooling='token_avg'"):
        check_published(double)


def test_a_field_that_the_writers_do_not_know_departs() -> None:
    """Their list says what they hold: a new field is refused until they hold it."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(ViTConfig):
        rotary: bool = False

    fields: dict[str, Any] = vars(TINY)
    assert Wider(**fields).nonstandard_fields == ()
    wider = Wider(**fields, rotary=True)
    assert wider.nonstandard_fields == ("rotary",)
    with pytest.raises(ValueError, match="rotary=True"):
        check_published(wider)


def test_the_tokens_before_the_patches_are_counted() -> None:
    """Class token, distillation token and registers; the patches follow."""
    assert TINY.num_prefix_tokens == 1
    config = dataclasses.replace(TINY, num_registers=3, distillation_token=True)
    assert (config.num_prefix_tokens, config.num_tokens) == (5, 29)
    config = dataclasses.replace(TINY, pooling="avg", class_token=False)
    assert (config.num_prefix_tokens, config.num_tokens) == (0, 24)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.classes = 3  # type: ignore[misc]


def test_drop_path_rises_linearly() -> None:
    """The first block drops nothing, the last the whole rate."""
    rates = dataclasses.replace(TINY, drop_path_rate=0.2).drop_path_rates()
    assert rates == pytest.approx((0.0, 0.1, 0.2))
    assert dataclasses.replace(TINY, num_layers=1, drop_path_rate=0.2).drop_path_rates() == (0.0,)


def test_pixels_times_scale_and_offset_are_those_of_the_config() -> None:
    """(pixels / 255 - mean) / std: one number each where channels are alike, or one for each."""
    for channels in (1, 3, 4):
        config = dataclasses.replace(TINY, input_shape=(32, 48, channels))
        assert config.rescaling == (1 / 127.5, -1.0)
    config = dataclasses.replace(TINY, image_mean=(0.1, 0.2, 0.3), image_std=(0.5, 0.25, 0.2))
    scale, offset = config.rescaling
    assert scale == pytest.approx((1 / 127.5, 4 / 255, 5 / 255))
    assert offset == pytest.approx((-0.2, -0.8, -1.5))


def test_a_config_for_any_size_keeps_the_grid_of_its_tables() -> None:
    """There and back; it has no image size, and says how to get one."""
    config = TINY.resized((None, None, 3))
    assert (config.any_size, config.position_grid, config.grid) == (True, (4, 6), (4, 6))
    assert config.num_tokens == TINY.num_tokens
    assert config.resized(TINY.input_shape) == TINY
    assert config.resized((48, 40, 3)).grid == (6, 5)
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (TINY.any_size, TINY.image_size) == (False, (32, 48))
    with pytest.raises(ValueError, match=r"keras_vit\.resize\(model, \(height, width, 3\)\)"):
        _ = config.image_size
