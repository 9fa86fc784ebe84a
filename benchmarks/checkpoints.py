"""Times for how long a checkpoint stops a training, written at once and written meanwhile.

    python -m benchmarks.checkpoints --variants B/16 L/16 --rounds 5
    KERAS_BACKEND=jax python -m benchmarks.checkpoints --variants B/16 L/16 --rounds 5

"at once" copies the state and writes a file of NumPy's before the next step; "meanwhile" is what
trainings do. On TensorFlow they copy the state into memory that the checkpoint before the first
step makes, and a thread writes that file. On JAX they hand the arrays to orbax-checkpoint; then
every array is changed once, as a step does: what that takes longer than without a checkpoint
counts, because on CPUs it needs other memory meanwhile. The two take turns, each after the other's
file is whole. "written" is the time until the checkpoint of "meanwhile" is whole. "copy" is the
memory that it takes at its peak, in sizes of the state (AdamW).
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.worker import memory


def main() -> None:
    """Measures and prints a line for each variant."""
    description = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints",
        description=description[0] + "\n\n" + description[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--variants", nargs="+", default=["B/16"], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    options = parser.parse_args()
    for variant in options.variants:
        gc.collect()  # the model before
        figures = measure(variant, rounds=options.rounds)
        if options.json:
            print(json.dumps({"variant": variant, **figures}))
            continue
        print(
            f"{variant} on {figures['backend']}, state of {figures['state_mib']:.0f} MiB: at once "
            f"{figures['at_once']:.2f} s, meanwhile {figures['meanwhile']:.2f} s (before the first "
            f"step {figures['cold']:.2f}; until the next step begins {figures['begin']:.2f}), "
            f"written after {figures['written']:.2f} s; copy {figures['copy']:.2f}, "
            f"peak {figures['peak_mib']:.0f} MiB",
            flush=True,
        )


def measure(variant: str, *, rounds: int) -> dict[str, Any]:
    """Returns seconds, as medians of the turns, and sizes; "copy" is a multiple of the state."""
    import keras

    from keras_vit import backend
    from keras_vit.training import Execution
    from keras_vit.training.checkpoints import WorkDirectory, state_variables
    from keras_vit.training.train import make_engine

    model = _compiled(variant)
    change = _changing(model)
    change()
    names = ("at_once", "begin", "meanwhile", "written")
    times: dict[str, list[float]] = {name: [] for name in names}
    size = sum(backend.values_of(each).nbytes for each in state_variables(model)) / 2**20
    with tempfile.TemporaryDirectory() as folder:
        place, engine = WorkDirectory(Path(folder, "run")), make_engine(Execution(strategy="none"))
        place.path.mkdir()
        checkpoints = engine.make_checkpoints(model, place)
        for turn in range(rounds + 1):
            _forget_peak()
            start = time.perf_counter()
            change()
            usual = time.perf_counter() - start
            before, start = memory("VmRSS"), time.perf_counter()
            finish = checkpoints.begin(2 * turn, progress={}, best=[])
            times["begin"].append(time.perf_counter() - start)
            change()
            times["meanwhile"].append(time.perf_counter() - start - usual)
            finish()
            times["written"].append(time.perf_counter() - start)
            peak = memory("VmHWM")
            start = time.perf_counter()
            checkpoints.begin(2 * turn + 1, progress={}, best=[])()
            times["at_once"].append(time.perf_counter() - start)
            if not turn:
                cold, first_peak, copy = times["meanwhile"][0], peak, (peak - before) / size
                for name in names:
                    times[name].clear()
    return {
        "backend": keras.backend.backend(),
        **{name: statistics.median(seconds) for name, seconds in times.items()},
        "cold": cold,
        "state_mib": size,
        "copy": copy,
        "peak_mib": first_peak,
    }


def _compiled(variant: str) -> Any:
    import keras

    import keras_vit

    model = keras_vit.VisionTransformer(keras_vit.variant(variant))
    model.compile(keras.optimizers.AdamW(1e-3), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    return model


def _changing(model: Any) -> Any:
    """Returns what changes every array of JAX as a step does; on TensorFlow nothing."""
    import keras

    if keras.backend.backend() != "jax":
        return lambda: None
    import jax

    from keras_vit.training.checkpoints import state_variables

    changed = jax.jit(lambda values: [value + 1 for value in values], donate_argnums=0)

    def change() -> None:
        variables = state_variables(model)
        values = changed([variable.value for variable in variables])
        for variable, value in zip(variables, jax.block_until_ready(values), strict=True):
            variable.assign(value)

    return change


def _forget_peak() -> None:
    """Makes "VmHWM" begin at the present memory, where the system allows it."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
