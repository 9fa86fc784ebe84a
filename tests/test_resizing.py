"""Tests of the preparation that a checkpoint brings: size, filter, crop; and of all that uses it.

The numbers in `golden/resizing.npz` are what timm 1.0.31 (torchvision 0.28, Pillow 13) and the
image processors of transformers 5.24 made of ten photos by the settings in `golden/resizing.json`.
"""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import published
import pytest
import skimage
import tensorflow as tf
import trainings
from conftest import FLOAT32
from published import MODERN

import keras_vit
from keras_vit import evaluation, export, training
from keras_vit.data import Augmentation, ImageData, Resizing, Split, images, read_image, resizing_of
from keras_vit.explain import page

SETTINGS = json.loads((published.GOLDEN / "resizing.json").read_text())
CHECKPOINTS: dict[str, dict[str, Any]] = SETTINGS["checkpoints"]
GOLDEN = np.load(published.GOLDEN / "resizing.npz")
PHOTOS = ["astronaut", "brick", "camera", "chelsea", "coffee", "coins", "grass", "gravel", "moon"]
PHOTOS += ["motorcycle_left"]
LIMIT = 2.55  # a hundredth of a pixel's range; both libraries round to eight bits, twice


def photos() -> list[np.ndarray]:
    """Ten photos that scikit-image carries, three of them cut to other aspects."""
    folder = Path(skimage.__file__).parent / "data"
    parts: dict[str, Any] = {"coins": np.s_[:101], "moon": np.s_[:, :170]}
    parts["gravel"] = np.s_[:507, :257]
    return [read_image(folder / f"{name}.png")[parts.get(name, ...)] for name in PHOTOS]


def checkpoint(folder: Path, settings: dict[str, Any]) -> Path:
    """A tiny file of timm or transformers with these settings of its images."""
    is_timm, made = "crop_mode" in settings, folder / "made"
    shutil.copytree(MODERN / ("timm_vit" if is_timm else "hf_vit_cls"), made)
    file = made / ("config.json" if is_timm else "preprocessor_config.json")
    said = json.loads(file.read_text())
    (said["pretrained_cfg"] if is_timm else said).update(settings)
    file.write_text(json.dumps(said))
    return made


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_photos_become_what_timm_and_transformers_make_of_them(name: str, tmp_path: Path) -> None:
    """By the settings beside the weights alone: within a hundredth of a pixel's range."""
    expected = GOLDEN[name].astype(np.float32)
    folder = checkpoint(tmp_path, CHECKPOINTS[name])
    resizing = resizing_of(keras_vit.load(folder, input_shape=expected.shape[1:]))
    actual = [images.resize_image(photo, resizing).numpy() for photo in photos()]
    assert np.abs(actual - expected).max() < LIMIT
    assert np.abs(actual - expected).mean() < LIMIT / 5
    whole = [images.resize_image(photo, Resizing(resizing.size)).numpy() for photo in photos()]
    assert (np.abs(whole - expected).max() > 100) == (name != "hf_vit")


