"""Tests of the training step on JAX: on one device, on eight, and in two processes.

They run under KERAS_BACKEND=jax, in an environment of their own.
"""

from typing import Any

import fine_tuning
import keras
import numpy as np
import processes
import published
import pytest
from conftest import CROSS_ENTROPY, assert_same_steps

from keras_vit import ExactModel, backend
from keras_vit.backend import plain

if keras.backend.backend() != "jax":
    pytest.skip("JAX's part", allow_module_level=True)

import jax

GOLDEN = np.load(published.GOLDEN / "finetune.npz")
BFLOAT16: dict[str, Any] = {"accumulator_dtype": "bfloat16"}
# Two passes, with dropout; the same on eight devices, with blocks recomputed and in one loop.
RANDOM: dict[str, Any] = {"sam_rho": 0.05, "dropout_rate": 0.1}
STEPS = "gradient_accumulation_steps"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, data": {"layout": "data"},
    "plain, both": {"layout": "both"},
    "plain, fully": {"layout": "fully"},
    "plain, accumulated": {"layout": "both", STEPS: 2},
    "bfloat16": BFLOAT16,
    "bfloat16, data": {**BFLOAT16, "layout": "data"},
    "bfloat16, both": {**BFLOAT16, "layout": "both"},
    "bfloat16, fully": {**BFLOAT16, "layout": "fully"},
    "random": RANDOM,
    "random, fully": {**RANDOM, "layout": "fully", "remat": "dots", "scan_blocks": True},
}
# The part of the weights that a device has; biases and small arrays are whole.
LEAST_PART = {"data": 1.0, "both": 0.5, "fully": 0.125}
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"loss": keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")},
        {"sample_weight": np.ones(4)},
        "Received: mean_with_sample_weight; leave gradient_accum",
    ),
    ({STEPS: 5}, {}, "A batch of 4 images cannot be split into 5 micro-batches"),
    (
        {"loss": keras.losses.SparseCategoricalCrossentropy(ignore_class=1)},
        {},
        "Received: SparseCategoricalCrossentropy; leave gradient_accumulation_steps at 1",
    ),
]


def assert_same(actual: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    """Losses, gradient norms before clipping, final arrays and accuracies."""
    # A sum in another order may round a momentum of bfloat16 up, by 1/256 of it.
    is_rounded = name.startswith("bfloat16")
    for key in ("loss", "gradient_norm"):
        if is_rounded:
            np.testing.assert_allclose(actual[key], expected[key], rtol=1e-3, err_msg=name)
        else:
            assert_same_steps(actual[key], expected[key], f"{name}: {key}")
    atol = 1e-3 if is_rounded else 1e-4
    for key in ("head_bias", "cls", "accuracy"):
        np.testing.assert_allclose(actual[key], expected[key], rtol=1e-3, atol=atol, err_msg=name)


def assert_original(actual: dict[str, Any], name: str) -> None:
    """Clipping, momentum, schedule: the original's losses, and with its dtype its norms too."""
    is_rounded = name.startswith("bfloat16")
    losses, atol = ("losses", 2e-3) if is_rounded else ("losses_float32_momentum", 1e-4)
    np.testing.assert_allclose(actual["loss"], GOLDEN[losses], rtol=0, atol=atol, err_msg=name)
    if is_rounded:
        np.testing.assert_allclose(actual["gradient_norm"], GOLDEN["gradient_norms"], rtol=5e-3)


def test_one_device_and_eight_train_as_the_original() -> None:
    """The losses of its twelve steps in float32, alone and with the images shared by eight."""
    names = ["plain", "plain, data"]
    (process,) = fine_tuning.start([CASES[name] for name in names])
    one, eight = processes.result(process)
    for actual, name in zip((one, eight), names, strict=True):
        assert_original(actual, name)
    assert eight["devices"] == 8
    assert_same(eight, one, "plain, data")


@pytest.mark.full
def test_eight_devices_and_two_processes_train_as_one() -> None:
    """Images shared by eight; images by four and kernels by two; images and all variables.

    In the original's dtype of momentum too, in parts, and in two passes with one mask for the whole
    batch. A device that has an eighth of a weight has an eighth of its momentum. Each of two
    processes has four devices and half of the images, and of all weights and momenta.
    """
    groups = {
        "alone": fine_tuning.start(list(CASES.values())),
        "two": fine_tuning.start_two([CASES["plain, fully"]]),
    }
    with processes.Together(groups) as together:
        trained = dict(zip(CASES, together.results("alone")[0], strict=True))
        trained |= {f"plain, {at}": each[0] for at, each in enumerate(together.results("two"))}
    for name, actual in trained.items():
        kind, _, place = name.partition(", ")
        if kind != "random":
            assert_original(actual, name)
        assert_same(actual, trained[kind], name)
        assert actual["devices"] == (8 if place else 1), name
        assert actual["split_alike"], name
        assert actual["momenta_part"] == actual["weights_part"], name
        if place:
            layout = CASES.get(name, CASES["plain, fully"])["layout"]
            assert LEAST_PART[layout] <= actual["weights_part"] < LEAST_PART[layout] * 1.2, name
    differences = np.subtract(trained["random"]["loss"], trained["plain"]["loss"])
    assert np.abs(differences).max() > 1e-2


def test_half_precision_is_trained_on_a_cpu() -> None:
    """JAX's own attention makes a product of float16 that only GPUs have."""
    qkv = np.random.default_rng(0).normal(size=(2, 5, 24)).astype("float16")

    def total(qkv: Any, form: Any) -> Any:
        return (form(qkv, 2).astype("float32") ** 2).sum()

    actual, expected = (
        jax.jit(jax.grad(lambda x, form=form: total(x, form)))(jax.numpy.asarray(x))
        for form, x in (
            (backend.self_attention, qkv),
            (plain.self_attention, qkv.astype("float32")),
        )
    )
    assert actual.dtype == "float16"
    np.testing.assert_allclose(actual, expected, atol=0.02)


@pytest.mark.parametrize(("options", "arguments", "message"), BAD)
def test_what_is_not_exact_is_refused(
    options: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    """In a sentence with what was received and what to do."""
    inputs = keras.Input((16, 16, 3))
    model = ExactModel(inputs, keras.layers.Dense(6)(keras.layers.Flatten()(inputs)))
    model.compile("sgd", **{"loss": CROSS_ENTROPY, STEPS: 2, **options})
    with pytest.raises(ValueError, match=message):
        model.train_on_batch(np.ones((4, 16, 16, 3)), np.arange(4), **arguments)
