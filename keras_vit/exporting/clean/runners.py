"""Opens and asks an artefact in its runtime, and says what its files must hold.

A new runtime is a class here, and its name in `RUNNERS`.
"""

import abc
import functools
import importlib.metadata
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from . import agreement
from .agreement import Arrays, Case, Check, Request

SIGNATURE = "serving_default"
DESCRIPTION = "description.json"  # in the archive behind a TFLite file
LARGE = 20_000_000  # bytes of weights, beside which the rest of a file does not count

WARM_UP_FILE = "assets.extra/tf_serving_warmup_requests"
_WARM_UP_LIMIT = 1000  # the server refuses files with more requests
_JUNK = b"this is not an image"
# Size of a SavedModel over that of the parameters; its .pb counts only beside large weights.
_WEIGHTS_LIMIT = 1.05
_LARGE_WEIGHTS = 50_000_000
# Operations that touch the host or need another runtime (the deny list of saved_model_cli, Python).
FORBIDDEN = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "ReadFile", "WriteFile",
                       "PrintV2", "XlaLaunch", "XlaLaunchV2"})  # fmt: skip
_JSON_DTYPES = ("string", "float32", "int32")
_ONNX_DOMAINS = ("", "ai.onnx")
_RANK_LIMIT = 4  # of GPU delegates (tensorflow/tensorflow#60793)
_VARIABLES = ("VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE")


class Runner(abc.ABC):
    """An artefact that is loaded.

    Attributes:
        title: of the runtime.
        package: to install for it; "" where it comes with this package.
        versions: of what runs it.
    """

    title: ClassVar[str] = ""
    package: ClassVar[str] = ""
    versions: dict[str, str]

    @abc.abstractmethod
    def __init__(self, path: Path) -> None: ...

    @abc.abstractmethod
    def run(self, signature: str, inputs: Arrays) -> dict[str, np.ndarray]:
        """Returns the outputs of a signature by name; "" where the format has but one."""

    def checks(self, request: Request) -> Iterator[Check]:
        """Yields the checks of the files, and of the answers to each case."""
        yield from self.check_files(request)
        for case in request.cases:
            yield from agreement.check_batches(case, functools.partial(self.run, case.signature))

    @abc.abstractmethod
    def check_files(self, request: Request) -> Iterator[Check]:
        """Yields the checks of what the files hold."""

    @classmethod
    def describe(cls, path: Path) -> dict[str, Any] | None:
        """Returns what a file says of itself, None if nothing; see `rebuild.Description`.

        Raises:
            ValueError: it is damaged.
        """
        return None


