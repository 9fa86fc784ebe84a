"""Tests of keras_vit.cli.evaluate."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY

from keras_vit import evaluation
from keras_vit.cli.main import main
from keras_vit.data import load_digits
from keras_vit.training import RECIPES, Run, train

CONFIG = dataclasses.replace(
    TINY, input_shape=(8, 8, 3), patch_size=4, num_layers=1, classes=10, include_preprocessing=True
)


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits, trained for one epoch."""
    out = tmp_path_factory.mktemp("measures") / "run"
    recipe = dataclasses.replace(RECIPES["digits"], epochs=1, batch_size=64)
    train(load_digits(), out=out, model=CONFIG, recipe=recipe)
    return out


def test_more_is_what_the_functions_say(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON holds the numbers of keras_vit.evaluation, and the picture is drawn to --out."""
    assert main(["evaluate", str(run), "--more", "--json", "--out", str(tmp_path)]) == 0
    actual = json.loads(capsys.readouterr().out.splitlines()[-1])
    model, data = Run.load(run).model, load_digits()
    probabilities = np.exp(evaluation.log_probabilities(model, data.test))
    expected = evaluation.calibration(probabilities, data.test.targets).error
    assert actual["calibration_error"] == pytest.approx(expected, abs=1e-6)
    expected = evaluation.nearest_neighbors(model, train=data.train, test=data.test)
    assert actual["nearest_neighbors"] == pytest.approx(expected, abs=1e-9)
    results = evaluation.few_shot(model, train=data.train, test=data.test)
    assert [each["accuracies"] for each in actual["few_shot"]] == [
        list(result.accuracies) for result in results
    ]
    assert len(actual["mistakes"]) == 16
    assert (tmp_path / "mistakes.png").stat().st_size > 5000


def test_people_get_sentences(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json each measure is a line; without --more there are none."""
    assert main(["evaluate", str(run), "--more"]) == 0
    said = capsys.readouterr().out
    for text in ("Expected calibration error: ", "25 labelled images", "taken for", "neighbours"):
        assert text in said
    assert main(["evaluate", str(run)]) == 0
    assert "calibration" not in capsys.readouterr().out


def test_real_labels_go_by_the_names_of_the_images(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each image's own class gives the accuracy itself; another order of the file another one."""
    data = load_digits()
    places = sorted(range(len(data.test)), key=lambda place: data.test.name(place))
    labels = [[int(data.test.targets[place])] for place in places]
    actual = []
    for name, rows in (("right.json", labels), ("wrong.json", labels[::-1])):
        (tmp_path / name).write_text(json.dumps(rows))
        assert main(["evaluate", str(run), "--json", "--real", str(tmp_path / name)]) == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        actual.append(events[-1]["accuracy"])
    test = evaluation.evaluate(Run.load(run).model, data.test, labels=data.labels)
    assert actual[0] == pytest.approx(test.accuracy)
    assert actual[1] < actual[0]
    (tmp_path / "short.json").write_text("[[1]]")
    assert main(["evaluate", str(run), "--real", str(tmp_path / "short.json")]) == 1
    assert "and 1 sets" in capsys.readouterr().err
