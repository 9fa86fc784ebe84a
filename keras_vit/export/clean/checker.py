"""Checks one artefact on the disk and writes the report."""

from pathlib import Path

from . import onnx_checks, savedmodel_checks, tflite_checks
from . import request as requests

_CHECKS = {"savedmodel": savedmodel_checks.check, "onnx": onnx_checks.check}


def run(folder: Path) -> None:
    """Reads the request in a folder, checks what it names, writes the report beside it."""
    request = requests.read_request(folder)
    checks, runtime = _CHECKS.get(request.format, tflite_checks.check)(request)
    requests.write_report(folder, checks, runtime)
