"""Tests of keras_vit.explain.maps."""

import base64
import dataclasses
from typing import Any

import numpy as np
import pytest
from conftest import FLOAT32, TINY
from test_explain_attention import CONFIGS, images_for, sharp

from keras_vit import explain
from keras_vit.explain import maps
from keras_vit.model import VisionTransformer

GENERATOR = np.random.default_rng(5)


def photo(height: int, width: int, channels: int = 3) -> np.ndarray:
    return GENERATOR.integers(0, 256, (height, width, channels), dtype=np.uint8)


def unpacked(packed: dict[str, Any], grid: list[int]) -> np.ndarray:
    """Does what `unpacked` of viewer.js does."""
    levels = np.frombuffer(base64.b64decode(packed["values"]), np.uint8)
    least, most = (np.array(packed[name])[:, None, None] for name in ("least", "most"))
    return np.asarray(least + levels.reshape(-1, *grid) / 255 * (most - least))


@pytest.mark.parametrize("name", ["token", "avg", "hybrid"])
def test_heads_are_those_of_the_attention(name: str) -> None:
    """Row 0 of each head where there is a class token, the mean row of the patches otherwise."""
    config = CONFIGS[name]
    model, images = sharp(config), images_for(config)[:1]
    weights = explain.attention_weights(model, images)[0]
    first = config.num_prefix_tokens
    rows = weights[:, :, 0] if config.class_token else weights[:, :, first:].mean(axis=2)
    expected = rows[..., first:].reshape(*rows.shape[:2], *config.grid)
    actual = np.stack(maps.head_attention(model, images))
    assert actual.std() > 1e-3
    np.testing.assert_allclose(actual, expected, atol=FLOAT32)


def test_the_pooling_is_a_layer_with_heads_of_its_own() -> None:
    """Its number of heads may differ from that of the blocks."""
    config = dataclasses.replace(CONFIGS["map"], pooling_heads=1)
    model, images = sharp(config), images_for(config)[:1]
    layers = maps.head_attention(model, images)
    assert [len(layer) for layer in layers] == [config.num_heads] * config.num_layers + [1]
    expected = explain.pooling_attention(model, images)[0].reshape(1, *config.grid)
    np.testing.assert_allclose(layers[-1], expected, atol=FLOAT32)
    shown = maps.view(maps.make_subject(model, photo(32, 48)), [], layers)
    names = [layer["name"] for layer in shown["layers"]]
    assert names == ["layer 0", "layer 1", "layer 2", "pooling"]


def test_what_the_page_shows_is_within_a_level() -> None:
    """Maps are written in 256 levels, each from its own least value to its most."""
    model = sharp(TINY)
    subject = maps.make_subject(model, photo(40, 40))
    targets = maps.explained_classes(np.arange(7.0))
    overlays = list(maps.overlays(subject, targets, "abcdefg"))
    layers = maps.head_attention(model, subject.inputs)
    shown = maps.view(subject, overlays, layers)
    assert [each["name"] for each in shown["maps"]][:4] == [
        *("Relevance for g", "Relevance for f", "Relevance for e"),
        "Attention rollout",
    ]
    arrays = [*(each.values[None] for each in overlays), *layers]
    for packed, expected in zip([*shown["maps"], *shown["layers"]], arrays, strict=True):
        level = np.ptp(expected, axis=(1, 2), keepdims=True) / 255
        assert (level > 0).all()
        assert (np.abs(unpacked(packed, shown["grid"]) - expected) <= 0.51 * level + 1e-7).all()


def test_a_flat_map_stays_what_it_is() -> None:
    """Without an extent there is one level, and no number is lost to a division by zero."""
    actual = unpacked(maps._packed(np.full((2, 3, 4), 0.25)), [3, 4])
    np.testing.assert_array_equal(actual, 0.25)


# The height and width of an image, the width it is shown with, whether each of its pixels is a
# square, and what the page says of it.
SHOWN = [
    ((8, 8), 256, True, 1),
    ((20, 127), 254, True, 1),
    ((150, 200), 200, False, 1),  # its own size
    ((1000, 3000), 1024, False, 2),  # and the page says so
]


def test_a_picture_has_its_own_size(tiny: VisionTransformer) -> None:
    """It is enlarged where it is tiny, reduced where it is huge, and keeps its aspect."""
    for shape, width, crisp, notes in SHOWN:
        subject = maps.make_subject(tiny, photo(*shape))
        shown = maps._shown(subject.image)
        assert (shown["width"], shown["crisp"]) == (width, crisp)
        aspect = subject.image.shape[1] / subject.image.shape[0]
        assert aspect == pytest.approx(shape[1] / shape[0], rel=0.01)
        assert len(subject.notes) == notes
        assert f"{shape[1]} pixels wide and {shape[0]} high" in subject.notes[0]
        assert "It was resampled to 48 pixels wide" in subject.notes[0]
    for other in ((32, 48), (32, 48, 4), (1, 32, 48, 3)):
        with pytest.raises(ValueError, match=r"An image has the shape \(height, width, 3\)"):
            maps.make_subject(tiny, np.zeros(other, np.uint8))


def test_the_class_asked_for_comes_first() -> None:
    """Then the likeliest, each once; a class that is not there is an error."""
    scores = np.array([0.1, 0.6, 0.3])
    assert maps.explained_classes(scores) == [1, 2, 0]
    assert maps.explained_classes(scores, 2) == [2, 1, 0]
    for target in (3, -1):
        with pytest.raises(ValueError, match=f"There is no class {target}; the model has 3"):
            maps.explained_classes(scores, target)
