"""Tests of keras_vit.reporting: the report of a run."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import browser
import cli_rig
import keras
import numpy as np
import pytest
from conftest import made

from keras_vit import evaluation, pages, reporting
from keras_vit.data import ImageData, SkippedFile, Split
from keras_vit.data.source import DAMAGED, first_names
from keras_vit.evaluation import Predictions
from keras_vit.reporting import gallery, report
from keras_vit.training import Provenance, Run

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}",
    "a\u202eb\x00c",
    "long " * 200,
    "&lt;",
)
CONFIG = dataclasses.replace(cli_rig.CONFIG, num_layers=2)


def subject_of(
    labels: tuple[str, ...], *, images: int = 24, side: int = 24, names: Any = None
) -> reporting.Subject:
    """A fresh model, measured on noise."""
    draws = np.random.default_rng(0)
    split = Split(
        images=draws.integers(0, 256, (images, side, side, 3), np.uint8),
        targets=draws.integers(0, len(labels), images).astype(np.int32),
        names=names,
    )
    data = ImageData(source="noise", labels=labels, train=split, validation=split, test=split)
    model = made(dataclasses.replace(CONFIG, classes=len(labels)))
    measured = {"test": evaluation.evaluate(model, split, labels=labels)}
    return reporting.Subject(name="a run", model=model, data=data, evaluations=measured)


def written(subject: reporting.Subject, folder: Path) -> tuple[str, dict[str, Any]]:
    """The report of a model, and what it gives to its script; it has less than 3 MB."""
    size = reporting.write_report_page(folder / "report.html", subject)
    assert size == (folder / "report.html").stat().st_size < 3e6
    return read(folder / "report.html")


def read(page: Path) -> tuple[str, dict[str, Any]]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'(?s)<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return text, content


def test_images_of_every_pair_are_chosen() -> None:
    """Mistakes first, then of each pair in turn; the most common cannot crowd out the others."""
    targets = np.array([0] * 100 + [1, 2])
    predicted = np.array([0] * 50 + [1] * 50 + [2, 0])
    confidence = np.linspace(0.9, 0.5, 102)
    answers = Predictions(targets=targets, predicted=predicted, confidence=confidence)
    chosen = gallery.choose_images(answers, limit=40)
    assert chosen[: gallery.MISTAKES] == list(range(50, 74))
    assert {100, 101} <= set(chosen)
    assert len(set(chosen)) == len(chosen) <= 40
    assert gallery.choose_images(answers, limit=5) == [50, 51, 52, 53, 54]


def test_what_is_hostile_stays_text(tmp_path: Path) -> None:
    """Labels and names arrive in the page as they are, and none of them as an element."""
    names = np.array([f"{place} {HOSTILE[place % len(HOSTILE)]}" for place in range(24)], object)
    names[0] = "noise/photo-\udcff.png"  # the source is called "noise": shown without it
    text, content = written(subject_of(HOSTILE, names=names), tmp_path)
    assert content["labels"][:4] == list(HOSTILE[:4])
    assert len(content["labels"][4]) == 59
    assert {image["name"] for image in content["images"]} >= {"photo-\udcff.png"}
    assert "<img src=x" not in text
    assert "alert(1)</script>" not in text
    assert "49" not in re.findall(r"<th scope=\"col\"><span>(.*?)</span>", text)


def test_a_report_agrees_with_the_evaluation(tmp_path: Path) -> None:
    """Counts of the matrix, calibration, mistakes and images are those of the model's answers."""
    subject = subject_of(("ant", "bee", "cat"))
    content, measured = written(subject, tmp_path)[1], subject.evaluations["test"]
    assert content["matrix"] == measured.confusion.tolist()
    assert sum(one["images"] for one in content["calibration"]) == 24
    for cell, places in content["cells"].items():
        truth, taken = map(int, cell.split(","))
        assert content["counts"][cell] == measured.confusion[truth, taken]
        for place in places:
            image = content["images"][place]
            assert (image["truth"], image["taken"]) == (truth, taken)
            position = int(image["name"].split()[1])
            assert measured.predictions is not None
            assert measured.predictions.predicted[position] == taken
            assert measured.predictions.confidence[position] == pytest.approx(
                image["confidence"], abs=1e-5
            )


