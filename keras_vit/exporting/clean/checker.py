"""Checks one artefact on the disk, a SavedModel, ONNX or TFLite file, and writes a report."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import loader, messages, runners
from .messages import Case, Check, Request, check_batches, size_check

SIGNATURE = "serving_default"
WARM_UP_FILE = "assets.extra/tf_serving_warmup_requests"
WARM_UP_LIMIT = 1000  # the server refuses files with more requests
JUNK = b"this is not an image"
ONNX_DOMAINS = ("", "ai.onnx")
_FEW_SIZES = (1, 3)
RANK_LIMIT = 4  # of GPU delegates (tensorflow/tensorflow#60793)

# Size of a SavedModel over that of the parameters; its .pb counts only beside large weights.
WEIGHTS_LIMIT = 1.05
_LARGE = 50_000_000
# Operations that touch the host or need another runtime (the deny list of saved_model_cli, Python).
FORBIDDEN = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "ReadFile", "WriteFile",
                       "PrintV2", "XlaLaunch", "XlaLaunchV2"})  # fmt: skip
_JSON_DTYPES = (loader.STRING, *(loader.NUMBERS[np.dtype(kind)] for kind in ("float32", "int32")))
# TensorProto's repeated fields.
_FLOATS, _INTEGERS, _STRINGS = 5, 7, 8
_VARIABLES = ("VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE")


def run(folder: Path) -> None:
    """Reads the request in a folder, checks its artefact, and writes the report into the folder."""
    request = messages.read_request(folder)
    runner = runners.open_runner(request.format, request.path, library=request.library)
    checks = []
    if request.cases:
        check = _CHECKS[runners.family(request.format)]
        checks = check(request, runner)
    if request.gate is not None:
        run_signature = functools.partial(runner.run, request.gate.signature)
        checks += messages.run_gate(request.gate, run_signature)
    answers = [runner.run(case.signature, case.inputs) for case in request.references]
    for case, answer in zip(request.references, answers, strict=True):
        checks += messages.compare(case, answer, rows=case.rows)
    messages.write_report(folder, messages.Report(checks, runner.versions, tuple(answers)))


def check_savedmodel(request: Request, runner: runners.SavedModelRunner) -> list[Check]:
    """Returns the checks of a SavedModel."""
    checks = [*_check_sizes(request), *_check_operations(request.path)]
    model = runner.model
    checks += _check_signatures(model)
    for place, case in enumerate(request.cases):
        run = functools.partial(runner.run, case.signature)
        # All signatures call one function for the network, so one of them shows it at every size.
        sizes = request.batch_sizes if place == 0 else _FEW_SIZES
        checks += check_batches(case, run, sizes)
        checks.append(messages.check_empty(case, run))
        checks += _check_classes(case, model, request.labels)
        checks += _check_bad_rows(case, model)
    requests = replay(request.path, model)
    checks.append(Check(name="warm-up requests", measured=requests, limit="1..1000",
                        passed=1 <= requests <= WARM_UP_LIMIT))  # fmt: skip
    return checks


def check_onnx(request: Request, runner: runners.OnnxRunner) -> list[Check]:
    """Returns the checks of an ONNX file."""
    checks = list(_check_onnx_graph(request))
    for case in request.cases:
        run = functools.partial(runner.run, case.signature)
        checks += check_batches(case, run, request.batch_sizes)
        checks.append(messages.check_empty(case, run))
    return checks


def check_tflite(request: Request, runner: runners.TfliteRunner) -> list[Check]:
    """Returns the checks of a TFLite file."""
    from ai_edge_litert import interpreter as litert

    # Without delegates, which hide the operators that they replace.
    plain = litert.Interpreter(
        str(request.path),
        experimental_op_resolver_type=litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    checks = [*_check_tflite_graph(plain, request)]
    for case in request.cases:
        run = functools.partial(runner.run, case.signature)
        checks += check_batches(case, run, (case.rows,))
    return checks


# Of each family of formats.
_CHECKS: dict[str, Callable[..., list[Check]]] = {
    "savedmodel": check_savedmodel,
    "onnx": check_onnx,
    "tflite": check_tflite,
}


def replay(path: Path, model: loader.SavedModel) -> int:
    """Runs every warm-up request and returns their number.

    Raises:
        ValueError: the inputs of a request are not those of its signature.
        loader.ServingError: a request fails.
    """
    file = path / WARM_UP_FILE
    count = 0
    for record in loader.records(file.read_bytes()) if file.is_file() else ():
        signature, inputs = read_request(record)
        names = sorted(model.signatures[signature].inputs)
        if sorted(inputs) != names:
            raise ValueError(
                f"A warm-up request for {signature!r} has the inputs {sorted(inputs)}; the "
                f"signature takes {names}."
            )
        model.run(signature, inputs)
        count += 1
    return count


def read_request(record: bytes) -> tuple[str, dict[str, np.ndarray]]:
    """Reads the signature and the inputs of a PredictionLog with a PredictRequest."""
    request = b"".join(loader.submessages(record, 6, 1))
    signature = b"".join(loader.submessages(request, 1, 3)).decode() or SIGNATURE
    tensors = loader.mapping(request, 2)
    return signature, {name: read_tensor(tensor) for name, tensor in tensors.items()}


def read_tensor(tensor: bytes) -> np.ndarray:
    """Reads a TensorProto; its last value stands for all that follow."""
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
    array: np.ndarray = np.full(int(np.prod(shape)), listed[-1] if listed else 0, dtype)
    array[: len(listed)] = listed
    return array.reshape(shape)


def graph_operations(saved_model: bytes) -> tuple[set[str], int]:
    """Returns the operations of a SavedModel, and how many functions or nodes require XLA."""
    operations, compiled = set(), 0
    # SavedModel.meta_graphs = 2, MetaGraphDef.graph_def = 2, GraphDef: node = 1, library = 2;
    # FunctionDefLibrary.function = 1, FunctionDef: node_def = 3, attr = 5;
    # NodeDef: op = 2, attr = 5; AttrValue: b = 5.
    for graph in loader.submessages(saved_model, 2, 2):
        functions = list(loader.submessages(graph, 2, 1))
        nodes = [*loader.submessages(graph, 1)]
        for function in functions:
            nodes += loader.submessages(function, 3)
        for node in nodes:
            operations.add(b"".join(loader.submessages(node, 2)).decode())
        for owner in (*functions, *nodes):
            must_compile = loader.mapping(owner, 5).get("_XlaMustCompile", b"")
            compiled += bool(loader.integer(must_compile, 5))
    return operations, compiled


def _check_sizes(request: Request) -> Iterator[Check]:
    weights = sum(file.stat().st_size for file in request.path.glob("variables/*"))
    whole = weights + (request.path / "saved_model.pb").stat().st_size
    parameters = request.parameter_bytes
    index = (request.path / "variables/variables.index").stat().st_size
    ratio = (weights - index) / parameters
    is_small, is_large = parameters < 1_000_000, parameters >= _LARGE
    yield Check(
        name="bytes of the weights / bytes of the parameters",
        measured=round(ratio, 4),
        limit=None if is_small else WEIGHTS_LIMIT,
        passed=ratio <= (1.5 if is_small else WEIGHTS_LIMIT),
    )
    yield Check(
        name="bytes of the SavedModel / bytes of the parameters",
        measured=round(whole / parameters, 4),
        limit=WEIGHTS_LIMIT if is_large else None,
        passed=not is_large or whole / parameters <= WEIGHTS_LIMIT,
    )


def _check_operations(path: Path) -> Iterator[Check]:
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
            key for key, tensor in signature.outputs.items() if tensor.dtype not in _JSON_DTYPES
        ]
        yield Check(
            name=f"{name}: batch first, types for JSON",
            measured=", ".join(wrong),
            limit="",
            passed=not wrong,
        )


def _check_classes(
    case: Case, model: loader.SavedModel, labels: tuple[str, ...]
) -> Iterator[Check]:
    """Compares the names of the classes with their numbers: equal scores could hide a swap."""
    if "class_ids" not in model.signatures[case.signature].outputs:
        return
    outputs = model.run(case.signature, case.inputs)
    names = np.array([[label.decode() for label in row] for row in outputs["classes"]])
    expected = np.array(labels)[outputs["class_ids"]]
    yield Check(
        name=f"{case.signature}: classes named by class_ids",
        measured=int(np.sum(names != expected)),
        limit=0,
        passed=bool((names == expected).all()),
    )


def _check_bad_rows(case: Case, model: loader.SavedModel) -> Iterator[Check]:
    """Sends what is no image beside an image: it must fail alone, and change nothing else."""
    if "status" not in model.signatures[case.signature].outputs:
        return
    ((name, files),) = case.inputs.items()
    mixed = np.array([JUNK, files[0], b""], object)
    outputs = model.run(case.signature, {name: mixed})
    told = [text.decode() for text in outputs["status"]]
    yield Check(
        name=f"{case.signature}: only what is no image fails",
        measured=", ".join("OK" if text == "OK" else "failed" for text in told),
        limit="failed, OK, failed",
        passed=[text == "OK" for text in told] == [False, True, False],
    )
    expected = {**case.expected, **case.alone}
    difference = max(
        messages.largest_difference(outputs[key][1:2], value[:1]) for key, value in expected.items()
    )
    limit = case.limit + case.own_drift
    yield Check(
        name=f"{case.signature}: an image between bad ones, largest difference",
        measured=difference,
        limit=limit,
        passed=difference <= limit,
    )


def _check_onnx_graph(request: Request) -> Iterator[Check]:
    import onnx

    onnx.checker.check_model(str(request.path), full_check=True)
    yield Check(name="onnx.checker, full", measured="passed", limit="passed", passed=True)
    model = onnx.load(str(request.path), load_external_data=False)
    foreign = {node.domain for node in model.graph.node} - set(ONNX_DOMAINS)
    yield Check(name="foreign domains", measured=", ".join(foreign), limit="", passed=not foreign)
    parts = request.path.parent.glob(f"{request.path.name}*")
    yield _size_check(sum(each.stat().st_size for each in parts), request)
    batches = {
        value.type.tensor_type.shape.dim[0].dim_param
        for value in (*model.graph.input, *model.graph.output)
    }
    yield Check(
        name="first dimension",
        measured=", ".join(sorted(batches)),
        limit="batch",
        passed=batches == {"batch"},
    )


def _check_tflite_graph(interpreter: Any, request: Request) -> Iterator[Check]:
    operators = {details["op_name"] for details in interpreter._get_ops_details()}
    foreign = sorted(
        name for name in operators if name in _VARIABLES or name.startswith(("Flex", "CUSTOM"))
    )
    yield Check(
        name="operators that are not built in, or hold variables",
        measured=", ".join(foreign),
        limit="",
        passed=not foreign,
    )
    rank = max(len(details["shape"]) for details in interpreter.get_tensor_details())
    yield Check(name="highest rank", measured=rank, limit=RANK_LIMIT, passed=rank <= RANK_LIMIT)
    signatures = interpreter.get_signature_list()
    outputs = sorted({name for case in request.cases for name in case.expected})
    named = signatures.get(runners.SIGNATURE, {"inputs": [], "outputs": []})
    yield Check(
        name="signature",
        measured=f"{sorted(named['inputs'])} to {sorted(named['outputs'])}",
        limit=f"['images'] to what holds {outputs}",
        passed=named["inputs"] == ["images"] and set(outputs) <= set(named["outputs"]),
    )
    size = request.path.stat().st_size
    yield _size_check(size, request)


def _size_check(size: int, request: Request) -> Check:
    is_rounded = request.weight_bytes < request.parameter_bytes
    return size_check(size, request.weight_bytes, is_rounded=is_rounded)
