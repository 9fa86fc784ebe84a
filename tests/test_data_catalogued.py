"""Tests of keras_vit.data.datasets, all offline."""

import pickle
import sys
from pathlib import Path
from typing import Any

import image_files
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

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


def write_splits(root: Path, *names: str) -> Path:
    """JPEGs of two classes in folders as the package's `ImageFolder` wants them."""
    generator = np.random.default_rng(0)
    for split in names:
        for index in range(12):
            file = root / split / ("cat", "dog")[index % 2] / f"{index}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (9, 8, 3), np.uint8)).save(file)
    return root


def test_splits_are_the_dataset_s_and_nothing_is_decoded(tmp_path: Path) -> None:
    """Three splits of files, their bytes as they are, with names."""
    import tensorflow_datasets as tfds

    root = write_splits(tmp_path, "train", "validation", "test")
    data = load_tfds(tfds.folder_dataset.ImageFolder(str(root)))

    files = {file.read_bytes() for file in root.glob("train/*/*.jpg")}
    assert data.source == "tfds:image_folder"
    assert data.labels == ("cat", "dog")
    assert data.counts == {"train": 12, "validation": 12, "test": 12}
    assert set(data.train.images) == files
    assert all(data.train.name(place).endswith(".jpg") for place in range(12))
    batch, targets = next(
        iter(
            train_batches(
                data.train,
                image_size=(8, 8),
                batch_size=12,
                epochs=1,
                seed=0,
                augmentation=Augmentation(crop=0.5),
            )
        )
    )
    assert batch.shape == (12, 8, 8, 3)
    assert sorted(targets.numpy()) == [0] * 6 + [1] * 6


def test_missing_splits_are_carved_out_the_same_each_time(tmp_path: Path) -> None:
    """A dataset with train alone gives the same validation and test images again."""
    import tensorflow_datasets as tfds

    root = write_splits(tmp_path, "train")
    first, again = (load_tfds(tfds.folder_dataset.ImageFolder(str(root))) for _ in range(2))

    assert first.counts == {"train": 8, "validation": 2, "test": 2}
    assert list(first.test.images) == list(again.test.images)
    assert not set(first.test.images) & set(first.train.images)


def test_a_name_of_the_catalogue_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tfds:cifar10`, with the package's own mock of its data."""
    import tensorflow_datasets as tfds

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


def write_records(root: Path, *, per_file: int, kind: str) -> Any:
    """A dataset of 250 images in files as the package writes them, and its builder."""
    import tensorflow_datasets as tfds

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
    writer.initialize_splits(["train"])
    pixels = [np.full((4, 4, 3), number, np.uint8) for number in range(250)]
    writer.add_examples(
        {"train": [{"image": image, "label": n % 2} for n, image in enumerate(pixels)]}
    )
    writer.close_all()
    return tfds.builder_from_directory(str(root))


@pytest.mark.parametrize("per_file", [5, 16, 23])
def test_record_files_give_what_the_package_gives(
    tmp_path: Path, per_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same images, classes and names; the same hundredths as of the package's own order."""
    import tensorflow_datasets as tfds

    builder = write_records(tmp_path / "made", per_file=per_file, kind="tfrecord")
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


def test_files_that_are_not_wanted_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the files of the first half the second of two workers trains, the first does not."""
    builder = write_records(tmp_path / "made", per_file=25, kind="tfrecord")
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held where they are small; else each image has its class, and a name."""
    builder = write_records(tmp_path / "made", per_file=100, kind="array_record")
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


def test_what_is_not_for_classification_is_an_error() -> None:
    """A dataset without one image and one class says what it gives instead."""
    import tensorflow_datasets as tfds

    with (
        tfds.testing.mock_data(policy=tfds.testing.MockPolicy.USE_CODE),
        pytest.raises(ValueError, match="must give an image and one class"),
    ):
        load_data("tfds:imdb_reviews")


def test_a_dataset_without_training_images_is_an_error(tmp_path: Path) -> None:
    """The splits that there are are named."""
    import tensorflow_datasets as tfds

    root = write_splits(tmp_path, "fold1")
    with pytest.raises(ValueError, match="no labelled split called train; it has fold1"):
        load_tfds(tfds.folder_dataset.ImageFolder(str(root)))


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is in the error."""
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install tensorflow-datasets"):
        load_data("tfds:oxford_flowers102")


def test_other_words_are_folders(tmp_path: Path) -> None:
    """A path is a folder, whatever its name."""
    root = image_files.write_classes(tmp_path / "digits")
    assert load_data(root).source == str(root)
    assert load_data("digits").source == "digits"
    with pytest.raises(FileNotFoundError, match="There is no folder 'nowhere'"):
        load_data("nowhere")
