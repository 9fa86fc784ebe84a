"""Tests of benchmarks.scale: its sums are those of real models and of compiled steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_vit
from benchmarks import ahead, scale
from benchmarks.cases import Case
from keras_vit.optimizers import AdamW

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


def test_weights_and_optimizer_are_those_of_a_model() -> None:
    """A checkpoint is their sum: three values for each parameter."""
    model = keras_vit.VisionTransformer(TINY)
    optimizer = AdamW(1e-3)
    optimizer.build(model.trainable_variables)
    weights = sum(np.asarray(variable).nbytes for variable in model.trainable_variables)
    # Two averages for each variable; the others are the rate and the step.
    averages = [variable for variable in optimizer.variables if len(variable.shape)]
    sizes = scale.parts(TINY, batch=8, devices=4)
    assert sizes["weights"] == sizes["gradients"] == weights / 4
    assert sizes["optimizer"] == sum(np.asarray(each).nbytes for each in averages) / 4


@pytest.mark.parametrize("name", ["Ti/16", "L/16", "H/14"])
def test_operations_are_those_of_the_benchmarks(name: str) -> None:
    """One formula counts for MFU, whatever reads it."""
    config = keras_vit.variant(name)
    case = Case(task="training", variant=name, batch=1)
    assert scale.flops(config) == case.flops


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("%a = bf16[8,4]{1,0} all-gather(%x), channel_id=1", 48),
        ("%a = ((bf16[2,4]), (bf16[8,4])) all-gather-start(%x), channel_id=1", 48),
        ("%a = f32[2,4]{1,0} reduce-scatter(%x), channel_id=1", 96),
        ("%a = ((f32[8,4]), (f32[2,4])) reduce-scatter-start(%x), channel_id=1", 96),
        ("%a = (f32[8,4], f32[]) all-reduce(%x, %y), channel_id=1", 198),
        ("%a = f32[8,4] add(%all-reduce.1, %x)", 0),
    ],
)
def test_transfers_are_counted_once(line: str, sent: float) -> None:
    """A ring of four sends three quarters of what is gathered or scattered, twice that of a sum."""
    found = ahead.collectives(f"{line}\n  {line}", devices=4)
    assert sum(found.sent.values()) == sent
    assert sum(found.count.values()) == bool(sent)


_PROGRAM = """
%fused (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %twice = f32[4,8]{1,0} add(%p, %p)
}

ENTRY %main (x: f32[4,8], w: bf16[8,2], q: bf16[2,3,3,5,7]) -> f32[4,2] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = bf16[8,2]{1,0} parameter(1)
  %q = bf16[2,3,3,5,7]{4,3,2,1,0} parameter(2)
  %y = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %c = (bf16[2,3,5,7], f32[2,5,3]) custom-call(%q, %q, %q), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/block_0/attention/attention/pallas_call"}
  %g = bf16[2,3,5,7] custom-call(%q, %q), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/transpose(block_0)/attention/attention_gradients/pallas_call"}
  %z = (f32[4,2]{1,0}, s8[64]{0}) custom-call(%y, %w), custom_call_target="__cublas$lt$matmul", backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}
  ROOT %d = f32[4,2]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""  # noqa: E501


def test_work_is_read_from_a_program() -> None:
    """A fusion reads and writes once; attention is two products, and its gradient four."""
    work = ahead.work_of(_PROGRAM)
    x, y, w, z, workspace, q = 4 * 32, 4 * 32, 2 * 16, 4 * 8, 64, 2 * 630
    fusion, product, dot = x + y, y + w + z + workspace, x + w + z
    attention = 3 * q + 2 * 210 + 4 * 30 + 2 * q + 2 * 210
    assert work.bytes == fusion + product + dot + attention
    assert work.products == 2 * (2 * 4 * 2 * 8)
    assert work.attention == 3 * (4 * 2 * 5 * 3**2 * 7)
    assert work.kernels == {"attention": 1, "attention_gradients": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "9"], "8 devices divide the batch. Received: --batch 9"),
        (["--models", "X/16"], "X/16"),
        (["--models", "R50+B/16"], "hybrid are not counted here. Received: R50+B/16"),
        (["--disk", "0"], "--disk must be above 0. Received: 0"),
    ],
)
def test_wrong_options_get_one_sentence(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be shared or built is named."""
    with pytest.raises(SystemExit):
        scale.main(options)
    assert message in capsys.readouterr().err


_COMPILE = """
import dataclasses, json
from benchmarks import ahead
from tests.test_scale import TINY
steps = {
    mesh: ahead.compile_step(TINY, batch=8, mesh=mesh, target="cpu:4") for mesh in ("data", "fsdp")
}
print(json.dumps({mesh: [step.state, step.temporary, sum(step.collectives.sent.values())]
                  for mesh, step in steps.items()}))
try:
    ahead.devices_of("cpu:99")
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's part")
def test_a_compiled_step_has_these_sizes() -> None:
    """On devices that share the weights, and on devices that do not; none makes an array."""
    fast = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {fast}"
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags.strip()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes, error = done.stdout.strip().splitlines()[-2:]
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
