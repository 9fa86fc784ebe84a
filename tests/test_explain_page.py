"""Tests of keras_vit.explain.page."""

import base64
import dataclasses
import html.parser
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
from conftest import TINY
from test_explain_attention import CONFIGS, sharp

from keras_vit import explain
from keras_vit.config import ViTConfig
from keras_vit.explain import maps
from keras_vit.model import VisionTransformer

CHARTS = {"distance", "positions", "filters"}
NAMES = {"rollout", "relevance", "heads", "similarity", *CHARTS}
LABELS = ("ant", "bee", "cat", "dog", "elk", "fox", "<gnu>")


def pixels(config: ViTConfig) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, config.input_shape, dtype=np.uint8)


class Page(html.parser.HTMLParser):
    """Collects what a page refers to, says, and gives to its script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.words: list[str] = []
        visible = re.sub(r"(?s)<(script|style)[ >].*?</\1>", "", text)
        self.feed(visible)
        self.said = " ".join(" ".join(self.words).split())
        match = re.search(r'(?s)id="view">(.*?)</script>', text)
        assert match is not None
        self.view: dict[str, Any] = json.loads(match[1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


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
    assert shown["maps"][0]["caption"].startswith("Which patches speak for <gnu>:")
    assert [layer["name"] for layer in shown["layers"]] == ["layer 0", "layer 1", "layer 2"]
    assert len(text) < 3e6


@pytest.mark.full
def test_the_page_names_the_likeliest_classes(tmp_path: Path) -> None:
    """By the softmax of logits, or outputs that are probabilities, as of a user's nested model."""
    logits, image = sharp(TINY), pixels(TINY)
    softmax = VisionTransformer(dataclasses.replace(TINY, classifier_activation="softmax"))
    softmax.set_weights(logits.get_weights())
    inputs = (image[None].astype(np.float32) - 127.5) / 127.5
    scores = keras.ops.convert_to_numpy(softmax(inputs))[0]
    best = int(scores.argmax())
    for index, model in enumerate((logits, softmax)):
        written = explain.write_explanation(model, image, tmp_path / str(index), labels=LABELS)[-1]
        page = Page(written.read_text(encoding="utf-8"))
        assert f"{LABELS[best]} {scores[best]:.1%}" in page.said
        assert page.view["maps"][0]["name"] == f"Relevance for {LABELS[best]}"
    outer = keras.Input((32, 48, 3))
    scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(outer)
    nested = keras.Model(outer, keras.layers.Dense(2, activation="softmax")(logits(scaled)))
    written = explain.write_explanation(nested, image, tmp_path, labels=["yes", "no"])[-1]
    assert re.search(r"(yes|no) [\d.]+% (yes|no) [\d.]+%", Page(written.read_text()).said)


@pytest.mark.full
def test_pixels_are_scaled_for_a_model_that_does_not(tmp_path: Path) -> None:
    """With preprocessing inside or not, the same image gives the same page."""
    model, image = sharp(TINY), pixels(TINY)
    inside = VisionTransformer(dataclasses.replace(TINY, include_preprocessing=True))
    inside.set_weights(model.get_weights())
    pages = [
        Page(explain.write_explanation(each, image, tmp_path / str(index))[-1].read_text())
        for index, each in enumerate((model, inside))
    ]
    assert pages[0].said == pages[1].said
    assert pages[0].view["image"] == pages[1].view["image"]


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


# The row and column of the brightest patch of the map, as it is drawn.
BRIGHTEST = """() => {
    const map = document.querySelector(".map");
    const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
    const light = Array.from({ length: data.length / 4 }, (_, i) => data[4 * i] + data[4 * i + 1]);
    const place = light.indexOf(Math.max(...light));
    return [Math.floor(place / map.width), place % map.width];
}"""


@pytest.mark.full
def test_the_page_is_well_made_and_its_control_shows_the_chosen_head(tmp_path: Path) -> None:
    """Of each layer and head: the brightest patch, its value under the pointer, and the tile."""
    model, image = sharp(TINY), pixels(TINY)
    written = explain.write_explanation(model, image, tmp_path)[-1]
    assert browser.check_page(written) == []
    layers = maps.head_attention(model, maps.make_subject(model, image).inputs)
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
            assert f"in layer {layer}, head {head}." in opened.inner_text(".caption")
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
