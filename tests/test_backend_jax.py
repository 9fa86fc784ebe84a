"""Tests of keras_vit.backend.jax_kernels, interpreted: the numbers and gradients of plain forms.

They run under KERAS_BACKEND=jax, in an environment of their own.
"""

import doctest
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit.backend import plain

if keras.backend.backend() != "jax":
    pytest.skip("JAX's part", allow_module_level=True)

import jax
import jax.numpy as jnp

from keras_vit import backend
from keras_vit.backend import jax as forms
from keras_vit.backend import jax_kernels


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def assert_same(ours: Callable[..., Any], expected: Callable[..., Any], *arrays: Any) -> None:
    """Both give the same result and, for a random gradient of it, the same gradients."""
    results, gradients = [], []
    with jax.default_matmul_precision("highest"):
        for function in (ours, expected):
            y, pull_back = jax.jit(lambda *a, f=function: jax.vjp(f, *a))(*arrays)
            results.append(y)
            gradients.append(pull_back(normal(*y.shape, seed=9)))
    for one, other in [results, *zip(*gradients, strict=True)]:
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


@pytest.mark.parametrize("size", [16, 64, 80, 96])
@pytest.mark.parametrize("tokens", [2, 50, 129, 197])
def test_attention_is_the_plain_one(tokens: int, size: int) -> None:
    """Heads of one part and of two; fewer tokens than a block has rows, and blocks cut short."""
    assert_same(
        lambda qkv: jax_kernels.attention(qkv, 2),
        lambda qkv: plain.self_attention(qkv, 2),
        normal(2, tokens, 6 * size),
    )


@pytest.mark.parametrize("width", [16, 192, 384])
@pytest.mark.parametrize("tokens", [1, 33, 197])
def test_layer_norm_is_the_plain_one(tokens: int, width: int) -> None:
    """Tokens far from zero; each image adds to the gradients of gamma and beta."""
    x = 3 * normal(3, tokens, width) + 20
    assert_same(
        lambda x, gamma, beta: jax_kernels.layer_norm(x, gamma, beta, 1e-6),
        lambda x, gamma, beta: plain.layer_norm(x, gamma, beta, epsilon=1e-6),
        *(x, normal(width, seed=1), normal(width, seed=2)),
    )


def test_the_examples_run() -> None:
    """Those of the module that tests/test_package.py cannot import."""
    assert doctest.testmod(jax_kernels).failed == 0


@pytest.mark.parametrize(
    ("size", "parts"),
    [(16, (16,)), (64, (64,)), (80, (64, 16)), (96, (64, 32)), (72, None), (12, None), (256, None)],
)
def test_the_parts_of_a_head(size: int, parts: tuple[int, ...] | None) -> None:
    """One or two powers of two, 16 or wider, or another kernel's head."""
    assert jax_kernels.head_parts(size) == parts


def test_half_precision_on_an_nvidia_gpu_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not float32, not another shape; what is called is what the model calls."""
    x = normal(2, 5, 96).astype("bfloat16")
    assert not forms._has_kernels(x)

    class Device:
        platform, compute_capability = "gpu", "10.0"

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert forms._has_kernels(x)
    assert not forms._has_kernels(x.astype("float32"))
    assert "pallas_call" in str(jax.make_jaxpr(lambda x: backend.self_attention(x, 2))(x))
    weights = jnp.ones(96, "bfloat16")
    norm = jax.make_jaxpr(lambda x: backend.layer_norm(x, weights, weights, epsilon=1e-6))
    assert "pallas_call" in str(norm(x))
    assert "pallas_call" not in str(norm(x[0]))
    for capability in ("7.5", "gfx942"):
        Device.compute_capability = capability
        assert not forms._has_kernels(x)


PARTITIONED = """
import jax
import jax.numpy as jnp
from keras_vit.backend import jax_kernels

auto = jax.sharding.AxisType.Auto
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(auto, auto))
place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P("data", None, None)))
qkv, x = (place(jax.random.normal(jax.random.key(k), (8, 5, w))) for k, w in ((0, 96), (1, 32)))
vector = jnp.ones(32)

def attention(qkv):
    y, pull_back = jax.vjp(lambda qkv: jax_kernels.attention(qkv, 2), qkv)
    return y, pull_back(y)[0]

def norm(x, gamma, beta):
    y, pull_back = jax.vjp(lambda *a: jax_kernels.layer_norm(*a, 1e-6), x, gamma, beta)
    return y, *pull_back(y)

for function, arrays in ((attention, (qkv,)), (norm, (x, vector, vector))):
    compiled = jax.jit(function).lower(*arrays).compile()
    text = compiled.as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
    whole = jax.jit(function)(*map(jax.device_get, arrays))
    for one, other in zip(compiled(*arrays), whole):
        assert jnp.allclose(one, other, atol=1e-5)
    assert compiled(*arrays)[0].sharding.spec[0] == "data"
print("done")
"""


def test_images_divided_among_devices_stay_where_they_are() -> None:
    """On a mesh of 4 by 2 no array is gathered, and the numbers are those of one device."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", PARTITIONED], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "done", done.stderr[-2000:]


def test_xla_leaves_products_to_cublas_unless_one_says_otherwise() -> None:
    """The variable is set with the backend, beside what is in it."""
    code = "import keras_vit.layers, os; print(os.environ['XLA_FLAGS'])"
    name = "xla_gpu_enable_triton_gemm"
    for given, expected in (
        ("", f"--{name}=false"),
        ("--xla_cpu_enable_fast_math=false", f"--xla_cpu_enable_fast_math=false --{name}=false"),
        (f"--{name}=true", f"--{name}=true"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "XLA_FLAGS": given},
        )
        assert done.stdout.strip() == expected, done.stderr
