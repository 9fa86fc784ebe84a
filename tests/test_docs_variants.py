"""Tests of docs/variants.md."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import keras_vit

DOCUMENT = Path(keras_vit.__file__).parents[1] / "docs" / "variants.md"

pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not installed")


def test_the_python_runs_and_gives_what_it_says() -> None:
    """A comment that is a tuple is the value of its line."""
    names: dict[str, object] = {}
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(block, DOCUMENT.name, "exec"), names)
    said = re.findall(r"^(\S.*?)\s+# (\(.*\))$", block, re.MULTILINE)
    assert len(said) == 3
    for code, value in said:
        assert eval(code, names) == ast.literal_eval(value), code


def test_every_field_is_in_the_table() -> None:
    """A field in which a network may depart from the published ones has a row with its source."""
    rows = re.findall(r"^\| `(\w+)`.*\| .*\S \|$", DOCUMENT.read_text(), re.MULTILINE)
    fields = {field.name for field in dataclasses.fields(keras_vit.ViTConfig)}
    assert fields - keras_vit.config.WRITTEN - {"pooling"} <= set(rows)
    assert set(rows) - {"field"} <= fields
