"""Tests of keras_vit.data.datasets, with the real layers of keras-cv 0.9 too."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf
import trainings

from keras_vit.data import Augmentation, Resizing, datasets, from_dataset, load_digits, source

LABELS = ("dark", "bright")
COUNT = 40
# What makes a good dataset bad, and what the error says.
BAD: dict[str, tuple[Callable[[tf.data.Dataset], tf.data.Dataset], str]] = {
    "batches": (lambda good: good.batch(2), "must give pairs of an image"),
    "floats": (
        lambda good: good.map(lambda x, y: (tf.cast(x, tf.float32), y)),
        "must give pairs of an image",
    ),
    "no classes": (lambda good: good.map(lambda x, y: x), "must give pairs of an image"),
    "no end": (lambda good: good.repeat(), "has no end"),
    "no images": (lambda good: good.take(0), "holds no images"),
    "no label": (lambda good: good.map(lambda x, y: (x, y + 1)), "must lie between 0 and 1"),
}
CLASSES = 5
# Smoothed edges would round the numbers that images show.
PLAIN = Resizing((4, 4), antialias=False)
flipped = Augmentation(flip=True)
batches = functools.partial(trainings.batches, batch_size=6, augmentation=flipped, resizing=PLAIN)


def encoded(count: int = COUNT, *, damaged: tuple[int, ...] = ()) -> tf.data.Dataset:
    """PNGs of different sizes that show their own number, of two classes in turn."""
    contents = [
        b"no image"
        if number in damaged
        else tf.io.encode_png(np.full((5 + number % 3, 6, 3), number, np.uint8)).numpy()
        for number in range(count)
    ]
    return tf.data.Dataset.from_tensor_slices((contents, np.arange(count) % 2))


def ragged(count: int = COUNT) -> tf.data.Dataset:
    """The same as pixels."""
    return encoded(count).map(lambda contents, target: (tf.io.decode_png(contents, 3), target))


def even(count: int = COUNT) -> tf.data.Dataset:
    """Grey pixels of one size."""
    pixels = np.tile(np.arange(count, dtype=np.uint8)[:, None, None, None], (1, 4, 4, 1))
    return tf.data.Dataset.from_tensor_slices((pixels, np.arange(count) % 2))


def numbers(made: list[tuple[np.ndarray, np.ndarray]]) -> list[list[int]]:
    return [images[:, 0, 0, 0].astype(int).tolist() for images, _ in made]


def flat(lists: list[list[int]]) -> list[int]:
    return [number for part in lists for number in part]


@pytest.mark.parametrize("make", [encoded, ragged, even])
def test_any_dataset_is_taken(make: Any) -> None:
    """Bytes, pixels and grey pixels: each image keeps its number and class."""
    data = from_dataset(make(), make(6), test=make(4), labels=LABELS)

    assert data.counts == {"train": COUNT, "validation": 6, "test": 4}
    assert data.train.targets.tolist() == [0, 1] * (COUNT // 2)
    train = data.train.take(range(COUNT))
    assert train.targets.tolist() == [0, 1] * (COUNT // 2)
    for place, image in enumerate(train.images):
        is_file = isinstance(image, bytes)
        assert is_file != (make is even)
        assert train.name(place) == f"train image {place}"
        assert (np.asarray(tf.io.decode_png(image, 3) if is_file else image) == place).all()


@pytest.mark.parametrize("make", [encoded, ragged])
def test_what_was_taken_trains(make: Any) -> None:
    """Files in memory: images keep number and class, and are shuffled."""
    data = from_dataset(make(), make(6), test=make(4), labels=LABELS)
    made = batches(data.train)
    for images, targets in made:
        assert (images == images[:, :1, :1, :1]).all()
        assert (images[:, 0, 0, 0] % 2 == targets).all()
    first = flat(numbers(made)[: COUNT // 6])
    assert len(set(first)) == 36
    assert first != sorted(first)


def test_missing_splits_are_carved_out() -> None:
    """A tenth of each class if held; of records every hundredth image, none twice."""
    held = from_dataset(encoded(), None, labels=("cafe\u0301", "tea"))
    long = from_dataset(list(encoded(250).as_numpy_iterator()), None, labels=LABELS, memory=0)
    parts = [
        [int(name.split()[-1]) for *_, name in long.split(split).items().as_numpy_iterator()]
        for split in ("train", "validation", "test")
    ]

    assert held.labels == ("caf\xe9", "tea")
    assert held.counts == {"train": 32, "validation": 4, "test": 4}
    assert np.bincount(held.test.targets).tolist() == [2, 2]
    assert long.counts == {"train": 244, "validation": 3, "test": 3}
    assert parts[1:] == [[0, 100, 200], [1, 101, 201]]
    assert sorted(flat(parts)) == list(range(250))


class Asked(list[tuple[bytes, int]]):
    """A list of records, and the numbers that it was asked for."""

    asked: list[int]
    nbytes = 0

    def __getitem__(self, number: Any) -> Any:
        self.asked.append(number)
        return super().__getitem__(number)


def test_records_with_numbers_are_read_when_they_are_needed() -> None:
    """Small ones are held; of others a worker reads its own, a resumed training what is left."""
    records = Asked(encoded(120).as_numpy_iterator())
    records.asked = []
    held = from_dataset(records, None, labels=LABELS).train
    assert not isinstance(held, source.RecordSplit)
    assert all(isinstance(contents, bytes) for contents in held.images)

    data = from_dataset(records, None, labels=LABELS, memory=0)

    assert isinstance(data.train, source.RecordSplit)
    assert data.counts == {"train": 116, "validation": 2, "test": 2}
    names = [data.test.name(item[-1]) for item in data.test.items().as_numpy_iterator()]
    assert names == ["train image 1", "train image 101"]
    records.asked.clear()
    made = batches(data.train, batch_size=58, epochs=1, shard=(1, 2))
    assert len(set(records.asked)) == len(records.asked) == 58
    assert {*flat(numbers(made))} == {*records.asked}
    records.asked.clear()
    records.nbytes = 1001
    large = from_dataset(records, even(), test=even(), labels=LABELS, memory=1000).train
    assert (len(large), records.asked) == (120, [0])  # to see what it gives
    records.asked.clear()
    rest = batches(data.train, batch_size=29, epochs=1, start_step=3)
    assert len(records.asked) == 29
    assert {*flat(numbers(rest))} == {*records.asked}
    for wrong in (iter(records), {"a": 1}, [1, 2], [(np.zeros((4, 4, 3)), 1)], [(b"", 0.5)]):
        with pytest.raises(ValueError, match=r"must be a tf\.data\.Dataset, or have `len`"):
            from_dataset(wrong, None, labels=LABELS)
    with pytest.raises(ValueError, match="The train dataset holds no images"):
        from_dataset([], None, labels=LABELS)


def test_damaged_images_are_left_out_and_named() -> None:
    """Held images are decoded once, and strictness makes it an error; records in training."""
    data = from_dataset(encoded(damaged=(3, 9)), encoded(4), test=encoded(4), labels=LABELS)

    assert data.damaged == ("train image 3", "train image 9")
    assert len(data.train) == COUNT - 2
    with pytest.raises(ValueError, match="2 of 40 images cannot be decoded, the first is 'train"):
        from_dataset(encoded(damaged=(3, 9)), encoded(4), labels=LABELS, strict=True)
    records, good = list(encoded(damaged=(3, 9)).as_numpy_iterator()), encoded(4)
    train = from_dataset(records, good, test=good, labels=LABELS, memory=1000).train
    assert isinstance(train, source.RecordSplit)
    made = batches(train, batch_size=40, epochs=1)
    assert train.damage.names == ("train image 3", "train image 9")
    assert not {3, 9} & set(numbers(made)[0])


def test_what_cannot_be_taken_is_an_error() -> None:
    """One sentence says what a dataset has to be, and what is larger than may be in memory."""
    for spoil, message in BAD.values():
        with pytest.raises(ValueError, match=message):
            from_dataset(spoil(even()), None, labels=LABELS)
    for make in (encoded, ragged, even):
        with pytest.raises(ValueError, match=r"more than the 100 bytes .* raise `memory`, or give"):
            from_dataset(make(), None, labels=LABELS, memory=100)


def batch(count: int = 8) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    images = generator.uniform(0, 255, (count, 32, 32, 3)).astype(np.float32)
    return images, generator.integers(0, CLASSES, count)


def adapted(*layers: object) -> Callable[..., Any]:
    with pytest.warns(UserWarning, match="cannot be seeded"):
        return datasets.from_keras_cv(layers)


def mapped(*layers: object) -> tuple[np.ndarray, np.ndarray]:
    """The batch after the layers, as `tf.data` runs them."""
    vary = adapted(*layers)
    dataset = tf.data.Dataset.from_tensors(batch()).map(
        lambda x, y: vary(x, tf.one_hot(y, CLASSES)), num_parallel_calls=tf.data.AUTOTUNE
    )
    images, targets = dataset.get_single_element()
    return images.numpy(), targets.numpy()


@pytest.mark.full  # importing keras-cv takes seconds
@pytest.mark.filterwarnings("ignore")  # of keras-cv
@pytest.mark.parametrize("name", ["RandAugment", "MixUp", "CutMix"])
def test_keras_cv_s_layers_vary_batches(name: str) -> None:
    """Images change within 0..255, and targets only where the layer mixes."""
    keras_cv = pytest.importorskip("keras_cv")
    arguments = {"value_range": (0, 255)} if name == "RandAugment" else {"alpha": 1.0}
    images, targets = mapped(getattr(keras_cv.layers, name)(**arguments))
    original, classes = batch()

    assert images.shape == original.shape
    assert images.dtype == targets.dtype == np.float32
    assert np.abs(images - original).max() > 1
    assert images.min() >= -0.01
    assert images.max() <= 255.01
    assert np.allclose(targets.sum(axis=1), 1, atol=1e-5)
    certain = np.eye(CLASSES)[classes]
    assert np.array_equal(targets, certain) == (name == "RandAugment")


class Half(keras.layers.Layer):
    """Halves what keras-cv's layers take, if it is training."""

    def call(self, inputs: dict[str, tf.Tensor], training: bool = False) -> dict[str, tf.Tensor]:
        return {**inputs, "images": inputs["images"] / (2 if training else 1)}


def test_any_layer_of_such_dictionaries_will_do() -> None:
    """The contract is the dictionary, training, and the order."""
    images, targets = mapped(Half(), Half())
    assert np.allclose(images, batch()[0] / 4)
    assert np.array_equal(targets.argmax(axis=1), batch()[1])


def test_what_is_no_such_layer_is_an_error() -> None:
    """Classes that are not probabilities, with the remedy; a layer that is not made."""
    with pytest.raises(ValueError, match=r"make them by tf\.one_hot"):
        adapted(Half())(*map(tf.constant, batch()))
    with pytest.raises(TypeError, match="layers that are made already"):
        datasets.from_keras_cv([Half])


def test_every_digit_is_there_once_with_its_target() -> None:
    """The three splits together are scikit-learn's 1,797 images, in grey levels 0..255.

    Every class has its share in every split, and a second load gives the same images.
    """
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
    assert np.array_equal(data.test.images, load_digits().test.images)
    assert set(np.bincount(data.test.targets)) <= {35, 36, 37}
    assert set(np.bincount(data.validation.targets)) <= {17, 18}


def test_without_scikit_learn_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to run."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with pytest.raises(ImportError, match=r"pip install scikit-learn"):
        load_digits()
