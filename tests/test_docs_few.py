"""Tests of docs/few.md."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import keras_vit
from keras_vit.cli.main import make_parser

ROOT = Path(keras_vit.__file__).parents[1]
DOCUMENT, FIGURES = ROOT / "docs" / "few.md", ROOT / "docs" / "few.json"

pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not installed")


@pytest.mark.full
def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run from top to bottom; models are compiled and never fitted, so it is quick."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(compile(block, DOCUMENT.name, "exec"), names)
    assert (tmp_path / "adapter.safetensors").is_file()


def test_the_commands_are_ones() -> None:
    """Each line of `keras-vit` has flags that exist."""
    lines = re.findall(r"^keras-vit (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        make_parser().parse_args(line.split())


def test_the_share_of_b16_is_as_said() -> None:
    """The 2.3 per cent of the text are counted."""
    sides = (768 + 2304, 768 + 768, 768 + 3072, 3072 + 768)
    trained = 12 * 8 * sum(sides) + 769 * 1000
    assert f"{trained / 86_567_656:.1%}" == "2.3%"
    assert "2.3 % of the parameters" in DOCUMENT.read_text()


def test_the_table_is_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made of few.json, which the script wrote, and the text's claims hold in it."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    spec = importlib.util.spec_from_file_location("few_report", ROOT / "examples" / "few_report.py")
    assert spec is not None
    assert spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "few_report", report)
    spec.loader.exec_module(report)
    rows = [report.Row(**row) for row in json.loads(FIGURES.read_text())]
    assert report.table(rows) in DOCUMENT.read_text()
    mean = {row.name: np.mean(row.accuracies) for row in rows}
    for shots in ("1 shot", "5 shots", "10 shots"):
        assert mean[f"masked patches, {shots}"] > mean[f"random initialisation, {shots}"]
    kinds = ("learned 1-D", "learned 2-D", "sin-cos 2-D", "relative")
    assert all(mean[name] > mean["none"] for name in kinds)
    assert mean["LoRA at rank 8"] > mean["full fine-tuning"] - 0.01
    assert {row.name: row.trained for row in rows}["LoRA at rank 8"] < 0.05
    assert mean["student of 200 labels, distilled"] > mean["student of 200 labels"]
