"""Tests of `keras-vit predict`: what it takes, what it writes, what an interruption leaves."""

import csv
import dataclasses
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import image_files
import pytest
from conftest import TINY, made

import keras_vit
from keras_vit.cli import main, next_command, output
from keras_vit.cli.main import make_parser
from keras_vit.training import RECIPES

LABELS = ["plain", "striped/dotted"]
CONFIG = dataclasses.replace(
    TINY, input_shape=(16, 16, 3), num_layers=1, classes=2, include_preprocessing=True
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, made without a training: one whose recipe mirrors images, one whose does not."""
    folder = tmp_path_factory.mktemp("predict")
    for name, recipe in (("run", "scratch"), ("digits", "digits")):
        (folder / name).mkdir()
        made(CONFIG).save(folder / name / "model.keras")
        config = {
            "model": CONFIG.to_dict(),
            "recipe": RECIPES[recipe].to_dict(),
            "data": {"source": "memory"},
            "labels": LABELS,
        }
        (folder / name / "config.json").write_text(json.dumps(config))
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


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    errors: list[str]


@pytest.fixture
def predict(place: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: object, run: str = "run") -> Result:
        code = main(["predict", run, *map(str, words)])
        said = capsys.readouterr()
        return Result(code, said.out, said.err.splitlines())

    return run


def pipe(contents: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(contents)))


def rows(result: Result) -> dict[str, dict[str, float]]:
    lines = map(json.loads, result.out.splitlines())
    return {
        line["image"]: {row["label"]: row["probability"] for row in line["predictions"]}
        for line in lines
    }


def test_a_folder_is_predicted_and_written_to_a_table(predict: Any, place: Path) -> None:
    """The table holds what --json says; the damaged image is told, and the others go on."""
    lines = predict("my photos", "--json")
    written = predict("my photos", "--csv", "found.csv")
    with Path("found.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))

    assert (lines.code, written.code) == (1, 1)
    assert len(lines.errors) == len(written.errors) == 1
    assert "001.png" in lines.errors[0]
    assert len(table) == 29
    assert {
        row["image"]: {
            row["label"]: float(row["probability"]),
            row["label_2"]: float(row["probability_2"]),
        }
        for row in table
    } == rows(lines)
    assert "29 images; " in written.out
    assert "Without prediction: 1" in written.out
    assert "Written: found.csv" in written.out
    assert "000.jpg" not in written.out.partition("Next:")[0]


def test_few_images_are_a_table_and_many_a_line_each(predict: Any, place: Path) -> None:
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


def test_images_are_copied_into_the_folders_of_their_classes(predict: Any, place: Path) -> None:
    """Under safe names; nothing is moved or replaced; again, nothing is copied twice."""
    before = {file: file.read_bytes() for file in Path("my photos").rglob("*") if file.is_file()}
    lines = predict("my photos", "--json")
    first = predict("my photos", "--copy-to", "my photos/sorted")
    again = predict("my photos", "--copy-to", "my photos/sorted")
    copies = [file for file in Path("my photos/sorted").rglob("*") if file.is_file()]

    assert {file: file.read_bytes() for file in before} == before
    assert len(copies) == 29
    for name, classes in rows(lines).items():
        likeliest = max(classes, key=classes.__getitem__).replace("/", "_")
        same = [copy for copy in copies if copy.read_bytes() == before[Path(name)]]
        assert likeliest in {copy.parent.name for copy in same}
    assert "Copied to my photos/sorted: 29 images." in first.out
    assert "0 images; 29 were there already" in again.out
    folders = {copy.parent.name for copy in copies}
    is_told = "striped_dotted for 'striped/dotted'" in first.out
    assert is_told == ("striped_dotted" in folders)
    assert predict("my photos", "--copy-to", "my photos").code == 1


def test_a_pipe_holds_an_image_or_names(
    predict: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of the file; names end with a newline or a NUL."""
    photo = Path("my photos/striped/000.jpg")
    (expected,) = rows(predict(photo, "--json")).values()
    pipe(photo.read_bytes(), monkeypatch)
    assert rows(predict("-", "--json", "--copy-to", "sorted")) == {"-": expected}
    (copy,) = Path("sorted").rglob("*.jpg")
    assert copy.read_bytes() == photo.read_bytes()
    for separator in ("\n", "\0"):
        pipe(f"{photo}{separator}my photos/plain{separator}".encode(), monkeypatch)
        found = rows(predict("-", "--json"))
        assert len(found) == 1 + 14
        assert found[str(photo)] == expected
    pipe(b"", monkeypatch)
    nothing = predict("-")
    assert (nothing.code, len(nothing.errors)) == (1, 1)
    assert "There are no JPEG, PNG" in nothing.errors[0]


def test_views_are_mirrored_where_training_mirrored(predict: Any, place: Path) -> None:
    """A picture and its mirror image get the same numbers from 14 views, not from 7."""
    from PIL import Image, ImageOps

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
    predict: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle says what is there; the table of before stays."""
    Path("found.csv").write_text("of before")
    show = output.PredictDisplay.show

    def interrupt(self: output.PredictDisplay, *arguments: Any) -> None:
        show(self, *arguments)
        if self.images == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(output.PredictDisplay, "show", interrupt)
    result = predict("my photos", "--csv", "found.csv", "--copy-to", "sorted")

    assert result.code == 130
    assert result.errors[-1] == (
        "keras-vit: Interrupted after 20 images; found.csv was not written; the copies so far are "
        "in sorted."
    )
    assert Path("found.csv").read_text() == "of before"
    assert len(list(Path("sorted").rglob("*.*"))) == 20
    assert not list(Path().glob(".found*"))


WRONG = {
    "a photo as table": (["--csv", "one.jpg", "my photos"], 2, "ends in .csv"),
    "no folder for it": (["my photos", "--csv", "gone/found.csv"], 1, "no folder 'gone'"),
    "a folder as table": (["my photos", "--csv", "folder.csv"], 1, "is a folder"),
    "a file to copy to": (["my photos", "--copy-to", "file"], 1, "is not a folder"),
    "a pattern": (["*.webp"], 1, "No file matches '*.webp'"),
    "an empty folder": (["folder.csv"], 1, "holds no JPEG"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_a_line(
    case: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the documented exit code, and nothing written."""
    words, code, text = WRONG[case]
    Path("folder.csv").mkdir()
    Path("file").write_text("mine")
    before = sorted(Path().rglob("*"))
    try:
        actual = main(["predict", "run", *words])
    except SystemExit as stopped:
        actual = int(str(stopped.code))
    (line,) = capsys.readouterr().err.splitlines()

    assert actual == code
    assert text in line
    assert sorted(Path().rglob("*")) == before


def next_words(said: str) -> list[str]:
    """The words of the one line that names the next command, after the parser has taken them."""
    (line,) = [line for line in said.splitlines() if line.startswith("Next: ")]
    program, *words = shlex.split(line.removeprefix("Next: "))
    assert program == "keras-vit"
    assert callable(make_parser().parse_args(words).run)
    return words


def test_the_next_command_can_be_run(
    predict: Any, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of predict, with a name that needs quotes, and of list; none where a program reads."""
    photo = "my photos/plain/000.jpg"
    words = next_words(predict(photo).out)
    assert words == ["explain", "run", photo, "--out", "seen"]
    assert "Next" not in predict(photo, "--json").out
    pipe(Path(photo).read_bytes(), monkeypatch)
    assert next_words(predict("-").out) == ["evaluate", "run"]
    for arguments in ([], ["--variant", "B/16"], ["--variant", "g/14"], ["--family", "dinov2"]):
        assert main(["list", *arguments]) == 0
        assert next_words(capsys.readouterr().out)[0] in ("list", "train", "export")


def test_a_training_names_the_next_command(tmp_path: Path) -> None:
    """An image that was not trained on; a classifier after labels, a look inside without."""
    out = tmp_path / "a run"
    out.mkdir()

    def after(config: dict[str, Any], labels: tuple[str, ...]) -> list[str]:
        run: Any = keras_vit.training.Run(path=out, model=None, labels=labels, config=config)
        return [str(word) for word in next_command.after_training(run)]

    data = {"data": {"source": str(tmp_path / "photos")}}
    assert after(data, ("a", "b")) == ["evaluate", str(out)]
    pretraining = {**data, "objective": "masked-patches"}
    assert after(pretraining, ("a", "b"))[:3] == ["train", "--data", str(tmp_path / "photos")]
    (out / "splits.csv").write_text("split,label,path\ntrain,a,1.jpg\ntest,a,x y/2.jpg\n")
    image = str(tmp_path / "photos" / "x y" / "2.jpg")
    assert after(data, ("a", "b")) == ["predict", str(out), image]
    assert after(pretraining, ()) == ["explain", str(out), image, "--out", "seen"]
    (out / "sample.png").touch()
    assert after(data, ("a", "b")) == ["predict", str(out), str(out / "sample.png")]
    for words in (after(data, ("a",)), after(pretraining, ("a",)), after(pretraining, ())):
        assert callable(make_parser().parse_args(words).run)


def predicting_a_pipe(*arguments: str) -> subprocess.Popen[str]:
    """A real process with a real pipe."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "keras_vit", "predict", "run", "-", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(keras_vit.__file__).parents[1])},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


@pytest.mark.full
def test_a_process_reads_names_from_a_pipe(place: Path) -> None:
    """Three hundred photos by name, each with the same numbers."""
    photo = Path("my photos/striped/000.jpg").read_bytes()
    for number in range(300):
        Path(f"{number:03}.jpg").write_bytes(photo)
    process = predicting_a_pipe("--json", "--top", "1")
    out, errors = process.communicate("\n".join(f"{number:03}.jpg" for number in range(300)))
    assert process.returncode == 0, errors
    found = [json.loads(line) for line in out.splitlines()]
    assert [line["image"] for line in found] == [f"{number:03}.jpg" for number in range(300)]
    assert len({line["predictions"][0]["probability"] for line in found}) == 1


@pytest.mark.full
def test_a_signal_leaves_whole_copies_and_no_table(place: Path) -> None:
    """A real Ctrl-C while a pipe may name more photos: no half of a file, and exit code 130."""
    photo = Path("my photos/striped/000.jpg").read_bytes()
    process = predicting_a_pipe("--csv", "found.csv", "--copy-to", "sorted")
    assert process.stdin is not None
    for number in range(300):
        Path(f"{number:03}.jpg").write_bytes(photo)
        process.stdin.write(f"{number:03}.jpg\n")
    process.stdin.flush()
    while not list(Path("sorted").rglob("*.jpg")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)

    assert process.returncode == 130
    copies = [file for file in Path("sorted").rglob("*") if file.is_file()]
    counted = re.search(r"Interrupted after (\d+) images?; found.csv was not written", errors)
    assert counted
    assert len(copies) - int(counted[1]) in (0, 1)  # the last may be copied and not yet counted
    assert {file.read_bytes() for file in copies} == {photo}
    assert not [file for file in place.iterdir() if "found" in file.name]
