"""Tests of campaigns: every way that a case ends is told apart; disturbed files are old or new."""

import json
from pathlib import Path

import numpy as np
import processes
import pytest
from campaign_rig import WAYS, Campaign

from campaigns import disk, mutations, oracle, runner

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


def test_the_oracle_tells_the_ways_apart(tmp_path: Path) -> None:
    ways = [way for way in WAYS if way not in ("crashed", "hung")]
    assert [oracle.judge(Campaign(tmp_path).made(way)).kind for way in ways] == ways
    for text, is_enough in (
        ("lost.npz is cut off; fetch it again", True),
        ("an array is cut off", False),
        ("lost.npz " + "x" * oracle.LONGEST, False),
        ("lost.npz: use allow_pickle", False),
        ("lost.npz \x1b[2J", False),
    ):
        assert oracle.says_enough(text, ("lost.npz",)) == is_enough, text


@pytest.mark.full
def test_crashed_and_hung_processes_are_counted_with_their_case() -> None:
    outcome = runner.run("campaign_rig", count=16, seed=96)  # of those that draw every way, short
    drawn = [WAYS[int(np.random.default_rng([96, i]).integers(len(WAYS)))] for i in range(16)]
    assert {way: outcome.counts[way] for way in WAYS} == {w: drawn.count(w) for w in WAYS}
    assert set(drawn) == set(WAYS)


def test_a_seed_repeats_a_mutation() -> None:
    content = bytes(range(256)) * 20
    one, other = (mutations.mutate(content, np.random.default_rng([5, 7])) for _ in range(2))
    assert one == other
    changed = [mutations.mutate(content, np.random.default_rng(i))[0] for i in range(200)]
    assert len(set(changed)) > 150


def judged(folder: Path, cases: str, *, before: str = "") -> list[list[str]]:
    """What became of the cases that an expression gives, after some code: kind, what, message."""
    root = str(Path(disk.__file__).parents[1])
    ended = processes.python("-c", SCRIPT, folder, cases, before, PYTHONPATH=root)
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.full
@pytest.mark.parametrize(
    ("cases", "least"), [("drawn_cases", 36), ("every_case", 600), ("training_cases", 3)]
)
def test_disturbed_files_are_old_or_new(cases: str, least: int, tmp_path: Path) -> None:
    """Three dozen of the campaign's cases; each operation of each task; and of trainings."""
    verdicts = judged(tmp_path, f"disk.{cases}(campaign)")
    assert len(verdicts) >= least
    assert [verdict for verdict in verdicts if verdict[0] != "same"] == []


@pytest.mark.full
def test_the_campaign_sees_harm(tmp_path: Path) -> None:
    """A file that is written in place is found half-written, and a raw error unclear."""
    in_place = 'disk._File.work = lambda self: self.path.write_text("new" * disk._SIZE)'
    troubles = '(disk._Trouble("error", 1, errno.EIO), disk._Trouble("size", 100))'
    cases = f"(campaign.small(disk._File, trouble) for trouble in {troubles})"
    assert [kind for kind, *_ in judged(tmp_path, cases, before=in_place)] == ["unclear"] * 2
