"""Tests of keras_vit.training.pretrain: masked patches in the loop of supervised training."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import image_files
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import weights_differ
from PIL import Image

import keras_vit
from keras_vit.data import Augmentation, ImageData, Split, load_folder
from keras_vit.training import (
    RECIPES,
    EpochDone,
    Execution,
    MaskedPatchModel,
    Run,
    TrainingInterrupted,
    masked_patches,
    pretrain,
    train,
)
from keras_vit.training.execution import StrategyName

CONFIG = keras_vit.ViTConfig(
    input_shape=(16, 24, 3),
    patch_size=4,
    hidden_dim=16,
    mlp_dim=32,
    num_heads=2,
    num_layers=2,
    dropout_rate=0.1,
    pooling="avg",
    class_token=False,
)
RECIPE = dataclasses.replace(
    RECIPES["masked-patches"],
    epochs=3,
    batch_size=8,
    learning_rate=0.01,
    augmentation=Augmentation(crop=0.7, flip=True),
)
TARGETS = ("mean_color", "small_patch", "pixels")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    """Twenty image files of two classes."""
    return load_folder(image_files.write_classes(tmp_path_factory.mktemp("images")))


@pytest.fixture(scope="module")
def pixels(data: ImageData) -> ImageData:
    """The same images in memory: making an iterator that decodes files takes longer than a run."""
    return image_files.in_memory(data, side=16)


@pytest.fixture(scope="module")
def trained(data: ImageData, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run on the image files; tests must not change it."""
    return pretrain(data, out=tmp_path_factory.mktemp("runs") / "run", model=CONFIG, recipe=RECIPE)


@pytest.mark.full
def test_the_run_directory_is_that_of_a_training(trained: Run) -> None:
    """The same files, the picture besides; the model is the plain one without classifier."""
    config = json.loads((trained.path / "config.json").read_text())
    names = {file.name for file in trained.path.iterdir()}
    assert names == {
        "config.json",
        "curves.png",
        "history.csv",
        "labels.txt",
        "model.keras",
        "reconstructions.png",
        "splits.csv",
        "tensorboard",
    }
    assert (config["objective"], config["target"]) == ("masked-patches", "mean_color")
    opened = Run.load(trained.path)
    assert type(opened.model) is keras_vit.VisionTransformer
    assert opened.model.config == dataclasses.replace(
        CONFIG, classes=None, include_preprocessing=True
    )
    assert not weights_differ(opened.model, trained.model)
    assert np.asarray(Image.open(trained.path / "reconstructions.png").convert("L")).min() < 100


@pytest.mark.full
def test_the_test_images_of_a_run_stay_the_test_images(trained: Run, data: ImageData) -> None:
    """So few-shot accuracy on them is not that of images seen before."""
    assert Run.load(trained.path).data().test.images.tolist() == data.test.images.tolist()


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_it_learns_whatever_is_predicted(target: Any, pixels: ImageData, tmp_path: Path) -> None:
    """The loss falls; pixels have no accuracy, and everything that is written copes with that."""
    model = MaskedPatchModel(dataclasses.replace(CONFIG, include_preprocessing=True), target=target)
    events: list[Any] = []
    recipe = dataclasses.replace(RECIPE, epochs=5, batch_size=4, augmentation=Augmentation())
    run = pretrain(pixels, out=tmp_path / "run", model=model, recipe=recipe, on_event=events.append)
    epochs = [event for event in events if isinstance(event, EpochDone)]
    assert epochs[-1].loss < 0.9 * epochs[0].loss
    assert min(done.validation_loss for done in epochs) == run.config["result"]["validation_loss"]
    assert (epochs[0].accuracy is None) == (target == "pixels")
    assert (run.path / "reconstructions.png").stat().st_size > 3000


@pytest.mark.full
def test_an_interruption_is_resumed_to_the_same_bits(pixels: ImageData, tmp_path: Path) -> None:
    """Stopped in the first epoch and in the last, weights and corruption go on as if never."""
    for stop in (1, 3):

        def on_event(event: Any, stop: int = stop) -> None:
            if not isinstance(event, EpochDone) and event.epoch == stop:
                raise KeyboardInterrupt

        with pytest.raises(TrainingInterrupted, match=r"a checkpoint is in .*run.unfinished"):
            pretrain(
                pixels,
                out=tmp_path / "run",
                model=CONFIG,
                recipe=RECIPE,
                existing="resume",
                on_event=on_event,
            )
    resumed = pretrain(pixels, out=tmp_path / "run", model=CONFIG, recipe=RECIPE, existing="resume")
    trained = pretrain(pixels, out=tmp_path / "whole", model=CONFIG, recipe=RECIPE)
    expected = trained.config["result"]["state_sha256"]
    assert resumed.config["result"]["state_sha256"] == expected
    assert not weights_differ(resumed.model, trained.model)


