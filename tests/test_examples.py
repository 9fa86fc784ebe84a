"""Tests of the scripts in examples/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(script: str, *argv: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_quickstart_is_short() -> None:
    """A first script is read in a minute: under 25 lines."""
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) < 25


@pytest.mark.full
def test_the_quickstart_runs(tmp_path: Path) -> None:
    """One epoch trains, measures and reads a digit."""
    *_, measured, read = run("quickstart.py", "1", folder=tmp_path).stdout.splitlines()
    assert measured.startswith("Of 359 digits")
    assert "it reads a " in read
    assert {"model.keras", "sample.png"} <= {file.name for file in tmp_path.glob("digits-run/*")}


@pytest.mark.full
def test_the_example_of_keras_cv_trains(tmp_path: Path) -> None:
    """One epoch through the adapter ends with an accuracy."""
    pytest.importorskip("keras_cv")
    done = run("keras_cv_augment.py", "1", folder=tmp_path)
    assert done.stdout.startswith("Of 359 digits")
    assert "cannot be seeded" in done.stderr


@pytest.mark.full
def test_learning_from_few_runs_small(tmp_path: Path) -> None:
    """All four comparisons on a small scale: the table and the picture; its numbers say little."""
    run("learn_from_few.py", "--quick", "--out", "few", folder=tmp_path)
    few = tmp_path / "few"
    rows = {row["name"]: row for row in json.loads((few / "few.json").read_text())}
    assert len(rows) == 16
    assert rows["LoRA at rank 8"]["trained"] < 0.05
    assert (few / "few.md").read_text().count("\n") == 2 + len(rows)
    assert (few / "few.png").stat().st_size > 10_000
