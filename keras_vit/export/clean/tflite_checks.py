"""Checks a TFLite file: its operators, shapes, signature, size, and LiteRT's answers."""

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import measures
from .request import Check, Request

RANK_LIMIT = 4  # what GPU delegates take (tensorflow/tensorflow#60793)
SIGNATURE = "serving_default"
# Bytes of a weight, of the four that it has in float32.
_SHARES = {"tflite": 1.0, "tflite-fp16": 0.5, "tflite-int8": 0.25, "tflite-int8-full": 0.25}
_VARIABLES = ("VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE")


def check(request: Request) -> tuple[list[Check], dict[str, str]]:
    """Runs every check and returns the results and the version of what ran."""
    from ai_edge_litert import interpreter as litert

    # Delegates hide the operators that they take over.
    plain = litert.Interpreter(
        str(request.path),
        experimental_op_resolver_type=litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    checks = [*_check_graph(plain, request)]
    run = _runner(litert.Interpreter(str(request.path)))
    for case in request.cases:
        checks += measures.check_batches(case, run, (len(case.inputs["images"]),))
    return checks, {"ai-edge-litert": importlib.metadata.version("ai-edge-litert")}


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
    yield measures.size_check(size, request.parameter_bytes, share=_SHARES[request.format])


def _runner(interpreter: Any) -> measures.Run:
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
