"""Tests of patch dropout: which tokens of an image training leaves out."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import TINY, randomize

from keras_vit import layers
from keras_vit.config import ViTConfig
from keras_vit.model import VisionTransformer

HALF = dataclasses.replace(TINY, num_layers=1, patch_dropout_rate=0.5)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ON_TENSORFLOW = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="gradients are taken with TensorFlow"
)


def images_for(config: ViTConfig, count: int = 4) -> np.ndarray:
    shape = (count, *config.input_shape)
    return np.random.default_rng(2).uniform(-1, 1, shape).astype(np.float32)


def numbered_encoder(rate: float, **options: Any) -> layers.PatchEncoder:
    """An encoder whose patch tokens are their number, and those before them negative."""
    encoder = layers.PatchEncoder(
        1, position_embedding="learned", patch_dropout_rate=rate, **options
    )
    encoder.build((None, 4, 6, 1))
    for variable in encoder.trainable_variables:
        variable.assign(keras.ops.zeros(variable.shape))
    prefix = encoder.position_embedding.shape[1] - 24
    table = np.concatenate([-1.0 - np.arange(prefix), np.arange(24)])
    encoder.position_embedding.assign(table[None, :, None])
    return encoder


def places_left(encoder: layers.PatchEncoder, batch: int) -> np.ndarray:
    """The numbers of the tokens that a training call leaves, (batch, N)."""
    tokens = encoder(np.zeros((batch, 4, 6, 1), np.float32), training=True)
    return np.asarray(keras.ops.convert_to_numpy(tokens))[..., 0]


@pytest.mark.parametrize(
    ("rate", "count"), [(0.01, 24), (0.1, 22), (0.5, 12), (0.75, 6), (0.9, 2), (0.99, 1)]
)
def test_a_rounded_part_of_the_patches_goes_on(rate: float, count: int) -> None:
    """Different ones, in row order, with their own positions; one at least."""
    left = places_left(numbered_encoder(rate), 50)
    assert left.shape == (50, 1 + count)
    assert (left[:, 0] == -1).all()
    assert (np.diff(left[:, 1:], axis=1) > 0).all()
    assert set(np.unique(left[:, 1:])) <= set(range(24))


def test_tokens_before_the_patches_always_go_on() -> None:
    """Class token, distillation token and registers, in every image; without them, none."""
    encoder = numbered_encoder(0.5, distillation_token=True, num_registers=2)
    left = places_left(encoder, 20)
    np.testing.assert_array_equal(left[:, :4], np.tile([-1, -2, 0, 0], (20, 1)))
    assert left.shape == (20, 16)
    assert places_left(numbered_encoder(0.5, class_token=False), 20).shape == (20, 12)


def test_every_patch_is_as_likely_as_every_other() -> None:
    """Over calls and images each stays at its rate; images of one call differ."""
    keras.utils.set_random_seed(0)
    encoder = numbered_encoder(0.75)
    left = np.concatenate([places_left(encoder, 500)[:, 1:] for _ in range(4)])
    shares = np.array([(left == place).any(axis=1).mean() for place in range(24)])
    np.testing.assert_allclose(shares, 0.25, atol=0.04)
    assert len(np.unique(left, axis=0)) > 1900


def test_the_mean_of_what_is_left_is_the_mean_of_all() -> None:
    """Nothing is rescaled: averaged over draws, the average over patches is that of all."""
    keras.utils.set_random_seed(0)
    left = places_left(numbered_encoder(0.5), 4000)[:, 1:]
    assert left.mean() == pytest.approx(np.arange(24).mean(), abs=0.1)


def test_evaluation_sees_every_token() -> None:
    """Outside training the answers have the bits of a model without it."""
    dropping = randomize(VisionTransformer(HALF))
    plain = VisionTransformer(dataclasses.replace(HALF, patch_dropout_rate=0.0))
    plain.set_weights(dropping.get_weights()[: len(plain.weights)])
    images = images_for(HALF)
    np.testing.assert_array_equal(dropping(images), plain(images))
    np.testing.assert_array_equal(dropping(images, training=False), plain(images))
    assert np.abs(dropping(images, training=True) - plain(images)).max() > 1e-3
    assert dropping.output_shape == plain.output_shape


def test_off_it_has_no_state() -> None:
    """A rate above zero adds the state of its random numbers and nothing else."""
    plain = VisionTransformer(dataclasses.replace(HALF, patch_dropout_rate=0.0))
    dropping = VisionTransformer(HALF)
    assert len(dropping.variables) == len(plain.variables) + 1
    assert [v.path for v in dropping.weights] == [v.path for v in plain.weights]
    assert not hasattr(plain.get_layer("patch_encoder"), "seed_generator")


def test_dropout_goes_on_with_what_is_left() -> None:
    """Both at once: the patches that are left have zeros among their values."""
    encoder = layers.PatchEncoder(
        64, position_embedding=None, dropout_rate=0.5, patch_dropout_rate=0.5
    )
    patches = np.ones((8, 4, 6, 3), np.float32)
    encoder(patches)
    tokens = keras.ops.convert_to_numpy(encoder(patches, training=True))[:, 1:]
    assert tokens.shape == (8, 12, 64)
    assert (tokens == 0).mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("pooling", ["token", "avg", "max", "map", None])
@pytest.mark.parametrize("remat", [False, True])
def test_every_pooling_takes_fewer_tokens(pooling: Any, remat: bool) -> None:
    """Answers of training have the shape of others; without pooling there are fewer tokens."""
    config = dataclasses.replace(HALF, pooling=pooling, remat=remat, num_registers=2)
    model = randomize(VisionTransformer(config))
    shape = (4, 7) if pooling else (4, 15, 7)
    assert model(images_for(config), training=True).shape == shape


@pytest.mark.parametrize(
    ("dtype", "jit_compile"),
    [
        ("float32", False),
        pytest.param("float32", True, marks=pytest.mark.slow),
        ("mixed_bfloat16", False),
        pytest.param("mixed_bfloat16", True, marks=pytest.mark.slow),
    ],
)
def test_models_train_in_a_graph(dtype: str, jit_compile: bool, tmp_path: Path) -> None:
    """XLA off and on, the loss falls, and a saved model answers as the trained one."""
    keras.utils.set_random_seed(0)
    config = dataclasses.replace(HALF, remat=True, dropout_rate=0.1, drop_path_rate=0.1)
    model = VisionTransformer(config, dtype=dtype)
    model.compile(keras.optimizers.Adam(0.01), LOSS, jit_compile=jit_compile)
    images, labels = images_for(config, 8), np.arange(8) % 7
    losses = model.fit(images, labels, epochs=15, batch_size=8, verbose=0).history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(images), model(images), atol=1e-6)


@ON_TENSORFLOW
def test_only_what_is_left_has_gradients() -> None:
    """The gradient of each image reaches exactly the pixels of the patches that are left."""
    import tensorflow as tf

    model = randomize(VisionTransformer(HALF))
    images = tf.constant(images_for(HALF))
    with tf.GradientTape() as tape:
        tape.watch(images)
        score = tf.reduce_sum(model(images, training=True) ** 2)
    change = np.abs(tape.gradient(score, images)).reshape(4, 4, 8, 6, 8, 3).max(axis=(2, 4, 5))
    assert ((change > 0).sum(axis=(1, 2)) == 12).all()


def test_a_rate_out_of_range_is_refused() -> None:
    """One sentence with what was received."""
    with pytest.raises(ValueError, match=r"patch_dropout_rate must lie in \[0, 1\).*1.5"):
        layers.PatchEncoder(8, patch_dropout_rate=1.5)
