"""Tests of keras_vit.data.datasets with the real layers of keras-cv 0.9."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import datasets

CLASSES = 5


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


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_layers_follow_each_other() -> None:
    """A pipeline of two: RandAugment, then MixUp."""
    keras_cv = pytest.importorskip("keras_cv")
    images, targets = mapped(
        keras_cv.layers.RandAugment(value_range=(0, 255)), keras_cv.layers.MixUp(alpha=1.0)
    )
    assert images.shape == (8, 32, 32, 3)
    assert ((targets > 0).sum(axis=1) <= 2).all()


class Half(keras.layers.Layer):
    """Halves what keras-cv's layers take, if it is training."""

    def call(self, inputs: dict[str, tf.Tensor], training: bool = False) -> dict[str, tf.Tensor]:
        return {**inputs, "images": inputs["images"] / (2 if training else 1)}


def test_any_layer_of_such_dictionaries_will_do() -> None:
    """The contract is the dictionary, training, and the order."""
    images, targets = mapped(Half(), Half())
    assert np.allclose(images, batch()[0] / 4)
    assert np.array_equal(targets.argmax(axis=1), batch()[1])


def test_classes_that_are_not_probabilities_are_an_error() -> None:
    """The remedy is in the message."""
    with pytest.raises(ValueError, match=r"make them by tf\.one_hot"):
        adapted(Half())(*map(tf.constant, batch()))


def test_a_class_is_no_layer() -> None:
    """A layer that is not made would be made anew in each call."""
    with pytest.raises(TypeError, match="layers that are made already"):
        datasets.from_keras_cv([Half])
