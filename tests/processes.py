"""Starts test scripts in processes of their own, alone or as workers that train together."""

import atexit
import concurrent.futures
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self, TextIO

import filelock
import keras

_PORTS: list[filelock.FileLock] = []  # those that are held until this process ends


class Process:
    """A process that runs a script or module as its main one, as `subprocess.Popen` has it.

    It is forked from a server that has imported TensorFlow, Keras and the package, and has done
    nothing with them: to import them anew would take three to five seconds of a core.

    Args:
        arguments: as after `python`: a script or `-m` and a module, and its own arguments.
        environment: added to this process's, or None; must not decide how the package is imported.
        folder: the working directory, or None for this process's.

    Attributes:
        stdout: its output.
        stderr: its errors.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        ends = [os.pipe() for _ in range(2)]
        self.stdout, self.stderr = (os.fdopen(end, "r") for end, _ in ends)
        duplicates = [reduction.DupFd(end) for _, end in ends]
        variables = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **(environment or {})}
        place = str(folder or Path.cwd())
        self._process = _server().Process(
            target=_run, args=(arguments, variables, place, duplicates)
        )
        self._process.start()
        for _, end in ends:
            os.close(end)

    @property
    def returncode(self) -> int | Any:
        """Its exit code; minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end and returns what is left of its output and of its errors."""
        with concurrent.futures.ThreadPoolExecutor(2) as readers:
            reads = [readers.submit(_read, stream) for stream in (self.stdout, self.stderr)]
            if concurrent.futures.wait(reads, timeout).not_done:
                self.kill()  # which ends the reading too
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        self._process.join()
        output, errors = (read.result() for read in reads)
        return output, errors

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


Started = Process | subprocess.Popen[str]


def _read(stream: TextIO) -> str:
    if stream.closed:
        return ""
    with stream:
        return stream.read()


@functools.cache
def _server() -> ForkServerContext:
    """The server of this process, which begins with the first process that it forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "keras_vit.data", "keras_vit.training"])
    return context


def _run(arguments: list[str], variables: dict[str, str], folder: str, outputs: list[Any]) -> None:
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.detach(), number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def start(script: str, case: Any, environment: dict[str, str] | None = None) -> Started:
    """Starts a script with a case as its argument; both of its outputs are piped."""
    arguments, added = [script, json.dumps(case)], environment or {}
    backend = keras.backend.backend()
    if added.get("KERAS_BACKEND", backend) == backend:
        return Process(arguments, added)
    return subprocess.Popen(  # what is forked has this process's backend
        [sys.executable, *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **added},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[Any]:
    """Lets a server answer, in a thread, while the block runs."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def python(
    *words: object, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python to a good end; what it says is text."""
    environment = {**os.environ, **variables}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def result(process: Started, *, seconds: float = 1500) -> Any:
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

    def __init__(self, groups: dict[str, list[Started]]) -> None:
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
    """Returns so many addresses on loopback that nothing listens at.

    Their ports are below those that the system gives to connections, and no other process of the
    tests gets them while this one lives: between a look and a use, nobody takes them.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = max(int(given.read_text().split()[0]) if given.exists() else 32768, 10_000)
    folder = Path(tempfile.gettempdir(), "keras_vit-ports")
    folder.mkdir(exist_ok=True)
    addresses: list[str] = []
    for port in range(first - 1, 1024, -1):
        lock = filelock.FileLock(folder / str(port))
        with contextlib.suppress(OSError), socket.socket() as looked:  # a port that is taken
            lock.acquire(blocking=False)
            _PORTS.append(lock)
            looked.bind(("127.0.0.1", port))
            addresses.append(f"127.0.0.1:{port}")
        if len(addresses) == count:
            break
    return addresses


def make_devices(count: int) -> None:
    """Makes so many logical CPUs of this process's CPU, before TensorFlow does anything."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )


def optimize_graphs(is_on: bool) -> None:
    """Whether TensorFlow rewrites what is traced from here on, which takes a fifth of a test."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not is_on})
