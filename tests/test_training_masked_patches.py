"""Tests of keras_vit.training.masked_patches, and of pretrain, which trains by them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import conftest
import image_files
import keras
import numpy as np
import pytest
import tensorflow as tf
import variants_oracle
from conftest import TINY, randomize, reloaded, weights_differ
from PIL import Image
from scipy.special import log_softmax
from trainings import Listener, not_refused

from keras_vit import VisionTransformer, ViTConfig, training
from keras_vit.data import Augmentation, Split, load_folder
from keras_vit.training import EpochDone, MaskedPatchModel, Run, masked_patches
from keras_vit.training.masked_patches import Target, patch_targets, plot_reconstructions

TARGETS: tuple[Target, ...] = ("mean_color", "small_patch", "pixels")
CONFIGS = {
    "token": TINY,
    "avg": dataclasses.replace(TINY, pooling="avg", class_token=False),
    "hybrid": dataclasses.replace(
        TINY, input_shape=(32, 48, 3), patch_size=2, resnet_layers=(), include_preprocessing=True
    ),
    "registers, relative": dataclasses.replace(
        TINY, num_registers=2, position_embedding="relative", distillation_token=True
    ),
    "positions in every block": dataclasses.replace(
        TINY, position_embedding="learned_2d", position_placement="every_block", layer_scale=0.5
    ),
    "rotary, norms": dataclasses.replace(TINY, **variants_oracle.MODERN),
    "shared positions": dataclasses.replace(TINY, position_placement="every_block_shared"),
}
# Fields of the network, arguments, and what is said.
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"target": "words"}, r"one of \['mean_color', 'small_patch', 'pixels'\].*'words'"),
    ({}, {"corruption": 0.0}, "corruption must be above 0.*0.0"),
    ({"input_shape": (24, 24, 3), "patch_size": 6}, {"target": "small_patch"}, "of 4.*6"),
    ({"input_shape": (32, 48, 5)}, {}, "5 channels"),
    ({"patch_dropout_rate": 0.5}, {}, "set patch_dropout_rate to 0.*patch_dropout_rate=0.5"),
]


def images_for(config: ViTConfig, count: int = 4) -> np.ndarray:
    images = conftest.images_for(config, count)
    return (images + 1) * np.float32(127.5) if config.include_preprocessing else images


def expected_targets(images: np.ndarray, target: Target, *, pixels: bool) -> np.ndarray:
    """Walks over the patches of 8x8 pixels, and over the parts of each."""
    side = {"mean_color": 8, "small_patch": 2, "pixels": 1}[target]
    scaled = images / 255 if pixels else (images + 1) / 2
    result: list[list[float]] = []
    for image in scaled.astype(np.float64):
        for y in range(0, 32, 8):
            for x in range(0, 48, 8):
                parts: list[float] = []
                for v in range(y, y + 8, side):
                    for u in range(x, x + 8, side):
                        mean = image[v : v + side, u : u + side].mean(axis=(0, 1))
                        if target == "pixels":
                            parts += (2 * mean - 1).tolist()
                        else:
                            red, green, blue = (min(int(8 * value), 7) for value in mean)
                            parts.append(64 * red + 8 * green + blue)
                result.append(parts)
    return np.reshape(result, (len(images), 24, -1))


def test_targets_do_not_depend_on_how_pixels_are_scaled() -> None:
    """Of a model that takes scaled images, colours are those of the pixels they came from.

    The edges of the range are colours 0 and 511.
    """
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3)).astype(np.float32)
    inside = dataclasses.replace(TINY, include_preprocessing=True)
    outside = dataclasses.replace(TINY, image_mean=(0.4, 0.5, 0.6), image_std=(0.2, 0.3, 0.25))
    scaled = VisionTransformer(outside).preprocess_input(pixels)
    for target in TARGETS:
        expected = keras.ops.convert_to_numpy(patch_targets(pixels, inside, target))
        actual = keras.ops.convert_to_numpy(patch_targets(scaled, outside, target))
        np.testing.assert_allclose(actual, expected, atol=1e-5)
        assert actual.dtype.kind == ("f" if target == "pixels" else "i")
    for edge, color in ((-1, 0), (1, 511)):
        image = np.full((1, 32, 48, 3), edge)
        assert np.all(keras.ops.equal(patch_targets(image, TINY, "mean_color"), color))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_loss_is_that_of_the_corrupted_patches(target: Target, config: ViTConfig) -> None:
    """From the predictions, NumPy's mean over corrupted patches alone is the loss.

    Its targets are colours of 3 bits, of whole patches or 4x4 parts, and pixels, on oblong images.
    """
    model = randomize(MaskedPatchModel(config, target=target, seed=0))
    images = images_for(config)
    answer = model(images)
    predictions, corrupted = (
        keras.ops.convert_to_numpy(answer[key]).astype(np.float64)
        for key in ("predictions", "corrupted")
    )
    targets = expected_targets(images, target, pixels=config.include_preprocessing)
    if target == "pixels":
        losses = (predictions - targets) ** 2
    else:
        scores = log_softmax(predictions.reshape(*targets.shape, 512), axis=-1)
        losses = -np.take_along_axis(scores, targets.astype(int)[..., None], axis=-1)
    assert corrupted.sum(axis=1).tolist() == [12] * 4
    actual = model.compute_loss(x=images, y_pred=answer)
    np.testing.assert_allclose(actual, losses[corrupted > 0].mean(), rtol=1e-5)


def test_patches_are_corrupted_in_the_papers_proportions() -> None:
    """Half of the patches: 80 % masked, 10 % another of the same image, 10 % kept."""
    model = MaskedPatchModel(TINY, seed=0)
    model.mask_embedding.assign(np.full((1, 1, 24), -7.0))
    # Each patch's embedding is its number, so that what became of it can be read off.
    embedded = np.tile(np.arange(24, dtype=np.float32)[None, :, None], (500, 1, 24))
    result, corrupted = (
        keras.ops.convert_to_numpy(x) for x in model._corrupt(embedded, (model.seeds,) * 3)
    )
    chosen = corrupted.astype(bool)
    assert (chosen.sum(axis=1) == 12).all()
    np.testing.assert_array_equal(result[~chosen], embedded[~chosen])
    fates = result[chosen][:, 0]
    before = embedded[chosen][:, 0]
    shares = [(fates == -7).mean(), ((fates != -7) & (fates != before)).mean()]
    np.testing.assert_allclose(shares, [0.8, 0.1], atol=0.02)
    assert set(np.unique(fates)) == {-7.0, *range(24)}  # every place gives, none from outside
    assert abs(chosen.mean(axis=0) - 0.5).max() < 0.1  # no place is favoured


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_without_corruption_the_network_is_the_vits(
    config: ViTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every corrupted patch is kept, predictions come of the model's own last tokens."""
    monkeypatch.setattr(masked_patches, "MASKED", 0.0)
    monkeypatch.setattr(masked_patches, "SWAPPED", 0.0)
    model = randomize(MaskedPatchModel(config, seed=0))
    images = images_for(config)
    last = "block_2" if config.norm_after_pooling else "encoder_norm"
    tokens = model.vit.features(images, [last])[last]
    expected = model.predictor(tokens[:, -24:])
    np.testing.assert_allclose(model(images)["predictions"], expected, atol=1e-5)


