"""Checks a SavedModel, and its warm-up, through the C++ loader of TensorFlow Serving."""

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from . import loader
from .messages import Case, Check, Request, check_batches

FILE = "assets.extra/tf_serving_warmup_requests"
LIMIT = 1000  # more make the server refuse the file

# TensorProto's repeated fields: float_val = 5, int_val = 7, string_val = 8.
_FLOATS, _INTEGERS, _STRINGS = 5, 7, 8


def replay(path: Path, model: loader.SavedModel) -> int:
    """Runs every recorded request and returns how many there are.

    Raises:
        ValueError: a request names other inputs than the signature has.
        loader.ServingError: a request fails.
    """
    file = path / FILE
    count = 0
    for record in loader.records(file.read_bytes()) if file.is_file() else ():
        signature, inputs = read_request(record)
        wanted = model.signatures[signature].inputs
        if set(inputs) != set(wanted):
            raise ValueError(
                f"A warm-up request for {signature!r} has the inputs {sorted(inputs)}; the "
                f"signature takes {sorted(wanted)}."
            )
        model.run(signature, inputs)
        count += 1
    return count


def read_request(record: bytes) -> tuple[str, dict[str, np.ndarray]]:
    """Reads the signature and the inputs of a PredictionLog with a PredictRequest."""
    request = b"".join(loader.submessages(record, 6, 1))
    signature = b"".join(loader.submessages(request, 1, 3)).decode() or "serving_default"
    tensors = loader.mapping(request, 2)
    return signature, {name: read_tensor(tensor) for name, tensor in tensors.items()}


def read_tensor(tensor: bytes) -> np.ndarray:
    """Reads a TensorProto; values that are left out repeat the last one."""
    # TensorProto: dtype = 1, tensor_shape = 2 (dim = 2 (size = 1)), tensor_content = 4.
    number = loader.integer(tensor, 1)
    shape = tuple(loader.integer(dim, 1) for dim in loader.submessages(tensor, 2, 2))
    content = b"".join(loader.submessages(tensor, 4))
    if number == loader.STRING:
        values = np.empty(int(np.prod(shape)), object)
        values[:] = list(loader.submessages(tensor, _STRINGS))
        return values.reshape(shape)
    dtype = loader.DTYPES[number]
    if content:
        return np.frombuffer(content, dtype).reshape(shape)
    listed: list[float] = []
    for field in loader.submessages(tensor, _FLOATS):
        listed += np.frombuffer(field, np.float32).tolist()
    for field in loader.submessages(tensor, _INTEGERS):
        listed += loader.varints(field)
    filled: np.ndarray = np.full(int(np.prod(shape)), listed[-1] if listed else 0, dtype)
    filled[: len(listed)] = listed
    return filled.reshape(shape)


# Weights once, and their index. The .pb is held to the same only where weights are its bulk.
WEIGHTS_LIMIT = 1.05
_LARGE = 50_000_000

# What touches the host or needs another runtime (the deny list of saved_model_cli, and Python).
FORBIDDEN = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "ReadFile", "WriteFile",
                       "PrintV2", "XlaLaunch", "XlaLaunchV2"})  # fmt: skip
_TYPES = {loader.STRING: "string", 1: "float32", 3: "int32", 4: "uint8"}
_JSON_TYPES = ("string", "float32", "int32")
_JUNK = b"this is not an image"


def check(request: Request) -> tuple[list[Check], dict[str, str]]:
    """Runs every check and returns the results and the version of what ran."""
    checks = [*_check_files(request), *_check_graph(request.path)]
    model = loader.SavedModel(request.path, library=request.library)
    checks += _check_signatures(model)
    for case in request.cases:
        run = functools.partial(model.run, case.signature)
        checks += check_batches(case, run, request.batch_sizes)
        checks += _check_classes(case, model, request.labels)
    checks += _check_refusal(model)
    replayed = replay(request.path, model)
    checks.append(Check(name="warm-up requests", measured=replayed, limit="1..1000",
                        passed=1 <= replayed <= LIMIT))  # fmt: skip
    return checks, {"loader": f"TensorFlow C++ {model.version}"}


