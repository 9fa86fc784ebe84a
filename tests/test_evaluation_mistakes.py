"""Tests of keras_vit.evaluation.report."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import keras
import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf
from conftest import TINY, randomize

from keras_vit.data import Split, load_digits
from keras_vit.evaluation import report
from keras_vit.model import VisionTransformer

SMALL = dataclasses.replace(
    TINY, input_shape=(8, 8, 3), patch_size=4, num_layers=1, classes=10, include_preprocessing=True
)
LABELS = tuple(f"digit {index}" for index in range(10))


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return randomize(VisionTransformer(SMALL))


def test_they_are_wrong_and_sorted_by_how_sure(model: VisionTransformer) -> None:
    """Nothing surer is left out, nothing right is in, names and numbers are those of the image."""
    split = load_digits().test
    mistakes = report.confident_mistakes(model, split, labels=LABELS, count=12)
    scores = keras.ops.convert_to_numpy(model(split.images.astype(np.float32)))
    probabilities = keras.ops.convert_to_numpy(keras.ops.softmax(scores))
    wrong = scores.argmax(axis=1) != split.targets
    expected = np.sort(probabilities.max(axis=1)[wrong])[::-1][:12]
    np.testing.assert_allclose([each.probability for each in mistakes], expected, rtol=1e-4)
    for each in mistakes:
        assert each.label == LABELS[split.targets[each.index]]
        assert each.predicted == LABELS[scores[each.index].argmax()] != each.label
        assert each.name == f"image {each.index}"


def test_a_perfect_model_makes_none(model: VisionTransformer) -> None:
    """On targets that are what it says, there is nothing to show, and drawing says so."""
    split = load_digits().validation
    predictions = keras.ops.convert_to_numpy(model(split.images.astype(np.float32))).argmax(axis=1)
    perfect = Split(images=split.images, targets=predictions.astype(np.int32))
    assert report.confident_mistakes(model, perfect, labels=LABELS) == ()
    with pytest.raises(ValueError, match="no mistakes"):
        report.plot_mistakes((), perfect, "nowhere.png")


@pytest.mark.full
def test_they_are_drawn_from_files_too(model: VisionTransformer, tmp_path: Path) -> None:
    """Images on the disk are named by their path, and a picture has them, or one."""
    digits = load_digits().test.take(range(10))
    paths = [tmp_path / f"{index}.png" for index in range(10)]
    for path, image in zip(paths, digits.images, strict=True):
        path.write_bytes(tf.io.encode_png(image).numpy())
    split = Split(images=np.array([str(path) for path in paths]), targets=digits.targets)
    mistakes = report.confident_mistakes(model, split, labels=LABELS, count=6)
    assert len({each.name for each in mistakes} & {str(path) for path in paths}) == 6
    for count in (1, 6):
        report.plot_mistakes(mistakes[:count], split, tmp_path / f"{count}.png")
        assert matplotlib.image.imread(tmp_path / f"{count}.png").std() > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"count": 0}, "count=0"), ({"labels": ("one",)}, "10 classes.*1 labels")],
)
def test_bad_arguments_are_refused(
    model: VisionTransformer, arguments: dict[str, Any], message: str
) -> None:
    """The error says what is allowed."""
    with pytest.raises(ValueError, match=message):
        report.confident_mistakes(model, load_digits().test, **{"labels": LABELS, **arguments})


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pip command is in it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        report.plot_mistakes((), load_digits().test, "nowhere.png")
