"""Tests of keras_vit.weights.arrays: hostile and damaged archives."""

import contextlib
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

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


def header(shape: str, descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


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


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path("sprung").write_text, ("!",))


HOSTILE = {
    "a pickled array": (
        {"a.npy": npy(np.array([1, "x"], dtype=object))},
        "pickled; .* never unpickles",
    ),
    "a bare pickle": ({"a.npy": pickle.dumps(_Trap())}, "not a NumPy array"),
    "strings": ({"a.npy": npy(np.array(["x"]))}, "not numbers"),
    "an absurd shape": ({"a.npy": header("(2000000, 2000000, 2000000)")}, "declares shape"),
    "a negative shape": ({"a.npy": header("(-4, -1)") + b"0" * 16}, "declares shape"),
    "a shape of calls": ({"a.npy": header("(__import__('os').system('x'),)")}, "not a NumPy array"),
    "too few values": ({"a.npy": header("(9,)") + b"0" * 32}, "bytes are 32; the file is damaged"),
    "too many values": ({"a.npy": header("(9,)") + b"0" * 40}, "bytes are 40"),
    "an unknown version": ({"a.npy": b"\x93NUMPY\x09\x00" + b"0" * 99}, "not a NumPy array"),
    "nothing": ({"a.npy": b""}, "not a NumPy array"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_arrays_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets a sentence with the file's path, before anything is allocated or run."""
    monkeypatch.chdir(tmp_path)
    members, message = HOSTILE[kind]
    path = archive(tmp_path / "a.npz", members)
    with pytest.raises(ValueError, match=message) as caught:
        read_npz(path)
    assert str(path) in str(caught.value)
    assert not Path("sprung").exists()


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


@hypothesis.settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans()
)
def test_a_damaged_file_is_an_error_or_the_same_arrays(
    position: float, bit: int, cut: bool, tmp_path: Path
) -> None:
    """Whatever bit flips or wherever the file ends: a clean sentence, or arrays that are equal."""
    arrays: dict[str, Any] = {
        f"a{i}": np.random.default_rng(i).standard_normal((3, 5)) for i in range(3)
    }
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    content = bytearray(path.read_bytes())
    index = int(position * len(content))
    if cut:
        content = content[:index]
    else:
        content[index] ^= 1 << bit
    path.write_bytes(content)
    found: dict[str, np.ndarray] = {}
    with contextlib.suppress(ValueError):
        found = {name: array.read() for name, array in read_npz(path).items()}
    for name in set(found) & set(arrays):
        np.testing.assert_array_equal(found[name], arrays[name])