class SavedModelRunner(Runner):
    """A SavedModel in a session of its graph, as a server has it: without objects of Python.

    Attributes:
        meta_graph: its MetaGraphDef.
        signatures: its SignatureDefs by name.
    """

    def __init__(self, path: Path) -> None:
        import tensorflow as tf

        self._path, self._session = path, tf.compat.v1.Session(graph=tf.Graph())
        logger = tf.get_logger()
        level = logger.level
        logger.setLevel("ERROR")  # or it advises the other loader, which makes objects of Python
        try:
            with self._session.graph.as_default():
                self.meta_graph = tf.compat.v1.saved_model.load(self._session, ["serve"], str(path))
        finally:
            logger.setLevel(level)
        self.signatures = {
            name: signature
            for name, signature in self.meta_graph.signature_def.items()
            if not name.startswith("__")
        }
        self.versions = {"loader": f"TensorFlow {tf.__version__}"}

    def run(self, signature: str, inputs: Arrays) -> dict[str, np.ndarray]:
        """Strings are object arrays of bytes.

        Raises:
            ValueError: the inputs are not those of the signature, which a session would convert.
        """
        import tensorflow as tf

        asked = self.signatures[signature]
        takes = {name: tf.as_dtype(each.dtype).name for name, each in asked.inputs.items()}
        given = {name: tf.as_dtype(value.dtype).name for name, value in inputs.items()}
        if takes != given:
            raise ValueError(f"The signature {signature!r} takes {takes}. Received: {given}.")
        outputs: dict[str, np.ndarray] = self._session.run(
            {name: each.name for name, each in asked.outputs.items()},
            {asked.inputs[name].name: value for name, value in inputs.items()},
        )
        return outputs

    def checks(self, request: Request) -> Iterator[Check]:
        yield from super().checks(request)
        for case in request.cases:
            named = self.signatures[case.signature].outputs
            if "class_ids" in named:  # equal scores could hide a swap of names
                outputs = self.run(case.signature, case.inputs)
                names = np.array([[label.decode() for label in row] for row in outputs["classes"]])
                wrong = int(np.sum(names != np.array(request.labels)[outputs["class_ids"]]))
                yield Check.equal(case.check_name("classes named by class_ids"), wrong, 0)
            if "status" in named:
                yield from self._check_bad_rows(case)
        count = 0
        for warm_up in warm_up_requests(self._path):
            self.run(*warm_up)
            count += 1
        yield Check(name="warm-up requests", measured=count, limit=f"1..{_WARM_UP_LIMIT}",
                    passed=1 <= count <= _WARM_UP_LIMIT)  # fmt: skip

    def check_files(self, request: Request) -> Iterator[Check]:
        import tensorflow as tf

        weights = sum(file.stat().st_size for file in self._path.glob("variables/*"))
        whole = weights + (self._path / "saved_model.pb").stat().st_size
        weights -= (self._path / "variables/variables.index").stat().st_size
        parameters = request.parameter_bytes
        is_small, is_large = parameters < 1_000_000, parameters >= _LARGE_WEIGHTS
        for what, size, limit, is_limited in (
            ("weights", weights, 1.5 if is_small else _WEIGHTS_LIMIT, not is_small),
            ("SavedModel", whole, _WEIGHTS_LIMIT if is_large else np.inf, is_large),
        ):
            yield Check(
                name=f"bytes of the {what} / bytes of the parameters",
                measured=round(size / parameters, 4),
                limit=limit if is_limited else None,
                passed=size / parameters <= limit,
            )
        operations, compiled = graph_operations(self.meta_graph.graph_def)
        yield Check.equal("forbidden ops", ", ".join(sorted(operations & FORBIDDEN)), "")
        yield Check.equal("functions for XLA", compiled, 0)
        for name, signature in sorted(self.signatures.items()):
            shapes = {
                key: list(tensor.tensor_shape.dim)
                for key, tensor in (*signature.inputs.items(), *signature.outputs.items())
            }
            wrong = [key for key, dims in shapes.items() if not dims or dims[0].size != -1]
            types = {key: tf.as_dtype(each.dtype).name for key, each in signature.outputs.items()}
            wrong += [key for key, each in types.items() if each not in _JSON_DTYPES]
            yield Check.equal(f"{name}: batch first, types for JSON", ", ".join(wrong), "")

    def _check_bad_rows(self, case: Case) -> Iterator[Check]:
        """Sends what is no image beside an image: it must fail alone, and change nothing else."""
        ((name, files),) = case.inputs.items()
        outputs = self.run(case.signature, {name: np.array([_JUNK, files[0], b""], object)})
        told = ", ".join("OK" if text == b"OK" else "failed" for text in outputs["status"])
        name = case.check_name("only what is no image fails")
        yield Check.equal(name, told, "failed, OK, failed")
        difference = max(
            agreement.largest_difference(outputs[key][1:2], value[:1])
            for key, value in {**case.expected, **case.alone}.items()
        )
        name = case.check_name("an image between bad ones, largest difference")
        yield Check.at_most(name, difference, case.limit_of_drift)


class OnnxRunner(Runner):
    """An ONNX file, or its content, in ONNX Runtime, on the processor."""

    title, package = "ONNX Runtime", "onnxruntime"

    def __init__(self, path: Path | bytes) -> None:
        import onnxruntime

        model = path if isinstance(path, bytes) else str(path)
        self.session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        self._names = [output.name for output in self.session.get_outputs()]
        self.versions = {"onnxruntime": str(onnxruntime.__version__)}

    def run(self, signature: str, inputs: Arrays) -> dict[str, np.ndarray]:
        return dict(zip(self._names, self.session.run(self._names, dict(inputs)), strict=True))

    def check_files(self, request: Request) -> Iterator[Check]:
        import onnx

        onnx.checker.check_model(str(request.path), full_check=True)
        yield Check.equal("onnx.checker, full", "passed", "passed")
        graph = onnx.load(str(request.path), load_external_data=False).graph
        foreign = {node.domain for node in graph.node} - set(_ONNX_DOMAINS)
        yield Check.equal("foreign domains", ", ".join(foreign), "")
        yield _size_check(request)
        dimensions = (each.type.tensor_type.shape.dim for each in (*graph.input, *graph.output))
        first = sorted({shape[0].dim_param for shape in dimensions})
        yield Check.equal("first dimension", ", ".join(first), "batch")

    @classmethod
    def describe(cls, path: Path) -> dict[str, Any] | None:
        """Returns the file's `metadata_props`, which are JSON but for the specification's own."""
        properties = cls(path).session.get_modelmeta().custom_metadata_map
        if "weights_sha256" not in properties:
            return None
        return {
            name: json.loads(value)
            for name, value in properties.items()
            if not name.startswith("Image.")
        }


