"""Tests of keras_vit.training.train: the run that it leaves, and what it refuses."""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_files
import keras
import numpy as np
import pytest
from conftest import FLOAT32, weights_differ
from trainings import CONFIG, in_memory, noise, not_refused, state

import keras_vit
from keras_vit import training
from keras_vit.config import Ending, ending_of
from keras_vit.data import Augmentation, ImageData, load_folder
from keras_vit.evaluation import evaluate
from keras_vit.training import RECIPES, Execution, Run, pretrain, train
from keras_vit.training.run import Existing

RECIPE = dataclasses.replace(
    RECIPES["scratch"],
    epochs=2,
    batch_size=8,
    learning_rate=0.01,
    augmentation=Augmentation(crop=0.7, flip=True, rotation=5),
)
# For what augmentation has no part in.
BRIEF = dataclasses.replace(RECIPE, epochs=1, augmentation=Augmentation())
# Making an iterator that decodes files takes longer than a run on these.
PIXELS = in_memory(noise(np.arange(16) % 2), noise(np.arange(4) % 2), labels="ab")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    return load_folder(image_files.write_classes(tmp_path_factory.mktemp("images")))


@pytest.fixture(scope="module")
def trained(data: ImageData, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run on the image files; tests must not change it."""
    return train(data, out=tmp_path_factory.mktemp("runs") / "run", model=CONFIG, recipe=RECIPE)


def test_the_run_directory_is_complete(trained: Run, data: ImageData) -> None:
    """Model, config, labels, splits, history and curves are there, and nothing else.

    The model is made for the data: it takes pixels and gives logits of its classes.
    """
    names = sorted(file.name for file in trained.path.iterdir())
    config = json.loads((trained.path / "config.json").read_text())
    made = trained.model.config

    assert " ".join(names) == (
        "config.json curves.png history.csv labels.txt model.keras splits.csv tensorboard"
    )
    assert (trained.path / "labels.txt").read_text() == "plain\nstriped\n"
    assert training.Recipe.from_dict(config["recipe"]) == RECIPE
    assert keras_vit.ViTConfig.from_dict(config["model"]) == made
    assert (made.classes, made.include_preprocessing, made.classifier_activation) == (2, True, None)
    assert config["data"]["images"] == data.counts
    assert config["result"]["finished"] is True
    versions = {"keras_vit", "backend", "keras", "tensorflow", "numpy", "python"}
    assert set(config["versions"]) == versions
    images = Run.load(trained.path).data()
    assert images.counts == data.counts
    assert images.test.images.tolist() == data.test.images.tolist()


def test_the_saved_model_is_the_best_epoch(trained: Run, data: ImageData) -> None:
    """Its accuracy is what history.csv calls the best; it has no optimizer, of twice its size."""
    opened = Run.load(trained.path)
    actual = evaluate(opened.model, data.validation, labels=opened.labels)
    result = trained.config["result"]

    assert not weights_differ(opened.model, trained.model)
    assert actual.accuracy == pytest.approx(result["validation_accuracy"], abs=1e-6)
    assert opened.labels == data.labels
    saved = keras.saving.load_model(trained.path / "model.keras")
    assert getattr(saved, "optimizer", None) is None


def test_one_seed_gives_one_model(tmp_path: Path) -> None:
    """Twice the same seed gives the same bits, another seed gives others."""
    states = [
        state(train(PIXELS, out=tmp_path / str(n), model=CONFIG, recipe=RECIPE, seed=seed))
        for n, seed in enumerate((0, 0, 1))
    ]
    assert states[0] == states[1] != states[2]


def by_hand(activation: str | None = "softmax", **changes: Any) -> keras.Model:
    """A Vision Transformer inside a functional model, as Keras' guides build them."""
    config = dataclasses.replace(CONFIG, classes=None, include_preprocessing=True)
    base = keras_vit.VisionTransformer(dataclasses.replace(config, **changes))
    images = keras.Input(config.input_shape)
    return keras.Model(images, keras.layers.Dense(2, activation)(base(images)))


def test_a_model_built_by_hand_trains(tmp_path: Path) -> None:
    """Exactly; the run holds it, and the given one stays where it is."""
    run = train(PIXELS, out=tmp_path / "run", model=by_hand(), recipe=BRIEF)
    loaded = Run.load(run.path).model
    black = np.zeros((2, *CONFIG.input_shape), np.float32)

    assert isinstance(loaded, keras_vit.ExactModel)
    np.testing.assert_allclose(loaded.predict(black, verbose=0), run.model(black), atol=FLOAT32)
    assert run.config["model"]["layers"][1].startswith("VisionTransformer")


def vit(**changes: Any) -> keras_vit.VisionTransformer:
    return keras_vit.VisionTransformer(dataclasses.replace(CONFIG, **changes))


def test_a_run_says_what_its_loss_trained(tmp_path: Path) -> None:
    """Independent classes, of which evaluation has the training's own loss."""
    recipe = dataclasses.replace(BRIEF, loss="sigmoid")
    given = vit(classes=2, include_preprocessing=True)
    given.compile("sgd", "binary_crossentropy")  # trains where it is
    for place, model in enumerate((CONFIG, by_hand(None), given)):
        run = train(PIXELS, out=tmp_path / str(place), model=model, recipe=recipe)
        loaded = Run.load(run.path).model
        assert ending_of(loaded) == Ending("multi_label_classification")
        evaluated = evaluate(loaded, PIXELS.validation, labels=PIXELS.labels)
        assert evaluated.loss == pytest.approx(run.config["result"]["validation_loss"], rel=1e-4)


def untrained(event: object) -> None:
    raise AssertionError(event)


def wrong_arguments(data: ImageData) -> list[tuple[Callable[..., Run], dict[str, Any], str]]:
    """Of each function, arguments that it refuses with this error."""
    nothing = data.validation.take([])
    unnamed = [
        dataclasses.replace(data, labels=(label, data.labels[1]))
        for label in ("two\nlines", "half\udcff", "")
    ]
    decayed = dataclasses.replace(RECIPE, layer_decay=0.5)
    rows: list[tuple[Callable[..., Run], dict[str, Any], str]] = [
        # Classes that the data has not, and pixels that are not 0..255.
        (train, {"model": vit(classes=3, include_preprocessing=True)}, "classes=3, the data 2"),
        (train, {"model": vit(classes=2)}, "include_preprocessing=False"),
        (train, {"model": by_hand("sigmoid")}, "loss='softmax' trains a model that ends in logits"),
        (train, {"model": by_hand(include_preprocessing=False)}, "must take pixels 0..255"),
        (
            train,
            {"model": by_hand(), "recipe": decayed},
            "layer_decay cannot be changed in a model that is built by",
        ),
        (train, {"model": training.MaskedPatchModel(CONFIG)}, "TypeError: .*give it to `pretrain`"),
        (pretrain, {"model": training.MaskedPatchModel(CONFIG)}, "include_preprocessing=False"),
        (
            pretrain,
            {"model": vit()},
            "TypeError: .*a ViTConfig or a MaskedPatchModel. .*VisionTransformer",
        ),
        # Without validation images no epoch could be called the best.
        (train, {"data": dataclasses.replace(data, validation=nothing)}, "no validation images"),
        *((train, {"data": each}, r"cannot be a line of labels\.txt") for each in unnamed),
        # Roots, the working folder, and where something is mounted.
        *((train, {"out": out}, "Error: .*give ") for out in ("/", ".", "..", "/proc")),
    ]
    if keras.backend.backend() == "tensorflow":
        odd = dataclasses.replace(RECIPE, batch_size=7)
        mirrored: dict[str, Any] = {"recipe": odd, "execution": Execution(strategy="mirrored")}
        rows.append((train, mirrored, r"7 images .* among 2 replicas; choose a multiple of 2"))
    return rows


def test_wrong_arguments_are_refused_first(data: ImageData, tmp_path: Path) -> None:
    """One sentence each, before anything is trained, and nothing is left."""
    defaults = {"data": data, "out": tmp_path / "run", "model": CONFIG, "recipe": RECIPE}

    calls = [
        (functools.partial(function, on_event=untrained, **{**defaults, **given}), text)
        for function, given, text in wrong_arguments(data)
    ]
    assert not not_refused(calls, (ValueError, TypeError, FileExistsError))
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_safe(trained: Run, tmp_path: Path) -> None:
    """A run, and what lies at RUN.unfinished and is no training: photos, a file, a link."""
    (tmp_path / "photos.unfinished").mkdir()
    (tmp_path / "photos.unfinished" / "a.jpg").touch()
    (tmp_path / "file.unfinished").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.unfinished").symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))

    call = functools.partial(train, PIXELS, model=CONFIG, recipe=RECIPE, on_event=untrained)
    choices: tuple[Existing, ...] = ("refuse", "resume", "overwrite")
    calls = [
        (
            functools.partial(call, out=tmp_path / name, existing=existing),
            "holds other things than a training" if name == "photos" else "is not a folder",
        )
        for name in ("photos", "file", "link")
        for existing in choices
    ]
    calls.append((functools.partial(call, out=trained.path), "already holds a run"))
    assert not not_refused(calls, FileExistsError)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_run_is_returned_by_resuming(trained: Run, data: ImageData) -> None:
    """Nothing is trained again; with other settings it is refused, the setting named."""
    arguments: dict[str, Any] = {"out": trained.path, "model": CONFIG, "existing": "resume"}
    again = train(data, recipe=RECIPE, on_event=untrained, **arguments)

    assert again.config == trained.config
    assert not weights_differ(again.model, trained.model)
    with pytest.raises(ValueError, match=r"was started with recipe.epochs=2, not 1"):
        train(data, recipe=dataclasses.replace(RECIPE, epochs=1), **arguments)


def test_a_second_training_is_told_of_the_first(tmp_path: Path) -> None:
    """While one is at work, in the first step or in the last, no other touches its folder."""
    refused: list[str] = []
    choices: tuple[Existing, ...] = ("refuse", "resume", "overwrite")

    def on_event(event: object) -> None:
        for existing in choices:
            with pytest.raises(FileExistsError, match=r"Another training to .*run' is at work: "):
                train(PIXELS, out=tmp_path / "run", model=CONFIG, existing=existing)
            refused.append(existing)
            with pytest.raises(FileExistsError, match=f"process {os.getpid()} on "):
                training.check_free(tmp_path / "run", existing=existing)

    recipe = dataclasses.replace(BRIEF, epochs=None, steps=1)
    train(PIXELS, out=tmp_path / "run", model=CONFIG, recipe=recipe, on_event=on_event)
    assert len(refused) == 9
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.full
@pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="Between the steps of an epoch JAX's loop does not read the variables poisoned here",
)
def test_a_loss_that_is_no_number_stops_the_training(tmp_path: Path) -> None:
    """The step is named, and the checkpoint of before is kept."""
    recipe = dataclasses.replace(RECIPE, learning_rate=100.0, gradient_norm=None, warmup=0)
    model = vit(classes=2, include_preprocessing=True)

    def poison(event: Any) -> None:
        if not isinstance(event, training.EpochDone) and event.step == 2:
            model.get_layer("head").kernel.assign(np.full((16, 2), np.nan))

    with pytest.raises(FloatingPointError, match=r"loss is nan at step 3 \(epoch 2\); .* step 2"):
        train(PIXELS, out=tmp_path / "run", model=model, recipe=recipe, on_event=poison)
    assert (tmp_path / "run.unfinished" / "checkpoint-00000002.npz").is_file()


@pytest.mark.full
def test_an_image_damaged_after_listing_ends_a_training_by_its_name(
    data: ImageData, tmp_path: Path
) -> None:
    """In validation always, as it would be another number; in training where that is asked for."""
    folder = Path(data.train.images[0]).parents[1]
    for split, advice in (("validation", "put them back .* resume"), ("train", "repair or remove")):
        copied = shutil.copytree(folder, tmp_path / split)
        images = load_folder(copied, strict=split == "train")
        file = image_files.damage(Path(images.split(split).images[0]))
        with pytest.raises(ValueError, match=rf"'{file}'.*{advice}"):
            train(images, out=tmp_path / "run", model=CONFIG, recipe=BRIEF)
        assert not (tmp_path / "run").exists()
        shutil.rmtree(tmp_path / "run.unfinished")
