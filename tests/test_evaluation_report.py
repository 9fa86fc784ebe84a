"""Tests of what an evaluation leaves: numbers, pictures, mistakes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import keras
import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf
from conftest import TINY, randomize
from PIL import Image

from keras_vit.data import Split, load_digits
from keras_vit.evaluation import Evaluation, confident_mistakes, evaluate, write_report
from keras_vit.figures import plot_confusion, plot_mistakes
from keras_vit.model import VisionTransformer

SMALL = dataclasses.replace(
    TINY, input_shape=(8, 8, 3), patch_size=4, num_layers=1, classes=10, include_preprocessing=True
)
LABELS = tuple(f"digit {index}" for index in range(10))


def evaluation(classes: int, *, labels: tuple[str, ...] | None = None) -> Evaluation:
    confusion = np.random.default_rng(0).integers(0, 3, (classes, classes)) + np.eye(
        classes, dtype=int
    )
    return Evaluation(
        labels=labels or tuple(f"class {place}" for place in range(classes)),
        confusion=confusion,
        loss=0.5,
        top5_accuracy=None,
    )


def test_the_report_is_numbers_and_a_picture(tmp_path: Path) -> None:
    """metrics.json holds every split, and there is nothing but the two files."""
    for splits in (
        {"validation": evaluation(2), "test": evaluation(3)},
        {"validation": evaluation(2)},
    ):
        folder = tmp_path / str(len(splits))
        folder.mkdir()
        write_report(folder, splits)
        written = json.loads((folder / "metrics.json").read_text())
        assert written == {name: one.to_dict() for name, one in splits.items()}
        assert sorted(file.name for file in folder.iterdir()) == ["confusion.png", "metrics.json"]
    with pytest.raises(ValueError, match="needs the evaluation of a split"):
        write_report(tmp_path, {})


def test_a_confusion_of_any_size_is_drawn(tmp_path: Path) -> None:
    """Of two to very many classes, called "$x_$" or by eighty letters, it has ink and opens."""
    for classes, labels in ((2, ("$x_$", "a" * 80)), (20, None), (100, None), (150, None)):
        measured = evaluation(classes, labels=labels)
        figure = plot_confusion(measured.confusion, measured.labels)
        figure.savefig(tmp_path / "confusion.png", dpi=120)
        image = Image.open(tmp_path / "confusion.png").convert("L")
        assert 500 < image.width < 2500
        assert np.asarray(image).min() < 100


def test_a_failure_keeps_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while drawing leaves what was there, and no temporary file."""
    (tmp_path / "confusion.png").write_text("old")
    monkeypatch.setattr("keras_vit.figures._number_cells", None)

    with pytest.raises(TypeError):
        write_report(tmp_path, {"test": evaluation(3)})

    assert (tmp_path / "confusion.png").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return randomize(VisionTransformer(SMALL))


def test_mistakes_are_wrong_and_sorted_by_how_sure(model: VisionTransformer) -> None:
    """Nothing surer is left out, nothing right is in, names and numbers are those of the image."""
    split = load_digits().test
    mistakes = confident_mistakes(evaluate(model, split, labels=LABELS), split, count=12)
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
    """There is nothing to show, and drawing says so; as it says what counts and labels may be."""
    split = load_digits().validation
    predictions = keras.ops.convert_to_numpy(model(split.images.astype(np.float32))).argmax(axis=1)
    perfect = Split(images=split.images, targets=predictions.astype(np.int32))
    measured = evaluate(model, perfect, labels=LABELS)
    assert confident_mistakes(measured, perfect) == ()
    with pytest.raises(ValueError, match="no mistakes"):
        plot_mistakes((), ())
    bare = dataclasses.replace(measured, predictions=None)
    wrong: dict[str, tuple[Any, ...]] = {
        "count=0": (measured, perfect, 0),
        "Received: 179 predictions, 359 images": (measured, load_digits().test, 1),
        "Received: 0 predictions": (bare, perfect, 1),
    }
    for message, (about, images, count) in wrong.items():
        with pytest.raises(ValueError, match=message):
            confident_mistakes(about, images, count=count)
    with pytest.raises(ValueError, match=r"10 classes, the data 1"):
        evaluate(model, split, labels="a")


@pytest.mark.full
def test_mistakes_are_drawn_from_files_too(model: VisionTransformer, tmp_path: Path) -> None:
    """Images on the disk are named by their path, and a picture has them, or one."""
    digits = load_digits().test.take(range(10))
    paths = [tmp_path / f"{index}.png" for index in range(10)]
    for path, image in zip(paths, digits.images, strict=True):
        path.write_bytes(tf.io.encode_png(image).numpy())
    split = Split(images=np.array([str(path) for path in paths]), targets=digits.targets)
    mistakes = confident_mistakes(evaluate(model, split, labels=LABELS), split, count=6)
    assert len({each.name for each in mistakes} & {str(path) for path in paths}) == 6
    for count in (1, 6):
        shown = mistakes[:count]
        figure = plot_mistakes(shown, [split.pixels(each.index) for each in shown])
        figure.savefig(tmp_path / f"{count}.png")
        assert matplotlib.image.imread(tmp_path / f"{count}.png").std() > 0.05
