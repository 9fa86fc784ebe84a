"""Tests of the documents in docs/: their Python runs, their tables are those of the code."""

import ast
import dataclasses
import importlib
import json
import re
from pathlib import Path

import image_files
import numpy as np
import pytest

import keras_vit
from keras_vit.cli.main import make_parser
from keras_vit.weights.catalog import ACCURACY_KINDS, FAMILIES, repositories

ROOT = Path(__file__).parents[1]


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def run_python(name: str) -> tuple[str, dict[str, object]]:
    """Runs the Python of a document from top to bottom; returns it, and the names it leaves."""
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", text_of(name), re.DOTALL)
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return "".join(blocks), names


@pytest.mark.parametrize(
    ("name", "count"), [("variants.md", 3), ("weights.md", 3), ("questions.md", 1)]
)
def test_the_python_gives_what_it_says(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment that is a tuple or list is the value of its line."""
    monkeypatch.chdir(tmp_path)
    for animal in ("cat", "dog"):
        image_files.write_image(tmp_path / "photos" / f"{animal}.jpg", mode="RGB", seed=0)
    source, names = run_python(name)
    said = re.findall(r"^(\S.*?)\s+# ([(\[].*[)\]])$", source, re.MULTILINE)
    assert len(said) == count
    for code, value in said:
        assert eval(code, names) == ast.literal_eval(value), code


@pytest.mark.full
def test_the_python_that_takes_longer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment that begins with a shape is checked; what is compiled is never fitted."""
    monkeypatch.chdir(tmp_path)
    source, names = run_python("explain.md")
    said = re.findall(r"^(explain\..*?)\s+# (\([\d, ]+\))", source, re.MULTILINE)
    assert len(said) == 7
    for code, shape in said:
        assert np.shape(eval(code, names)) == eval(shape), code
    run_python("few.md")
    assert (tmp_path / "adapter.safetensors").is_file()


def test_every_field_is_in_the_table() -> None:
    """A field in which a network may depart from the published ones has a row with its source."""
    rows = re.findall(r"^\| `(\w+)`.*\| .*\S \|$", text_of("variants.md"), re.MULTILINE)
    roles = {one.name: one.metadata["role"] for one in dataclasses.fields(keras_vit.ViTConfig)}
    beyond = {name for name, role in roles.items() if role in ("extension", "own")}
    assert {*beyond, "activation"} <= set(rows) <= {"field", *roles}


def test_every_family_is_in_the_table_with_its_licences() -> None:
    """Each family has one row, which names the licence of each of its repositories."""
    text = text_of("weights.md")
    table = re.findall(r"^\| (`.*?`) \| .* \| (.*) \|$", text, re.MULTILINE)
    named = {name: said for cell, said in table for name in re.findall(r"`(\w+)`", cell)}
    assert sorted(named) == sorted(FAMILIES)
    words = {"DINOv3": "DINOv3's own", "Apple-ASCL": "Apple's"}
    for row in repositories():
        assert words.get(row.licence, row.licence) in named[row.family], row.address
    assert all(f"`{kind}`" in text for kind in ACCURACY_KINDS)


def test_few_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table is that of few.json, the text's claims hold in it, the flags of commands exist."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    report = importlib.import_module("few_report")
    rows = [report.Row(**row) for row in json.loads(text_of("few.json"))]
    assert report.table(rows) in text_of("few.md")
    mean = {row.name: np.mean(row.accuracies) for row in rows}
    for shots in ("1 shot", "5 shots", "10 shots"):
        assert mean[f"masked patches, {shots}"] > mean[f"random initialisation, {shots}"]
    kinds = ("learned 1-D", "learned 2-D", "sin-cos 2-D", "relative")
    assert all(mean[name] > mean["none"] for name in kinds)
    assert mean["LoRA at rank 8"] > mean["full fine-tuning"] - 0.01
    assert {row.name: row.trained for row in rows}["LoRA at rank 8"] < 0.05
    assert mean["student of 200 labels, distilled"] > mean["student of 200 labels"]
    lines = re.findall(r"^keras-vit (.*)$", text_of("few.md"), re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        make_parser().parse_args(line.split())
