"""Tests of keras_vit.weights.arrays; hostile archives are in test_weights_hostile."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from keras_vit.weights.arrays import read_npz, read_safetensors, safetensors_metadata


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
