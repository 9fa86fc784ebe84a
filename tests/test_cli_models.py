"""Tests of `keras-vit explain`, `evaluate --more` and `export` on models that are there already."""

import dataclasses
from pathlib import Path

import cli_rig
import numpy as np
import pytest
from PIL import Image

from keras_vit import evaluation
from keras_vit.data import load_digits
from keras_vit.training import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose images are the digits, and one of them beside it."""
    folder = tmp_path_factory.mktemp("models")
    Image.fromarray(load_digits().test.images[0]).save(folder / "digit.png")
    settings = {"data": {"source": "digits"}, "labels": [*"0123456789"]}
    fields = {"input_shape": (16, 24, 3), "classes": 10}
    return cli_rig.make_run(folder / "run", settings=settings, **fields)


def test_a_run_is_explained(run: Path, tmp_path: Path) -> None:
    """The page and its pictures are written; the size that was resampled is said."""
    out = tmp_path / "seen"
    said = cli_rig.done("explain", run, run.parent / "digit.png", "--out", out, "--class", 7).out
    assert "8 pixels wide and 8 high; it was resampled to 24 pixels wide and 16 high" in said
    assert f"Open {out / 'index.html'} in a browser." in said
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "speak for 7:" in page
    assert "digit.png" in page
    assert (out / "rollout.png").stat().st_size > 5000


@pytest.mark.full
def test_machines_get_the_files_of_a_keras_file(run: Path, tmp_path: Path) -> None:
    """With --json one line names every file; 1,000 classes are taken for ImageNet's."""
    model = Run.load(run).model
    model.copy(config=dataclasses.replace(model.config, classes=1000), fresh=["head"]).save(
        tmp_path / "model.keras"
    )
    image, out = run.parent / "digit.png", tmp_path / "seen"
    flags = ("--out", out, "--class", "tabby", "--json")
    (said,) = cli_rig.done("explain", tmp_path / "model.keras", image, *flags).events
    assert {Path(file) for file in said["files"]} == set(out.iterdir())
    assert (said["image"], said["taken"]) == ([8, 8], [16, 24])
    assert "speak for tabby" in (out / "index.html").read_text(encoding="utf-8")


@pytest.mark.full
def test_more_is_what_the_functions_say(run: Path, tmp_path: Path) -> None:
    """The numbers are those of keras_vit.evaluation, people get sentences, a picture is drawn."""
    actual = cli_rig.done("evaluate", run, "--more", "--json").events[-1]
    model, data = Run.load(run).model, load_digits()
    probabilities = np.exp(evaluation.log_probabilities(model, data.test))
    expected = evaluation.calibration(probabilities, data.test.targets).error
    assert actual["calibration_error"] == pytest.approx(expected, abs=1e-6)
    expected = evaluation.nearest_neighbors(model, train=data.train, test=data.test)
    assert actual["nearest_neighbors"] == pytest.approx(expected, abs=1e-9)
    results = evaluation.few_shot(model, train=data.train, test=data.test)
    assert [each["accuracies"] for each in actual["few_shot"]] == [
        list(result.accuracies) for result in results
    ]
    assert len(actual["mistakes"]) == 16
    said = cli_rig.done("evaluate", run, "--more", "--out", tmp_path).out
    for text in ("Expected calibration error: ", "25 labelled images", "taken for", "neighbours"):
        assert text in said
    assert (tmp_path / "mistakes.png").stat().st_size > 5000
    assert "calibration" not in cli_rig.done("evaluate", run).out


@pytest.mark.full
def test_real_labels_go_by_the_names_of_the_images(run: Path, tmp_path: Path) -> None:
    """Classes that are the model's answers, in order of the names, are all right."""
    data = load_digits()
    measured = evaluation.evaluate(Run.load(run).model, data.test, labels=data.labels)
    assert measured.answers is not None
    places = sorted(range(len(data.test)), key=lambda place: data.test.name(place))
    actual = []
    for classes in (data.test.targets[places], measured.answers.predicted[places]):
        for rows in ([[int(each)] for each in classes], [[int(each)] for each in classes[::-1]]):
            (tmp_path / "real.json").write_text(str(rows))
            said = cli_rig.done("evaluate", run, "--json", "--real", tmp_path / "real.json")
            actual.append(said.events[-1]["accuracy"])
    assert actual[0] == pytest.approx(measured.accuracy)
    assert actual[2] == 1 > actual[3]
    (tmp_path / "short.json").write_text("[[1]]")
    refused = cli_rig.run("evaluate", run, "--real", tmp_path / "short.json")
    assert (refused.code, "and 1 sets" in refused.errors[0]) == (1, True)


def test_a_keras_file_is_exported(run: Path, tmp_path: Path) -> None:
    """The command says what it wrote and where, and how to go on."""
    out, labels = tmp_path / "pets", tmp_path / "labels.txt"
    labels.write_text("\n".join("abcdefghij"))
    command = ("export", run / "model.keras", "--out", out)
    lines = cli_rig.done(*command, "--labels", labels, "--no-verify").out.splitlines()
    assert lines[0].startswith(f"savedmodel: {out / '1'} (0.")
    assert lines[0].endswith("not checked)")
    assert lines[1] == f"Next: {out / 'serve.sh'}"
    assert (out / "labels.txt").read_text() == labels.read_text() + "\n"


def test_machines_read_json(run: Path, tmp_path: Path) -> None:
    """With --json there is one object for each artefact, with its checks."""
    pytest.importorskip("onnxruntime")
    out = ("--out", tmp_path / "json", "--formats", "onnx")
    (actual,) = cli_rig.done("export", run / "model.keras", *out, "--json").events
    assert (actual["event"], actual["format"]) == ("artefact", "onnx")
    assert Path(actual["path"]).is_file()
    assert all(check["passed"] for check in actual["checks"])
