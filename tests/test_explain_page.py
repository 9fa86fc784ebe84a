"""Tests of keras_vit.explain.page, and of the maps on it."""

import base64
import dataclasses
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import browser
import keras
import matplotlib.image
import numpy as np
import pytest
from conftest import FLOAT32, TINY, images_for
from test_explain_attention import CONFIGS, sharp

from keras_vit import VisionTransformer, ViTConfig, explain, figures
from keras_vit.explain import attention, page

CHARTS = {"distance", "positions", "filters"}
NAMES = {"rollout", "relevance", "heads", "similarity", *CHARTS}
LABELS = ("ant", "bee", "cat", "dog", "elk", "fox", "<gnu>")
GENERATOR = np.random.default_rng(5)
# The height and width of an image, the width it is shown with, whether each of its pixels is a
# square, and what the page says of it.
SHOWN = [
    ((8, 8), 512, True, 1),
    *(((20, 127), 508, True, 1), ((150, 200), 512, False, 1)),
    ((600, 700), 700, False, 1),  # its own size
    ((1000, 3000), 1024, False, 2),  # and the page says so
]
# The charts and pictures that a model lacks: a hybrid's filters act on features, attention with
# relative or rotary positions adds none, and features have no class.
LACKING = {
    "hybrid": (CONFIGS["hybrid"], {"filters"}),
    "avg": (CONFIGS["avg"], set()),
    "map": (CONFIGS["map"], set()),
    "relative": (CONFIGS["relative"], {"positions"}),
    "every block": (CONFIGS["every block"], set()),
    "modern": (CONFIGS["modern"], {"positions"}),
    "features": (dataclasses.replace(TINY, classes=None), {"relevance"}),
}
# The row and column of the brightest patch of the map, as it is drawn.
BRIGHTEST = """() => {
    const map = document.querySelector(".map");
    const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
    const light = Array.from({ length: data.length / 4 }, (_, i) => data[4 * i] + data[4 * i + 1]);
    const place = light.indexOf(Math.max(...light));
    return [Math.floor(place / map.width), place % map.width];
}"""


def pixels(config: ViTConfig) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, config.input_shape, dtype=np.uint8)


class Page:
    """What a page refers to, says, and gives to its script."""

    def __init__(self, text: str) -> None:
        visible = re.sub(r"(?s)<(script|style)[ >].*?</\1>", "", text)
        self.references = re.findall(r"""\b(?:src|href)\s*=\s*["']?([^"'\s>]+)""", visible)
        self.said = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", visible)).split())
        match = re.search(r'(?s)id="view">(.*?)</script>', text)
        assert match is not None
        self.view: dict[str, Any] = json.loads(match[1])


def photo(height: int, width: int) -> np.ndarray:
    return GENERATOR.integers(0, 256, (height, width, 3), dtype=np.uint8)


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
    actual = np.stack(attention.head_attention(next(attention.records(model, [images]))))
    assert actual.std() > 1e-3
    np.testing.assert_allclose(actual, expected, atol=FLOAT32)


def test_the_pooling_is_a_layer_with_heads_of_its_own() -> None:
    """Its number of heads may differ from that of the blocks."""
    config = dataclasses.replace(CONFIGS["map"], pooling_heads=1)
    model, images = sharp(config), images_for(config)[:1]
    layers = attention.head_attention(next(attention.records(model, [images])))
    assert [len(layer) for layer in layers] == [config.num_heads] * config.num_layers + [1]
    expected = explain.pooling_attention(model, images)[0].reshape(1, *config.grid)
    np.testing.assert_allclose(layers[-1], expected, atol=FLOAT32)
    shown = page.view(page.make_subject(model, photo(32, 48)), [], layers)
    names = [layer["name"] for layer in shown["layers"]]
    assert names == ["layer 0", "layer 1", "layer 2", "pooling"]


