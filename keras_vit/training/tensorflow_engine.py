"""Runs the steps of a training on TensorFlow, under its strategies."""

import contextlib
import functools
import os
from typing import Any

import keras
import tensorflow as tf

from keras_vit.training.execution import Batches, Engine, cluster_workers

# What the other workers raise when one of them is lost: their collective operations fail.
_LOST_WORKER_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class TensorFlowEngine(Engine):
    """The workers of a strategy, each with its own replicas; usually one worker."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        resolver = strategy.cluster_resolver
        is_several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.count = len(resolver.cluster_spec().as_dict().get("worker", [])) if is_several else 1
        self.count = max(self.count, 1)
        self.index = int(resolver.task_id or 0) if self.count > 1 else 0
        self.replicas = strategy.num_replicas_in_sync
        self._sum_function = tf.function(self._sum, autograph=False)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = self._strategy.scope()
        return scope

    def gather(self, number: int) -> list[int]:
        if self.count == 1:
            return [number]
        own = tf.one_hot(self.index, self.count, dtype=tf.int64) * number
        sums = self._strategy.experimental_local_results(self._sum_function(own))[0]
        return [int(value) // (self.replicas // self.count) for value in sums.numpy()]

    def begin(
        self, model: keras.Model, *, training: Batches, validation: Batches, size: int
    ) -> None:
        self.model = model
        dataset = self.distribute(training, size)
        self._validation = self._distribute_pass(validation)
        # One iterator for all passes: over image files it takes half a second to make. Replicas
        # would fill the last batch of a pass up with images of the next one.
        is_plain = isinstance(self._validation, tf.data.Dataset)
        self._passes = iter(self._validation.repeat()) if is_plain else None
        self._pass_steps = int(self._validation.cardinality()) if is_plain else 0
        model.prepare(dataset)
        model.make_test_function()
        self._batches = iter(dataset)

    def step(self) -> dict[str, Any]:
        self.model.reset_metrics()  # so that the logs are those of one step
        logs: dict[str, Any] = self.model.train_function(self._batches)
        return logs

    def evaluate(self) -> dict[str, Any]:
        # Keras' `evaluate` begins a second pass over the images where the first one ends, and warns
        # if it does not know where that is.
        self.model.reset_metrics()
        if self._passes is not None:
            for _ in range(self._pass_steps):
                self.model.test_function(self._passes)
        else:
            batches = iter(self._validation)
            with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                while True:
                    self.model.test_function(batches)
        # What the function returns is the mean over replicas, some of which had no last image.
        logs: dict[str, Any] = self.model.get_metrics_result()
        return logs

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError | tf.errors.ResourceExhaustedError)

    def is_loss_of_process(self, error: Exception) -> bool:
        return self.count > 1 and isinstance(error, _LOST_WORKER_ERRORS)

    def distribute(self, make: Batches, size: int) -> Any:
        """Distributes batches over all replicas.

        Args:
            make: returns this worker's part of each batch.
            size: images in a whole batch, see `Execution.check_batch`.
        """
        if self.count == 1:
            return self._distribute_pass(make)
        part, local = make((self.index, self.count)), self.replicas // self.count
        return self._strategy.distribute_datasets_from_function(
            lambda _: part.rebatch(size // self.replicas) if local > 1 else part
        )

    def _distribute_pass(self, make: Batches) -> Any:
        """Distributes batches of which each replica of this worker gets a part; see `one_pass`."""
        return self._strategy.experimental_distribute_dataset(self.one_pass(make))

    def one_pass(self, make: Batches) -> tf.data.Dataset:
        """Returns batches to be distributed: each image comes once, on one worker."""
        # TensorFlow's own dividing among workers is not free: with it an iterator over image files
        # takes 43 s to make, without it 0.7.
        is_divided = isinstance(
            self._strategy,
            tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy,
        )
        policies = tf.data.experimental.AutoShardPolicy
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            policies.OFF if is_divided else policies.DATA
        )
        return make((self.index, self.count)).with_options(options)

    def _sum(self, numbers: tf.Tensor) -> Any:
        def add(numbers: tf.Tensor) -> Any:
            context = tf.distribute.get_replica_context()
            # The copy is on the replica's device; the argument itself is on no known device.
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(numbers))

        return self._strategy.run(add, args=(numbers,))


def make_strategy(name: str) -> tf.distribute.Strategy:
    """Returns the strategy of a name in `Execution.strategy`, see `Execution.make_strategy`."""
    name = _available() if name == "auto" else name
    if name == "none":
        return tf.distribute.get_strategy()
    if name == "mirrored":
        kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
        return _mirrored(tuple(device.name for device in tf.config.list_logical_devices(kind)))
    if name == "tpu":
        return _tpu(os.environ.get("TPU_NAME"))
    if len(cluster_workers()) < 2:
        raise ValueError(
            'strategy="multi_worker" needs TF_CONFIG in the environment of each worker, with '
            "cluster.worker listing two or more host:port and task.index saying which of them "
            f"this is. Received: TF_CONFIG={os.environ.get('TF_CONFIG')!r}."
        )
    return _multi_worker(os.environ["TF_CONFIG"])


@functools.cache
def _mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    # One for all trainings of a process: a second strategy numbers its sums from the start again,
    # and TensorFlow takes the gradients of two models for one tensor of two shapes.
    return tf.distribute.MirroredStrategy(devices)


@functools.cache
def _tpu(name: str | None) -> tf.distribute.Strategy:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(name)
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


@functools.cache
def _multi_worker(tf_config: str) -> tf.distribute.Strategy:
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        raise ValueError(
            "TensorFlow has already computed something, and cannot join other workers after that; "
            'call Execution(strategy="multi_worker").make_strategy() first, before images are '
            f"loaded. Received: TF_CONFIG={tf_config!r} ({error})."
        ) from error


def _available() -> str:
    if len(cluster_workers()) > 1:
        return "multi_worker"
    if os.environ.get("TPU_NAME"):
        return "tpu"
    return "mirrored" if len(tf.config.list_physical_devices("GPU")) > 1 else "none"
