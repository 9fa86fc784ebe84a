"""Tests of keras_vit.training.train."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import image_files
import keras
import numpy as np
import pytest
from conftest import FLOAT32, weights_differ

import keras_vit
from keras_vit.data import Augmentation, ImageData, load_folder
from keras_vit.evaluation import evaluate
from keras_vit.training import (
    RECIPES,
    EpochDone,
    Execution,
    Recipe,
    Run,
    TrainingDone,
    TrainingInterrupted,
    check_free,
    train,
)

CONFIG = keras_vit.ViTConfig(
    input_shape=(16, 16, 3),
    patch_size=8,
    hidden_dim=16,
    mlp_dim=32,
    num_heads=2,
    num_layers=1,
    dropout_rate=0.1,
)
RECIPE = dataclasses.replace(
    RECIPES["scratch"],
    epochs=3,
    batch_size=8,
    learning_rate=0.01,
    augmentation=Augmentation(crop=0.7, flip=True, rotation=5),
)
needs_strategies = pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="On JAX devices are shared by Execution(mesh=...), not by a strategy of TensorFlow",
)
# For what augmentation has no part in.
BRIEF = dataclasses.replace(RECIPE, epochs=1, augmentation=Augmentation())


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
    return train(data, out=tmp_path_factory.mktemp("runs") / "run", model=CONFIG, recipe=RECIPE)


@pytest.fixture(scope="module")
def trained_on_pixels(pixels: ImageData, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same on the images in memory."""
    return train(pixels, out=tmp_path_factory.mktemp("pixels") / "run", model=CONFIG, recipe=RECIPE)


def test_the_run_directory_is_complete(trained: Run, data: ImageData) -> None:
    """Model, config, labels, splits, history and curves are there, and nothing else."""
    names = sorted(file.name for file in trained.path.iterdir())
    config = json.loads((trained.path / "config.json").read_text())

    assert names == [
        "config.json",
        "curves.png",
        "history.csv",
        "labels.txt",
        "model.keras",
        "splits.csv",
        "tensorboard",
    ]
    assert (trained.path / "labels.txt").read_text() == "plain\nstriped\n"
    assert Recipe.from_dict(config["recipe"]) == RECIPE
    assert keras_vit.ViTConfig.from_dict(config["model"]) == trained.model.config
    assert config["data"]["images"] == data.counts
    assert config["result"]["finished"] is True
    versions = {"keras_vit", "backend", "keras", "tensorflow", "numpy", "python"}
    assert set(config["versions"]) == versions


def test_the_config_is_made_for_the_data(trained: Run) -> None:
    """Classes come from the data; the model takes pixels and gives logits."""
    config = trained.model.config

    assert (config.classes, config.include_preprocessing) == (2, True)
    assert config.classifier_activation is None


def test_the_saved_model_is_the_best_epoch(trained: Run, data: ImageData) -> None:
    """What the file holds has exactly the validation accuracy that history.csv calls the best."""
    opened = Run.load(trained.path)
    actual = evaluate(opened.model, data.validation, labels=opened.labels)
    result = trained.config["result"]

    assert not weights_differ(opened.model, trained.model)
    assert actual.accuracy == pytest.approx(result["validation_accuracy"], abs=1e-6)
    assert opened.labels == data.labels


def test_the_saved_model_carries_no_optimizer(trained: Run) -> None:
    """The file holds the model and not three times as much."""
    saved = keras.saving.load_model(trained.path / "model.keras")

    assert getattr(saved, "optimizer", None) is None


def test_the_run_knows_its_images(trained: Run, data: ImageData) -> None:
    """The splits of the run directory are those that training used."""
    actual = Run.load(trained.path).data()

    assert actual.counts == data.counts
    assert actual.test.images.tolist() == data.test.images.tolist()


def test_one_seed_gives_one_model(trained: Run, data: ImageData, tmp_path: Path) -> None:
    """Twice the same seed gives the same bits, another seed gives others."""
    again = train(data, out=tmp_path / "again", model=CONFIG, recipe=RECIPE)
    other = train(data, out=tmp_path / "other", model=CONFIG, recipe=RECIPE, seed=1)

    assert not weights_differ(again.model, trained.model)
    assert weights_differ(other.model, trained.model)


