"""Every way to train gives on replicas, and on two workers, what it gives on one device."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import processes
import pytest
import training_ways

TWELVE = [
    "fit",
    "train_step",
    "compute_loss",
    "own_loop",
    "wrapper",
    "sequential",
    "frozen",
    "cloned",
    "distilled",
    "lora",
    "uneven",
    "weighted",
]
# Of these `.ci/run` trains a few: each kind of model, and a last batch of one image.
FEW = ["fit", "wrapper", "lora", "uneven"]
# The same in parts, other losses and optimizers, and losses that Keras divides otherwise.
OTHERS = [name for name in training_ways.WAYS if name not in TWELVE]


@pytest.fixture(scope="module")
def trainings() -> Iterator[processes.Together]:
    every, clusters = [*TWELVE, *OTHERS], processes.cluster(2)
    groups = {
        "one": [training_ways.start(every)],
        "two": [training_ways.start(every, replicas=2)],
        "four": [training_ways.start(TWELVE, replicas=4)],
        "workers": [training_ways.start(TWELVE, environment=each) for each in clusters],
    }
    with processes.Together(groups) as together:
        yield together


def assert_same(found: dict[str, Any], expected: dict[str, Any], ways: list[str]) -> None:
    """Losses, those of validation, and weights, all of order 1; replicas to the bit."""
    for way in ways:
        for kind in ("losses", "validation", "weights"):
            np.testing.assert_allclose(
                found[way][kind], expected[way][kind], rtol=0, atol=1e-4, err_msg=f"{way}: {kind}"
            )
        assert len(set(found[way]["replicas"])) == 1, way


def test_a_few_ways_train_on_replicas_and_workers_as_on_one_device() -> None:
    """Each process trains all of them; the replicas of each end with equal bits."""
    workers = [training_ways.start(FEW, environment=each) for each in processes.cluster(2)]
    groups = {
        "one": [training_ways.start(FEW)],
        "two": [training_ways.start(FEW, replicas=2)],
        "workers": workers,
    }
    with processes.Together(groups) as together:
        (expected,), (two,) = together.results("one"), together.results("two")
        first, second = together.results("workers")
    for found in (two, first, second):
        assert_same(found, expected, FEW)
    assert {len(two[way]["replicas"]) for way in FEW} == {2}
    assert all(first[way]["replicas"] == second[way]["replicas"] for way in FEW)


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "replicas", "ways"),
    [("two", 2, [*TWELVE, *OTHERS]), ("four", 4, TWELVE)],
    ids=["two", "four"],
)
def test_replicas_train_as_one_device(
    devices: str, replicas: int, ways: list[str], trainings: processes.Together
) -> None:
    """A last batch of one image leaves all other replicas without any."""
    (expected,), (found,) = trainings.results("one"), trainings.results(devices)

    assert_same(found, expected, ways)
    assert {len(found[way]["replicas"]) for way in ways} == {replicas}


@pytest.mark.full
def test_two_workers_train_as_one_device(trainings: processes.Together) -> None:
    """Two processes on loopback, and equal bits on both."""
    (expected,), (first, second) = trainings.results("one"), trainings.results("workers")

    assert_same(first, expected, TWELVE)
    for way in TWELVE:
        assert first[way]["replicas"] == second[way]["replicas"], way


@pytest.mark.full
def test_the_ways_differ(trainings: processes.Together) -> None:
    """Each trains something else, so that equal losses say something; parts change nothing."""
    same = {
        "train_step": "fit",
        "own_loop": "fit",
        "cloned": "fit",
        "compute_loss_of_ops": "fit",
        "compute_loss_of_object": "fit",
        "uneven_accumulated": "uneven",
        "weighted_accumulated": "weighted",
        "ignored_accumulated": "ignored",
    }
    (found,) = trainings.results("one")
    losses = {way: found[way]["losses"][:1] for way in training_ways.WAYS}
    seen = {way: [*losses[way], *found[way]["validation"][:1]] for way in losses}
    for way, other in same.items():
        np.testing.assert_allclose(losses[way], losses[other], rtol=0, atol=1e-4, err_msg=way)
    different = [way for way in seen if way not in same]
    for place, way in enumerate(different):
        for other in different[:place]:
            both = list(zip(seen[way], seen[other], strict=False))
            assert np.abs(np.subtract(*zip(*both, strict=True))).max() > 1e-3, (way, other)
