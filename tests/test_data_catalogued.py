"""Tests of keras_vit.data.datasets, all offline."""

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import (
    Augmentation,
    Stream,
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
    """The package, which is imported late."""
    return importlib.import_module("tensorflow_datasets")


def test_a_name_of_the_catalogue_is_loaded(monkeypatch: pytest.MonkeyPatch, tfds: Any) -> None:
    """`tfds:cifar10`, with the package's own mock of its data."""
    real = tfds.builder

    def with_splits(name: str, **options: Any) -> object:
        builder = real(name, **options)
        infos = [
            tfds.core.SplitInfo(name=split, shard_lengths=[40], num_bytes=0)
            for split in ("train", "test")
        ]
        builder.info.set_splits(tfds.core.splits.SplitDict(infos))  # the mock knows none
        return builder

    monkeypatch.setattr(tfds, "builder", with_splits)
    with tfds.testing.mock_data(num_examples=40, policy=tfds.testing.MockPolicy.USE_CODE):
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


@pytest.mark.parametrize("per_file", [5, 16, 23])
def test_record_files_give_what_the_package_gives(
    tmp_path: Path, tfds: Any, per_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same images, classes and names; the same hundredths as of the package's own order."""
    builder = write_records(tfds, tmp_path / "made", per_file=per_file, kind="tfrecord")
    config = tfds.ReadConfig(add_tfds_id=True, try_autocache=False)
    decoders = {"image": tfds.decode.SkipDecoding()}
    examples = builder.as_dataset(split="train", decoders=decoders, read_config=config)
    expected = [(x["tfds_id"], x["image"], x["label"]) for x in examples.as_numpy_iterator()]
    monkeypatch.setattr(datasets, "MEMORY", 0)
    data = load_tfds(builder)

    parts = {
        name: [(key, x, y) for x, y, key in data.split(name).items().as_numpy_iterator()]
        for name in ("train", "validation", "test")
    }
    assert isinstance(data.train, Stream)
    assert data.train.records is not None
    assert data.counts == {name: len(part) for name, part in parts.items()}
    assert parts["validation"] == sorted(expected[0::100])
    assert parts["test"] == sorted(expected[1::100])
    assert sorted(one for part in parts.values() for one in part) == sorted(expected)
    copied = pickle.loads(pickle.dumps(data.train))
    assert copied.take([-1, 7]).name(0) == data.train.take([-1]).name(0)


def test_given_splits_are_the_dataset_s(tmp_path: Path, tfds: Any) -> None:
    """Three of them, with names and classes, which can be trained on."""
    builder = write_records(
        tfds, tmp_path / "made", per_file=250, kind="tfrecord", splits=source.SPLITS
    )
    data = load_tfds(builder)

    assert data.source == "tfds:made"
    assert data.labels == ("cat", "dog")
    assert data.counts == dict.fromkeys(source.SPLITS, 250)
    assert all(data.train.name(place).startswith("made-train") for place in range(12))
    options: dict[str, Any] = {"image_size": (8, 8), "batch_size": 12, "epochs": 1, "seed": 0}
    crop = Augmentation(crop=0.5)
    (batch, targets), *_ = train_batches(data.train.take(range(12)), augmentation=crop, **options)
    assert batch.shape == (12, 8, 8, 3)
    assert sorted(targets.numpy()) == [0] * 6 + [1] * 6


def test_files_that_are_not_wanted_are_not_opened(
    tmp_path: Path, tfds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the files of the first half the second of two workers trains, the first does not."""
    builder = write_records(tfds, tmp_path / "made", per_file=25, kind="tfrecord")
    monkeypatch.setattr(datasets, "MEMORY", 0)
    monkeypatch.setattr(datasets, "BUFFER", 64)
    train = load_tfds(builder).train

    def run(part: slice, first_step: int = 0) -> int:
        passes = source.Passes(
            key=lambda epoch: tf.stack([epoch, epoch]),
            batch_size=8,
            first_step=first_step,
            epochs=1,
            rows=part,
        )
        return sum(1 for _ in train.shuffled_batches(passes))

    assert run(slice(0, 8)) == 30
    for file in sorted((tmp_path / "made").glob("*tfrecord*"))[:4]:
        file.unlink()
    assert run(slice(4, 8)) == 30
    assert run(slice(4, 8), first_step=28) == 2
    with pytest.raises(tf.errors.NotFoundError):
        run(slice(0, 4))


def test_array_record_files_are_read_by_number(
    tmp_path: Path, tfds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held where they are small; else each image has its class, and a name."""
    builder = write_records(tfds, tmp_path / "made", per_file=100, kind="array_record")
    held = load_tfds(builder)
    monkeypatch.setattr(datasets, "MEMORY", 0)
    data = load_tfds(builder)

    assert type(held.train).__name__ == "EncodedSplit"
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
    folds = write_records(tfds, tmp_path / "made", per_file=250, kind="tfrecord", splits=("fold1",))
    with pytest.raises(ValueError, match="no labelled split called train; it has fold1"):
        load_tfds(folds)


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is in the error."""
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install tensorflow-datasets"):
        load_data("tfds:oxford_flowers102")
