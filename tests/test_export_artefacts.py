"""One call puts in place what passed, whole; whatever happens to the files later is found."""

import json
import multiprocessing
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import LABELS, export_for_ever, served_model

from keras_vit import cli
from keras_vit.exporting import VerificationError, artefacts, export, rebuild, records, savedmodel
from keras_vit.preprocessing import class_labels

pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

FORMATS = ("onnx", "onnx-int8", "tflite", "tflite-int8")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_an_artefact_that_differs_is_put_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If what was written is not what the model computes, no version appears and none is lost."""
    directory, model = tmp_path / "pets", served_model(num_layers=1)
    export(model, directory, verify=False)
    before, write = content(directory / "1"), savedmodel.write

    def write_another(exportable: rebuild.Exportable, *arguments: Any, **options: Any) -> Any:
        head = exportable.network.get_layer("head")
        head.bias.assign_add(np.linspace(0, 1e-3, 7))
        return write(exportable, *arguments, **options)

    monkeypatch.setattr(savedmodel, "write", write_another)
    with pytest.raises(VerificationError, match=r"not put in place: .*difference.*limit"):
        export(model, directory)
    assert [child.name for child in directory.iterdir() if child.is_dir()] == ["1"]
    assert content(directory / "1") == before


def test_a_process_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An artefact that cannot even be opened is an error that says so."""

    def write_nothing(exportable: rebuild.Exportable, files: dict[str, Path], **_: Any) -> Any:
        (files["savedmodel"] / "variables").mkdir(parents=True)
        for name in ("saved_model.pb", "variables/variables.index"):
            (files["savedmodel"] / name).write_bytes(b"nothing")
        return {"savedmodel": 8}

    monkeypatch.setattr(savedmodel, "write", write_nothing)
    with pytest.raises(VerificationError, match="could not be checked"):
        export(served_model(num_layers=1), tmp_path / "pets")


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Each wrong argument is refused in one sentence, and no version is written."""
    model = served_model(num_layers=1)
    five = served_model(num_layers=1, input_shape=(32, 48, 5))
    file = tmp_path / "file"
    names = [name for _, name in class_labels(1000)]  # of which two stand there twice
    file.write_text("\n".join(names))
    assert artefacts.read_labels(file) == tuple(names)
    for given, name, options, message in (
        (model, "pets", {"formats": ["savedmodel", "pdf"]}, "formats must be some of"),
        (model, "pets", {"formats": []}, "formats must be some of"),
        (model, "pets", {"labels": ["two\nlines", *"abcdef"]}, r"line of text.*'two\\nlines'"),
        (model, "pets", {"labels": [*"abcdef", ""]}, "A label is a line of text. Received: ''"),
        (model, "pets", {"labels": ["one"]}, "7 classes; give a label for each"),
        (model, "pets", {"top_k": 0}, "top_k must be at least 1"),
        (model, "pets", {"images": ["absent.png"]}, "no image file 'absent.png'"),
        # The directory names the model in URLs and in a shell script.
        (model, "my pets; rm", {}, "name is the model's name"),
        # No image file has as many channels.
        (five, "five", {}, "export it as tflite or onnx"),
        (model, "file", {}, "is a file; give a directory"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            export(given, tmp_path / name, **options)
    assert not (tmp_path / "pets").exists()
    assert not list(tmp_path.glob("*/[0-9]*"))


@pytest.mark.full
def test_a_kill_leaves_whole_versions_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill -9 while one is written: what was served stays, every number is a whole version."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    directory, processes = tmp_path / "pets", multiprocessing.get_context("spawn")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=export_for_ever, args=(directory, sender))
    process.start()
    assert receiver.poll(300)
    first = content(directory / "1")
    while not list(directory.glob(".staged-*/*")):
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert content(directory / "1") == first
    numbers = [child for child in directory.iterdir() if child.name.isdecimal()]
    assert {len(content(number)) for number in numbers} == {len(first)}
    with artefacts.staging_folder(directory):
        leftovers = [child for child in directory.iterdir() if child.name.startswith(".staged-")]
        assert len(leftovers) == 1  # the new one: what the killed process left is gone


def test_one_export_at_a_time_makes_the_next_version(tmp_path: Path) -> None:
    """A second one is refused while the first is at work; of names only numbers count."""
    for name in ("1", "7", ".staged-x", "notes", "8.txt"):
        (tmp_path / name).mkdir()
    assert artefacts.next_version([tmp_path, tmp_path / "absent"]) == 8
    with artefacts.staging_folder(tmp_path), pytest.raises(OSError, match="Another export"):
        artefacts.staging_folder(tmp_path).__enter__()
    with artefacts.staging_folder(tmp_path) as stage:
        assert stage.is_dir()
    assert not stage.exists()


def test_a_failed_rename_takes_the_others_back(tmp_path: Path) -> None:
    """If one artefact cannot be put in place, none is."""
    directory = tmp_path / "pets"
    (directory / "blocked" / "file").mkdir(parents=True)
    with artefacts.staging_folder(directory) as stage:
        for name in ("a", "b"):
            (stage / name).mkdir()
            (stage / name / "content").write_text(name)
        with pytest.raises(OSError, match="has appeared meanwhile"):
            artefacts.publish({stage / "a": directory / "1", stage / "b": directory / "blocked"})
        assert not (directory / "1").exists()


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
    return Path(shutil.copytree(exported, tmp_path / "pets"))


def faults(folder: Path) -> list[str]:
    return [
        fault
        for version in records.find_versions(folder)
        for fault in records.compare(version).faults
    ]


def test_what_was_exported_has_no_fault(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All versions are found, and nothing that the export wrote has changed."""
    names = {file.name for file in (exported / "onnx" / "1").iterdir()}
    assert names == {"pets.onnx", "pets-int8.onnx", "labels.txt", "verification.json"}
    assert [each.name for each in exported.glob("[0-9]*")] == ["2"]  # after that of the others
    record = records.read_record(exported / "onnx" / "1")
    checks = {check["name"] for check in record["checks"]["onnx"]}
    assert {"onnx.checker, full", "batch invariance", "gate: best class"} <= checks
    assert cli.main(["check", str(exported)]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("as exported") == len(FORMATS) + 1
    assert "No fault in 5 artefacts of 3 versions." in printed.out
    assert printed.out.splitlines()[-1] == f"Next: {exported / 'serve.sh'}"
    assert not printed.err
    assert cli.main(["check", str(exported / "onnx"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["faults"], printed["folder"]) == ([], str(exported / "onnx" / "1"))
    assert [each["is_whole"] for each in printed["artefacts"]] == [True, True]


def test_a_flipped_byte_is_found_wherever_it_is(copy: Path) -> None:
    """In each file of each format, at its begin, its end and between: the file is named."""
    files = [
        file for version in records.find_versions(copy) for file in version.rglob("*")
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
    shutil.copyfile(copy / "2/saved_model.pb", copy / "2/fingerprint.pb")
    assert "bytes, and was exported with" in faults(copy / "2")[0]


def test_a_file_alone_is_checked_and_named(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also from within its folder; what is beside it is not looked at."""
    folder = copy / "tflite/1"
    (folder / "pets-int8.tflite").write_bytes(b"damaged")
    monkeypatch.chdir(folder)
    assert cli.main(["check", "pets.tflite"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("pets.tflite (")
    assert "No fault in 1 artefact of 1 version." in printed
    assert cli.main(["check", "pets-int8.tflite"]) == 1
    assert "'pets-int8.tflite' has 7 bytes" in capsys.readouterr().err
    Path("new.txt").touch()
    assert cli.main(["check", "new.txt"]) == 1
    assert "'new.txt' was added after the export" in capsys.readouterr().err
    for place, code in (("verification.json", 1), (".", 1), ("../../onnx/1", 0)):
        assert cli.main(["check", place]) == code
    monkeypatch.chdir(copy / "onnx")
    assert cli.main(["check", "."]) == 0


def test_a_record_from_elsewhere_reads_nothing_outside(copy: Path) -> None:
    """Names that lead out of the folder are refused, also with a right hash."""
    file = records.record_file(copy / "onnx/1")
    outside = {"../../1/labels.txt": {"bytes": 1, "sha256": ""}}
    record = {**json.loads(file.read_text()), "files": outside, records.SELF: 64 * "0"}
    text = json.dumps(record)
    file.write_text(text.replace(64 * "0", records._text_sha256(text)))
    (fault,) = faults(copy / "onnx")
    assert "names files outside its folder" in fault


def test_what_is_no_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for an empty folder, and for none."""
    for path, message in ((tmp_path, "holds nothing that keras-vit export"), ("absent", "no 'abs")):
        assert cli.main(["check", str(path)]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
