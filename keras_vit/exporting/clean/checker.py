"""Checks one artefact on the disk, an ONNX or TFLite file here, and writes the report."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import messages, savedmodel_checks
from .messages import Check, Request, check_batches, size_check

DOMAINS = ("", "ai.onnx")


def check_onnx(request: Request) -> tuple[list[Check], dict[str, str]]:
    """Runs every check_onnx and returns the results and the version of what ran."""
    import onnxruntime

    checks = list(_check_model(request))
    session = onnxruntime.InferenceSession(str(request.path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(names, inputs), strict=True))

    for case in request.cases:
        checks += check_batches(case, run, request.batch_sizes)
    return checks, {"onnxruntime": onnxruntime.__version__}


RANK_LIMIT = 4  # what GPU delegates take (tensorflow/tensorflow#60793)
SIGNATURE = "serving_default"

# Bytes of a weight, of the four that it has in float32.
_SHARES = {"tflite": 1.0, "tflite-fp16": 0.5, "tflite-int8": 0.25, "tflite-int8-full": 0.25}
_VARIABLES = ("VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE")


def check_tflite(request: Request) -> tuple[list[Check], dict[str, str]]:
    """Runs every check_tflite and returns the results and the version of what ran."""
    from ai_edge_litert import interpreter as litert

    # Delegates hide the operators that they take over.
    plain = litert.Interpreter(
        str(request.path),
        experimental_op_resolver_type=litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    checks = [*_check_graph(plain, request)]
    run = _runner(litert.Interpreter(str(request.path)))
    for case in request.cases:
        checks += check_batches(case, run, (len(case.inputs["images"]),))
    return checks, {"ai-edge-litert": importlib.metadata.version("ai-edge-litert")}


_CHECKS = {"savedmodel": savedmodel_checks.check, "onnx": check_onnx}


def run(folder: Path) -> None:
    """Reads the request in a folder, checks what it names, writes the report beside it."""
    request = messages.read_request(folder)
    checks, runtime = _CHECKS.get(request.format, check_tflite)(request)
    messages.write_report(folder, checks, runtime)


def _check_model(request: Request) -> Iterator[Check]:
    import onnx

    onnx.checker.check_model(str(request.path), full_check=True)
    yield Check(name="onnx.checker, full", measured="passed", limit="passed", passed=True)
    model = onnx.load(str(request.path), load_external_data=False)
    foreign = {node.domain for node in model.graph.node} - set(DOMAINS)
    yield Check(name="foreign domains", measured=", ".join(foreign), limit="", passed=not foreign)
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
    size = sum(file.stat().st_size for file in request.path.parent.glob(f"{request.path.name}*"))
    yield size_check(size, request.parameter_bytes, share=1.0)


def _check_graph(interpreter: Any, request: Request) -> Iterator[Check]:
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
    named = signatures.get(SIGNATURE, {"inputs": [], "outputs": []})
    yield Check(
        name="signature",
        measured=f"{sorted(named['inputs'])} to {sorted(named['outputs'])}",
        limit=f"['images'] to what holds {outputs}",
        passed=named["inputs"] == ["images"] and set(outputs) <= set(named["outputs"]),
    )
    size = request.path.stat().st_size
    yield size_check(size, request.parameter_bytes, share=_SHARES[request.format])


def _runner(interpreter: Any) -> messages.Run:
    runner = interpreter.get_signature_runner(SIGNATURE)
    batch = int(runner.get_input_details()["images"]["shape"][0])

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        images = inputs["images"]
        filled = np.concatenate([images, *[images[-1:]] * (-len(images) % batch)])
        parts = [
            runner(images=filled[start : start + batch]) for start in range(0, len(filled), batch)
        ]
        return {
            name: np.concatenate([part[name] for part in parts])[: len(images)] for name in parts[0]
        }

    return run
