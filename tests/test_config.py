"""Tests of keras_vit.config."""

import dataclasses
import json
import subprocess
import sys

import hypothesis
import pytest
from conftest import TINY
from hypothesis import strategies as st

from keras_vit.config import VARIANTS, ViTConfig, parameter_count, variant
from keras_vit.model import VisionTransformer

# vit_jax/models_test.py has the first fourteen. The scaled-up three are this project's own count of
# their published sizes; arXiv 2106.04560 gives about 1.0e9 and 1.8e9, arXiv 2305.13035 400 million.
PARAMETERS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/8": 86_576_872,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "R+Ti/16": 6_337_704,
    "R26+S/32": 36_431_912,
    "R26+B/32": 101_383_976,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
    "g/14": 1_037_857_384,
    "G/14": 1_882_797_416,
    "So400m/14": 428_833_704,
}

# The same file's models without class token.
GAP_PARAMETERS = {
    "S/16": 22_049_896,
    "S/32": 22_878_184,
    "B/16": 86_566_120,
    "B/32": 88_222_696,
}

BAD_FIELDS = [
    ({"patch_size": 0}, "patch_size must be a positive integer"),
    ({"hidden_dim": 25}, "hidden_dim must be a multiple of num_heads=3"),
    ({"num_layers": 1.5}, "num_layers must be a positive integer"),
    ({"num_heads": True}, "num_heads must be a positive integer"),
    ({"classes": 0}, "classes must be a positive integer or None"),
    ({"representation_dim": -1}, "representation_dim must be a positive integer or None"),
    ({"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\)"),
    ({"drop_path_rate": -0.1}, r"drop_path_rate must be in \[0, 1\)"),
    ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon must be above 0"),
    ({"pooling": "max"}, "pooling must be one of .*'token', 'avg', 'map', None.*'max'"),
    ({"pooling": "token", "class_token": False}, 'use pooling="avg" or "map"'),
    ({"activation": "relu"}, "activation must be one of .*'gelu_tanh', 'gelu'.*'relu'"),
    ({"resnet_layers": (2, 0)}, "resnet_layers must be a tuple of positive integers"),
    ({"input_shape": (32, 48)}, "input_shape must be three positive integers"),
    ({"input_shape": (30, 48, 3)}, r"multiples of 8.*\(30, 48, 3\).*nearest.*\(32, 48, 3\)"),
    ({"input_shape": (48, 48, 3), "resnet_layers": (1,)}, "multiples of 32"),
]

configs = st.builds(
    lambda grid, heads, width, **fields: ViTConfig(
        input_shape=(grid[0] * 4, grid[1] * 4, fields.pop("channels")),
        patch_size=4,
        num_heads=heads,
        hidden_dim=heads * width,
        class_token=fields["pooling"] == "token" or fields.pop("has_token"),
        **{name: value for name, value in fields.items() if name != "has_token"},
    ),
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    heads=st.integers(1, 3),
    width=st.integers(1, 4),
    channels=st.integers(1, 4),
    has_token=st.booleans(),
    mlp_dim=st.integers(1, 9),
    num_layers=st.integers(1, 2),
    classes=st.none() | st.integers(1, 5),
    pooling=st.sampled_from(["token", "avg", "map", None]),
    representation_dim=st.none() | st.integers(1, 5),
    activation=st.sampled_from(["gelu_tanh", "gelu"]),
    dropout_rate=st.sampled_from([0.0, 0.1]),
)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_has_the_published_number_of_parameters(name: str) -> None:
    """Every variant's count is held here; one added without a number fails."""
    assert parameter_count(VARIANTS[name]) == PARAMETERS[name]


@pytest.mark.parametrize("name", GAP_PARAMETERS)
def test_variant_without_class_token_has_the_published_number_of_parameters(name: str) -> None:
    """Average pooling drops the class token and its position."""
    config = dataclasses.replace(VARIANTS[name], pooling="avg", class_token=False)
    assert parameter_count(config) == GAP_PARAMETERS[name]


@hypothesis.settings(deadline=None, derandomize=True, max_examples=12)
@hypothesis.given(configs)
def test_closed_form_equals_the_built_model(config: ViTConfig) -> None:
    """The count without building equals Keras' own count, whatever the config."""
    assert parameter_count(config) == VisionTransformer(config).count_params()


@pytest.mark.parametrize("resnet_layers", [(), (1,), (2, 1), (1, 1, 1)])
def test_closed_form_equals_the_built_hybrid(resnet_layers: tuple[int, ...]) -> None:
    """The stem's closed form counts roots, stages and projections."""
    config = dataclasses.replace(
        TINY, resnet_layers=resnet_layers, patch_size=1, input_shape=(32, 32, 3)
    )
    assert parameter_count(config) == VisionTransformer(config).count_params()


@hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
@hypothesis.given(configs)
def test_config_survives_json(config: ViTConfig) -> None:
    """A config written as JSON and read back is the same config."""
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_survive_json(name: str) -> None:
    """So does every variant, the hybrids' stages included."""
    config = VARIANTS[name]
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS)
def test_bad_fields_are_refused_in_one_sentence(fields: dict[str, object], message: str) -> None:
    """Construction names the field, what it received and what is allowed."""
    with pytest.raises(ValueError, match=message) as caught:
        dataclasses.replace(TINY, **fields)
    assert "\n" not in str(caught.value)


def test_unknown_field_is_refused() -> None:
    """A dictionary from another version of the config is not half understood."""
    with pytest.raises(ValueError, match=r"no field \['depth'\].*num_layers"):
        ViTConfig.from_dict({**TINY.to_dict(), "depth": 3})


def test_unknown_variant_is_refused() -> None:
    """The error lists what there is."""
    with pytest.raises(ValueError, match=r"no variant 'B/17'.*B/16"):
        variant("B/17")


def test_config_is_frozen() -> None:
    """A config cannot change under a built model."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.classes = 3  # type: ignore[misc]


def test_drop_path_rises_linearly() -> None:
    """The first block drops nothing, the last the whole rate."""
    rates = dataclasses.replace(TINY, drop_path_rate=0.2).drop_path_rates()
    assert rates == pytest.approx((0.0, 0.1, 0.2))
    assert dataclasses.replace(TINY, num_layers=1, drop_path_rate=0.2).drop_path_rates() == (0.0,)


def test_config_module_loads_no_framework() -> None:
    """The module can be read alone, without Keras, NumPy or TensorFlow."""
    source = sys.modules["keras_vit.config"].__file__
    check = (
        f"import importlib.util as u, sys; s = u.spec_from_file_location('c', {source!r}); "
        "m = u.module_from_spec(s); sys.modules['c'] = m; s.loader.exec_module(m); "
        "print(sorted({'keras', 'numpy', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
