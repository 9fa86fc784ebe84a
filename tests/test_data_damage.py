"""Tests of keras_vit.data.damage."""

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import Damage, damage

SHAPE = (2, 2, 3)


def replaced(sound: list[bool], record: Damage) -> tuple[list[float], list[int]]:
    """The first pixel and the class of each image of a batch that shows its own number."""
    count = len(sound)
    images = np.broadcast_to(
        np.arange(count, dtype=np.float32)[:, None, None, None], (count, *SHAPE)
    )
    found = damage.replace_damaged(
        tf.constant(images),
        tf.range(count),
        sound=tf.constant(sound),
        names=tf.range(count),
        damage=record,
        name=lambda place: f"image {place}",
    )
    return found[0][:, 0, 0, 0].numpy().tolist(), found[1].numpy().tolist()


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


def test_loading_goes_on_after_an_error() -> None:
    """In a graph, a sound image comes as it is, a damaged one black, and both are told apart."""
    contents = [tf.io.encode_png(np.full(SHAPE, 7, np.uint8)).numpy(), b"no image"]

    def load(one: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return damage.try_load(
            lambda: tf.cast(tf.io.decode_png(one, channels=3), tf.float32), shape=SHAPE
        )

    made = list(tf.data.Dataset.from_tensor_slices(contents).map(load).as_numpy_iterator())

    assert [bool(sound) for _, sound in made] == [True, False]
    assert (made[0][0] == 7).all()
    assert (made[1][0] == 0).all()
    assert made[1][0].shape == SHAPE
