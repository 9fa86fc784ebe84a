"""Tests of keras_vit.weights.arrays; hostile archives are in test_weights_hostile."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_vit.weights.arrays import read_npz


def archive(path: Path, members: dict[str, bytes], **arguments: Any) -> Path:
    with zipfile.ZipFile(path, "w", **arguments) as opened:
        for name, content in members.items():
            opened.writestr(name, content)
    return path


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


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
            assert found[name].read().dtype == array.dtype


def test_path_tricks_in_member_names_write_nothing(tmp_path: Path) -> None:
    """Members are read in place; a name that climbs out of the folder is only a name."""
    path = archive(
        tmp_path / "a.npz", {"../../evil.npy": npy(np.ones(2)), "/etc/x.npy": npy(np.ones(2))}
    )
    assert set(read_npz(path)) == {"../../evil", "/etc/x"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def test_a_web_page_is_not_a_checkpoint(tmp_path: Path) -> None:
    """An HTML page saved under the file's name is told from an archive."""
    (tmp_path / "a.npz").write_text("<html>Not found</html>")
    with pytest.raises(ValueError, match=r"not a whole \.npz file .*fetch it again"):
        read_npz(tmp_path / "a.npz")
