"""Tests of keras_vit.cli.explain."""

import dataclasses
import json
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from conftest import TINY, randomize

from keras_vit.cli.main import main
from keras_vit.data import load_digits
from keras_vit.model import VisionTransformer
from keras_vit.training import RECIPES, train

pytestmark = pytest.mark.full

CONFIG = dataclasses.replace(
    TINY, input_shape=(16, 24, 3), num_layers=1, classes=10, include_preprocessing=True
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits, trained for one epoch, and an image of theirs beside it."""
    folder = tmp_path_factory.mktemp("explain")
    recipe = dataclasses.replace(RECIPES["digits"], epochs=1, batch_size=512)
    train(load_digits(), out=folder / "run", model=CONFIG, recipe=recipe)
    image = load_digits().test.images[0]
    (folder / "digit.png").write_bytes(tf.io.encode_png(image).numpy())
    return folder


def test_a_run_is_explained(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page and its pictures are written; the size that was resampled is said."""
    out = tmp_path / "seen"
    arguments = ["explain", str(run / "run"), str(run / "digit.png"), "--out", str(out)]
    assert main([*arguments, "--class", "7"]) == 0
    said = capsys.readouterr().out
    assert "8 pixels wide and 8 high; it was resampled to 24 pixels wide and 16 high" in said
    assert f"Open {out / 'index.html'} in a browser." in said
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "speak for 7:" in page
    assert "digit.png" in page
    assert (out / "rollout.png").stat().st_size > 5000


def test_machines_get_the_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json one line names every file; a .keras file is as good as a run."""
    model = str(run / "run" / "model.keras")
    arguments = ["explain", model, str(run / "digit.png"), "--out", str(tmp_path), "--json"]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert {Path(file) for file in said["files"]} == set(tmp_path.iterdir())
    assert (said["image"], said["taken"]) == ([8, 8], [16, 24])


def test_imagenet_classes_have_their_names(run: Path, tmp_path: Path) -> None:
    """A model with 1,000 classes is taken for one of ImageNet."""
    model = randomize(VisionTransformer(dataclasses.replace(CONFIG, classes=1000)))
    model.save(tmp_path / "model.keras")
    arguments = [str(tmp_path / "model.keras"), str(run / "digit.png"), "--out", str(tmp_path)]
    assert main(["explain", *arguments, "--class", "tabby"]) == 0
    assert "speak for tabby" in (tmp_path / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "nothing.keras"}, "There is no model file 'nothing.keras'"),
        ({"model": "nothing"}, "There is no run directory 'nothing'"),
        ({"image": "nothing.png"}, "There is no image file 'nothing.png'"),
        ({"class": "cat"}, "There is no class 'cat'; give the number or name of a class, such"),
        ({"class": "10"}, "There is no class 10; the model has 10"),
    ],
)
def test_bad_input_is_one_line(
    change: dict[str, str],
    message: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit code is 1, the error one line, and nothing is written."""
    given = {"model": str(run / "run"), "image": str(run / "digit.png"), "class": "1", **change}
    out = tmp_path / "seen"
    arguments = [given["model"], given["image"], "--class", given["class"], "--out", str(out)]
    assert main(["explain", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"keras-vit: error: {message}")
    assert not out.exists()


def test_a_model_without_a_vit_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any Keras file may be named; what cannot be explained is said."""
    other = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten()])
    other.save(tmp_path / "other.keras")
    arguments = [str(tmp_path / "other.keras"), str(run / "digit.png"), "--out", str(tmp_path)]
    assert main(["explain", *arguments]) == 1
    assert "contains 0 Vision Transformers" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "other.keras"]
