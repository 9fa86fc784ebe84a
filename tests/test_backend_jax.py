"""Tests of keras_vit.backend.jax_kernels, interpreted: the numbers and gradients of plain forms.

They run under KERAS_BACKEND=jax, in an environment of their own.
"""

import dataclasses
import doctest
import os
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import processes
import pytest
from conftest import TINY, every_dropout, randomize

from keras_vit.backend import plain

if keras.backend.backend() != "jax":
    pytest.skip("JAX's part", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo

from keras_vit import VisionTransformer, ViTConfig, backend
from keras_vit.backend import jax as forms
from keras_vit.backend import jax_kernels
from keras_vit.layers import MultiHeadSelfAttention

TURNS: dict[str, Any] = {"rotary": {"grid": (7, 7), "period": 100.0}}
MANY: dict[str, Any] = {"query_key_norm": True, **TURNS, "relative_grid": (7, 7)}
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
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

import keras
import numpy as np
import keras_vit
from keras_vit import ViTConfig

devices = keras.distribution.list_devices()
mesh = keras.distribution.DeviceMesh((8,), ("batch",), devices)
layout_map = keras.distribution.LayoutMap(mesh)
keras.distribution.set_distribution(keras_vit.FullySharded(layout_map=layout_map))
config = ViTConfig(input_shape=(32, 32, 3), patch_size=8, hidden_dim=64, mlp_dim=256, num_heads=4,
                   num_layers=2, classes=8, drop_path_rate=0.1)
model = keras_vit.VisionTransformer(config)
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.train_on_batch(np.ones((8, 32, 32, 3)), np.arange(8))
model.predict_on_batch(np.ones((3, 32, 32, 3)))
print("done")
"""


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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions are those on an H100 with cuDNN; nothing can run, but all can be lowered for it."""

    class Device:
        platform, compute_capability = "gpu", "9.0"

    monkeypatch.setattr(jax, "devices", lambda *_: [Device])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


OURS, CUDNN = "__gpu$xla.gpu.triton", "__cudnn$fmha"
LAYERS: dict[str, tuple[dict[str, Any], int, str]] = {  # options, width of a head, kernel
    "plain": ({}, 64, OURS),
    "plain, 72": ({}, 72, CUDNN),
    "plain, 20": ({}, 20, CUDNN),
    "query-key norm": ({"query_key_norm": True}, 64, OURS),
    "rotary": (TURNS, 80, OURS),
    "relative": ({"relative_grid": (7, 7)}, 64, CUDNN),
    "all": (MANY, 20, CUDNN),
}


def lowered(options: dict[str, Any], size: int) -> str:
    """Returns the program of a layer and of its gradients for CUDA, with 3 images of 50 tokens."""
    layer = MultiHeadSelfAttention(2, dtype="mixed_bfloat16", **options)
    layer.build((None, 50, 2 * size))

    def loss(weights: Any, x: Any) -> Any:
        y, _ = layer.stateless_call(weights, [], x)
        return jnp.sum(y.astype("float32") ** 2)

    weights = [variable.value for variable in layer.trainable_variables]
    x = jnp.ones((3, 50, 2 * size), "bfloat16")
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(weights, x)
    return str(step.lower(lowering_platforms=("cuda",)).as_text())


def weights_in(program: str) -> list[str]:
    """Returns the shapes of arrays that hold a number for each image and each pair of tokens."""
    shapes = [shape.split("x") for shape in re.findall(r"tensor<([0-9x]+)x\w+>", program)]
    return ["x".join(shape) for shape in shapes if "3" in shape and shape.count("50") > 1]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("options", "size", "kernel"), LAYERS.values(), ids=LAYERS)
def test_a_gpu_stores_no_attention_weights(options: Any, size: int, kernel: str) -> None:
    """Forward and gradient are a fused kernel's, and no array has the weights (B, H, N, N)."""
    program = lowered(options, size)
    assert program.count(f"custom_call @{kernel}") == 2
    assert not weights_in(program)


def test_the_search_finds_attention_weights() -> None:
    """Without a GPU the same layer stores them."""
    assert weights_in(lowered({}, 64))


