"""Trainings in processes of their own that are stopped, killed and resumed: the same bits."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import processes
import pytest
import training_rig

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("KERAS_VIT_TEST_KILLS", "6"))


def start_together(count: int, **case: Any) -> list["subprocess.Popen[str]"]:
    environments = processes.cluster(count) if count > 1 else [None]
    return [training_rig.start(environment, **case) for environment in environments]


def train_together(count: int, **case: Any) -> list[dict[str, list[str]]]:
    return [training_rig.told(worker) for worker in start_together(count, **case)]


@pytest.mark.parametrize(("workers", "replicas"), [(1, 1), (1, 2), (2, 1)])
def test_a_stopped_run_ends_with_the_same_bits(workers: int, replicas: int, tmp_path: Path) -> None:
    """Dropout, augmentation, AdamW, averaging, cosine; stopped between checkpoints as well."""
    case = {"replicas": replicas}
    undisturbed = start_together(workers, out=str(tmp_path / "whole"), **case)
    for stop in (3, 30):
        stopped = train_together(workers, out=str(tmp_path / "run"), stop_at=stop, **case)
        assert [said["code"] for said in stopped] == [["130"]] * workers
    resumed = train_together(workers, out=str(tmp_path / "run"), **case)
    whole = [training_rig.told(worker) for worker in undisturbed]

    assert {said["resumed"][0] for said in resumed} == {"30"}
    assert {said["done"][0] for said in resumed} == {said["done"][0] for said in whole}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "whole"]


def wait_for(
    process: "subprocess.Popen[str]", word: str, least: int, said: list[str] | None = None
) -> int:
    """Waits until the training says `word` with that number or more; -1 if it ends before.

    `said` collects all lines on the way.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if said is not None:
            said.append(line)
        spoken, _, number = line.partition(" ")
        if spoken == word and int(number) >= least:
            return int(number)
    return -1


def test_kill_9_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """Half of the kills fall into a save; each time it goes on from the last whole checkpoint."""
    draws = random.Random(0)
    case: dict[str, Any] = {"out": str(tmp_path / "run"), "steps": 8 * KILLS, "checkpoint_steps": 2}
    undisturbed = training_rig.start(**{**case, "out": str(tmp_path / "whole")})
    saved = 0
    for number in range(KILLS):
        process = training_rig.start(**case)
        if number:
            assert wait_for(process, "resumed", 0) >= saved
        in_save = number % 2 == 0
        said: list[str] = []
        reached = wait_for(process, "saving" if in_save else "step", saved + 5, said)
        time.sleep(draws.uniform(0, 0.004 if in_save else 0.05))
        process.send_signal(signal.SIGKILL)
        rest = training_rig.told(process).get("saved", [])
        assert reached >= 0
        before = [line.split()[1] for line in said if line.startswith("saved ")]
        saved = max(map(int, [*before, *rest]), default=saved)
    remains = list((tmp_path / "run.unfinished").glob(".*"))
    ended = training_rig.run(**case)
    whole = training_rig.told(undisturbed)

    assert int(ended["resumed"][0]) >= saved
    assert ended["done"] == whole["done"]
    assert len(remains) <= 1  # of the last kill alone


def test_sigterm_to_one_worker_stops_both_at_one_step(tmp_path: Path) -> None:
    """Both save the same step, exit with 75, and go on from there."""
    case: dict[str, Any] = {"out": str(tmp_path / "run"), "steps": 100_000}
    workers = start_together(2, **case)
    assert wait_for(workers[1], "step", 10) >= 0
    workers[1].send_signal(signal.SIGTERM)
    said = [training_rig.told(worker) for worker in workers]
    resumed = train_together(2, **case, stop_at=int(said[0]["saved"][-1]) + 2)

    assert [words["code"] for words in said] == [["75"], ["75"]]
    assert said[0]["saved"][-1] == said[1]["saved"][-1]
    assert [words["resumed"] for words in resumed] == [[said[0]["saved"][-1]]] * 2


@pytest.mark.parametrize("killed", [0, 1])
def test_the_loss_of_a_worker_is_told(killed: int, tmp_path: Path) -> None:
    """The other one names the fault and ends; both together go on from a common checkpoint."""
    case: dict[str, Any] = {"out": str(tmp_path / "run"), "steps": 100_000}
    workers = start_together(2, **case)
    assert wait_for(workers[killed], "step", 10) >= 0
    workers[killed].send_signal(signal.SIGKILL)
    left = training_rig.told(workers[1 - killed], seconds=60)
    training_rig.told(workers[killed])
    resumed = train_together(2, **case, stop_at=20)

    assert left["code"] == ["75"]
    assert "Another worker was lost at step" in left["failed"][0]
    assert {words["resumed"][0] for words in resumed} <= {str(step) for step in range(7, 20)}
    assert resumed[0]["resumed"] == resumed[1]["resumed"]