def graph_operations(saved_model: bytes) -> tuple[set[str], int]:
    """Returns the ops of a SavedModel and how many functions or nodes demand XLA."""
    operations, compiled = set(), 0
    # SavedModel.meta_graphs = 2, MetaGraphDef.graph_def = 2, GraphDef: node = 1, library = 2;
    # FunctionDefLibrary.function = 1, FunctionDef: node_def = 3, attr = 5;
    # NodeDef: op = 2, attr = 5.
    for graph in loader.submessages(saved_model, 2, 2):
        functions = list(loader.submessages(graph, 2, 1))
        nodes = [*loader.submessages(graph, 1)]
        for function in functions:
            nodes += loader.submessages(function, 3)
        for node in nodes:
            operations.add(b"".join(loader.submessages(node, 2)).decode())
        for owner in (*functions, *nodes):
            demand = loader.mapping(owner, 5).get("_XlaMustCompile", b"")
            compiled += bool(demand) and bool(loader.integer(demand, 5))
    return operations, compiled


def _check_files(request: Request) -> Iterator[Check]:
    weights = sum(file.stat().st_size for file in request.path.glob("variables/*"))
    whole = weights + (request.path / "saved_model.pb").stat().st_size
    parameters = request.parameter_bytes
    index = (request.path / "variables/variables.index").stat().st_size
    ratio = (weights - index) / parameters
    yield Check(
        name="bytes of the weights / bytes of the parameters",
        measured=round(ratio, 4),
        limit=None if parameters < 1_000_000 else WEIGHTS_LIMIT,
        passed=ratio <= (1.5 if parameters < 1_000_000 else WEIGHTS_LIMIT),
    )
    is_large = parameters >= _LARGE
    yield Check(
        name="bytes of the SavedModel / bytes of the parameters",
        measured=round(whole / parameters, 4),
        limit=WEIGHTS_LIMIT if is_large else None,
        passed=not is_large or whole / parameters <= WEIGHTS_LIMIT,
    )


def _check_graph(path: Path) -> Iterator[Check]:
    operations, compiled = graph_operations((path / "saved_model.pb").read_bytes())
    forbidden = sorted(operations & FORBIDDEN)
    yield Check(name="forbidden ops", measured=", ".join(forbidden), limit="", passed=not forbidden)
    yield Check(name="functions for XLA", measured=compiled, limit=0, passed=not compiled)


def _check_signatures(model: loader.SavedModel) -> Iterator[Check]:
    for name, signature in sorted(model.signatures.items()):
        wrong = [
            key
            for key, tensor in (*signature.inputs.items(), *signature.outputs.items())
            if not tensor.shape or tensor.shape[0] != -1
        ]
        wrong += [
            key for key, tensor in signature.outputs.items()
            if _TYPES.get(tensor.dtype) not in _JSON_TYPES
        ]  # fmt: skip
        yield Check(
            name=f"{name}: batch first, types for JSON",
            measured=", ".join(wrong),
            limit="",
            passed=not wrong,
        )


def _check_classes(
    case: Case, model: loader.SavedModel, labels: tuple[str, ...]
) -> Iterator[Check]:
    """The named classes are those of the scores: looked up where the scores alone could mislead."""
    if "class_ids" not in model.signatures[case.signature].outputs:
        return
    answer = model.run(case.signature, case.inputs)
    named = [[label.decode() for label in row] for row in answer["classes"]]
    meant = [[labels[index] for index in row] for row in answer["class_ids"]]
    yield Check(
        name=f"{case.signature}: classes named by class_ids",
        measured=int(np.sum(np.array(named) != np.array(meant))),
        limit=0,
        passed=named == meant,
    )


def _check_refusal(model: loader.SavedModel) -> Iterator[Check]:
    junk = np.array([_JUNK], object)
    try:
        model.run("serving_default", {"image_bytes": junk})
        answer = "an answer"
    except loader.ServingError as error:
        answer = error.code
    yield Check(
        name="what is no image",
        measured=answer,
        limit="INVALID_ARGUMENT",
        passed=answer == "INVALID_ARGUMENT",
    )
