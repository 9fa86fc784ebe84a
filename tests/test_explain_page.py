"""Tests of keras_vit.explain.page."""

import base64
import dataclasses
import html.parser
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
from keras_vit.model import VisionTransformer

NAMES = {"rollout", "relevance", "heads", "similarity", "distance", "positions", "filters"}
LABELS = ("ant", "bee", "cat", "dog", "elk", "fox", "<gnu>")


def pixels(config: ViTConfig) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, config.input_shape, dtype=np.uint8)


class Page(html.parser.HTMLParser):
    """Collects what a page refers to and says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize(
    "name", ["hybrid", *(pytest.param(name, marks=pytest.mark.slow) for name in ("avg", "map"))]
)
@pytest.mark.slow
def test_every_kind_of_model_has_its_page(name: str, tmp_path: Path) -> None:
    """PNGs and a page come of square, oblong and hybrid models with every pooling."""
    config = CONFIGS[name]
    files = explain.write_explanation(sharp(config), pixels(config), tmp_path / "out")
    expected = NAMES - ({"filters"} if config.resnet_layers is not None else set())
    assert {file.stem for file in files[:-1]} == expected
    assert {file.name for file in (tmp_path / "out").iterdir()} == {file.name for file in files}
    for file in files[:-1]:
        assert matplotlib.image.imread(file).shape[1] > 300


def test_the_page_holds_everything_itself(tmp_path: Path) -> None:
    """Its pictures are the PNG files, it refers to nothing outside, and labels are escaped."""
    *files, written = explain.write_explanation(
        sharp(TINY), pixels(TINY), tmp_path, labels=LABELS, target=6, title="a <b>.png"
    )
    actual = Page(written.read_text(encoding="utf-8"))
    assert all(reference.startswith("data:") for reference in actual.references)
    contents = [base64.b64decode(r.split(",")[1]) for r in actual.references if "png" in r]
    assert contents == [file.read_bytes() for file in files]
    said = " ".join(actual.words)
    assert "What the model sees in a <b>.png" in said
    assert "32x48 pixels, as the model takes it" in said
    assert "speak for <gnu>" in said


@pytest.mark.slow
def test_the_page_names_the_likeliest_classes(tmp_path: Path) -> None:
    """Probabilities are the softmax of the logits, or the outputs where they are probabilities."""
    logits, image = sharp(TINY), pixels(TINY)
    softmax = VisionTransformer(dataclasses.replace(TINY, classifier_activation="softmax"))
    softmax.set_weights(logits.get_weights())
    inputs = (image[None].astype(np.float32) - 127.5) / 127.5
    scores = keras.ops.convert_to_numpy(softmax(inputs))[0]
    best = int(scores.argmax())
    for index, model in enumerate((logits, softmax)):
        written = explain.write_explanation(model, image, tmp_path / str(index), labels=LABELS)[-1]
        said = " ".join(Page(written.read_text(encoding="utf-8")).words)
        assert f"{LABELS[best]} {scores[best]:.1%}" in said


@pytest.mark.slow
def test_pixels_are_scaled_for_a_model_that_does_not(tmp_path: Path) -> None:
    """With preprocessing inside or not, the same image gives the same page."""
    model, image = sharp(TINY), pixels(TINY)
    inside = VisionTransformer(dataclasses.replace(TINY, include_preprocessing=True))
    inside.set_weights(model.get_weights())
    pages = [
        explain.write_explanation(each, image, tmp_path / str(index))[-1].read_text()
        for index, each in enumerate((model, inside))
    ]
    said = [re.sub(r"base64,[^\"]*", "", text) for text in pages]
    assert said[0] == said[1]


@pytest.mark.slow
def test_an_image_of_another_size_is_resampled_and_said(tmp_path: Path) -> None:
    """The page names both sizes."""
    image = np.zeros((50, 40, 3), np.uint8)
    written = explain.write_explanation(sharp(TINY), image, tmp_path)[-1]
    assert "50x40 pixels was resampled to 32x48" in written.read_text(encoding="utf-8")


@pytest.mark.slow
def test_features_have_a_page_without_relevance(tmp_path: Path) -> None:
    """A model without classifier is explained all the same."""
    model = sharp(dataclasses.replace(TINY, classes=None))
    *files, written = explain.write_explanation(model, pixels(TINY), tmp_path)
    assert {file.stem for file in files} == NAMES - {"relevance"}
    assert "no classifier" in written.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_users_model_has_a_page(tmp_path: Path) -> None:
    """Nested, it is given pixels, and its own classes are named."""
    inputs = keras.Input((32, 48, 3))
    scaled = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    outputs = keras.layers.Dense(2, activation="softmax")(sharp(TINY)(scaled))
    written = explain.write_explanation(
        keras.Model(inputs, outputs), pixels(TINY), tmp_path, labels=["yes", "no"]
    )[-1]
    assert re.search(r"(yes|no) [\d.]+%, (yes|no) [\d.]+%", written.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": np.zeros((32, 48))}, r"shape \(32, 48\)"),
        ({"labels": ["one"]}, "7 classes. Received: 1 labels"),
        ({"target": 7}, "no class 7"),
    ],
)
def test_bad_input_writes_nothing(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The error comes before the first file."""
    arguments = {"image": pixels(TINY), **arguments}
    with pytest.raises(ValueError, match=message):
        explain.write_explanation(sharp(TINY), out=tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    """Headless Chromium decodes every picture, and its console says nothing but our probe."""
    written = explain.write_explanation(sharp(TINY), pixels(TINY), tmp_path / "out")[-1]
    said = browser.console(written, tmp_path)
    assert said == ["loaded 7 of 7 title What the model sees in image"]


@pytest.mark.slow
def test_the_browser_would_see_an_error(tmp_path: Path) -> None:
    """A broken picture and a script's error are both noticed."""
    broken = tmp_path / "broken.html"
    broken.write_text(
        "<title>x</title><body><img src='data:image/png;base64,AAAA'>"
        "<script>nothing()</script></body>"
    )
    said = browser.console(broken, tmp_path)
    assert any("nothing is not defined" in line for line in said)
    assert any("loaded 0 of 1" in line for line in said)
