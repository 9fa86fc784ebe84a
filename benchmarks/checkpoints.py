"""Times for how long a checkpoint stops a training, written at once and written meanwhile.

    python -m benchmarks.checkpoints --variants B/16 L/16 --rounds 5

"at once" copies the state and writes the file before the next step; "meanwhile" is what trainings
do: they copy the state into memory that was made with the first checkpoint, and a thread writes it.
The two take turns, each after the other's file is whole. "written" is the time until the file of
"meanwhile" is whole. Memory is the process's peak, with model, optimizer (AdamW) and one copy.
"""

import argparse
import functools
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
        figures = measure(variant, rounds=options.rounds)
        if options.json:
            print(json.dumps({"variant": variant, **figures}))
            continue
        print(
            f"{variant}, state of {figures['state_mib']:.0f} MiB: at once "
            f"{figures['at_once']:.2f} s, meanwhile {figures['meanwhile']:.2f} s (the first "
            f"{figures['first']:.2f}), written after {figures['written']:.2f} s; peak "
            f"{figures['peak_mib']:.0f} MiB",
            flush=True,
        )


def measure(variant: str, *, rounds: int) -> dict[str, Any]:
    """Returns seconds, as medians of the turns, and sizes."""
    from keras_vit.training.checkpoints import (
        Checkpoints,
        Copies,
        Writer,
        get_state,
        numbered,
        state_variables,
    )

    model = _compiled(variant)
    copies, writer = Copies(state_variables(model)), Writer()
    times: dict[str, list[float]] = {"at_once": [], "meanwhile": [], "written": []}
    size = sum(array.nbytes for array in get_state(model).values())
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), keep=1)
        for turn in range(rounds + 1):
            start = time.perf_counter()
            state = numbered(copies.take())
            writer.begin(functools.partial(checkpoints.save, 2 * turn, state, progress={}))
            times["meanwhile"].append(time.perf_counter() - start)
            writer.wait()
            times["written"].append(time.perf_counter() - start)
            peak = memory("VmHWM")
            start = time.perf_counter()
            checkpoints.save(2 * turn + 1, get_state(model), progress={})
            times["at_once"].append(time.perf_counter() - start)
            if not turn:
                first, first_peak = times["meanwhile"].pop(), peak
                times["written"].clear()
                times["at_once"].clear()
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {**medians, "first": first, "state_mib": size / 2**20, "peak_mib": first_peak}


def _compiled(variant: str) -> Any:
    import keras

    import keras_vit

    model = keras_vit.VisionTransformer(keras_vit.variant(variant))
    model.compile(keras.optimizers.AdamW(1e-3), "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    return model


if __name__ == "__main__":
    main()
