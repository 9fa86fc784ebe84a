"""Runs the command line in this process, and makes runs for it without a training."""

import contextlib
import dataclasses
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, made

from keras_vit.cli.main import main, make_parser
from keras_vit.training import RECIPES

# The smallest model that a training makes.
SMALL = ("--model", "digits", "--batch-size", "8", "--epochs", "2")
CONFIG = dataclasses.replace(
    TINY, input_shape=(16, 16, 3), num_layers=1, classes=2, include_preprocessing=True
)
FEATURES: dict[str, Any] = {"classes": None, "pooling": "avg", "class_token": False}


@pytest.fixture(name="nowhere", autouse=True)
def nowhere_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are in the cache, nor in the mirror; for the files that name it."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "no-mirror"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    errors: list[str]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def next(self) -> list[str]:
        """The words of the one line that names the next command, which the parser takes."""
        (line,) = [line for line in self.out.splitlines() if line.startswith("Next: ")]
        program, *words = shlex.split(line.removeprefix("Next: "))
        assert (program, self.out.splitlines()[-1]) == ("keras-vit", line)
        make_parser().parse_args(words)
        return words


def run(*argv: object, folder: Path | str = ".") -> Result:
    out, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = main([*map(str, argv)])
        except SystemExit as stopped:
            code = int(str(stopped.code))
    return Result(code, out.getvalue(), errors.getvalue().splitlines())


def done(*argv: object, folder: Path | str = ".") -> Result:
    """Runs a command that must end well."""
    result = run(*argv, folder=folder)
    assert result.code == 0, result.errors
    return result


def make_run(folder: Path, *, recipe: str = "scratch", settings: Any = (), **fields: Any) -> Path:
    """Makes the run of a model of `CONFIG`, with other fields or settings, without a training."""
    config = dataclasses.replace(CONFIG, **fields)
    folder.mkdir(parents=True)
    made(config).save(folder / "model.keras")
    written = {
        "model": config.to_dict(),
        "recipe": RECIPES[recipe].to_dict(),
        "data": {"source": "memory"},
        "labels": ["plain", "striped"],
    }
    (folder / "config.json").write_text(json.dumps(written | dict(settings)))
    return folder
