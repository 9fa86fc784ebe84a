"""Tests of keras_vit.weights.checkpoint and arrays: what is loaded, and what is refused."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import published
import pytest
import safetensors.numpy
from conftest import TINY, assert_same_arrays, randomize
from published import linen

import keras_vit
from keras_vit.model import VisionTransformer
from keras_vit.weights.arrays import read_npz, read_safetensors, safetensors_metadata

HYBRID = dataclasses.replace(TINY, input_shape=(32, 64, 3), patch_size=1, resnet_layers=(2, 1, 1))
MAP = dataclasses.replace(TINY, pooling="map", class_token=False)
Arrays = dict[str, Any]
FC1 = "Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel"


def scanned(arrays: Arrays) -> Arrays:
    """big_vision stacks the blocks' arrays along a first axis."""
    block = "Transformer/encoderblock_0/"
    stacked = {name: a for name, a in arrays.items() if "encoderblock_" not in name}
    for name in [name for name in arrays if name.startswith(block)]:
        layers = [arrays[name.replace("_0/", f"_{i}/", 1)] for i in range(TINY.num_layers)]
        stacked[name.replace("encoderblock_0", "encoderblock")] = np.stack(layers)
    return linen(stacked)


LAYOUTS: dict[str, tuple[keras_vit.ViTConfig, Callable[[Arrays], Arrays]]] = {
    "published": (TINY, lambda arrays: arrays),
    "linen": (TINY, linen),
    "params/": (TINY, lambda arrays: {f"params/{name}": a for name, a in linen(arrays).items()}),
    "params/img/ beside another tower": (
        TINY,
        lambda arrays: (
            {f"params/img/{name}": a for name, a in linen(arrays).items()}
            | {"params/txt/head/kernel": np.ones((2, 2), np.float32), "params/t": np.ones(1)}
        ),
    ),
    "opt/target/ beside optimizer state": (
        TINY,
        lambda arrays: (
            {f"opt/target/{name}": a for name, a in arrays.items()}
            | {f"opt/state/param_states/{name}/momentum": a for name, a in arrays.items()}
        ),
    ),
    "scanned": (TINY, scanned),
    "hybrid": (HYBRID, lambda arrays: arrays),
    "hybrid, norms (1, 1, 1, C)": (
        HYBRID,
        lambda arrays: {
            n: a[None, None, None] if "/gn" in f"/{n}" else a for n, a in arrays.items()
        },
    ),
    "attention pooling": (MAP, linen),
}


def write(path: Path, arrays: Arrays) -> Path:
    np.savez(path, **arrays)
    return path


def loaded(config: keras_vit.ViTConfig, path: Path) -> dict[str, np.ndarray]:
    model = VisionTransformer(config)
    keras_vit.weights.load_weights(model, path)
    return {variable.path: keras.ops.convert_to_numpy(variable) for variable in model.weights}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """What the published layout loads, per config."""
    folder = tmp_path_factory.mktemp("published")
    return {
        str(config): loaded(config, published.write(folder / "weights.npz", config))
        for config in (TINY, HYBRID, MAP)
    }