@pytest.mark.full
def test_another_corruption_is_another_training(pixels: ImageData, tmp_path: Path) -> None:
    """The random state of the corruption counts: another seed of it gives other bits."""
    model = MaskedPatchModel(dataclasses.replace(CONFIG, include_preprocessing=True), seed=5)
    hashes = []
    for seed in (5, 6):
        fields = {**model.get_config(), "seed": seed}
        again = MaskedPatchModel.from_config(fields)
        again.set_weights(model.get_weights())
        recipe = dataclasses.replace(RECIPE, epochs=1)
        run = pretrain(pixels, out=tmp_path / str(seed), model=again, recipe=recipe)
        hashes.append(run.config["result"]["state_sha256"])
    assert hashes[0] != hashes[1]


def test_replicas_corrupt_other_patches() -> None:
    """On two replicas the same images lose other patches, and a step moves the state once."""
    strategy = Execution(strategy="mirrored").make_strategy()
    with strategy.scope():
        model = MaskedPatchModel(CONFIG, seed=0)
    image = tf.constant(np.random.default_rng(0).uniform(-1, 1, (1, 16, 24, 3)), tf.float32)
    made = strategy.run(tf.function(lambda: model(image, training=True)["corrupted"]))
    first, second = (value.numpy() for value in strategy.experimental_local_results(made))
    assert first.sum() == second.sum() == 12
    assert not np.array_equal(first, second)
    states = {tuple(value.numpy()) for value in model.seeds.state.value.values}
    assert len(states) == 1


@pytest.mark.full
def test_two_replicas_learn_what_one_device_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the places of the corruption fixed, weights after some steps agree."""
    strategies: list[tuple[StrategyName, int]] = [("none", 1), ("mirrored", 2)]
    monkeypatch.setattr(MaskedPatchModel, "_corrupt", _corrupt_every_second)
    pixels = np.random.default_rng(1).integers(0, 256, (32, 16, 24, 3)).astype(np.uint8)
    part = Split(images=pixels, targets=np.zeros(32, np.int32))
    data = ImageData(source="memory", labels=(), train=part, validation=part, test=part)
    recipe = dataclasses.replace(RECIPE, epochs=2, optimizer="momentum", dropout_rate=0.0)
    runs = [
        pretrain(
            data,
            out=tmp_path / strategy,
            model=CONFIG,
            recipe=dataclasses.replace(recipe, augmentation=Augmentation()),
            execution=Execution(strategy=strategy, accumulate=accumulate),
        )
        for strategy, accumulate in strategies
    ]
    for one, two in zip(*(run.model.get_weights() for run in runs), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)  # after eight steps
    losses = [run.config["result"]["validation_loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def _corrupt_every_second(self: MaskedPatchModel, embedded: Any, seeds: Any) -> Any:
    chosen = keras.ops.cast(keras.ops.arange(embedded.shape[1]) % 2, "float32")[None]
    corrupted = keras.ops.ones_like(embedded[:, :, 0], dtype="float32") * chosen
    mask = keras.ops.cast(self.mask_embedding, embedded.dtype)
    return keras.ops.where(corrupted[..., None] > 0, mask, embedded), corrupted


def test_evaluation_corrupts_the_same_each_time() -> None:
    """Two epochs are compared on the same patches; training moves on."""
    model = MaskedPatchModel(CONFIG, seed=0)
    image = np.zeros((2, 16, 24, 3), np.float32)
    seen = [np.asarray(model(image, training=False)["corrupted"]) for _ in range(2)]
    drawn = [np.asarray(model(image, training=True)["corrupted"]) for _ in range(2)]
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(drawn[0], drawn[1])
    assert masked_patches.EVALUATION_SEEDS == (1, 2, 3)


def test_wrong_models_are_refused(data: ImageData, tmp_path: Path) -> None:
    """Each function names the other; a model that does not take pixels is told."""
    with pytest.raises(TypeError, match="give it to `pretrain`"):
        train(data, out=tmp_path / "run", model=MaskedPatchModel(CONFIG))
    with pytest.raises(TypeError, match=r"a ViTConfig or a MaskedPatchModel. .*VisionTransformer"):
        pretrain(data, out=tmp_path / "run", model=keras_vit.VisionTransformer(CONFIG))
    with pytest.raises(ValueError, match="include_preprocessing=False"):
        pretrain(data, out=tmp_path / "run", model=MaskedPatchModel(CONFIG))
    assert not any(tmp_path.iterdir())
