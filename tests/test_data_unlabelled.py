"""Tests of keras_vit.data.folder."""

import shutil
from pathlib import Path

import image_files
import pytest

from keras_vit.data import load_data, load_folder, load_unlabelled_folder, loading


def scatter(root: Path, *, count: int = 20, below: str = "") -> Path:
    """Writes images without classes, half of them a level deeper."""
    for index in range(count):
        folder = root / below / ("deep" if index % 2 else "")
        image_files.write_image(folder / f"{index}.png", seed=index)
    return root


def test_images_anywhere_are_taken(tmp_path: Path) -> None:
    """At any depth, each once; a tenth is carved out; a damaged one is named."""
    scatter(tmp_path)
    image_files.damage(tmp_path / "0.png")
    data = load_unlabelled_folder(tmp_path)
    actual = [Path(image).name for part in (data.train, data.validation) for image in part.images]
    assert sorted(actual) == sorted(f"{index}.png" for index in range(1, 20))
    assert data.counts == {"train": 17, "validation": 2, "test": 0}
    assert (data.labels, set(data.train.targets)) == ((), {0})
    assert data.damaged == (str(tmp_path / "0.png"),)


def test_class_folders_keep_their_splits(tmp_path: Path) -> None:
    """What a classifier would be tested on stays unseen."""
    root = image_files.write_classes(tmp_path)
    without, labelled = load_unlabelled_folder(root), load_folder(root)
    assert without.labels == labelled.labels
    assert without.test.images.tolist() == labelled.test.images.tolist()
    assert load_data(root, labelled=False).counts == labelled.counts


@pytest.mark.parametrize("validation", [False, True])
def test_given_splits_are_kept(tmp_path: Path, validation: bool) -> None:
    """A flat train/ and validation/ are splits, not two classes."""
    scatter(tmp_path, below="train")
    scatter(tmp_path, below="validation", count=4)
    if not validation:
        shutil.rmtree(tmp_path / "validation")
    data = load_unlabelled_folder(tmp_path)
    counts = {"train": 20, "validation": 4} if validation else {"train": 18, "validation": 2}
    assert data.counts == {**counts, "test": 0}


def test_the_splits_are_written_and_read(tmp_path: Path) -> None:
    """splits.csv has no labels then, and gives the same images back."""
    data = load_unlabelled_folder(scatter(tmp_path / "images"))
    loading.write_splits(data, tmp_path / "splits.csv")
    again = loading.read_splits(tmp_path / "splits.csv", root=data.source, labels=())
    assert again.train.images.tolist() == data.train.images.tolist()
    assert again.counts == data.counts


def test_too_few_images_are_an_error(tmp_path: Path) -> None:
    """None, or one alone, cannot be trained and validated on; a missing folder is named."""
    with pytest.raises(ValueError, match="too few images"):
        load_unlabelled_folder(tmp_path)
    scatter(tmp_path, count=1)
    with pytest.raises(ValueError, match="too few images"):
        load_unlabelled_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder 'gone'"):
        load_unlabelled_folder("gone")
