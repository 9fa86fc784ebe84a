"""Tests of what happens to damaged images in training, in keras_vit.data.images."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import Damage, Split, evaluation_batches, naming_damaged
from keras_vit.data.images import replace_damaged

SHAPE = (2, 2, 3)


def replaced(sound: list[bool], record: Damage) -> tuple[list[float], list[int]]:
    """The first pixel and the class of each image of a batch that shows its own number."""
    count = len(sound)
    images = np.broadcast_to(
        np.arange(count, dtype=np.float32)[:, None, None, None], (count, *SHAPE)
    )
    places = np.flatnonzero(sound)
    mended = replace_damaged(
        tf.constant(images[places]),
        tf.constant(places, tf.int32),
        places=tf.constant(places, tf.int64),
        names=tf.range(count),
        damage=record,
        name=lambda place: f"image {place}",
    )
    return mended[0][:, 0, 0, 0].numpy().tolist(), mended[1].numpy().tolist()


# Which images are sound, and which image stands at each place afterwards.
CASES = [
    ([True, True, True], [0, 1, 2]),
    ([True, False, True], [0, 2, 2]),
    ([False, False, True, True], [2, 2, 2, 3]),
    ([True, True, False], [0, 1, 0]),
    ([False, True, False], [1, 1, 1]),
]


@pytest.mark.parametrize(("sound", "expected"), CASES)
def test_the_next_sound_image_stands_in(sound: list[bool], expected: list[int]) -> None:
    """With its class; after the last comes the first; the names of the damaged are kept."""
    record = Damage()

    assert replaced(sound, record) == (expected, expected)
    assert record.names == tuple(f"image {place}" for place, ok in enumerate(sound) if not ok)


@pytest.mark.parametrize(("sound", "strict"), [([False, True], True), ([False, False], False)])
def test_what_cannot_be_replaced_is_an_error(sound: list[bool], strict: bool) -> None:
    """Nothing to stand in, or strictness: the names are in the message."""
    record = Damage(strict=strict)
    with pytest.raises(ValueError, match=r"image 0.* cannot be decoded"):
        replaced(sound, record)
    assert record.names == ()


@pytest.mark.parametrize("is_training", [False, True])
def test_the_advice_does_not_end_a_training(is_training: bool) -> None:
    """An image that is gone while a training runs is put back: without it nothing resumes."""
    broken = Split(images=np.array([b"no image"], object), targets=np.array([0]))
    trained = Split(images=np.zeros((1, *SHAPE), np.uint8), targets=np.array([0]))
    options: dict[str, Any] = {"trained": trained} if is_training else {}
    expected = r"put them back .* \(--overwrite\)" if is_training else "repair or remove them"
    with (
        pytest.raises(ValueError, match=rf"1 of 1 images cannot be decoded, .*; {expected}\.$"),
        naming_damaged(broken, **options),
    ):
        next(iter(evaluation_batches(broken, image_size=(8, 8), batch_size=1)))
