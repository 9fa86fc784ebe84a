"""Tests of keras_vit.backend.tensorflow_trainer: what every strategy trains, one device trains."""

import dataclasses
from collections.abc import Callable
from typing import Any

import fine_tuning
import keras
import numpy as np
import published
import pytest
import tensorflow as tf
from conftest import CROSS_ENTROPY, FLOAT32, TINY, every_dropout, randomize

from keras_vit import VisionTransformer, layers
from keras_vit.optimizers import MomentumSGD

GOLDEN = np.load(published.GOLDEN / "finetune.npz")
CONFIG = dataclasses.replace(TINY, num_layers=1, classes=3)


def test_twelve_steps_are_the_originals() -> None:
    """Clipping, momentum and schedule: the losses of the original's loop, in float32.

    With the original's dtype of momentum, bfloat16, its norms too and what it ends with.
    """
    _, logs = fine_tuning.trained()
    np.testing.assert_allclose(logs["loss"], GOLDEN["losses_float32_momentum"], rtol=0, atol=1e-4)
    model, logs = fine_tuning.trained(accumulator_dtype="bfloat16")
    np.testing.assert_allclose(logs["loss"], GOLDEN["losses"], rtol=0, atol=2e-3)
    np.testing.assert_allclose(logs["gradient_norm"], GOLDEN["gradient_norms"], rtol=5e-3)
    # A momentum of 8 bits rounds float noise to the other side now and then.
    for variable, name in (
        (model.get_layer("head").bias, "head_bias_after_12_steps"),
        (model.get_layer("patch_encoder").class_token, "cls_after_12_steps"),
    ):
        expected = GOLDEN[name].ravel()
        np.testing.assert_allclose(variable.numpy().ravel(), expected, rtol=0, atol=5e-3)


def compiled(**arguments: Any) -> VisionTransformer:
    model = randomize(VisionTransformer(CONFIG))
    optimizer = MomentumSGD(0.1, accumulator_dtype="float32")
    model.compile(loss=CROSS_ENTROPY, **{"optimizer": optimizer, **arguments})
    return model


def test_one_batch_is_predicted_as_any_other() -> None:
    """Arrays of any dtype, with and without the short way, with and without progress."""
    model = randomize(VisionTransformer(dataclasses.replace(CONFIG, include_preprocessing=True)))
    pixels = np.random.default_rng(0).integers(0, 255, (5, 32, 48, 3))
    expected = np.asarray(model(pixels.astype(np.float32)))
    for dtype in ("uint8", "float32", "float64"):
        actual = model.predict(pixels.astype(dtype), verbose=0)
        several = model.predict(pixels.astype(dtype), batch_size=2, verbose=0)

        assert isinstance(actual, np.ndarray)
        np.testing.assert_allclose(actual, expected, atol=FLOAT32)
        np.testing.assert_allclose(several, expected, atol=FLOAT32)


def test_masks_differ_between_replicas(strategy: tf.distribute.Strategy) -> None:
    """Dropout and drop path; on one device the same layers draw anew in each call."""
    config = dataclasses.replace(CONFIG, num_layers=2, **every_dropout(0.5))
    ones = tf.ones((8, 32, 48, 3))
    with strategy.scope():
        model = randomize(VisionTransformer(config))

    def run() -> tuple[np.ndarray, np.ndarray]:
        outputs = strategy.run(lambda: model(ones, training=True))
        first, second = strategy.experimental_local_results(outputs)
        return first.numpy(), second.numpy()

    first, second = run()
    again, _ = run()
    assert not np.allclose(first, second)
    assert not np.allclose(first, again)
    # Without masks both replicas compute the same: the difference is the masks'.
    plain = strategy.experimental_local_results(strategy.run(lambda: model(ones, training=False)))
    np.testing.assert_allclose(plain[0].numpy(), plain[1].numpy(), atol=FLOAT32)


def test_replicas_leave_out_other_patches(strategy: tf.distribute.Strategy) -> None:
    """Tokens with their numbers as values: what is left can be read off."""
    with strategy.scope():
        layer = layers.PatchDropout(0.5, num_prefix_tokens=0)
    tokens = tf.tile(tf.range(24.0)[None, :, None], (8, 1, 1))
    outputs = strategy.run(lambda: layer(tokens, training=True))
    first, second = (each.numpy() for each in strategy.experimental_local_results(outputs))
    assert first.shape == second.shape == (8, 12, 1)
    assert (first != second).any(axis=(1, 2)).all()


@pytest.mark.parametrize(
    "jit_compile",
    [None, False, pytest.param(True, marks=pytest.mark.full)],
    ids=["eager", "graph", "xla"],
)
def test_recomputed_blocks_drop_the_same_again(jit_compile: bool | None) -> None:
    """With dropout and drop path the gradients are those of blocks that keep everything."""
    rates = every_dropout(0.3)
    config = dataclasses.replace(CONFIG, num_layers=2, patch_dropout_rate=0.5, **rates)
    kept = randomize(VisionTransformer(config))
    recomputed = VisionTransformer(dataclasses.replace(config, remat=True))
    for ours, theirs in zip(recomputed.variables, kept.variables, strict=True):
        ours.assign(theirs)  # the states of the random generators too
    images = tf.constant(np.random.default_rng(0).uniform(-1, 1, (4, 32, 48, 3)), tf.float32)

    def gradients(model: VisionTransformer) -> Callable[[], list[np.ndarray]]:
        def run() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(images, training=True) ** 2)
            return tape.gradient(loss, [v.value for v in model.trainable_variables])

        made = run if jit_compile is None else tf.function(run, jit_compile=jit_compile)
        return lambda: [np.asarray(gradient) for gradient in made()]

    of_kept = gradients(kept)
    first = of_kept()
    for ours, theirs in zip(gradients(recomputed)(), first, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=3e-5)
    # Other masks, other gradients: the equality above is not that of models that drop nothing.
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(of_kept(), first, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_parts_of_different_sizes_are_exact(jit_compile: bool) -> None:
    """Three parts of one, two and seven images, some of them empty; in one part, the same."""
    models = [
        compiled(gradient_accumulation_steps=steps, jit_compile=jit_compile) for steps in (3, 1)
    ]
    for size in (1, 2, 7):
        x = np.random.default_rng(1).uniform(-1, 1, (size, 32, 48, 3)).astype(np.float32)
        losses = [randomize(model).train_on_batch(x, np.arange(size) % 3) for model in models]
        arrays = [[loss, *each.get_weights()] for loss, each in zip(losses, models, strict=True)]
        for part, whole in zip(*arrays, strict=True):
            np.testing.assert_allclose(part, whole, rtol=0, atol=FLOAT32)


def test_what_cannot_be_right_is_refused(strategy: tf.distribute.Strategy) -> None:
    """One sentence each, at compile."""
    with strategy.scope(), pytest.raises(ValueError, match="steps_per_execution=4 does not work"):
        compiled(steps_per_execution=4)
    sentence = r"give compile\(gradient_accumulation_steps=...\) instead"
    with pytest.raises(ValueError, match=sentence):
        compiled(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    averaged = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)
    with strategy.scope(), pytest.raises(ValueError, match="ema_overwrite_frequency=2 does not"):
        compiled(optimizer=averaged)
