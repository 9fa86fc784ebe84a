"""Tests of keras_vit.data.crop."""

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import crop

DRAWN = np.random.default_rng(0).uniform(size=(300, 4)).astype(np.float32)


def test_inception_parts_have_the_area_and_aspect_asked_for() -> None:
    """Parts lie in the image, cover at least the smallest area, and vary."""
    shape = (600, 800)
    parts = np.array(
        [crop.inception_part(shape, smallest_area=0.3, draws=draws) for draws in DRAWN]
    )
    start, size = parts[:, :2], parts[:, 2:] / shape

    assert (start >= 0).all()
    assert (start + parts[:, 2:] <= shape).all()
    # A part that would be higher or wider than the image is cut: by up to the aspect's limit.
    assert size.prod(axis=1).min() >= 0.3 - 0.002
    assert size.prod(axis=1).max() > 0.9
    assert (size[:, 1] / size[:, 0]).min() >= 3 / 4 - 0.01
    assert (size[:, 1] / size[:, 0]).max() <= 4 / 3 + 0.01
    assert start.std() > 30


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 2)])
def test_no_image_is_too_small(shape: tuple[int, int]) -> None:
    """A part has at least one pixel, and never more than the image."""
    for draws in DRAWN[:50]:
        for part in (
            crop.inception_part(shape, smallest_area=0.01, draws=draws).numpy(),
            crop.small_part(shape, size=(5, 4), ratio=3.0, place=draws[2:]).numpy(),
        ):
            assert (part[2:] >= 1).all()
            assert (part[:2] >= 0).all()
            assert (part[:2] + part[2:] <= shape).all()


@pytest.mark.parametrize("shape", [(120, 180), (200, 90), (96, 64)])
@pytest.mark.parametrize("place", [(0.0, 0.0), (0.5, 0.5), (0.999, 0.999)])
def test_cutting_first_shows_what_resizing_first_shows(
    shape: tuple[int, int], place: tuple[float, float]
) -> None:
    """The part, resized, is a cut of the image whose short side was resized, to a pixel's half."""
    size, ratio = (48, 32), 1.25
    rows, columns = np.indices(shape)
    image = np.stack([rows, columns], axis=-1).astype(np.float32)  # each pixel is its place

    top, left, height, width = crop.small_part(shape, size=size, ratio=ratio, place=place).numpy()
    found = tf.image.resize(image[top : top + height, left : left + width], size).numpy()

    factor = max(ratio * size[0] / shape[0], ratio * size[1] / shape[1])
    resized = np.round(np.array(shape) * factor).astype(int)
    whole = tf.image.resize(image, resized).numpy()
    free = resized - size
    y, x = (round(where * room) for where, room in zip(place, free, strict=True))
    expected = whole[y : y + size[0], x : x + size[1]]
    assert min(free / np.array(size)) == pytest.approx(0.25, abs=0.03)
    assert np.abs(found - expected)[2:-2, 2:-2].max() < 1 / factor + 0.5