class TfliteRunner(Runner):
    """A TFLite file in LiteRT, with its own kernels; batches of other sizes are filled up."""

    title, package = "LiteRT", "ai-edge-litert"

    def __init__(self, path: Path) -> None:
        from ai_edge_litert import interpreter as litert

        self._interpreter = litert.Interpreter(str(path))
        self._run = self._interpreter.get_signature_runner(SIGNATURE)
        self._batch = int(self._run.get_input_details()["images"]["shape"][0])
        self.versions = {self.package: importlib.metadata.version(self.package)}

    def run(self, signature: str, inputs: Arrays) -> dict[str, np.ndarray]:
        images = inputs["images"]
        padded = np.concatenate([images, *[images[-1:]] * (-len(images) % self._batch)])
        parts = [
            self._run(images=padded[start : start + self._batch])
            for start in range(0, len(padded), self._batch)
        ]
        return {
            name: np.concatenate([part[name] for part in parts])[: len(images)] for name in parts[0]
        }

    def check_files(self, request: Request) -> Iterator[Check]:
        from ai_edge_litert import interpreter as litert

        # Without delegates, which hide the operators that they replace.
        plain = litert.Interpreter(
            str(request.path),
            experimental_op_resolver_type=litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )
        operators = {details["op_name"] for details in plain._get_ops_details()}
        foreign = sorted(
            name for name in operators if name in _VARIABLES or name.startswith(("Flex", "CUSTOM"))
        )
        what = "operators that are not built in, or hold variables"
        yield Check.equal(what, ", ".join(foreign), "")
        rank = max(len(details["shape"]) for details in plain.get_tensor_details())
        yield Check.at_most("highest rank", rank, _RANK_LIMIT)
        named = plain.get_signature_list().get(SIGNATURE, {"inputs": [], "outputs": []})
        outputs = sorted({name for case in request.cases for name in case.expected})
        yield Check(
            name="signature",
            measured=f"{sorted(named['inputs'])} to {sorted(named['outputs'])}",
            limit=f"['images'] to what holds {outputs}",
            passed=named["inputs"] == ["images"] and set(outputs) <= set(named["outputs"]),
        )
        yield _size_check(request)

    @classmethod
    def describe(cls, path: Path) -> dict[str, Any] | None:
        """Returns the description in the archive behind the file."""
        if not zipfile.is_zipfile(path):
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                fields = json.loads(archive.read(DESCRIPTION))
        except KeyError:
            return None
        except zipfile.BadZipFile as error:
            raise ValueError(f"the archive behind it is damaged ({error})") from None
        if not isinstance(fields, dict):
            raise ValueError("its description is not one JSON object")
        return fields


RUNNERS: Mapping[str, type[Runner]] = {
    "savedmodel": SavedModelRunner,
    "onnx": OnnxRunner,
    "tflite": TfliteRunner,
}


def graph_operations(graph: Any) -> tuple[set[str], int]:
    """Returns the operations of a GraphDef, and how many functions or nodes require XLA."""
    functions = graph.library.function
    nodes = [*graph.node, *(node for function in functions for node in function.node_def)]
    compiled = sum(each.attr["_XlaMustCompile"].b for each in (*functions, *nodes))
    return {node.op for node in nodes}, compiled


def warm_up_requests(path: Path) -> Iterator[tuple[str, Arrays]]:
    """Yields the signature and the input of each warm-up request of a SavedModel."""
    import tensorflow as tf
    from google.protobuf import empty_pb2, unknown_fields
    from tensorflow.core.framework import tensor_pb2

    def unpack(content: bytes) -> dict[int, bytes]:
        message = empty_pb2.Empty.FromString(content)
        return {each.field_number: each.data for each in unknown_fields.UnknownFieldSet(message)}

    file = path / WARM_UP_FILE
    for log in tf.data.TFRecordDataset(str(file)).as_numpy_iterator() if file.is_file() else ():
        request = unpack(unpack(unpack(log)[6])[1])
        model, given = unpack(request[1]), unpack(request[2])
        tensor = tf.make_ndarray(tensor_pb2.TensorProto.FromString(given[2]))
        yield model[3].decode(), {given[1].decode(): tensor}


def warm_up_log(model: str, signature: str, name: str, tensor: bytes) -> bytes:
    """Returns a PredictionLog of tensorflow_serving/apis, whose messages TensorFlow has not.

    Its request has one input by its name, a serialised TensorProto.
    """

    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 127:
            length += bytes([size % 128 + 128])
            size //= 128
        return bytes([8 * number + 2]) + length + bytes([size]) + content

    spec = field(1, model.encode()) + field(3, signature.encode())
    given = field(1, name.encode()) + field(2, tensor)  # an entry of a map
    return field(6, field(1, field(1, spec) + field(2, given)))


def _size_check(request: Request) -> Check:
    parts = request.path.parent.glob(f"{request.path.name}*")
    ratio = sum(each.stat().st_size for each in parts) / request.weight_bytes
    # A file that lacks weights is too small, one with a weight twice too large. Small models have
    # no upper limit: their graph, and the scales of rounded weights, count too much.
    most = 1.2 if request.weight_bytes < request.parameter_bytes else 1.05
    upper = most if request.weight_bytes >= LARGE else None
    return Check(
        name="bytes of the file / bytes of its weights",
        measured=round(ratio, 4),
        limit=f"0.95..{upper or ''}",
        passed=0.95 <= ratio <= (upper or np.inf),
    )
