"""Disturbed at any operation on files, what is written is old or new, and a second try succeeds."""

import errno
from pathlib import Path

import numpy as np
import pytest

from campaigns import disk, oracle

TRAININGS = [
    disk._Trouble("kill", 40),
    disk._Trouble("full", 100, errno.EROFS),
    disk._Trouble("two", 1),
]


def test_drawn_troubles_do_no_harm(tmp_path: Path) -> None:
    """Three dozen of the campaign's cases."""
    campaign = disk.Campaign(tmp_path)
    for index in range(36):
        task = (disk._File, disk._Folder, disk._Export, disk._Run)[index % 4]
        drawn = disk._draw(np.random.default_rng(index), operations=30, size=disk._SIZE)
        verdict = oracle.judge(campaign.small(task, drawn))
        assert verdict.kind == "same", verdict


@pytest.mark.slow
def test_no_operation_on_files_may_fail_harmfully(tmp_path: Path) -> None:
    """Each one of each task: killed there, failing once, failing from there on."""
    verdicts = [oracle.judge(case) for case in disk.every_case(disk.Campaign(tmp_path))]
    assert [verdict for verdict in verdicts if verdict.kind != "same"] == []
    assert len(verdicts) > 800


@pytest.mark.slow
def test_a_disturbed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Killed, on a disk that becomes read-only, and beside another one of the same place."""
    campaign = disk.Campaign(tmp_path)
    for trouble in TRAININGS:
        verdict = oracle.judge(campaign.training(trouble))
        assert verdict.kind == "same", verdict


def test_the_campaign_sees_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is written in place is found half-written, and a raw error unclear."""

    def in_place(self: disk._File) -> None:
        with self.path.open("w") as file:
            file.write("new" * disk._SIZE)

    monkeypatch.setattr(disk._File, "work", in_place)
    campaign = disk.Campaign(tmp_path)
    for trouble in (disk._Trouble("error", 1, errno.EIO), disk._Trouble("size", 100)):
        assert oracle.judge(campaign.small(disk._File, trouble)).kind == "unclear"
