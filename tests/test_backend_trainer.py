"""Tests of keras_vit.backend.tensorflow_trainer: what every strategy trains, one device trains."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fine_tuning
import keras
import numpy as np
import processes
import published
import pytest
import tensorflow as tf
from conftest import FLOAT32, TINY, assert_same_steps, randomize

from keras_vit import VisionTransformer, layers
from keras_vit.training import Execution, MomentumSGD

GOLDEN = np.load(published.GOLDEN / "finetune.npz")
CONFIG = dataclasses.replace(TINY, num_layers=1, classes=3)

# What trains the same on one device, on several, and on two workers: the whole product on two
# replicas, whose XLA and parts are those of any number; each of them once elsewhere.
GRID: list[dict[str, Any]] = [
    {"xla": xla, "accumulate": parts} for xla in (False, True) for parts in (1, 2, 4)
]
# Neither XLA nor parts nor recomputing changes how a model is evaluated: the plain one is, and its
# graphs are rewritten by TensorFlow as a user's.
GRID[0] |= {"evaluate": True, "optimize_graphs": True}
ONCE = [GRID[0], GRID[4], GRID[2]]
PLAIN = GRID[0]
REMAT: dict[str, Any] = {"remat": True}
BFLOAT16: dict[str, Any] = {"accumulator_dtype": "bfloat16"}


# What is compared with one device by its losses alone.
OTHERS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "clip": 0.1},
    {"sam_rho": 0.05},
    {"precision": "mixed_float16"},
]
# What each process trains, by the number of its devices.
TRAINED: dict[int, list[dict[str, Any]]] = {
    1: [*ONCE, REMAT, *OTHERS, BFLOAT16],
    2: [*GRID, REMAT, *OTHERS],
    4: [*ONCE, REMAT],
}


class Trainings(processes.Together):
    """One process for all cases of as many devices, and two workers."""

    def __init__(self) -> None:
        alone = {str(n): [fine_tuning.start(each, replicas=n)] for n, each in TRAINED.items()}
        workers = [fine_tuning.start(ONCE, environment) for environment in processes.cluster(2)]
        super().__init__({**alone, "workers": workers})

    def actual(self, case: dict[str, Any], *, replicas: int = 1) -> dict[str, Any]:
        """Returns the numbers of a case."""
        (results,) = self.results(str(replicas))
        numbers: dict[str, Any] = results[TRAINED[replicas].index(case)]
        return numbers


@pytest.fixture(scope="module")
def trainings() -> Iterator[Trainings]:
    with Trainings() as together:
        yield together


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, gradient norms before clipping (about 5), validation and final arrays."""
    for name in ("losses", "gradient_norms"):
        assert_same_steps(actual[name], expected[name], name)
    for name in ("head_bias", "cls", *(["validation"] if actual["validation"] else [])):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_twelve_steps_are_the_originals() -> None:
    """Clipping, momentum and schedule: the losses of the original's loop, in float32."""
    (actual,) = processes.result(fine_tuning.start([PLAIN]))

    np.testing.assert_allclose(
        actual["losses"], GOLDEN["losses_float32_momentum"], rtol=0, atol=1e-4
    )


@pytest.mark.full
def test_twelve_steps_in_its_bfloat16_are_the_originals(trainings: Trainings) -> None:
    """With the original's dtype of momentum: its losses, its norms and what it ends with."""
    actual = trainings.actual(BFLOAT16)

    np.testing.assert_allclose(actual["losses"], GOLDEN["losses"], rtol=0, atol=2e-3)
    norms, bias = GOLDEN["gradient_norms"], GOLDEN["head_bias_after_12_steps"]
    np.testing.assert_allclose(actual["gradient_norms"], norms, rtol=5e-3)
    # A momentum of 8 bits rounds float noise to the other side now and then.
    np.testing.assert_allclose(actual["head_bias"], bias, rtol=0, atol=5e-3)
    cls = GOLDEN["cls_after_12_steps"].ravel()
    np.testing.assert_allclose(actual["cls"], cls, rtol=0, atol=5e-3)


