"""Tests of training without TensorFlow: what JAX and PyTorch do, and what is refused there.

They run under KERAS_BACKEND=jax and torch, in environments of their own; under TensorFlow the
module is skipped, where tests/test_backend_trainer holds the same.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import variants_oracle
from conftest import CROSS_ENTROPY, TINY, every_dropout, images_for, randomize, reloaded

import keras_vit
from keras_vit import VisionTransformer, layers
from keras_vit.backend import plain
from keras_vit.layers.random import ReplicaSeedGenerator, drop_samples, dropout, split_seed

if keras.backend.backend() == "tensorflow":
    pytest.skip("JAX's and PyTorch's part", allow_module_level=True)

RANDOM = dataclasses.replace(TINY, num_layers=2, patch_dropout_rate=0.3, **every_dropout(0.3))
IMAGES = images_for(TINY, 8)
COPIES: dict[str, Callable[[VisionTransformer], VisionTransformer]] = {
    "copy": lambda model: model.copy(),
    "resize": lambda model: keras_vit.resize(model, (48, 48, 3)),
    "lora": lambda model: keras_vit.lora(model, rank=2),
}


@pytest.mark.parametrize("remat", [False, True])
def test_a_model_with_every_dropout_learns(remat: bool, tmp_path: Path) -> None:
    """The loss of eight images falls, and a saved file answers as the trained model."""
    keras.utils.set_random_seed(0)
    model = VisionTransformer(dataclasses.replace(RANDOM, remat=remat))
    images, labels = IMAGES, np.arange(8) % 7
    model.compile(keras.optimizers.Adam(1e-2), CROSS_ENTROPY)
    losses = model.fit(images, labels, epochs=12, batch_size=8, verbose=0).history["loss"]
    assert losses[-1] < 0.85 * losses[0]
    expected = model.predict(images, verbose=0)
    loaded = reloaded(model, tmp_path)
    np.testing.assert_allclose(loaded.predict(images, verbose=0), expected, atol=1e-5)
    assert loaded.evaluate(images, labels, verbose=0) == pytest.approx(
        model.evaluate(images, labels, verbose=0), abs=1e-5
    )


@pytest.mark.parametrize("fields", [variants_oracle.MODERN, variants_oracle.COUNTED])
def test_later_variants_have_the_numbers_of_numpy(fields: dict[str, Any]) -> None:
    """Rotary positions, norms elsewhere and quick_gelu, against a float64 walk."""
    config = dataclasses.replace(TINY, num_layers=2, **fields)
    model, images = randomize(VisionTransformer(config)), IMAGES[:2]
    expected = variants_oracle.run(variants_oracle.arrays(model), images, config).logits
    np.testing.assert_allclose(model.predict(images, verbose=0), expected, atol=1e-5)


def test_masks_are_right_and_their_seed_decides_them() -> None:
    """The share that is dropped, what becomes of the rest, and the same seed's same mask."""
    seed = ReplicaSeedGenerator(5).next()
    first, second = split_seed(seed, 2)
    ones = keras.ops.ones((200, 50))
    masks = [np.asarray(keras.ops.convert_to_numpy(dropout(ones, 0.25, seed=each)))
             for each in (first, first, second)]  # fmt: skip
    np.testing.assert_array_equal(masks[0], masks[1])
    assert 0.3 < (masks[0] != masks[2]).mean() < 0.45
    np.testing.assert_allclose(np.unique(masks[0]), [0, 4 / 3], rtol=1e-6)
    assert abs((masks[0] == 0).mean() - 0.25) < 0.02
    samples = np.asarray(keras.ops.convert_to_numpy(drop_samples(ones, 0.25, seed=first)))
    assert np.ptp(samples, axis=1).max() == 0
    assert 0.1 < (samples[:, 0] == 0).mean() < 0.4


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX's step has them")
@pytest.mark.parametrize(
    ("option", "value"),
    [("gradient_accumulation_steps", 2), ("sam_rho", 0.05), ("report_gradient_norm", True)],
)
def test_what_keras_step_lacks_is_refused(option: str, value: object) -> None:
    """One sentence names the option, the backend, and where it works; defaults pass."""
    model = VisionTransformer(TINY)
    backend = keras.backend.backend()
    options: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=rf"{option}=.*works on TensorFlow and JAX.*'{backend}'"):
        model.compile("adam", **options)
    options = {"gradient_accumulation_steps": 1, "sam_rho": 0.0, "report_gradient_norm": False}
    model.compile("adam", "mse", **options)
    assert model.compiled


def test_int8_and_lora_work(tmp_path: Path) -> None:
    """A quantised, adapted model trains and comes back."""
    config = dataclasses.replace(TINY, num_layers=1)
    model, images = randomize(VisionTransformer(config)), IMAGES
    before = model.predict(images, verbose=0)
    for layer in model._flatten_layers():
        if isinstance(layer, layers.TokenDense):
            layer.quantize("int8")
            layer.enable_lora(2)
    after = model.predict(images, verbose=0)
    assert (before * after).sum() / np.linalg.norm(before) / np.linalg.norm(after) > 0.99
    model.compile("adam", CROSS_ENTROPY)
    model.fit(images, np.arange(8) % 7, verbose=0)
    loaded = reloaded(model, tmp_path)
    np.testing.assert_allclose(
        loaded.predict(images, verbose=0), model.predict(images, verbose=0), atol=1e-5
    )


def test_each_backend_has_its_step() -> None:
    """JAX its own, PyTorch that of Keras."""
    is_plain = keras.backend.backend() == "torch"
    assert issubclass(VisionTransformer, plain.ExactTrainer) is is_plain
    assert (VisionTransformer.train_step is keras.Model.train_step) is is_plain


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_arrays_of_its_own(name: str) -> None:
    """The model answers as before when its copy has predicted and trained, and the copy too."""
    model = VisionTransformer(TINY)
    expected = keras.ops.convert_to_numpy(model(IMAGES))
    copy = COPIES[name](model)
    images = np.zeros((4, *copy.input_shape[1:]), np.float32)
    copy.predict(images, verbose=0)
    copy.compile(keras.optimizers.SGD(0.1), CROSS_ENTROPY)
    copy.fit(images, np.arange(4), verbose=0)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(IMAGES)), expected)
    model.predict(IMAGES, verbose=0)
    assert np.isfinite(keras.ops.convert_to_numpy(copy(images))).all()
