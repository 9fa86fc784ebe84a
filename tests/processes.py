"""Starts test scripts in processes of their own, alone or as workers that train together."""

import json
import os
import socket
import subprocess
import sys
from typing import Any


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


def cluster(count: int) -> list[dict[str, str]]:
    """Returns the environment of each of `count` workers on loopback."""
    sockets = [socket.socket() for _ in range(count)]
    for made in sockets:
        made.bind(("127.0.0.1", 0))
    workers = {"worker": [f"127.0.0.1:{made.getsockname()[1]}" for made in sockets]}
    for made in sockets:
        made.close()
    return [
        {"TF_CONFIG": json.dumps({"cluster": workers, "task": {"type": "worker", "index": index}})}
        for index in range(count)
    ]


def make_devices(count: int) -> None:
    """Makes so many logical CPUs of this process's CPU, before TensorFlow does anything."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )
