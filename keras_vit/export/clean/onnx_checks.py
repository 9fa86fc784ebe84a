"""Checks an ONNX file: the checker's full pass, names, and onnxruntime's answers."""

from collections.abc import Iterator

import numpy as np

from . import measures
from .request import Check, Request

DOMAINS = ("", "ai.onnx")


def check(request: Request) -> tuple[list[Check], dict[str, str]]:
    """Runs every check and returns the results and the version of what ran."""
    import onnxruntime

    checks = list(_check_model(request))
    session = onnxruntime.InferenceSession(str(request.path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(names, inputs), strict=True))

    for case in request.cases:
        checks += measures.check_batches(case, run, request.batch_sizes)
    return checks, {"onnxruntime": onnxruntime.__version__}


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
    yield measures.size_check(size, request.parameter_bytes, share=1.0)
