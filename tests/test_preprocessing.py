"""Pixels to [-1, 1] on every kind of array, and class names in the order of the classifiers."""

import importlib.resources
from typing import Any

import keras
import numpy as np
import published
import pytest
import tensorflow as tf

from keras_vit import preprocessing

# Classes of keras.applications' own table (imagenet_class_index.json), two with equal words.
IMAGENET_1K = {int(place): tuple(pair) for place, pair in published.TABLES["imagenet"].items()}

# The first and the last of WordNet's nouns that have pictures in ImageNet-21k.
IMAGENET_21K = {
    0: ("n00004475", "organism"),
    1: ("n00005787", "benthos"),
    2: ("n00006024", "heterotroph"),
    21842: ("n15102894", "knothole"),
}

PIXELS = np.arange(256).reshape(1, 8, 16, 2)
EXPECTED = ((PIXELS - 127.5) / 127.5).astype("float32")

KINDS = {
    "uint8 array": lambda x: x.astype("uint8"),
    "int64 array": lambda x: x,
    "float64 array": lambda x: x.astype("float64"),
    "float32 array": lambda x: x.astype("float32"),
    "float16 array": lambda x: x.astype("float16"),
    "nested list": lambda x: x.tolist(),
    "uint8 tensor": lambda x: keras.ops.convert_to_tensor(x.astype("uint8")),
    "float32 tensor": lambda x: keras.ops.convert_to_tensor(x.astype("float32")),
    "bfloat16 tensor": lambda x: keras.ops.cast(x, "bfloat16"),
}


MEAN, STD = (0.485, 0.456), (0.229, 0.224)
OWN = (PIXELS / 255 - np.array(MEAN)) / np.array(STD)
BAD_PIXELS: list[tuple[dict[str, Any], str]] = [
    ({"data_format": "NHWC"}, "Received: 'NHWC'"),
    ({"mean": (0.1, 0.2, 0.3)}, "mean has 3 numbers.*data_format"),
    ({"mean": float("inf")}, "mean must be a finite number"),
    ({"std": 0.0}, "std must be above 0"),
    ({"std": [[0.5]]}, "std must be a finite number, or one for each channel"),
    ({"mean": ()}, "mean must be a finite number"),
]
# Scores and how many classes of them are named.
BAD_SCORES: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
    *((shape, {}, "Received: shape") for shape in ((1000,), (2, 999), (2, 21841), (2, 1, 1000))),
    ((), {}, "Received: shape"),
    *(((1, 1000), {"top": top}, "top must be from 1 to 1000") for top in (0, -1, 1001)),
]


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_scaled(kind: str) -> None:
    """Every kind of number and array gives the same float32 values: -1 to 1 to the bit.

    With a mean and a deviation for each channel they are (x / 255 - mean) / std. `x` stays.
    """
    x = KINDS[kind](PIXELS)

    result = preprocessing.preprocess_input(x)
    own = preprocessing.preprocess_input(x, mean=MEAN, std=STD)

    assert isinstance(result, np.ndarray) == ("array" in kind or "list" in kind)
    for each in (result, own):
        assert keras.backend.standardize_dtype(each.dtype) == "float32"
    np.testing.assert_array_equal(np.asarray(result), EXPECTED)
    np.testing.assert_allclose(np.asarray(own), OWN, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(x, "float32"), PIXELS)


def test_in_a_pipeline_and_in_a_model() -> None:
    """It maps over a dataset, where tensors have no values yet, and takes a Keras tensor."""
    dataset = tf.data.Dataset.from_tensor_slices(PIXELS.astype("uint8"))
    inputs = keras.Input((8, 16, 2))
    model = keras.Model(inputs, preprocessing.preprocess_input(inputs))

    (result,) = dataset.map(preprocessing.preprocess_input).as_numpy_iterator()
    np.testing.assert_array_equal(result, EXPECTED[0])
    # Compiled, the division may round differently by one unit in the last place.
    np.testing.assert_allclose(model.predict(PIXELS, verbose=0), EXPECTED, rtol=0, atol=2.4e-7)


