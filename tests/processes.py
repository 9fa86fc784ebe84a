"""Starts test scripts in processes of their own, alone or as workers that train together."""

import itertools
import json
import os
import socket
import subprocess
import sys
from typing import Any, Self


def start(
    script: str, case: Any, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts a script with a case as its argument; both of its outputs are piped."""
    return subprocess.Popen(
        [sys.executable, script, json.dumps(case)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: "subprocess.Popen[str]", *, seconds: float = 1500) -> Any:
    """Waits for the end and returns the last line that was printed, which is JSON."""
    output, errors = process.communicate(timeout=seconds)
    if process.returncode:
        raise RuntimeError(errors[-4000:])
    return json.loads(output.splitlines()[-1])


class Together:
    """Processes that run at the same time, by name: replicas wait for one another half of it.

    Args:
        groups: the processes, started.
    """

    def __init__(self, groups: dict[str, list["subprocess.Popen[str]"]]) -> None:
        self._groups = groups
        self._results: dict[str, list[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in itertools.chain(*self._groups.values()):
            process.kill()
            process.communicate()

    def results(self, name: str) -> list[Any]:
        """Returns what `result` is of each process of a group."""
        if name not in self._results:
            self._results[name] = [result(process) for process in self._groups[name]]
        return self._results[name]


def cluster(count: int) -> list[dict[str, str]]:
    """Returns the environment of each of `count` workers on loopback."""
    workers = {"worker": free_addresses(count)}
    return [
        {"TF_CONFIG": json.dumps({"cluster": workers, "task": {"type": "worker", "index": index}})}
        for index in range(count)
    ]


def free_addresses(count: int) -> list[str]:
    """Returns so many addresses on loopback that nothing listens at."""
    sockets = [socket.socket() for _ in range(count)]
    for made in sockets:
        made.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{made.getsockname()[1]}" for made in sockets]
    for made in sockets:
        made.close()
    return addresses


def make_devices(count: int) -> None:
    """Makes so many logical CPUs of this process's CPU, before TensorFlow does anything."""
    # Keras imports both if it can, which takes a third of the time; after it they can be imported.
    extras = {"matplotlib", "sklearn"} - sys.modules.keys()
    blocked: dict[str, Any] = dict.fromkeys(extras)
    sys.modules.update(blocked)
    import tensorflow as tf

    for name in extras:
        del sys.modules[name]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )


def optimize_graphs(is_on: bool) -> None:
    """Whether TensorFlow rewrites what is traced from here on, which takes a fifth of a test."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not is_on})