@pytest.mark.parametrize(
    ("tokens", "size", "biased"),
    [(5, 20, None), (4, 12, "bfloat16"), (5, 20, "bfloat16"), (5, 8, "float16")],
)
def test_what_cudnn_is_given_has_the_plain_numbers(
    tokens: int, size: int, biased: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and columns that are added change nothing; XLA computes what cuDNN is given."""
    attention = jax.nn.dot_product_attention

    def even_alone(query: Any, *others: Any, implementation: str, **options: Any) -> Any:
        assert (implementation, query.shape[1] % 2, query.shape[3] % 8) == ("cudnn", 0, 0)
        return attention(query, *others, implementation="xla", **options)

    def flat(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv, *bias: function(qkv, 2, bias[0] if bias else None)

    monkeypatch.setattr(jax.nn, "dot_product_attention", even_alone)
    # In float32, where a wrong mask stands out; the mask is that of the dtype.
    bias = []
    if biased is not None:
        monkeypatch.setitem(forms._MASKS, "float32", forms._MASKS[biased])
        bias = [3 * normal(2, tokens, tokens, seed=1)]
    plain_one = flat(lambda qkv, heads, bias: plain.self_attention(qkv, heads, bias=bias))
    arrays = (normal(3, tokens, 6 * size), *bias)
    assert_same(flat(forms._attend_by_cudnn), plain_one, *arrays)


@pytest.mark.usefixtures("gpu")
def test_one_sentence_says_that_heads_are_too_wide_for_cudnn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA computes them; each width is named once."""
    monkeypatch.setattr(forms, "_warn_of_wide_heads", forms._warn_of_wide_heads.__wrapped__)
    with pytest.warns(UserWarning, match="up to 128 columns; XLA computes those of this"):
        assert weights_in(lowered({}, 136))


RANDOM = dataclasses.replace(TINY, num_layers=4, num_registers=2, **every_dropout(0.1))
RANDOM = dataclasses.replace(RANDOM, drop_path_rate=0.3, patch_dropout_rate=0.5, layer_scale=0.1)
RANDOM = dataclasses.replace(RANDOM, query_key_norm=True, rotary_period=100.0)


def traced(config: ViTConfig, freeze: int = 0) -> tuple[Any, Any]:
    """Returns a model's loss, seeds after it, and gradients, as a function of its weights."""
    keras.utils.set_random_seed(1)
    model = randomize(VisionTransformer(config))
    for index in range(freeze):
        model.get_layer(f"block_{index}").trainable = False
    others = [variable.value for variable in model.non_trainable_variables]

    def loss(weights: Any) -> Any:
        y, others_after = model.stateless_call(
            weights, others, normal(2, *config.input_shape), training=True
        )
        return jnp.sum(y**2), others_after

    weights = [variable.value for variable in model.trainable_variables]
    return jax.value_and_grad(loss, has_aux=True), weights


def test_scanned_blocks_train_as_they_do_one_by_one() -> None:
    """Every mask, rate and weight is its block's; seeds advance alike; two frozen blocks stay."""
    results = []
    ways: tuple[dict[str, Any], ...] = ({}, {"scan_blocks": True, "remat": "dots"})
    for fields in ways:
        step, weights = traced(dataclasses.replace(RANDOM, **fields), freeze=2)
        compiled = jax.jit(step, compiler_options=UNOPTIMIZED)
        results.append(jax.tree.leaves(compiled(weights)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * float(jnp.abs(one).max()))


def test_one_block_is_traced_in_place_of_all() -> None:
    """A deeper network has no more products; one by one it has more."""
    products = {}
    for layers in (2, 5):
        for is_scanned in (False, True):
            config = dataclasses.replace(TINY, num_layers=layers, scan_blocks=is_scanned)
            step, weights = traced(config)
            products[layers, is_scanned] = str(jax.make_jaxpr(step)(weights)).count("dot_general")
    assert products[5, True] == products[2, True] < products[2, False] < products[5, False]


@pytest.mark.parametrize(("remat", "again"), [(False, 0), (True, 5), ("dots", 2)])
def test_remat_computes_products_again_but_those_that_it_keeps(remat: Any, again: int) -> None:
    """Of a block's six all but the last, which no gradient needs; or the two of attention."""
    counts = []
    for choice in (False, remat):
        step, weights = traced(dataclasses.replace(TINY, num_layers=1, remat=choice))
        counts.append(jax.jit(step).lower(weights).as_text().count("dot_general"))
    assert counts[1] - counts[0] == again


def test_images_divided_among_devices_stay_where_they_are() -> None:
    """On a mesh of 4 by 2 no array is gathered, and the numbers are those of one device.

    Under `FullySharded` XLA warns of tokens that it gathers for want of a better way.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    done = processes.python("-c", PARTITIONED, XLA_FLAGS=flags, TF_CPP_MIN_LOG_LEVEL="0")
    assert done.stdout.strip() == "done", done.stderr[-2000:]
    assert "rematerialization" not in done.stderr


def test_xla_leaves_products_to_cublas_unless_one_says_otherwise() -> None:
    """The variable is set with the backend, beside what is in it."""
    code = "import keras_vit.layers, os; print(os.environ['XLA_FLAGS'])"
    name = "xla_gpu_enable_triton_gemm"
    for given, expected in (
        ("", f"--{name}=false"),
        ("--xla_cpu_enable_fast_math=false", f"--xla_cpu_enable_fast_math=false --{name}=false"),
        (f"--{name}=true", f"--{name}=true"),
    ):
        done = processes.python("-c", code, XLA_FLAGS=given)
        assert done.stdout.strip() == expected, done.stderr
