"""Disturbed at any operation on files, what is written is old or new, and a second try succeeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns import disk

# A process of its own: one in which TensorFlow has computed something cannot be forked.
SCRIPT = """
import errno, json, sys
from pathlib import Path
from campaigns import disk, oracle
campaign = disk.Campaign(Path(sys.argv[1]))
exec(sys.argv[3])
for case in eval(sys.argv[2]):
    verdict = oracle.judge(case)
    print(json.dumps([verdict.kind, verdict.what, verdict.message]))
"""


def judged(folder: Path, cases: str, *, before: str = "") -> list[list[str]]:
    """What became of the cases that an expression gives, after some code: kind, what, message."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, cases, before],
        env={**os.environ, "PYTHONPATH": str(Path(disk.__file__).parents[1])},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return [json.loads(line) for line in ended.stdout.splitlines()]


def harmful(verdicts: list[list[str]]) -> list[list[str]]:
    return [verdict for verdict in verdicts if verdict[0] != "same"]


@pytest.mark.full
def test_drawn_troubles_do_no_harm(tmp_path: Path) -> None:
    """Three dozen of the campaign's cases."""
    verdicts = judged(tmp_path, "disk.drawn_cases(campaign)")
    assert len(verdicts) == 36
    assert harmful(verdicts) == []


@pytest.mark.full
def test_no_operation_on_files_may_fail_harmfully(tmp_path: Path) -> None:
    """Each one of each task: killed there, failing once, failing from there on."""
    verdicts = judged(tmp_path, "disk.every_case(campaign)")
    assert len(verdicts) > 600
    assert harmful(verdicts) == []


@pytest.mark.full
def test_a_disturbed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Killed, on a disk that becomes read-only, and beside another one of the same place."""
    verdicts = judged(tmp_path, "disk.training_cases(campaign)")
    assert len(verdicts) == 3
    assert harmful(verdicts) == []


@pytest.mark.full
def test_the_campaign_sees_harm(tmp_path: Path) -> None:
    """A file that is written in place is found half-written, and a raw error unclear."""
    in_place = 'disk._File.work = lambda self: self.path.write_text("new" * disk._SIZE)'
    troubles = '(disk._Trouble("error", 1, errno.EIO), disk._Trouble("size", 100))'
    cases = f"(campaign.small(disk._File, trouble) for trouble in {troubles})"
    assert [kind for kind, *_ in judged(tmp_path, cases, before=in_place)] == ["unclear"] * 2
