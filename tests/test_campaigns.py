"""Tests of campaigns: the oracle tells every way apart, and a repeated case is the same."""

from pathlib import Path

import numpy as np
import pytest
from campaign_rig import WAYS, Campaign

from campaigns import mutations, oracle, runner

CONTENT = bytes(range(256)) * 20


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("crashed", "hung")])
def test_the_oracle_tells_the_ways_apart(tmp_path: Path, way: str) -> None:
    assert oracle.judge(Campaign(tmp_path).made(way)).kind == way


@pytest.mark.parametrize(
    ("text", "enough"),
    [
        ("lost.npz is cut off; fetch it again", True),
        ("an array is cut off", False),
        ("lost.npz " + "x" * oracle.LONGEST, False),
        ("lost.npz: use allow_pickle", False),
        ("lost.npz \x1b[2J", False),
    ],
)
def test_what_an_error_must_say(text: str, enough: bool) -> None:
    assert oracle.says_enough(text, ("lost.npz",)) == enough


@pytest.mark.full
def test_crashed_and_hung_processes_are_counted_with_their_case() -> None:
    outcome = runner.run("campaign_rig", count=16, seed=96)  # of those that draw every way, short
    drawn = [WAYS[int(np.random.default_rng([96, i]).integers(len(WAYS)))] for i in range(16)]
    assert {way: outcome.counts[way] for way in WAYS} == {w: drawn.count(w) for w in WAYS}
    assert set(drawn) == set(WAYS)


def test_a_seed_repeats_a_mutation() -> None:
    one, other = (mutations.mutate(CONTENT, np.random.default_rng([5, 7])) for _ in range(2))
    assert one == other
    changed = [mutations.mutate(CONTENT, np.random.default_rng(i))[0] for i in range(200)]
    assert len(set(changed)) > 150
