"""Runs the steps of a training on JAX, whose arrays may lie on a mesh, and saves their parts."""

import atexit
import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils

from keras_vit import atomic, environment, parallel
from keras_vit.backend import private
from keras_vit.training import checkpoints
from keras_vit.training.checkpoints import Checkpoint, Checkpoints, WorkDirectory
from keras_vit.training.execution import Batches, Engine

_DATA, _FULLY_SHARDED, _MODEL = "data", "fsdp", "model"
_ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
_COUNT, _INDEX = "KERAS_DISTRIBUTION_NUM_PROCESSES", "KERAS_DISTRIBUTION_PROCESS_ID"
_PACKAGE, _RECORD, _BEST = "orbax-checkpoint", "checkpoint.json", "best.npz"
_HEARTBEAT = 20  # seconds without a sign of life, after which a process is lost
# In the text of tensorstore's errors, of its newer and older versions.
_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'|\[OS error (\d+)")
_EXHAUSTED = "RESOURCE_EXHAUSTED"  # XLA's errors differ by their text alone


class JAXEngine(Engine):
    """One compiled step, whose state lies in the memory of the devices between the steps."""

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
                f"{self.count} processes must share the images among a multiple of {self.count} "
                f"devices, as data={jax.device_count()} does. Received: mesh={mesh!r}."
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
        self.model, one_pass = model, validation((0, 1))
        batches = training((self.index, self.count)).as_numpy_iterator()
        self._batches = self._placed(batches, parts=self.count)
        # One iterator for all passes: over image files it takes half a second to make.
        self._passes = one_pass.repeat().as_numpy_iterator()
        self._pass_steps = int(one_pass.cardinality())
        with self.scope():
            private.build_for(model, next(one_pass.as_numpy_iterator()))
            model.make_train_function()
            model.make_test_function()
        # The logs are those of one step: each begins with these.
        self._metric_values = [np.asarray(variable) for variable in model.metrics_variables]

    def step(self) -> dict[str, Any]:
        state = self._values() if self._state is None else self._state
        with self.scope():
            # The step takes its arguments' memory: until `synchronize` the variables have none.
            logs, state = self.model.train_function(
                (*state, list(self._metric_values)), self._batches
            )
        self._state = list(state[:3])
        return dict(logs)

    def synchronize(self) -> None:
        if self._state is not None:
            for variables, values in zip(self._variables(), self._state, strict=True):
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)
            self._state = None

    def discard_state(self) -> None:
        self._state = None

    def evaluate(self) -> dict[str, Any]:
        # Copies, as the step takes its arguments' memory: averages share theirs with the optimizer.
        state: Any = [[jnp.copy(value) for value in each] for each in self._values()[:2]]
        state = (*state, list(self._metric_values))
        batches = self._placed(itertools.islice(self._passes, self._pass_steps))
        logs: dict[str, Any] = {}
        with self.scope(), contextlib.suppress(StopIteration):
            while True:
                logs, state = self.model.test_function(state, batches)
        return dict(logs)

    def make_checkpoints(self, model: keras.Model, folder: WorkDirectory) -> "OrbaxCheckpoints":
        return OrbaxCheckpoints(model, folder.common, engine=self)

    def is_out_of_memory(self, error: Exception) -> bool:
        is_of_xla = isinstance(error, jax.errors.JaxRuntimeError)
        return isinstance(error, MemoryError) or (is_of_xla and _EXHAUSTED in str(error))

    def is_loss_of_process(self, error: Exception) -> bool:
        # The last is of orbax, whose threads wait for one another.
        return self.count > 1 and isinstance(error, jax.errors.JaxRuntimeError | TimeoutError)

    def shut_down(self) -> None:
        @atexit.register  # the last that is registered is the first that runs
        def end() -> None:  # JAX's own end waits for the processes that are lost
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(75)

    def _variables(self) -> list[list[keras.Variable]]:
        model = self.model
        return [model.trainable_variables, model.non_trainable_variables, model.optimizer.variables]

    def _values(self) -> list[list[Any]]:
        return [[variable.value for variable in each] for each in self._variables()]

    def _placed(self, batches: Iterator[Any], *, parts: int = 1) -> Iterator[Any]:
        """Yields batches on the devices; this process has one of so many parts of each."""
        ahead = None
        for batch in batches:
            # One ahead: a batch is on its way to the devices while the one before is computed on.
            placed = tuple(self._place(values, parts=parts) for values in batch)
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


