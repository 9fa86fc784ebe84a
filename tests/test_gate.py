"""Tests of .ci/gate.py: what fails twice is red, what fails once is named, nothing is left out."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("gate", ROOT / ".ci" / "gate.py")
assert spec is not None
assert spec.loader is not None
gate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gate)

MIXED = """
import pathlib, pytest
def test_passes(): pass
def test_fails(): assert 1 + 1 == 3
@pytest.mark.parametrize("seen", ["once - only"])
def test_fails_once(seen):
    said = pathlib.Path(__file__).with_name("seen")
    if not said.exists():
        said.write_text("")
        raise ValueError("the first time")
"""
MANY = """
import pathlib, pytest
@pytest.mark.parametrize("number", range(9))
def test_fails(number):
    with pathlib.Path(__file__).with_name("runs").open("a") as runs: runs.write("x")
    raise ValueError
"""


def outcome(content: str, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    (folder / "test_it.py").write_text(content)
    patch.setattr(gate, "ROOT", folder)
    light = ("-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:anyio")
    return gate.run_tests(gate.Tests(light))


def test_what_fails_twice_is_red_and_what_fails_once_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcome(MIXED, tmp_path, monkeypatch)
    (failed,), (flaky,) = found.failed, found.flaky

    assert "test_it.py::test_fails - assert" in failed
    assert "test_it.py::test_fails_once[once - only] - ValueError: the first time" in flaky


def test_many_failures_are_red_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(MANY, tmp_path, monkeypatch)

    assert len(found.failed) == gate.MOST_FAILURES + 1
    assert (tmp_path / "runs").read_text() == "x" * (gate.MOST_FAILURES + 1)


@pytest.mark.parametrize("content", ["import nothing_of_the_kind", ""], ids=repr)
def test_tests_that_do_not_run_are_red(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot be collected, or there are none."""
    found = outcome(content, tmp_path, monkeypatch)

    assert "pytest: exit code" in found.failed[0]
    assert not found.flaky


def test_a_command_and_a_part_that_fail_are_red(capsys: pytest.CaptureFixture[str]) -> None:
    """All steps run; the last lines say the processor, the times and what failed."""
    steps = (gate.python("-c", "exit(3)"), gate.python("-c", "print('after')"))
    found = gate.run_part("some", steps)
    assert "exit code 3" in found.failed[0]
    assert gate.summarize({"some": found, "other": gate.Outcome()}) == 1
    said = capsys.readouterr().out
    assert "\nafter\n" in said
    assert "cores of" in said
    assert "FAILED" in said.splitlines()[-1]
    assert gate.summarize({"other": gate.Outcome(flaky=("one",))}) == 0


def test_the_parts_are_of_files_that_exist() -> None:
    """README's own command is the gate's, and every file of tests is in a part of the rest."""
    (step,) = gate.gate()["tests"]
    assert step.arguments == ("-n", "2", "--dist", "worksteal")
    named = {
        word
        for steps in gate.full().values()
        for step in steps
        for word in vars(step).get("arguments", ())
    }
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py")} <= named
