"""Tests of keras_vit.training.sweep and .trials, and of `keras-vit train --learning-rate sweep`."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import image_files
import numpy as np
import pytest

from keras_vit import VisionTransformer, ViTConfig, training
from keras_vit.cli.main import main
from keras_vit.data import ImageData, load_folder
from keras_vit.training import Recipe, StepDone, Sweep, Trial, TrialDone, sweep_learning_rate

CONFIG = ViTConfig(
    input_shape=(16, 16, 3),
    patch_size=8,
    hidden_dim=8,
    mlp_dim=8,
    num_heads=1,
    num_layers=1,
    classes=2,
    classifier_activation=None,
    include_preprocessing=True,
)
RECIPE = Recipe(steps=4, batch_size=8, learning_rate=1e-3, average=0.9)


def made(losses: dict[float, float | None]) -> Sweep:
    trials = tuple(
        Trial(learning_rate=rate, validation_loss=loss, validation_accuracy=loss)
        for rate, loss in losses.items()
    )
    return Sweep(steps=10, trials=trials)


def test_the_lowest_validation_loss_is_chosen(tmp_path: Path) -> None:
    """Of equal ones the lowest rate; rates that diverged take no part, and one must not."""
    sweep = made({0.001: 0.5, 0.003: 0.3, 0.01: 0.3, 0.03: None})
    assert (sweep.learning_rate, sweep.is_at_edge) == (0.003, False)
    assert made({0.1: 0.2, 0.2: 0.3}).is_at_edge
    assert sweep.recipe(RECIPE).learning_rate == 0.003
    assert Sweep.from_dict(json.loads(json.dumps(sweep.to_dict()))) == sweep
    sweep.write(tmp_path)
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert [row["validation_loss"] for row in rows] == ["0.5", "0.3", "0.3", ""]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FloatingPointError, match=r"any learning rate of the sweep \(0.1, 1\)"):
        _ = made({0.1: None, 1.0: None}).learning_rate


def test_the_rates_are_those_of_the_paper_or_around_the_recipes() -> None:
    """Table 4 for its optimizer; impossible ones are named."""
    from keras_vit.training import RECIPES, sweep

    assert sweep._rates(RECIPES["finetune-pets"], None) == (0.001, 0.003, 0.01, 0.03)
    assert sweep._rates(RECIPES["scratch"], None) == (1e-4, 3e-4, 1e-3, 3e-3)
    assert sweep._rates(RECIPE, [0.1, 0.01, 0.1]) == (0.01, 0.1)
    for wrong in ([], [0.0], [float("nan")]):
        with pytest.raises(ValueError, match="rates must be numbers above 0"):
            sweep._rates(RECIPE, wrong)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    """Twenty images of two classes in memory."""
    folder = image_files.write_classes(tmp_path_factory.mktemp("images"))
    return image_files.in_memory(load_folder(folder), side=16)


@pytest.mark.full
def test_a_sweep_is_resumed_and_recorded(data: ImageData, tmp_path: Path) -> None:
    """Interrupted in its third trial; the two that are done are not repeated, the model is kept."""
    model = VisionTransformer(CONFIG)
    before = model.get_weights()
    arguments: dict[str, Any] = {"out": tmp_path / "run", "model": model, "recipe": RECIPE}
    arguments["share"] = 0.5
    rates = (1e-4, 1e-3, 1e-2)
    begun: list[Any] = []

    def listen(event: Any) -> None:
        begun.append(event)
        steps = [event for event in begun if isinstance(event, StepDone)]
        if isinstance(event, StepDone) and len(steps) == 5:
            raise KeyboardInterrupt

    with pytest.raises(training.TrainingInterrupted, match=r"Interrupted in the sweep .*--resume"):
        sweep_learning_rate(data, rates=rates, on_event=listen, **arguments)
    with pytest.raises(FileExistsError, match=r"unfinished sweep; resume it .*--resume"):
        sweep_learning_rate(data, rates=rates, **arguments)
    events: list[Any] = []
    arguments["existing"] = "resume"
    sweep = sweep_learning_rate(data, rates=rates, on_event=events.append, **arguments)
    assert len([event for event in events if isinstance(event, StepDone)]) == 1
    done = [event for event in events if isinstance(event, TrialDone)]
    assert [event.trial.learning_rate for event in done] == list(rates)
    assert [(event.number, event.count, event.steps) for event in done][2] == (3, 3, 2)
    for weights, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weights, old)

    del arguments["share"]
    arguments["recipe"] = sweep.recipe(RECIPE)
    trained = training.train(data, **arguments)
    assert trained.config["sweep"] == sweep.to_dict()
    names = {file.name for file in trained.path.iterdir()}
    assert {"sweep.png", "sweep.csv"} <= names
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    arguments["recipe"] = RECIPE
    assert sweep_learning_rate(data, **arguments) == sweep


@pytest.mark.full
def test_the_command_line_sweeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each trial and one for the choice; the run is resumed by the same command."""
    monkeypatch.setattr(sys.modules["keras_vit.training.sweep"], "FACTORS", (1.0, 3.0))
    image_files.write_classes(tmp_path / "images")
    command = ["train", "--data", str(tmp_path / "images"), "--out", str(tmp_path / "run")]
    command += ["--model", "digits", "--set", "num_layers=1", "--steps", "2", "--batch-size", "4"]
    command += ["--learning-rate", "sweep", "--balance"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    begun = lines.index("Sweep of the learning rate, 2 trainings of 1 step:")
    assert [line.split(":")[0] for line in lines[begun + 1 : begun + 3]] == [
        f"  {rate:g}" for rate in (1e-3, 3e-3)
    ]
    chosen = config["recipe"]["learning_rate"]
    assert lines[begun + 3].startswith(f"Learning rate {chosen:g}, of the lowest validation loss")
    assert config["recipe"]["balance"] is True
    assert main([*command, "--resume"]) == 0
    told = capsys.readouterr().out
    assert "nothing was left to do" in told
    assert "Epoch kept (*): 1, validation loss" in told
    assert main([*command[:-3], "--learning-rate", "0.5", "--balance", "--resume"]) == 1
    assert "learning_rate" in capsys.readouterr().err
