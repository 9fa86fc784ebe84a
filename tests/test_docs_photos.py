"""Tests of docs/photos.md: its transcript is what the commands print, on real photos, in small."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import keras_vit

ROOT = Path(keras_vit.__file__).parents[1]
DOCUMENT = ROOT / "docs" / "photos.md"
# In small: what is added to commands that would take minutes.
SMALL = {"keras-vit train": "--epochs 2", "python": "--count 20"}
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are not installed"),
]


def steps() -> Iterator[tuple[str, list[str]]]:
    """Yields each command of the transcript, with the lines that it prints."""
    for block in re.findall(r"```console\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.replace("\\\n", "").rstrip().split("\n")
            yield command, lines


def masked(line: str) -> str:
    """Returns a line with # for each number, and one space for several."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(?:[.,:]\d+)*", "#", line)).strip()


def mismatch(expected: list[str], printed: list[str]) -> str | None:
    """Returns the first expected line that was not printed in its place.

    A line `...` stands for any lines, and `…` for a part of one.
    """
    parts = {
        line: r"(?:.*\n)*"
        if line.strip() == "..."
        else re.escape(masked(line)).replace("…", ".*") + r"\n"
        for line in expected
    }
    pattern = "".join(parts[line] for line in expected)
    text = "".join(f"{masked(line)}\n" for line in printed)
    if re.fullmatch(pattern, text):
        return None
    missing = [line for line, part in parts.items() if not re.search(f"^{part}", text, re.M)]
    return missing[0] if missing else "(a line more, or in another order)"


def small(command: str) -> str:
    added = (value for start, value in SMALL.items() if command.startswith(start))
    return " ".join([command, *added])


def serve(command: list[str], folder: Path) -> list[str]:
    """Runs a command that serves a page until Ctrl-C, and opens the page."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    printed: list[str] = []
    for line in process.stdout:
        printed.append(line.rstrip("\n"))
        if address := _ADDRESS.search(line):
            with urllib.request.urlopen(address[0], timeout=60) as answer:  # noqa: S310 - on this machine
                assert b"<html" in answer.read().lower()
            process.send_signal(signal.SIGINT)
            break
    deadline = time.monotonic() + 60
    printed += [line.rstrip("\n") for line in process.stdout]
    process.wait(timeout=max(deadline - time.monotonic(), 1))
    process.stdout.close()
    return printed


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts this environment's commands first, without colours or a terminal's width."""
    folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", folder + os.pathsep + os.environ["PATH"])
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)  # the command sets it
    # Published weights cannot be reached, on a machine with a network either.
    monkeypatch.setenv("KERAS_VIT_MIRROR", "nowhere")


def test_the_transcript_is_what_is_printed(tmp_path: Path) -> None:
    """Every line stands where it is printed; numbers may differ."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = []
    for command, expected in steps():
        arguments = shlex.split(small(command))
        if arguments[:2] == ["keras-vit", "demo"]:
            printed = serve(arguments, tmp_path)
        else:
            done = subprocess.run(
                arguments, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
            )
            assert not done.returncode, f"{command}\n{done.stdout}{done.stderr}"
            printed = (done.stdout + done.stderr).splitlines()
        assert mismatch(expected, printed) is None, f"{command}\n" + "\n".join(printed)
        commands.append(arguments[1])
    assert {"train", "predict", "evaluate", "explain", "export", "demo", "compare"} <= {*commands}


def test_a_line_that_is_not_printed_is_found() -> None:
    """The comparison can fail: on other words, a line more, and another order."""
    assert mismatch(["a 1.5", "...", "b"], ["a 2", "x", "y", "b"]) is None
    assert mismatch(["a 1", "b"], ["a 1", "c"]) == "b"
    assert mismatch(["a … c"], ["a b c"]) is None
    assert mismatch(["a"], ["a", "b"]) == "(a line more, or in another order)"
    assert mismatch(["a", "b"], ["b", "a"]) == "(a line more, or in another order)"
