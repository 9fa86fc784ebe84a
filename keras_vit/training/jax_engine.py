"""Runs the steps of a training on JAX, whose arrays may lie on a mesh of devices."""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils

from keras_vit import parallel
from keras_vit.backend import private
from keras_vit.training.execution import Batches, Engine

_DATA, _FULLY_SHARDED, _MODEL = "data", "fsdp", "model"
_ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
_EXHAUSTED = "RESOURCE_EXHAUSTED"  # XLA's errors differ by their text alone


class JAXEngine(Engine):
    """One compiled step, whose state lies in the memory of the devices between the steps.

    Args:
        mesh: see `Execution.mesh`.
    """

    def __init__(self, mesh: str | None) -> None:
        _join()
        self.index, self.count = jax.process_index(), jax.process_count()
        self._distribution = None if mesh is None else make_distribution(mesh)
        if self._distribution is not None:
            axes = self._distribution.device_mesh
            place = axes.axis_names.index(self._distribution.batch_dim_name)
            self.replicas = int(axes.shape[place])
        if self.replicas % self.count:
            raise ValueError(
                f"{self.count} processes train together: a mesh must share the images among a "
                f"multiple of {self.count} devices, as data={jax.device_count()} does. "
                f"Received: mesh={mesh!r}."
            )
        self._state: list[list[Any]] | None = None  # None while the variables have the values

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        if self._distribution is None:
            return contextlib.nullcontext()
        scope: contextlib.AbstractContextManager[Any] = self._distribution.scope()
        return scope

    def gather(self, number: int) -> list[int]:
        if self.count == 1:
            return [number]
        numbers = multihost_utils.process_allgather(np.asarray(number, np.int32))
        return [int(each) for each in numbers]

    def begin(
        self, model: keras.Model, *, training: Batches, validation: Batches, size: int
    ) -> None:
        self.model, self._validation = model, validation
        self._batches = self._placed(training, (self.index, self.count))
        with self.scope():
            private.build_for(model, next(validation((0, 1)).as_numpy_iterator()))
            model.make_train_function()
            model.make_test_function()
        # The logs are those of one step: each begins with these.
        self._metrics = [np.asarray(variable) for variable in model.metrics_variables]

    def step(self) -> dict[str, Any]:
        state = self._values() if self._state is None else self._state
        with self.scope():
            logs, state = self.model.train_function((*state, list(self._metrics)), self._batches)
        self._state = list(state[:3])
        return dict(logs)

    def settle(self) -> None:
        if self._state is not None:
            for variables, values in zip(self._variables(), self._state, strict=True):
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)
            self._state = None

    def evaluate(self) -> dict[str, Any]:
        # Copies, as the step takes its arguments' memory: averages share theirs with the optimizer.
        trainable, others = [[jnp.copy(value) for value in each] for each in self._values()[:2]]
        state: Any = (trainable, others, list(self._metrics))
        batches, logs = self._placed(self._validation), {}
        with self.scope(), contextlib.suppress(StopIteration):
            while True:
                logs, state = self.model.test_function(state, batches)
        return dict(logs)

    def is_out_of_memory(self, error: Exception) -> bool:
        is_of_xla = isinstance(error, jax.errors.JaxRuntimeError)
        return isinstance(error, MemoryError) or (is_of_xla and _EXHAUSTED in str(error))

    def is_loss_of_process(self, error: Exception) -> bool:
        return self.count > 1 and isinstance(error, jax.errors.JaxRuntimeError)

    def _variables(self) -> list[list[keras.Variable]]:
        model = self.model
        return [
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
        ]

    def _values(self) -> list[list[Any]]:
        return [[variable.value for variable in each] for each in self._variables()]

    def _placed(self, make: Batches, shard: tuple[int, int] = (0, 1)) -> Iterator[Any]:
        """The batches on the devices, each placed while the one before is computed on.

        With a shard this process has that part of each batch alone, otherwise the whole.
        """
        ahead = None
        for batch in make(shard).as_numpy_iterator():
            placed = tuple(self._place(values, parts=shard[1]) for values in batch)
            if ahead is not None:
                yield ahead
            ahead = placed
        if ahead is not None:
            yield ahead

    def _place(self, values: np.ndarray, *, parts: int) -> jax.Array:
        if self._distribution is None:
            return jax.device_put(values)
        # What the devices cannot share equally, as the last images are, lies on each as a whole.
        layout = self._distribution.get_data_layout(values.shape)
        if len(values) * parts % self.replicas:
            whole = [None] * values.ndim
            layout = keras.distribution.TensorLayout(whole, self._distribution.device_mesh)
        sharding, shape = layout.backend_layout, (len(values) * parts, *values.shape[1:])
        if parts > 1:
            return jax.make_array_from_process_local_data(sharding, values, shape)
        return jax.make_array_from_callback(shape, sharding, lambda place: values[place])


def _join() -> None:
    """Joins the other processes, where the environment names them as Keras reads it."""
    if _ADDRESSES in os.environ and not jax.distributed.is_initialized():
        # JAX's own choice on CPUs; other devices have their own way to sum.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        keras.distribution.initialize()


def make_distribution(mesh: str) -> keras.distribution.ModelParallel:
    """Returns how a batch and the weights lie on the devices, see `Execution.mesh`.

    Raises:
        ValueError: the mesh is none, or of other devices than there are.
    """
    sizes, devices = _sizes(mesh), keras.distribution.list_devices()
    count = math.prod(sizes.values())
    if count > len(devices):
        raise ValueError(
            f"mesh={mesh!r} needs {count} devices. Received: {len(devices)} of JAX "
            f"({', '.join(devices[:8])}{', ...' if len(devices) > 8 else ''})."
        )
    if count < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"{jax.process_count()} processes train together on all of their {len(devices)} "
            f"devices. Received: mesh={mesh!r}, of {count}."
        )
    axes = keras.distribution.DeviceMesh(
        tuple(sizes.values()), tuple(sizes), np.array(devices[:count])
    )
    batch = _FULLY_SHARDED if _FULLY_SHARDED in sizes else _DATA
    layouts = keras.distribution.LayoutMap(axes)
    if _MODEL in sizes:
        layouts = parallel.layout_map(axes, axis=_MODEL)
    kind = parallel.FullySharded if batch == _FULLY_SHARDED else keras.distribution.ModelParallel
    return kind(layout_map=layouts, batch_dim_name=batch)


def _sizes(mesh: str) -> dict[str, int]:
    """Returns the size of each axis of a mesh, first of the one that shares the batch.

    A process's devices are neighbours on the other axis: so it needs one part of each batch.
    """
    pairs = [part.partition("=")[::2] for part in mesh.replace(" ", "").split(",")]
    names = [name for name, _ in pairs]
    is_known = set(names) <= {_DATA, _FULLY_SHARDED, _MODEL} and len(set(names)) == len(names)
    is_one_kind = not {_DATA, _FULLY_SHARDED} <= set(names)
    if not is_known or not is_one_kind or not all(re.fullmatch("[1-9][0-9]*", n) for _, n in pairs):
        raise ValueError(
            'mesh names axes and their devices: "data=8" or "fsdp=8", alone or with "model=2" '
            f"after it. Received: mesh={mesh!r}."
        )
    sizes = {name: int(number) for name, number in pairs}
    if set(sizes) == {_MODEL}:
        sizes[_DATA] = 1
    return dict(sorted(sizes.items(), key=lambda pair: pair[0] == _MODEL))
