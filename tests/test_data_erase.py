"""Tests of keras_vit.data.augment."""

from typing import Any

import numpy as np
import pytest

from keras_vit.data import augment

SEED = (3, 5)
VALUE = 300.0  # no noise has it


def erased(probability: float, *, count: int = 400, **options: Any) -> np.ndarray:
    images = np.full((count, 30, 40, 3), VALUE, np.float32)
    return np.asarray(
        augment.erase_rectangles(images, probability=probability, seed=SEED, **options)
    )


def test_one_rectangle_of_the_paper_s_sizes_is_lost() -> None:
    """As many images as asked for lose a full rectangle of 2 to 40 per cent, anywhere."""
    lost = (erased(0.25) != VALUE).all(axis=-1)
    hit = lost.any(axis=(1, 2))
    heights, widths = lost.any(axis=2).sum(axis=1)[hit], lost.any(axis=1).sum(axis=1)[hit]
    areas = lost[hit].mean(axis=(1, 2))

    assert 70 < hit.sum() < 130
    assert np.array_equal(lost[hit].sum(axis=(1, 2)), heights * widths)
    assert areas.min() > 0.01
    assert areas.max() < 0.43
    assert areas.std() > 0.08
    assert (heights / 30 > 1.5 * widths / 40).any()
    assert (widths / 40 > 1.5 * heights / 30).any()
    assert lost.any(axis=(0, 1)).all()
    assert lost.any(axis=(0, 2)).all()


def test_what_is_lost_becomes_noise_of_the_whole_range() -> None:
    """Each value is random, and another one in each channel and image."""
    actual = erased(1.0, count=60)
    noise = actual[actual != VALUE]

    assert set(np.unique(noise)) == set(range(256))
    assert noise.mean() == pytest.approx(127.5, abs=2)
    assert noise.std() == pytest.approx(np.arange(256).std(), abs=2)


def test_workers_erase_as_one_does() -> None:
    """The parts of two workers are the whole to the bit, and nothing is lost at 0."""
    parts = [erased(0.5, count=20, shard=(index, 2)) for index in (0, 1)]

    assert np.array_equal(np.concatenate(parts), erased(0.5, count=40))
    assert (erased(0.0) == VALUE).all()
