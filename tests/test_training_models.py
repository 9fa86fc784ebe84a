"""Tests of keras_vit.training.models."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import TINY, randomize
from trainings import not_refused

import keras_vit
from keras_vit.training import MODEL_NAMES, MODELS, Run, model_config, pretrained_model


def test_every_name_gives_its_model() -> None:
    """Without sizes the table's own row; image and patch can be replaced, the rest stays."""
    for name in MODEL_NAMES:
        assert model_config(name) == (MODELS.get(name) or keras_vit.VARIANTS[name])
    config = model_config("Ti/16", image_size=(96, 48), patch_size=8)
    assert config == dataclasses.replace(
        keras_vit.VARIANTS["Ti/16"], input_shape=(96, 48, 3), patch_size=8
    )


def test_a_checkpoint_is_taken_over_with_a_fresh_head(tmp_path: Path) -> None:
    """The body is the file's, the classifier new and zero for other classes, the size as asked."""
    config = model_config("Ti/16", image_size=(32, 32))
    saved = keras_vit.VisionTransformer(config)
    keras_vit.weights.save_npz(saved, tmp_path / "saved.npz")

    model = pretrained_model(
        "Ti/16", weights=tmp_path / "saved.npz", classes=3, image_size=(48, 32)
    )

    before, after = saved.get_layer("block_3"), model.get_layer("block_3")
    for old, new in zip(before.get_weights(), after.get_weights(), strict=True):
        assert np.array_equal(old, new)
    assert model.output_shape == (None, 3)
    assert not model.get_layer("head").kernel.numpy().any()
    assert model.input_shape == (None, 48, 32, 3)


def test_a_starting_point_is_resampled_as_asked_for(tmp_path: Path) -> None:
    """By the method for positions, from a checkpoint and from a run."""
    model = randomize(keras_vit.VisionTransformer(model_config("Ti/16", image_size=(64, 64))))
    path = keras_vit.weights.save_npz(model, tmp_path / "saved.npz")
    run = Run(path=tmp_path, model=model, labels=(), config={})
    tables = []
    for method in ("original", "bicubic_antialias"):
        size: dict[str, Any] = {"image_size": (48, 96), "positions": method}
        for other in (
            pretrained_model("Ti/16", weights=path, classes=2, **size),
            run.classifier(("a", "b"), **size),
        ):
            tables.append(np.asarray(other.get_layer("patch_encoder").position_embedding))
    assert np.array_equal(tables[0], tables[1])
    assert np.array_equal(tables[2], tables[3])
    assert np.abs(tables[0] - tables[2]).max() > 1e-3


def test_models_that_are_none_are_refused(tmp_path: Path) -> None:
    """Numbers and names are in the sentence; small models have no published weights."""
    run = Run(path=Path("run"), model=keras.Sequential(), labels=(), config={})
    start = functools.partial(pretrained_model, classes=2)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: model_config("tiny", image_size=(60, 64)), r"multiples of 8.*\(60, 64, 3\)"),
        (lambda: model_config("vgg"), r"no model 'vgg'; choose one of digits, .*, tiny, Ti/16"),
        (lambda: start("tiny", weights="x.npz"), "no model 'tiny'; choose one of Ti/16"),
        (lambda: start("Ti/16", weights=tmp_path / "gone.npz"), r"FileNotFoundError.*gone\.npz"),
        (lambda: run.classifier(["a", "b"]), "the run 'run' holds a Sequential"),
    ]
    assert not not_refused(calls, (ValueError, FileNotFoundError))


@pytest.mark.parametrize(("classes", "labels"), [(7, "abcdefg"), (7, "gfedcba"), (None, "abcdefg")])
def test_a_run_keeps_its_classifier_for_its_own_labels(classes: int | None, labels: str) -> None:
    """Other labels, or a run of `pretrain` without one, get one of zeros; the body is kept."""
    config = dataclasses.replace(TINY, classes=classes, distillation_token=classes is not None)
    model = randomize(keras_vit.VisionTransformer(config))
    run = Run(path=Path("run"), model=model, labels=tuple("abcdefg"), config={})
    actual = {variable.path: variable for variable in run.classifier(tuple(labels)).weights}
    old = {variable.path: variable for variable in model.weights}
    assert actual["head/kernel"].shape == (24, 7)
    for path, variable in actual.items():
        is_fresh = "head/" in path and (classes is None or labels != "abcdefg")
        np.testing.assert_array_equal(variable, 0 * variable if is_fresh else old[path])
