"""Tests of keras_vit.training.distillation."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import variants_oracle
from conftest import FLOAT32, TINY, randomize
from scipy.special import log_softmax, softmax

from keras_vit import VisionTransformer
from keras_vit.data import Augmentation, ImageData, Split
from keras_vit.training import (
    RECIPES,
    DistillationLoss,
    DistillationModel,
    Execution,
    TrainingInterrupted,
    train,
)
from keras_vit.training.execution import StrategyName

SMALL = dataclasses.replace(TINY, num_layers=1)
LOSS = keras.losses.CategoricalCrossentropy(from_logits=True)


def logits(seed: int, count: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (count, 7)).astype(np.float32)


def expected(student: np.ndarray, teacher: np.ndarray, kind: str, temperature: float) -> np.ndarray:
    """The paper's equations 2 and 3 in NumPy, of each image."""
    if kind == "hard":
        return np.asarray(
            -log_softmax(student, axis=1)[np.arange(len(student)), teacher.argmax(axis=1)]
        )
    wanted = softmax(teacher / temperature, axis=1)
    said = log_softmax(student / temperature, axis=1)
    return np.asarray(temperature**2 * (wanted * (np.log(wanted) - said)).sum(axis=1))


@pytest.mark.parametrize(
    ("kind", "temperature"), [("soft", 1.0), ("soft", 3.0), ("soft", 20.0), ("hard", 3.0)]
)
def test_the_losses_are_the_papers(kind: Any, temperature: float) -> None:
    """Of each image, against NumPy; another temperature is another loss."""
    student, teacher = logits(0), logits(1)
    loss = DistillationLoss(kind, temperature=temperature)
    right = expected(student, teacher, kind, temperature)
    np.testing.assert_allclose(loss.call(teacher, student), right, rtol=1e-3)
    assert float(loss(teacher, student)) == pytest.approx(right.mean(), rel=1e-3)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert float(again(teacher, student)) == float(loss(teacher, student))
    if kind == "soft":
        assert not np.allclose(DistillationLoss(temperature=2.0).call(teacher, student), right)


def make(kind: Any = "soft", *, teacher: keras.Model | None = None, **fields: Any) -> Any:
    """A random student of a random, bigger teacher, compiled."""
    student = randomize(VisionTransformer(SMALL), seed=1)
    teacher = teacher or randomize(VisionTransformer(TINY), seed=2)
    model = DistillationModel(student, teacher, distillation=kind, **fields)
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    return model


@pytest.fixture
def batch() -> tuple[np.ndarray, np.ndarray]:
    """Six images, the last of which has no label."""
    images = np.random.default_rng(5).uniform(-1, 1, (6, 32, 48, 3)).astype(np.float32)
    targets = np.eye(7, dtype=np.float32)[[0, 1, 2, 3, 4, 5]]
    targets[5] = 0
    return images, targets


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_labels_and_teacher_are_weighed(kind: Any, batch: tuple[np.ndarray, np.ndarray]) -> None:
    """The training loss is their weighted sum; evaluation is the labels' loss of the answer."""
    images, targets = batch
    model = make(kind, weight=0.3, temperature=2.0)
    said, taught = (np.asarray(part(images), np.float64) for part in (model.student, model.teacher))
    labels = -(targets * log_softmax(said, axis=1)).sum(axis=1).mean()
    teaching = expected(said, taught, kind, 2.0).mean()
    answer = model(images, training=True)
    actual = model.compute_loss(x=images, y=targets, y_pred=answer)
    np.testing.assert_allclose(actual, 0.7 * labels + 0.3 * teaching, rtol=1e-4)
    actual = model.compute_loss(x=images, y=targets, y_pred=answer, training=False)
    np.testing.assert_allclose(actual, labels, rtol=1e-4)
    assert float(model.accuracy.result()) == pytest.approx(
        (said.argmax(axis=1) == np.arange(6))[:5].mean(), abs=1e-6
    )


