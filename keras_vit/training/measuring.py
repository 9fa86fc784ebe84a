"""Measures what a training step takes on this machine, in memory and in time."""

import abc
import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_vit import environment
from keras_vit.config import ViTConfig
from keras_vit.data import Stream, evaluation_batches, train_batches
from keras_vit.data.source import untuned
from keras_vit.training.execution import Engine, Job, Resizing
from keras_vit.training.objectives import Objective, objective_of
from keras_vit.variants import parameter_count

_TIMED = 3  # steps, or as many as begin in _SECONDS
_SECONDS = 2.0
_READ = 256  # images whose reading is timed, or as many as come in a second
_SAMPLE = 16  # images that the steps are taken on, again and again
# Of the memory that is free, what a training may plan with: others take some meanwhile, and the
# heap has gaps that depend on the order in which threads run.
SHARE = 0.8
_FLOAT = 4  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What training takes on this machine.

    Attributes:
        part: images of one device that fit into memory at once, at most its share of a batch.
        memory: bytes at the peak of a step with as many, in this process or on one device; None
            where nobody counts them.
        limit: bytes that there are for it; None where nobody says.
        seconds_per_image: of a step, on all devices together, without reading.
        seconds_to_read: of an image, decoded and augmented, on all cores.
        seconds_to_start: until the first step is done: the step is compiled.
    """

    part: int
    memory: int | None
    limit: int | None
    seconds_per_image: float
    seconds_to_read: float
    seconds_to_start: float

    @property
    def fits(self) -> bool:
        """Whether there is as much memory as it takes, as far as anybody says."""
        return self.memory is None or self.limit is None or self.memory <= self.limit

    def seconds(self, job: Job) -> float:
        """Returns the time of a whole training, its validation included."""
        plan = job.plan
        trained = plan.steps * plan.batch_size
        validated = plan.epochs * len(job.data.validation)
        computing = (trained + validated / 3) * self.seconds_per_image  # no backward pass
        reading = (trained + validated) * self.seconds_to_read
        # An accelerator computes while the processor reads; a processor does one or the other.
        both = max(computing, reading) if has_accelerator() else computing + reading
        return self.seconds_to_start + both


def measure(config: ViTConfig, job: Job) -> Cost:
    """Takes a few steps of a training, with fresh weights, in batches of two sizes.

    The first is one image for each device, the second as many as fit into memory and into a few
    seconds. What a batch takes is the straight line through both.

    Args:
        config: the model's.
        job: data, recipe and execution, whose `accumulate` is not used.

    Raises:
        MemoryError: not even one image fits.
    """
    engine, plan = job.execution.make_engine(), job.plan
    largest = max(plan.batch_size // engine.replicas, 1)
    whole = dataclasses.replace(job.execution, accumulate=1)
    with engine.scope():
        objective = objective_of(config, dataclasses.replace(job, execution=whole))
        objective.compile()
    images, reading = _read(job, objective.resizing)
    meter, bench = _meter(), _Bench(engine, objective, images)
    room = meter.room()
    limit = None if room is None else meter.used() + int(SHARE * room)
    spared = _spared(objective, job) if isinstance(meter, _ProcessMeter) else 0
    usable = None if limit is None else limit - spared
    first = bench.run(1, meter)
    if first is None:
        raise MemoryError(
            "Not even one image at a time fits into the memory of this machine; choose a smaller "
            "--model or --image-size, or --remat."
        )
    runs = [first]
    size = _second_size(first, meter.used(), largest=largest, usable=usable)
    while size > 1:
        run = bench.run(size, meter)
        if run is not None:
            runs.append(run)
            break
        largest, size = size // 2, size // 2
    part, memory = _fit(runs, largest=largest, usable=usable)
    meter.reset()
    return Cost(
        part=part,
        memory=None if memory is None else memory + spared,
        limit=limit,
        seconds_per_image=runs[-1].seconds / (runs[-1].size * engine.replicas),
        seconds_to_read=reading,
        seconds_to_start=first.seconds_to_start,
    )


def may_be_tight(config: ViTConfig, job: Job) -> bool:
    """Whether a batch might not fit into memory, by a generous estimate that measures nothing."""
    rows, columns = config.grid
    tokens = rows * columns + config.num_prefix_tokens
    kept = 8 * config.hidden_dim + 3 * config.mlp_dim + 2 * config.num_heads * tokens
    image = 1.5 * _FLOAT * config.num_layers * tokens * kept
    image *= 4 if config.resnet_layers is not None else 1
    estimate = 8 * _FLOAT * parameter_count(config) + job.plan.batch_size * image
    room = _meter().room()
    return estimate > (2**32 if room is None else room) / 2


def has_accelerator() -> bool:
    """Whether training runs on a GPU or TPU."""
    if keras.backend.backend() == "jax":
        import jax

        return bool(jax.default_backend() != "cpu")
    return bool(os.environ.get("TPU_NAME") or tf.config.list_physical_devices("GPU"))


def multiplies_bfloat16() -> bool:
    """Whether training is faster in mixed_bfloat16 on what it runs on, by its kind.

    Of processors, it is on those with AMX, under TensorFlow: 1.4 to 2.3 times as fast (docs/speed).
    """
    if not has_accelerator():
        is_tensorflow = keras.backend.backend() == "tensorflow"  # XLA's code has no use for AMX
        return is_tensorflow and environment.has_bfloat16_units(among=(environment.BFLOAT16_TILES,))
    if keras.backend.backend() == "jax":
        import jax

        if jax.default_backend() == "tpu":
            return True
        versions = [str(getattr(each, "compute_capability", "")) for each in jax.local_devices()]
    else:
        if os.environ.get("TPU_NAME"):
            return True
        gpus = tf.config.list_physical_devices("GPU")
        details = map(tf.config.experimental.get_device_details, gpus)
        versions = [".".join(map(str, each.get("compute_capability", ()))) for each in details]
    # From Ampere on; GPUs of other makers have a name in place of this number.
    return bool(versions) and all(re.match(r"([89]|\d\d)\.\d", version) for version in versions)


def devices_text() -> str:
    """Names what training runs on: "2 CPU cores", "1 GPU"."""
    if not has_accelerator():
        return f"{environment.cores()} CPU cores"
    if keras.backend.backend() == "jax":
        import jax

        return f"{jax.local_device_count()} {jax.default_backend().upper()}"
    gpus = tf.config.list_physical_devices("GPU")
    return f"{len(gpus)} GPU" if gpus else "TPU"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """Steps of one size.

    Attributes:
        size: images for each device.
        seconds: of a step, after the first.
        seconds_to_start: of the first.
        before: bytes before the first.
        peak: bytes at the most, from the second step on.
    """

    size: int
    seconds: float
    seconds_to_start: float
    before: int | None
    peak: int | None


@dataclasses.dataclass(frozen=True)
class _Bench:
    """Takes steps on the same few images."""

    engine: Engine
    objective: Objective
    images: np.ndarray

    def run(self, size: int, meter: "_Meter") -> _Run | None:
        """Takes a few steps; None where memory is exhausted."""
        before = meter.used()
        try:
            start = time.perf_counter()
            self._begin(size * self.engine.replicas)
            self._step()
            begun = time.perf_counter()
            meter.reset()
            count = 0
            while count < _TIMED and time.perf_counter() < begun + _SECONDS:
                self._step()
                count += 1
            seconds = (time.perf_counter() - begun) / count
        except Exception as error:
            if not self.engine.is_out_of_memory(error):
                raise
            return None
        return _Run(
            size=size,
            seconds=seconds,
            seconds_to_start=begun - start,
            before=before,
            peak=meter.peak(),
        )

    def _begin(self, size: int) -> None:
        width = self.objective.job.width
        targets = np.eye(width, dtype=np.float32)[np.arange(len(self.images)) % width]
        pairs = untuned(tf.data.Dataset.from_tensor_slices((self.images, targets))).repeat()
        # Of a size that is not known beforehand: TensorFlow traces the step once for all.
        batches = pairs.batch(size)
        self.engine.begin(
            self.objective.model,
            training=lambda shard: batches,
            validation=lambda shard: batches.take(1),
            size=size,
        )

    def _step(self) -> None:
        float(np.asarray(self.engine.step()["loss"]))  # waits for the device


def _read(job: Job, resizing: Resizing) -> tuple[np.ndarray, float]:
    """Returns a few training images, and the seconds that reading one takes."""
    train, antialias = job.data.train, resizing.antialias
    size = min(_SAMPLE, len(train))
    if isinstance(train, Stream):  # its order for training begins with thousands of images
        batches = evaluation_batches(
            train, image_size=resizing.size, batch_size=size, antialias=antialias
        )
    else:
        batches = train_batches(
            train,
            image_size=resizing.size,
            batch_size=size,
            epochs=_READ,
            seed=job.seed,
            augmentation=job.recipe.augmentation,
            antialias=antialias,
        )
    iterator = iter(batches)
    images, count, start = np.asarray(next(iterator)[0]), 0, time.perf_counter()
    for batch, _ in iterator:
        count += len(batch)
        if count >= _READ or time.perf_counter() > start + 1:
            break
    return images, (time.perf_counter() - start) / max(count, 1)


def _second_size(first: _Run, used: int, *, largest: int, usable: int | None) -> int:
    """Returns how many images to take the other steps on."""
    size = max(2, int(_SECONDS / first.seconds))
    if usable is not None and first.peak is not None and first.before is not None:
        # Too much for an image: it has what every step takes, too.
        image = max(first.peak - first.before, 1)
        size = min(size, max(2, 1 + (usable - max(used, first.peak)) // image))
        if first.peak + image > usable:
            return 1
    return min(size, largest)


def _fit(runs: list[_Run], *, largest: int, usable: int | None) -> tuple[int, int | None]:
    """Returns how many images fit, and the bytes that they take."""
    last = runs[-1]
    if last.peak is None or usable is None:
        return largest, last.peak
    image = 0.0
    if len(runs) > 1 and runs[0].peak is not None:
        image = max((last.peak - runs[0].peak) / (last.size - runs[0].size), 0.0)
    elif last.before is not None:
        image = max(last.peak - last.before, 0)
    part = largest
    if last.peak + (largest - last.size) * image > usable:
        part = int(last.size + (usable - last.peak) / max(image, 1.0))
        part = max(min(part, largest), 1)
        part = 2 ** (part.bit_length() - 1)  # what is free differs from start to start
    return part, int(last.peak + max(part - last.size, 0) * image)


def _spared(objective: Objective, job: Job) -> int:
    """Returns the bytes that a training holds beside its steps, in the memory of the host.

    These are the copies that checkpoints and best models are written from, and images that are read
    ahead.
    """
    numbers = sum(int(np.prod(each.shape)) for each in objective.model.variables)
    state = sum(int(np.prod(each.shape)) for each in objective.model.optimizer.variables)
    height, width = objective.resizing.size
    ahead = 4 * job.plan.batch_size * height * width * 3
    return _FLOAT * (3 * numbers + state + ahead)


class _Meter(abc.ABC):
    """Counts the memory that steps take."""

    @abc.abstractmethod
    def used(self) -> int:
        """Bytes now."""

    @abc.abstractmethod
    def room(self) -> int | None:
        """Bytes that may still be taken; None where nobody says."""

    @abc.abstractmethod
    def peak(self) -> int | None:
        """Bytes at the most since `reset`, or since the start where it has no effect."""

    def reset(self) -> None:  # noqa: B027 - not everything can be
        """Begins to count anew."""


class _ProcessMeter(_Meter):
    """The memory of this process, as Linux counts it."""

    def used(self) -> int:
        return _status("VmRSS")

    def room(self) -> int | None:
        return available_memory()

    def peak(self) -> int | None:
        return _status("VmHWM") or None

    def reset(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


class _JaxMeter(_Meter):
    """The memory of JAX's first device."""

    def __init__(self) -> None:
        import jax

        self._device = jax.local_devices()[0]

    def used(self) -> int:
        return int(self._number("bytes_in_use") or 0)

    def room(self) -> int | None:
        limit = self._number("bytes_limit")
        return None if limit is None else limit - self.used()

    def peak(self) -> int | None:
        return self._number("peak_bytes_in_use")

    def _number(self, name: str) -> int | None:
        return (self._device.memory_stats() or {}).get(name)