class OrbaxCheckpoints(Checkpoints):
    """Each a folder, of which every process writes the parts on its devices, by orbax-checkpoint.

    The processes need a common disk. Nothing is gathered: a part goes from its device to the memory
    of its host, and from there a thread of orbax's writes it. On CPUs the two memories are one: the
    parts are copied into memory that is made once, because a step that finds its arrays in use
    takes other memory, and to touch that is slow.
    """

    suffix = ""

    def __init__(self, model: keras.Model, folder: Path, *, engine: JAXEngine) -> None:
        super().__init__(model, folder)
        with environment.installed("A training on JAX is saved by orbax-checkpoint", _PACKAGE):
            import orbax.checkpoint as orbax

        self._engine, self._library = engine, orbax
        # Weights are hardly smaller compressed.
        handler = orbax.PyTreeCheckpointHandler(use_compression=False)
        self._orbax = orbax.AsyncCheckpointer(handler)
        self._is_seen = False
        self._memory: list[jax.Array] = []

    def begin(
        self, step: int, *, progress: dict[str, Any], best: list[np.ndarray]
    ) -> Callable[[], None]:
        stage, state = self._stage(step), _state_of(self._stage(step))
        self._check_seen()
        if not self._engine.index:
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir()
        with _system_errors(stage):
            self._orbax.save(state, args=self._library.args.PyTreeSave(_numbered(self._copied())))
        return functools.partial(self.write, step, progress, best)

    def write(self, step: int, progress: dict[str, Any], best: list[np.ndarray]) -> None:
        """Waits for the parts of a checkpoint, publishes it, then removes the oldest."""
        stage, folder = self._stage(step), self.path(step)
        with _system_errors(stage):
            self._orbax.wait_until_finished()
            if self._engine.index:
                return
            np.savez(stage / _BEST, **checkpoints.named(best, ""))  # type: ignore[arg-type]
            files = [file for file in sorted(stage.rglob("*")) if file.is_file()]
            hashes = {file.relative_to(stage).as_posix(): _file_hash(file) for file in files}
            arrays = checkpoints.layout_of(checkpoints.state_variables(self._model))
            content = json.dumps({"progress": progress, "arrays": arrays, "files": hashes})
            # The record has a hash of its own, as all other files' hashes hang on it.
            hashed = hashlib.sha256(content.encode()).hexdigest()
            text = json.dumps({"sha256": hashed, "content": content})
            (stage / _RECORD).write_text(text, "utf-8")
            # One step makes it a checkpoint: before, a killed process leaves a hidden folder.
            atomic.publish(stage, folder)
            shutil.rmtree(stage, ignore_errors=True)  # one of the same step, which it replaced
            self.remove_old()

    def load(self, step: int) -> Checkpoint:
        folder = self.path(step)
        try:
            text = json.loads((folder / _RECORD).read_text("utf-8"))
            record: dict[str, Any] = json.loads(text["content"])
            # Each process hashes a share of the files; together they read every one once.
            own = sorted(record["files"])[self._engine.index :: self._engine.count]
            wrong = [name for name in own if _file_hash(folder / name) != record["files"][name]]
            hashed = hashlib.sha256(text["content"].encode()).hexdigest()
            if wrong or text["sha256"] != hashed:
                raise ValueError(f"wrong hash of {wrong or _RECORD}")
            with (folder / _BEST).open("rb") as stream, np.load(stream) as archive:
                best = checkpoints.unnamed(archive, "")
        except Exception as error:  # of JSON and of the system, of many kinds
            checkpoints.check_readable(error, folder)
            raise checkpoints.DamagedError(f"the checkpoint {str(folder)!r} is damaged") from error
        restore = functools.partial(self._restore, step, record["arrays"])
        return Checkpoint(step, record["progress"], best, restore)

    def _restore(self, step: int, layout: list[list[Any]]) -> None:
        checkpoints.check_layout(self._model, layout)
        targets = _numbered(
            jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
            for value in (variable.value for variable in checkpoints.state_variables(self._model))
        )
        kinds = self._library.checkpoint_utils.construct_restore_args(targets)
        arguments = self._library.args.PyTreeRestore(targets, restore_args=kinds)
        state = self._orbax.restore(_state_of(self.path(step)), args=arguments)
        checkpoints.set_state(self._model, [value for _, value in sorted(state.items())])

    def _copied(self) -> list[jax.Array]:
        values = [variable.value for variable in checkpoints.state_variables(self._model)]
        if jax.default_backend() == "cpu":
            values = self._memory = _copy(values, self._memory)
        return values

    def _stage(self, step: int) -> Path:
        return self._folder / f".{self.path(step).name}"

    def _check_seen(self) -> None:
        if self._is_seen or self._engine.count == 1:
            return
        self._engine.gather(0)  # the first process has made it
        seen = self._engine.gather(int((self._folder / checkpoints.SETTINGS).is_file()))
        blind = [index for index, is_seen in enumerate(seen) if not is_seen]
        if blind:
            raise OSError(
                f"{str(self._folder)!r} must be on a disk that all processes see; {blind} do not."
            )
        self._is_seen = True


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copy(values: list[jax.Array], memory: list[jax.Array]) -> list[jax.Array]:
    """Copies arrays, into the memory of others that are like them, if any."""
    return [jnp.copy(value) for value in values]


