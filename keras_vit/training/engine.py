"""`Engine`: what the steps of a training run on; on TensorFlow, the workers of a strategy."""

import abc
import contextlib
from typing import Any

import keras
import tensorflow as tf

from keras_vit.training.checkpoints import Checkpoints, NumpyCheckpoints, WorkDirectory
from keras_vit.training.execution import Batches

# What the other workers raise when one of them is lost: their collective operations fail.
_LOST_WORKER_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class Engine(abc.ABC):
    """What the steps of one training run on.

    Attributes:
        index: the index of this process; 0 writes the run directory.
        count: the number of processes that train together; usually one.
        replicas: the number of devices that share a batch.
        model: the model that is trained, from `begin` on.
    """

    index = 0
    count = 1
    replicas = 1
    model: keras.Model

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope in which the model to train is made and compiled."""

    @abc.abstractmethod
    def gather(self, number: int) -> list[int]:
        """Returns the number of each process; every process must call this."""

    @abc.abstractmethod
    def begin(
        self, model: keras.Model, *, training: Batches, validation: Batches, size: int
    ) -> None:
        """Prepares the steps of a compiled model.

        Args:
            model: made in `scope`.
            training: makes this process's part of each training batch.
            validation: makes the batches of this process's validation images.
            size: images in a whole training batch.
        """

    @abc.abstractmethod
    def step(self) -> dict[str, Any]:
        """Takes one step: returns its logs, numbers of that step alone."""

    @abc.abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Returns the logs over all validation images."""

    @abc.abstractmethod
    def make_checkpoints(self, model: keras.Model, folder: WorkDirectory) -> Checkpoints:
        """Returns what copies and restores the state of a compiled model, in its own format."""

    def synchronize(self) -> None:  # noqa: B027 - there may be nothing to do
        """Gives the variables the values after the last step; until then they may have none."""

    def discard_state(self) -> None:  # noqa: B027 - there may be nothing to do
        """Gives up the values after the last step, whose memory an error may have taken."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether the framework raised an error because memory is exhausted."""
        return isinstance(error, MemoryError)

    def is_loss_of_process(self, error: Exception) -> bool:
        """Whether the framework raised an error because another process is lost."""
        return False

    def shut_down(self) -> None:  # noqa: B027 - there may be nothing to do
        """Lets this process end without the others, of which one is lost."""


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
        one_pass = self.one_pass(validation)
        self._validation = self._strategy.experimental_distribute_dataset(one_pass)
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

    def make_checkpoints(self, model: keras.Model, folder: WorkDirectory) -> NumpyCheckpoints:
        return NumpyCheckpoints(model, folder.path)

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError | tf.errors.ResourceExhaustedError)

    def is_loss_of_process(self, error: Exception) -> bool:
        return self.count > 1 and isinstance(error, _LOST_WORKER_ERRORS)

    def distribute(self, make: Batches, size: int) -> Any:
        """Distributes batches over all replicas; a whole batch has `size` images."""
        if self.count == 1:
            return self._strategy.experimental_distribute_dataset(self.one_pass(make))
        part, local = make((self.index, self.count)), self.replicas // self.count
        return self._strategy.distribute_datasets_from_function(
            lambda _: part.rebatch(size // self.replicas) if local > 1 else part
        )

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
