"""Tests of docs/explain.md."""

import re
from pathlib import Path

import numpy as np
import pytest

import keras_vit

DOCUMENT = Path(keras_vit.__file__).parents[1] / "docs" / "explain.md"

pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not installed")


@pytest.mark.full
def test_the_python_runs_and_has_the_shapes_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks run from top to bottom; a comment that begins with a shape is checked."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    checked = 0
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(compile(block, DOCUMENT.name, "exec"), names)
        for code, shape in re.findall(r"^(explain\..*?)\s+# (\([\d, ]+\))", block, re.MULTILINE):
            assert np.shape(eval(code, names)) == eval(shape), code
            checked += 1
    assert checked == 7