@pytest.mark.full
def test_training_learns(pixels: ImageData, tmp_path: Path) -> None:
    """Stripes are told from plain images after a few epochs."""
    recipe = dataclasses.replace(RECIPE, epochs=16, batch_size=4, augmentation=Augmentation())
    events: list[Any] = []
    train(pixels, out=tmp_path / "run", model=CONFIG, recipe=recipe, on_event=events.append)
    epochs = [event for event in events if isinstance(event, EpochDone)]

    assert epochs[-1].loss < 0.7 * epochs[0].loss
    assert (epochs[-1].validation_accuracy or 0) >= 0.9
    assert (epochs[-1].accuracy or 0) > 0.8  # of 16 images, while they are learnt


@pytest.mark.full
def test_a_given_model_is_trained_on(pixels: ImageData, tmp_path: Path) -> None:
    """Training starts from a model's weights and leaves the file with its config."""
    config = dataclasses.replace(CONFIG, classes=2, include_preprocessing=True)
    model = keras_vit.VisionTransformer(config)
    recipe = dataclasses.replace(BRIEF, learning_rate=1e-12, weight_decay=0.0)
    before = [weight.copy() for weight in model.get_weights()]

    run = train(pixels, out=tmp_path / "run", model=model, recipe=recipe)

    for old, new in zip(before, run.model.get_weights(), strict=True):
        if old.dtype == np.float32:  # seeds move on
            assert np.allclose(old, new, atol=1e-9)


def test_a_model_that_does_not_fit_is_an_error(data: ImageData, tmp_path: Path) -> None:
    """Wrong classes, and pixels that are not 0..255, are told before anything is trained."""
    three = dataclasses.replace(CONFIG, classes=3, include_preprocessing=True)
    scaled = dataclasses.replace(CONFIG, classes=2)

    with pytest.raises(ValueError, match="classes=3, the data 2"):
        train(data, out=tmp_path / "run", model=keras_vit.VisionTransformer(three))
    with pytest.raises(ValueError, match="include_preprocessing=False"):
        train(data, out=tmp_path / "run", model=keras_vit.VisionTransformer(scaled))
    assert not any(tmp_path.iterdir())


def by_hand(**changes: Any) -> keras.Model:
    """A Vision Transformer inside a functional model, as Keras' guides build them."""
    config = dataclasses.replace(CONFIG, classes=None, include_preprocessing=True)
    base = keras_vit.VisionTransformer(dataclasses.replace(config, **changes))
    images = keras.Input(config.input_shape)
    return keras.Model(images, keras.layers.Dense(2, activation="softmax")(base(images)))


@pytest.mark.parametrize(
    "strategy", ["none", pytest.param("mirrored", marks=[pytest.mark.full, needs_strategies])]
)
def test_a_model_built_by_hand_trains(strategy: Any, pixels: ImageData, tmp_path: Path) -> None:
    """Exactly, on one device and on two; the run holds it, and the given one stays where it is."""
    model = by_hand()
    run = train(
        pixels,
        out=tmp_path / "run",
        model=model,
        recipe=BRIEF,
        execution=Execution(strategy=strategy),
    )
    loaded = Run.load(run.path).model
    black = np.zeros((2, *CONFIG.input_shape), np.float32)

    assert isinstance(loaded, keras_vit.ExactModel)
    np.testing.assert_allclose(loaded.predict(black, verbose=0), run.model(black), atol=FLOAT32)
    assert run.config["model"]["layers"][1].startswith("VisionTransformer")


@pytest.mark.parametrize(
    ("changes", "recipe", "message"),
    [
        ({"include_preprocessing": False}, {}, "must take pixels 0..255"),
        ({}, {"layer_decay": 0.5}, "layer_decay cannot be changed in a model that is built by"),
    ],
)
def test_a_model_built_by_hand_that_does_not_fit_is_refused(
    changes: Any, recipe: Any, message: str, data: ImageData, tmp_path: Path
) -> None:
    """One sentence each, and nothing is left."""
    with pytest.raises(ValueError, match=message):
        train(
            data,
            out=tmp_path / "run",
            model=by_hand(**changes),
            recipe=dataclasses.replace(RECIPE, **recipe),
        )
    assert not list(tmp_path.iterdir())


def test_data_without_validation_images_is_an_error(data: ImageData, tmp_path: Path) -> None:
    """Without them no epoch could be called the best."""
    lacking = dataclasses.replace(data, validation=data.validation.take([]))

    with pytest.raises(ValueError, match="no validation images"):
        train(lacking, out=tmp_path / "run")