class _TensorFlowMeter(_Meter):
    """The memory of TensorFlow's first GPU, which has no limit that it would say."""

    def used(self) -> int:
        return int(tf.config.experimental.get_memory_info("GPU:0")["current"])

    def room(self) -> int | None:
        return None

    def peak(self) -> int | None:
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])

    def reset(self) -> None:
        tf.config.experimental.reset_memory_stats("GPU:0")


class _NoMeter(_Meter):
    """Of a device that counts nothing."""

    def used(self) -> int:
        return 0

    def room(self) -> int | None:
        return None

    def peak(self) -> int | None:
        return None


def _meter() -> _Meter:
    if not has_accelerator():
        return _ProcessMeter() if _status("VmHWM") else _NoMeter()
    if keras.backend.backend() == "jax":
        return _JaxMeter()
    return _TensorFlowMeter() if tf.config.list_physical_devices("GPU") else _NoMeter()


def _status(name: str) -> int:
    """A number of /proc/self/status in bytes; 0 where there is none."""
    return _number_in(Path("/proc/self/status"), rf"^{name}:\s*(\d+) kB") * 1024


def _number_in(file: Path, pattern: str) -> int:
    with contextlib.suppress(OSError):
        match = re.search(pattern, file.read_text(), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process may still take: the machine's, and its control groups'.

    Args:
        root: where /proc and /sys are.

    Returns:
        None where neither says.
    """
    free = _number_in(root / "proc/meminfo", r"^MemAvailable:\s*(\d+) kB") * 1024
    rooms = [free] if free else []
    rooms += [room for folder in _control_groups(root) if (room := _room_of(folder)) is not None]
    return max(min(rooms), 0) if rooms else None


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups for memory, of both versions, and of theirs."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        # In a container the group's path may be the host's, and its folder the top one.
        inner = [top / path.strip("/"), *(top / path.strip("/")).parents]
        yield from (folder for folder in inner if folder == top or top in folder.parents)


def _room_of(folder: Path) -> int | None:
    """What a control group may still take: files that are kept in memory give way."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        most = _number_in(folder / limit, r"^(\d+)$")
        if most:
            kept = _number_in(folder / "memory.stat", r"^(?:total_)?inactive_file (\d+)$")
            return most - _number_in(folder / usage, r"^(\d+)$") + kept
    return None
