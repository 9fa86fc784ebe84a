"""Tests of keras_vit.training.run."""

from pathlib import Path

import pytest

from keras_vit.data import load_digits
from keras_vit.training import load_run, run


def write_run(path: Path, *, content: str = "{}") -> Path:
    """Writes what counts as a run, without a real model."""
    path.mkdir(parents=True, exist_ok=True)
    (path / run.MODEL).write_text(content)
    (path / run.CONFIG).write_text(content)
    return path


def test_a_free_place_is_free(tmp_path: Path) -> None:
    """A new name and an empty folder may be written to."""
    run.check_free(tmp_path / "new", existing="refuse")
    run.check_free(tmp_path, existing="refuse")


def test_a_run_is_replaced_only_on_demand(tmp_path: Path) -> None:
    """Without `overwrite` a run is safe."""
    write_run(tmp_path / "run")

    with pytest.raises(FileExistsError, match="already holds a run"):
        run.check_free(tmp_path / "run", existing="refuse")
    run.check_free(tmp_path / "run", existing="overwrite")


@pytest.mark.parametrize("existing", ["refuse", "overwrite", "resume"])
def test_what_is_no_run_is_never_replaced(tmp_path: Path, existing: run.Existing) -> None:
    """A file, a link, a folder of other things, and a run with notes in it are all refused."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(write_run(tmp_path / "run"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    (write_run(tmp_path / "noted") / "notes.txt").touch()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / run.LABELS).touch()

    for name, message in (
        ("file", "is not a folder"),
        ("link", "is not a folder"),
        ("photos", r"other things than a run \('a.jpg'\)"),
        ("noted", r"other things than a run \('notes.txt'\)"),
        ("half", "no whole run"),
    ):
        with pytest.raises(FileExistsError, match=message):
            run.check_free(tmp_path / name, existing=existing)


def test_a_directory_that_is_no_run_is_named(tmp_path: Path) -> None:
    """A missing path and another folder each give a sentence."""
    with pytest.raises(FileNotFoundError, match=r"no run directory '.*gone'"):
        load_run(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"is not a run directory: it lacks model\.keras"):
        load_run(tmp_path)


def test_a_run_of_digits_finds_its_images(tmp_path: Path) -> None:
    """The digits are always the same, so nothing of them is written down."""
    config = {"data": {"source": "digits"}}
    opened = run.Run(path=tmp_path, model=None, labels=tuple("0123456789"), config=config)

    assert run.load_run_data(opened).counts == load_digits().counts


def test_a_run_of_images_in_memory_cannot_be_measured_again(tmp_path: Path) -> None:
    """Pixels that were never on the disk cannot be loaded; the sentence says what to do."""
    config = {"data": {"source": "memory"}}
    opened = run.Run(path=tmp_path, model=None, labels=("a", "b"), config=config)

    with pytest.raises(ValueError, match="were in memory and are gone; name a folder"):
        run.load_run_data(opened)


def test_a_run_that_a_kill_took_away_is_put_back(tmp_path: Path) -> None:
    """Where names cannot be swapped, a kill may fall between two renames; no place has no name."""
    write_run(run.unfinished_path(tmp_path / "run") / ".replaced", content='{"labels": []}')
    with pytest.raises(ValueError, match=r"model\.keras"):  # the model is none, but it was found
        load_run(tmp_path / "run")

    assert run.is_run(tmp_path / "run")
    for path in (".", "/", ".."):
        with pytest.raises(ValueError, match="is not a run directory"):
            load_run(path)
