"""Tests of keras_vit.training.planning: what is chosen before a training."""

import dataclasses
from pathlib import Path
from typing import Any

import image_files
import keras
import numpy as np
import pytest
from trainings import CONFIG, in_memory, noise

from keras_vit import environment, training
from keras_vit.data import ImageData, load_folder
from keras_vit.training import Execution, planning
from keras_vit.weights import resolve

RECIPE = training.Recipe(epochs=2, batch_size=12, learning_rate=1e-3)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mirror with files of the published names, which nobody opens."""
    folder = tmp_path / "mirror"
    for name in ("Ti/16", "S/16"):
        file = folder / f"{resolve(name, 'imagenet21k').name}.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"never read")
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(folder))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    """Twenty images of one class and ten of the other."""
    folder = tmp_path_factory.mktemp("photos")
    image_files.write_classes(folder, count=20)
    for file in sorted((folder / "striped").iterdir())[10:]:
        file.unlink()
    return load_folder(folder)


def two_classes(count: int) -> ImageData:
    return in_memory(noise(np.arange(count) % 2), noise(np.arange(4) % 2), labels="ab")


def test_published_weights_are_fine_tuned_where_they_can_be_reached(
    mirror: Path, photos: ImageData
) -> None:
    """The smallest variant, with small batches; the look counts classes."""
    plan = planning.plan(photos)
    assert (plan.model, plan.weights, plan.place) == ("Ti/16", "imagenet21k", "mirror")
    fields = plan.to_dict()
    assert (fields["largest_class"], fields["smallest_class"], fields["classes"]) == (20, 10, 2)
    assert plan.config == dataclasses.replace(training.model_config("Ti/16"))
    assert plan.recipe == planning.fine_tuning(len(photos.train))
    assert plan.recipe.batch_size == 8
    assert plan.choice_text == (
        "30 images of 2 classes, the largest 2.0 times the smallest: fine-tunes Ti/16 from "
        "imagenet21k (in the mirror)."
    )


def test_data_and_machine_choose_the_model(
    mirror: Path, photos: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger one for many images on an accelerator; the small one where patches do not fit.

    The digits stay as they are.
    """
    digits = planning.plan(dataclasses.replace(two_classes(40), source="digits"))
    assert digits.config == training.MODELS["digits-hybrid"]
    assert (digits.recipe, digits.execution) == (training.RECIPES["digits"], Execution())
    assert planning.plan(photos, image_size=(96, 128)).model == "Ti/16"
    plan = planning.plan(photos, image_size=(72, 72))
    assert (plan.model, plan.config and plan.config.image_size) == ("tiny", (72, 72))
    assert plan.choice_text.endswith("16 pixels do not divide 72x72 (height x width).")
    for count, has, model in ((999, True, "Ti/16"), (1000, True, "S/16"), (1000, False, "Ti/16")):
        kind = "GPU" if has else "CPU"
        monkeypatch.setattr(planning, "_devices", lambda kind=kind: (kind, []))
        assert planning.plan(two_classes(count)).model == model


def test_elsewhere_the_small_model_trains_and_says_why(
    photos: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to do; weights that were not asked for need no reason, and no network."""
    monkeypatch.setenv("KERAS_VIT_MIRROR", str(tmp_path / "empty"))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    plan = planning.plan(photos)
    assert (plan.model, plan.weights) == ("tiny", None)
    assert plan.recipe == training.RECIPES["scratch"]
    assert "cannot be reached (there is no " in plan.choice_text
    assert "KERAS_VIT_MIRROR" in plan.choice_text
    assert "--weights none" in plan.choice_text
    monkeypatch.setattr(
        "keras_vit.weights.sources.resolve_origin", lambda *_, **__: pytest.fail("asked")
    )
    fresh = planning.plan(photos, weights=None)
    assert fresh.choice_text.endswith("smallest: trains tiny from fresh weights.")


def test_precision_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 where TensorFlow's kernels have units for it; XLA's code has no use for them."""
    choices: list[tuple[bool, Any, str]] = [
        (True, "auto", "mixed_bfloat16"),
        (True, True, "float32"),
        (False, "auto", "float32"),
    ]
    for tiles, xla, precision in choices:
        monkeypatch.setattr(environment, "has_bfloat16_units", lambda among, has=tiles: has)
        expected = precision if keras.backend.backend() == "tensorflow" else "float32"
        assert planning.fast_precision(Execution(xla=xla)) == expected


def test_a_plan_says_how_in_a_sentence_and_in_json(photos: ImageData) -> None:
    """Size, length, parts, precision and devices; height first, which is said where it matters."""
    wide = dataclasses.replace(CONFIG, input_shape=(8, 16, 3))
    in_parts = Execution(accumulate=12, precision="mixed_float16")
    for config, execution, said in (
        (CONFIG, Execution(), "8x8 pixels, 2 epochs in batches of 12, float32, on "),
        (wide, Execution(), "8x16 pixels (height x width), 2 epochs"),
        (None, in_parts, "2 epochs in batches of 12, each in 12 parts, mixed_float16, on "),
    ):
        plan = planning.TrainingPlan(
            data=photos, model="test", config=config, recipe=RECIPE, execution=execution
        )
        assert plan.steps_text.startswith(said)
    fields = plan.to_dict()
    assert (fields["accumulate"], fields["steps"], fields["batch_size"]) == (12, 4, 12)
    assert (fields["image_size"], fields["images"]) == (None, photos.counts)
