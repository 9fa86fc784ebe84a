"""keras_vit on the JAX backend, compiled, on an accelerator if there is one."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import keras_runs
from benchmarks.cases import Case

Run = Callable[[], Any]


def import_framework(name: str) -> None:
    """Imports the contender; another process may use the same accelerator."""
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import keras_vit  # noqa: F401


def version(name: str) -> str:
    """Returns the contender's version, and JAX's."""
    import jax

    import keras_vit

    return f"{keras_vit.__version__} on JAX {jax.__version__}"


def make_run(name: str, case: Case, folder: Path) -> Run:
    """Returns a function that runs the case once: a compiled call, or a step of `fit`."""
    import jax

    model = keras_runs.make_model("keras_vit", case)
    if case.task == "training":
        return _training(model, case)
    images = jax.device_put(keras_runs.images_of(case).astype(case.precision))
    weights = [variable.value for variable in model.weights]
    count = len(model.trainable_variables)

    @jax.jit
    def forward(weights: Any, images: Any) -> Any:
        return model.stateless_call(weights[:count], weights[count:], images, training=False)[0]

    return lambda: forward(weights, images)


def finish(result: Any) -> None:
    """Waits until a run ends."""
    import jax

    jax.block_until_ready(result)


def write_weights(name: str, case: Case, folder: Path) -> None:
    """Writes the file that a cold start reads."""
    import_framework(name)
    keras_runs.write_weights("keras_vit", case, folder)


def first_prediction(name: str, case: Case, folder: Path) -> None:
    """Loads the network from its file and predicts once."""
    keras_runs.first_prediction("keras_vit", case, folder)


def peak() -> float | None:
    """Returns the peak memory of the accelerator in MiB; None without one."""
    import jax

    statistics = jax.local_devices()[0].memory_stats()
    return statistics["peak_bytes_in_use"] / 2**20 if statistics else None


def _training(model: Any, case: Case) -> Run:
    """Trains with `fit`, on a batch in the memory of the model's device."""
    import jax

    labels = keras_runs.compile_model("keras_vit", model, case)
    batch = jax.device_put((keras_runs.images_of(case), labels))
    turns = itertools.count()

    def run() -> Any:
        # The first run of a turn takes all its steps in one call of `fit`; the others do nothing.
        if next(turns) % case.steps == 0:
            endless = (batch for _ in itertools.count())  # `fit` takes a generator, no `repeat`
            model.fit(endless, steps_per_epoch=case.steps, verbose=0)
        return model.optimizer.iterations.value

    return run
