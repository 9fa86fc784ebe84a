"""Tests of the training step on JAX: on one device, on eight, and in two processes.

They run under KERAS_BACKEND=jax, in an environment of their own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax_fine_tuning
import keras
import numpy as np
import processes
import published
import pytest
from conftest import assert_same_steps

from keras_vit import backend
from keras_vit.backend import plain
from keras_vit.exact import ExactModel

if keras.backend.backend() != "jax":
    pytest.skip("JAX's part", allow_module_level=True)

import jax

GOLDEN = np.load(published.GOLDEN / "finetune.npz")
PLAIN: dict[str, Any] = {}
BFLOAT16 = {"accumulator_dtype": "bfloat16"}
# Two passes, with dropout; the same on eight devices, with blocks recomputed and in one loop.
RANDOM: dict[str, Any] = {"sam_rho": 0.05, "dropout_rate": 0.1}
RANDOM_TWICE = {**RANDOM, "layout": "fully", "remat": "dots", "scan_blocks": True}
PARTS: dict[str, Any] = {"accumulate": 2, "layout": "both"}
LAYOUTS = ["data", "both", "fully"]
SHARED: list[dict[str, Any]] = [
    {**case, "layout": layout} for layout in LAYOUTS for case in (PLAIN, BFLOAT16)
]
EACH: list[dict[str, Any]] = [PLAIN, BFLOAT16, *SHARED, PARTS, RANDOM, RANDOM_TWICE]
# The part of the weights that a device has; biases and small arrays are whole.
LEAST_PART = {"data": 1.0, "both": 0.5, "fully": 0.125}
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(scope="module")
def trainings() -> Iterator[processes.Together]:
    """All cases in one process, and one of them in two processes of half as many devices."""
    started = {
        "alone": jax_fine_tuning.start(EACH),
        "two": jax_fine_tuning.start_two([{"layout": "fully"}]),
    }
    with processes.Together(started) as together:
        yield together


def trained(together: processes.Together, case: dict[str, Any]) -> dict[str, Any]:
    (results,) = together.results("alone")
    numbers: dict[str, Any] = results[EACH.index(case)]
    return numbers


def assert_same(
    actual: dict[str, Any], expected: dict[str, Any], *, is_rounded: bool = False
) -> None:
    """Losses, gradient norms before clipping, final arrays and accuracies."""
    for name in ("losses", "gradient_norms"):
        if is_rounded:
            np.testing.assert_allclose(actual[name], expected[name], rtol=1e-3, err_msg=name)
        else:
            assert_same_steps(actual[name], expected[name], name)
    for name in ("head_bias", "cls", "accuracies"):
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=1e-3, atol=1e-3 if is_rounded else 1e-4, err_msg=name
        )


def test_one_device_and_eight_train_as_the_original() -> None:
    """The losses of its twelve steps in float32, alone and with the images shared by eight."""
    (process,) = jax_fine_tuning.start([PLAIN, {"layout": "data"}])
    one, eight = processes.result(process)
    for actual in (one, eight):
        np.testing.assert_allclose(
            actual["losses"], GOLDEN["losses_float32_momentum"], rtol=0, atol=1e-4
        )
    assert eight["devices"] == 8
    assert_same(eight, one)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
@pytest.mark.parametrize(
    ("case", "losses", "tolerance"),
    [(PLAIN, "losses_float32_momentum", 1e-4), (BFLOAT16, "losses", 2e-3)],
    ids=["float32", "bfloat16"],
)
def test_twelve_steps_are_the_originals(
    case: dict[str, Any],
    losses: str,
    tolerance: float,
    layout: str,
    trainings: processes.Together,
) -> None:
    """Clipping, momentum, schedule: the original's losses, and with its dtype its norms too."""
    actual = trained(trainings, case if layout == "one" else {**case, "layout": layout})
    np.testing.assert_allclose(actual["losses"], GOLDEN[losses], rtol=0, atol=tolerance)
    if case is BFLOAT16:
        np.testing.assert_allclose(actual["gradient_norms"], GOLDEN["gradient_norms"], rtol=5e-3)


@pytest.mark.full
def test_parts_train_as_the_whole_batch(trainings: processes.Together) -> None:
    """On eight devices: losses, norms before clipping, weights, accuracies."""
    assert_same(trained(trainings, PARTS), trained(trainings, PLAIN))


