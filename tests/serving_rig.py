"""TensorFlow Serving for the tests.

With the environment variable KERAS_VIT_SERVING_IMAGE it is that image, in docker. Otherwise a
session of TensorFlow stands in for it, behind gRPC Predict and as much of REST as the client in
examples/serving asks for: files in rows. Versions, batches and metadata are the server's own.
"""

import base64
import contextlib
import http.server
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import processes

from keras_vit.exporting.clean.runners import SavedModelRunner

IMAGE = os.environ.get("KERAS_VIT_SERVING_IMAGE")
SECONDS = 120
# http_server.cc, ToHTTPStatusCode
HTTP_CODES = {"NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503}


class ServingError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Served:
    """A running server.

    Attributes:
        refusals: codes that the stand-in answers its next requests with; "" ends a connection.
    """

    def __init__(self, name: str, grpc_port: int, rest_port: int) -> None:
        self.name, self.grpc_port, self.rest_port = name, grpc_port, rest_port
        self.refusals: list[str] = []

    def predict(self, signature: str, **inputs: Any) -> dict[str, np.ndarray]:
        import grpc
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

        request = predict_pb2.PredictRequest()
        request.model_spec.name, request.model_spec.signature_name = self.name, signature
        for key, value in inputs.items():
            request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            response = stub.Predict(request, timeout=SECONDS)
        return {key: tf.make_ndarray(value) for key, value in response.outputs.items()}


def serving(directory: Path) -> AbstractContextManager[Served]:
    """Serves the highest version of a model directory while the block runs."""
    return (_docker if IMAGE else _stand_in)(directory)


@contextlib.contextmanager
def _stand_in(directory: Path) -> Iterator[Served]:
    served = Served(directory.name, 0, 0)
    model = SavedModelRunner(max(directory.glob("[0-9]*"), key=lambda version: int(version.name)))

    def run(name: str, signature: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if served.refusals:
            raise ServingError(served.refusals.pop(0), "not now")
        if name != served.name:
            raise ServingError("NOT_FOUND", f"Servable not found for request: {name}")
        return model.run(signature, inputs)

    server, served.grpc_port = _grpc_server(run)
    rest = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _rest_handler(run))
    with processes.serving(rest):
        served.rest_port = rest.server_address[1]
        server.start()
        try:
            yield served
        finally:
            server.stop(None).wait()


def _grpc_server(run: Any) -> tuple[Any, int]:
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    class Service(prediction_service_pb2_grpc.PredictionServiceServicer):
        def Predict(self, request: Any, context: Any) -> Any:
            asked, response = request.model_spec, predict_pb2.PredictResponse()
            inputs = {name: tf.make_ndarray(value) for name, value in request.inputs.items()}
            try:
                outputs = run(asked.name, asked.signature_name, inputs)
            except ServingError as error:
                context.abort(getattr(grpc.StatusCode, error.code), str(error))
            for name, value in outputs.items():
                response.outputs[name].CopyFrom(tf.make_tensor_proto(value))
            return response

    server = grpc.server(futures.ThreadPoolExecutor(4))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Service(), server)
    return server, server.add_insecure_port("127.0.0.1:0")


def _rest_handler(run: Any) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            files = np.array([base64.b64decode(each["b64"]) for each in body["instances"]], object)
            name = self.path.removeprefix("/v1/models/").removesuffix(":predict")
            try:
                outputs = run(name, "serving_default", {"image_bytes": files})
            except ServingError as error:
                if error.code:
                    self._answer(HTTP_CODES[error.code], {"error": str(error)})
                return
            rows = zip(*(value.tolist() for value in outputs.values()), strict=True)
            self._answer(
                200, {"predictions": [dict(zip(outputs, row, strict=True)) for row in rows]}
            )

        def _answer(self, code: int, body: dict[str, Any]) -> None:
            content = json.dumps(body, default=bytes.decode).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def _docker(directory: Path) -> Iterator[Served]:
    def docker(*words: str) -> str:
        done = subprocess.run(["docker", *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    name = directory.name
    mount = f"type=bind,source={directory},target=/models/{name}"
    ports = ("-p", "127.0.0.1::8500", "-p", "127.0.0.1::8501")
    words = ("--rm", "--detach", *ports, "--mount", mount, "-e", f"MODEL_NAME={name}", str(IMAGE))
    container = docker("run", *words)
    try:
        grpc_port, rest_port = (
            int(docker("port", container, port).splitlines()[0].rpartition(":")[2])
            for port in ("8500", "8501")
        )
        for _ in range(2 * SECONDS):
            url = f"http://127.0.0.1:{rest_port}/v1/models/{name}"
            with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
                if json.load(answer)["model_version_status"][0]["state"] == "AVAILABLE":
                    break
            time.sleep(0.5)
        yield Served(name, grpc_port, rest_port)
    finally:
        docker("stop", container)
