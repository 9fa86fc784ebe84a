"""Tests of keras_vit.variants."""

import dataclasses
from typing import Any

import published
import pytest
from conftest import TINY

from keras_vit import VARIANTS, VisionTransformer, parameter_count, variant
from keras_vit.weights.catalog import resolve

# vit_jax/models_test.py has the first fourteen. The scaled-up three are this project's own count of
# their published sizes; arXiv 2106.04560 gives about 1.0e9 and 1.8e9, arXiv 2305.13035 400 million.
PARAMETERS: dict[str, int] = published.TABLES["parameters"]

# The same file's models without class token.
GAP_PARAMETERS = {"S/16": 22_049_896, "S/32": 22_878_184, "B/16": 86_566_120, "B/32": 88_222_696}
BUILT: list[dict[str, Any]] = [
    *({"resnet_layers": layers, "patch_size": 1} for layers in ((), (1,), (2, 1), (1, 1, 1))),
    {"classes": None, "representation_dim": 5, "representation_activation": None},
    {"pooling": "token_avg", "representation_dim": 5, "num_registers": 2},
    {"pooling": None, "class_token": False, "num_registers": 1, "layer_scale": 0.1},
    {"distillation_token": True, "activation": "swiglu", "mlp_dim": 9, "num_layers": 1},
    {"input_shape": (8, 16, 1), "position_embedding": "relative", "classes": 1},
    {"pooling": "map", "class_token": False, "pooling_heads": 6, "classes": None},
]


def test_variants_have_the_published_number_of_parameters() -> None:
    """Every variant's count is held here; one added without a number fails."""
    assert {name: parameter_count(config) for name, config in VARIANTS.items()} == PARAMETERS
    # Average pooling drops the class token and its position.
    fields: dict[str, Any] = {"pooling": "avg", "class_token": False}
    bare = {name: dataclasses.replace(VARIANTS[name], **fields) for name in GAP_PARAMETERS}
    assert {name: parameter_count(config) for name, config in bare.items()} == GAP_PARAMETERS


def test_closed_form_equals_the_built_model() -> None:
    """Stems' roots, stages and projections too; tests/test_model_variants.py counts more."""
    for fields in BUILT:
        config = dataclasses.replace(TINY, **{"input_shape": (32, 32, 3), **fields})
        assert parameter_count(config) == VisionTransformer(config).count_params(), fields


def test_unknown_variant_is_refused() -> None:
    """The error lists what there is."""
    for call in (variant, lambda name: resolve(name, "imagenet21k")):
        with pytest.raises(ValueError, match=r"no variant 'B/17'.*B/16"):
            call("B/17")