@needs_strategies
def test_a_batch_that_cannot_be_shared_is_refused_first(data: ImageData, tmp_path: Path) -> None:
    """Nothing is left where the run would have been."""
    with pytest.raises(ValueError, match=r"7 images .* among 2 replicas; choose a multiple of 2"):
        train(
            data,
            out=tmp_path / "run",
            model=CONFIG,
            recipe=dataclasses.replace(RECIPE, batch_size=7),
            execution=Execution(strategy="mirrored"),
        )
    assert not list(tmp_path.iterdir())


def test_an_old_run_is_refused_first(trained: Run, data: ImageData) -> None:
    """Nothing is trained if the place is taken."""

    def fail(event: object) -> None:
        raise AssertionError

    with pytest.raises(FileExistsError, match="already holds a run"):
        train(data, out=trained.path, model=CONFIG, recipe=RECIPE, on_event=fail)


def interrupt_in_epoch(epoch: int) -> Any:
    """A callback that stands for Ctrl-C in the middle of an epoch."""

    def on_event(event: Any) -> None:
        if not isinstance(event, EpochDone) and event.epoch == epoch:
            raise KeyboardInterrupt

    return on_event


@pytest.fixture(scope="module")
def interrupted(pixels: ImageData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training that ended in its last epoch; tests copy it."""
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(TrainingInterrupted, match=r"the model of epoch \d, the best so far"):
        train(
            pixels,
            out=folder / "run",
            model=CONFIG,
            recipe=RECIPE,
            on_event=interrupt_in_epoch(3),
        )
    return folder


@pytest.fixture
def unfinished(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of it; returns where its run is to be."""
    return shutil.copytree(interrupted, tmp_path / "copy") / "run"


@pytest.mark.full
def test_an_interruption_is_resumed_to_the_same_bits(
    data: ImageData, trained: Run, tmp_path: Path
) -> None:
    """Stopped in the first epoch and in the last, and resumed, a run ends as if it never was."""
    for epoch in (1, 3):
        with pytest.raises(TrainingInterrupted, match=r"a checkpoint is in .*run.unfinished"):
            train(
                data,
                out=tmp_path / "run",
                model=CONFIG,
                recipe=RECIPE,
                existing="resume",
                on_event=interrupt_in_epoch(epoch),
            )
        assert [entry.name for entry in tmp_path.iterdir()] == ["run.unfinished"]
    resumed = train(data, out=tmp_path / "run", model=CONFIG, recipe=RECIPE, existing="resume")

    result, expected = resumed.config["result"], trained.config["result"]
    assert result["state_sha256"] == expected["state_sha256"]
    assert not weights_differ(resumed.model, trained.model)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.full
def test_an_interruption_leaves_a_run_of_the_best_epoch(
    pixels: ImageData, unfinished: Path
) -> None:
    """What can be resumed can be used too, and says how far it came."""
    opened = Run.load(unfinished.with_name("run.unfinished"))
    actual = evaluate(opened.model, pixels.validation, labels=opened.labels)
    result = opened.config["result"]

    assert (result["epochs"], result["finished"]) == (2, False)
    assert actual.accuracy == pytest.approx(result["validation_accuracy"], abs=1e-6)


@pytest.mark.full
def test_an_unfinished_training_is_safe(pixels: ImageData, unfinished: Path) -> None:
    """It is neither replaced unasked nor resumed with other settings."""
    arguments: dict[str, Any] = {"out": unfinished, "model": CONFIG}
    other = dataclasses.replace(RECIPE, learning_rate=0.5)

    with pytest.raises(FileExistsError, match="holds an unfinished training"):
        train(pixels, recipe=RECIPE, **arguments)
    with pytest.raises(ValueError, match=r"started with recipe.learning_rate=0.01, not 0.5"):
        train(pixels, recipe=other, existing="resume", **arguments)


def test_a_finished_run_is_returned_by_resuming(trained: Run, data: ImageData) -> None:
    """Nothing is trained again; with other settings it is refused, the setting named."""
    events: list[Any] = []
    arguments: dict[str, Any] = {"out": trained.path, "model": CONFIG, "existing": "resume"}
    again = train(data, recipe=RECIPE, on_event=events.append, **arguments)

    assert events == []
    assert again.config == trained.config
    assert not weights_differ(again.model, trained.model)
    with pytest.raises(ValueError, match=r"was started with recipe.epochs=3, not 2"):
        train(data, recipe=dataclasses.replace(RECIPE, epochs=2), **arguments)


class KilledError(Exception):
    """Stands for a kill: nothing of ours catches it."""


@pytest.mark.full
def test_what_measures_a_run_belongs_to_it(pixels: ImageData, tmp_path: Path) -> None:
    """A run that is not measured is not there; resuming measures it, and trains no step."""
    arguments: dict[str, Any] = {"out": tmp_path / "run", "model": CONFIG, "existing": "resume"}
    arguments["recipe"] = BRIEF
    seen: list[Any] = []
    again: list[BaseException] = []

    def measure(event: Any) -> None:
        seen.append(type(event))
        if isinstance(event, TrainingDone):
            (event.run.path / "metrics.json").write_text("half")
            if again:
                raise again.pop()
            (event.run.path / "metrics.json").write_text("{}")

    for error in (KilledError(), KeyboardInterrupt()):
        again.append(error)
        with pytest.raises((KilledError, TrainingInterrupted)) as raised:
            train(pixels, on_event=measure, **arguments)
        assert [entry.name for entry in tmp_path.iterdir()] == ["run.unfinished"]
    assert "resume to finish the run" in str(raised.value)
    seen.clear()
    train(pixels, on_event=measure, **arguments)

    assert seen == [TrainingDone]
    assert (tmp_path / "run" / "metrics.json").read_text() == "{}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content[: len(content) // 2] if how == "cut" else content)
    if how == "gone":
        file.unlink()


# Which of the newest files, how, and the step that is left: an epoch has two.
DAMAGES = [("checkpoint", 1, "flipped", 4), ("checkpoint", 2, "cut", 2), ("best", 1, "gone", 0)]


@pytest.mark.full
def test_a_damaged_file_is_left_out_and_said(
    pixels: ImageData, trained_on_pixels: Run, interrupted: Path, tmp_path: Path
) -> None:
    """An older checkpoint is used, or the best model is made anew; the run ends with its bits."""
    expected = trained_on_pixels.config["result"]["state_sha256"]
    for kind, count, how, step in DAMAGES:
        folder = shutil.copytree(interrupted, tmp_path / how) / "run.unfinished"
        files = sorted(folder.glob(f"{kind}-*"))[-count:]
        for file in files:
            damage(file, how)
        events: list[Any] = []
        with pytest.warns(UserWarning, match="older one is used") as warned:
            resumed = train(
                pixels,
                out=tmp_path / how / "run",
                model=CONFIG,
                recipe=RECIPE,
                existing="resume",
                on_event=events.append,
            )
        said = "".join(str(warning.message) for warning in warned)
        assert all(f"{file.name}' is damaged" in said for file in files)
        left = step or 2 * int(files[0].stem.removeprefix("best-"))
        assert events[0].step == left + 1
        assert resumed.config["result"]["state_sha256"] == expected
        assert not weights_differ(resumed.model, trained_on_pixels.model)


@pytest.mark.full
def test_damage_without_a_way_back_is_told_before_training(
    pixels: ImageData, unfinished: Path
) -> None:
    """Where nothing whole is left, the sentence comes when it is resumed, not at the end."""
    arguments: dict[str, Any] = {"out": unfinished, "model": CONFIG, "recipe": RECIPE}
    folder = unfinished.with_name("run.unfinished")
    for file in folder.glob("checkpoint-*"):
        damage(file, "cut")
    before = sorted(entry.name for entry in folder.iterdir())

    with (
        pytest.warns(UserWarning, match="is damaged; an older one is used"),
        pytest.raises(ValueError, match=r"No checkpoint in .*run.unfinished' is whole, .* put the"),
    ):
        train(pixels, existing="resume", **arguments)
    assert sorted(entry.name for entry in folder.iterdir()) == before
    damage(folder / "settings.json", "cut")
    with pytest.raises(ValueError, match=r"settings.json' is damaged"):
        train(pixels, existing="resume", **arguments)


def test_a_second_training_is_told_of_the_first(pixels: ImageData, tmp_path: Path) -> None:
    """While one is at work, in the first step or in the last, no other touches its folder."""
    refused: list[str] = []

    def on_event(event: Any) -> None:
        for existing in ("refuse", "resume", "overwrite"):
            with pytest.raises(FileExistsError, match=r"Another training to .*run' is at work: "):
                train(pixels, out=tmp_path / "run", model=CONFIG, existing=existing)
            refused.append(existing)
            with pytest.raises(FileExistsError, match=f"process {os.getpid()} on "):
                check_free(tmp_path / "run", existing=existing)

    recipe = dataclasses.replace(BRIEF, epochs=None, steps=1)
    train(pixels, out=tmp_path / "run", model=CONFIG, recipe=recipe, on_event=on_event)
    assert len(refused) == 9
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["photos", "file", "link"])
def test_a_strangers_folder_of_that_name_is_safe(
    name: str, data: ImageData, tmp_path: Path
) -> None:
    """What lies at RUN.unfinished and is no training stays."""
    unfinished = tmp_path / "run.unfinished"
    if name == "photos":
        unfinished.mkdir()
        (unfinished / "a.jpg").touch()
    elif name == "file":
        unfinished.touch()
    else:
        (tmp_path / "elsewhere").mkdir()
        unfinished.symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))

    for existing in ("refuse", "resume", "overwrite"):
        with pytest.raises(FileExistsError, match="holds other things than a training"):
            train(data, out=tmp_path / "run", model=CONFIG, existing=existing)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("out", ["/", ".", "..", "/proc"])