@pytest.mark.full
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_eight_devices_train_as_one(case: dict[str, Any], trainings: processes.Together) -> None:
    """Images shared by eight; images by four and kernels by two; images and all variables."""
    actual = trained(trainings, case)
    assert actual["devices"] == 8
    if "accumulator_dtype" not in case:
        assert_same(actual, trained(trainings, PLAIN))
    else:  # a sum in another order may round a momentum up, by 1/256 of it
        assert_same(actual, trained(trainings, BFLOAT16), is_rounded=True)


@pytest.mark.full
def test_two_passes_and_recomputed_blocks_drop_the_same(trainings: processes.Together) -> None:
    """One device that keeps everything, eight that recompute: one mask for the whole batch."""
    first, plain = trained(trainings, RANDOM), trained(trainings, PLAIN)
    assert_same(trained(trainings, RANDOM_TWICE), first)
    assert np.abs(np.subtract(first["losses"], plain["losses"])).max() > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_momenta_are_split_as_their_weights(
    case: dict[str, Any], trainings: processes.Together
) -> None:
    """In any dtype: a device that has an eighth of a weight has an eighth of its momentum."""
    actual, least = trained(trainings, case), LEAST_PART[case["layout"]]
    assert actual["split_alike"]
    assert actual["momenta_part"] == actual["weights_part"]
    assert least <= actual["weights_part"] < least * 1.2


@pytest.mark.full
def test_two_processes_train_as_one(trainings: processes.Together) -> None:
    """Each has four devices and half of the images, and of all weights and momenta."""
    expected = trained(trainings, PLAIN)
    for (actual,) in trainings.results("two"):
        assert_same(actual, expected)
        assert actual["devices"] == 8
        assert actual["momenta_part"] == actual["weights_part"] < 0.15


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


def model_for() -> ExactModel:
    """A network that compiles fast."""
    inputs = keras.Input((16, 16, 3))
    return ExactModel(inputs, keras.layers.Dense(6)(keras.layers.Flatten()(inputs)))


def images_for(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, 16, 16, 3)).astype(np.float32)


def test_fit_reports_and_options_are_saved(tmp_path: Path) -> None:
    """The norm in the history of training alone; a file trains on with the same options."""
    model = model_for()
    options: dict[str, Any] = {"accumulate": 2, "sam_rho": 0.05, "report_gradient_norm": True}
    model.compile(keras.optimizers.SGD(0.1), CROSS_ENTROPY, metrics=["accuracy"], **options)
    history = model.fit(
        images_for(6), np.arange(6), validation_split=0.34, epochs=2, batch_size=4, verbose=0
    ).history
    assert sorted(history) == ["accuracy", "gradient_norm", "loss", "val_accuracy", "val_loss"]
    assert (np.array(history["gradient_norm"]) > 0).all()
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert options.items() <= again.get_compile_config().items()
    for each in (model, again):
        each.fit(images_for(4), np.arange(4), batch_size=4, shuffle=False, verbose=0)
    for ours, theirs in zip(again.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"accumulate": 0}, {}, "accumulate must be at least 1.*accumulate=0"),
    ({"sam_rho": -1.0}, {}, "sam_rho at least 0.*sam_rho=-1.0"),
    (
        {
            "accumulate": 2,
            "loss": keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
        },
        {"sample_weight": np.ones(4)},
        "Received: mean_with_sample_weight; leave accum",
    ),
    ({"accumulate": 5}, {}, "A batch of 4 images cannot be split into accumulate=5 parts"),
    (
        {"accumulate": 2, "loss": keras.losses.SparseCategoricalCrossentropy(ignore_class=1)},
        {},
        "Received: SparseCategoricalCrossentropy; leave accumulate at 1",
    ),
]


@pytest.mark.parametrize(("options", "arguments", "message"), BAD)
def test_what_is_not_exact_is_refused(
    options: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    """In a sentence with what was received and what to do."""
    model = model_for()

    def train() -> None:
        model.compile("sgd", **{"loss": CROSS_ENTROPY, **options})
        model.train_on_batch(images_for(4), np.arange(4), **arguments)

    with pytest.raises(ValueError, match=message):
        train()
