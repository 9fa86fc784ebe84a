"""Checks one artefact on the disk and writes the report."""

from pathlib import Path

from . import request as requests
from . import savedmodel_checks


def run(folder: Path) -> None:
    """Reads the request in a folder, checks what it names, writes the report beside it."""
    request = requests.read_request(folder)
    checks, runtime = savedmodel_checks.check(request)
    requests.write_report(folder, checks, runtime)
