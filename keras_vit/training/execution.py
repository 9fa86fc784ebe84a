"""Where a training runs: on which devices and workers, and what takes and feeds its steps there."""

import abc
import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.data import ImageData, Resizing, evaluation_batches, mix_batch, train_batches
from keras_vit.limits import check_fields, is_number
from keras_vit.training.checkpoints import Checkpoints, NumpyCheckpoints, WorkDirectory
from keras_vit.training.recipe import Plan, Recipe

StrategyName = Literal["auto", "none", "mirrored", "multi_worker", "tpu"]
Precision = Literal["float32", "mixed_bfloat16", "mixed_float16"]
# Makes the batches of one of several processes, for (its index, their number).
Batches: TypeAlias = Callable[[tuple[int, int]], tf.data.Dataset]
_EVALUATION_BATCH = 128
_MIXUP = 100  # gives mixing another random stream than the data pipeline has
# What the other workers raise when one of them is lost: their collective operations fail.
_LOST_WORKER_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Where and how a training runs; this changes its result only by rounding.

    Example:
        >>> Execution(strategy="none").make_strategy().num_replicas_in_sync
        1

    Attributes:
        strategy: "none" for one device; "mirrored" for all GPUs of this machine (or its logical
            CPUs); "multi_worker" for the machines of TF_CONFIG; "tpu"; "auto" for the one that is
            available. On TensorFlow.
        mesh: on JAX, the devices and what they share: "data=8" for a batch, "fsdp=8" for a batch
            and the weights, "data=4,model=2" also for the products of each block; None for one
            device.
        precision: dtype policy of the layers.
        gradient_accumulation_steps: micro-batches of a replica's batch, to save memory.
        remat: whether blocks are recomputed for the gradient, to save memory; "dots", on JAX, all
            of them but their products with weights. None for the model's `ViTConfig.remat`.
        xla: whether XLA compiles the forward and backward pass; "auto" on GPUs.
        checkpoint_steps: steps between checkpoints; each epoch ends with one too. They are written
            while the training goes on: none is begun before the last one is written.
        checkpoint_minutes: after so many minutes without a checkpoint there is one.
    """

    strategy: StrategyName = "auto"
    mesh: str | None = None
    precision: Precision = "float32"
    gradient_accumulation_steps: int = 1
    remat: bool | Literal["dots"] | None = None
    xla: bool | Literal["auto"] = "auto"
    checkpoint_steps: int = 1000  # as the original's (vit_jax/configs/common.py)
    checkpoint_minutes: float = 10.0

    def __post_init__(self) -> None:
        check_fields(self, {})
        for name in ("gradient_accumulation_steps", "checkpoint_steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be a positive integer. Received: {name}={getattr(self, name)!r}."
                )
        if not is_number(self.checkpoint_minutes) or self.checkpoint_minutes <= 0:
            raise ValueError(
                "checkpoint_minutes must be a number above 0. "
                f"Received: checkpoint_minutes={self.checkpoint_minutes!r}."
            )

    def config(self, config: ViTConfig) -> ViTConfig:
        """Returns the config of the model to train, with `remat` set."""
        return config if self.remat is None else dataclasses.replace(config, remat=self.remat)

    def make_strategy(self) -> tf.distribute.Strategy:
        """Returns the strategy, which all trainings in a process share; on TensorFlow alone.

        With several workers, call this before TensorFlow computes anything, such as decoding an
        image: after that it cannot join a cluster.

        Raises:
            ValueError: TF_CONFIG names no other worker, it is too late to join a cluster, or the
                backend is another.
        """
        self.check_backend()
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                "Strategies are TensorFlow's. Received: the backend "
                f"{keras.backend.backend()!r}; name devices by mesh there."
            )
        name: str = self.strategy
        if name == "auto":
            name = "none"
            if len(cluster_workers()) > 1:
                name = "multi_worker"
            elif os.environ.get("TPU_NAME"):
                name = "tpu"
            elif len(tf.config.list_physical_devices("GPU")) > 1:
                name = "mirrored"
        if name == "none":
            return tf.distribute.get_strategy()
        if name == "mirrored":
            kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
            return _mirrored(tuple(each.name for each in tf.config.list_logical_devices(kind)))
        if name == "tpu":
            return _tpu(os.environ.get("TPU_NAME"))
        if len(cluster_workers()) < 2:
            raise ValueError(
                'strategy="multi_worker" needs TF_CONFIG in the environment of each worker, with '
                "cluster.worker listing two or more host:port and task.index saying which of them "
                f"this is. Received: TF_CONFIG={os.environ.get('TF_CONFIG')!r}."
            )
        return _multi_worker(os.environ["TF_CONFIG"])

    def check_backend(self) -> None:
        """Raises a ValueError for what Keras' backend cannot do."""
        name = keras.backend.backend()
        if name not in ("tensorflow", "jax"):
            raise ValueError(
                f"Training needs Keras' TensorFlow or JAX backend. Received: {name!r}; set "
                "KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax."
            )
        if name == "tensorflow" and self.mesh is not None:
            raise ValueError(
                f"Meshes are for JAX: set KERAS_BACKEND=jax, or give a strategy in place of "
                f"mesh={self.mesh!r}."
            )
        if name == "tensorflow" and self.remat == "dots":
            raise ValueError(
                "remat='dots' is for JAX: set KERAS_BACKEND=jax, or choose remat=True."
            )
        if name == "jax" and self.strategy not in ("auto", "none"):
            raise ValueError(
                f"Strategies are TensorFlow's: on JAX give a mesh, such as data=8, in place of "
                f"strategy={self.strategy!r}, or set KERAS_BACKEND=tensorflow."
            )
        if name == "jax" and not self.xla:
            raise ValueError(
                "XLA compiles every step on JAX: leave xla at its default, or set "
                "KERAS_BACKEND=tensorflow."
            )


