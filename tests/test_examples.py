"""Tests of the scripts in examples/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import keras_vit

ROOT = Path(keras_vit.__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.py"

pytestmark = pytest.mark.skipif(not QUICKSTART.exists(), reason="the examples are not installed")


def run_quickstart(folder: Path, *argv: str) -> str:
    return subprocess.run(
        [sys.executable, str(QUICKSTART), *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def test_the_quickstart_is_short() -> None:
    """A first script is read in a minute: under 25 lines."""
    assert len(QUICKSTART.read_text().splitlines()) < 25


@pytest.mark.full
def test_the_quickstart_runs(tmp_path: Path) -> None:
    """One epoch trains, measures and reads a digit."""
    lines = run_quickstart(tmp_path, "1").splitlines()

    assert lines[-2].startswith("Of 359 digits")
    assert "it reads a " in lines[-1]
    assert {"model.keras", "sample.png"} <= {file.name for file in tmp_path.glob("digits-run/*")}


@pytest.mark.full
def test_the_example_of_keras_cv_trains(tmp_path: Path) -> None:
    """One epoch through the adapter ends with an accuracy."""
    pytest.importorskip("keras_cv")
    script = ROOT / "examples" / "keras_cv_augment.py"
    done = subprocess.run(
        [sys.executable, str(script), "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Of 359 digits")
    assert "cannot be seeded" in done.stderr


@pytest.mark.full
def test_learning_from_few_runs_small(tmp_path: Path) -> None:
    """All four comparisons on a small scale: the table and the picture; its numbers say little."""
    script = ROOT / "examples" / "learn_from_few.py"
    subprocess.run(
        [sys.executable, str(script), "--quick", "--out", "few"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    rows = {row["name"]: row for row in json.loads((tmp_path / "few" / "few.json").read_text())}
    assert len(rows) == 16
    assert rows["LoRA at rank 8"]["trained"] < 0.05
    assert (tmp_path / "few" / "few.md").read_text().count("\n") == 2 + len(rows)
    assert (tmp_path / "few" / "few.png").stat().st_size > 10_000