def test_what_the_page_shows_is_within_a_level() -> None:
    """Maps are written in 256 levels, from each its least value to its most; flat ones in one."""
    model = sharp(TINY)
    subject = page.make_subject(model, photo(40, 40))
    subject = dataclasses.replace(subject, scores=np.arange(7.0))
    overlays = page.overlays(subject, "abcdefg")
    relevance = attention.relevance(subject.record, [6])[0]
    np.testing.assert_allclose(overlays[0].values, 100 * relevance / relevance.sum(), rtol=1e-6)
    np.testing.assert_allclose(overlays[3].values, 100 * attention.rollout(subject.record)[0])
    layers = attention.head_attention(subject.record)
    shown = page.view(subject, overlays, layers)
    assert [each["name"] for each in shown["maps"]][:4] == [
        *("Relevance for g", "Relevance for f", "Relevance for e"),
        "Attention rollout",
    ]
    arrays = [*(each.values[None] for each in overlays), *layers]
    for packed, expected in zip([*shown["maps"], *shown["layers"]], arrays, strict=True):
        level = np.ptp(expected, axis=(1, 2), keepdims=True) / 255
        assert (level > 0).all()
        assert (np.abs(unpacked(packed, shown["grid"]) - expected) <= 0.51 * level + 1e-7).all()
    actual = unpacked(page._packed(np.full((2, 3, 4), 0.25)), [3, 4])
    np.testing.assert_array_equal(actual, 0.25)


def test_a_picture_has_its_own_size(tiny: VisionTransformer) -> None:
    """It is enlarged where it is tiny, reduced where it is huge, and keeps its aspect."""
    for shape, width, crisp, notes in SHOWN:
        subject = page.make_subject(tiny, photo(*shape))
        shown = page._shown(subject.image)
        assert (shown["width"], shown["crisp"]) == (width, crisp)
        aspect = subject.image.shape[1] / subject.image.shape[0]
        assert aspect == pytest.approx(shape[1] / shape[0], rel=0.01)
        assert len(subject.notes) == notes
        assert f"{shape[1]} pixels wide and {shape[0]} high" in subject.notes[0]
        assert "It was resampled to 48 pixels wide" in subject.notes[0]
    for other in ((32, 48), (32, 48, 4), (1, 32, 48, 3)):
        with pytest.raises(ValueError, match=r"An image has the shape \(height, width, 3\)"):
            page.make_subject(tiny, np.zeros(other, np.uint8))


def test_the_class_asked_for_comes_first() -> None:
    """Then the likeliest, each once; a class that is not there is an error."""
    scores = np.array([0.1, 0.6, 0.3])
    assert page.explained_classes(scores) == [1, 2, 0]
    assert page.explained_classes(scores, 2) == [2, 1, 0]
    for target in (3, -1):
        with pytest.raises(ValueError, match=f"There is no class {target}; the model has 3"):
            page.explained_classes(scores, target)


@pytest.mark.full
@pytest.mark.parametrize("name", LACKING)
def test_every_kind_of_model_has_its_page(name: str, tmp_path: Path) -> None:
    """PNGs and a page come of hybrids, every pooling and position, and of features."""
    config, lacking = LACKING[name]
    files = explain.write_explanation(sharp(config), pixels(config), tmp_path / "out")
    assert {file.stem for file in files[:-1]} == NAMES - lacking
    assert {file.name for file in (tmp_path / "out").iterdir()} == {file.name for file in files}
    for file in files[:-1]:
        assert matplotlib.image.imread(file).shape[1] > 300
    assert ("no classifier" in files[-1].read_text(encoding="utf-8")) == (name == "features")


def test_the_page_holds_everything_itself(tmp_path: Path) -> None:
    """Its charts are the PNG files and dark ones, it refers to nothing outside, labels are text."""
    *files, written = explain.write_explanation(
        sharp(TINY), pixels(TINY), tmp_path, labels=LABELS, target=6, title="a <b>.png"
    )
    text = written.read_text(encoding="utf-8")
    actual = Page(text)
    assert all(reference.startswith("data:") for reference in actual.references)
    contents = [base64.b64decode(r.split(",")[1]) for r in actual.references if "png" in r]
    charts = [file.read_bytes() for file in files if file.stem in CHARTS]
    assert contents[::2] == charts
    for day, night in zip(contents[::2], contents[1::2], strict=True):
        light, dark = (matplotlib.image.imread(io.BytesIO(file)) for file in (day, night))
        assert light.shape == dark.shape
        assert light[0, 0].tolist() == [1, 1, 1, 1]
        assert dark[0, 0, 3] == 0  # the page's own ground
    assert "What the model sees in a <b>.png" in actual.said
    assert "48 pixels wide and 32 high, as the model takes it" in actual.said
    shown = actual.view
    assert shown["maps"][0]["caption"].startswith("Class relevance for <gnu>:")
    assert [layer["name"] for layer in shown["layers"]] == ["layer 0", "layer 1", "layer 2"]
    assert len(text) < 3e6


