"""keras_vit on the JAX backend, compiled, on an accelerator where there is one."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import keras_runs
from benchmarks.cases import Case

Run = Callable[[], Any]


def import_framework(name: str) -> None:
    """Imports what the contender is made of; another process may use the same accelerator."""
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import keras_vit  # noqa: F401


def version(name: str) -> str:
    """Returns the contender's version, and JAX's."""
    import jax

    import keras_vit

    return f"{keras_vit.__version__} on JAX {jax.__version__}"


def make_run(name: str, case: Case, folder: Path) -> Run:
    """Returns what runs the case once: a compiled call, or steps of `fit`."""
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
    """Waits until a run has ended."""
    import jax

    jax.block_until_ready(result)


def write_weights(name: str, case: Case, folder: Path) -> None:
    """Writes the file that the cold start reads."""
    import_framework(name)
    keras_runs.write_weights("keras_vit", case, folder)


def first_prediction(name: str, case: Case, folder: Path) -> None:
    """Loads the network from its file and predicts once."""
    keras_runs.first_prediction("keras_vit", case, folder)


def peak() -> float | None:
    """Returns the highest memory of the accelerator in MiB; None without one."""
    import jax

    statistics = jax.local_devices()[0].memory_stats()
    return statistics["peak_bytes_in_use"] / 2**20 if statistics else None


def _training(model: Any, case: Case) -> Run:
    """Trains by `fit`, on a batch that lies where the model does."""
    import jax

    labels = keras_runs.compile_model("keras_vit", model, case)
    batch = jax.device_put((keras_runs.images_of(case), labels))
    turns = itertools.count()

    def run() -> Any:
        # `fit` goes on by itself: the first call of a turn takes all of its steps.
        if next(turns) % case.steps == 0:
            endless = (batch for _ in itertools.count())  # `fit` takes a generator, no `repeat`
            model.fit(endless, steps_per_epoch=case.steps, verbose=0)
        return model.optimizer.iterations.value

    return run
