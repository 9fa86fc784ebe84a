"""Every way to train gives on replicas, and on two workers, what it gives on one device."""

from typing import Any

import numpy as np
import processes
import pytest
import training_ways
from conftest import assert_same_steps

# Of these `.ci/run` trains a few: each kind of model, a last batch of one image, an own step.
FEW = ["fit", "wrapper", "lora", "uneven", "weighted_train_step"]
EVERY = list(training_ways.WAYS)
# On four replicas, and on workers, all of whose code the others run too.
SOME = [
    *FEW,
    *("original", "original_xla", "original_in_parts", "train_step", "compute_loss", "own_loop"),
    *("distilled", "weighted"),
]
# Ways whose losses are those of another way.
SAME = {
    **dict.fromkeys(("original_xla", "original_in_parts", "original_recomputed"), "original"),
    **dict.fromkeys(("train_step", "own_loop", "compute_loss_of_ops"), "fit"),
    **{"compute_loss_of_object": "fit", "wrapper_in_parts": "wrapper"},
    **{name: name.removesuffix("_in_parts") for name in ("uneven_in_parts", "weighted_in_parts")},
    "ignored_in_parts": "ignored",
}
Results = dict[str, dict[str, Any]]


def trained(ways: dict[int, list[str]], *, by_workers: list[str]) -> dict[str, Results]:
    """What ways give on so many devices of a process, by their number, and on two workers."""
    groups = {str(n): [training_ways.start(each, replicas=n)] for n, each in ways.items()}
    for index, environment in enumerate(processes.cluster(2)):
        groups[f"worker {index}"] = [training_ways.start(by_workers, environment=environment)]
    with processes.Together(groups) as together:
        return {name: together.results(name)[0] for name in groups}


def assert_same(found: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    """What is logged, and weights, all of order 1; the steps of the original closer."""
    for kind in expected["logs"]:
        actual, wanted = found["logs"][kind], expected["logs"][kind]
        if "original" in name and "accuracy" in kind:  # rounding may decide one image of 16
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=0.07, err_msg=f"{name}: {kind}")
        elif "float16" in name:
            np.testing.assert_allclose(actual[:4], wanted[:4], rtol=2e-3, err_msg=f"{name}: {kind}")
            np.testing.assert_allclose(actual, wanted, rtol=0.06, err_msg=f"{name}: {kind}")
        elif "original" in name:
            assert_same_steps(actual, wanted, f"{name}: {kind}")
        else:
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-4, err_msg=f"{name}: {kind}")
    limit = 2e-2 if "float16" in name else 1e-3 if "original" in name else 1e-4
    np.testing.assert_allclose(
        found["weights"], expected["weights"], rtol=0, atol=limit, err_msg=name
    )


def assert_one_training(results: dict[str, Results]) -> None:
    """Each training is that of one device; its replicas, and the workers, have equal bits."""
    for name, ways in results.items():
        for way, found in ways.items():
            assert_same(found, results["1"][way], f"{way} on {name}")
            assert len(found["replicas"]) == (int(name) if name.isdigit() else 1)
            assert len(set(found["replicas"])) == 1, way
    first, second = (results[f"worker {index}"] for index in range(2))
    for way in first:
        assert first[way]["replicas"] == second[way]["replicas"], way


def test_a_few_ways_train_on_replicas_and_workers_as_on_one_device() -> None:
    assert_one_training(trained({1: FEW, 2: FEW}, by_workers=FEW))


@pytest.mark.full
def test_every_way_trains_on_replicas_as_on_one_device() -> None:
    """Other losses, steps, optimizers and kinds of data, in parts too, and four replicas.

    Each trains something else, so that equal losses say something; parts, XLA, recomputed blocks
    and loops that are written otherwise change nothing.
    """
    results = trained({1: EVERY, 2: EVERY, 4: SOME}, by_workers=SOME)
    assert_one_training(results)
    alone = results["1"]
    for way, other in SAME.items():
        if "original" in way:
            assert_same(alone[way], alone[other], way)
        else:
            losses, expected = (alone[name]["logs"]["loss"][0] for name in (way, other))
            assert losses == pytest.approx(expected, abs=1e-4), way
    different = [way for way in EVERY if way not in SAME and "float16" not in way]
    seen = {
        way: np.array([logs["loss"][0], logs.get("val_loss", logs["loss"])[0]])
        for way, logs in ((way, alone[way]["logs"]) for way in different)
    }
    for place, way in enumerate(different):
        for other in different[:place]:
            assert np.abs(seen[way] - seen[other]).max() > 1e-3, (way, other)


@pytest.mark.full
@pytest.mark.parametrize("second", [(16, 2), (8, 4)], ids=["another model", "other devices"])
def test_a_second_strategy_of_a_process_gets_one_sentence(second: tuple[int, int]) -> None:
    """What to do is said, where TensorFlow speaks of shapes and groups; the first trains."""
    process = training_ways.start_strategies([(8, 2), second])
    output, errors = process.communicate(timeout=300)

    assert output == "trained\n"
    assert "ValueError: The sums over replicas do not fit together." in errors
    assert "make one strategy for all its models" in errors
