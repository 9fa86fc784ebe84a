"""`predict` and `evaluate` run exported models of every format as they run a model."""

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import image_files
import keras
import numpy as np
import pytest
from exported import served_model

from keras_vit import cli
from keras_vit.data import load_data, load_test_folder
from keras_vit.evaluation import evaluate, log_probabilities
from keras_vit.exporting import artefacts, export, opening, web
from keras_vit.exporting.clean import runners
from keras_vit.model import VisionTransformer

pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

LABELS = ("plain", "striped")
# By how much probabilities may differ: rounded weights err, all others do not.
LIMITS = {"savedmodel": 1e-5, "onnx": 1e-5, "web": 1e-5, "tflite": 1e-5, "tflite-fp16": 1e-3,
          "tflite-int8": 0.03, "onnx-int8": 0.03}  # fmt: skip


def made() -> VisionTransformer:
    """A model whose images are resized and normalised in a way of its own."""
    return served_model(
        num_layers=1, classes=2, antialias=False, image_mean=(0.4, 0.5, 0.6),
        image_std=(0.2, 0.3, 0.25),
    )  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, the model as a file, and one version of it in every format, unverified."""
    root = tmp_path_factory.mktemp("opening")
    image_files.write_classes(root / "photos", count=6)
    model = made()
    model.save(root / "model.keras")
    runtime = root / web.ARCHIVE  # as empty files: no page is opened here
    with tarfile.open(runtime, "w") as archive:
        for name in web.RUNTIME:
            archive.addfile(tarfile.TarInfo(f"package/dist/{name}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web, "find_runtime", lambda place: runtime)
        export(model, root / "pets", formats=tuple(LIMITS), labels=LABELS, verify=False)
    return root


def path_of(name: str, root: Path) -> Path:
    ending, _, kind = name.partition("-")
    folder = root / "pets" / artefacts.FOLDERS[name] / "1"
    return (
        folder
        if ending in ("savedmodel", "web")
        else folder / f"pets{'-' * bool(kind)}{kind}.{ending}"
    )


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines that a command prints, and its errors."""
    cli.main([*map(str, words), "--json"])
    printed = capsys.readouterr()
    return [json.loads(line) for line in printed.out.splitlines()], printed.err


@pytest.fixture(scope="module")
def expected(place: Path) -> np.ndarray:
    """The model's own log-probabilities of the photos."""
    return log_probabilities(made(), load_data(str(place / "photos")).train)


@pytest.mark.parametrize("name", LIMITS)
def test_every_format_answers_like_the_model(name: str, place: Path, expected: np.ndarray) -> None:
    """Labels, size, filter and normalisation are those of the model, and so are the answers."""
    opened = opening.open_artefact(path_of(name, place))
    assert (opened.format, opened.about.labels, opened.is_recorded) == (name, LABELS, True)
    assert np.ptp(np.exp(expected[:, 0])) > 0.05
    answers = log_probabilities(opened.model, load_data(str(place / "photos")).train)
    np.testing.assert_allclose(np.exp(answers), np.exp(expected), atol=LIMITS[name])


def test_commands_take_an_export_as_they_take_a_model(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers of `predict`, `evaluate` and `--tta` are those of the model."""
    photos, names = place / "photos", ("model.keras", "pets/onnx/1/pets.onnx")
    of_model, of_export = (
        command(capsys, "predict", place / name, photos / "striped", "--tta") for name in names
    )
    assert len(of_export[0]) == len(of_model[0]) > 5
    for ours, theirs in zip(of_model[0], of_export[0], strict=True):
        first, second = (each["predictions"] for each in (ours, theirs))
        places = {"0": "plain", "1": "striped"}
        assert places[first[0]["label"]] == second[0]["label"]
        assert first[0]["probability"] == pytest.approx(second[0]["probability"], abs=1e-5)
    out = place / "report"
    rows, _ = command(capsys, "evaluate", place / "pets/1", "--data", photos, "--out", out)
    (evaluated,) = [row for row in rows if row["event"] == "evaluation"]
    data = load_data(str(photos))
    whole = load_test_folder(str(photos), labels=LABELS).test
    expected = evaluate(made(), whole, labels=data.labels)
    assert (evaluated["images"], evaluated["accuracy"]) == (12, expected.accuracy)
    assert evaluated["loss"] == pytest.approx(expected.loss, abs=1e-5)
    assert "keras-vit explain" not in (out / "report.html").read_text()


def test_an_export_that_is_not_as_it_was_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flipped byte in any format is found by the hash that the record carries."""
    shutil.copytree(place / "pets", tmp_path / "pets")
    for name in LIMITS:
        path = path_of(name, tmp_path)
        inner = {"savedmodel": "variables/variables.data-00000-of-00001", "web": web.MODEL}
        file = path / inner[name] if name in inner else path
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        _, error = command(capsys, "predict", path, place / "photos")
        assert "other content than was exported" in error
        assert error.count("\n") == 1


def test_a_file_without_its_record_describes_itself(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs, and it is said that nothing vouches for it; a foreign file is refused."""
    for name in ("onnx", "tflite"):
        alone = Path(shutil.copy(path_of(name, place), tmp_path))
        rows, error = command(capsys, "predict", alone, place / "photos/plain/000.jpg")
        assert {each["label"] for each in rows[0]["predictions"]} == set(LABELS)
        assert "has no verification.json beside it" in error
        alone.write_bytes(alone.read_bytes()[:1000])
        _, error = command(capsys, "predict", alone, place / "photos/plain/000.jpg")
        assert "cannot be read" in error or "does not say what images" in error


def test_what_an_export_cannot_do_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence each, for flags, for several models at one place, and for other commands."""
    file, photos, dense = path_of("onnx", place), place / "photos", place / "dense.keras"
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(2)]
    keras.Sequential(layers).save(dense)
    for words, message in (
        (("predict", file, photos, "--precision", "bfloat16"), "leave --precision out"),
        (("evaluate", file, "--data", photos, "--more"), "--more measures features"),
        (("evaluate", file), "has no images of its own"),
        (("predict", place / "pets/tflite", photos), "holds several exported models; give one"),
        (("predict", place / "pets", photos), "holds several exported models; give one"),
        (("predict", file.with_name("labels.onnx"), photos), "There is no"),
        (("explain", file, photos / "plain/000.jpg", "--out", place / "x"), "predict and evaluate"),
        (("predict", dense, photos, "--precision", "bfloat16"), "runs in bfloat16; leave"),
        (("export", dense, "--out", place / "x"), "export takes a VisionTransformer, or"),
        (("export", file, "--out", place / "x"), "predict and evaluate"),
    ):
        rows, error = command(capsys, *words)
        assert message in error
        assert (rows, error.count("\n")) == ([], 1)
    monkeypatch.setattr(runners.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert "pip install onnxruntime" in command(capsys, "predict", file, photos)[1]
