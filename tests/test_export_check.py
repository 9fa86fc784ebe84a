"""Whatever happens to exported files after their export is found."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import LABELS, served_model

from keras_vit import cli
from keras_vit.exporting import checking, export, references, verification
from keras_vit.exporting.clean import messages, runners

pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

FORMATS = ("onnx", "onnx-int8", "tflite", "tflite-int8")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One version of a tiny model in every format; the SavedModel is not verified, to save time."""
    folder = tmp_path_factory.mktemp("check") / "pets"
    model = served_model(num_layers=1)
    export(model, folder, formats=FORMATS, labels=LABELS)
    export(model, folder, formats=["savedmodel"], labels=LABELS, verify=False)
    return folder


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(exported, tmp_path / "pets"))


def faults(folder: Path) -> list[str]:
    return [
        fault
        for version in checking.find_versions(folder)
        for fault in checking.check(version, quick=True).faults
    ]


def test_what_was_exported_has_no_fault(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All versions are found, the answers are the same, and what has none to compare is told."""
    assert cli.main(["check", str(exported)]) == 3
    printed = capsys.readouterr()
    assert printed.out.count("as exported") == len(FORMATS) + 1
    assert printed.out.count("the same (0e+00)") == len(FORMATS)
    assert "No fault in 5 artefacts of 3 versions." in printed.out
    assert printed.out.splitlines()[-1] == f"Next: {exported / 'serve.sh'}"
    assert printed.err.count("\n") == 1
    assert "holds no answers, as the export was not verified" in printed.err
    assert cli.main(["check", str(exported), "--quick"]) == 0


def test_a_flipped_byte_is_found_wherever_it_is(copy: Path) -> None:
    """In each file of each format, at its begin, its end and between: the file is named."""
    files = [
        file for version in checking.find_versions(copy) for file in version.rglob("*")
        if file.is_file()
    ]  # fmt: skip
    assert {file.suffix for file in files} > {".onnx", ".tflite", ".pb", ".json", ".txt"}
    generator = np.random.default_rng(0)
    for file in files:
        content = file.read_bytes()
        places = {0, len(content) // 2, len(content) - 1, *generator.integers(len(content), size=4)}
        for place in places:
            damaged = bytearray(content)
            damaged[place] ^= 1 << int(generator.integers(8))
            file.write_bytes(damaged)
            (fault,) = faults(copy)
            assert str(file) in fault
        file.write_bytes(content)
    assert not faults(copy)


def test_a_record_with_any_other_byte_proves_nothing(copy: Path) -> None:
    """Every change of the record is found, also one that JSON would read as the same."""
    file = copy / "onnx/1/verification.json"
    content = file.read_text()
    for changed in (
        content.replace("0.5", "0.6", 1),
        content.replace("\n", "\n ", 1),
        content.replace('"record_sha256"', '"record_sha25x"'),
        content[:-40],
        "[]",
        "",
    ):
        assert changed != content
        file.write_text(changed)
        (fault,) = faults(copy)
        assert "is not as it was written" in fault
    file.unlink()
    (fault,) = faults(copy / "onnx")
    assert "has no verification.json" in fault


def test_files_cut_short_missing_swapped_or_added_are_found(copy: Path) -> None:
    """Each kind has its own sentence."""
    folder = copy / "tflite/1"
    whole, small = folder / "pets.tflite", folder / "pets-int8.tflite"
    content = whole.read_bytes()
    whole.write_bytes(content[:1000])
    assert faults(folder) == [f"'{whole}' has 1000 bytes, and was exported with {len(content)}."]
    whole.unlink()
    assert faults(folder) == [f"'{whole}' is missing."]
    (folder / "labels.txt").rename(folder / "kept")
    whole.write_bytes(content)
    assert faults(folder) == [
        f"'{folder / 'labels.txt'}' is missing.",
        f"'{folder / 'kept'}' was added after the export.",
    ]
    (folder / "kept").rename(folder / "labels.txt")
    small.rename(folder / "other")
    whole.rename(small)
    (folder / "other").rename(whole)
    found = faults(folder)
    assert len(found) == 2
    assert all("bytes, and was exported with" in fault for fault in found)
    first, second = copy / "2/saved_model.pb", copy / "2/fingerprint.pb"
    second.write_bytes(first.read_bytes())
    assert "bytes, and was exported with" in faults(copy / "2")[0]


def rewritten(folder: Path, **fields: Any) -> None:
    """Writes a record with other fields, and the right hash of itself."""
    file = checking.record_file(folder)
    record = {**json.loads(file.read_text()), **fields, verification.SELF: 64 * "0"}
    text = json.dumps(record)
    own = verification._text_sha256(text)
    file.write_text(text.replace(64 * "0", own))


def test_a_file_alone_is_checked_and_named(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from within its folder; what is beside it is not looked at."""
    folder = copy / "tflite/1"
    (folder / "pets-int8.tflite").write_bytes(b"damaged")
    monkeypatch.chdir(folder)
    assert cli.main(["check", "pets.tflite", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("pets.tflite (")
    assert "No fault in 1 artefacts" in printed
    assert cli.main(["check", "pets-int8.tflite"]) == 1
    assert "'pets-int8.tflite' has 7 bytes" in capsys.readouterr().err
    Path("new.txt").touch()
    assert cli.main(["check", "new.txt", "--quick"]) == 1
    assert "'new.txt' was added after the export" in capsys.readouterr().err
    for place, code in (("verification.json", 1), (".", 1), ("../../onnx/1", 0)):
        assert cli.main(["check", place, "--quick"]) == code
    monkeypatch.chdir(copy / "onnx")
    assert cli.main(["check", ".", "--quick"]) == 0


def test_a_file_that_answers_otherwise_is_found(copy: Path) -> None:
    """With the hash of another file in the record, its answers tell, by name and measure."""
    folder = copy / "onnx/1"
    other = export(
        served_model(num_layers=1, layer_norm_epsilon=1e-2),
        copy.parent / "other",
        formats=["onnx"],
        verify=False,
    )[0].path
    shutil.copyfile(other, folder / "pets.onnx")
    files = checking.read_record(folder)["files"]
    content = {"bytes": other.stat().st_size, "sha256": verification.sha256(other)}
    rewritten(folder, files={**files, "pets.onnx": content})
    assert not faults(folder)
    (fault,) = checking.check(folder).faults
    assert "does not answer as it did when it was exported: logits" in fault


def test_a_record_from_elsewhere_reads_nothing_outside(copy: Path) -> None:
    """Names that lead out of the folder are refused, also with a right hash."""
    rewritten(copy / "onnx/1", files={"../../1/labels.txt": {"bytes": 1, "sha256": ""}})
    (fault,) = faults(copy / "onnx")
    assert "names files outside its folder" in fault


def test_records_of_earlier_versions_are_read(copy: Path) -> None:
    """Those have no description, answers and hash of themselves: the files alone are compared."""
    file = copy / "onnx/1/verification.json"
    record = json.loads(file.read_text())
    for name in ("description", "artefacts", "answers", verification.SELF):
        record.pop(name)
    record["checks"].pop("onnx-int8")  # which they did not have
    file.write_text(json.dumps({**record, "pixels": {"takes": "pixels"}}))
    checked = checking.check(copy / "onnx/1")
    assert not checked.faults
    assert [(each.format, each.path.name) for each in checked.verdicts] == [("onnx", "pets.onnx")]
    assert "holds no answers, as the export is by an earlier version" in checked.unasked[0]


def test_a_missing_runtime_is_named(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files are compared all the same, and the exit code says that not all was."""
    monkeypatch.setattr(runners.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert cli.main(["check", str(exported / "onnx"), "--json"]) == 3
    (line,) = capsys.readouterr().out.splitlines()
    printed = json.loads(line)
    assert printed["faults"] == []
    assert printed["unasked"] == [
        f"{name} runs in ONNX Runtime, which is not installed; run: pip install onnxruntime"
        for name in ("onnx", "onnx-int8")
    ]
    assert [each["is_whole"] for each in printed["artefacts"]] == [True, True]


def test_what_is_no_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for an empty folder, and for none."""
    for path, message in ((tmp_path, "holds nothing that keras-vit export"), ("absent", "no 'abs")):
        assert cli.main(["check", str(path)]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_reference_images_are_the_same_everywhere() -> None:
    """They are whole numbers, no two alike, and a few of them are kept of large answers."""
    images = references.draw((32, 48, 3))
    assert images.shape == (4, 32, 48, 3)
    assert int(images.astype(np.int64).sum()) == 2_411_158
    assert len({image.tobytes() for image in images}) == 4
    case = messages.Case(signature="", inputs={"images": images}, expected={}, limit=1.0)
    large = {"features": np.zeros((4, 2**15), np.float32)}
    (kept,) = references.record([case], [large])
    assert kept["outputs"]["features"]["shape"] == [2, 2**15]
