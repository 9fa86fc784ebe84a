"""What a user does wrong is one sentence of the command line, and nothing is written."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import cli_rig
import image_files
import keras
import published
import pytest
import tensorflow as tf

from keras_vit.cli import train
from keras_vit.cli.main import main

nowhere = cli_rig.nowhere_fixture
BACKBONE = published.GOLDEN / "modern" / "hf_dinov2"

# Commands, and what the one sentence says, "..." for what is between.
MISTAKES = json.loads((published.GOLDEN / "mistakes.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    image_files.write_classes(folder / "images")
    image_files.damage(folder / "images" / "plain" / "001.png")
    image_files.write_classes(folder / "one", classes=("only",))
    image_files.write_classes(folder / "few", count=1, classes=("cat", "dog", "owl"))
    image_files.write_classes(folder / "other", count=3, classes=("ant", "stranger"))
    image_files.write_image(folder / "a.png")
    (folder / "file").write_text("mine")
    labels = {"foreign": b"cat\n\xff\n", "blank": b"cat\n\ndog\n", "double": b"cat\ndog\ncat\n"}
    for name, content in {**labels, "short": b"cat\n"}.items():
        (folder / f"{name}.txt").write_bytes(content)
    os.mkfifo(folder / "pipe.txt")
    image_files.write_classes(folder / "lines", classes=("cat", "dog\nowl"))
    for name in ("empty", "empty.csv", "models"):
        (folder / name).mkdir()
    cli_rig.make_run(folder / "run")
    settings = {"objective": "masked-patches", "labels": []}
    cli_rig.make_run(folder / "features", settings=settings, **cli_rig.FEATURES)
    shutil.copytree(folder / "run", folder / "broken")
    (folder / "broken" / "config.json").rename(folder / "broken" / "history.csv")
    shutil.copytree(BACKBONE.with_name("hf_vit_cls"), folder / "vit")
    fields = json.loads((folder / "vit" / "config.json").read_text())
    fields["id2label"] = dict(enumerate(["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]))
    (folder / "vit" / "config.json").write_text(json.dumps(fields))
    other = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten()])
    other.save(folder / "models" / "other.keras")
    return folder


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def faults(mistakes: dict[str, str], place: Path, *, code: int) -> list[str]:
    """What commands do that is not to be done with a mistake."""
    before, found = contents(place), []
    start = "keras-vit" if code == 2 else "keras-vit: error: "
    for command, text in mistakes.items():
        result = cli_rig.run(*shlex.split(command.replace("BACKBONE", str(BACKBONE))), folder=place)
        parts = text.replace("BACKBONE", str(BACKBONE)).split(" ... ")
        checks = {
            f"exit code {result.code}": result.code == code,
            f"stderr {result.errors}": len(result.errors) == 1
            and result.errors[0].startswith(start)
            and all(part in result.errors[0] for part in parts),
            "something written": contents(place) == before,
        }
        if code == 2:
            points = result.errors[0].endswith("--help") and ": error: " in result.errors[0]
            checks |= {f"stdout {result.out}": not result.out, "no pointer to the help": points}
        found += [f"{command}: {fault}" for fault, is_right in checks.items() if not is_right]
    return found


def test_what_is_wrong_is_one_sentence(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line on stderr that says what to do, exit code 1, nothing written or lost.

    What is not installed is named, with the command that installs it.
    """
    assert faults(MISTAKES["exit code 1"], place, code=1) == []
    monkeypatch.setitem(sys.modules, "sklearn", None)
    missing = {"train --data digits --out new --model digits": "pip install scikit-learn"}
    assert faults(missing, place, code=1) == []


def test_wrong_usage_is_one_line(place: Path) -> None:
    """Exit code 2, and nothing is printed but one line that points to the help."""
    assert faults(MISTAKES["exit code 2"], place, code=2) == []
    for words, code in (("predict LONG a.png", 1), ("train --data x --out y --image-size LONG", 2)):
        result = cli_rig.run(*words.replace("LONG", "long" * 1250).split(), folder=place)
        (line,) = result.errors
        assert (result.code, len(line) < 500, "…" in line) == (code, True, True)
    process = subprocess.run([sys.executable, "-m", "keras_vit", "fly"], capture_output=True)
    assert process.returncode == 2


def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is raised is told with the documented exit code; a mistake of ours is not hidden."""
    errors: tuple[tuple[BaseException, int, str], ...] = (
        (ValueError("Two\nlines."), 1, "keras-vit: error: Two lines.\n"),
        (FileNotFoundError("Gone."), 1, "keras-vit: error: Gone.\n"),
        (ImportError("pip install x"), 1, "keras-vit: error: pip install x\n"),
        (MemoryError(), 1, "keras-vit: error: Out of memory: nothing was written.\n"),
        (tf.errors.UnknownError(None, None, "{{node x}} Full."), 1, "keras-vit: error: Full.\n"),
        (tf.errors.DataLossError(None, None, "Cut. [Op:A]"), 1, "keras-vit: error: Cut.\n"),
        (zlib.error("Torn."), 1, "keras-vit: error: Torn.\n"),
        (KeyboardInterrupt(), 130, "keras-vit: Interrupted: nothing was saved.\n"),
        (KeyboardInterrupt("Saved."), 130, "keras-vit: Saved.\n"),
    )

    def fail(error: BaseException) -> int:
        def run(arguments: object) -> int:
            raise error

        monkeypatch.setattr(train, "run", run)
        return main(["train", "--data", "x", "--out", "y"])

    for error, code, line in errors:
        assert (fail(error), capsys.readouterr().err) == (code, line)
    with pytest.raises(TypeError):
        fail(TypeError("bug"))


def test_only_its_own_lines_reach_the_terminal(tmp_path: Path) -> None:
    """TensorFlow's remarks at its import do not, whatever the environment says of its log level.

    The exit code is that of the process.
    """
    done = subprocess.run(
        [sys.executable, "-m", "keras_vit", "predict", str(tmp_path / "gone"), "image.png"],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("TF_")},
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith("keras-vit: error: ")
