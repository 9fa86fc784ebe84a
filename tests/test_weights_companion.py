"""Tests of keras_vit.weights.companion: what save_npz writes beside the arrays."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
from conftest import TINY, randomize

import keras_vit
from keras_vit.model import VisionTransformer
from keras_vit.weights.companion import needs_companion

EXACT = dataclasses.replace(TINY, activation="gelu", image_mean=(0.1, 0.2, 0.3))


def saved(config: keras_vit.ViTConfig, path: Path, seed: int = 0) -> Path:
    return keras_vit.weights.save_npz(randomize(VisionTransformer(config), seed), path)


def test_the_companion_is_the_config(tmp_path: Path) -> None:
    """vit.json beside vit.npz holds every field, as JSON, after any number of writes.

    NumPy reads the arrays as ever; 4 by 6 patches, which the layout alone refuses, are resampled.
    """
    path = saved(TINY, tmp_path / "vit.npz")
    assert keras_vit.load(path).config == TINY
    assert keras_vit.load(path, input_shape=(64, 64, 3)).config.grid == (8, 8)
    path = saved(EXACT, tmp_path / "vit.npz", seed=1)
    assert keras_vit.load(path).config == EXACT
    assert {file.name for file in tmp_path.iterdir()} == {"vit.npz", "vit.json"}
    record = json.loads((tmp_path / "vit.json").read_text())
    assert keras_vit.ViTConfig.from_dict(record["config"]) == EXACT
    with np.load(path, allow_pickle=False) as arrays:
        assert set(arrays.files) == set(published.arrays(EXACT))


MARKED: dict[str, tuple[dict[str, Any], bool]] = {
    "GELU": ({"activation": "gelu"}, True),
    "epsilon": ({"layer_norm_epsilon": 1e-5}, True),
    "mean": ({"image_mean": (0.1, 0.2, 0.3)}, True),
    "average beside a class token": ({"pooling": "avg"}, True),
    "original": ({}, False),
    "original with dropout": ({"dropout_rate": 0.1}, False),
    "original, average": ({"pooling": "avg", "class_token": False}, False),
    "original, map": ({"pooling": "map", "class_token": False}, False),
}


@pytest.mark.parametrize("case", MARKED)
def test_a_lost_companion_is_missed_where_it_matters(case: str, tmp_path: Path) -> None:
    """Without it an .npz is the original's or refused, never another network in silence."""
    fields, matters = MARKED[case]
    config = dataclasses.replace(TINY, **fields)
    assert needs_companion(config) is matters
    path = saved(config, tmp_path / "vit.npz")
    (tmp_path / "vit.json").unlink()
    model = VisionTransformer(config)
    if not matters:
        keras_vit.weights.load(model, path)
        return
    for damaged in (None, "{", "[]"):
        if damaged is not None:
            (tmp_path / "vit.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"written with vit\.json beside it.*put it back"):
            keras_vit.weights.load(model, path)


def test_a_companion_of_other_arrays_is_refused(tmp_path: Path) -> None:
    """A stale file, of the same sizes too, is not believed."""
    first, second = saved(TINY, tmp_path / "a.npz"), saved(EXACT, tmp_path / "b.npz", seed=1)
    shutil.copy(second, first)
    with pytest.raises(ValueError, match=r"a\.json describes other arrays than those of a\.npz"):
        keras_vit.load(first)


def test_a_companion_of_another_model_is_refused(tmp_path: Path) -> None:
    """A config that was edited by hand is held against its checksum, and against the arrays."""
    path = saved(TINY, tmp_path / "a.npz")
    record = json.loads((tmp_path / "a.json").read_text())
    record["config"]["num_heads"] = 2
    (tmp_path / "a.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"a\.json is damaged or was changed.*delete the line"):
        keras_vit.load(path)
    del record["config_sha256"]
    (tmp_path / "a.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"says num_heads=2 and the arrays of a\.npz say 3"):
        keras_vit.load(path)
    record["config"]["heads"] = 2
    (tmp_path / "a.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"holds no whole ViTConfig.*'heads'"):
        keras_vit.load(path)


def test_a_json_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """A foreign .npz may have any file beside it."""
    path, model = published.write(tmp_path / "a.npz", TINY), VisionTransformer(TINY)
    for content in ("{}", "[1]", "not json", '{"format": "other"}'):
        (tmp_path / "a.json").write_text(content)
        keras_vit.weights.load(model, path)


def test_a_users_json_file_is_not_overwritten(tmp_path: Path) -> None:
    """What stands where the companion goes stays, and nothing is written."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"config\.json is there and no companion"):
        saved(TINY, tmp_path / "config.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
