"""Tests of the training step against its mathematics in NumPy; TensorFlow and JAX run the same.

The network is one layer of softmax regression, whose gradient is a line: so each of clipping,
parts, two passes, averages and loss scales is a line too.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_vit.model import ExactModel

if keras.backend.backend() not in ("tensorflow", "jax"):
    pytest.skip("the step of TensorFlow and of JAX", allow_module_level=True)

IMAGES, FEATURES, CLASSES, STEPS, RATE = 7, 5, 4, 4, 0.5
# In an option's place: what it is called in NumPy's form below.
CASES: list[dict[str, Any]] = [
    {},
    {"clip": 0.3},
    {"gradient_accumulation_steps": 3},
    {"rho": 0.2},
    {"average": 0.9},
    {"smoothing": 0.1},
    {"clip": 0.3, "gradient_accumulation_steps": 3, "rho": 0.2, "average": 0.9, "smoothing": 0.1},
]


def model_for(weights: np.ndarray, **options: Any) -> ExactModel:
    """A layer with these weights, after dropout and in a dtype if the options say so."""
    inputs = x = keras.Input((len(weights),))
    if options.get("dropout"):
        x = keras.layers.Dropout(options["dropout"], seed=3)(x)
    dense = keras.layers.Dense(
        weights.shape[1], use_bias=False, dtype=options.get("dtype", "float32")
    )
    model = ExactModel(inputs, dense(x))
    dense.kernel.assign(weights)
    average = options.get("average")
    optimizer: Any = keras.optimizers.SGD(
        RATE,
        global_clipnorm=options.get("clip"),
        use_ema=average is not None,
        ema_momentum=average or 0.99,
    )
    if "scale" in options:
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=options["scale"], dynamic_growth_steps=2
        )
    smoothing = options.get("smoothing", 0.0)
    model.compile(
        optimizer,
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing),
        gradient_accumulation_steps=options.get("gradient_accumulation_steps", 1),
        sam_rho=options.get("rho", 0.0),
        report_gradient_norm=True,
    )
    return model


def batch(images: int = IMAGES, features: int = FEATURES) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(images, features)).astype("float32")
    return x, np.eye(CLASSES, dtype="float32")[generator.integers(0, CLASSES, images)]


def weights_for(features: int = FEATURES) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(features, CLASSES)).astype("float32")


def loss_and_gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    logits = x @ w
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -float((y * logs).sum(axis=1).mean()), x.T @ (np.exp(logs) - y) / len(x)


def train(w: np.ndarray, x: np.ndarray, y: np.ndarray, **case: Any) -> dict[str, Any]:
    """The steps in float64. Parts are not in it: they change nothing."""
    w, x, y = (array.astype("float64") for array in (w, x, y))
    smoothing, average = case.get("smoothing", 0.0), case.get("average", 0.0)
    y = y * (1 - smoothing) + smoothing / CLASSES
    mean, losses, norms = w, [], []
    for step in range(case.get("steps", STEPS)):
        _, gradient = loss_and_gradient(w, x, y)
        point = w + case.get("rho", 0.0) * gradient / np.linalg.norm(gradient)
        loss, gradient = loss_and_gradient(point, x, y)
        losses.append(loss)
        norms.append(np.linalg.norm(gradient))
        w = w - RATE * gradient * min(1.0, case.get("clip", np.inf) / norms[-1])
        mean = average * mean + (1 - average) * w if step else w  # Keras' averages begin here
    return {"loss": losses, "gradient_norm": norms, "weights": mean}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_of_numpy(case: dict[str, Any]) -> None:
    """Losses, norms before clipping in training alone, and the weights that `fit` ends with."""
    x, y = batch()
    model = model_for(weights_for(), **case)
    history = model.fit(x, y, batch_size=IMAGES, epochs=STEPS, shuffle=False, verbose=0).history
    expected = train(weights_for(), x, y, **case)
    plain = train(weights_for(), x, y)
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(model.get_weights()[0], expected["weights"], rtol=1e-5, atol=1e-6)
    assert set(model.evaluate(x, y, verbose=0, return_dict=True)) == {"loss"}
    # What the case adds shows, except parts.
    changed = not np.allclose(plain["weights"], expected["weights"], rtol=1e-3)
    assert changed == bool(case.keys() - {"gradient_accumulation_steps"})


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "structure",
    [lambda a, b: [a, b], lambda a, b: {"b": a, "a": b}, lambda a, b: {"b": (a,), "a": {"c": b}}],
    ids=["list", "dictionary", "nested"],
)
def test_each_output_has_its_loss(structure: Any, steps: int) -> None:
    """Each is the mean over all images, though the last batch is smaller; the loss is their sum."""
    (x, y), inputs = batch(), keras.Input((FEATURES,))
    outputs = [keras.layers.Dense(n, name=f"to_{n}")(inputs) for n in (CLASSES, 1)]
    model = ExactModel(inputs, structure(*outputs))
    model.compile(
        keras.optimizers.SGD(0.0),  # so that one model has all batches
        structure("mse", "mae"),
        loss_weights=structure(0.5, 2.0),
        gradient_accumulation_steps=steps,
    )
    answers = {value.shape[-1]: value for value in keras.tree.flatten(model.predict(x, verbose=0))}
    terms = [np.square(y - answers[CLASSES]).mean(), np.abs(x[:, :1] - answers[1]).mean()]
    expected = sorted([0.5 * terms[0] + 2 * terms[1], *terms])
    data = {"x": x, "y": structure(y, x[:, :1]), "batch_size": 4, "verbose": 0}
    trained = sorted(value for (value,) in model.fit(**data).history.values())
    evaluated = sorted(model.evaluate(**data, return_dict=True).values())
    np.testing.assert_allclose([trained, evaluated], [expected, expected], rtol=1e-5)


def test_a_loss_scale_grows_and_steps_stay_the_same() -> None:
    """Twice in four steps; parts and two passes see the scale, weights and norms do not."""
    x, y = batch()
    case = {"gradient_accumulation_steps": 2, "rho": 0.2, "clip": 0.3}
    model = model_for(weights_for(), dtype="mixed_float16", scale=4.0, **case)
    history = model.fit(x, y, batch_size=IMAGES, epochs=STEPS, shuffle=False, verbose=0).history
    expected = train(weights_for(), x, y, **case)
    assert float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)) == 16.0
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-2, err_msg=name)
    np.testing.assert_allclose(model.get_weights()[0], expected["weights"], atol=5e-3)


def test_a_step_that_overflows_is_left_out() -> None:
    """The scale is halved each time, and no weight changes."""
    x, y = batch()
    model = model_for(weights_for(), dtype="mixed_float16", scale=2.0**60, rho=0.2)
    model.fit(x, y, batch_size=IMAGES, epochs=3, shuffle=False, verbose=0)
    assert float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)) == 2.0**57
    np.testing.assert_array_equal(model.get_weights()[0], weights_for())


@pytest.mark.parametrize("steps", [1, 2])
def test_both_passes_of_a_step_have_one_mask(steps: int) -> None:
    """A weight of a dropped feature has no gradient: the step tells the mask of each image."""
    x, y = np.kron(np.eye(2, dtype="float32"), np.full((1, 64), 1 / 8)), batch(images=2)[1]
    model = model_for(weights_for(128), dropout=0.5, rho=0.5, gradient_accumulation_steps=steps)
    model.train_on_batch(x, y)
    after = model.get_weights()[0]
    mask = (after != weights_for(128)).any(axis=1)
    assert 40 < mask.sum() < 88
    expected = train(weights_for(128), 2 * x * mask, y, rho=0.5, steps=1)["weights"]
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2])
def test_each_micro_batch_has_its_own_mask(steps: int) -> None:
    """Of features half of which one image has, two images have three quarters."""
    # Small, so that no image is learned at once and has no gradient left.
    x, y = np.full((2, 1024), 1 / 32, "float32"), batch(images=2)[1]
    weights = weights_for(1024) / 32
    model = model_for(weights, dropout=0.5, gradient_accumulation_steps=steps)
    model.train_on_batch(x, y)
    changed = (model.get_weights()[0] != weights).any(axis=1)
    assert changed.mean() == pytest.approx(0.75, abs=0.07)
    model.train_on_batch(x, y)
    twice = (model.get_weights()[0] != weights).any(axis=1)
    assert twice.mean() == pytest.approx(0.94, abs=0.05)


def test_a_saved_model_trains_on_with_its_options(tmp_path: Path) -> None:
    """With all that is particular to this step, and to the same bits."""
    model = model_for(weights_for(), gradient_accumulation_steps=2, rho=0.05)
    model.fit(*batch(), verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    options = {"gradient_accumulation_steps": 2, "sam_rho": 0.05, "report_gradient_norm": True}
    assert options.items() <= again.get_compile_config().items()
    for each in (model, again):
        each.fit(*batch(), shuffle=False, verbose=0)
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])


def test_what_no_step_can_do_is_told() -> None:
    """Keras counts epochs in which nothing happens; each sentence says what was received."""
    model = model_for(weights_for())
    model.trainable = False
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="nothing to train"):
        model.fit(*batch(), verbose=0)
    sentence = "gradient_accumulation_steps must be at least 1.*gradient_accumulation_steps=0"
    with pytest.raises(ValueError, match=sentence):
        model.compile("sgd", "mse", gradient_accumulation_steps=0)
    with pytest.raises(ValueError, match=r"sam_rho at least 0.*sam_rho=-1.0"):
        model.compile("sgd", "mse", sam_rho=-1.0)
