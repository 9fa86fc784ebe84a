"""Tests of benchmarks: what is counted and compared; nothing here depends on a time."""

import itertools
import json
import os
import re
from pathlib import Path

import keras
import processes
import pytest

import keras_vit
from benchmarks import ahead, report, scale
from benchmarks.cases import CONTENDERS, Case, Target
from benchmarks.measuring import Measured
from benchmarks.suites import SUITES

ROOT = Path(__file__).parents[1]
TINY = keras_vit.ViTConfig(
    input_shape=(32, 32, 3),
    patch_size=8,
    hidden_dim=32,
    mlp_dim=128,
    num_heads=2,
    num_layers=1,
    classes=8,
)
TRANSFERS = [
    ("%a = bf16[8,4]{1,0} all-gather(%x), channel_id=1", 48),
    ("%a = ((bf16[2,4]), (bf16[8,4])) all-gather-start(%x), channel_id=1", 48),
    ("%a = f32[2,4]{1,0} reduce-scatter(%x), channel_id=1", 96),
    ("%a = ((f32[8,4]), (f32[2,4])) reduce-scatter-start(%x), channel_id=1", 96),
    ("%a = (f32[8,4], f32[]) all-reduce(%x, %y), channel_id=1", 198),
    ("%a = f32[8,4] add(%all-reduce.1, %x)", 0),
]
_COMPILE = """
import json, keras_vit, sys
from benchmarks import ahead
tiny = keras_vit.ViTConfig.from_dict(json.loads(sys.argv[1]))
steps = {
    mesh: ahead.compile_step(tiny, batch=8, mesh=mesh, target="cpu:4") for mesh in ("data", "fsdp")
}
print(json.dumps({mesh: [step.state, step.temporary, sum(step.collectives.sent.values())]
                  for mesh, step in steps.items()}))
try:
    ahead.devices_of("cpu:99")
except ValueError as error:
    print(error)
"""


def test_operations_are_those_of_the_paper() -> None:
    """B/16 at 224 takes 17.6 billion multiplications and additions, a training step three times."""
    assert Case(batch=1).flops / 2 == pytest.approx(17.58e9, rel=0.01)
    assert Case(task="training").flops == 3 * Case().flops == 24 * Case(batch=1).flops
    for name in ("Ti/16", "L/16", "H/14"):
        case = Case(task="training", variant=name, batch=1)
        assert scale.flops(keras_vit.variant(name)) == case.flops


def test_targets_can_be_measured() -> None:
    """Every contender of a target exists and takes its case."""
    for target in itertools.chain(*SUITES.values()):
        for name in (target.ours, *target.peers):
            assert CONTENDERS[name].takes(target.case), (target, name)


def test_ratios_compare_with_the_best_peer_turn_by_turn() -> None:
    """A turn that was slow for all changes nothing; memory counts above imports and weights."""
    case = Case(task="training")
    kept = 3 * case.weights_mib  # weights, gradients and momentum
    assert kept == pytest.approx(3 * 86_567_656 * 4 / 2**20, rel=0.01)
    figures = {
        case: {
            "keras_vit": Measured(seconds=[1.0, 9.0, 1.0], peak=kept + 300.0, imported=200.0),
            "timm": Measured(seconds=[2.0, 18.0, 2.0], peak=kept + 400.0, imported=100.0),
            "KerasHub": Measured(seconds=[4.0, 36.0, 4.0], peak=9e9, imported=100.0),
        }
    }

    def ratio(*peers: str, figure: str) -> float | None:
        target = Target(case=case, ours="keras_vit", peers=peers, ratio=1.0, figure=figure)
        return report.ratio(figures, target)

    assert ratio("timm", "KerasHub", figure="speed") == 2.0
    assert ratio("timm", figure="memory") == pytest.approx((kept + 300) / (kept + 100))
    assert ratio("timm", figure="activations") == pytest.approx(3.0)
    assert ratio("OpenVINO", figure="speed") is None


def test_transfers_are_counted_once() -> None:
    """A ring of four sends three quarters of what is gathered or scattered, twice that of a sum."""
    for line, sent in TRANSFERS:
        found = ahead.collectives(f"{line}\n  {line}", devices=4)
        assert sum(found.sent.values()) == sent, line
        assert sum(found.count.values()) == bool(sent), line


def run(*words: str, **environment: str) -> str:
    """Runs Python in the repository's folder; returns what it printed."""
    return processes.python(*words, folder=ROOT, CUDA_VISIBLE_DEVICES="", **environment).stdout


@pytest.mark.full
def test_the_command_measures_a_tiny_model(tmp_path: Path) -> None:
    """Inference, training, replicas and a cold start leave their figures and a chart.

    What is not installed is not measured, and said so.
    """
    ours = "keras_vit on JAX" if keras.backend.backend() == "jax" else "keras_vit"
    options = ("--suite=trial", "--rounds=1", f"--only={ours}", f"--out={tmp_path}")
    printed = run("-m", "benchmarks", *options)
    assert re.search(r"not measured +keras_vit.* / timm compiled, speed: training", printed)
    about = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert about["ceilings"]["bfloat16"] > 0
    for case in about["cases"]:
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
    options = ("--task=training", "--variant=tiny/16", "--image-size=32", "--batch=2")
    printed = run("-m", "benchmarks.profile", *options)
    rows = [line.split() for line in printed.splitlines() if line.endswith("calls")]
    assert 90 < sum(float(row[-3].rstrip("%")) for row in rows) < 101
    assert any("MatMul" in row[0] for row in rows)
    assert any(row[:2] == ["XLA", "loop"] for row in rows)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's part")
def test_a_compiled_step_has_these_sizes() -> None:
    """On devices that share the weights, and on devices that do not; none makes an array."""
    fast = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {fast}"
    printed = run("-c", _COMPILE, json.dumps(TINY.to_dict()), XLA_FLAGS=flags.strip())
    sizes, error = printed.strip().splitlines()[-2:]
    assert "Received: 'cpu:99' (there are 4 virtual devices)" in error
    compiled = json.loads(sizes)
    paper = scale.parts(TINY, batch=8, devices=4)
    batch = 2 * 4 * (scale.image_values(TINY) + (TINY.classes or 0))
    shares = paper["weights"] + paper["optimizer"]
    # Rows are padded, and there are counts and seeds.
    assert compiled["fsdp"][0] == pytest.approx(shares + batch, rel=0.05)
    assert compiled["data"][0] == pytest.approx(4 * shares + batch, rel=0.05)
    # All gradients are summed in float32: twice three quarters of them.
    assert compiled["data"][2] == pytest.approx(6 * 4 * paper["gradients"] / 4, rel=0.05)
    assert compiled["fsdp"][1] > 0
