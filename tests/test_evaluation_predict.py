"""Tests of keras_vit.evaluation.predictions."""

import dataclasses
import itertools
import threading
from pathlib import Path

import image_files
import numpy as np
import pytest
from conftest import FLOAT32, TINY, randomize

from keras_vit import VisionTransformer, variant
from keras_vit.data import Resizing, Split, Views, read_image
from keras_vit.evaluation import evaluate, predict, predictions
from keras_vit.layers.random import skip_initialization

LABELS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    config = dataclasses.replace(
        TINY,
        input_shape=(8, 12, 3),
        patch_size=4,
        num_layers=1,
        classes=3,
        include_preprocessing=True,
    )
    return randomize(VisionTransformer(config))


def pictures() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    sizes = [(8, 12), (30, 20), (5, 5)]
    return [generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def test_top_limits_the_classes(model: VisionTransformer) -> None:
    """One on demand, all if more are asked for; labels and images that do not fit are told."""
    for top, count in ((1, 1), (9, 3)):
        found = predict(model, pictures(), labels=LABELS, top=top)
        assert [len(each) for each in found] == [count] * 3
    assert predict(model, [], labels=LABELS) == []
    with pytest.raises(ValueError, match=r"3 classes. Received: 2 labels"):
        predict(model, pictures(), labels=LABELS[:2])
    with pytest.raises(ValueError, match=r"Received: an array of shape \(8, 12\)"):
        predict(model, [np.zeros((8, 12))], labels=LABELS)


def noise(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(7)
    return [generator.integers(0, 256, (9, 9, 3), dtype=np.uint8) for _ in range(count)]


def test_numbers_do_not_depend_on_the_other_images(model: VisionTransformer) -> None:
    """To the bit, at one place of the batch; at another place other lanes may sum otherwise."""
    images = noise(predictions.prediction_batch_size(model) + 3)
    together = predict(model, images, labels=LABELS)
    assert len({found[0].probability for found in together}) == len(images)
    for count in (1, 6):
        assert predict(model, images[:count], labels=LABELS) == together[:count]
    moved = [
        *predict(model, images[::-1], labels=LABELS),
        *predict(model, images[5:6], labels=LABELS),
    ]
    for actual, expected in zip(moved, [*together[::-1], together[5]], strict=True):
        assert [one.label for one in actual] == [one.label for one in expected]
        assert [one.probability for one in actual] == pytest.approx(
            [one.probability for one in expected], rel=0, abs=FLOAT32
        )


def test_the_batch_grows_as_the_model_shrinks(model: VisionTransformer) -> None:
    """One image of B/16 keeps a processor busy; of a small model many do."""
    assert predictions.prediction_batch_size(model) == 32
    with skip_initialization():  # nobody asks for their values
        assert predictions.prediction_batch_size(VisionTransformer(variant("B/16"))) == 1


def test_views_are_averaged(model: VisionTransformer) -> None:
    """Test-time augmentation is the mean of the probabilities of the views, in both functions."""
    images, views = noise(4), Views(flip=True)
    expected = []
    for image in images:
        stack = np.asarray(views.stack(image, Resizing((8, 12))))
        logits = np.asarray(model.predict_on_batch(stack), np.float64)
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        expected.append(chances.mean(axis=0))
    found = predict(model, images, labels=LABELS, tta=views)
    split = Split(images=np.stack(images), targets=np.array([0, 1, 2, 0], np.int32))
    scores = predictions.log_probabilities(model, split, tta=views)

    for one, chances in zip(found, expected, strict=True):
        assert {p.label: p.probability for p in one} == pytest.approx(
            dict(zip(LABELS, chances, strict=True)), rel=1e-5
        )
    np.testing.assert_allclose(np.exp(scores), expected, rtol=1e-5)
    assert predict(model, images, labels=LABELS) != found
    measured = evaluate(model, split, labels=LABELS, tta=views).to_dict()
    plain = evaluate(model, split, labels=LABELS).to_dict()
    assert measured["test_time_augmentation"] == views.to_dict()
    assert "test_time_augmentation" not in plain
    assert measured["loss"] == pytest.approx(-scores[np.arange(4), split.targets].mean())
    assert measured["loss"] != plain["loss"]


def test_files_are_predicted_in_order(model: VisionTransformer, tmp_path: Path) -> None:
    """As their pixels are; what cannot be read is an error in its place."""
    files = [image_files.write_image(tmp_path / f"{n}.png", seed=n) for n in range(40)]
    image_files.damage(files[3])
    files[35].unlink()
    found = dict(predictions.predict_files(model, files, labels=LABELS, top=2))
    sound = [file for place, file in enumerate(files) if place not in (3, 35)]

    assert list(found) == files
    assert [found[file] for file in sound] == predict(
        model, [read_image(file) for file in sound], labels=LABELS, top=2
    )
    assert isinstance(found[files[3]], ValueError)
    assert isinstance(found[files[35]], FileNotFoundError)
    with pytest.raises(ValueError, match="Received: 1 labels"):
        next(predictions.predict_files(model, files, labels=["a"]))


def test_few_files_are_held_however_many_there_are(
    model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading keeps a few batches ahead of what is taken, of sound and of damaged files alike."""
    lock, read = threading.Lock(), []
    (image,) = noise(1)

    def read_one(path: str) -> np.ndarray:
        with lock:
            read.append(path)
        if int(path) >= 200:
            raise ValueError("damaged")
        return image

    monkeypatch.setattr(predictions, "read_image", read_one)
    batch = predictions.prediction_batch_size(model)
    found = predictions.predict_files(model, map(str, itertools.count()), labels=LABELS)
    for taken, (path, _) in enumerate(found, start=1):
        assert path == str(taken - 1)
        assert len(read) <= taken + 8 * batch
        if taken == 600:
            break
    found.close()