@pytest.mark.parametrize(("config", "change"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_gives_the_same_model(
    config: keras_vit.ViTConfig, change: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Prefixes, newer names, scanned blocks and odd norm shapes change nothing in the model."""
    path = write(tmp_path / "weights.npz", change(published.arrays(config)))
    found, wanted = loaded(config, path), expected[str(config)]
    assert list(found) == list(wanted)
    assert_same_arrays(found.values(), wanted.values())


def test_positions_are_resampled_to_the_models_grid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A square grid becomes any other, said in one log line."""
    square = dataclasses.replace(TINY, input_shape=(32, 32, 3))
    path = published.write(tmp_path / "weights.npz", square)
    with caplog.at_level(logging.INFO, "keras_vit"):
        found = loaded(TINY, path)
    assert [record.getMessage() for record in caplog.records] == [
        "Position embeddings resampled from a grid of 4x4 to 4x6 patches (original)."
    ]
    table = published.arrays(square)["Transformer/posembed_input/pos_embedding"]
    wanted = keras_vit.weights.resample_positions(table, (4, 4), (4, 6))
    np.testing.assert_array_equal(found["patch_encoder/position_embedding"], wanted)


def test_an_unknown_grid_is_refused(tmp_path: Path) -> None:
    """24 positions are no square; they fit a model of 24 patches and no other."""
    path = published.write(tmp_path / "weights.npz", TINY)
    with pytest.raises(ValueError, match=r"25 positions, not a square grid.*grid is \(4, 4\)"):
        loaded(dataclasses.replace(TINY, input_shape=(32, 32, 3)), path)


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, name: change(arrays[name])}


def of(**fields: Any) -> Callable[[Arrays], Arrays]:
    return lambda _: published.arrays(dataclasses.replace(TINY, **fields))


DAMAGED: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "missing array": (
        lambda arrays: {n: a for n, a in arrays.items() if n != FC1},
        f"missing: {FC1}",
    ),
    "missing block": (of(num_layers=2), "its num_layers is 2, the model's is 3"),
    "extra array": (lambda arrays: {**arrays, "extra": np.ones(3)}, "unexpected: extra"),
    "extra block": (of(num_layers=4), "its num_layers is 4"),
    "transposed": (
        changed(FC1, np.transpose),
        rf"{FC1} \(expected \(24, 48\), received \(48, 24\)\)",
    ),
    "another head": (
        changed("head/kernel", lambda a: a[:, :5]),
        r"head/kernel \(expected \(24, 7\)",
    ),
    "other classes": (of(classes=9), r"head/bias \(expected \(7,\), received \(9,\)\)"),
    "no vision transformer": (lambda arrays: {"a": np.ones(2)}, "does not hold a Vision Transf"),
}


def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """Differences are listed in one sentence, and the model keeps every weight that it had."""
    model = randomize(VisionTransformer(TINY))
    with pytest.raises(FileNotFoundError, match=r"There is no file 'nowhere\.npz'"):
        keras_vit.weights.load_weights(model, "nowhere.npz")
    before = model.get_weights()
    for damage, (change, message) in DAMAGED.items():
        path = write(tmp_path / f"{damage}.npz", change(published.arrays(TINY)))
        with pytest.raises(ValueError, match=message) as caught:
            keras_vit.weights.load_weights(model, path)
        assert str(path) in str(caught.value)
        assert_same_arrays(model.get_weights(), before, damage)


def test_arrays_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    """Scalars, empty, Fortran-ordered, half and integer arrays come back equal."""
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.float32),
        "fortran": np.asfortranarray(generator.standard_normal((3, 4, 5))),
        "half": generator.standard_normal(7).astype(np.float16),
        "folder/int": np.arange(6).reshape(2, 3),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        found = read_npz(tmp_path / "a.npz")
        assert {name: a.shape for name, a in found.items()} == {
            n: a.shape for n, a in arrays.items()
        }
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name].read(), array)
            assert found[name].read().dtype == found[name].dtype == array.dtype


def test_every_dtype_of_safetensors_is_read(tmp_path: Path) -> None:
    """Those that fill whole bytes, in any order of the file, to the bit."""
    other = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    kinds = (*"?bBhHiIqQefdF", *other)
    arrays = {str(np.dtype(kind)): np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    arrays |= {"a scalar": np.array(2.5), "empty": np.zeros((0, 3), "f4")}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors", metadata={"a": "b"})
    found = read_safetensors(tmp_path / "a.safetensors")
    assert safetensors_metadata(tmp_path / "a.safetensors") == {"a": "b"}
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].read().tobytes() == array.tobytes()


def test_path_tricks_in_member_names_write_nothing(tmp_path: Path) -> None:
    """Members are read in place; a name that climbs out of the folder is only a name."""
    names: dict[str, Any] = {"../../evil": np.ones(2), "/etc/x": np.ones(2)}
    np.savez(tmp_path / "a.npz", **names)
    assert set(read_npz(tmp_path / "a.npz")) == set(names)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
