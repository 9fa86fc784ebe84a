"""Tests of keras_vit.training.objectives and distillation: what each model is trained for."""

import dataclasses
import functools
import math
from typing import Any

import keras
import numpy as np
import pytest
import variants_oracle
from conftest import FLOAT32, TINY, assert_same_arrays, randomize
from scipy.special import log_softmax, softmax
from trainings import in_memory, noise, not_refused

import keras_vit
from keras_vit import VisionTransformer, training
from keras_vit.training import DistillationModel, Execution, MaskedPatchModel, objectives
from keras_vit.training.distillation import distillation_loss
from keras_vit.training.execution import Job
from keras_vit.training.objectives import objective_of

CONFIG = dataclasses.replace(TINY, num_layers=2, include_preprocessing=True, dropout_rate=0.1)
DATA = in_memory(noise(np.arange(24) % 7), noise(np.arange(24) % 7), labels="abcdefg")
JOB = Job(DATA, recipe=training.RECIPES["scratch"], execution=Execution())
IN_BFLOAT16 = dataclasses.replace(JOB, execution=Execution(precision="mixed_bfloat16"))
SMALL = dataclasses.replace(TINY, num_layers=1)
LOSS = keras.losses.CategoricalCrossentropy(from_logits=True)
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"distillation": "both"}, r"one of \['soft', 'hard'\].*'both'"),
    ({}, {"temperature": 0.0}, "temperature must be above 0.*0.0"),
    ({}, {"weight": 1.5}, "weight must be from 0 to 1.*1.5"),
    ({"classes": 5}, {}, r"the student's 7 classes.*\(None, 5\)"),
    ({"input_shape": (32, 48, 1)}, {}, r"\(height, width, 3\).*48, 1\)"),
    ({"include_preprocessing": True}, {}, "include_preprocessing=True of the teacher, False"),
    ({"image_mean": (0.4, 0.5, 0.6)}, {}, r"same numbers.*image_mean=\(0\.4, 0\.5, 0\.6\)"),
]


def test_a_copy_trains_what_the_model_would() -> None:
    """Another precision makes one: frozen blocks stay frozen, low-rank matrices come along."""
    frozen = VisionTransformer(CONFIG)
    keras_vit.freeze(frozen, blocks=1)
    adapted = randomize(keras_vit.lora(VisionTransformer(CONFIG), rank=2, targets=("qkv", "fc2")))
    for model in (frozen, adapted):
        copy: Any = objective_of(model, IN_BFLOAT16).model
        assert copy is not model
        assert type(copy) is type(model)
        assert_same_arrays(copy.weights, model.weights)
        for ours, theirs in zip(copy.weights, model.weights, strict=True):
            assert (ours.path, ours.trainable) == (theirs.path, theirs.trainable)
    assert frozen.trainable_variables[0].path.startswith("block_1")
    assert (copy.rank, copy.targets) == (2, ("qkv", "fc2"))


def test_the_kind_of_training_is_described() -> None:
    """What decides the result is in config.json: the adapter's settings, what is trained."""
    plain = objective_of(VisionTransformer(CONFIG), JOB).settings()
    assert plain["objective"] == "classification"
    assert plain["trained_parameters"] == keras_vit.parameter_count(CONFIG)
    assert "lora" not in plain
    adapted = keras_vit.lora(VisionTransformer(CONFIG), rank=2, targets=("qkv", "fc2"))
    thin = objective_of(adapted, JOB).settings()
    assert thin["lora"] == {"rank": 2, "targets": ["qkv", "fc2"], "alpha": None}
    assert thin["trained_parameters"] == sum(
        math.prod(v.shape) for v in adapted.trainable_variables
    )


def test_each_kind_of_model_has_its_objective() -> None:
    """Also where a function makes the model, which is not copied; what nothing trains is told."""
    vit = VisionTransformer(CONFIG)
    images = keras.Input(CONFIG.input_shape)
    hand_built = keras.Model(images, vit(images))
    masked = MaskedPatchModel(CONFIG)
    unlabelled = dataclasses.replace(JOB, has_labels=False)
    for model, job, kind in (
        (CONFIG, JOB, objectives.ClassificationObjective),
        (vit, JOB, objectives.ClassificationObjective),
        (DistillationModel(vit, vit), JOB, objectives.DistillationObjective),
        (hand_built, JOB, objectives.CompiledModelObjective),
        (CONFIG, unlabelled, objectives.MaskedPatchObjective),
        (masked, unlabelled, objectives.MaskedPatchObjective),
    ):
        assert type(objective_of(functools.partial(lambda model: model, model), job)) is kind
    assert objective_of(lambda: vit, JOB).model is vit
    calls = [
        (lambda: objective_of(lambda: masked, JOB), "give it to `pretrain`"),
        (lambda: objective_of(lambda: vit, unlabelled), "Received: VisionTransformer"),
        (lambda: objective_of(keras.Model(), JOB), r"train takes a ViTConfig, .* Received: Model"),
    ]
    assert not not_refused(calls, TypeError)


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
    loss = distillation_loss(teacher, student, distillation=kind, temperature=temperature)
    right = expected(student, teacher, kind, temperature)
    np.testing.assert_allclose(loss, right, rtol=1e-3)
    if kind == "soft":
        other = distillation_loss(teacher, student, distillation=kind, temperature=2.0)
        assert not np.allclose(other, right)


