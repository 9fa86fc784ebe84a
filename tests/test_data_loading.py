"""Tests of keras_vit.data.loading."""

import sys
from pathlib import Path

import image_files
import numpy as np
import pytest
import sklearn.datasets

from keras_vit.data import load_data, load_digits, load_folder, loading, source


def test_every_digit_is_there_once_with_its_target() -> None:
    """The three splits together are scikit-learn's 1,797 images, in grey levels 0..255."""
    data, original = load_digits(), sklearn.datasets.load_digits()
    grey = np.round(original.images * 255 / 16).astype(np.uint8)
    known = {image.tobytes(): target for image, target in zip(grey, original.target, strict=True)}
    splits = [data.split(name) for name in source.SPLITS]
    actual = np.concatenate([split.images for split in splits])

    assert actual.shape == (1797, 8, 8, 3)
    assert np.array_equal(np.unique(actual[..., 0], axis=0), np.unique(grey, axis=0))
    assert np.array_equal(actual[..., 0], actual[..., 2])
    for split in splits:
        targets = [known[image[..., 0].tobytes()] for image in split.images]
        assert targets == split.targets.tolist()


def test_splits_are_stratified_and_always_the_same() -> None:
    """Every class has its share in every split, and a second load gives the same images."""
    first, second = load_digits(), load_digits()

    assert np.array_equal(first.test.images, second.test.images)
    assert set(np.bincount(first.test.targets)) <= {35, 36, 37}
    assert set(np.bincount(first.validation.targets)) <= {17, 18}


def test_without_scikit_learn_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to run."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with pytest.raises(ImportError, match=r"pip install scikit-learn"):
        load_digits()


def test_other_words_are_folders(tmp_path: Path) -> None:
    """A path is a folder, whatever its name."""
    root = image_files.write_classes(tmp_path / "digits")
    assert load_data(root).source == str(root)
    assert load_data("digits").source == "digits"
    with pytest.raises(FileNotFoundError, match="There is no folder 'nowhere'"):
        load_data("nowhere")


def test_splits_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Files, targets and order survive, also after the folder has grown, and has moved.

    Evaluating on what is left of it would be another number, so it is an error.
    """
    data = load_folder(image_files.write_classes(tmp_path / "images"))
    record, moved = tmp_path / "splits.csv", tmp_path / "moved"
    loading.write_splits(data, record)
    image_files.write_image(tmp_path / "images" / "plain" / "new.png")

    actual = loading.read_splits(record, root=data.source, labels=data.labels)

    for name in source.SPLITS:
        assert actual.split(name).images.tolist() == data.split(name).images.tolist()
        assert np.array_equal(actual.split(name).targets, data.split(name).targets)
    (tmp_path / "images").rename(moved)
    test = loading.read_splits(record, root=moved, labels=data.labels).test
    assert Path(test.images[0]).is_file()
    Path(test.images[0]).unlink()
    with pytest.raises(
        FileNotFoundError, match=r"1 of the 20 images of .*splits\.csv' are no longer in"
    ):
        loading.read_splits(record, root=moved, labels=data.labels)


ROWS = {
    "empty": "",
    "other columns": "a,b\n1,2\n",
    "short": "split,label,path\ntest,plain\n",
    "long": "split,label,path\ntest,plain,a.png,b\n",
    "endless field": 'split,label,path\ntest,plain,"' + "x" * 300_000,
    "split": "split,label,path\nothers,plain,plain/000.jpg\n",
    "label": "split,label,path\ntest,cat,plain/000.jpg\n",
    "absolute": "split,label,path\ntest,plain,/etc/hostname\n",
    "above": "split,label,path\ntest,plain,../other/000.jpg\n",
}


def test_a_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    """Nor is a file read that lies outside of the folder."""
    for name, rows in ROWS.items():
        (tmp_path / "splits.csv").write_text(rows)
        with pytest.raises(ValueError, match=r"splits.csv' is (damaged|not of this run)") as error:
            loading.read_splits(tmp_path / "splits.csv", root=tmp_path, labels=("plain",))
        assert len(str(error.value)) < 600, name
