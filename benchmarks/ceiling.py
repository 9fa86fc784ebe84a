"""What the machine's cores can do: the fastest matrix product that any framework here manages."""

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
    begun = time.perf_counter()
    function(left, right)[0, 0].numpy()
    print(2 * 1576 * 768 * 3072 / (time.perf_counter() - begun))
"""


def ceiling(precision: str) -> float:
    """Returns FLOP/s of the product at the heart of B/16, (8 * 197, 768) by (768, 3072)."""
    command = [sys.executable, "-c", _MEASURE, precision, str(_ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # The best half: a busy machine only ever makes it slower.
    rates = sorted(map(float, done.stdout.split()))[_ROUNDS // 2 :]
    return statistics.median(rates)
