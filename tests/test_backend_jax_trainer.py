"""Tests of the training step on JAX: the original's steps, on one device and on eight.

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
from conftest import TINY, randomize

from keras_vit.model import VisionTransformer

if keras.backend.backend() != "jax":
    pytest.skip("JAX's part", allow_module_level=True)

import jax

GOLDEN = np.load(published.GOLDEN / "finetune.npz")
PLAIN: dict[str, Any] = {}
BFLOAT16 = {"accumulator_dtype": "bfloat16"}
# Sixteen images in parts of as many, and of 6, 5 and 5.
PARTS = [{"accumulate": 2}, {"accumulate": 3}, {"accumulate": 4, "remat": True}]
SAM = [{"sam_rho": 0.05}, {"sam_rho": 0.05, "accumulate": 2}, {"sam_rho": 0.05, "remat": True}]
HALF = [{"precision": "mixed_float16"}, {"precision": "mixed_float16", "accumulate": 2}]
ONE = [PLAIN, BFLOAT16, *PARTS, *SAM, *HALF]
SHARED = [PLAIN, PARTS[0], SAM[0]]
# (devices that share the images, devices that share kernels)
LAYOUTS = {"one": (1, 1), "data": (8, 1), "both": (4, 2)}
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(scope="module")
def trainings() -> Iterator[processes.Together]:
    started = {
        name: [jax_fine_tuning.start(list(layout), ONE if name == "one" else SHARED)]
        for name, layout in LAYOUTS.items()
    }
    with processes.Together(started) as together:
        yield together


def trained(together: processes.Together, name: str, case: dict[str, Any]) -> dict[str, Any]:
    (results,) = together.results(name)
    numbers: dict[str, Any] = results[(ONE if name == "one" else SHARED).index(case)]
    return numbers


def assert_same(actual: dict[str, Any], expected: dict[str, Any], *, atol: float = 1e-5) -> None:
    for name in ("losses", "gradient_norms", "head_bias", "cls", "accuracies"):
        np.testing.assert_allclose(actual[name], expected[name], atol=atol, rtol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("case", "losses", "tolerance"),
    [(PLAIN, "losses_float32_momentum", 1e-4), (BFLOAT16, "losses", 2e-3)],
    ids=["float32", "bfloat16"],
)
def test_twelve_steps_are_the_originals(
    case: dict[str, Any], losses: str, tolerance: float, trainings: processes.Together
) -> None:
    """Clipping, momentum, schedule: the original's losses, and with its dtype its norms too."""
    actual = trained(trainings, "one", case)
    np.testing.assert_allclose(actual["losses"], GOLDEN[losses], rtol=0, atol=tolerance)
    if case is BFLOAT16:
        np.testing.assert_allclose(actual["gradient_norms"], GOLDEN["gradient_norms"], rtol=5e-3)
    assert actual["evaluated"] == ["accuracy", "loss"]


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_parts_train_as_the_whole_batch(
    case: dict[str, Any], trainings: processes.Together
) -> None:
    """Equal parts and others, recomputed: losses, norms before clipping, weights, accuracies."""
    assert_same(trained(trainings, "one", case), trained(trainings, "one", PLAIN))


def test_two_passes_go_with_parts_and_recomputing(trainings: processes.Together) -> None:
    """Sharpness-aware minimisation trains something else, and the same in each of these ways."""
    first, *others = (trained(trainings, "one", case) for case in SAM)
    for other in others:
        assert_same(other, first)
    plain = trained(trainings, "one", PLAIN)
    assert np.abs(np.subtract(first["losses"], plain["losses"])).max() > 1e-2


def test_half_precision_has_a_loss_scale(trainings: processes.Together) -> None:
    """Norms are of gradients without it, and the losses are near those of float32."""
    first, parts = (trained(trainings, "one", case) for case in HALF)
    plain = trained(trainings, "one", PLAIN)
    for actual in (first, parts):
        np.testing.assert_allclose(actual["losses"], plain["losses"], rtol=0, atol=0.05)
        np.testing.assert_allclose(actual["gradient_norms"], plain["gradient_norms"], rtol=0.1)


@pytest.mark.parametrize("case", SHARED, ids=str)
@pytest.mark.parametrize("name", ["data", "both"])
def test_eight_devices_train_as_one(
    name: str, case: dict[str, Any], trainings: processes.Together
) -> None:
    """Images shared by eight, and images by four and kernels by two."""
    actual = trained(trainings, name, case)
    assert_same(actual, trained(trainings, "one", case))
    assert (actual["devices"], actual["parts"]) == (8, LAYOUTS[name][1])


def images_for(count: int) -> np.ndarray:
    shape = (count, *TINY.input_shape)
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def test_two_passes_are_those_of_the_paper() -> None:
    """arXiv 2010.01412, Algorithm 1, by hand: the gradient at w + rho g / |g| is taken at w."""
    model = randomize(VisionTransformer(TINY))
    images, labels = images_for(4), np.arange(4)
    trainable = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]

    def loss(values: Any) -> Any:
        return CROSS_ENTROPY(labels, model.stateless_call(values, others, images)[0])

    gradients = jax.grad(loss)(trainable)
    norm = sum(float((g**2).sum()) for g in gradients) ** 0.5
    point = [value + 0.1 * g / norm for value, g in zip(trainable, gradients, strict=True)]
    expected = [v - 0.5 * g for v, g in zip(trainable, jax.grad(loss)(point), strict=True)]
    expected = [np.array(value) for value in expected]
    model.compile(keras.optimizers.SGD(0.5), CROSS_ENTROPY, sam_rho=0.1)
    model.train_on_batch(images, labels)
    for variable, value in zip(model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(variable.value, value, rtol=0, atol=2e-5, err_msg=variable.path)


def test_fit_reports_and_options_are_saved(tmp_path: Path) -> None:
    """The norm in the history of training alone; a file trains on with the same options."""
    model = VisionTransformer(TINY)
    options = {"accumulate": 2, "sam_rho": 0.05, "report_gradient_norm": True}
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
    ({"accumulate": 2}, {"sample_weight": np.ones(4)}, "Received: sample weights; leave accum"),
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
    model = VisionTransformer(TINY)

    def train() -> None:
        model.compile("sgd", **{"loss": CROSS_ENTROPY, **options})
        model.train_on_batch(images_for(4), np.arange(4), **arguments)

    with pytest.raises(ValueError, match=message):
        train()
