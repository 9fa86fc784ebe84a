"""Tests of keras_vit.data.datasets, all offline."""

import errno
import importlib
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import requests

from keras_vit.data import (
    Augmentation,
    Resizing,
    datasets,
    load_data,
    load_tfds,
    source,
    train_batches,
)

pytestmark = [
    pytest.mark.full,  # importing the package takes seconds
    pytest.mark.filterwarnings("ignore"),  # of the package and what it imports
]


@pytest.fixture(scope="module")
def tfds() -> Any:
    return importlib.import_module("tensorflow_datasets")


def test_a_name_of_the_catalogue_is_loaded(monkeypatch: pytest.MonkeyPatch, tfds: Any) -> None:
    """`tfds:cifar10`, with the package's own mock of its data, as if of TFRecord files."""
    real = tfds.builder

    def not_by_number(builder: Any, split: str, **options: Any) -> None:
        raise NotImplementedError

    def with_splits(name: str, **options: Any) -> object:
        builder = real(name, **options)
        infos = [
            tfds.core.SplitInfo(name=split, shard_lengths=[40], num_bytes=0)
            for split in ("train", "test")
        ]
        builder.info.set_splits(tfds.core.splits.SplitDict(infos))  # the mock knows none
        return builder

    monkeypatch.setattr(tfds, "builder", with_splits)
    with tfds.testing.mock_data(
        num_examples=40, policy=tfds.testing.MockPolicy.USE_CODE, as_data_source_fn=not_by_number
    ):
        data = load_data("tfds:cifar10")

    assert data.source == "tfds:cifar10"
    assert len(data.labels) == 10
    assert len(data.train) + len(data.validation) == 40
    assert len(data.test) == 40
    assert isinstance(data.train.images[0], bytes)


def write_records(
    tfds: Any, root: Path, *, per_file: int, kind: str, splits: tuple[str, ...] = ("train",)
) -> Any:
    """A dataset of 250 images in files as the package writes them, and its builder."""
    features = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "label": tfds.features.ClassLabel(names=["cat", "dog"]),
    }
    identity = tfds.core.DatasetIdentity(
        name="made", version=tfds.core.Version("1.0.0"), data_dir=str(root), module_name="made"
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        features=tfds.features.FeaturesDict(features),
        supervised_keys=("image", "label"),
    )
    root.mkdir(parents=True)
    writer = tfds.core.SequentialWriter(info, per_file, file_format=kind)
    writer.initialize_splits(splits)
    pixels = [np.full((4, 4, 3), number, np.uint8) for number in range(250)]
    examples = [{"image": image, "label": n % 2} for n, image in enumerate(pixels)]
    writer.add_examples(dict.fromkeys(splits, examples))
    writer.close_all()
    return tfds.builder_from_directory(str(root))


