"""Tests of keras_vit.training.objectives: frozen, adapted and merged models in training."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import TINY, randomize

import keras_vit
from keras_vit.data import Augmentation, ImageData, Split
from keras_vit.training import (
    RECIPES,
    DistillationModel,
    Execution,
    MaskedPatchModel,
    TrainingInterrupted,
    objectives,
    train,
)
from keras_vit.training.execution import Job
from keras_vit.training.objectives import objective_of

CONFIG = dataclasses.replace(TINY, num_layers=2, include_preprocessing=True, dropout_rate=0.1)
RECIPE = dataclasses.replace(
    RECIPES["scratch"], epochs=2, batch_size=8, augmentation=Augmentation(flip=True)
)


@pytest.fixture(scope="module")
def data() -> ImageData:
    """Images of seven classes in memory."""
    images = np.random.default_rng(0).integers(0, 256, (24, 32, 48, 3)).astype(np.uint8)
    part = Split(images=images, targets=(np.arange(24) % 7).astype(np.int32))
    return ImageData(
        source="memory", labels=tuple("abcdefg"), train=part, validation=part, test=part
    )


def adapted() -> keras_vit.VisionTransformer:
    """A random model with thin matrices, the same each time."""
    keras.utils.set_random_seed(0)
    plain = randomize(keras_vit.VisionTransformer(CONFIG))
    return keras_vit.lora(plain, rank=2, targets=("qkv", "fc2"))


def test_what_is_frozen_stays_frozen_in_a_copy(data: ImageData) -> None:
    """Another precision makes a copy: it trains what the given model would, and no more."""
    model = keras_vit.VisionTransformer(CONFIG)
    keras_vit.freeze(model, blocks=1)
    job = Job(data, recipe=RECIPE, execution=Execution(precision="mixed_bfloat16"))
    copy: Any = objective_of(model, job).model
    assert copy is not model
    trained = [[v.path for v in each.trainable_variables] for each in (model, copy)]
    assert trained[0] == trained[1]
    assert trained[0][0].startswith("block_1")


def test_an_adapted_model_is_copied_as_one(data: ImageData) -> None:
    """The thin matrices and their settings come along, in another precision too."""
    model = adapted()
    job = Job(data, recipe=RECIPE, execution=Execution(precision="mixed_bfloat16"))
    copy: Any = objective_of(model, job).model
    assert (type(copy), copy.rank, copy.targets) == (type(model), 2, ("qkv", "fc2"))
    for ours, theirs in zip(copy.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.trainable == theirs.trainable


def test_a_function_makes_the_model_where_it_is_to_lie(data: ImageData) -> None:
    """Nothing is copied then."""
    made: list[keras_vit.VisionTransformer] = []

    def make() -> keras_vit.VisionTransformer:
        made.append(keras_vit.VisionTransformer(CONFIG))
        return made[0]

    job = Job(data, recipe=RECIPE, execution=Execution())
    assert objective_of(make, job).model is made[0]


def test_the_kind_of_training_is_described(data: ImageData) -> None:
    """What decides the result is in config.json: the adapter's settings, what is trained."""
    job = Job(data, recipe=RECIPE, execution=Execution())
    plain = objective_of(keras_vit.VisionTransformer(CONFIG), job).settings()
    assert plain["objective"] == "classification"
    assert plain["trained_parameters"] == keras_vit.parameter_count(CONFIG)
    assert "lora" not in plain
    thin = objective_of(adapted(), job).settings()
    assert thin["lora"] == {"rank": 2, "targets": ["qkv", "fc2"], "alpha": None}
    assert thin["trained_parameters"] == sum(
        math.prod(v.shape) for v in adapted().trainable_variables
    )


def test_each_kind_of_model_has_its_objective(data: ImageData) -> None:
    """Also where a function makes the model; what no objective trains is told."""
    vit = keras_vit.VisionTransformer(CONFIG)
    images = keras.Input(CONFIG.input_shape)
    hand_built = keras.Model(images, vit(images))
    masked = MaskedPatchModel(CONFIG)
    labelled = Job(data, recipe=RECIPE, execution=Execution())
    unlabelled = dataclasses.replace(labelled, has_labels=False)
    for model, job, kind in (
        (CONFIG, labelled, objectives.ClassificationObjective),
        (vit, labelled, objectives.ClassificationObjective),
        (DistillationModel(vit, vit), labelled, objectives.DistillationObjective),
        (hand_built, labelled, objectives.HandBuiltObjective),
        (CONFIG, unlabelled, objectives.MaskedPatchObjective),
        (masked, unlabelled, objectives.MaskedPatchObjective),
    ):
        assert type(objective_of(functools.partial(lambda model: model, model), job)) is kind
    with pytest.raises(TypeError, match="give it to `pretrain`"):
        objective_of(lambda: masked, labelled)
    with pytest.raises(TypeError, match="Received: VisionTransformer"):
        objective_of(lambda: vit, unlabelled)
    with pytest.raises(TypeError, match=r"train takes a ViTConfig, .* Received: Model"):
        objective_of(keras.Model(), labelled)


@pytest.mark.full
def test_adapters_are_resumed_to_the_same_bits_and_merged(data: ImageData, tmp_path: Path) -> None:
    """The run's model is plain and answers as the adapter beside it on the model before."""

    def stop(event: Any) -> None:
        if getattr(event, "step", 0) == 4:
            raise KeyboardInterrupt

    whole = train(data, out=tmp_path / "whole", model=adapted(), recipe=RECIPE)
    with pytest.raises(TrainingInterrupted) as stopped:
        train(data, out=tmp_path / "run", model=adapted(), recipe=RECIPE, on_event=stop)
    assert (stopped.value.path / "adapter.safetensors").is_file()
    resumed = train(data, out=tmp_path / "run", model=adapted(), recipe=RECIPE, existing="resume")
    hashes = [run.config["result"]["state_sha256"] for run in (whole, resumed)]
    assert hashes[0] == hashes[1]
    assert type(resumed.model) is keras_vit.VisionTransformer
    plain = keras_vit.merge_lora(adapted())  # fresh adapters are nothing
    again = keras_vit.load_adapter(plain, tmp_path / "run" / "adapter.safetensors")
    images = data.test.images[:4].astype(np.float32)
    np.testing.assert_allclose(resumed.model(images), again(images, training=False), atol=1e-4)