# One for all trainings of a process: a second strategy numbers its sums from the start again, and
# TensorFlow takes the gradients of two models for one tensor of two shapes.
_mirrored = functools.cache(tf.distribute.MirroredStrategy)


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


def is_first_worker() -> bool:
    """Whether this process writes the run directory: the first worker of its cluster does."""
    return worker_index() == 0


def worker_index() -> int:
    """Returns the index of this process in its cluster; 0 without a cluster."""
    if keras.backend.backend() == "jax":
        return int(os.environ.get("KERAS_DISTRIBUTION_PROCESS_ID", "0"))
    task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {})
    return 0 if len(cluster_workers()) < 2 else int(task.get("index", 0))


def cluster_workers() -> list[str]:
    """Returns the addresses of the workers in TF_CONFIG."""
    try:
        workers: list[str] = json.loads(os.environ.get("TF_CONFIG") or "{}")["cluster"]["worker"]
    except (KeyError, TypeError, json.JSONDecodeError):
        return []
    return workers


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
        self._strategy, resolver = strategy, strategy.cluster_resolver
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            self.count = max(len(resolver.cluster_spec().as_dict().get("worker", [])), 1)
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
        self.model, strategy = model, self._strategy
        if self.count == 1:
            dataset = strategy.experimental_distribute_dataset(self.one_pass(training))
        else:
            part, local = training((self.index, self.count)), self.replicas // self.count
            dataset = strategy.distribute_datasets_from_function(
                lambda _: part.rebatch(size // self.replicas) if local > 1 else part
            )
        self._validation = strategy.experimental_distribute_dataset(self.one_pass(validation))
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
        return dict(self.model.train_function(self._batches))

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
        return dict(self.model.get_metrics_result())

    def make_checkpoints(self, model: keras.Model, folder: WorkDirectory) -> NumpyCheckpoints:
        return NumpyCheckpoints(model, folder.path)

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError | tf.errors.ResourceExhaustedError)

    def is_loss_of_process(self, error: Exception) -> bool:
        return self.count > 1 and isinstance(error, _LOST_WORKER_ERRORS)

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


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """The settings of a training besides its model.

    Attributes:
        seed: decides the order of the images and their augmentation.
    """

    data: ImageData
    _: dataclasses.KW_ONLY
    recipe: Recipe
    execution: Execution
    seed: int = 0
    has_labels: bool = True

    def __post_init__(self) -> None:
        if self.recipe.balance and not self.has_labels:
            raise ValueError("balance=True weighs classes, and this training has no labels.")

    @property
    def plan(self) -> Plan:
        """The recipe in numbers, for these images."""
        return self.recipe.plan(images=len(self.data.train))

    @property
    def width(self) -> int:
        """The size of a target; without labels all images are of one class."""
        return max(len(self.data.labels), 1)

    def with_more_accumulation(self, *, replicas: int) -> "Job | None":
        """Returns the job with micro-batches of half as many images; None if these have one."""

        def largest(count: int) -> int:  # the first, which also has what the others leave
            return size - size // count * (count - 1)

        size, steps = self.plan.batch_size // replicas, self.execution.gradient_accumulation_steps
        if steps >= size:
            return None
        most = (largest(steps) + 1) // 2
        while largest(steps) > most:
            steps += 1
        execution = dataclasses.replace(self.execution, gradient_accumulation_steps=steps)
        return dataclasses.replace(self, execution=execution)

    def class_weights(self) -> np.ndarray:
        """Returns what targets are multiplied by to weigh their images, float32 (classes, 1).

        The weight of a class is images / (classes * images of the class), of those that have
        images, so that the mean over the images is 1. The smoothing of the targets is taken out:
        t = (1 - s) u + s / C has the weight of u, the sum of u's probabilities times weights.
        """
        counts = np.bincount(self.data.train.targets, minlength=self.width).astype(np.float64)
        present = counts > 0
        weights = np.ones(self.width)
        weights[present] = counts.sum() / (present.sum() * counts[present])
        smoothing = self.recipe.label_smoothing
        unsmoothed: np.ndarray = (weights - smoothing * weights.mean()) / (1 - smoothing)
        return unsmoothed.astype(np.float32)[:, np.newaxis]

    @property
    def evaluation_batch_size(self) -> int:
        """Validation images in a batch; with gradient accumulation, at most a micro-batch."""
        steps = self.execution.gradient_accumulation_steps
        micro_batch = max(self.plan.batch_size // steps, 1)
        return min(_EVALUATION_BATCH, micro_batch) if steps > 1 else _EVALUATION_BATCH

    def training_batches(
        self, resizing: Resizing, *, start_step: int, shard: tuple[int, int]
    ) -> tf.data.Dataset:
        """Returns batches of (images, probabilities) from a step on, for one of several workers.

        With `balance` the weights of the images' losses are a third component, (B,).
        """
        recipe, plan = self.recipe, self.plan
        weights = tf.constant(self.class_weights()) if recipe.balance else None

        def smooth_and_mix(
            step: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]
        ) -> tuple[tf.Tensor, ...]:
            images, targets = batch[0], tf.one_hot(batch[1], self.width)
            smoothing = recipe.label_smoothing
            images, targets = mix_batch(
                images,
                targets * (1 - smoothing) + smoothing / self.width,
                alpha=recipe.mixup,
                cutmix=recipe.cutmix,
                per=recipe.mix_per,
                seed=tf.random.experimental.stateless_fold_in(
                    tf.constant((self.seed, _MIXUP), tf.int64), step
                ),
                shard=shard,
            )
            if weights is None:
                return images, targets
            return images, targets, tf.squeeze(targets @ weights, -1)

        batches = train_batches(
            self.data.train,
            resizing=resizing,
            batch_size=plan.batch_size,
            epochs=plan.epochs,
            seed=self.seed,
            augmentation=recipe.augmentation,
            start_step=start_step,
            shard=shard,
        )
        # Two calls, so that a step need not wait for the mixing of its own batch.
        return batches.enumerate(start_step).map(smooth_and_mix, num_parallel_calls=2)

    def validation_batches(
        self, resizing: Resizing, *, shard: tuple[int, int] = (0, 1)
    ) -> tf.data.Dataset:
        """Returns the batches of (images, probabilities) that evaluate an epoch."""
        batches = evaluation_batches(
            self.data.validation,
            resizing=resizing,
            batch_size=self.evaluation_batch_size,
            shard=shard,
        )
        return batches.map(lambda images, targets: (images, tf.one_hot(targets, self.width)))