def make(
    kind: Any = "soft",
    *,
    student: keras_vit.ViTConfig = SMALL,
    teacher: keras.Model | None = None,
    **fields: Any,
) -> Any:
    """A random student of a random, bigger teacher, compiled."""
    learning = randomize(VisionTransformer(student), seed=1)
    teacher = teacher or randomize(VisionTransformer(TINY), seed=2)
    model = DistillationModel(learning, teacher, distillation=kind, **fields)
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


def test_a_student_learns_and_its_teacher_stays(batch: tuple[np.ndarray, np.ndarray]) -> None:
    """Every weight of one with rotary positions and norms elsewhere; the teacher is not saved."""
    config = dataclasses.replace(SMALL, **variants_oracle.MODERN)
    model = make(student=config)
    student = model.student
    before, teacher = student.get_weights(), model.teacher.get_weights()
    losses = model.fit(*batch, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    for old, variable in zip(before, student.weights, strict=True):
        is_unseen = variable.path.endswith("key_norm/beta")
        assert is_unseen or not np.array_equal(old, variable), variable.path
    assert_same_arrays(model.teacher.get_weights(), teacher)
    assert {id(variable) for variable in model.variables} == {id(v) for v in student.variables}


def test_the_distillation_token_learns_from_the_teacher(
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    """Labels train one head, the teacher the other; the answer is the student's own, their mean."""
    images, targets = batch
    config = dataclasses.replace(SMALL, distillation_token=True)
    model = make("hard", student=config, weight=0.4)
    student, teacher = model.student, model.teacher
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
    before = np.array(student.get_layer("distillation_head").kernel)
    model.fit(images, targets, verbose=0)
    assert not np.array_equal(before, student.get_layer("distillation_head").kernel)


def test_a_teacher_that_drops_units_does_not() -> None:
    """It is asked in inference mode: the same images give the same answer."""
    teacher = randomize(VisionTransformer(dataclasses.replace(TINY, dropout_rate=0.5)))
    model = make(teacher=teacher)
    images = np.ones((2, 32, 48, 3), np.float32)
    once, twice = (np.asarray(model.teacher_logits(images)) for _ in range(2))
    np.testing.assert_array_equal(once, twice)
    np.testing.assert_allclose(once, teacher(images, training=False), atol=FLOAT32)


def test_any_keras_classifier_teaches(batch: tuple[np.ndarray, np.ndarray]) -> None:
    """At a size of its own, with logits, softmax or sigmoid, which say the same."""
    images, _ = batch
    for size in ((16, 16), (32, 48), (None, None)):
        teachers = []
        for activation in (None, "softmax", "sigmoid"):
            layers = [keras.Input((*size, 3)), keras.layers.Conv2D(8, 3)]
            layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(7, activation)]
            teachers.append(randomize(keras.Sequential(layers), seed=4))
        said = [np.asarray(make(teacher=each).teacher_logits(images)) for each in teachers]
        of_logits, *others = (softmax(each, axis=1) for each in said)
        for of_probabilities in others:
            np.testing.assert_allclose(of_logits, of_probabilities, atol=FLOAT32)
        resized = keras.ops.image.resize(images, size) if None not in size else images
        np.testing.assert_allclose(said[0], teachers[0](resized), atol=1e-5)


def test_what_does_not_fit_is_one_sentence() -> None:
    """Numbers out of range, and a teacher of other classes, channels or pixels; no logits."""

    def make(fields: dict[str, Any], given: dict[str, Any], student: dict[str, Any]) -> Any:
        teacher, learning = (
            VisionTransformer(dataclasses.replace(SMALL, **each)) for each in (fields, student)
        )
        return functools.partial(DistillationModel, learning, teacher, **given)

    calls = [(make(fields, given, {}), text) for fields, given, text in WRONG]
    for student in ({"classes": None}, {"classifier_activation": "softmax"}):
        calls.append((make({}, {}, student), "The student must give logits"))
    assert not not_refused(calls)
