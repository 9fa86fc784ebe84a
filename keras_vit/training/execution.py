"""Where a training runs: devices, precision, and how often it saves."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from typing import Any, Literal, get_args

import tensorflow as tf

from keras_vit.config import ViTConfig

StrategyName = Literal["auto", "none", "mirrored", "multi_worker", "tpu"]
Precision = Literal["float32", "mixed_bfloat16", "mixed_float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """Where and how a training runs; but for rounding, none of it changes what is learnt.

    Example:
        >>> Execution(strategy="none").make_strategy().num_replicas_in_sync
        1

    Attributes:
        strategy: "none" for one device; "mirrored" for all GPUs of this machine (or its logical
            CPUs); "multi_worker" for the machines of TF_CONFIG; "tpu"; "auto" for whichever of
            these is there.
        precision: dtype policy of the layers.
        accumulate: parts that a replica's batch is cut into, to save memory.
        remat: whether blocks are computed anew for the gradient, to save memory; None for what the
            model's `ViTConfig.remat` says.
        xla: whether XLA compiles the forward and backward pass; "auto" on GPUs.
        checkpoint_steps: steps between checkpoints; there is one after each epoch besides.
        keep_checkpoints: how many of the last checkpoints are kept.
    """

    strategy: StrategyName = "auto"
    precision: Precision = "float32"
    accumulate: int = 1
    remat: bool | None = None
    xla: bool | Literal["auto"] = "auto"
    checkpoint_steps: int = 1000  # as the original's (vit_jax/configs/common.py)
    keep_checkpoints: int = 3

    def __post_init__(self) -> None:
        for name, allowed in (
            ("strategy", get_args(StrategyName)),
            ("precision", get_args(Precision)),
        ):
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

    def config(self, config: ViTConfig) -> ViTConfig:
        """Returns the config of a model that is trained so."""
        return config if self.remat is None else dataclasses.replace(config, remat=self.remat)

    def check_batch(self, size: int, *, replicas: int) -> None:
        """Raises a ValueError unless replicas can share so many images equally."""
        if size % replicas:
            raise ValueError(
                f"A batch of {size} images cannot be divided evenly among {replicas} replicas; "
                f"choose a multiple of {replicas}."
            )

    def make_strategy(self) -> tf.distribute.Strategy:
        """Returns the strategy: one for all trainings of a process that ask for the same.

        Of several workers, ask before TensorFlow computes anything, such as decoding an image: from
        then on it takes no part in a cluster.

        Raises:
            ValueError: what was asked for is not there, or it is too late.
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
    """The processes that train together, each with a strategy of its own; usually one.

    Attributes:
        index: which of them this is; 0 writes the run directory.
        count: how many there are.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        resolver = strategy.cluster_resolver
        is_several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.count = len(resolver.cluster_spec().as_dict().get("worker", [])) if is_several else 1
        self.count = max(self.count, 1)
        self.index = int(resolver.task_id or 0) if self.count > 1 else 0
        self._sum = tf.function(self._summed, autograph=False)

    def gather(self, number: int) -> list[int]:
        """Returns the number that each worker gives; all of them must ask."""
        if self.count == 1:
            return [number]
        mine = tf.one_hot(self.index, self.count, dtype=tf.int64) * number
        summed = self._strategy.experimental_local_results(self._sum(mine))[0]
        replicas = self._strategy.num_replicas_in_sync // self.count
        return [int(value) // replicas for value in summed.numpy()]

    def distribute(self, make: Callable[[tuple[int, int]], tf.data.Dataset], size: int) -> Any:
        """Distributes batches over all replicas.

        Args:
            make: makes this worker's part of each batch, given (worker, workers).
            size: images in a whole batch, see `Execution.check_batch`.
        """
        replicas = self._strategy.num_replicas_in_sync
        part = make((self.index, self.count))
        if self.count == 1:
            return self._strategy.experimental_distribute_dataset(self.divided(part))
        local = replicas // self.count
        return self._strategy.distribute_datasets_from_function(
            lambda _: part.rebatch(size // replicas) if local > 1 else part
        )

    def divided(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the batches, to be divided among the workers by images."""
        # One machine has no workers to divide among, and TensorFlow's rewriting for it is not free:
        # with it an iterator over image files takes 43 s to make, without it 0.7.
        is_machine = isinstance(self._strategy, tf.distribute.MirroredStrategy)
        policies = tf.data.experimental.AutoShardPolicy
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            policies.OFF if is_machine else policies.DATA
        )
        return batches.with_options(options)

    def _summed(self, numbers: tf.Tensor) -> Any:
        def add(numbers: tf.Tensor) -> Any:
            context = tf.distribute.get_replica_context()
            # The copy lies on the replica's device; the argument itself on none that is known.
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(numbers))

        return self._strategy.run(add, args=(numbers,))


def is_first_worker() -> bool:
    """Whether this process is the one of its cluster that writes the run directory."""
    return worker_index() == 0


def worker_index() -> int:
    """Returns which worker of its cluster this process is, from 0; 0 where there is none."""
    task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {})
    return 0 if len(_workers()) < 2 else int(task.get("index", 0))


@functools.cache
def _mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    # One for all trainings of a process: a second would number its sums as the first did, and
    # TensorFlow would take the gradients of two models for one tensor of two shapes.
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
            "TensorFlow has computed something already, and joins no other workers after that; "
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