def test_a_student_may_depart_from_its_teacher(batch: tuple[np.ndarray, np.ndarray]) -> None:
    """One with rotary positions and norms elsewhere learns too, every weight of it."""
    config = dataclasses.replace(SMALL, **variants_oracle.MODERN)
    student = randomize(VisionTransformer(config), seed=1)
    model = DistillationModel(student, randomize(VisionTransformer(TINY), seed=2))
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    before = student.get_weights()
    losses = model.fit(*batch, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    for old, variable in zip(before, student.weights, strict=True):
        is_unseen = variable.path.endswith("key_norm/beta")
        assert is_unseen or not np.array_equal(old, variable), variable.path


def test_the_distillation_token_learns_from_the_teacher(
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    """Labels train one head, the teacher the other; the answer is the student's own, their mean."""
    images, targets = batch
    config = dataclasses.replace(SMALL, distillation_token=True)
    student = randomize(VisionTransformer(config), seed=1)
    teacher = randomize(VisionTransformer(TINY), seed=2)
    model = DistillationModel(student, teacher, distillation="hard", weight=0.4)
    model.compile("sgd", LOSS)
    answer = model(images, training=True)
    np.testing.assert_allclose(answer["answer"], student(images), atol=1e-5)
    heads = student.features(images, ("head", "distillation_head"))
    said, after = (np.asarray(heads[name], np.float64) for name in ("head", "distillation_head"))
    labels = -(targets * log_softmax(said, axis=1)).sum(axis=1).mean()
    teaching = expected(after, np.asarray(teacher(images)), "hard", 1.0).mean()
    actual = model.compute_loss(x=images, y=targets, y_pred=answer)
    np.testing.assert_allclose(actual, 0.6 * labels + 0.4 * teaching, rtol=1e-4)
    swapped = expected(said, np.asarray(teacher(images)), "hard", 1.0).mean()
    assert abs(swapped - teaching) > 1e-3
    before = [np.array(value) for value in student.get_layer("distillation_head").get_weights()]
    model.fit(images, targets, verbose=0)
    after = student.get_layer("distillation_head").get_weights()
    assert not np.array_equal(before[0], after[0])


def test_the_teacher_stays_as_it_is(batch: tuple[np.ndarray, np.ndarray]) -> None:
    """After steps its weights have the same bits; they are neither trained nor saved."""
    images, targets = batch
    model = make()
    before = [value.copy() for value in model.teacher.get_weights()]
    student = [value.copy() for value in model.student.get_weights()]
    model.fit(images, targets, epochs=2, verbose=0)
    for old, new in zip(before, model.teacher.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    ours = {id(variable) for variable in model.variables}
    assert ours == {id(variable) for variable in model.student.variables}
    assert not all(
        np.array_equal(a, b) for a, b in zip(student, model.student.get_weights(), strict=True)
    )


def test_a_teacher_that_drops_units_does_not() -> None:
    """It is asked in inference mode: the same images give the same answer."""
    teacher = randomize(VisionTransformer(dataclasses.replace(TINY, dropout_rate=0.5)))
    model = make(teacher=teacher)
    images = np.ones((2, 32, 48, 3), np.float32)
    once, twice = (np.asarray(model.teacher_logits(images)) for _ in range(2))
    np.testing.assert_array_equal(once, twice)
    np.testing.assert_allclose(once, teacher(images, training=False), atol=FLOAT32)


def plain_teacher(size: tuple[int | None, int | None], activation: str | None) -> keras.Model:
    """A classifier that is no Vision Transformer."""
    layers = [
        keras.Input((*size, 3)),
        keras.layers.Conv2D(8, 3),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(7, activation=activation),
    ]
    return randomize(keras.Sequential(layers), seed=4)


def test_any_keras_classifier_teaches(batch: tuple[np.ndarray, np.ndarray]) -> None:
    """At a size of its own, with logits or softmax, which say the same."""
    images, _ = batch
    for size in ((16, 16), (32, 48), (None, None)):
        teachers = [plain_teacher(size, activation) for activation in (None, "softmax")]
        said = [np.asarray(make(teacher=each).teacher_logits(images)) for each in teachers]
        of_logits, of_softmax = (softmax(each, axis=1) for each in said)
        np.testing.assert_allclose(of_logits, of_softmax, atol=FLOAT32)
        resized = keras.ops.image.resize(images, size) if None not in size else images
        np.testing.assert_allclose(said[0], teachers[0](resized), atol=1e-5)


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"distillation": "both"}, r"one of \['soft', 'hard'\].*'both'"),
    ({}, {"temperature": 0.0}, "temperature must be above 0.*0.0"),
    ({}, {"weight": 1.5}, "weight must be from 0 to 1.*1.5"),
    ({"classes": 5}, {}, r"the student's 7 classes.*\(None, 5\)"),
    ({"input_shape": (32, 48, 1)}, {}, r"\(height, width, 3\).*48, 1\)"),
    ({"include_preprocessing": True}, {}, "include_preprocessing=True of the teacher, False"),
    ({"image_mean": (0.4, 0.5, 0.6)}, {}, r"same numbers.*image_mean=\(0\.4, 0\.5, 0\.6\)"),
]


