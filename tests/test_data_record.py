"""Tests of keras_vit.data.loading."""

from pathlib import Path

import image_files
import numpy as np
import pytest

from keras_vit.data import load_folder, loading, source


def test_splits_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Files, targets and order of all splits survive, also after the folder has grown."""
    data = load_folder(image_files.write_classes(tmp_path / "images"))
    loading.write_splits(data, tmp_path / "splits.csv")
    image_files.write_image(tmp_path / "images" / "plain" / "new.png")

    actual = loading.read_splits(tmp_path / "splits.csv", root=data.source, labels=data.labels)

    for name in source.SPLITS:
        assert actual.split(name).images.tolist() == data.split(name).images.tolist()
        assert np.array_equal(actual.split(name).targets, data.split(name).targets)


def test_paths_are_relative(tmp_path: Path) -> None:
    """A folder that has moved can be read from its new place."""
    data = load_folder(image_files.write_classes(tmp_path / "images"))
    loading.write_splits(data, tmp_path / "splits.csv")
    (tmp_path / "images").rename(tmp_path / "moved")

    actual = loading.read_splits(
        tmp_path / "splits.csv", root=tmp_path / "moved", labels=data.labels
    )

    assert Path(actual.test.images[0]).is_file()


def test_images_that_have_gone_are_counted(tmp_path: Path) -> None:
    """Evaluating on what is left would be another number, so it is an error."""
    data = load_folder(image_files.write_classes(tmp_path / "images"))
    loading.write_splits(data, tmp_path / "splits.csv")
    Path(data.train.images[0]).unlink()

    with pytest.raises(
        FileNotFoundError, match=r"1 of the 20 images of .*splits\.csv' are no longer in"
    ):
        loading.read_splits(tmp_path / "splits.csv", root=data.source, labels=data.labels)


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


@pytest.mark.parametrize("name", ROWS)
def test_a_damaged_record_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Nor is a file read that lies outside of the folder."""
    (tmp_path / "splits.csv").write_text(ROWS[name])
    with pytest.raises(ValueError, match=r"splits.csv' is (damaged|not of this run)") as refused:
        loading.read_splits(tmp_path / "splits.csv", root=tmp_path, labels=("plain",))
    assert len(str(refused.value)) < 600
