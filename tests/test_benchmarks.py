"""Tests of benchmarks: what is counted and compared; nothing here depends on a time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

import benchmarks.__main__ as benchmarks_main
import keras_vit
from benchmarks import parts, profile, report
from benchmarks.cases import CONTENDERS, Case, Target
from benchmarks.measuring import Measured
from benchmarks.suites import SUITES

ROOT = Path(__file__).parents[1]


def test_operations_are_those_of_the_paper() -> None:
    """B/16 at 224 takes 17.6 billion multiplications and additions, a training step three times."""
    assert Case(batch=1).flops / 2 == pytest.approx(17.58e9, rel=0.01)
    assert Case(task="training").flops == 3 * Case().flops == 24 * Case(batch=1).flops
    assert Case(layers=24).flops == pytest.approx(2 * Case().flops, rel=0.02)


@pytest.mark.parametrize("name", SUITES)
def test_targets_can_be_measured(name: str) -> None:
    """Every contender of a target exists and takes its case."""
    for target in SUITES[name]:
        assert CONTENDERS[target.ours].takes(target.case)
        for peer in target.peers:
            assert CONTENDERS[peer].takes(target.case)


def test_ratios_compare_with_the_best_peer_turn_by_turn() -> None:
    """A turn that was slow for all changes nothing; memory counts above the imports."""
    case = Case()
    figures = {
        case: {
            "keras_vit": Measured(seconds=[1.0, 9.0, 1.0], peak=300.0, imported=200.0),
            "timm": Measured(seconds=[2.0, 18.0, 2.0], peak=250.0, imported=100.0),
            "KerasHub": Measured(seconds=[4.0, 36.0, 4.0], peak=900.0, imported=100.0),
        }
    }
    speed = Target(case=case, ours="keras_vit", peers=("timm", "KerasHub"), ratio=1.0)
    memory = Target(case=case, ours="keras_vit", peers=("timm",), ratio=1.0, figure="memory")
    absent = Target(case=case, ours="keras_vit", peers=("OpenVINO",), ratio=1.0)
    assert report.ratio(figures, speed) == 2.0
    assert report.ratio(figures, memory) == 1.5
    assert report.ratio(figures, absent) is None


def test_activations_are_what_is_not_kept_anyway() -> None:
    """Weights, gradients and momentum do not count; the matrices are the network's own."""
    case = Case(task="training")
    weights = keras_vit.parameter_count(keras_vit.variant("B/16")) * 4 / 2**20
    assert case.weights_mib == pytest.approx(weights, rel=0.01)

    kept = 3 * case.weights_mib
    figures = {
        case: {
            "keras_vit": Measured(seconds=[1.0], peak=kept + 900.0, imported=100.0),
            "keras_vit remat": Measured(seconds=[1.0], peak=kept + 300.0, imported=100.0),
        }
    }
    target = Target(
        case=case, ours="keras_vit remat", peers=("keras_vit",), ratio=2.0, figure="activations"
    )
    assert report.ratio(figures, target) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (benchmarks_main, ["--variants", "X/16"], "a size of tiny, Ti, S, B, L.*Received: X/16"),
        (benchmarks_main, ["--image-sizes", "225"], "16 pixels do not divide images of 225"),
        (benchmarks_main, ["--batches", "8", "--replicas", "3"], "batch of 8, 3 replicas"),
        (benchmarks_main, ["--rounds", "0"], "must be 1 or more. Received: 0"),
        (benchmarks_main, ["--peers-python", "nowhere"], "must be a Python. Received: nowhere"),
        (profile, ["--variant", "B/0"], "Received: B/0"),
        (parts, ["--batch", "0"], "a batch of 0"),
        (parts, ["--rounds", "0"], "must be 1 or more. Received: 0"),
        (parts, [], "pip install torch"),
    ],
)
def test_wrong_options_get_one_sentence(
    module: Any,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is measured before all that was asked for can be."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as stopped:
        module.main(options)
    said = f"{stopped.value} {capsys.readouterr().err}"
    assert re.search(message, said)
    assert "Traceback" not in said


def test_a_missing_contender_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who asks for one that is not there does not get an empty table."""
    monkeypatch.setattr(benchmarks_main, "installed", lambda python: ["keras_vit"])
    with pytest.raises(SystemExit):
        benchmarks_main.main(["--only", "timm"])
    assert "Nothing to measure is installed. Received: ['timm']" in capsys.readouterr().err


def run(module: str, *options: str) -> str:
    """Runs a command of the benchmarks; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_the_command_measures_a_tiny_model(tmp_path: Path) -> None:
    """Inference, training, replicas and a cold start leave their figures and a chart.

    What is not installed is not measured, and said so.
    """
    ours = "keras_vit on JAX" if keras.backend.backend() == "jax" else "keras_vit"
    printed = run(
        "benchmarks", "--suite=trial", "--rounds=1", f"--only={ours}", f"--out={tmp_path}"
    )
    assert " MFU " in printed
    assert re.search(r"not measured +keras_vit.* / timm compiled, speed: training", printed)
    about = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert "none" in about["accelerator"]
    assert about["ceilings"]["bfloat16"] > 0
    for case in about["cases"]:
        assert case["flops"] > 0
        if not CONTENDERS[ours].takes(Case(**case["case"])):
            assert case["contenders"] == {}
            continue
        measured = case["contenders"][ours]
        assert len(measured["seconds"]) == 1
        assert measured["peak"] > measured["imported"] > 0
        assert case["case"]["task"] == "cold" or measured["first"] > measured["built"] > 0
    assert [case["case"]["task"] for case in about["cases"]].count("training") == 2
    assert (tmp_path / "chart.png").stat().st_size > 1000


@pytest.mark.full
def test_the_profile_names_kernels() -> None:
    """Products and the loops of XLA are there, and add up to the whole."""
    options = ["--task", "training", "--variant", "tiny/16", "--image-size", "32", "--batch", "2"]
    printed = run("benchmarks.profile", *options)
    rows = [line.split() for line in printed.splitlines() if line.endswith("calls")]
    assert 90 < sum(float(row[-3].rstrip("%")) for row in rows) < 101
    assert any("MatMul" in row[0] for row in rows)
    assert any(row[:2] == ["XLA", "loop"] for row in rows)
