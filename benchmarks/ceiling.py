"""The FLOP/s of a matrix product on the machine's cores or its accelerator."""

import functools
import importlib.util
import statistics
import subprocess
import sys

_ROUNDS = 15
_MEASURE = """
import os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
generator = tf.random.Generator.from_seed(0)
left = tf.cast(generator.normal((1576, 768)), sys.argv[1])
right = tf.cast(generator.normal((768, 3072)), sys.argv[1])
function = tf.function(tf.matmul, autograph=False)
function(left, right)
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    function(left, right)[0, 0].numpy()
    print(2 * 1576 * 768 * 3072 / (time.perf_counter() - start))
"""

# Random values, as zeros need less power.
_MEASURE_ON_JAX = """
import os, sys, time
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax
rows, width, columns = (8192, 8192, 8192) if jax.default_backend() != "cpu" else (1576, 768, 3072)
left = jax.random.normal(jax.random.key(0), (rows, width), sys.argv[1])
right = jax.random.normal(jax.random.key(1), (width, columns), sys.argv[1])
function = jax.jit(jax.numpy.matmul)
function(left, right).block_until_ready()
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    for _ in range(10):
        result = function(left, right)
    result.block_until_ready()
    print(10 * 2 * rows * width * columns / (time.perf_counter() - start))
"""


@functools.cache
def accelerator() -> str:
    """Returns the name of JAX's accelerator; "" without one, or without JAX."""
    if importlib.util.find_spec("jax") is None:
        return ""
    code = "import jax; print(jax.default_backend(), jax.devices()[0].device_kind, sep='|')"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    backend, _, kind = process.stdout.strip().splitlines()[-1].partition("|")
    return "" if backend == "cpu" else kind


def ceiling(precision: str) -> float:
    """Returns the FLOP/s of a product of B/16, (8 * 197, 768) by (768, 3072).

    On an accelerator both matrices are 8192 by 8192.
    """
    has_tensorflow = importlib.util.find_spec("tensorflow") is not None
    code = _MEASURE if has_tensorflow and not accelerator() else _MEASURE_ON_JAX
    command = [sys.executable, "-c", code, precision, str(_ROUNDS)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    # The faster half, because other work slows down the rest.
    rates = sorted(map(float, process.stdout.split()))[_ROUNDS // 2 :]
    return statistics.median(rates)