def test_sizes_and_places_are_whole_numbers_of_the_libraries() -> None:
    """Python's own arithmetic, as torchvision and timm have it, for any shape; in a graph, too."""
    generator = np.random.default_rng(0)
    graph: Any = tf.function(images.placement)
    for _ in range(300):
        side, *shape = (int(n) for n in generator.integers([8, 1, 1], [400, 5000, 5000]))
        crop_pct = float(generator.choice([0.875, 0.9, 0.95, 0.965, 1.0, 7 / 13]))
        short = int(side / crop_pct)
        resized = [int(short * each / min(shape)) for each in shape]
        made = Resizing((side, side), True, "bicubic", crop_pct, "center")
        squash = made._replace(crop_mode="squash")
        for rule, expected in ((made, resized), (squash, [short, short])):
            free = [each - side for each in expected]
            size, start = graph(shape, rule)
            assert size.numpy().tolist() == expected
            assert start.numpy().tolist() == [round(each / 2) for each in free]
            floor = images.placement(shape, rule._replace(crop_offset="floor"))[1]
            assert np.asarray(floor).tolist() == [each // 2 for each in free]


def test_settings_of_processors_are_read_or_refused(tmp_path: Path) -> None:
    """The forms of old files and new; what has no one size is a sentence with the file's name."""
    for number, (settings, expected) in enumerate(SETTINGS["read"]):
        config = keras_vit.load(checkpoint(tmp_path / str(number), settings)).config
        interpolation, crop_pct, *rule = config.resizing((40, 40))[2:]
        assert [interpolation, pytest.approx(crop_pct), *rule] == expected
        assert 40 // crop_pct == round(40 / expected[1])
    for number, (settings, message) in enumerate(SETTINGS["refused"]):
        folder = checkpoint(tmp_path / f"not {number}", settings)
        with pytest.raises(ValueError, match=message) as caught:
            keras_vit.load(folder)
        file = "/config.json" if "crop_mode" in settings else "/preprocessor_config.json"
        assert file in str(caught.value)
        assert "\n" not in str(caught.value)


def test_timm_crops_without_a_word(tmp_path: Path) -> None:
    """Its defaults are those that its files were evaluated by."""
    folder = checkpoint(tmp_path, {"crop_mode": None, "crop_pct": None, "interpolation": None})
    made = resizing_of(keras_vit.load(folder))
    assert made == Resizing((64, 64), True, "bicubic", 0.875, "center", "round")
    assert resizing_of(keras_vit.load(folder, input_shape=(32, 48, 3)))[2:] == made[2:]


def test_everything_that_takes_photos_prepares_them_alike(tmp_path: Path) -> None:
    """Prediction, evaluation, explanation, training's own evaluation, and the exported graph."""
    folder = checkpoint(tmp_path, {**CHECKPOINTS["timm_center"], "crop_pct": 0.5})
    model = keras_vit.load(folder, classifier_activation="softmax")
    labels = [str(number) for number in range(model.config.classes or 0)]
    chosen, resizing = photos()[3:6], resizing_of(model)
    made = [images.resize_image(photo, resizing) for photo in chosen]
    expected = np.asarray(model(np.stack(made)))
    whole = [images.resize_image(photo, Resizing(resizing.size)) for photo in chosen]
    assert np.abs(np.asarray(model(np.stack(whole))) - expected).max() > 0.01  # it matters
    files = [str(tmp_path / f"{number}.png") for number in range(len(chosen))]
    for file, photo in zip(files, chosen, strict=True):
        tf.io.write_file(file, tf.io.encode_png(photo))
    split = Split(images=np.array(files, object), targets=np.arange(len(files), dtype=np.int32))
    model.save(tmp_path / "vit.keras")
    around = keras.Sequential([keras.Input((64, 64, 3)), model])
    for one in (model, around, keras_vit.load(tmp_path / "vit.keras")):
        found = evaluation.predict(one, chosen, labels=labels, top=len(labels))
        rows = [[e.probability for e in sorted(each, key=lambda e: e.label)] for each in found]
        np.testing.assert_allclose(rows, expected, atol=FLOAT32)
        scores = evaluation.predictions.log_probabilities(one, split)
        np.testing.assert_allclose(np.exp(scores), expected, atol=FLOAT32)
        subject = page.make_subject(one, chosen[0])
        np.testing.assert_allclose(np.asarray(subject.scores), expected[0], atol=FLOAT32)
        np.testing.assert_array_equal(subject.image, chosen[0][75:225, 150:301])  # 300 by 451
        assert subject.notes[0].startswith("The image is 451 pixels wide and 300 high. Its mid")
    export(model, tmp_path / "out", labels=labels, verify=False)
    serve = tf.saved_model.load(str(tmp_path / "out/1")).signatures["serving_default"]
    contents = tf.constant([Path(file).read_bytes() for file in files])
    np.testing.assert_allclose(serve(contents)["scores"][:, 0], expected.max(axis=1), atol=FLOAT32)
    trained, targets = trainings.batches(split, resizing=resizing, epochs=1)[0]
    np.testing.assert_array_equal(trained, np.stack(made)[targets])
    crop = Augmentation(crop=0.999)  # which is not cropped again
    trained, targets = trainings.batches(split, resizing=resizing, epochs=1, augmentation=crop)[0]
    assert np.abs(trained - np.stack(whole)[targets]).mean() < 8
    data = ImageData(
        source=str(tmp_path), labels=tuple(labels), train=split, validation=split, test=split
    )
    start = keras_vit.load(folder, classifier_activation=None)
    recipe = training.Recipe(epochs=1, batch_size=3, learning_rate=1e-3)
    run = training.train(data, out=tmp_path / "run", model=start, recipe=recipe)
    assert resizing_of(run.model) == resizing
    (row,) = csv.DictReader((tmp_path / "run/history.csv").read_text().splitlines())
    loss = evaluation.evaluate(run.model, split, labels=labels).loss
    assert float(row["validation_loss"]) == pytest.approx(loss, rel=1e-5)