def test_a_place_that_no_run_can_have_is_refused(out: str, data: ImageData) -> None:
    """Before anything is trained: roots, the working folder, and where something is mounted."""
    with pytest.raises((ValueError, FileExistsError), match="give "):
        train(data, out=out, model=CONFIG)


@pytest.mark.full
def test_an_interruption_does_not_replace_a_whole_run(
    pixels: ImageData, trained: Run, tmp_path: Path
) -> None:
    """With "overwrite" the old run stays until the new one is complete."""
    out = shutil.copytree(trained.path, tmp_path / "run")
    before = (out / "model.keras").read_bytes()

    with pytest.raises(TrainingInterrupted):
        train(
            pixels,
            out=out,
            model=CONFIG,
            recipe=BRIEF,
            existing="overwrite",
            on_event=interrupt_in_epoch(1),
        )
    assert (out / "model.keras").read_bytes() == before
    train(pixels, out=out, model=CONFIG, recipe=BRIEF, existing="resume")

    assert Run.load(out).config["result"]["epochs"] == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.full
@pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="Between the steps of an epoch JAX's loop does not read the variables poisoned here",
)
def test_a_loss_that_is_no_number_stops_the_training(pixels: ImageData, tmp_path: Path) -> None:
    """The step is named, and the checkpoint of before is kept."""
    recipe = dataclasses.replace(RECIPE, learning_rate=100.0, gradient_norm=None, warmup=0)

    def poison(event: Any) -> None:
        if not isinstance(event, EpochDone) and event.step == 2:
            model.get_layer("head").kernel.assign(np.full((16, 2), np.nan))

    config = dataclasses.replace(CONFIG, classes=2, include_preprocessing=True)
    model = keras_vit.VisionTransformer(config)
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 3 \(epoch 2\); .* step 2"):
        train(pixels, out=tmp_path / "run", model=model, recipe=recipe, on_event=poison)

    assert (tmp_path / "run.unfinished" / "checkpoint-00000002.npz").is_file()


