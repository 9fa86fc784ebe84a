"""Times a step of the optimizers and of Keras' own, for the variables of a variant.

    python -m benchmarks.optimizers --variant B/16 --rounds 9

They take turns in one process; figures are medians, ratios are medians over the turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

# Each of ours, and the one of Keras to compare it with.
PAIRS = {
    "AdamW": "keras AdamW",
    "MomentumSGD, float32": "keras SGD with momentum",
    "MomentumSGD, bfloat16": "keras SGD with momentum",
}


def main() -> None:
    """Measures the optimizers in turns and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variant", default="B/16", help="whose variables (default: B/16)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (default: 9)")
    arguments = parser.parse_args()
    steps = _steps(arguments.variant)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(arguments.rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
    print(f"{arguments.variant}, medians of {arguments.rounds} turns")
    for name, times in seconds.items():
        line = f"{name:<26}{statistics.median(times) * 1e3:>7.0f} ms"
        if name in PAIRS:
            ratios = [a / b for a, b in zip(seconds[PAIRS[name]], times, strict=True)]
            line += f"   {PAIRS[name]} / this: {statistics.median(ratios):.2f}"
        print(line)


def _steps(variant: str) -> dict[str, Callable[[], Any]]:
    import keras
    import tensorflow as tf

    import keras_vit
    from keras_vit.optimizers import AdamW, MomentumSGD

    variables = keras_vit.VisionTransformer(keras_vit.variant(variant)).trainable_variables
    gradients = [tf.random.normal(variable.shape, stddev=1e-3) for variable in variables]
    optimizers = {
        "AdamW": AdamW(1e-3),
        "keras AdamW": keras.optimizers.AdamW(1e-3),
        "MomentumSGD, float32": MomentumSGD(1e-3, accumulator_dtype="float32"),
        "MomentumSGD, bfloat16": MomentumSGD(1e-3),
        "keras SGD with momentum": keras.optimizers.SGD(1e-3, momentum=0.9),
    }

    def compiled(optimizer: Any) -> Callable[[], Any]:
        optimizer.build(variables)
        step = tf.function(
            lambda *each: optimizer.apply_gradients(zip(each, variables, strict=True)),
            autograph=False,
        )
        return lambda: step(*gradients)

    return {name: compiled(optimizer) for name, optimizer in optimizers.items()}


if __name__ == "__main__":
    main()
