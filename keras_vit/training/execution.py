"""Where a training runs, on which devices and workers, and what it does there besides its model."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.data import ImageData, evaluation_batches, mix_batch, train_batches
from keras_vit.limits import is_number
from keras_vit.training.recipe import Plan, Recipe

StrategyName = Literal["auto", "none", "mirrored", "multi_worker", "tpu"]
Precision = Literal["float32", "mixed_bfloat16", "mixed_float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Where and how a training runs; this changes its result only by rounding.

    Example:
        >>> Execution(strategy="none").make_strategy().num_replicas_in_sync
        1

    Attributes:
        strategy: "none" for one device; "mirrored" for all GPUs of this machine (or its logical
            CPUs); "multi_worker" for the machines of TF_CONFIG; "tpu"; "auto" for the one that is
            available.
        precision: dtype policy of the layers.
        accumulate: number of parts of a replica's batch, to save memory.
        remat: whether blocks are recomputed for the gradient, to save memory; None for the model's
            `ViTConfig.remat`.
        xla: whether XLA compiles the forward and backward pass; "auto" on GPUs.
        checkpoint_steps: steps between checkpoints; each epoch ends with one too. They are written
            while the training goes on: none is begun before the last one is written.
        checkpoint_minutes: after so many minutes without a checkpoint there is one.
        keep_checkpoints: number of checkpoints that are kept.
    """

    strategy: StrategyName = "auto"
    precision: Precision = "float32"
    accumulate: int = 1
    remat: bool | None = None
    xla: bool | Literal["auto"] = "auto"
    checkpoint_steps: int = 1000  # as the original's (vit_jax/configs/common.py)
    checkpoint_minutes: float = 10.0
    keep_checkpoints: int = 3

    def __post_init__(self) -> None:
        choices = {"strategy": get_args(StrategyName), "precision": get_args(Precision)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {list(allowed)}. "
                    f"Received: {name}={getattr(self, name)!r}."
                )
        for name in ("accumulate", "checkpoint_steps", "keep_checkpoints"):
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

    def check_batch(self, size: int, *, replicas: int) -> None:
        """Raises a ValueError unless a batch of this size divides evenly among the replicas."""
        if size % replicas:
            raise ValueError(
                f"A batch of {size} images cannot be divided evenly among {replicas} replicas; "
                f"choose a multiple of {replicas}."
            )

    def make_strategy(self) -> tf.distribute.Strategy:
        """Returns the strategy, which all trainings in a process share.

        With several workers, call this before TensorFlow computes anything, such as decoding an
        image: after that it cannot join a cluster.

        Raises:
            ValueError: TF_CONFIG names no other worker, or it is too late to join a cluster.
        """
        name = _available() if self.strategy == "auto" else self.strategy
        if name == "none":
            return tf.distribute.get_strategy()
        if name == "mirrored":
            kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
            return _mirrored(tuple(device.name for device in tf.config.list_logical_devices(kind)))
        if name == "tpu":
            return _tpu(os.environ.get("TPU_NAME"))
        if len(_workers()) < 2:
            raise ValueError(
                'strategy="multi_worker" needs TF_CONFIG in the environment of each worker, with '
                "cluster.worker listing two or more host:port and task.index saying which of them "
                f"this is. Received: TF_CONFIG={os.environ.get('TF_CONFIG')!r}."
            )
        return _multi_worker(os.environ["TF_CONFIG"])


