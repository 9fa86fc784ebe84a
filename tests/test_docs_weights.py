"""Tests of docs/weights.md."""

import ast
import re
from pathlib import Path

import pytest

import keras_vit
from keras_vit.weights.catalog import ACCURACY_KINDS, FAMILIES, repositories

DOCUMENT = Path(keras_vit.__file__).parents[1] / "docs" / "weights.md"

pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not installed")


def test_the_python_runs_and_gives_what_it_says() -> None:
    """A comment that is a tuple or list is the value of its line."""
    names: dict[str, object] = {}
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(block, DOCUMENT.name, "exec"), names)
    said = re.findall(r"^(\S.*?)\s+# ([(\[].*[)\]])$", block, re.MULTILINE)
    assert len(said) == 2
    for code, value in said:
        assert eval(code, names) == ast.literal_eval(value), code


def test_every_family_is_in_the_table_with_its_licences() -> None:
    """Each family has one row, which names the licence of each of its repositories."""
    table = re.findall(r"^\| (`.*?`) \| .* \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    named = {name: said for cell, said in table for name in re.findall(r"`(\w+)`", cell)}
    assert sorted(named) == sorted(FAMILIES)
    words = {"DINOv3": "DINOv3's own", "Apple-ASCL": "Apple's"}
    for row in repositories():
        assert words.get(row.licence, row.licence) in named[row.family], row.address
    assert all(f"`{kind}`" in DOCUMENT.read_text() for kind in ACCURACY_KINDS)
