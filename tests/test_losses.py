"""What the outputs of a model mean is one fact, in predictions, evaluation, pages and files."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import keras
import numpy as np
import pytest
from conftest import FLOAT32, TINY, randomize
from scipy.special import expit, logit, softmax

from keras_vit import ExactModel, VisionTransformer, ViTConfig, evaluation
from keras_vit.config import Ending, ProblemType, ending_of
from keras_vit.data import Split
from keras_vit.explain import page
from keras_vit.exporting.rebuild import rebuild
from keras_vit.losses import make_loss
from keras_vit.training import open_source

CONFIG = dataclasses.replace(TINY, include_preprocessing=True)
LABELS = tuple("abcdefg")
SINGLE, MULTI, NUMBERS = get_args(ProblemType)
BINARY = keras.losses.BinaryCrossentropy(from_logits=True)
CAST = keras.layers.Activation("linear", dtype="float32")
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)


def vit(activation: str | None = None, **fields: Any) -> VisionTransformer:
    config = dataclasses.replace(CONFIG, classifier_activation=activation, **fields)
    return randomize(VisionTransformer(config))


def around(*layers: Any, loss: Any = None, inner: keras.Model | None = None) -> keras.Model:
    images = x = keras.Input((32, 48, 3))
    for layer in (inner or vit(classes=None), *layers):
        x = layer(x)
    return compiled(randomize(ExactModel(images, x), seed=3), loss)


def compiled(model: keras.Model, loss: Any) -> keras.Model:
    model.compile("sgd", loss)
    return model


def dense(activation: Any = None, units: int = 7) -> keras.layers.Layer:
    return keras.layers.Dense(units, activation)


ENDINGS: dict[str, tuple[Callable[[], keras.Model], Ending]] = {
    "softmax": (lambda: vit("softmax"), Ending(SINGLE, True)),
    "sigmoid": (lambda: vit("sigmoid"), Ending(MULTI, True)),
    "logits": (vit, Ending(SINGLE)),
    "logits of sigmoid": (lambda: vit(problem_type=MULTI), Ending(MULTI)),
    "numbers": (lambda: vit(problem_type=NUMBERS), Ending(NUMBERS)),
    "one number": (lambda: vit(classes=1), Ending(NUMBERS)),
    "softmax of numbers": (lambda: vit("softmax", problem_type=NUMBERS), Ending(NUMBERS)),
    "another activation": (lambda: vit("softplus"), Ending(NUMBERS)),
    "features": (lambda: vit(classes=None), Ending(None)),
    "dense, sigmoid": (lambda: around(dense("sigmoid")), Ending(MULTI, True)),
    "a cast": (lambda: around(dense("softmax"), CAST), Ending(SINGLE, True)),
    "an operation": (lambda: around(dense(), keras.ops.sigmoid), Ending(MULTI, True)),
    "dense, tanh": (lambda: around(dense("tanh")), Ending(NUMBERS)),
    "log-softmax": (lambda: around(dense("log_softmax")), Ending(SINGLE)),
    "compiled, classes": (lambda: around(dense(), loss="kl_divergence"), Ending(SINGLE)),
    "compiled, binary": (lambda: around(dense(), loss=BINARY), Ending(MULTI)),
    "compiled, numbers": (lambda: around(dense(), loss=["mse"]), Ending(NUMBERS)),
    "compiled, alone": (lambda: compiled(vit(), BINARY), Ending(MULTI)),
    "compiled with mse": (lambda: compiled(vit(), "mse"), Ending(NUMBERS)),
    "compiled, nested": (lambda: around(inner=vit(), loss="mse"), Ending(NUMBERS)),
    "nested": (lambda: around(inner=vit("sigmoid")), Ending(MULTI, True)),
    "nested logits": (lambda: around(inner=vit(problem_type=MULTI)), Ending(MULTI)),
    "nested features": (lambda: around(CAST), Ending(None)),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_every_use_honours_the_ending(name: str, tmp_path: Path) -> None:
    """The same probabilities everywhere, after saving too; of what has none a sentence."""
    make, ending = ENDINGS[name]
    model, split = make(), Split(images=PIXELS, targets=np.arange(5, dtype=np.int32))
    outputs = np.asarray(model(PIXELS.astype(np.float32)))
    assert ending_of(model) == ending
    model.save(tmp_path / "model.keras")
    assert ending_of(open_source(tmp_path / "model.keras").model) == ending
    exported, subject = rebuild(model), page.make_subject(model, PIXELS[0])
    answers = exported.answer(PIXELS.astype(np.float32))
    assert exported.answers == ending.output
    assert exported.config is None or exported.config.resolved_problem_type == ending.problem_type
    np.testing.assert_allclose(answers[ending.output], outputs, atol=FLOAT32)
    if ending.activation is None:
        assert subject.scores is None
        assert exported.output_names == (ending.output,)
        with pytest.raises(ValueError, match=f"answers with {ending.output}, not with classes"):
            evaluation.predict(model, [PIXELS[0]], labels=LABELS)
        with pytest.raises(ValueError, match="there is nothing to name or to count"):
            evaluation.evaluate(model, split, labels=LABELS)
        return
    of_logits = softmax(outputs, axis=-1) if ending.activation == "softmax" else expit(outputs)
    expected = outputs if ending.is_probabilities else of_logits
    found = evaluation.predict(model, list(PIXELS), labels=LABELS, top=7)
    named = [[p.probability for p in sorted(one, key=lambda p: p.label)] for one in found]
    np.testing.assert_allclose(named, expected, atol=FLOAT32)
    np.testing.assert_allclose(answers["probabilities"], expected, atol=FLOAT32)
    assert subject.scores == pytest.approx(expected[0], abs=FLOAT32)
    scores = np.log(expected) if ending.activation == "softmax" else logit(expected)
    loss = make_loss(ending.activation)(np.eye(7)[split.targets], scores)  # type: ignore[arg-type]
    evaluated = evaluation.evaluate(model, split, labels=LABELS)
    assert evaluated.loss == pytest.approx(float(loss), rel=1e-4)
    assert [one[0].label for one in found] == [LABELS[row.argmax()] for row in expected]


@pytest.mark.parametrize(("units", "taken"), [(7, Ending(SINGLE)), (1, Ending(NUMBERS))])
def test_what_nothing_says_is_assumed_once(units: int, taken: Ending) -> None:
    """A warning names it, and what would say it."""
    model = around(dense(units=units))
    with pytest.warns(UserWarning, match="does not say what its outputs mean.*compile it"):
        assert ending_of(model) == taken
    assert ending_of(model) == taken  # another warning would be an error


def test_a_config_that_contradicts_itself_is_refused() -> None:
    """Softmax is of classes that exclude each other; logits keep what they mean."""
    wrong = {"softmax": MULTI, "sigmoid": SINGLE, "relu": MULTI, "log_softmax": MULTI}
    for activation, said in wrong.items():
        with pytest.raises(ValueError, match=f"problem_type must be None, .*'{activation}'. Re"):
            ViTConfig(classifier_activation=activation, problem_type=said)
    logits = ViTConfig(classifier_activation="sigmoid").with_activation(None)
    assert logits.problem_type == logits.with_activation("linear").problem_type == MULTI
    assert logits.with_activation("softmax").resolved_problem_type == SINGLE
    assert ViTConfig().with_activation(None) == ViTConfig()
