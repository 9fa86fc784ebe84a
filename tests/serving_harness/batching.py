"""The server's batching: requests merged, padded to an allowed size, run, and split again.

Source: tensorflow/serving, batching/batching_session.cc.
"""

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np

Arrays = dict[str, np.ndarray]


class BatchingSession:
    """Merges calls that arrive within `timeout` seconds of each other.

    `sizes` records the batches that were run. A call that fails fails every call merged with it, as
    in the server.
    """

    def __init__(
        self,
        run: Callable[[str, Arrays], Arrays],
        *,
        allowed_sizes: Sequence[int],
        timeout: float = 0.2,
    ) -> None:
        self._run = run
        self._allowed = tuple(allowed_sizes)
        self._timeout = timeout
        self._queue: queue.Queue[_Task] = queue.Queue()
        self.sizes: list[int] = []
        threading.Thread(target=self._work, daemon=True).start()

    def run(self, signature: str, inputs: Arrays) -> Arrays:
        task = _Task(signature, inputs)
        self._queue.put(task)
        task.done.wait()
        if task.error is not None:
            raise task.error
        return task.outputs

    def _work(self) -> None:
        waiting: _Task | None = None
        while True:
            tasks = [waiting or self._queue.get()]
            waiting = None
            try:
                while sum(task.rows for task in tasks) < self._allowed[-1]:
                    task = self._queue.get(timeout=self._timeout)
                    if task.kind != tasks[0].kind or self._overflows(tasks, task):
                        waiting = task
                        break
                    tasks.append(task)
            except queue.Empty:
                pass
            self._process(tasks)

    def _overflows(self, tasks: "list[_Task]", task: "_Task") -> bool:
        return sum(each.rows for each in (*tasks, task)) > self._allowed[-1]

    def _process(self, tasks: "list[_Task]") -> None:
        rows = sum(task.rows for task in tasks)
        size = next((size for size in self._allowed if size >= rows), rows)
        try:
            merged = {name: self._merged(tasks, name, size - rows) for name in tasks[0].inputs}
            outputs = self._run(tasks[0].signature, merged)
            self.sizes.append(size)
            for name, value in outputs.items():
                if value.ndim == 0 or len(value) != size:
                    raise RuntimeError(f"FAILED_PRECONDITION: output {name} has no batch dimension")
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
    def _merged(tasks: "list[_Task]", name: str, padding: int) -> np.ndarray:
        parts = [task.inputs[name] for task in tasks]
        return np.concatenate([*parts, *[parts[-1][:1]] * padding])


class _Task:
    def __init__(self, signature: str, inputs: Arrays) -> None:
        self.signature, self.inputs = signature, inputs
        self.rows = len(next(iter(inputs.values())))
        # What the server's scheduler tells apart: the signature's tensors, their types and shapes.
        self.kind = (signature, *((name, value.dtype, value.shape[1:])
                                  for name, value in sorted(inputs.items())))  # fmt: skip
        self.done = threading.Event()
        self.outputs: Arrays = {}
        self.error: Exception | None = None
