"""Tests of keras_vit.variants."""

import dataclasses

import hypothesis
import pytest
from config_strategies import configs
from conftest import TINY

from keras_vit.config import ViTConfig
from keras_vit.model import VisionTransformer
from keras_vit.variants import VARIANTS, parameter_count, variant

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


def test_unknown_variant_is_refused() -> None:
    """The error lists what there is."""
    with pytest.raises(ValueError, match=r"no variant 'B/17'.*B/16"):
        variant("B/17")
