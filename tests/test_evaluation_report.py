"""Tests of keras_vit.evaluation.report."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from keras_vit.evaluation import Evaluation, plot_confusion, write_report


def evaluation(classes: int, *, labels: tuple[str, ...] | None = None) -> Evaluation:
    confusion = np.random.default_rng(0).integers(0, 3, (classes, classes)) + np.eye(
        classes, dtype=int
    )
    return Evaluation(
        labels=labels or tuple(f"class {place}" for place in range(classes)),
        confusion=confusion,
        loss=0.5,
        top5_accuracy=None,
    )


def test_the_report_is_numbers_and_a_picture(tmp_path: Path) -> None:
    """metrics.json holds every split, and there is nothing but the two files."""
    actual = {"validation": evaluation(2), "test": evaluation(3)}
    write_report(tmp_path, actual)
    written = json.loads((tmp_path / "metrics.json").read_text())

    assert written == {name: one.to_dict() for name, one in actual.items()}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["confusion.png", "metrics.json"]


def test_without_test_images_another_split_is_drawn(tmp_path: Path) -> None:
    """Of no split at all there is no report."""
    write_report(tmp_path, {"validation": evaluation(2)})
    assert list(json.loads((tmp_path / "metrics.json").read_text())) == ["validation"]
    assert (tmp_path / "confusion.png").is_file()
    with pytest.raises(ValueError, match="needs the evaluation of a split"):
        write_report(tmp_path, {})


@pytest.mark.parametrize("classes", [2, 20, 100, 150])
def test_a_confusion_of_any_size_is_drawn(tmp_path: Path, classes: int) -> None:
    """From two to very many classes the picture has ink and a size that can be opened."""
    plot_confusion(evaluation(classes), tmp_path / "confusion.png")
    image = Image.open(tmp_path / "confusion.png").convert("L")

    assert 500 < image.width < 2500
    assert np.asarray(image).min() < 100


def test_labels_are_not_read_as_formulas(tmp_path: Path) -> None:
    """A class called "$x_$" or one of eighty letters is a name like others."""
    labels = ("$x_$", "a" * 80)
    plot_confusion(evaluation(2, labels=labels), tmp_path / "confusion.png")

    assert (tmp_path / "confusion.png").stat().st_size > 1000


def test_a_failure_keeps_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while drawing leaves what was there, and no temporary file."""
    (tmp_path / "confusion.png").write_text("old")
    monkeypatch.setattr("keras_vit.evaluation.report._number_cells", None)

    with pytest.raises(TypeError):
        write_report(tmp_path, {"test": evaluation(3)})

    assert (tmp_path / "confusion.png").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_without_matplotlib_the_pip_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to run."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        plot_confusion(evaluation(2), tmp_path / "confusion.png")