class Workers:
    """The processes that train together, each with its own strategy; usually one.

    Attributes:
        index: the index of this process; 0 writes the run directory.
        count: the number of processes.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        resolver = strategy.cluster_resolver
        is_several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.count = len(resolver.cluster_spec().as_dict().get("worker", [])) if is_several else 1
        self.count = max(self.count, 1)
        self.index = int(resolver.task_id or 0) if self.count > 1 else 0
        self._sum_function = tf.function(self._sum, autograph=False)

    def gather(self, number: int) -> list[int]:
        """Returns the number of each worker; every worker must call this."""
        if self.count == 1:
            return [number]
        own = tf.one_hot(self.index, self.count, dtype=tf.int64) * number
        sums = self._strategy.experimental_local_results(self._sum_function(own))[0]
        replicas = self._strategy.num_replicas_in_sync // self.count
        return [int(value) // replicas for value in sums.numpy()]

    def distribute(self, make: Callable[[tuple[int, int]], tf.data.Dataset], size: int) -> Any:
        """Distributes batches over all replicas.

        Args:
            make: returns this worker's part of each batch, for (index, count) of the workers.
            size: images in a whole batch, see `Execution.check_batch`.
        """
        replicas = self._strategy.num_replicas_in_sync
        if self.count == 1:
            return self.distribute_pass(make)
        part, local = make((self.index, self.count)), replicas // self.count
        return self._strategy.distribute_datasets_from_function(
            lambda _: part.rebatch(size // replicas) if local > 1 else part
        )

    def distribute_pass(self, make: Callable[[tuple[int, int]], tf.data.Dataset]) -> Any:
        """Distributes batches of which each replica of this worker gets a part; see `one_pass`."""
        return self._strategy.experimental_distribute_dataset(self.one_pass(make))

    def one_pass(self, make: Callable[[tuple[int, int]], tf.data.Dataset]) -> tf.data.Dataset:
        """Returns batches to be distributed: each image comes once, on one worker.

        Args:
            make: returns the batches of this worker's images, for (index, count) of the workers.
        """
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


def is_first_worker() -> bool:
    """Whether this process writes the run directory: the first worker of its cluster does."""
    return worker_index() == 0


def worker_index() -> int:
    """Returns the index of this process in its cluster; 0 without a cluster."""
    task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {})
    return 0 if len(_workers()) < 2 else int(task.get("index", 0))


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
    if len(_workers()) > 1:
        return "multi_worker"
    if os.environ.get("TPU_NAME"):
        return "tpu"
    return "mirrored" if len(tf.config.list_physical_devices("GPU")) > 1 else "none"


def _workers() -> list[str]:
    try:
        workers: list[str] = json.loads(os.environ.get("TF_CONFIG") or "{}")["cluster"]["worker"]
    except (KeyError, TypeError, json.JSONDecodeError):
        return []
    return workers


EVALUATION_BATCH = 128
MIXUP = 100  # gives mixing another random stream than the data pipeline has


class Resizing(NamedTuple):
    """How images are resized for a model; `size` is (height, width) in pixels."""

    size: tuple[int, int]
    antialias: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """The settings of a training besides its model.

    Attributes:
        data: images in three splits.
        recipe: how to train.
        execution: devices, precision, how often to save.
        seed: decides the order of the images and their augmentation.
        has_labels: whether the training uses labels.
    """

    data: ImageData
    _: dataclasses.KW_ONLY
    recipe: Recipe
    execution: Execution
    seed: int = 0
    has_labels: bool = True

    @property
    def plan(self) -> Plan:
        """The recipe in numbers, for these images."""
        return self.recipe.plan(images=len(self.data.train))

    @property
    def width(self) -> int:
        """The size of a target; without labels all images are of one class."""
        return max(len(self.data.labels), 1)

    def training_batches(
        self, resizing: Resizing, *, start_step: int, shard: tuple[int, int]
    ) -> tf.data.Dataset:
        """Returns batches of (images, probabilities) from a step on, for one of several workers."""
        recipe, plan = self.recipe, self.plan

        def smooth_and_mix(
            step: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor]:
            images, targets = batch[0], tf.one_hot(batch[1], self.width)
            smoothing = recipe.label_smoothing
            return mix_batch(
                images,
                targets * (1 - smoothing) + smoothing / self.width,
                alpha=recipe.mixup,
                cutmix=recipe.cutmix,
                per=recipe.mix_per,
                seed=tf.random.experimental.stateless_fold_in(
                    tf.constant((self.seed, MIXUP), tf.int64), step
                ),
                shard=shard,
            )

        batches = train_batches(
            self.data.train,
            image_size=resizing.size,
            batch_size=plan.batch_size,
            epochs=plan.epochs,
            seed=self.seed,
            augmentation=recipe.augmentation,
            antialias=resizing.antialias,
            start_step=start_step,
            shard=shard,
        )
        return batches.enumerate(start_step).map(smooth_and_mix)

    def validation_batches(
        self, resizing: Resizing, *, shard: tuple[int, int] = (0, 1)
    ) -> tf.data.Dataset:
        """Returns the batches of (images, probabilities) that evaluate an epoch."""
        batches = evaluation_batches(
            self.data.validation,
            image_size=resizing.size,
            batch_size=EVALUATION_BATCH,
            antialias=resizing.antialias,
            shard=shard,
        )
        return batches.map(lambda images, targets: (images, tf.one_hot(targets, self.width)))
