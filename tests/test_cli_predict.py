"""Tests of `keras-vit predict`: what it takes, what it writes, what an interruption leaves."""

import contextlib
import csv
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cli_rig
import image_files
import pytest
from cli_rig import Result
from PIL import Image, ImageOps

from keras_vit.cli import output

LABELS = ["plain", "striped/dotted"]
Predict = Callable[..., Result]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one whose recipe mirrors images, one whose does not."""
    folder = tmp_path_factory.mktemp("predict")
    for name, recipe in (("run", "scratch"), ("digits", "digits")):
        cli_rig.make_run(folder / name, recipe=recipe, settings={"labels": LABELS})
    return folder


@pytest.fixture
def place(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Thirty photos in two folders, one of them damaged, and the runs."""
    for run in runs.iterdir():
        (tmp_path / run.name).symlink_to(run)
    image_files.write_classes(tmp_path / "my photos", count=15)
    image_files.damage(tmp_path / "my photos" / "plain" / "001.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def predict(place: Path) -> Predict:
    return lambda *words, run="run": cli_rig.run("predict", run, *words)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Puts a pipe with some bytes in the place of stdin."""
    with contextlib.ExitStack() as stack:

        def put(contents: bytes) -> None:
            end, begin = os.pipe()
            os.write(begin, contents)  # less than a pipe holds
            os.close(begin)
            monkeypatch.setattr(sys, "stdin", stack.enter_context(os.fdopen(end)))

        yield put


def rows(result: Result) -> dict[str, dict[str, float]]:
    return {
        line["image"]: {row["label"]: row["probability"] for row in line["predictions"]}
        for line in result.events
    }


def test_a_folder_is_predicted_and_written_to_a_table(predict: Predict, place: Path) -> None:
    """The table holds what --json says; the damaged image is told, and the others go on."""
    lines = predict("my photos", "gone.png", "--json")
    written = predict("my photos", "--csv", "found.csv")
    with Path("found.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))

    assert (lines.code, written.code) == (1, 1)
    assert len(written.errors) == 1
    for name, line in zip(("001.png", "gone.png"), lines.errors, strict=True):
        assert line.startswith("keras-vit: error: ")
        assert name in line
    assert len(table) == 29
    for classes in rows(lines).values():
        assert sum(classes.values()) == pytest.approx(1)
    assert {
        row["image"]: {
            row["label"]: float(row["probability"]),
            row["label_2"]: float(row["probability_2"]),
        }
        for row in table
    } == rows(lines)
    for text in ("29 images; ", "1 image failed (see the errors above)", "Written: found.csv"):
        assert text in written.out
    assert "000.jpg" not in written.out.partition("Next:")[0]
    assert "Next:" not in predict("gone.png").out  # nothing was named that one could look at


def test_few_images_are_a_table_and_many_a_line_each(predict: Predict, place: Path) -> None:
    """--top limits the classes of both; more images than a screen has are counted by class."""
    few = predict("my photos/plain/000.jpg", "my photos/striped/*.png", "--top", "1")
    many = predict("my photos", "--top", "1")

    assert few.code == 0
    assert few.out.count("%") == 1 + len(list(Path("my photos/striped").glob("*.png")))
    assert "probability" in few.out
    assert "probability" not in many.out
    lines = [line for line in many.out.splitlines() if line.startswith("my photos/")]
    assert len(lines) == 29
    assert all(line.count("%") == 1 for line in lines)
    assert "29 images; " in many.out


def test_a_pipe_holds_an_image_or_names(
    predict: Predict, place: Path, pipe: Callable[[bytes], None]
) -> None:
    """The numbers are those of the file; names end with a newline or a NUL."""
    photo = Path("my photos/striped/000.jpg")
    (expected,) = rows(predict(photo, "--json")).values()
    pipe(photo.read_bytes())
    assert rows(predict("-", "--json")) == {"-": expected}
    for separator in ("\n", "\0"):
        pipe(f"{photo}{separator}my photos/plain{separator}".encode())
        found = rows(predict("-", "--json"))
        assert len(found) == 1 + 14
        assert found[str(photo)] == expected
    pipe(photo.read_bytes())
    assert predict("-").next == ["evaluate", "run"]
    pipe(b"")
    nothing = predict("-")
    assert (nothing.code, len(nothing.errors)) == (1, 1)
    assert "There are no JPEG, PNG" in nothing.errors[0]


def test_views_are_mirrored_where_training_mirrored(predict: Predict, place: Path) -> None:
    """A picture and its mirror image get the same numbers from 14 views, not from 7."""
    with Image.open(image_files.write_image(place / "one.png", seed=3)) as image:
        ImageOps.mirror(image).save(place / "mirrored.png")
    images = ("one.png", "mirrored.png", "--json")
    plain, other = rows(predict(*images)).values()
    assert plain != pytest.approx(other, rel=1e-5)
    views, mirrored = rows(predict(*images, "--tta")).values()
    assert views == pytest.approx(mirrored, rel=1e-4)
    assert views != pytest.approx(plain, rel=1e-5)
    views, mirrored = rows(predict(*images, "--tta", run="digits")).values()
    assert views != pytest.approx(mirrored, rel=1e-5)


def test_an_interruption_leaves_a_whole_table_or_none(
    predict: Predict, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in the middle says what is there; the table of before stays."""
    Path("found.csv").write_text("of before")
    show = output.PredictDisplay.show

    def interrupt(self: output.PredictDisplay, *arguments: Any) -> None:
        show(self, *arguments)
        if self.images == 20:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(output.PredictDisplay, "show", interrupt)
    # A shell starts what runs in its background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    result = predict("my photos", "--csv", "found.csv")
    signal.signal(signal.SIGINT, before)

    assert result.code == 130
    assert result.errors[-1] == (
        "keras-vit: Interrupted after 20 images; found.csv was not written."
    )
    assert Path("found.csv").read_text() == "of before"
    assert not list(Path().glob(".found*"))
