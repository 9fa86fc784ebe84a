"""Tests of keras_vit.data.views."""

import numpy as np
import pytest

from keras_vit.data import Split, Views, evaluation_batches, resize_image

IMAGE = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)


def test_views_are_crops_and_mirrors() -> None:
    """The whole first; each crop is that part of the image; the second half is mirrored."""
    views = Views(flip=True, scales=(0.5,), shifted=0.8)
    stack = np.asarray(views.stack(IMAGE, size=(10, 10)))
    parts = [IMAGE, IMAGE[5:15, 8:23]]
    parts += [IMAGE[top : top + 16, left : left + 24] for top in (0, 4) for left in (0, 6)]
    expected = [np.asarray(resize_image(part, size=(10, 10))) for part in parts]

    assert stack.shape == (12, 10, 10, 3)
    np.testing.assert_array_equal(stack[:6], expected)
    np.testing.assert_array_equal(stack[6:], stack[:6, :, ::-1])
    assert Views(flip=False, scales=(0.5,), shifted=0.8).count == 6


def test_a_tiny_image_has_views() -> None:
    """No part is empty."""
    stack = Views(scales=(0.1,)).stack(IMAGE[:1, :2], size=(4, 4))
    assert np.isfinite(np.asarray(stack)).all()


def test_wrong_sides_are_told() -> None:
    for scales, shifted in (((1.0,), 0.5), ((0.5,), 0.0), ((-1.0,), None)):
        with pytest.raises(ValueError, match="above 0 and below 1"):
            Views(scales=scales, shifted=shifted)


@pytest.mark.parametrize("antialias", [False, True])
def test_batches_hold_the_views_of_each_image_together(antialias: bool) -> None:
    """In a pipeline they are, to the bit, what they are alone."""
    images = np.stack([IMAGE, IMAGE[::-1], IMAGE // 2])
    split = Split(images=images, targets=np.array([0, 1, 2], np.int32))
    views = Views(flip=True)
    batches = list(
        evaluation_batches(
            split, image_size=(8, 12), batch_size=2, antialias=antialias, views=views
        )
    )
    assert [len(targets) for _, targets in batches] == [2, 1]
    actual = np.concatenate([np.asarray(pixels) for pixels, _ in batches])
    expected = [views.stack(image, size=(8, 12), antialias=antialias) for image in images]
    np.testing.assert_array_equal(actual, np.concatenate(expected))
