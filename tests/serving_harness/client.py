"""Starts the stand-in server, and asks it over gRPC and REST."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import keras_vit.export.clean

BOOTSTRAP = Path(keras_vit.export.clean.__file__).parent / "bootstrap.py"
SECONDS = 60


@contextlib.contextmanager
def serving(directory, *allowed_sizes):
    """Serves a model directory while the block runs."""
    script = Path(__file__).parent / "server.py"
    process = subprocess.Popen(
        [sys.executable, "-P", script, BOOTSTRAP, directory, *map(str, allowed_sizes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        text=True,
    )
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(process.communicate()[1][-2000:])
        ports = json.loads(line)
        yield Served(Path(directory).name, ports["grpc"], ports["rest"])
    finally:
        process.communicate("")


class Served:
    """A running server."""

    def __init__(self, name, grpc_port, rest_port):
        self.name, self.grpc_port, self.rest_port = name, grpc_port, rest_port

    def stub(self):
        """A gRPC stub of PredictionService."""
        import grpc
        from tensorflow_serving.apis import prediction_service_pb2_grpc

        options = [("grpc.max_receive_message_length", -1)]
        channel = grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", options=options)
        return prediction_service_pb2_grpc.PredictionServiceStub(channel)

    def predict(self, signature, *, name=None, **inputs):
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

    def rest(self, body, path=None):
        """Posts JSON and returns (HTTP code, JSON)."""
        url = f"http://127.0.0.1:{self.rest_port}/v1/models/{path or self.name + ':predict'}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(url, data, timeout=SECONDS) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def status(self):
        """The model's status over REST."""
        url = f"http://127.0.0.1:{self.rest_port}/v1/models/{self.name}"
        with urllib.request.urlopen(url, timeout=SECONDS) as response:
            return json.load(response)
