"""The server's batching: requests split, merged, padded to an allowed size, run, and put together.

Source: tensorflow/serving, batching/batching_session.cc and servables/tensorflow/
bundle_factory_util.{h,cc}; TensorFlow, core/kernels/batching_util/shared_batch_scheduler.h.
"""

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
# What the server takes for a setting that is left out (SharedBatchScheduler::QueueOptions).
DEFAULTS = {"max_batch_size": 1000, "max_enqueued_batches": 10, "batch_timeout_micros": 0}


class BatchingError(Exception):
    """A refusal, with the name of its status code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Closed(Exception):
    """The session ended before it took the call; another version has one."""


class BatchingSession:
    """Merges calls of one signature, whatever their shapes, as the settings say.

    `sizes` counts the batches that were run, by size. A call that fails fails every call merged
    with it, as in the server.

    Args:
        run: runs a signature.
        settings: a message BatchingParameters.

    Raises:
        BatchingError: the server would not load a model with these settings.
    """

    def __init__(self, run: Callable[[str, Arrays], Arrays], settings: Any) -> None:
        def value(name: str) -> int:
            is_set = settings.HasField(name)
            return int(getattr(settings, name).value) if is_set else DEFAULTS.get(name, 1)

        self._run = run
        self._limit = value("max_batch_size")
        self._splits = settings.enable_large_batch_splitting.value
        is_smaller = self._splits and settings.HasField("max_execution_batch_size")
        self._size = value("max_execution_batch_size") if is_smaller else self._limit
        self._room, self._timeout = value("max_enqueued_batches"), value("batch_timeout_micros")
        self._allowed = tuple(settings.allowed_batch_sizes)
        self._check()
        self.sizes: collections.Counter[int] = collections.Counter()
        self._queues: dict[str, collections.deque[_Batch]] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        for _ in range(value("num_batch_threads")):
            threading.Thread(target=self._work, daemon=True).start()

    def run(self, signature: str, inputs: Arrays) -> Arrays:
        if any(value.ndim == 0 for value in inputs.values()):
            raise BatchingError(
                "INVALID_ARGUMENT",
                "Batching Run() input tensors must have at least one dimension",
            )
        if len({len(value) for value in inputs.values()}) != 1:
            raise BatchingError(
                "INVALID_ARGUMENT",
                "Batching Run() input tensors must have equal 0th-dimension size",
            )
        tasks = self._schedule(signature, inputs)
        for task in tasks:
            task.done.wait()
        for task in tasks:
            if task.error is not None:
                raise task.error
        names = tasks[0].outputs
        return {name: np.concatenate([task.outputs[name] for task in tasks]) for name in names}

    def close(self) -> None:
        """Takes no more calls; what is in the queues is still run."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._allowed and self._allowed[-1] != self._limit:
            raise BatchingError(
                "INVALID_ARGUMENT",
                "Last entry in allowed_batch_sizes must match max_batch_size; last entry was "
                f"{self._allowed[-1]}; expected {self._limit}",
            )
        if self._size > self._limit:
            raise BatchingError(
                "INVALID_ARGUMENT",
                "When enable_large_batch_splitting is true, max_execution_batch_size must be less "
                "than or equal to max_batch_size",
            )

    def _schedule(self, signature: str, inputs: Arrays) -> "list[_Task]":
        rows = len(next(iter(inputs.values())))
        if rows > self._limit:
            raise BatchingError(
                "INVALID_ARGUMENT",
                f"Task size {rows} is larger than maximum input batch size {self._limit}",
            )
        with self._changed:
            if self._is_closed:
                raise Closed
            queue = self._queues.setdefault(signature, collections.deque())
            self._check_room(queue, rows)
            tasks = []
            for part in self._parts(queue, rows):
                task = _Task({name: value[part] for name, value in inputs.items()})
                if not queue or queue[-1].rows + task.rows > self._size:
                    queue.append(_Batch(signature))
                queue[-1].add(task)
                tasks.append(task)
            self._changed.notify()
        return tasks

    def _check_room(self, queue: "collections.deque[_Batch]", rows: int) -> None:
        full = "The batch scheduling queue to which this task was submitted is full"
        tail = queue[-1].rows if queue else self._size
        if self._splits:
            room = (self._room - len(queue)) * self._size + self._size - tail
            if rows > room:
                raise BatchingError(
                    "UNAVAILABLE", f"{full}; task size is {rows} but scheduling capacity is {room}"
                )
        elif tail + rows > self._size and len(queue) >= self._room:
            raise BatchingError("UNAVAILABLE", full)

    def _parts(self, queue: "collections.deque[_Batch]", rows: int) -> list[slice]:
        """The rows of each task that a call is split into; the first fills the last batch."""
        if not self._splits:
            return [slice(0, rows)]
        first = self._size - queue[-1].rows if queue else self._size
        starts = [0, *range(first or self._size, rows, self._size)]
        return [slice(start, end) for start, end in zip(starts, [*starts[1:], rows], strict=True)]

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            self._process(batch.signature, batch.tasks)

    def _next(self) -> "_Batch | None":
        """Waits for a batch that is full, or old enough; None after the end."""
        with self._changed:
            while True:
                now = time.monotonic()
                waiting = [queue for queue in self._queues.values() if queue]
                for queue in sorted(waiting, key=lambda each: each[0].made):
                    is_due = now - queue[0].made >= self._timeout / 1e6 or self._is_closed
                    if is_due or len(queue) > 1 or queue[0].rows >= self._size:
                        return queue.popleft()
                if self._is_closed:
                    return None
                self._changed.wait(
                    min((queue[0].made for queue in waiting), default=now + 1)
                    + self._timeout / 1e6
                    - now
                )

    def _process(self, signature: str, tasks: "Sequence[_Task]") -> None:
        rows = sum(task.rows for task in tasks)
        size = next((size for size in self._allowed if size >= rows), rows)
        try:
            merged = {name: self._merged(tasks, name, size - rows) for name in tasks[0].inputs}
            outputs = self._run(signature, merged)
            with self._changed:
                self.sizes[size] += 1
            for name, value in outputs.items():
                if value.ndim == 0 or len(value) != size:
                    raise BatchingError(
                        "FAILED_PRECONDITION", f"Batched output tensor {name} has no batch"
                    )
            start = 0
            for task in tasks:
                rows_of_task = slice(start, start + task.rows)
                task.outputs = {name: value[rows_of_task] for name, value in outputs.items()}
                start += task.rows
        except Exception as error:
            for task in tasks:
                task.error = error
        for task in tasks:
            task.done.set()

    @staticmethod
    def _merged(tasks: "Sequence[_Task]", name: str, padding: int) -> np.ndarray:
        parts = [task.inputs[name] for task in tasks]
        if len({part.shape[1:] for part in parts}) > 1:
            raise BatchingError(
                "FAILED_PRECONDITION",
                f"Tensors with name '{name}' from different tasks have different shapes and "
                "padding is turned off.",
            )
        return np.concatenate([*parts, *[parts[-1][:1]] * padding])


class _Batch:
    def __init__(self, signature: str) -> None:
        self.signature, self.made, self.rows = signature, time.monotonic(), 0
        self.tasks: list[_Task] = []

    def add(self, task: "_Task") -> None:
        self.tasks.append(task)
        self.rows += task.rows


class _Task:
    def __init__(self, inputs: Arrays) -> None:
        self.inputs, self.rows = inputs, len(next(iter(inputs.values())))
        self.done = threading.Event()
        self.outputs: Arrays = {}
        self.error: Exception | None = None
