"""Versions appear whole or not at all."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import exported
import pytest

from keras_vit.exporting import artefacts


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    """Forks processes of one that has imported everything, but has done nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["exported", "keras_vit.exporting"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        yield context


@pytest.mark.full
def test_a_kill_leaves_whole_versions_only(processes: ForkServerContext, tmp_path: Path) -> None:
    """Kill -9 while one is written: what was served stays, every number is a whole version."""
    directory = tmp_path / "pets"
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
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        artefacts.staging_folder(file).__enter__()
