"""Tests of keras_vit.config."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import test_model_variants
from conftest import TINY

from keras_vit import VARIANTS, ViTConfig
from keras_vit.weights.layouts import check_published

ANY_SIZE = {"input_shape": (None, None, 3), "position_grid": (4, 6)}
RELATIVE = {"position_embedding": "relative"}
EVERY_BLOCK = {"position_placement": "every_block"}
ROTARY, DISTILLED = {"rotary_period": 9.0}, {"distillation_token": True}
AVERAGE = {"pooling": "avg", "class_token": False}

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"patch_size": 0}, "patch_size must be a positive integer"),
    ({"hidden_dim": 25}, "hidden_dim must be a multiple of num_heads=3"),
    ({"num_layers": 1.5}, "num_layers must be a positive integer"),
    ({"num_heads": True}, "num_heads must be a positive integer"),
    ({"classes": 0}, "classes must be a positive integer or None"),
    ({"representation_dim": -1}, "representation_dim must be a positive integer or None"),
    ({"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\)"),
    ({"drop_path_rate": -0.1}, r"drop_path_rate must be in \[0, 1\)"),
    ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon must be above 0"),
    ({"pooling": "sum"},
     "pooling must be .*'token', 'avg', 'token_avg', 'max', 'map', None.*'sum'"),
    ({"pooling": "token", "class_token": False}, 'use pooling="avg", "max" or "map"'),
    ({"activation": "relu"},
     "activation must be one of .*'gelu_tanh', 'gelu', 'quick_gelu', 'swiglu'.*'relu'"),
    ({"pooling": "token_avg", "class_token": False}, 'pooling="token_avg" needs class_token=True'),
    ({"representation_activation": "gelu"},
     r"representation_activation must be one of \['tanh', None"),
    ({"resnet_layers": (2, 0)}, "resnet_layers must be a tuple of at most 8 integers from 1"),
    ({"input_shape": (32, 48)}, "input_shape must be three positive integers"),
    ({"input_shape": (30, 48, 3)}, r"multiples of 8.*\(30, 48, 3\).*nearest.*\(32, 48, 3\)"),
    ({"position_embedding": "2d"}, "position_embedding must be one of .*'relative', None.*'2d'"),
    ({"remat": "all"}, r"remat must be one of \[True, False, 'dots'\]"),
    ({"scan_blocks": True, **EVERY_BLOCK},
     'scan_blocks must be False unless position_placement="input"'),
    ({"position_placement": "all"}, "position_placement must be one of .*'every_block'.*'all'"),
    ({"position_embedding": "learned_2d", "hidden_dim": 9},
     r"\"learned_2d\" needs a hidden_dim that is a multiple of 2\. Received: hidden_dim=9"),
    ({"position_embedding": "sincos_2d", "hidden_dim": 30},
     r"\"sincos_2d\" needs a hidden_dim that is a multiple of 4\. Received: hidden_dim=30"),
    ({**RELATIVE, **EVERY_BLOCK},
     "'relative' adds nothing to tokens.*leave position_placement.*'every_block'"),
    ({"position_embedding": None, "position_placement": "every_block_shared"},
     "position_embedding=None adds nothing"),
    ({"image_mean": [0.5]}, r"image_mean must be a tuple of 3 finite numbers.*\[0.5\]"),
    ({"image_mean": (0.4, 0.5)}, "image_mean must be a tuple of 3 finite numbers"),
    ({"image_mean": (0.4, 0.5, float("nan"))}, "image_mean must be a tuple of 3 finite"),
    ({"image_mean": ("a",) * 3}, "image_mean must be a tuple of 3 finite"),
    ({"image_std": (0.1, 0.2, 0.0)}, "image_std must be at least 1e-09"),
    ({"image_std": ()}, "image_std must be a tuple of 3"),
    ({"image_std": (0.5,)}, "image_std must be as many as means"),
    ({"num_registers": -1}, "num_registers must be a whole number from 0.*-1"),
    ({"num_registers": 1.5}, "num_registers must be a whole number from 0.*1.5"),
    ({"layer_scale": 0.0}, "layer_scale must be a number above 0 or None.*0.0"),
    ({**DISTILLED, "classes": None}, "distillation_token=True needs .*classes=None"),
    ({**DISTILLED, **AVERAGE},
     "distillation_token=True needs class_token=True.*class_token=False.*pooling='avg'"),
    ({**DISTILLED, "representation_dim": 8}, "representation_dim=8"),
    ({**DISTILLED, "norm_after_pooling": True}, "needs norm_after_pooling=False"),
    ({"input_shape": (48, 48, 3), "resnet_layers": (1,)}, "multiples of 32"),
    ({"embedding_norm": 1}, "embedding_norm must be True or False.*1"),
    ({"norm_after_pooling": "yes"}, "norm_after_pooling must be True or False.*'yes'"),
    ({"pooling": np.zeros(2)}, "pooling must be one of .*Received"),
    ({"pooling_heads": 0}, "pooling_heads must be a positive integer or None"),
    ({"pooling_heads": 2}, "pooling_heads needs pooling=\"map\".*pooling_heads=2, pooling='token'"),
    ({"pooling": "map", "class_token": False, "pooling_heads": 5},
     "divides hidden_dim.*pooling_heads=5.*hidden_dim=24"),
    ({"rotary_period": 1.0}, "rotary_period must be a number above 1 or None.*1.0"),
    ({"rotary_period": True}, "rotary_period must be a number above 1 or None.*True"),
    ({"rotary_grid": (2,), **ROTARY}, r"rotary_grid must be two positive .*\(2,\)"),
    ({"rotary_grid": 16, **ROTARY}, "rotary_grid must be two positive .*16"),
    ({"rotary_grid": (2, 2)}, "rotary_grid needs rotary_period.*rotary_period=None"),
    ({"rotary_offset": 0.5, **ROTARY},
     "rotary_offset needs rotary_grid.*rotary_grid=None, rotary_offset=0.5"),
    ({"rotary_offset": float("nan")}, "rotary_offset must be a finite number.*nan"),
    ({**ROTARY, "hidden_dim": 18},
     "width is a multiple of 4.*hidden_dim=18, num_heads=3, heads of 6"),
    ({"input_shape": (None, 48, 3)}, r"input_shape must be three .*or \(None, None, channels\)"),
    ({"input_shape": (None, None, None)}, "input_shape must be three"),
    ({"input_shape": (None, None, 3)}, "position_grid must be two positive integers .*None"),
    ({"position_grid": (4, 6)}, r"position_grid is for input_shape=\(None, None, channels\)"),
    ({**ANY_SIZE, "position_grid": (4, 0)}, r"position_grid must be two .*\(4, 0\)"),
    ({**ANY_SIZE, **RELATIVE}, 'position_embedding="relative" takes images'),
    ({**ANY_SIZE, "resnet_layers": ()}, "a ResNet stem takes images of one size"),
    ({"patch_dropout_rate": 1.0}, r"patch_dropout_rate must be in \[0, 1\)"),
    ({"patch_dropout_rate": 0.5, **RELATIVE},
     "those that are added at the input.*position_embedding='relative'"),
    ({"patch_dropout_rate": 0.5, **EVERY_BLOCK},
     "those that are added at the input.*position_placement='every_block'"),
]  # fmt: skip


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