def test_the_head_of_a_report_says_one_and_names_files_in_their_folder(tmp_path: Path) -> None:
    """A training of one step, with a teacher, from a folder with damaged files."""
    config = {
        "data": {"source": "/photos", "damaged": ["/photos/cat/a b.jpg", "/elsewhere/c.jpg"]},
        "recipe": {"batch_size": 1},
        "result": {"epochs": 1, "steps": 1, "best_epoch": 1},
        "provenance": Provenance.of("x", teacher="hf://timm/vit_base_patch16_224.mae").to_dict(),
    }
    run = Run(path=tmp_path, model=made(CONFIG), labels=("cat", "dog"), config=config)
    said = dict(report._summary(run.model, run, None))
    assert said["Left out, damaged"] == "2: cat/a b.jpg, /elsewhere/c.jpg"
    # Of a training from now on, with all else that was beside the images.
    files = [SkippedFile(f"/photos/{name}", "are no images") for name in "abcdefg"]
    files = [*files, SkippedFile("/photos/d.jpg", DAMAGED)]
    data: Any = subject_of(("cat", "dog")).data
    data = dataclasses.replace(data, source="/photos", skipped=tuple(files))
    config["skipped"] = json.loads(json.dumps(first_names(data.reasons)))
    for pairs in (report._summary(run.model, run, None), report._summary(run.model, None, data)):
        assert ("Left out", "7, as they are no images: a, b, c, d, e and 2 more") in pairs
        assert ("Left out, damaged", "1: d.jpg") in pairs
    assert said["Trained for"] == "1 epoch, 1 step of 1 image; epoch 1 was kept"
    assert said["Distilled from"].endswith(".mae, licence CC-BY-NC-4.0")
    assert said["Their terms"] == "No commercial use."


def test_many_classes_and_much_noise_fit(tmp_path: Path) -> None:
    """1,200 classes of long names and images that do not compress: below 3 MB, and no matrix."""
    labels = tuple(f"{place} {'name ' * 20}" for place in range(1200))
    text, content = written(subject_of(labels, images=200, side=200), tmp_path)
    assert len(text) > 1e6
    assert content["matrix"] is None
    assert len(content["counts"]) == 50
    assert len(content["images"]) > 50
    assert 'id="find"' in text


def test_a_model_without_attention_has_a_report(tmp_path: Path) -> None:
    """The section says so, and the rest is there."""
    inputs = keras.Input((16, 16, 3))
    plain = keras.Model(inputs, keras.layers.Dense(2, "softmax")(keras.layers.Flatten()(inputs)))
    subject = subject_of(("yes", "no"))
    assert subject.data is not None
    measured = {"test": evaluation.evaluate(plain, subject.data.test, labels=("yes", "no"))}
    subject = dataclasses.replace(subject, model=plain, evaluations=measured)
    text, _ = written(subject, tmp_path)
    assert "no attention of a Vision Transformer" in text
    assert 'id="patches"' not in text


def test_a_report_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    """A folder in its place, and answers that are missing; nothing is raised."""
    subject = subject_of(("yes", "no"))
    (tmp_path / "report.html").mkdir()
    said = reporting.write_files(tmp_path, subject)
    assert said is not None
    assert "report.html was not written, all else is" in said
    files = {entry.name for entry in tmp_path.iterdir() if entry.is_file()}
    assert files == {"confusion.png", "metrics.json"}
    (tmp_path / "report.html").rmdir()
    bare = dataclasses.replace(subject.evaluations["test"], predictions=None)
    lacking = dataclasses.replace(subject, evaluations={"test": bare})
    assert "needs the predictions" in str(reporting.write_files(tmp_path, lacking))
    assert not (tmp_path / "report.html").exists()
    assert reporting.write_files(tmp_path, subject) is None
    assert (tmp_path / "report.html").is_file()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reporting")
    small = ("--epochs", "2", "--set", "num_layers=1", "--model", "digits")
    cli_rig.done("train", "--data", "digits", "--out", folder / "a", *small)
    return folder


@pytest.mark.full
def test_a_training_leaves_its_report(place: Path) -> None:
    """With the command, curves of each epoch, hashes; a browser finds nothing wrong."""
    page = place / "a" / "report.html"
    text, content = read(page)
    command = f"keras-vit train --data digits --out {place / 'a'} --epochs 2"
    assert command in text
    assert [point[0] for point in content["curves"][0]["series"][1]["points"]] == [1, 2]
    assert json.loads((place / "a" / "config.json").read_text())["result"]["state_sha256"] in text
    metrics = json.loads((place / "a" / "metrics.json").read_text())["test"]
    assert f"accuracy {metrics['accuracy']:.2%}" in text
    assert browser.check_page(page) == []
    cli_rig.done("evaluate", place / "a", "--out", place / "measured")
    again = (place / "measured" / "report.html").read_text("utf-8")
    assert command in again
    assert f"keras-vit evaluate {place / 'a'} --out {place / 'measured'}" in again


@pytest.mark.full
def test_hostile_labels_do_nothing_in_a_browser(tmp_path: Path) -> None:
    """Nor do many classes; every control works."""
    labels = tuple(f"{HOSTILE[place % 6]} {place}" for place in range(40))
    written(subject_of(labels, images=120), tmp_path)
    assert browser.check_page(tmp_path / "report.html") == []


@pytest.mark.full
def test_a_training_does_not_fail_with_its_report(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is measured again without Jinja2: the numbers are there, and a warning."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    pages._templates.cache_clear()
    result = cli_rig.done("evaluate", place / "a", "--out", place / "again")
    assert "pip install jinja2" in result.errors[-1]
    assert {file.name for file in (place / "again").iterdir()} == {"metrics.json", "confusion.png"}