def test_the_data_format_says_where_channels_are() -> None:
    """keras.applications' argument is accepted; it matters with values for each channel."""
    for data_format in ("channels_first", "channels_last", None):
        result = preprocessing.preprocess_input(PIXELS, data_format=data_format)
        np.testing.assert_array_equal(result, EXPECTED)
    theirs = keras.applications.mobilenet_v2.preprocess_input(PIXELS.astype("float32"))
    np.testing.assert_allclose(EXPECTED, theirs, atol=2.4e-7)  # up to its rounding
    first = PIXELS.transpose(0, 3, 1, 2)
    result = preprocessing.preprocess_input(first, "channels_first", mean=MEAN, std=STD)
    np.testing.assert_allclose(result.transpose(0, 2, 3, 1), OWN, rtol=0, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    """Nothing is broadcast into something that was not meant; only the ImageNets have names."""
    for arguments, message in BAD_PIXELS:
        with pytest.raises(ValueError, match=message):
            preprocessing.preprocess_input(PIXELS, **arguments)
    for shape, arguments, message in BAD_SCORES:
        with pytest.raises(ValueError, match=message):
            preprocessing.decode_predictions(np.zeros(shape), **arguments)
    with pytest.raises(ValueError, match="Received: classes=100"):
        preprocessing.class_labels(100)


@pytest.mark.parametrize(
    ("classes", "known"), [(1000, IMAGENET_1K), (21843, IMAGENET_21K)], ids=["1k", "21k"]
)
def test_labels_are_in_order(classes: int, known: dict[int, tuple[str, str]]) -> None:
    """There is one identifier per class, ascending, and those known from elsewhere fit."""
    labels = preprocessing.class_labels(classes)
    identifiers = [identifier for identifier, _ in labels]

    assert len(labels) == classes
    assert identifiers == sorted(set(identifiers))
    assert {index: labels[index] for index in known} == known
    assert all(word and " " not in word for _, word in labels)


def test_both_tables_agree() -> None:
    """Every class of ImageNet-1k but teddy is one of ImageNet-21k, under the same word.

    WordNet's copyright notice stands beside its words, as its licence asks.
    """
    small = dict(preprocessing.class_labels(1000))
    large = dict(preprocessing.class_labels(21843))

    assert {name for name in small if small[name] != large.get(name)} == {"n04399382"}
    notice = importlib.resources.files("keras_vit") / "labels" / "NOTICE"
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in notice.read_text()


@pytest.mark.parametrize("kind", ["array", "list", "tensor"])
@pytest.mark.parametrize("classes", [1000, 21843])
def test_highest_scores_are_named(kind: str, classes: int) -> None:
    """The best classes come first, one list per sample, scores as Python floats."""
    scores = np.random.default_rng(0).permuted(np.tile(np.arange(classes), (3, 1)), axis=1)
    scores = scores.astype("float32")
    given = {"array": scores, "list": scores.tolist(), "tensor": keras.ops.array(scores)}[kind]

    decoded = preprocessing.decode_predictions(given, top=4)

    labels = preprocessing.class_labels(classes)
    for sample, named in zip(scores, decoded, strict=True):
        assert [score for _, _, score in named] == [
            float(classes - place) for place in (1, 2, 3, 4)
        ]
        places = [int(np.flatnonzero(sample == score)[0]) for _, _, score in named]
        assert [(identifier, word) for identifier, word, _ in named] == [labels[p] for p in places]


def test_five_by_default() -> None:
    """As in keras.applications, the first of equal classes first; bfloat16 scores are read too."""
    ((first, *_, last),) = preprocessing.decode_predictions(np.zeros((1, 1000)))
    assert (first[1], last[1]) == ("tench", "hammerhead")
    scores = keras.ops.cast(np.eye(1, 1000), "bfloat16")
    assert preprocessing.decode_predictions(scores, top=1) == [[("n01440764", "tench", 1.0)]]
