"""Trainings in processes of their own that are stopped, killed and resumed: the same bits."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import keras
import processes
import pytest
import training_rig

needs_strategies = pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="Replicas and workers are those of TensorFlow's strategies",
)
KILLS = int(os.environ.get("KERAS_VIT_TEST_KILLS", "3"))
STEPS = 8 * max(KILLS, 5)
Said = dict[str, list[str]]


def start_together(count: int, **case: Any) -> list[processes.Started]:
    environments = processes.cluster(count) if count > 1 else [None]
    return [training_rig.start(environment, **case) for environment in environments]


def train_together(count: int, **case: Any) -> list[dict[str, list[str]]]:
    return [training_rig.told(worker) for worker in start_together(count, **case)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("workers", "replicas"),
    [(1, 1), *(pytest.param(*each, marks=needs_strategies) for each in ((1, 2), (2, 1)))],
)
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


def wait_for(process: processes.Started, word: str, least: int) -> int:
    """Waits until the training says `word` with that number or more; -1 if it ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        spoken, _, number = line.partition(" ")
        if spoken == word and int(number) >= least:
            return int(number)
    return -1


def test_kill_9_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """Half of the kills fall into a save; each time it goes on from the last whole checkpoint.

    A save calls 9,500 functions, a step 3,800 or more.
    """
    whole = training_rig.run(out=str(tmp_path / "whole"), steps=STEPS)["done"]
    draws = random.Random(0)
    case: dict[str, Any] = {"out": str(tmp_path / "run"), "steps": STEPS, "checkpoint_steps": 2}
    saved = 0
    for number in range(KILLS):
        pause = ("step" if number % 2 else "saving", saved + 5, draws.randrange(9000))
        said = training_rig.kill(training_rig.start(**case, pause=pause))
        assert int(said.get("resumed", ["0"])[0]) >= saved
        saved = max(map(int, said.get("saved", [])), default=saved)
    remains = list((tmp_path / "run.unfinished").glob(".*"))
    ended = training_rig.run(**case)

    assert int(ended["resumed"][0]) >= saved
    assert ended["done"] == whole
    assert len({each.with_suffix("") for each in remains}) <= 1  # of the last kill alone


@pytest.mark.full
def test_kill_9_while_the_learning_rate_falls_loses_nothing(tmp_path: Path) -> None:
    """Once the patience has run out: the end stays where it is, and so does every bit."""
    planned = 10 * 19  # steps of ten epochs
    case: dict[str, Any] = {"steps": planned, "patience": 1, "learning_rate": 0.01}
    whole = training_rig.run(out=str(tmp_path / "whole"), **case)
    last = int(whole["step"][-1])
    assert whole["ends"][0] == str(planned)
    assert whole["ends"][-1] == str(last) != str(planned)
    out = str(tmp_path / "run")
    for before in (18, 5):
        training_rig.kill(training_rig.start(out=out, **case, pause=("step", last - before, 0)))
    ended = training_rig.run(out=out, **case)
    assert ended["ends"][-1] == str(last)
    assert ended["done"] == whole["done"]


def disturb(index: int, sent: signal.Signals, *, out: Path) -> tuple[int, Said, Said]:
    """Lets two workers begin or go on, and sends one of them a signal after ten steps.

    Returns where they began, and what the worker that met the signal and the other one said.
    """
    is_resumed = out.with_name(f"{out.name}.unfinished").exists()
    workers = start_together(2, out=str(out), steps=100_000)
    began = wait_for(workers[index], "resumed", 0) if is_resumed else 0
    assert wait_for(workers[index], "step", began + 10) >= 0
    workers[index].send_signal(sent)
    other = training_rig.told(workers[1 - index])
    assert other.get("resumed", ["0"]) == [str(began)]
    return began, training_rig.told(workers[index]), other


@pytest.mark.full
@needs_strategies
def test_workers_are_stopped_lost_and_started_again(tmp_path: Path) -> None:
    """One training in which signals meet either worker: each time both go on from one step.

    SIGTERM to one stops both at one step, with exit code 75. Where one is lost, the other names the
    fault and ends, and they go on from a checkpoint that both have.
    """
    begins: list[int] = []
    stops: list[tuple[int, signal.Signals]] = [
        (1, signal.SIGTERM), (0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGTERM)
    ]  # fmt: skip
    saved = 0
    for index, sent in stops:
        began, met, other = disturb(index, sent, out=tmp_path / "run")
        begins.append(began)
        assert other["code"] == ["75"]
        if sent == signal.SIGKILL:
            assert "Another worker was lost at step" in other["failed"][0]
        else:
            assert met["code"] == ["75"]
            assert met["saved"][-1] == other["saved"][-1]
            saved = saved or int(met["saved"][-1])

    assert begins[0] == 0
    assert saved == begins[1] < begins[2] < begins[3]
