"""Tests of `keras-vit export`: what it says, and of what it refuses."""

import json
from pathlib import Path

import pytest
from exported import LABELS, served_model

from keras_vit import cli


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a .keras file, with a file of labels beside it."""
    folder = tmp_path_factory.mktemp("saved")
    served_model().save(folder / "model.keras")
    (folder / "labels.txt").write_text("\n".join(LABELS))
    return folder


def test_a_keras_file_is_exported(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what it wrote and where, and how to go on."""
    out = saved / "out" / "pets"
    arguments = ["export", str(saved / "model.keras"), "--out", str(out)]
    assert cli.main([*arguments, "--labels", str(saved / "labels.txt"), "--no-verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"savedmodel: {out / '1'} (0.")
    assert lines[0].endswith("not checked)")
    assert lines[1] == f"Next: {out / 'serve.sh'}"
    assert (out / "labels.txt").read_text().splitlines() == list(LABELS)


def test_machines_read_json(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json there is one object for each artefact, with its checks."""
    pytest.importorskip("onnxruntime")
    out = saved / "json"
    arguments = ["export", str(saved / "model.keras"), "--out", str(out), "--formats", "onnx"]
    assert cli.main([*arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    actual = json.loads(line)
    assert (actual["event"], actual["format"]) == ("artefact", "onnx")
    assert Path(actual["path"]).is_file()
    assert all(check["passed"] for check in actual["checks"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.keras"], "There is no model file 'absent.keras'"),
        (["absent-run"], "absent-run"),
        (["MODEL", "--formats", "pdf"], "formats must be some of"),
        (["MODEL", "--images", "absent.png"], "absent.png"),
    ],
    ids=["file", "run", "format", "image"],
)
def test_mistakes_are_one_line_and_exit_1(
    arguments: list[str],
    message: str,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be exported is told in one line, and nothing is written."""
    arguments = [str(saved / "model.keras") if each == "MODEL" else each for each in arguments]
    assert cli.main(["export", *arguments, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