@pytest.mark.full
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_strategies_train_as_one_device(replicas: int, trainings: Trainings) -> None:
    """XLA on and off, in one, two and four parts, recomputed: the same numbers, equal replicas."""
    for case in [*(GRID if replicas == 2 else ONCE), REMAT]:
        actual = trainings.actual(case, replicas=replicas)
        assert bool(actual["validation"]) == (case == PLAIN)
        assert_same(actual, trainings.actual(PLAIN))
        assert len(actual["replicas"]) == replicas
        assert set(actual["replicas"]) == {actual["sha256"]}


@pytest.mark.full
def test_two_workers_train_as_one_device(trainings: Trainings) -> None:
    """Two processes on loopback: the same numbers, and equal bits on both."""
    for first, second in zip(*trainings.results("workers"), strict=True):
        assert_same(first, trainings.actual(PLAIN))
        assert_same(second, trainings.actual(PLAIN))
        assert first["sha256"] == second["sha256"]


@pytest.mark.full
@pytest.mark.parametrize("second", [(16, 2), (8, 4)], ids=["another model", "other devices"])
def test_a_second_strategy_of_a_process_gets_one_sentence(second: tuple[int, int]) -> None:
    """What to do is said, where TensorFlow speaks of shapes and groups; the first trains."""
    process = processes.start(str(Path(__file__).with_name("two_strategies.py")), [(8, 2), second])
    output, errors = process.communicate(timeout=300)

    assert output == "trained\n"
    assert "ValueError: The sums over replicas do not fit together." in errors
    assert "make one strategy for all its models" in errors


@pytest.mark.full
def test_keras_own_optimizers_clip_after_the_sum(trainings: Trainings) -> None:
    """Keras' own step would clip each replica's gradient by itself, and end elsewhere."""
    actual, expected = trainings.actual(OTHERS[0], replicas=2), trainings.actual(OTHERS[0])

    np.testing.assert_allclose(actual["losses"], expected["losses"], rtol=0, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("case", OTHERS[1:], ids=str)
def test_two_passes_and_loss_scaling_are_the_same_too(
    case: dict[str, Any], trainings: Trainings
) -> None:
    """Sharpness-aware steps move along the gradient of all replicas; float16 is scaled once."""
    actual, expected = trainings.actual(case, replicas=2), trainings.actual(case)
    tolerance = 1e-4 if "sam_rho" in case else 2e-2

    np.testing.assert_allclose(actual["losses"], expected["losses"], rtol=0, atol=tolerance)
    assert len(set(actual["replicas"])) == 1


def compiled(**arguments: Any) -> VisionTransformer:
    model = randomize(VisionTransformer(arguments.pop("config", CONFIG)))
    model.compile(
        arguments.pop("optimizer", None) or MomentumSGD(0.1, accumulator_dtype="float32"),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **arguments,
    )
    return model


def trained(**arguments: Any) -> list[np.ndarray]:
    """Weights after two steps on one batch."""
    model = compiled(**arguments)
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (8, 32, 48, 3)).astype(np.float32)
    model.fit(x, generator.integers(0, 3, 8), batch_size=8, epochs=2, shuffle=False, verbose=0)
    weights: list[np.ndarray] = model.get_weights()
    return weights


@pytest.mark.full
def test_a_batch_in_parts_has_the_gradient_of_the_whole() -> None:
    """Weights after two steps, in four parts and in one."""
    for part, whole in zip(trained(accumulate=4), trained(), strict=True):
        np.testing.assert_allclose(part, whole, rtol=0, atol=FLOAT32)


def test_sharpness_aware_steps_use_the_gradient_uphill() -> None:
    """One step by hand: gradient, climb by rho along it, gradient there, step from the start."""
    x, y = np.ones((4, 32, 48, 3), np.float32), np.array([0, 1, 2, 0])
    model = compiled(optimizer=keras.optimizers.SGD(0.1), sam_rho=0.05)
    before = [variable.numpy() for variable in model.trainable_variables]

    def gradients() -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y, y_pred=model(x, training=True))
        return [np.asarray(g) for g in tape.gradient(loss, model.trainable_variables)]

    uphill = gradients()
    norm = np.sqrt(sum(float((g**2).sum()) for g in uphill))
    for variable, value, gradient in zip(model.trainable_variables, before, uphill, strict=True):
        variable.assign(value + 0.05 * gradient / norm)
    expected = [value - 0.1 * g for value, g in zip(before, gradients(), strict=True)]
    for variable, value in zip(model.trainable_variables, before, strict=True):
        variable.assign(value)
    model.fit(x, y, batch_size=4, verbose=0)

    for variable, value in zip(model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=0, atol=FLOAT32)