@pytest.mark.parametrize(("fields", "arguments", "message"), WRONG)
def test_what_does_not_fit_is_one_sentence(
    fields: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    """Numbers out of range, and a teacher of other classes, channels or pixels."""
    teacher = VisionTransformer(dataclasses.replace(SMALL, **fields))
    with pytest.raises(ValueError, match=message):
        DistillationModel(VisionTransformer(SMALL), teacher, **arguments)


def test_a_student_must_give_logits() -> None:
    """No classifier and a softmax are told."""
    for fields in ({"classes": None}, {"classifier_activation": "softmax"}):
        student = VisionTransformer(dataclasses.replace(SMALL, **fields))
        with pytest.raises(ValueError, match="The student must give logits"):
            DistillationModel(student, VisionTransformer(TINY))


PIXELS = dataclasses.replace(SMALL, include_preprocessing=True, dropout_rate=0.1)
RECIPE = dataclasses.replace(
    RECIPES["scratch"], epochs=2, batch_size=8, augmentation=Augmentation(flip=True), mixup=0.2
)


@pytest.fixture(scope="module")
def data() -> ImageData:
    """Images of seven classes in memory."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (32, 32, 48, 3)).astype(np.uint8)
    part = Split(images=images, targets=(np.arange(32) % 7).astype(np.int32))
    return ImageData(
        source="memory", labels=tuple("abcdefg"), train=part, validation=part, test=part
    )


def distillation(kind: Any = "soft") -> DistillationModel:
    """A student and a teacher that are the same each time, dropout included."""
    keras.utils.set_random_seed(0)
    student = randomize(VisionTransformer(PIXELS), seed=1)
    return DistillationModel(student, plain_teacher((16, 16), "softmax"), distillation=kind)


def test_it_is_resumed_to_the_same_bits(data: ImageData, tmp_path: Path) -> None:
    """Stopped and resumed, the student ends as if never stopped; the run is an ordinary one."""

    def stop(event: Any) -> None:
        if getattr(event, "step", 0) == 3:
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"recipe": RECIPE}
    whole = train(data, out=tmp_path / "whole", model=distillation(), **arguments)
    with pytest.raises(TrainingInterrupted):
        train(data, out=tmp_path / "run", model=distillation(), on_event=stop, **arguments)
    arguments["existing"] = "resume"
    other = DistillationModel(
        VisionTransformer(PIXELS), randomize(plain_teacher((16, 16), None), seed=9)
    )
    with pytest.raises(ValueError, match=r"was started with distillation.teacher_sha256="):
        train(data, out=tmp_path / "run", model=other, **arguments)
    resumed = train(data, out=tmp_path / "run", model=distillation(), **arguments)
    results = [run.config["result"]["state_sha256"] for run in (whole, resumed)]
    assert results[0] == results[1]
    assert type(resumed.model) is VisionTransformer
    assert resumed.config["distillation"]["kind"] == "soft"
    size = (tmp_path / "run" / "model.keras").stat().st_size
    assert size < 10 * sum(value.nbytes for value in resumed.model.get_weights())


@pytest.mark.full
def test_two_replicas_distil_what_one_device_does(data: ImageData, tmp_path: Path) -> None:
    """Mirrored, in parts, with the teacher on each replica: the same student."""
    strategies: list[tuple[StrategyName, int]] = [("none", 1), ("mirrored", 2)]
    recipe = dataclasses.replace(
        RECIPE, optimizer="momentum", accumulator_dtype="float32", dropout_rate=0.0
    )
    runs = [
        train(
            data,
            out=tmp_path / strategy,
            model=distillation("hard"),
            recipe=recipe,
            execution=Execution(strategy=strategy, accumulate=accumulate),
        )
        for strategy, accumulate in strategies
    ]
    for one, two in zip(*(run.model.get_weights() for run in runs), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)  # after eight steps
