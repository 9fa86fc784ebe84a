"""Starts a server, and asks it over gRPC and REST.

The server is the stand-in of this folder; with the environment variable KERAS_VIT_SERVING_IMAGE it
is that image of TensorFlow Serving, in docker.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from keras_vit.exporting import clean

BOOTSTRAP = Path(clean.__file__).parent / "bootstrap.py"
IMAGE = os.environ.get("KERAS_VIT_SERVING_IMAGE")
SECONDS = 60
SETTINGS = "test_batching.txt"


def serving(directory: Path, settings: str | None = None) -> "AbstractContextManager[Served]":
    """Serves a model directory while the block runs, in batches if their settings are given.

    Args:
        directory: the directory with the versions.
        settings: the text of a file with BatchingParameters; it is written beside the versions.
    """
    start = _docker if IMAGE else _stand_in
    if settings is not None:
        (directory / SETTINGS).write_text(settings, encoding="utf-8")
    return start(Path(directory), settings is not None)


@contextlib.contextmanager
def _stand_in(directory: Path, is_batching: bool) -> "Iterator[Served]":
    script = Path(__file__).parent / "server.py"
    files = [directory / SETTINGS] if is_batching else []
    process = subprocess.Popen(
        [sys.executable, "-P", script, BOOTSTRAP, directory, *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(process.communicate()[1][-2000:])
        ports = json.loads(line)
        yield Served(directory.name, ports["grpc"], ports["rest"])
    finally:
        process.communicate("")


@contextlib.contextmanager
def _docker(directory: Path, is_batching: bool) -> "Iterator[Served]":
    assert IMAGE is not None
    name = directory.name
    path = f"/models/{name}/{SETTINGS}"
    flags = ["--enable_batching=true", f"--batching_parameters_file={path}"] if is_batching else []
    served = Served(name, *_free_ports(2))
    command = ["docker", "run", "--rm", "--detach"]
    command += ["-p", f"{served.grpc_port}:8500", "-p", f"{served.rest_port}:8501"]
    command += ["--mount", f"type=bind,source={directory},target=/models/{name}"]
    command += ["-e", f"MODEL_NAME={name}", IMAGE, *flags]
    container = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:
        for _ in range(2 * SECONDS):
            with contextlib.suppress(OSError, KeyError):
                if served.status()["model_version_status"][0]["state"] == "AVAILABLE":
                    break
            time.sleep(0.5)
        yield served
    finally:
        subprocess.run(["docker", "stop", container], check=True, capture_output=True)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Served:
    """A running server."""

    def __init__(self, name: str, grpc_port: int, rest_port: int) -> None:
        self.name, self.grpc_port, self.rest_port = name, grpc_port, rest_port

    def stub(self) -> Any:
        """A gRPC stub of PredictionService."""
        import grpc
        from tensorflow_serving.apis import prediction_service_pb2_grpc

        options = [("grpc.max_receive_message_length", -1)]
        channel = grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", options=options)
        return prediction_service_pb2_grpc.PredictionServiceStub(channel)

    def predict(
        self, signature: str, *, name: str | None = None, **inputs: Any
    ) -> dict[str, np.ndarray]:
        """Asks over gRPC and returns the outputs as arrays."""
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest()
        request.model_spec.name = self.name if name is None else name
        request.model_spec.signature_name = signature
        for key, value in inputs.items():
            request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
        response = self.stub().Predict(request, timeout=SECONDS)
        return {key: tf.make_ndarray(value) for key, value in response.outputs.items()}

    def rest(self, body: Any, path: str | None = None) -> tuple[int, Any]:
        """Posts JSON and returns (HTTP code, JSON)."""
        url = f"http://127.0.0.1:{self.rest_port}/v1/models/{path or self.name + ':predict'}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(url, data, timeout=SECONDS) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def get(self, path: str = "") -> tuple[int, Any]:
        """Asks for what lies under the model's address and returns (HTTP code, JSON)."""
        url = f"http://127.0.0.1:{self.rest_port}/v1/models/{self.name}{path}"
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def status(self) -> Any:
        """The model's status over REST."""
        return self.get()[1]
