"""Serves a model directory over gRPC and REST on loopback, without Keras and keras_vit.

Called as a script: `python -P server.py BOOTSTRAP MODEL_DIRECTORY [ALLOWED_SIZE ...]`, where
BOOTSTRAP is `keras_vit/exporting/clean/bootstrap.py`. Prints one line of JSON when it is ready,
with its ports, and ends with its standard input. With allowed sizes it batches.

It follows `tensorflow_model_server`: the highest numeric folder is served, the directory is looked
at again and again, a version is warmed up before it replaces the last, XLA is disabled.
"""

import contextlib
import ctypes
import http.server
import importlib.util
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1
HTTP_CODES = {"INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "NOT_FOUND": 404}
URL = re.compile(r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>\d+))?(?::(?P<verb>\w+))?$")


def disable_xla(folder: Path) -> None:
    """Calls what the server calls at its start; no public name of TensorFlow does it."""
    name = "libtensorflow_{}.so.2"
    ctypes.CDLL(str(folder / name.format("framework")), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / name.format("cc")))._ZN10tensorflow21DisableXlaCompilationEv()


class Servable:
    """The highest version of a model directory, always."""

    def __init__(self, directory: Path, allowed_sizes: tuple[int, ...]) -> None:
        self.directory, self.allowed_sizes = directory, allowed_sizes
        self.name = directory.name
        self.version: int | None = None
        self.model: Any = None
        self.session: Any = None
        self.warmed = 0
        self.load_errors: list[str] = []
        self.refresh()
        threading.Thread(target=self._watch, daemon=True).start()

    def refresh(self) -> None:
        import batching
        from clean import checker, loader  # type: ignore[import-not-found]

        versions = [int(child.name) for child in self.directory.iterdir() if child.name.isdecimal()]
        newest = max(versions, default=None)
        if newest is None or newest == self.version:
            return
        disable_xla(loader.installed_library())
        model = loader.SavedModel(self.directory / str(newest))
        self.warmed = checker.replay(self.directory / str(newest), model)
        session = model
        if self.allowed_sizes:
            session = batching.BatchingSession(model.run, allowed_sizes=self.allowed_sizes)
        self.model, self.session, self.version = model, session, newest

    def predict(self, name: str, signature: str, inputs: dict[str, Any]) -> Any:
        if name != self.name:
            raise self._error("NOT_FOUND", f"Servable not found for request: Latest({name})")
        described = self.model.signatures.get(signature)
        if described is None:
            raise self._error("FAILED_PRECONDITION",
                              f'Serving signature key "{signature}" not found.')  # fmt: skip
        extra, missing = set(inputs) - set(described.inputs), set(described.inputs) - set(inputs)
        if extra or missing:
            raise self._error(
                "INVALID_ARGUMENT",
                f"input size does not match signature: {len(inputs)}!={len(described.inputs)}. "
                f"Sent extra: {{{', '.join(sorted(extra))}}}. "
                f"Missing but required: {{{', '.join(sorted(missing))}}}.",
            )
        return self.session.run(signature, inputs)

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            try:
                self.refresh()
            except Exception as error:  # a version that cannot be loaded must not end the server
                self.load_errors.append(str(error))

    @staticmethod
    def _error(code: str, message: str) -> Any:
        from clean import loader

        return loader.ServingError(code, message)


def make_grpc_server(servable: Servable) -> tuple[Any, int]:
    import grpc
    from tensorflow import make_ndarray, make_tensor_proto
    from tensorflow_serving.apis import classification_pb2, predict_pb2, prediction_service_pb2_grpc

    @contextlib.contextmanager
    def aborting(context: Any) -> Iterator[None]:
        from clean import loader

        try:
            yield
        except loader.ServingError as error:
            context.abort(getattr(grpc.StatusCode, error.code, grpc.StatusCode.UNKNOWN), str(error))
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    class Service(prediction_service_pb2_grpc.PredictionServiceServicer):
        def Predict(self, request: Any, context: Any) -> Any:
            signature = request.model_spec.signature_name or "serving_default"
            response = predict_pb2.PredictResponse()
            with aborting(context):
                inputs = {name: make_ndarray(value) for name, value in request.inputs.items()}
                outputs = servable.predict(request.model_spec.name, signature, inputs)
                for name, value in outputs.items():
                    response.outputs[name].CopyFrom(make_tensor_proto(value))
            response.model_spec.version.value = servable.version
            return response

        def Classify(self, request: Any, context: Any) -> Any:
            import numpy as np

            signature = request.model_spec.signature_name or "serving_default"
            examples = request.input.example_list.examples
            inputs = np.empty(len(examples), object)
            inputs[:] = [example.SerializeToString() for example in examples]
            response = classification_pb2.ClassificationResponse()
            with aborting(context):
                outputs = servable.predict(request.model_spec.name, signature, {"inputs": inputs})
                for labels, scores in zip(outputs["classes"], outputs["scores"], strict=True):
                    classification = response.result.classifications.add()
                    for label, score in zip(labels, scores, strict=True):
                        classification.classes.add(label=label.decode(), score=float(score))
            return response

    server = grpc.server(
        futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)]
    )
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Service(), server)
    return server, server.add_insecure_port("127.0.0.1:0")


def make_rest_server(servable: Servable) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = URL.match(self.path)
            if url is None or url["name"] != servable.name:
                self._answer(404, {"error": "Servable not found"})
                return
            status = {"error_code": "OK", "error_message": ""}
            entry = {"version": str(servable.version), "state": "AVAILABLE", "status": status}
            self._answer(200, {"model_version_status": [entry], "warmed": servable.warmed})

        def do_POST(self) -> None:
            import json_rules
            from clean import loader

            url = URL.match(self.path)
            if url is None or url["verb"] != "predict":
                self._answer(404, {"error": f"Malformed request: POST {self.path}"})
                return
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                request_inputs = json_rules.read_inputs(body, servable.model.signatures)
                signature, inputs, layout = request_inputs
                outputs = servable.predict(url["name"], signature, inputs)
                self._answer(200, json_rules.write_outputs(outputs, layout))
            except loader.ServingError as error:
                self._answer(HTTP_CODES.get(error.code, 500), {"error": str(error)})
            except ValueError as error:  # also what json and the rules raise
                self._answer(400, {"error": str(error)})

        def _answer(self, code: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def main(bootstrap: str, directory: str, *allowed_sizes: str) -> None:
    spec = importlib.util.spec_from_file_location("bootstrap", bootstrap)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.block()
    module.load_package()
    sys.path.insert(0, str(Path(__file__).parent))
    import tensorflow  # noqa: F401 - must come before the loader, which then shares its library

    servable = Servable(Path(directory), tuple(map(int, allowed_sizes)))
    grpc_server, grpc_port = make_grpc_server(servable)
    grpc_server.start()
    rest_server = make_rest_server(servable)
    threading.Thread(target=rest_server.serve_forever, daemon=True).start()
    print(json.dumps({"grpc": grpc_port, "rest": rest_server.server_address[1]}), flush=True)
    sys.stdin.read()
    grpc_server.stop(None)
    rest_server.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
