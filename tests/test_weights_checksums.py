"""Checksums against the definition of each, and archives with every kind of damage."""

from pathlib import Path

import download_rig as rig
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from keras_vit.weights import _checksums


def test_crc32c_of_the_standard(tmp_path: Path) -> None:
    """The check value of RFC 3720 comes out, from both implementations."""
    file = tmp_path / "check"
    file.write_bytes(b"123456789")

    assert _checksums.crc32c(file) == rig.reference_crc32c(b"123456789") == 0xE3069283


@hypothesis.given(
    size=st.one_of(st.integers(0, 20), st.integers(2040, 2060), st.integers(4090, 6200)),
    seed=st.integers(0, 9),
)
@hypothesis.settings(deadline=None, max_examples=25, derandomize=True)
def test_crc32c_of_any_length(
    tmp_path_factory: pytest.TempPathFactory, size: int, seed: int
) -> None:
    """Short files, whole stretches and their neighbours agree with the definition."""
    body = np.random.default_rng(seed).bytes(size)
    file = tmp_path_factory.getbasetemp() / "crc32c"
    file.write_bytes(body)

    assert _checksums.crc32c(file) == rig.reference_crc32c(body)


def test_no_flipped_byte_passes_the_archive_check(tmp_path: Path) -> None:
    """Whatever single byte is damaged: the check fails, or the arrays are unharmed."""
    body = rig.archive(4, floats=8)
    file = tmp_path / "x.npz"
    file.write_bytes(body)
    _checksums.check_structure(file, name="x.npz")
    with np.load(file) as arrays:
        expected = arrays["w"]
    refused = 0
    for place in range(len(body)):
        file.write_bytes(rig.flipped(body, place))
        try:
            _checksums.check_structure(file, name="x.npz")
        except ValueError:
            refused += 1
            continue
        with np.load(file) as arrays:
            assert all(np.array_equal(arrays[name], expected) for name in arrays), place

    assert refused > len(body) // 2


def test_no_cut_passes_the_archive_check(tmp_path: Path) -> None:
    """Every proper prefix of an archive is refused."""
    body = rig.archive(4, floats=8)
    file = tmp_path / "x.npz"
    for length in range(len(body)):
        file.write_bytes(body[:length])
        with pytest.raises(ValueError, match="not a whole zip archive"):
            _checksums.check_structure(file, name="x.npz")