def test_tfrecord_files_are_held_or_refused_with_the_command_that_converts_them(
    tmp_path: Path, tfds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones give the package's images and classes; large ones cannot be read by number."""
    builder = write_records(tfds, tmp_path / "made", per_file=23, kind="tfrecord")
    decoders = {"image": tfds.decode.SkipDecoding()}
    examples = builder.as_dataset(split="train", decoders=decoders).as_numpy_iterator()
    data = load_tfds(builder)

    held = [data.split(name) for name in source.SPLITS]
    rows = [row for part in held for row in zip(part.images, part.targets, strict=True)]
    assert sorted(rows) == sorted((each["image"], each["label"]) for each in examples)
    monkeypatch.setattr(datasets, "MEMORY", 0)
    with pytest.raises(
        ValueError, match=r"tfds convert_format --dataset_version_dir=.*/made --out"
    ):
        load_tfds(builder)


def test_a_dataset_that_is_not_there_is_made_to_be_read_by_number(
    tmp_path: Path, tfds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As array_record; what was converted in its place is found; what was there stays."""

    class Builder(tfds.core.GeneratorBasedBuilder):
        name = "forty"
        VERSION = tfds.core.Version("1.0.0")
        pkg_dir_path = tmp_path

        def _info(self) -> Any:
            features = {
                "image": tfds.features.Image(shape=(None, None, 3)),
                "label": tfds.features.ClassLabel(names=["cat", "dog"]),
            }
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, _: Any) -> Any:
            return {"train": self._generate_examples(40)}

        def _generate_examples(self, count: int) -> Any:
            for number in range(count):
                image = np.full((4, 4, 3), number, np.uint8)
                yield number, {"image": image, "label": number % 2}

    monkeypatch.setattr(tfds, "builder", lambda name, data_dir: Builder(data_dir=data_dir))
    for error, reason in (
        (requests.ConnectionError("HTTPSConnectionPool"), "the server cannot be reached"),
        (OSError(errno.ENOSPC, "No space left"), "No space left"),
        (AssertionError("Create it"), "Create it"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Builder, "_split_generators", mock.Mock(side_effect=error))
            with pytest.raises(OSError, match=f"'forty' is not in '.*1.0.0', .* made: {reason}$"):
                load_tfds("forty", data_dir=tmp_path)
    monkeypatch.setattr(datasets, "MEMORY", 0)
    data = load_tfds("forty", data_dir=tmp_path)

    assert list((tmp_path / "forty" / "1.0.0").glob("*train.array_record*"))
    assert isinstance(data.train, source.RecordSplit)
    assert data.counts == {"train": 38, "validation": 1, "test": 1}
    there = Builder(data_dir=tmp_path / "other")
    there.download_and_prepare(file_format="tfrecord")
    monkeypatch.setattr(datasets, "MEMORY", 2**20)
    held = load_tfds("forty", data_dir=tmp_path / "other")
    assert sum(held.counts.values()) == 40
    assert not list((tmp_path / "other").rglob("*array_record*"))
    info = tmp_path / "other" / "forty" / "1.0.0" / "dataset_info.json"
    told = json.loads(info.read_text())
    info.write_text(json.dumps({**told, "alternativeFileFormats": ["array_record"]}))
    for file in (tmp_path / "forty" / "1.0.0").glob("*array_record*"):
        shutil.copy(file, info.parent)
    monkeypatch.setattr(datasets, "MEMORY", 0)
    assert isinstance(load_tfds("forty", data_dir=tmp_path / "other").train, source.RecordSplit)


def test_given_splits_are_the_dataset_s(tmp_path: Path, tfds: Any) -> None:
    """Three of them, with names and classes, which can be trained on; also by other usual names."""
    splits = ("train", "val", "test", "mini")
    builder = write_records(tfds, tmp_path / "made", per_file=250, kind="tfrecord", splits=splits)
    data = load_tfds(builder)

    assert data.source == "tfds:made"
    assert data.labels == ("cat", "dog")
    assert data.counts == dict.fromkeys(source.SPLITS, 250)
    assert all(data.train.name(place).startswith("made-train") for place in range(12))
    options: dict[str, Any] = {
        "resizing": Resizing((8, 8)),
        "batch_size": 12,
        "epochs": 1,
        "seed": 0,
    }
    crop = Augmentation(crop=0.5)
    (batch, targets), *_ = train_batches(data.train.take(range(12)), augmentation=crop, **options)
    assert batch.shape == (12, 8, 8, 3)
    assert sorted(targets.numpy()) == [0] * 6 + [1] * 6


def test_array_record_files_are_read_by_number(
    tmp_path: Path, tfds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held where they are small; else each image has its class, and a name."""
    builder = write_records(tfds, tmp_path / "made", per_file=100, kind="array_record")
    held = load_tfds(builder)
    monkeypatch.setattr(datasets, "MEMORY", 0)
    data = load_tfds(builder)

    assert all(isinstance(contents, bytes) for contents in held.train.images)
    assert isinstance(data.train, source.RecordSplit)
    assert data.counts == {"train": 244, "validation": 3, "test": 3}
    part = pickle.loads(pickle.dumps(data.train)).take([200, 0])
    assert [part.name(item[-1].numpy()) for item in part.items()] == [
        "train image 206",
        "train image 2",
    ]
    assert part.pixels(0)[0, 0, 0] == 206
    assert data.train.targets.tolist() == [n % 2 for n in range(250) if n % 100 > 1]


def test_what_cannot_be_trained_on_is_an_error(tmp_path: Path, tfds: Any) -> None:
    """Without one image and one class it says what it gives; without train, which splits it has."""
    with (
        tfds.testing.mock_data(policy=tfds.testing.MockPolicy.USE_CODE),
        pytest.raises(ValueError, match="must give an image and one class"),
    ):
        load_data("tfds:imdb_reviews")
    for name in ("", "nothing", "mnist/wrong", "mnist:9.9.9", "../mnist"):
        with pytest.raises(
            ValueError, match=f"no dataset '{name}', or not in that .*; take a NAME"
        ):
            load_data(f"tfds:{name}")
    cut = write_records(tfds, tmp_path / "cut", per_file=250, kind="array_record")
    file = next((tmp_path / "cut").glob("*array_record*"))
    for length in (1000, 0):
        os.truncate(file, length)
        with pytest.raises(ValueError, match=r"'made' is damaged; remove '.*cut', so that"):
            load_tfds(cut)
    folds = write_records(tfds, tmp_path / "made", per_file=250, kind="tfrecord", splits=("fold1",))
    with pytest.raises(ValueError, match="no labelled split called train; it has fold1"):
        load_tfds(folds)


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is in the error."""
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install tensorflow-datasets"):
        load_data("tfds:oxford_flowers102")
