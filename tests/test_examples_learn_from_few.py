"""Tests of examples/learn_from_few.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keras_vit

ROOT = Path(keras_vit.__file__).parents[1]
SCRIPT = ROOT / "examples" / "learn_from_few.py"

pytestmark = [
    pytest.mark.skipif(not SCRIPT.exists(), reason="the examples are not installed"),
    pytest.mark.slow,
]


def test_little_training_is_better_than_none(tmp_path: Path) -> None:
    """At small scale the script runs, and masked patches beat random features at 5 and 10 shots."""
    said = subprocess.run(
        [sys.executable, str(SCRIPT), "15"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()
    random, pretrained, full, lora = (
        [float(number) for number in re.findall(r"([\d.]+)%", line)] for line in said
    )
    # Mean and spread for 1, 5, 10 and 25 shots.
    assert pretrained[2] > random[2] + random[3]
    assert pretrained[4] > random[4] + random[5]
    assert full[0] == 100
    assert lora[0] < 5
    assert lora[1] > 60  # chance is 20