@pytest.mark.full
def test_fit_lowers_the_loss_and_moves_every_weight() -> None:
    """Compiled, with dropout and labels that nobody looks at, everything before pooling learns."""
    keras.utils.set_random_seed(0)
    config = dataclasses.replace(TINY, num_layers=1, dropout_rate=0.1)
    model = MaskedPatchModel(config, seed=0)
    images = np.tile(images_for(config, 1), (8, 1, 1, 1))
    before = {v.path: keras.ops.convert_to_numpy(v).copy() for v in model.trainable_variables}
    model.compile(keras.optimizers.Adam(0.01))
    history = model.fit(images, np.zeros(8), epochs=12, verbose=0).history
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert history["accuracy"][-1] > history["accuracy"][0]
    for variable in model.trainable_variables:
        assert not np.array_equal(before[variable.path], variable), variable.path
    assert model.evaluate(images, verbose=0, return_dict=True)["loss"] < history["loss"][0]


def test_it_is_saved_as_a_keras_file(tmp_path: Path) -> None:
    """After loading, the Vision Transformer inside has the same bits, and the settings are back."""
    model = randomize(MaskedPatchModel(TINY, target="pixels", corruption=0.25, seed=3))
    again = reloaded(model, tmp_path)
    assert again.get_config() == model.get_config()
    images = images_for(TINY)
    np.testing.assert_array_equal(again.vit(images), model.vit(images))
    np.testing.assert_array_equal(again.mask_embedding, model.mask_embedding)