@pytest.mark.full
def test_the_page_names_the_likeliest_classes(tmp_path: Path) -> None:
    """Their probabilities, and the relevance of the first; of a user's nested model as well."""
    logits, image = sharp(TINY), pixels(TINY)
    scores = np.asarray(page.make_subject(logits, image).scores)
    best = int(scores.argmax())
    written = explain.write_explanation(logits, image, tmp_path / "logits", labels=LABELS)[-1]
    shown = Page(written.read_text(encoding="utf-8"))
    assert f"{LABELS[best]} {scores[best]:.1%}" in shown.said
    assert shown.view["maps"][0]["name"] == f"Relevance for {LABELS[best]}"
    outer = keras.Input((32, 48, 3))
    scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(outer)
    nested = keras.Model(outer, keras.layers.Dense(2, activation="softmax")(logits(scaled)))
    written = explain.write_explanation(nested, image, tmp_path, labels=["yes", "no"])[-1]
    assert re.search(r"(yes|no) [\d.]+% (yes|no) [\d.]+%", Page(written.read_text()).said)
    two = keras.Model(outer, [nested.output, nested.output])
    assert "no classifier" in explain.write_explanation(two, image, tmp_path)[-1].read_text()


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    """The error comes before the first file."""
    bad: dict[str, dict[str, Any]] = {
        r"shape \(32, 48\)": {"image": np.zeros((32, 48))},
        "7 classes. Received: 1 labels": {"labels": ["one"]},
        "no class 7": {"target": 7},
    }
    model = sharp(TINY)
    for message, fields in bad.items():
        with pytest.raises(ValueError, match=message):
            explain.write_explanation(
                model, out=tmp_path / "out", **{"image": pixels(TINY), **fields}
            )
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_the_page_is_well_made_and_its_control_shows_the_chosen_head(tmp_path: Path) -> None:
    """Of each layer and head: the brightest patch, its value under the pointer, and the tile."""
    model, image = sharp(TINY), pixels(TINY)
    written = explain.write_explanation(model, image, tmp_path)[-1]
    assert browser.check_page(written) == []
    layers = attention.head_attention(page.make_subject(model, image).record)
    with (
        browser.opened_browser() as chromium,
        browser.opened_page(chromium, written.as_uri(), width=390) as (opened, heard),
    ):
        opened.select_option(".what", "attention")
        for layer, head in ((0, 1), (2, 0), (1, 2)):
            values = layers[layer][head]
            row, column = np.unravel_index(values.argmax(), values.shape)
            opened.locator(".layer").fill(str(layer))
            opened.locator(".tiles button").nth(head).click()
            caption = opened.inner_text(".caption")
            assert f"in layer {layer}, head {head}." in caption
            assert (figures.UNIFORM in caption) == figures.is_uniform(values)
            assert opened.evaluate(BRIGHTEST) == [row, column]
            box = opened.locator(".map").bounding_box()
            assert box is not None
            x, y = (
                (at + 0.5) / count for at, count in zip((column, row), TINY.grid[::-1], strict=True)
            )
            opened.locator(".map").hover(position={"x": x * box["width"], "y": y * box["height"]})
            said = opened.inner_text(".reading")
            assert f"Row {row}, column {column} of the patches: {values.max():.3g}" in said
        opened.select_option(".head", "mean")
        assert "in layer 1, the mean of the heads." in opened.inner_text(".caption")
        mean = layers[1].mean(axis=0)
        assert opened.evaluate(BRIGHTEST) == list(np.unravel_index(mean.argmax(), mean.shape))
        assert [each for each in heard if "getImageData" not in each] == []  # read by the test
        for weight in model.weights:
            weight.assign(weight * ("qkv" not in weight.path))  # all patches are attended to alike
        opened.goto(explain.write_explanation(model, image, tmp_path / "same")[-1].as_uri())
        opened.select_option(".what", "attention")
        assert f"It is {figures.UNIFORM}." in opened.inner_text(".caption")
