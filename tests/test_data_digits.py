"""Tests of keras_vit.data.loading."""

import sys

import numpy as np
import pytest
import sklearn.datasets

from keras_vit.data import load_digits, source


def test_every_digit_is_there_once_and_unchanged() -> None:
    """The three splits together are scikit-learn's 1,797 images, in grey levels 0..255."""
    data = load_digits()
    actual = np.concatenate([data.split(name).images for name in source.SPLITS])
    grey = np.round(sklearn.datasets.load_digits().images * 255 / 16)

    assert actual.shape == (1797, 8, 8, 3)
    assert np.array_equal(np.unique(actual[..., 0], axis=0), np.unique(grey, axis=0))
    assert np.array_equal(actual[..., 0], actual[..., 2])


def test_targets_belong_to_their_images() -> None:
    """Each split's targets are those that scikit-learn gives for the same pixels."""
    original = sklearn.datasets.load_digits()
    known = {
        np.round(image * 255 / 16).astype(np.uint8).tobytes(): target
        for image, target in zip(original.images, original.target, strict=True)
    }
    data = load_digits()

    for name in source.SPLITS:
        split = data.split(name)
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