@pytest.mark.full
def test_mixed_precision_predicts_in_float32() -> None:
    """Under bfloat16 blocks compute in it; predictions and loss do not."""
    model = MaskedPatchModel(TINY, dtype="mixed_bfloat16", seed=0)
    images = images_for(TINY)
    answer = model(images)
    assert keras.backend.standardize_dtype(answer["predictions"].dtype) == "float32"
    assert model.vit.get_layer("block_0").compute_dtype == "bfloat16"
    model.compile("adam")
    assert np.isfinite(model.fit(images, verbose=0).history["loss"][0])


def test_bad_arguments_are_refused() -> None:
    """The error says what is allowed."""
    calls = [
        (functools.partial(MaskedPatchModel, dataclasses.replace(TINY, **fields), **given), text)
        for fields, given, text in WRONG
    ]
    assert not not_refused(calls)


class Knowing:
    """Stands for a model that predicts what is right."""

    def __init__(self, target: Any, *, pixels: bool = False) -> None:
        self.config = dataclasses.replace(TINY, include_preprocessing=pixels)
        self.target = target

    def __call__(self, images: Any, training: bool) -> dict[str, Any]:
        assert not training
        targets = np.asarray(patch_targets(images, self.config, self.target))
        corrupted = np.zeros((len(images), 24), np.float32)
        corrupted[:, ::3] = 1
        if self.target != "pixels":
            targets = np.eye(512, dtype=np.float32)[targets].reshape(len(images), 24, -1)
        return {"predictions": targets, "corrupted": corrupted}


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_right_predictions_look_like_what_was_wanted(target: Target, pixels: bool) -> None:
    """Where nothing is corrupted all are the image; where it is, the target's own coarseness."""
    knowing: Any = Knowing(target, pixels=pixels)
    images = images_for(knowing.config, 2)
    image, hidden, predicted, wanted = masked_patches.reconstruct(knowing, images).values()
    scaled = images / 127.5 - 1 if pixels else images
    np.testing.assert_allclose(image, scaled, atol=1e-6)
    np.testing.assert_allclose(predicted, wanted, atol=1e-6)
    is_corrupted = np.kron(np.arange(24).reshape(4, 6) % 3 == 0, np.ones((8, 8))) > 0
    np.testing.assert_array_equal((hidden == 0).all(axis=(0, 3)), is_corrupted)
    np.testing.assert_allclose(wanted[:, ~is_corrupted], scaled[:, ~is_corrupted], atol=1e-6)
    side = {"mean_color": 8, "small_patch": 2, "pixels": 1}[target]
    parts = scaled.reshape(2, 32 // side, side, 48 // side, side, 3)
    means = parts.mean(axis=(2, 4)).repeat(side, axis=1).repeat(side, axis=2)
    # Of 8 levels none is further from its middle than a sixteenth of the range.
    away = np.abs(wanted - means)[:, is_corrupted].max()
    assert away <= (1e-5 if target == "pixels" else 0.125 + 1e-5)


def test_another_prediction_is_another_picture() -> None:
    """What a random model predicts is drawn, and not the target."""
    model = randomize(MaskedPatchModel(TINY, seed=0))
    _, _, predicted, wanted = masked_patches.reconstruct(model, images_for(TINY, 2)).values()
    assert not np.allclose(predicted, wanted)


def test_the_picture_shows_some_images(tmp_path: Path) -> None:
    """Four rows, as many columns as images, and not more than there are."""
    config = dataclasses.replace(TINY, include_preprocessing=True)
    model = randomize(MaskedPatchModel(config, target="pixels", seed=0))
    images = np.random.default_rng(0).integers(0, 256, (3, 20, 20, 3)).astype(np.uint8)
    split = Split(images=images, targets=np.zeros(3, np.int32))
    widths = []
    for count in (2, 8):
        plot_reconstructions(model, split, tmp_path / "picture.png", count=count)
        with Image.open(tmp_path / "picture.png") as picture:
            widths.append(picture.width)
    assert widths[0] < widths[1]
    assert widths[1] == round(120 * (1.3 * 3 + 1.1))


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_pretraining_learns_whatever_is_predicted(target: Target, tmp_path: Path) -> None:
    """The loss falls; pixels have no accuracy, and everything that is written copes with that.

    The run's model is the plain one without classifier.
    """
    fields: dict[str, Any] = {"patch_size": 4, "num_layers": 2, "classes": None}
    config = dataclasses.replace(
        TINY, input_shape=(16, 24, 3), pooling="avg", include_preprocessing=True, **fields
    )
    model = MaskedPatchModel(config, target=target)
    files = load_folder(image_files.write_classes(tmp_path / "images"))
    masked = training.RECIPES["masked-patches"].changed(epochs=5, batch_size=4, learning_rate=0.01)
    recipe = dataclasses.replace(masked, augmentation=Augmentation())
    listener = Listener()
    run = training.pretrain(
        image_files.in_memory(files, side=16),
        out=tmp_path / "run",
        model=model,
        recipe=recipe,
        on_event=listener,
    )
    epochs = [event for event in listener.events if isinstance(event, EpochDone)]
    assert epochs[-1].loss < 0.9 * epochs[0].loss
    assert min(done.validation_loss for done in epochs) == run.config["result"]["validation_loss"]
    assert (epochs[0].accuracy is None) == (target == "pixels")
    assert (run.config["objective"], run.config["target"]) == ("masked-patches", target)
    opened = Run.load(run.path).model
    assert type(opened) is VisionTransformer
    assert opened.config == config
    assert not weights_differ(opened, run.model)
    assert run.classifier(["plain"]).config.pooling == "token"
    with Image.open(run.path / "reconstructions.png") as picture:
        assert np.asarray(picture.convert("L")).min() < 100


def test_replicas_corrupt_other_patches(strategy: tf.distribute.Strategy) -> None:
    """On two replicas the same images lose other patches, and a step moves the state once."""
    with strategy.scope():
        model = MaskedPatchModel(TINY, seed=0)
    image = tf.constant(images_for(TINY, 1))
    made = strategy.run(tf.function(lambda: model(image, training=True)["corrupted"]))
    first, second = (value.numpy() for value in strategy.experimental_local_results(made))
    assert first.sum() == second.sum() == 12
    assert not np.array_equal(first, second)
    states = {tuple(value.numpy()) for value in model.seeds.state.value.values}
    assert len(states) == 1


def test_evaluation_corrupts_the_same_each_time() -> None:
    """Two epochs are compared on the same patches; training moves on, by a seed of its own."""
    model, other = MaskedPatchModel(TINY, seed=0), MaskedPatchModel(TINY, seed=1)
    images = images_for(TINY, 2)
    seen = [np.asarray(model(images, training=False)["corrupted"]) for _ in range(2)]
    drawn = [np.asarray(each(images, training=True)["corrupted"]) for each in (model, model, other)]
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    assert masked_patches.EVALUATION_SEEDS == (1, 2, 3)