def test_the_gradient_norm_is_reported_before_clipping() -> None:
    """In training alone, and it is the norm of what was not cut."""
    arguments = {"report_gradient_norm": True}
    clipped = compiled(optimizer=keras.optimizers.SGD(0.0, global_clipnorm=1e-3), **arguments)
    free = compiled(optimizer=keras.optimizers.SGD(0.0), **arguments)
    x, y = np.ones((4, 32, 48, 3), np.float32), np.array([0, 1, 2, 0])
    norms = [model.fit(x, y, verbose=0).history["gradient_norm"][0] for model in (clipped, free)]

    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 1e-2
    assert set(free.evaluate(x, y, verbose=0, return_dict=True)) == {"loss"}


def test_float16_is_scaled() -> None:
    """Keras does so only if the model itself, not its layers, has the policy."""
    model = VisionTransformer(CONFIG, dtype="mixed_float16")
    model.compile("sgd", "mse")

    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.full
def test_a_compiled_model_is_saved_and_loaded(tmp_path: Any) -> None:
    """With what is particular to this training step."""
    model = compiled(accumulate=2, sam_rho=0.1, report_gradient_norm=True)
    model.fit(np.ones((2, 32, 48, 3)), np.zeros(2), verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    actual = again.get_compile_config()

    assert (actual["accumulate"], actual["sam_rho"], actual["report_gradient_norm"]) == (
        2,
        0.1,
        True,
    )
    assert isinstance(again.optimizer, MomentumSGD)


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


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.Strategy:
    """Two replicas in this process, the strategy of all its tests; conftest makes the devices."""
    return Execution(strategy="mirrored").make_strategy()


def test_masks_differ_between_replicas(strategy: tf.distribute.Strategy) -> None:
    """Dropout and drop path; on one device the same layers draw anew in each call."""
    config = dataclasses.replace(
        CONFIG, dropout_rate=0.5, attention_dropout_rate=0.5, drop_path_rate=0.5, num_layers=2
    )
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
    rates: dict[str, Any] = dict.fromkeys(
        ("dropout_rate", "attention_dropout_rate", "drop_path_rate"), 0.3
    )
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
@pytest.mark.parametrize("size", [1, 2, 7])
def test_parts_of_different_sizes_are_exact(size: int, jit_compile: bool) -> None:
    """Three parts of one, two and seven images, some of them empty; in one part, the same."""
    x = np.random.default_rng(1).uniform(-1, 1, (size, 32, 48, 3)).astype(np.float32)
    y = np.arange(size) % 3
    actual = []
    for accumulate in (3, 1):
        model = compiled(accumulate=accumulate, jit_compile=jit_compile)
        loss = model.train_on_batch(x, y)
        actual.append([loss, *model.get_weights()])
    for part, whole in zip(*actual, strict=True):
        np.testing.assert_allclose(part, whole, rtol=0, atol=FLOAT32)


def test_what_cannot_be_right_is_refused(strategy: tf.distribute.Strategy) -> None:
    """One sentence each, at compile."""
    with strategy.scope(), pytest.raises(ValueError, match="steps_per_execution=4 does not work"):
        compiled(steps_per_execution=4)
    with pytest.raises(ValueError, match=r"give compile\(accumulate=...\) instead"):
        compiled(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    averaged = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)
    with strategy.scope(), pytest.raises(ValueError, match="ema_overwrite_frequency=2 does not"):
        compiled(optimizer=averaged)
    with pytest.raises(ValueError, match="accumulate must be at least 1"):
        compiled(accumulate=0)


def test_a_frozen_model_is_told() -> None:
    """Keras warns and counts epochs in which nothing happens."""
    model = compiled()
    for layer in model.layers:
        layer.trainable = False
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="nothing to train"):
        model.fit(np.ones((2, 32, 48, 3)), np.ones((2, 3)), verbose=0)
