"""Tests of keras_vit.training.schedule."""

import keras
import numpy as np
import published
import pytest

from keras_vit.training import WarmupDecay

GOLDEN = np.load(published.GOLDEN / "finetune.npz")


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_learning_rates_are_the_originals(decay: str) -> None:
    """All forty of the original's run, to 1e-7."""
    schedule = WarmupDecay(0.3, steps=40, warmup_steps=4, decay=decay)
    rates = [float(schedule(step)) for step in range(40)]

    np.testing.assert_allclose(rates, GOLDEN[decay], rtol=0, atol=1e-7)


def test_a_constant_stays() -> None:
    """After the warm-up nothing changes any more."""
    schedule = WarmupDecay(0.5, steps=10, warmup_steps=2, decay="constant")

    assert [float(schedule(step)) for step in (0, 1, 2, 9, 20)] == [0, 0.25, 0.5, 0.5, 0.5]


def test_it_is_serialized() -> None:
    """A saved optimizer comes back with its schedule."""
    schedule = WarmupDecay(0.3, steps=40, warmup_steps=4, decay="linear")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))

    assert again.get_config() == schedule.get_config()
