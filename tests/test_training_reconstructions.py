"""Tests of keras_vit.training.masked_patches."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, randomize
from PIL import Image

from keras_vit.data import Split
from keras_vit.training import MaskedPatchModel, reconstruct
from keras_vit.training.masked_patches import patch_targets, plot_reconstructions

TARGETS = ("mean_color", "small_patch", "pixels")


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
def test_right_predictions_look_like_what_was_wanted(target: str, pixels: bool) -> None:
    """Where nothing is corrupted all are the image; where it is, the target's own coarseness."""
    low, high = (0, 255) if pixels else (-1, 1)
    images = np.random.default_rng(0).uniform(low, high, (2, 32, 48, 3)).astype(np.float32)
    knowing: Any = Knowing(target, pixels=pixels)
    actual = reconstruct(knowing, images)
    scaled = images / 127.5 - 1 if pixels else images
    np.testing.assert_allclose(actual.images, scaled, atol=1e-6)
    np.testing.assert_allclose(actual.predicted, actual.wanted, atol=1e-6)
    side = {"mean_color": 8, "small_patch": 2, "pixels": 1}[target]
    for row in range(4):
        for column in range(6):
            place = np.s_[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
            is_corrupted = (6 * row + column) % 3 == 0
            np.testing.assert_array_equal(actual.hidden[place] == 0, is_corrupted)
            if not is_corrupted:
                np.testing.assert_allclose(actual.wanted[place], scaled[place], atol=1e-6)
                continue
            parts = scaled[place].reshape(2, 8 // side, side, 8 // side, side, 3)
            means = parts.mean(axis=(2, 4)).repeat(side, axis=1).repeat(side, axis=2)
            # Of 8 levels none is further from its middle than a sixteenth of the range.
            away = np.abs(actual.wanted[place] - means).max()
            assert away <= (1e-5 if target == "pixels" else 0.125 + 1e-5)


def test_another_prediction_is_another_picture() -> None:
    """What a random model predicts is drawn, and not the target."""
    model = randomize(MaskedPatchModel(TINY, seed=0))
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 48, 3)).astype(np.float32)
    actual = reconstruct(model, images)
    assert actual.corrupted.sum() == 24
    assert not np.allclose(actual.predicted, actual.wanted)


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