def _numbered(arrays: Iterable[Any]) -> dict[str, Any]:
    return {f"{place:05d}": array for place, array in enumerate(arrays)}


def _state_of(folder: Path) -> Path:
    """Returns orbax's folder in that of a checkpoint; orbax takes no relative path."""
    return folder.absolute() / "state"


def _file_hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextlib.contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """Turns errors of writing, which have their number in the text alone, into an OSError."""
    with atomic.explain_errors(path, kept="the older checkpoints are kept", again="resume"):
        try:
            yield
        except Exception as error:  # of several kinds
            number = _SYSTEM_ERROR.search(str(error))
            if number is None:
                raise
            raise OSError(int(number[number.lastindex or 0]), "") from None


def _join() -> None:
    addresses = os.environ.get(_ADDRESSES)
    if addresses is None or jax.distributed.is_initialized():
        return
    # JAX's own choice on CPUs; other devices have their own way to sum.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # What keras.distribution.initialize does, which takes no heartbeat.
    count, index = map(os.environ.get, (_COUNT, _INDEX))
    jax.distributed.initialize(
        coordinator_address=addresses.split(",")[0],
        num_processes=None if count is None else int(count),
        process_id=None if index is None else int(index),
        heartbeat_timeout_seconds=_HEARTBEAT,
    )


def make_distribution(mesh: str) -> keras.distribution.ModelParallel:
    """Returns how a batch and the weights lie on the devices, see `Execution.mesh`."""
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
    pairs = [part.partition("=")[::2] for part in mesh.replace(" ", "").split(",")]
    names = [name for name, _ in pairs]
    is_known = set(names) <= {_DATA, _FULLY_SHARDED, _MODEL} and len(set(names)) == len(names)
    is_counted = all(re.fullmatch("[1-9][0-9]*", number) for _, number in pairs)
    if not is_known or not is_counted or {_DATA, _FULLY_SHARDED} <= set(names):
        raise ValueError(
            'mesh names axes and their devices: "data=8" or "fsdp=8", alone or with "model=2" '
            f"after it. Received: mesh={mesh!r}."
        )
    sizes = {name: int(number) for name, number in pairs}
    if set(sizes) == {_MODEL}:
        sizes[_DATA] = 1
    # The axis of the batch first: the devices of a process are then neighbours on the other one, so
    # that it needs one part of each batch.
    return dict(sorted(sizes.items(), key=lambda pair: pair[0] == _MODEL))