def test_another_backend_is_refused(
    data: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence says which backends train, and which variable to set."""
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")

    with pytest.raises(ValueError, match=r"TensorFlow or JAX.*set KERAS_BACKEND=tensorflow or"):
        train(data, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("split", "strict", "advice"),
    [("validation", False, "put them back .* resume"), ("train", True, "repair or remove")],
)
@pytest.mark.full
def test_an_image_damaged_after_listing_ends_a_training_by_its_name(
    tmp_path: Path, split: str, strict: bool, advice: str
) -> None:
    """In validation always, as it would be another number; in training where that is asked for."""
    data = load_folder(image_files.write_classes(tmp_path / "images"), strict=strict)
    file = image_files.damage(Path(data.split(split).images[0]))
    with pytest.raises(ValueError, match=rf"'{file}'.*{advice}"):
        train(data, out=tmp_path / "run", model=CONFIG, recipe=BRIEF)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("label", ["two\nlines", "half\udcff", ""])
def test_a_class_that_no_file_can_name_is_refused(
    data: ImageData, tmp_path: Path, label: str
) -> None:
    """Before the training, and not where its labels are written, at the end."""
    named = dataclasses.replace(data, labels=(label, data.labels[1]))
    with pytest.raises(ValueError, match=r"cannot be a line of labels\.txt"):
        train(named, out=tmp_path / "run", model=CONFIG, recipe=BRIEF)
    assert not list(tmp_path.iterdir())
