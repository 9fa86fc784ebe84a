"""Where a training runs, on which devices and workers, and what it does there besides its model."""

import abc
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import keras
import numpy as np
import tensorflow as tf

from keras_vit.config import ViTConfig
from keras_vit.data import ImageData, evaluation_batches, mix_batch, train_batches
from keras_vit.limits import is_number
from keras_vit.training.checkpoints import Checkpoints, Saver
from keras_vit.training.recipe import Plan, Recipe

StrategyName = Literal["auto", "none", "mirrored", "multi_worker", "tpu"]
Precision = Literal["float32", "mixed_bfloat16", "mixed_float16"]
# Makes the batches of one of several processes, for (its index, their number).
Batches: TypeAlias = Callable[[tuple[int, int]], tf.data.Dataset]


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
        accumulate: number of parts of a replica's batch, to save memory.
        remat: whether blocks are recomputed for the gradient, to save memory; "dots", on JAX, all
            of them but their products with weights. None for the model's `ViTConfig.remat`.
        xla: whether XLA compiles the forward and backward pass; "auto" on GPUs.
        checkpoint_steps: steps between checkpoints; each epoch ends with one too. They are written
            while the training goes on: none is begun before the last one is written.
        checkpoint_minutes: after so many minutes without a checkpoint there is one.
        keep_checkpoints: number of checkpoints that are kept.
    """

    strategy: StrategyName = "auto"
    mesh: str | None = None
    precision: Precision = "float32"
    accumulate: int = 1
    remat: bool | Literal["dots"] | None = None
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
        """Returns the strategy, which all trainings in a process share; on TensorFlow alone.

        With several workers, call this before TensorFlow computes anything, such as decoding an
        image: after that it cannot join a cluster.

        Raises:
            ValueError: TF_CONFIG names no other worker, it is too late to join a cluster, or the
                backend is another.
        """
        self._check_backend()
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                "Strategies are TensorFlow's. Received: the backend "
                f"{keras.backend.backend()!r}; name devices by mesh there."
            )
        from keras_vit.training import tensorflow_engine

        return tensorflow_engine.make_strategy(self.strategy)

    def make_engine(self) -> "Engine":
        """Returns what the steps of a training run on; with several workers, as `make_strategy`.

        Raises:
            ValueError: this machine or backend cannot run it.
        """
        self._check_backend()
        if keras.backend.backend() == "tensorflow":
            from keras_vit.training import tensorflow_engine

            return tensorflow_engine.TensorFlowEngine(self.make_strategy())
        from keras_vit.training import jax_engine

        return jax_engine.JAXEngine(self.mesh)

    def _check_backend(self) -> None:
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


class Engine(abc.ABC):
    """What the steps of one training run on: devices, processes and the framework that computes.

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

    def make_saver(self, model: keras.Model, checkpoints: Checkpoints) -> Saver:
        """Returns what copies and restores the state of a compiled model.

        Raises:
            ImportError: a package is needed for it.
        """
        return Saver(model, checkpoints)

    def settle(self) -> None:  # noqa: B027 - there may be nothing to do
        """Gives the variables the values after the last step; until then they may have none."""

    def forget(self) -> None:  # noqa: B027 - there may be nothing to do
        """Gives up the values after the last step, whose memory an error may have taken."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether the framework raised an error because memory is exhausted."""
        return isinstance(error, MemoryError)

    def is_loss_of_process(self, error: Exception) -> bool:
        """Whether the framework raised an error because another process is lost."""
        return False

    def leave(self) -> None:  # noqa: B027 - there may be nothing to do
        """Lets this process end without the others, of which one is lost."""


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
        evaluation_batch: images in a batch of an evaluation.
    """

    data: ImageData
    _: dataclasses.KW_ONLY
    recipe: Recipe
    execution: Execution
    seed: int = 0
    has_labels: bool = True
    evaluation_batch: int = EVALUATION_BATCH

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

    def in_smaller_parts(self, *, replicas: int) -> "Job | None":
        """Returns the job with batches in parts of half as many images; None if these have one.

        The largest part counts: the first one also has what the others leave of the batch.
        """
        size, parts = self.plan.batch_size // replicas, self.execution.accumulate
        most = (_largest_part(size, parts) + 1) // 2
        if parts >= size:
            return None
        while _largest_part(size, parts) > most:
            parts += 1
        return dataclasses.replace(
            self,
            execution=dataclasses.replace(self.execution, accumulate=parts),
            evaluation_batch=max(self.evaluation_batch // 2, 1),
        )

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
    def evaluated_at_once(self) -> int:
        """Validation images in a batch; where memory asks for parts, no more than one has."""
        parts = self.execution.accumulate
        part = self.evaluation_batch if parts == 1 else max(self.plan.batch_size // parts, 1)
        return min(self.evaluation_batch, part)

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
                    tf.constant((self.seed, MIXUP), tf.int64), step
                ),
                shard=shard,
            )
            return (
                images,
                targets,
                *([] if weights is None else [tf.squeeze(targets @ weights, -1)]),
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
        # Two calls, so that a step need not wait for the mixing of its own batch.
        return batches.enumerate(start_step).map(smooth_and_mix, num_parallel_calls=2)

    def validation_batches(
        self, resizing: Resizing, *, shard: tuple[int, int] = (0, 1)
    ) -> tf.data.Dataset:
        """Returns the batches of (images, probabilities) that evaluate an epoch."""
        batches = evaluation_batches(
            self.data.validation,
            image_size=resizing.size,
            batch_size=self.evaluated_at_once,
            antialias=resizing.antialias,
            shard=shard,
        )
        return batches.map(lambda images, targets: (images, tf.one_hot(targets, self.width)))


def _largest_part(size: int, parts: int) -> int:
    """Returns the images of the first of so many parts, which also has the remainder."""
    return size - size // parts * (parts - 1)
