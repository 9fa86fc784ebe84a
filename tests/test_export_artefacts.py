"""One call exports, checks on the disk, and puts in place what passed, whole, and nothing else."""

import multiprocessing
import signal
import time
from pathlib import Path
from typing import Any

import exported
import numpy as np
import pytest
from exported import served_model

from keras_vit.exporting import (
    VerificationError,
    artefacts,
    export,
    rebuild,
    savedmodel,
    verification,
)
from keras_vit.exporting.clean.messages import Request


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
    before, write = content(directory / "1"), savedmodel.write_savedmodel

    def write_another(exportable: rebuild.Exportable, *arguments: Any, **options: Any) -> None:
        head = exportable.network.get_layer("head")
        head.bias.assign_add(np.linspace(0, 1e-3, 7))
        write(exportable, *arguments, **options)

    monkeypatch.setattr(savedmodel, "write_savedmodel", write_another)
    with pytest.raises(VerificationError, match=r"not put in place: .*difference.*limit"):
        export(model, directory)
    assert [child.name for child in directory.iterdir() if child.is_dir()] == ["1"]
    assert content(directory / "1") == before


def test_a_process_that_dies_is_told(tmp_path: Path) -> None:
    """An artefact that cannot even be opened is an error that says so."""
    (tmp_path / "variables").mkdir()
    (tmp_path / "saved_model.pb").write_bytes(b"nothing")
    (tmp_path / "variables/variables.index").write_bytes(b"nothing")
    request = Request(
        format="savedmodel", path=tmp_path, parameter_bytes=8, batch_sizes=(1,), labels=(), cases=()
    )
    with pytest.raises(VerificationError, match="could not be checked"):
        verification.run_checks(request)


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Each wrong argument is refused in one sentence, and no version is written."""
    model = served_model(num_layers=1)
    five = served_model(num_layers=1, input_shape=(32, 48, 5))
    file = tmp_path / "file"
    file.write_text("")
    for given, name, options, message in (
        (model, "pets", {"formats": ["savedmodel", "pdf"]}, "formats must be some of"),
        (model, "pets", {"formats": []}, "formats must be some of"),
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
    process = processes.Process(target=exported.export_for_ever, args=(directory, sender))
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


def test_the_next_version_follows_the_highest(tmp_path: Path) -> None:
    """Names that are no number do not count, nor do gaps."""
    for name in ("1", "7", ".staged-x", "notes", "8.txt"):
        (tmp_path / name).mkdir()
    assert artefacts.next_version([tmp_path, tmp_path / "absent"]) == 8


def test_one_export_at_a_time(tmp_path: Path) -> None:
    """A second export to the same directory is refused while the first is at work."""
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
