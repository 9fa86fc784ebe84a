"""Checksums against the definition of each, and archives with every kind of damage."""

import io
import zipfile
from pathlib import Path

import download_rig as rig
import h5py
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from keras_vit.weights import checksums


@hypothesis.given(
    size=st.one_of(st.integers(0, 20), st.integers(2040, 2060), st.integers(4090, 6200)),
    seed=st.integers(0, 9),
)
@hypothesis.settings(deadline=None, max_examples=25, derandomize=True)
def test_crc32c_of_any_length(
    tmp_path_factory: pytest.TempPathFactory, size: int, seed: int
) -> None:
    """Short files, whole stretches and their neighbours agree with the definition of RFC 3720."""
    body = np.random.default_rng(seed).bytes(size)
    file = tmp_path_factory.getbasetemp() / "crc32c"
    file.write_bytes(body)

    assert checksums.crc32c(file) == rig.reference_crc32c(body)
    assert rig.reference_crc32c(b"123456789") == 0xE3069283  # its check value


def test_no_flipped_byte_passes_the_archive_check(tmp_path: Path) -> None:
    """Whatever single byte is damaged: the check fails, or the arrays are unharmed."""
    body = rig.archive(4, floats=8)
    file = tmp_path / "x.npz"
    file.write_bytes(body)
    checksums.check_structure(file, name="x.npz")
    with np.load(file) as arrays:
        expected = arrays["w"]
    refused = 0
    for place in range(len(body)):
        file.write_bytes(rig.flipped(body, place))
        try:
            checksums.check_structure(file, name="x.npz")
        except ValueError:
            refused += 1
            continue
        with np.load(file) as arrays:
            assert all(np.array_equal(arrays[name], expected) for name in arrays), place

    assert refused > len(body) // 2


def sound_files() -> dict[str, bytes]:
    h5 = io.BytesIO()
    with h5py.File(h5, "w") as file:
        file["layers/w"] = np.arange(300.0)
    newest = io.BytesIO()
    with h5py.File(newest, "w", libver="latest") as file:
        file["w"] = np.arange(300.0)
    return {
        "x.safetensors": rig.safetensors(),
        "x.weights.h5": h5.getvalue(),
        "y.h5": newest.getvalue(),
        "x.npz": rig.archive(5, floats=8),
        "x.json": b'{"a": [1]}',
    }


@pytest.mark.parametrize("name", sound_files())
def test_structure_of_each_format(name: str, tmp_path: Path) -> None:
    """A sound file passes; cut at many places (an archive at any), or another's, it does not."""
    files, file = sound_files(), tmp_path / name
    file.write_bytes(files[name])
    checksums.check_structure(file, name=name)
    others = [body for other, body in files.items() if other.split(".")[-1] != name.split(".")[-1]]
    step = 1 if name == "x.npz" else 29
    cuts = [files[name][:length] for length in range(0, len(files[name]), step)]
    for body in (*others, *cuts, b"", b"<html>"):
        file.write_bytes(body)
        with pytest.raises(ValueError, match=r"\w"):
            checksums.check_structure(file, name=name)


def test_archive_that_unpacks_to_too_much(tmp_path: Path) -> None:
    """100 MB of zeros in 100 KB are refused unread; heads of zeros beside weights are not."""
    file = tmp_path / "x.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", bytes(100_000_000))
    with pytest.raises(ValueError, match="unpack to 100,000,000"):
        checksums.check_structure(file, name="x.npz")
    np.savez_compressed(file, w=np.ones(9), head=np.zeros((21_843, 192), np.float32))
    checksums.check_structure(file, name="x.npz")


def test_names_of_no_known_format_pass_unless_they_are_junk(tmp_path: Path) -> None:
    """Tables and other files are kept, a web page in their place is not."""
    file = tmp_path / "index.csv"
    for body in (b"a,b", b"{1}", b"\x1f\x8b"):
        file.write_bytes(body)
        checksums.check_structure(file, name="index.csv")
    for body in (b"", b"<html>", b"version https://git-lfs.github.com/spec/v1"):
        file.write_bytes(body)
        with pytest.raises(ValueError, match="it is a"):
            checksums.check_structure(file, name="index.csv")


def test_the_length_of_a_header_is_no_mark(tmp_path: Path) -> None:
    """A .safetensors file begins with a number, which may look like a pickle or like gzip data."""
    path = tmp_path / "vit.safetensors"
    for length in (0x0280, 0x0480, 0x8B1F):
        header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(length)
        path.write_bytes(length.to_bytes(8, "little") + header + bytes(4))
        assert checksums.junk(path, name=path.name) is None
        checksums.check_structure(path, name=path.name)
    path.write_bytes(b"\x80\x04\x95" + bytes(9))
    assert checksums.junk(path, name=path.name) == "a pickle"
