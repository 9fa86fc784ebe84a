"""Serves a model directory over gRPC and REST on loopback, without Keras and keras_vit.

Called as a script: `python -P server.py BOOTSTRAP MODEL_DIRECTORY [BATCHING_FILE]`, where BOOTSTRAP
is `keras_vit/exporting/clean/bootstrap.py`. Prints one line of JSON when it is ready, with its
ports, and ends with its standard input. With a file of BatchingParameters it batches.

It follows `tensorflow_model_server`: the highest numeric folder is served, the directory is looked
at again and again, a version is warmed up before it replaces the last, XLA is disabled. A
`models.config` in the directory is read for its version labels.
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
GRPC_THREADS = 64
# http_server.cc, ToHTTPStatusCode
HTTP_CODES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}
# http_rest_api_util.cc
_MODEL = r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
PREDICTIONS = re.compile(rf"(?i){_MODEL}:(?P<verb>classify|regress|predict)")
STATUS = re.compile(rf"(?i){_MODEL}(?:/(?P<metadata>metadata))?")


def disable_xla(folder: Path) -> None:
    """Calls what the server calls at its start; no public name of TensorFlow does it."""
    name = "libtensorflow_{}.so.2"
    ctypes.CDLL(str(folder / name.format("framework")), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / name.format("cc")))._ZN10tensorflow21DisableXlaCompilationEv()


def error(code: str, message: str) -> Any:
    from clean import loader  # type: ignore[import-not-found]

    return loader.ServingError(code, message)


class Servable:
    """The highest version of a model directory, always."""

    def __init__(self, directory: Path, batching_file: Path | None) -> None:
        self.directory, self.batching_file = directory, batching_file
        self.name = directory.name
        self.version: int | None = None
        self.model: Any = None
        self.session: Any = None
        self.warmed = 0
        self.load_errors: list[str] = []
        self.refresh()
        threading.Thread(target=self._watch, daemon=True).start()

    def refresh(self) -> None:
        from clean import checker, loader

        versions = [int(child.name) for child in self.directory.iterdir() if child.name.isdecimal()]
        newest = max(versions, default=None)
        if newest is None or newest == self.version:
            return
        disable_xla(loader.installed_library())
        model = loader.SavedModel(self.directory / str(newest))
        session = self._session(model)
        self.warmed = checker.replay(self.directory / str(newest), model)
        old = self.session
        self.model, self.session, self.version = model, session, newest
        if self.batching_file and old is not None:
            old.close()

    @property
    def labels(self) -> dict[str, int]:
        from google.protobuf import text_format
        from tensorflow_serving.config import model_server_config_pb2

        file = self.directory / "models.config"
        if not file.is_file():
            return {}
        listed = model_server_config_pb2.ModelServerConfig()
        text_format.Parse(file.read_text(), listed)
        (config,) = listed.model_config_list.config
        if config.name != self.name:
            raise ValueError(f"{file} names the model {config.name!r}")
        return dict(config.version_labels)

    def check(self, name: str, version: int | None = None, label: str | None = None) -> None:
        """Raises an error unless that is what is served."""
        if label and (version := self.labels.get(label)) is None:
            raise error("INVALID_ARGUMENT", f"Unrecognized servable version label: {label}")
        if name != self.name or version not in (None, self.version):
            asked = f"Latest({name})" if version is None else f"Specific({name}, {version})"
            raise error("NOT_FOUND", f"Servable not found for request: {asked}")

    def predict(self, signature: str, inputs: dict[str, Any]) -> Any:
        import batching

        described = self.model.signatures.get(signature)
        if described is None:
            raise error("FAILED_PRECONDITION", f'Serving signature key "{signature}" not found.')
        extra, missing = set(inputs) - set(described.inputs), set(described.inputs) - set(inputs)
        if extra or missing:
            raise error(
                "INVALID_ARGUMENT",
                f"input size does not match signature: {len(inputs)}!={len(described.inputs)}. "
                f"Sent extra: {{{', '.join(sorted(extra))}}}. "
                f"Missing but required: {{{', '.join(sorted(missing))}}}.",
            )
        while True:
            try:
                return self.session.run(signature, inputs)
            except batching.Closed:  # another version is there
                time.sleep(POLL_SECONDS / 10)
            except batching.BatchingError as refused:
                raise error(refused.code, str(refused)) from refused

    def signature_defs(self) -> Any:
        """The signatures as the server tells them, in a message SignatureDefMap."""
        from tensorflow.core.protobuf import saved_model_pb2
        from tensorflow_serving.apis import get_model_metadata_pb2

        content = (self.directory / str(self.version) / "saved_model.pb").read_bytes()
        (graph,) = saved_model_pb2.SavedModel.FromString(content).meta_graphs
        answer = get_model_metadata_pb2.SignatureDefMap()
        for name, definition in graph.signature_def.items():
            answer.signature_def[name].CopyFrom(definition)
        return answer

    def _session(self, model: Any) -> Any:
        if self.batching_file is None:
            return model
        import batching
        import messages  # type: ignore[import-not-found]
        from google.protobuf import text_format

        settings = messages.message("BatchingParameters")
        text_format.Parse(self.batching_file.read_text(), settings)
        return batching.BatchingSession(model.run, settings)

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            try:
                self.refresh()
            except Exception as failure:  # what cannot be loaded must not end the server
                self.load_errors.append(str(failure))


def make_grpc_server(servable: Servable) -> tuple[Any, int]:
    import grpc
    from tensorflow import make_ndarray, make_tensor_proto
    from tensorflow_serving.apis import classification_pb2, predict_pb2, prediction_service_pb2_grpc

    @contextlib.contextmanager
    def aborting(context: Any) -> Iterator[None]:
        from clean import loader

        try:
            yield
        except loader.ServingError as failure:
            code = getattr(grpc.StatusCode, failure.code, grpc.StatusCode.UNKNOWN)
            context.abort(code, str(failure))
        except ValueError as failure:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(failure))

    def check(spec: Any) -> None:
        version = spec.version.value if spec.HasField("version") else None
        servable.check(spec.name, version, spec.version_label or None)

    class Service(prediction_service_pb2_grpc.PredictionServiceServicer):
        def Predict(self, request: Any, context: Any) -> Any:
            signature = request.model_spec.signature_name or "serving_default"
            response = predict_pb2.PredictResponse()
            with aborting(context):
                check(request.model_spec)
                inputs = {name: make_ndarray(value) for name, value in request.inputs.items()}
                outputs = servable.predict(signature, inputs)
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
                check(request.model_spec)
                outputs = servable.predict(signature, {"inputs": inputs})
                for labels, scores in zip(outputs["classes"], outputs["scores"], strict=True):
                    classification = response.result.classifications.add()
                    for label, score in zip(labels, scores, strict=True):
                        classification.classes.add(label=label.decode(), score=float(score))
            return response

        def GetModelMetadata(self, request: Any, context: Any) -> Any:
            with aborting(context):
                check(request.model_spec)
                return metadata(servable)

    server = grpc.server(
        futures.ThreadPoolExecutor(GRPC_THREADS), options=[("grpc.max_receive_message_length", -1)]
    )
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Service(), server)
    return server, server.add_insecure_port("127.0.0.1:0")


def metadata(servable: Servable) -> Any:
    """The message GetModelMetadataResponse."""
    from tensorflow_serving.apis import get_model_metadata_pb2

    answer = get_model_metadata_pb2.GetModelMetadataResponse()
    answer.model_spec.name, answer.model_spec.version.value = servable.name, servable.version
    answer.metadata["signature_def"].Pack(servable.signature_defs())
    return answer


def make_rest_server(servable: Servable) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            from google.protobuf import json_format

            with self._answering():
                url = self._parsed(STATUS)
                if url["metadata"]:
                    # Known messages within Any are written out.
                    self._answer(200, json_format.MessageToDict(
                        metadata(servable), preserving_proto_field_name=True))  # fmt: skip
                    return
                status = {"error_code": "OK", "error_message": ""}
                entry = {"version": str(servable.version), "state": "AVAILABLE", "status": status}
                # The last two are not the server's: they are for the tests.
                sizes = dict(getattr(servable.session, "sizes", {}))
                told = {"warmed": servable.warmed, "batches": sizes}
                self._answer(200, {"model_version_status": [entry], **told})

        def do_POST(self) -> None:
            import json_rules

            with self._answering():
                if self._parsed(PREDICTIONS)["verb"] != "predict":
                    raise error("UNIMPLEMENTED", "this stand-in has no REST classify and regress")
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                request_inputs = json_rules.read_inputs(body, servable.model.signatures)
                signature, inputs, layout = request_inputs
                outputs = servable.predict(signature, inputs)
                self._answer(200, json_rules.write_outputs(outputs, layout))

        @contextlib.contextmanager
        def _answering(self) -> Iterator[None]:
            from clean import loader

            try:
                yield
            except loader.ServingError as failure:
                self._answer(HTTP_CODES.get(failure.code, 500), {"error": str(failure)})
            except ValueError as failure:  # also what json and the rules raise
                self._answer(400, {"error": str(failure)})

        def _parsed(self, pattern: re.Pattern[str]) -> re.Match[str]:
            if not self.path.lower().startswith("/v1/"):
                raise error("NOT_FOUND", "Not Found")
            url = pattern.fullmatch(self.path)
            if url is None:
                text = f"Malformed request: {self.command} {self.path}"
                raise error("INVALID_ARGUMENT", text)
            version = int(url["version"]) if url["version"] else None
            servable.check(url["name"], version, url["label"])
            return url

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


def main(bootstrap: str, directory: str, batching_file: str | None = None) -> None:
    spec = importlib.util.spec_from_file_location("bootstrap", bootstrap)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.block()
    module.load_package()
    sys.path.insert(0, str(Path(__file__).parent))
    import tensorflow  # noqa: F401 - must come before the loader, which then shares its library

    servable = Servable(Path(directory), Path(batching_file) if batching_file else None)
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
